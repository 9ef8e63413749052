"""Recognizes the errors by which TensorFlow says that the device had no memory left.

A GPU without memory raises many errors. A copy to it that fails is an ``InternalError``. A
convolution is a ``NotFoundError`` where no algorithm gets its workspace. CUDA's libraries have
statuses of their own, which come as ``InternalError`` or ``UnknownError``. The texts are from
TensorFlow 2.18 to 2.21.
"""

from __future__ import annotations

import tensorflow as tf

_LIBRARIES = (
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)

#: Class of error, and texts: an error with one of them in its message is out of memory.
_TEXTS: tuple[tuple[type[Exception], tuple[str, ...]], ...] = (
    (
        tf.errors.InternalError,
        ("Dst tensor is not initialized", "out of memory", "Failed to allocate", *_LIBRARIES),
    ),
    (tf.errors.NotFoundError, ("No algorithm worked!",)),
    (tf.errors.UnknownError, _LIBRARIES),
    (tf.errors.AbortedError, _LIBRARIES),
)

#: XLA's message where it cannot allocate a step's temporary memory. TensorFlow's own ops say "OOM
#: when allocating tensor".
_XLA_TEXT = "Out of memory while trying to allocate"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether TensorFlow raised ``error`` because the device had no memory left."""
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return True
    text = str(error)
    return any(
        isinstance(error, kind) and any(part in text for part in parts) for kind, parts in _TEXTS
    )


def is_failed_launch(error: BaseException | None) -> bool:
    """Returns whether a compiled step found no memory for its temporary values."""
    return isinstance(error, tf.errors.ResourceExhaustedError) and _XLA_TEXT in str(error)
