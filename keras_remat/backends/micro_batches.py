"""What training a batch in pieces means, whatever the framework: which models can be cut, and
where.

The pieces' gradients are weighted by their share of the samples, so for losses that are means over
the batch (Keras's default reduction) the sum is the gradient of the whole batch, up to the order of
floating-point additions. What looks at a whole batch does not get to see one: batch normalization
normalizes over a micro-batch, and its moving averages move once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.keras_private import layers, masks
from keras_remat.errors import UnsupportedModelError

SEPARATION = "next_micro_batch"
"""The scope of operations that only make a micro-batch wait for the one before."""

STEP_METHODS = ("train_step", "compute_loss", "stateless_compute_loss", "compute_loss_and_updates")
"""What a model may override, and then computes a loss that need be no mean over the batch."""


def has_batch_normalization(model: Any) -> bool:
    """Returns whether the model keeps averages of what its layers get."""
    return any(variable.name == "moving_mean" for variable in model.non_trainable_variables)


def check_can_be_cut(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` when summed gradients of pieces would not be those of
    the batch: the model has a ``train_step`` or ``compute_loss`` of its own, or a loss that is no
    mean over the batch."""
    import keras

    for name in STEP_METHODS:
        keras_own = getattr(keras.Model, name, None)
        if name in vars(model) or getattr(type(model), name, None) is not keras_own:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a {name} of its own, which cannot be cut into "
                "micro-batches."
            )
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", "sum_over_batch_size") not in ("sum_over_batch_size", "mean"):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} reduces by {loss.reduction!r}; only means over the "
                "batch can be cut into micro-batches."
            )
    for layer in layers(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise UnsupportedModelError(
                f"The activity regularizer of {layer.name!r} sums over the batch; only means "
                "over the batch can be cut into micro-batches."
            )


def check_no_masks(predicted: Any) -> None:
    """Raises :class:`UnsupportedModelError` where outputs have masks: the loss is a mean over what
    is not masked, of which every piece has another share."""
    if any(mask is not None for mask in masks(predicted)):
        raise UnsupportedModelError(
            "The model's output is masked: its loss is a mean over what is not masked, and the "
            "pieces of a batch do not have equal shares of that."
        )


@contextmanager
def checked_losses() -> Iterator[None]:
    """Raises :class:`UnsupportedModelError` inside, where a loss is computed whose mean over the
    batch is not made of the means over its pieces.

    That shows only in what the loss returns before it is reduced: a mask of its own (an ignored
    class), or fewer numbers than one for every sample (Dice and Tversky, and a function that
    reduces by itself, of which nobody knows whether by a sum or a mean).
    """
    import keras

    original = keras.losses.Loss.__call__

    def call(loss: Any, *args: Any, **options: Any) -> Any:
        compute, own = loss.call, vars(loss).get("call")

        def checked(y_true: Any, y_pred: Any) -> Any:
            values = compute(y_true, y_pred)
            _check_values(loss.name, values, y_pred)
            return values

        loss.call = checked
        try:
            return original(loss, *args, **options)
        finally:
            del loss.call
            if own is not None:
                loss.call = own

    keras.losses.Loss.__call__ = call
    try:
        yield
    finally:
        keras.losses.Loss.__call__ = original


def _check_values(name: str, values: Any, predicted: Any) -> None:
    if any(mask is not None for mask in masks(values)):
        raise UnsupportedModelError(
            f"The loss {name!r} is a mean over what it does not mask, and the pieces of a batch "
            "do not have equal shares of that."
        )
    shape, wanted = tuple(values.shape), tuple(predicted.shape)
    if not shape or (None not in (*shape[:1], *wanted[:1]) and shape[:1] != wanted[:1]):
        raise UnsupportedModelError(
            f"The loss {name!r} returns an array of shape {shape} for predictions of shape "
            f"{wanted}; only one that returns numbers for every sample, which "
            "Keras then takes the mean of, can be cut into micro-batches."
        )


def check_samples(batch: Any) -> None:
    """Raises :class:`UnsupportedModelError` where an array of a batch does not have the batch's
    samples in its first dimension, so that its pieces would not be those of the others."""
    import keras

    samples = batch_size_of(batch)
    for leaf in keras.tree.flatten(batch):
        if leaf is not None and (len(leaf.shape) == 0 or leaf.shape[0] != samples):
            raise UnsupportedModelError(
                f"The batch cannot be cut into micro-batches: an array of shape "
                f"{tuple(leaf.shape)} does not have its {samples} samples."
            )


def pieces(samples: int, count: int) -> list[tuple[int, int]]:
    """First sample and end of each of ``count`` micro-batches of about the same size."""
    return list(pairwise(samples * i // count for i in range(count + 1)))
