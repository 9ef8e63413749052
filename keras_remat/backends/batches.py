"""Measures, slices and resizes batches of arrays, specs or tensors, in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_remat.errors import UnsupportedModelError

#: Attributes of arrays without a fixed size: SciPy's and JAX's sparse ones, TensorFlow's sparse and
#: ragged ones.
_OF_NO_FIXED_SIZE = ("todense", "dense_shape", "row_splits")


def check_dense(leaf: Any) -> None:
    """Raises :class:`UnsupportedModelError` for a sparse or ragged array, spec or model input,
    whose size differs from step to step at the same shape."""
    of_input = [name for name in ("sparse", "ragged") if getattr(leaf, name, None) is True]
    array = getattr(leaf, "value_type", None) or type(leaf)  # TensorFlow's specs name the former
    if of_input or any(hasattr(array, name) for name in _OF_NO_FIXED_SIZE):
        what = f"{of_input[0]} input" if of_input else array.__name__
        raise UnsupportedModelError(
            f"The batch holds a {what}, whose size differs from step to step; rematerialization "
            "needs dense tensors."
        )


def leaves_of(batch: Any) -> list[Any]:
    """Returns the leaves of a batch like ``keras.tree.flatten``, in the same order.

    On PyTorch ``keras.tree.flatten`` leaves its argument in reference cycles, so earlier batches
    would stay in memory until Python collects garbage.
    """
    if type(batch) in (tuple, list):
        return [leaf for one in batch for leaf in leaves_of(one)]
    import keras

    is_nested = keras.tree.is_nested
    if type(batch) is dict and not any(map(is_nested, batch.values())):
        return [batch[key] for key in sorted(batch)]
    return list(keras.tree.flatten(batch)) if is_nested(batch) else [batch]


def batch_size_of(batch: Any) -> int:
    """Returns the batch size: the first dimension of the batch's first array.

    Raises:
        ValueError: no array has a first dimension.
    """
    for leaf in leaves_of(batch):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) > 0 and shape[0] is not None:
            return int(shape[0])
    raise ValueError("the batch holds no array with a first dimension, so its size is unknown")


def uneven_shape(batch: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array whose first dimension is not the batch size; ``None`` where
    there is none."""
    samples = batch_size_of(batch)
    shapes = (tuple(leaf.shape) for leaf in leaves_of(batch) if leaf is not None)
    return next((shape for shape in shapes if shape[:1] != (samples,)), None)


def batch_bytes(batch: Any) -> int:
    """Returns the bytes of a batch. Strings count as 0, since their bytes are unknown."""
    total = 0
    for leaf in leaves_of(batch):
        if leaf is not None:
            size: Any = getattr(leaf.dtype, "size", None) or getattr(leaf.dtype, "itemsize", 0)
            total += int(size) * math.prod(leaf.shape)
    return total


def map_arrays(function: Callable[[Any], Any], batch: Any) -> Any:
    """Returns a batch with a function's results in the place of its arrays; ``None`` stays."""
    import keras

    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), batch)


def as_specs(batch: Any) -> Any:
    """Returns the shapes and dtypes of a batch's arrays, as Keras's symbolic tensors."""
    import keras

    return map_arrays(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), batch)


def repeated_batch(batch: Any, size: int) -> Any:
    """Returns a batch of ``size`` samples that repeats the samples of ``batch``, in order.

    The samples are gathered on the device, so that they lie in the device's pool like a batch of
    ``fit``. TensorFlow leaves a converted array outside of the pool if its address happens to be
    aligned.

    Args:
        batch: arrays with the batch dimension first; ``None`` stays ``None``.
        size: number of samples wanted.

    Returns:
        The framework's arrays.
    """
    import keras

    at = np.arange(size) % batch_size_of(batch)
    return map_arrays(lambda leaf: keras.ops.take(leaf, at, axis=0), batch)


def sliced(batch: Any, part: slice) -> Any:
    """Returns some samples of a batch of arrays; ``None`` stays ``None``."""
    return map_arrays(lambda leaf: leaf[part], batch)


def resized_spec(batch: Any, size: int, spec: Callable[[tuple[int, ...], Any], Any]) -> Any:
    """Returns a batch like ``batch`` with ``size`` samples; nothing is allocated.

    Args:
        batch: arrays or specs; ``None`` stays ``None``.
        size: number of samples wanted.
        spec: makes the framework's spec from a shape and the array that it replaces.

    Raises:
        UnsupportedModelError: an array's first dimension is not the batch size.
    """
    uneven = uneven_shape(batch)
    if uneven is not None:
        raise UnsupportedModelError(
            f"An array of shape {uneven} does not have the {batch_size_of(batch)} samples of its "
            "batch."
        )
    return map_arrays(lambda leaf: spec((size, *leaf.shape[1:]), leaf), batch)
