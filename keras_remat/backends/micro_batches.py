"""What training a batch in pieces means, whatever the framework: which models can be cut, and
where.

The pieces' gradients are weighted by their share of the samples, so for losses that are means over
the batch (Keras's default reduction) the sum is the gradient of the whole batch, up to the order of
floating-point additions. What looks at a whole batch does not get to see one: batch normalization
normalizes over a micro-batch, and its moving averages move once per micro-batch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from keras_remat.errors import UnsupportedModelError

SEPARATION = "next_micro_batch"
"""The scope of operations that only make a micro-batch wait for the one before."""


def check_can_be_cut(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` when summed gradients of pieces would not be those of
    the batch: the model has a ``train_step`` of its own, or a loss that is no mean over the
    batch."""
    import keras

    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a train_step of its own, which cannot be cut into micro-batches."
        )
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "sum_over_batch_size") not in ("sum_over_batch_size", "mean"):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} reduces by {loss.reduction!r}; only means over the batch can be cut into micro-batches."
            )


def pieces(samples: int, count: int) -> list[tuple[int, int]]:
    """First sample and end of each of ``count`` micro-batches of about the same size."""
    return list(pairwise(samples * i // count for i in range(count + 1)))
