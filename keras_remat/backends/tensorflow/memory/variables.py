"""Copies a model's variables to the host and puts them back.

Restoring a variable normally moves it: its new tensor lies in another chunk of the pool, up to
twice as large, or outside the pool if the array is aligned and is not copied. The resident bytes
would change with every put-back, and so would the peak of later steps. So all large variables of
the CPU's pool are freed first. Their values are then copied back, the largest first, each into a
chunk of exactly its size. Afterwards the variables lie close together, and the free memory is in as
few chunks as possible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_remat.backends.tensorflow.memory.best_fit import ONEDNN_SMALL_BYTES, rounded
from keras_remat.backends.tensorflow.memory.donated import abandon_donated, nbytes
from keras_remat.backends.tensorflow.memory.exhausted import is_failed_launch
from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.profiler.device import on_gpu

#: Alignment of tensors by the CPU's kernels and allocator.
_ALIGNMENT_BYTES = 64
#: Types that TensorFlow does not cast to bytes: booleans, and small numbers (``float8_e5m2``).
_NOT_CAST = {tf.bool} | {
    one for one in vars(tf.dtypes.experimental).values() if isinstance(one, tf.DType)
}


def snapshot(variables: Sequence[Any], updated: Collection[int] = ()) -> Callable[[], None]:
    """Copies variables to the host.

    Args:
        variables: distinct variables, each on one device.
        updated: ``id`` of those variables that every step updates.

    Returns:
        A function that puts the values back, bit for bit, as often as it is called. They are back
        even after an exception or interrupt inside it. Where a step ran out of memory, call it
        while the error is being handled.
    """
    in_pool, in_use = not on_gpu(), bytes_in_use()
    saved = [_bytes_of(v) if in_pool and _is_large(v) else v.numpy() for v in variables]

    def put_back() -> None:
        if is_failed_launch(sys.exc_info()[1]):
            abandon_donated(variables, updated, in_use - bytes_in_use())
        try:
            large = []
            for variable, value in zip(variables, saved, strict=True):
                if in_pool and _is_large(variable):
                    _replace(variable, tf.zeros([0], variable.dtype))
                    large.append((variable, value))
                else:
                    variable.assign(value)
            for variable, value in sorted(large, key=lambda pair: -pair[1].nbytes):
                _refill(variable, value)
        except BaseException as error:
            for variable, value in zip(variables, saved, strict=True):
                shape = variable.shape if variable.shape.is_fully_defined() else value.shape
                copy = _aligned_copy(value.reshape(-1).view(np.uint8))  # TensorFlow shares it
                array = copy.view(variable.dtype.as_numpy_dtype)
                _replace(variable, tf.reshape(tf.convert_to_tensor(array), shape))
            if not isinstance(
                error, tf.errors.ResourceExhaustedError
            ):  # the pool is full and cannot grow: the values stay outside of it
                raise

    return put_back


def _is_large(variable: Any) -> bool:
    is_one = variable.dtype not in _NOT_CAST and variable.shape.is_fully_defined()
    return bool(is_one and nbytes(variable) >= ONEDNN_SMALL_BYTES)


def _bytes_of(variable: Any) -> np.ndarray:
    """Returns a variable's bytes, copied to an address that TensorFlow can use as it is."""
    return _aligned_copy(np.asarray(memoryview(tf.bitcast(variable.value(), tf.uint8))).reshape(-1))


def _aligned_copy(values: np.ndarray) -> np.ndarray:
    room = np.empty(values.nbytes + _ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_BYTES
    copy = room[start : start + values.nbytes]
    copy[...] = values
    return copy


def _refill(variable: tf.Variable, value: np.ndarray) -> None:
    """Copies ``value``, the bytes of an emptied variable, into a chunk of exactly its size.

    The allocator hands out a free chunk whole if it is less than twice the size. Then a tensor of
    the excess bytes is held while the value is placed anew, beside it.
    """
    before = bytes_in_use()
    _place(variable, value)
    unused = bytes_in_use() - before - rounded(value.nbytes)
    if unused >= ONEDNN_SMALL_BYTES:
        _replace(variable, tf.zeros([0], variable.dtype))
        held = tf.raw_ops.Empty(shape=[unused], dtype=tf.uint8)
        _place(variable, value)
        del held


def _place(variable: tf.Variable, value: np.ndarray) -> None:
    host = tf.experimental.dlpack.from_dlpack(value.__dlpack__())  # shares the array's memory
    size = variable.dtype.size
    copy = tf.raw_ops.DeepCopy(x=host)
    _replace(
        variable,
        tf.reshape(
            tf.bitcast(tf.reshape(copy, [-1, size] if size > 1 else [-1]), variable.dtype),
            variable.shape,
        ),
    )


def _replace(variable: tf.Variable, tensor: Any) -> None:
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tensor, validate_shape=False)
