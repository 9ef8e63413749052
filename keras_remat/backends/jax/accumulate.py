"""One optimizer step from a batch that is trained in pieces: the gradients of micro-batches, added up.

The pieces' gradients are weighted by their share of the samples, so for losses that are means over the batch (Keras's default reduction) the
sum is the gradient of the whole batch, up to the order of floating-point additions. What looks at a whole batch does not get to see one:
batch normalization normalizes over a micro-batch, and its moving averages move once per micro-batch.

The step is written out micro-batch after micro-batch and traced like any other. XLA would be free to run the pieces side by side, so the
samples of each are made to depend on the gradients of the one before (:mod:`keras_remat.backends.jax.guard`). Not ``lax.scan``: its body would be one
op, and nothing in it could be planned.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import keras

from keras_remat.backends.examples import batch_size_of
from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import SEPARATION
from keras_remat.backends.jax.guard import guard, never
from keras_remat.errors import UnsupportedModelError


def accumulated_train_step(model: Any, count: int) -> Callable[[Any, Any], Any]:
    """A train step ``(state, batch) → (logs, state)`` for ``model`` that trains a batch in ``count`` micro-batches.

    Raises:
        UnsupportedModelError: the model has a ``train_step`` of its own, or a loss that is no mean over the batch.
    """
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a train_step of its own, which cannot be cut into micro-batches."
        )
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "sum_over_batch_size") not in ("sum_over_batch_size", "mean"):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} reduces by {loss.reduction!r}; only means over the batch can be cut into micro-batches."
            )

    def train_step(state: private.State, data: Any) -> tuple[Any, private.State]:
        trainable, others, slots, metrics = state
        total = batch_size_of(data)
        edges = [total * i // count for i in range(count + 1)]
        gradients: Any = None
        logs: Any = None
        for start, stop in pairwise(edges):
            piece = jax.tree.map(lambda leaf, rows=slice(start, stop): leaf[rows], data)
            if gradients is not None:
                with jax.named_scope(SEPARATION):
                    condition = never([g for g in jax.tree.leaves(gradients) if g.size])
                    piece = jax.tree.map(lambda leaf, condition=condition: guard(leaf, condition), piece)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)

            def weighted_loss(trainable: Any, others: Any, metrics: Any, share: float, *piece: Any) -> Any:
                loss, updates = model.compute_loss_and_updates(
                    trainable, others, metrics, *piece, training=True, optimizer_variables=slots
                )
                return loss * share, updates

            differentiated = jax.grad(weighted_loss, has_aux=True)
            new, (loss, predicted, others, metrics) = differentiated(
                trainable, others, metrics, (stop - start) / total, x, y, sample_weight
            )
            gradients = new if gradients is None else jax.tree.map(jax.numpy.add, gradients, new)
            logs, metrics = private.update_metrics(model, metrics, loss, x, y, predicted, sample_weight)
        trainable, slots = model.optimizer.stateless_apply(slots, gradients, trainable)
        return logs, (trainable, others, slots, metrics)

    return train_step
