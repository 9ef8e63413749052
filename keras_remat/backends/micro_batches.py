"""Splits batches into micro-batches, in every framework, and checks which models allow it.

The micro-batches' gradients are weighted by their share of the samples. So for losses that are
means over the batch (Keras's default reduction) the sum is the gradient of the whole batch, up to
the order of floating-point additions. Parts of a model that need the whole batch do not get it:
batch normalization normalizes over a micro-batch, and its moving averages move once per
micro-batch. A loss that needs the whole batch is refused (:func:`check_can_be_split`,
:func:`watched_micro_batches`); other such parts are reported to the user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from keras_remat.backends.batches import batch_size_of, sliced, uneven_shape
from keras_remat.backends.keras_private import is_own, layers, masks, wrapped
from keras_remat.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

SEPARATION = "next_micro_batch"
"""Scope of operations that only make a micro-batch wait for the last one."""

STEP_METHODS = ("train_step", "compute_loss", "stateless_compute_loss", "compute_loss_and_updates")
"""Methods that a model may override. Then its loss need not be a mean over the batch."""


#: How many samples' losses are computed both together and apart, and the most numbers in a sample.
_COMPARED_SAMPLES, _MOST_NUMBERS = 4, 2**18


def check_can_be_split(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` for a model whose batches cannot be split.

    Summed gradients of micro-batches would differ from the batch's: the model overrides
    ``train_step`` or ``compute_loss``, or its loss is not a mean over the batch.
    """
    import keras

    for name in STEP_METHODS:
        if is_own(model, name, keras.Model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has a {name} of its own, which cannot be split into "
                "micro-batches."
            )
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss) and (
            type(loss).__call__ is not keras.losses.Loss.__call__
        ):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} has a __call__ of its own, which need be no mean over the "
                "batch and cannot be split into micro-batches. A call of its own instead, which "
                "returns numbers for every sample, can be."
            )
        if getattr(loss, "reduction", "sum_over_batch_size") not in ("sum_over_batch_size", "mean"):
            raise UnsupportedModelError(
                f"The loss {loss.name!r} reduces by {loss.reduction!r}; only means over the "
                "batch can be split into micro-batches."
            )
    for layer in layers(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise UnsupportedModelError(
                f"The activity regularizer of {layer.name!r} sums over the batch; only means "
                "over the batch can be split into micro-batches."
            )


def check_no_masks(predicted: Any) -> None:
    """Raises :class:`UnsupportedModelError` where outputs have masks: the loss is a mean over
    unmasked values, of which micro-batches have different shares."""
    if any(mask is not None for mask in masks(predicted)):
        raise UnsupportedModelError(
            "The model's output is masked: its loss is a mean over what is not masked, and "
            "micro-batches do not have equal shares of that."
        )


@contextmanager
def watched_micro_batches(
    model: Any, count: int, eagerly: Callable[[], AbstractContextManager[Any]]
) -> Iterator[list[str]]:
    """Watches a step in ``count`` micro-batches while it is traced.

    Yields a list of sentences for the user on how the step will differ from one of the whole batch.
    The list is complete at the end.

    A loss that is not a mean over the batch is recognized by its values before reduction. It masks
    some of them (an ignored class). Or it has fewer values than samples: Dice and Tversky, and
    functions that reduce by themselves, by a sum or a mean. Or the value of a sample changes with
    the other samples of the batch (contrastive losses).

    Args:
        model: the model.
        count: number of micro-batches.
        eagerly: returns a context in which computations are not traced.

    Raises:
        UnsupportedModelError: inside, where such a loss is computed.
    """
    import keras

    told: list[str] = []
    if count == 1:
        yield told
        return
    watch = _Watch(model, eagerly)
    with ExitStack() as watched:
        watched.enter_context(wrapped(keras.losses.Loss, "__call__", watch.compute_loss))
        watched.enter_context(wrapped(keras.metrics.Mean, "update_state", watch.update_mean))
        watched.enter_context(wrapped(keras.Variable, "assign", watch.assign))
        yield told
    if watch.layers:
        told.append(
            f"Layers that keep state ({_listed(watch.layers)}) see one micro-batch at "
            "a time, and move their state once for each. Batch normalization takes a micro-batch's "
            "statistics. Batches stay whole with micro_batches=None and a limit that they fit."
        )
    if watch.metrics:
        told.append(
            f"Metrics that are one number for a batch ({_listed(watch.metrics)}) are the means "
            "of the numbers of its micro-batches. A function that returns numbers for every "
            "sample is exact."
        )


class _Watch:
    """Stands in for methods of Keras while a step in micro-batches is traced.

    Attributes:
        layers: names of layers that change their state.
        metrics: names of metrics that are one number for a batch.
    """

    def __init__(self, model: Any, eagerly: Callable[[], AbstractContextManager[Any]]):
        self._eagerly = eagerly
        self._layer_of = {
            id(variable): layer.name
            for layer in layers(model)
            for variable in layer.non_trainable_weights
            if layer is not model
        }
        self._checked: set[int] = set()  # ids of losses
        self.layers: dict[str, None] = {}
        self.metrics: dict[str, None] = {}

    def compute_loss(self, original: Any, loss: Any, *args: Any, **options: Any) -> Any:
        """Stands in for ``Loss.__call__``."""
        import keras

        def call(compute: Any, y_true: Any, y_pred: Any) -> Any:
            values = compute(y_true, y_pred)
            _check_values(loss.name, values, y_pred)
            if id(loss) not in self._checked:
                self._checked.add(id(loss))
                with self._eagerly(), keras.StatelessScope():  # nothing is drawn or counted
                    _check_samples_are_apart(loss.name, compute, y_true, y_pred)
            return values

        with wrapped(loss, "call", call):
            return original(loss, *args, **options)

    def update_mean(
        self, original: Any, metric: Any, values: Any, *args: Any, **options: Any
    ) -> Any:
        """Stands in for ``Mean.update_state``."""
        import keras

        is_one_number = getattr(values, "shape", ()) == ()
        if is_one_number and isinstance(metric, keras.metrics.MeanMetricWrapper):
            self.metrics[metric.name] = None
        return original(metric, values, *args, **options)

    def assign(self, original: Any, variable: Any, *args: Any, **options: Any) -> Any:
        """Stands in for ``Variable.assign``."""
        name = self._layer_of.get(id(variable))
        if name is not None:
            self.layers[name] = None
        return original(variable, *args, **options)


def _listed(names: dict[str, None]) -> str:
    first, *others = names
    return first if not others else f"{first} and {len(others)} more"


def _check_samples_are_apart(name: str, compute: Any, y_true: Any, y_pred: Any) -> None:
    """Raises where a loss gives a sample other numbers with other samples beside it. It is tried on
    made-up predictions; a loss that cannot be computed from them passes."""
    import keras

    drawn, half = np.random.default_rng(0), _COMPARED_SAMPLES // 2

    def made_up(like: Any) -> Any:
        kind, shape = keras.backend.standardize_dtype(like.dtype), tuple(like.shape)[1:]
        if prod(shape) > _MOST_NUMBERS:
            raise ValueError("a sample is too large")
        shape = (_COMPARED_SAMPLES, *shape)
        numbers = drawn.uniform(0.1, 0.9, shape) if "float" in kind else drawn.integers(0, 2, shape)
        return keras.ops.convert_to_tensor(numbers, dtype=kind)

    try:
        given = keras.tree.map_structure(made_up, (y_true, y_pred))
        together, *apart = (
            keras.ops.convert_to_numpy(
                compute(*keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], given))
            ).astype("float32")
            for rows in (slice(None), slice(half), slice(half, None))
        )
    except Exception as error:  # shapes may be unknown, or the loss may need other numbers
        logger.debug("keras_remat: the loss %r is not tried on made-up numbers: %s", name, error)
        return
    if not np.allclose(together, np.concatenate(apart), rtol=1e-2, atol=1e-4, equal_nan=True):
        raise UnsupportedModelError(
            f"The loss {name!r} compares the samples of a batch with one another, and each "
            "micro-batch would only see its own."
        )


