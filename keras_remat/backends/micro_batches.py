"""What training a batch in pieces means, whatever the framework: which models can be cut, and
where.

The pieces' gradients are weighted by their share of the samples, so for losses that are means over
the batch (Keras's default reduction) the sum is the gradient of the whole batch, up to the order of
floating-point additions. What looks at a whole batch does not get to see one: batch normalization
normalizes over a micro-batch, and its moving averages move once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from keras_remat.errors import UnsupportedModelError

SEPARATION = "next_micro_batch"
"""The scope of operations that only make a micro-batch wait for the one before."""


def has_batch_normalization(model: Any) -> bool:
    """Returns whether the model keeps averages of what its layers get."""
    return any(variable.name == "moving_mean" for variable in model.non_trainable_variables)


def check_can_be_cut(model: Any, layers: Iterable[Any]) -> None:
    """Raises :class:`UnsupportedModelError` when summed gradients of pieces would not be those of
    the batch: the model has a ``train_step`` of its own, or a loss that is no mean over the batch.

    Args:
        model: compiled.
        layers: all of its layers, nested ones too.
    """
    import keras

    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a train_step of its own, which cannot be cut into "
            "micro-batches."
        )
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "sum_over_batch_size") not in ("sum_over_batch_size", "mean"):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} reduces by {loss.reduction!r}; only means over the "
                "batch can be cut into micro-batches."
            )
    for layer in layers:
        if getattr(layer, "activity_regularizer", None) is not None:
            raise UnsupportedModelError(
                f"The activity regularizer of {layer.name!r} sums over the batch; only means "
                "over the batch can be cut into micro-batches."
            )


def check_no_masks(masks: Iterable[Any]) -> None:
    """Raises :class:`UnsupportedModelError` where outputs have masks: the loss is a mean over what
    is not masked, of which every piece has another share."""
    if any(mask is not None for mask in masks):
        raise UnsupportedModelError(
            "The model's output is masked: its loss is a mean over what is not masked, and the "
            "pieces of a batch do not have equal shares of that."
        )


def pieces(samples: int, count: int) -> list[tuple[int, int]]:
    """First sample and end of each of ``count`` micro-batches of about the same size."""
    return list(pairwise(samples * i // count for i in range(count + 1)))
