"""Trains a batch in micro-batches whose gradients are added up, as one optimizer step.

:mod:`keras_remat.backends.micro_batches` splits the batch. The step is written out micro-batch
after micro-batch and traced like any other. XLA would be free to run them side by side, so the
samples of each are made to depend on the gradients of the one before
(:mod:`keras_remat.backends.jax.barrier`). Not ``lax.scan``: its body would be one op, and nothing
in it could be planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_remat.backends.jax import private
from keras_remat.backends.jax.barrier import guard, never
from keras_remat.backends.micro_batches import (
    SEPARATION,
    check_can_be_split,
    check_no_masks,
    micro_batches_of,
)


def accumulated_train_step(model: Any, count: int) -> Callable[[Any, Any], Any]:
    """Returns a train step ``(state, batch) → (logs, state)`` for ``model`` that trains a batch in
    ``count`` micro-batches.

    Raises:
        UnsupportedModelError: the model has a ``train_step`` or ``compute_loss`` of its own, or a
            loss that is no mean over the batch; when traced, also for masked outputs and for arrays
            that do not have the batch's samples.
    """
    check_can_be_split(model)

    def train_step(state: private.State, data: Any) -> tuple[Any, private.State]:
        trainable, others, slots, metrics = state
        gradients: Any = None
        logs: Any = None
        for micro_batch, _, share in micro_batches_of(data, count):
            if gradients is not None:
                with jax.named_scope(SEPARATION):
                    condition = never([g for g in jax.tree.leaves(gradients) if g.size])
                    micro_batch = jax.tree.map(
                        lambda leaf, condition=condition: guard(leaf, condition), micro_batch
                    )
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(micro_batch)

            def weighted_loss(
                trainable: Any, others: Any, metrics: Any, share: float, *micro_batch: Any
            ) -> Any:
                loss, updates = model.compute_loss_and_updates(
                    trainable,
                    others,
                    metrics,
                    *micro_batch,
                    training=True,
                    optimizer_variables=slots,
                )
                check_no_masks(updates[1])
                return loss * share, updates

            differentiated = jax.grad(weighted_loss, has_aux=True)
            new, (loss, predicted, others, metrics) = differentiated(
                trainable, others, metrics, share, x, y, sample_weight
            )
            gradients = new if gradients is None else jax.tree.map(jax.numpy.add, gradients, new)
            logs, metrics = private.update_metrics(
                model, metrics, loss, x, y, predicted, sample_weight
            )
        trainable, slots = model.optimizer.stateless_apply(slots, gradients, trainable)
        return logs, (trainable, others, slots, metrics)

    return train_step