def _check_values(name: str, values: Any, predicted: Any) -> None:
    if any(mask is not None for mask in masks(values)):
        raise UnsupportedModelError(
            f"The loss {name!r} is a mean over what it does not mask, and micro-batches do not "
            "have equal shares of that."
        )
    shape, wanted = tuple(values.shape), tuple(predicted.shape)
    if not shape or (None not in (*shape[:1], *wanted[:1]) and shape[:1] != wanted[:1]):
        raise UnsupportedModelError(
            f"The loss {name!r} returns an array of shape {shape} for predictions of shape "
            f"{wanted}; only one that returns numbers for every sample, which "
            "Keras then takes the mean of, can be split into micro-batches."
        )


def micro_batches_of(batch: Any, count: int) -> Iterator[tuple[Any, int, float]]:
    """Returns ``count`` micro-batches of similar size, but none without samples, each with its
    number of samples and its share of the batch.

    Raises:
        UnsupportedModelError: an array's first dimension is not the batch size.
    """
    samples, uneven = batch_size_of(batch), uneven_shape(batch)
    if uneven is not None:
        raise UnsupportedModelError(
            f"The batch cannot be split into micro-batches: an array of shape {uneven} does not "
            f"have its {samples} samples."
        )
    count = min(count, samples)
    bounds = pairwise(samples * i // count for i in range(count + 1))
    return ((sliced(batch, slice(a, b)), b - a, (b - a) / samples) for a, b in bounds)
