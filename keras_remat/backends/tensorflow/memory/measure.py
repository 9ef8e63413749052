"""What a step really takes: the device allocator's peak, and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_remat.backends.host import host_memory_bytes
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.ordered.profile import device_name
from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedModelError


def bytes_in_use() -> int:
    """Bytes the device's allocator has handed out now.

    Raises:
        UnsupportedModelError: this allocator keeps no statistics.
    """
    return int(_memory_info()["current"])


def peak_bytes() -> int:
    """The most bytes the allocator has had in use since :func:`measure` began."""
    return int(_memory_info()["peak"])


def _memory_info() -> dict[str, int]:
    try:
        info: dict[str, int] = tf.config.experimental.get_memory_info(device_name())
    except ValueError as error:
        raise UnsupportedModelError(
            f"The allocator of {device_name()} keeps no statistics ({error}), so no peak can be measured. On a CPU, TensorFlow's oneDNN "
            "allocator does: do not set TF_ENABLE_ONEDNN_OPTS=0."
        ) from error
    return info


def measure(step: Callable[[], Any]) -> tuple[Any, Usage]:
    """Runs ``step`` once, waits for it, and returns its result with its time and the allocator's
    peak while it ran.

    The allocator's peak statistic is reset before.
    """
    _memory_info()
    tf.config.experimental.reset_memory_stats(device_name())
    started = time.perf_counter()
    result = step()
    synchronize(result)
    elapsed = time.perf_counter() - started
    return result, Usage(elapsed, peak_bytes())


def synchronize(result: Any) -> None:
    """Waits until every tensor in ``result`` has been computed."""
    for leaf in tf.nest.flatten(result):
        if isinstance(leaf, tf.Tensor):
            leaf.numpy()


def device_memory_bytes() -> int:
    """All the memory this process may use on the device: on a GPU the allocator's limit, on the CPU
    what the machine gives."""
    return (
        private.gpu_memory_limit_bytes()
        if device_name().startswith("GPU")
        else host_memory_bytes(bytes_in_use())
    )
