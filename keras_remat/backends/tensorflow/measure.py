"""What a step really takes: the device allocator's peak, and time."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.profile import device_name
from keras_remat.errors import UnsupportedModelError
from keras_remat.schedule import Usage
from keras_remat.units import MIB

#: Address space kept out of an ``RLIMIT_AS``, beside a tenth of what is left: a process that cannot start a thread aborts.
_RESERVED_ADDRESS_BYTES = 96 * MIB


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
    """Runs ``step`` once, waits for it, and returns its result with its time and the allocator's peak while it ran.

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
    """All the memory this process may use on the device.

    On a GPU the allocator's limit; on the CPU the least of the machine's memory, the container's limit (cgroup) and what the address space
    limit (``RLIMIT_AS``) leaves. Threads' stacks, Python and the planner take from the same address space, which is left out for them.
    """
    if device_name().startswith("GPU"):
        return private.gpu_memory_limit_bytes()
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(file)
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        room = max(0, soft - mapped)
        limits.append(max(0, room - room // 10 - _RESERVED_ADDRESS_BYTES) + bytes_in_use())
    return min(limits)
