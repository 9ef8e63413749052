"""Protects the variables of a compiled step that ran out of memory from being freed twice.

XLA writes an updated variable into the memory of its old value, which the variable *donates*. If
the launch fails because XLA cannot allocate its temporary memory, XLA gives the donated memory back
to the allocator, although the variables still hold it (TensorFlow 2.16 to 2.21:
``PopulateExecutionInputBuffer`` in ``tensorflow/compiler/jit/xla_launch_util.cc`` lends ownership,
and ``GenerateBufferAllocations`` in XLA's executables fails before ownership is returned). The next
assignment frees the memory a second time, and the allocator ends the process. So the old values of
such variables must never be freed. Nothing is lost: their memory is back in the pool already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from keras_remat.units import MIB

#: Memory that may be abandoned needlessly, where other allocations hide whether it was donated.
_NEGLIGIBLE_BYTES = 64 * MIB
#: The most bytes that an allocator rounds up, for all small variables together.
_ROUNDING_BYTES = MIB


def abandon_donated(variables: Sequence[Any], updated: Collection[int], missing_bytes: int) -> None:
    """Keeps memory that a failed launch gave back to the allocator from being freed once more.

    Args:
        variables: ``tf.Variable`` objects.
        updated: ``id`` of those variables that every step updates.
        missing_bytes: bytes in use before the step less those in use now.
    """
    surely = sum(nbytes(v) for v in variables if id(v) in updated)
    if missing_bytes <= 0 and surely > _NEGLIGIBLE_BYTES:
        return  # the launch failed before anything was donated
    perhaps_bytes = max(0, missing_bytes - surely) + _ROUNDING_BYTES
    donated = [v for v in variables if id(v) in updated or nbytes(v) <= perhaps_bytes]
    for variable in donated:
        keep_for_ever(variable.value())  # shares the variable's memory


def keep_for_ever(value: Any) -> None:
    """Adds a reference that is never given back, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def nbytes(variable: Any) -> int:
    """Returns the bytes of a variable's value, also if the variable has no static shape."""
    elements = variable.shape.num_elements()
    elements = tf.size(variable) if elements is None else elements
    return int(elements) * int(variable.dtype.size)
