"""Every face of a GPU without memory is known, and nothing else is taken for one."""

import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.memory.exhausted import is_out_of_memory

OUT_OF_MEMORY = [
    (tf.errors.ResourceExhaustedError, "OOM when allocating tensor with shape[16,512,512]"),
    (
        tf.errors.InternalError,
        "Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to "
        "/job:localhost/replica:0/task:0/device:GPU:0 in order to run AddV2: Dst tensor is not "
        "initialized.",
    ),
    (tf.errors.InternalError, "Dst tensor is not initialized."),
    (tf.errors.NotFoundError, "No algorithm worked!  Error messages:\n  Profiling failure"),
    (tf.errors.InternalError, "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    (tf.errors.InternalError, "CUDNN_STATUS_ALLOC_FAILED\nin tensorflow/stream_executor/cuda"),
    (tf.errors.UnknownError, "Fail to find the dnn implementation. CUDNN_STATUS_ALLOC_FAILED"),
    (tf.errors.InternalError, "failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED"),
    (tf.errors.InternalError, "failed to create cusolver: CUSOLVER_STATUS_ALLOC_FAILED"),
    (tf.errors.AbortedError, "Operation received an exception: CUDA_ERROR_OUT_OF_MEMORY"),
]
OTHERS = [
    (tf.errors.InternalError, "Blas GEMM launch failed : a.shape=(3, 4)"),
    (tf.errors.NotFoundError, "could not find registered platform with name: 'cuda'"),
    (tf.errors.InvalidArgumentError, "out of memory is not what this says"),
    (tf.errors.UnknownError, "ValueError: the generator raised"),
    (tf.errors.CancelledError, "RecvAsync is cancelled."),
]


@pytest.mark.parametrize(("kind", "text"), OUT_OF_MEMORY)
def test_every_text_of_a_device_without_memory(kind, text):
    error = kind(None, None, text)
    assert is_out_of_memory(error)
    assert backend().is_out_of_memory(error)


@pytest.mark.parametrize(("kind", "text"), OTHERS)
def test_other_errors_are_none(kind, text):
    assert not is_out_of_memory(kind(None, None, text))


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyboardInterrupt(), MemoryError()])
def test_errors_of_python_are_none(error):
    assert not is_out_of_memory(error)
