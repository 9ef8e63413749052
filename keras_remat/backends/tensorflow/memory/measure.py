"""Measures the time of a step and the peak of the device's allocator.

Allocators of GPUs keep statistics; on a CPU oneDNN's and BFC do. TensorFlow's plain CPU allocator
keeps none, and some runtimes report zeros. Without statistics nothing is raised: peaks are 0, and
:attr:`TensorFlowDevice.has_statistics` is false.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import tensorflow as tf

from keras_remat.backends.host import host_memory_bytes, machine_bytes
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.memory.best_fit import GRANULE_BYTES
from keras_remat.backends.tensorflow.profiler.device import device_name, on_gpu
from keras_remat.backends.tensorflow.profiler.events import MEASURED_STEP
from keras_remat.core.graph import Op
from keras_remat.core.schedule import Usage
from keras_remat.units import KIB, MIB

#: TensorFlow's environment variables, which it reads when it makes its first tensor.
_USE_BFC, _BFC_LIMIT_MIB = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"
_DEFAULT_BFC_LIMIT_MIB = 64 * KIB
_GPU_ALLOCATOR, _ASYNC = "TF_GPU_ALLOCATOR", "cuda_malloc_async"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_TRUE = ("1", "true")

#: TensorFlow's environment variable for the most scratch of a GPU's convolution.
WORKSPACE_LIMIT_MIB = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
#: Advice for a GPU's step whose floor is a convolution.
WORKSPACE_ADVICE = (
    "A convolution may take gigabytes of scratch on a GPU: where a limit is said to be too low for "
    f"one, set {WORKSPACE_LIMIT_MIB}=64 before TensorFlow starts."
)

#: oneDNN's allocator counts no request below 256 KiB; BFC counts every one.
_SMALL_REQUEST_BYTES, _COUNTED_REQUEST_BYTES = 1, 512 * KIB
#: How often a request is probed, at most.
_PROBES = 5
#: Device → the highest measured peak. A pool (BFC) keeps these bytes.
_POOL_BYTES: dict[str, int] = {}


class TensorFlowDevice:
    """Reports the memory of the training device: the first visible GPU, else the CPU.

    Where several replicas train, all numbers are one replica's. Each GPU has its own allocator, and
    the fullest one counts. Logical CPUs share one allocator, and each gets an equal part.

    Args:
        replicas: names of a strategy's devices, such as ``"GPU:1"``.

    Attributes:
        name: ``"GPU:0"`` or ``"CPU:0"``.
    """

    def __init__(self, replicas: Sequence[str] = ()) -> None:
        self.name = device_name()
        own_allocators = bool(replicas) and self.name.startswith("GPU")
        self.allocators = tuple(replicas) if own_allocators else (self.name,)
        self._sharers = 1 if own_allocators else max(1, len(replicas))

    @property
    def is_shared(self) -> bool:
        """Returns whether several replicas share one allocator."""
        return self._sharers > 1

    @cached_property
    def allocator(self) -> str:
        """Returns ``"bfc"``, ``"onednn"``, ``"cuda_malloc_async"``, or ``"unknown"`` without
        statistics.

        The allocator is probed: BFC counts a request of one byte, oneDNN's only large ones.
        """
        if _is_async():
            return _ASYNC
        if _is_counted(_SMALL_REQUEST_BYTES):
            return "bfc"
        return "onednn" if _is_counted(_COUNTED_REQUEST_BYTES) else "unknown"

    @property
    def grows(self) -> bool:
        """Returns whether the allocator adds regions as it needs memory.

        A GPU's takes all its memory as one region, unless memory growth is on.
        """
        if not self.name.startswith("GPU"):
            return True
        forced = os.environ.get(_GROWTH)
        if forced is not None:  # TensorFlow obeys this before what the program says
            return forced.lower() in _TRUE
        return any(
            bool(tf.config.experimental.get_memory_growth(gpu))
            for gpu in tf.config.get_visible_devices("GPU")[:1]
        )

    @property
    def has_statistics(self) -> bool:
        """Returns whether the allocator counts what it hands out."""
        if self.allocator == _ASYNC:
            return _is_counted(_COUNTED_REQUEST_BYTES)
        return self.allocator != "unknown"

    def in_use_bytes(self) -> int:
        """Returns the bytes the allocator has handed out now; 0 without statistics."""
        return self._most("current")

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since :func:`measure` or a watch began; 0 without
        statistics."""
        return self._most("peak")

    watched_peak_bytes = phase_peak_bytes = peak_bytes

    def chunk_bytes(self, nbytes: int) -> int:
        """Returns the bytes of the chunk that the allocator hands out for a request now. A free
        chunk less than twice as large goes whole. The chunk is allocated, but not written to."""
        if not self.has_statistics or nbytes > self.total_bytes() - self.in_use_bytes():
            return nbytes
        try:
            return _counted_bytes(nbytes) or nbytes
        except tf.errors.ResourceExhaustedError:  # no free chunk is large enough
            return nbytes

    def begin_watch(self) -> None:
        """Resets the allocator's peak."""
        for name in self.allocators:
            _reset_peak(name)

    def _most(self, statistic: str) -> int:
        """Returns one replica's part of a statistic, the largest over all allocators."""
        return -(-max(_memory_info(name)[statistic] for name in self.allocators) // self._sharers)

    def total_bytes(self) -> int:
        """Returns all the memory this process may use on the device.

        On a GPU that is the allocator's limit; on a CPU the least of BFC's limit and what machine
        and container have left.
        """
        if self.name.startswith("GPU"):
            return min(private.device_memory_limit_bytes(name) for name in self.allocators)
        if _bfc_is_asked_for():
            held_bytes = max(bytes_in_use(), _POOL_BYTES.get(self.name, 0))
            total = min(host_memory_bytes(held_bytes), _bfc_limit_bytes())
        else:
            total = host_memory_bytes(bytes_in_use())
        return total // self._sharers

    def region_bytes(self) -> int:
        """Returns the bytes of the allocator's only region; 0 where it adds regions."""
        return 0 if self.grows else self.total_bytes()

    def limit_source(self) -> str:
        """Returns in words where :meth:`total_bytes` comes from."""
        if self.name.startswith("GPU"):
            return (
                "what TensorFlow's allocator may take of the card"
                f", memory growth {'on' if self.grows else 'off'}"
            )
        if _bfc_is_asked_for() and self.total_bytes() == _bfc_limit_bytes():
            return _BFC_LIMIT_MIB
        return "what machine, container and address space have left"

    def remark(self) -> str | None:
        """Returns a sentence on what makes predictions less exact here; ``None`` for nothing."""
        if not _is_async():
            return None
        return (
            f"{_GPU_ALLOCATOR}={_ASYNC} tells nothing of single requests: predicted peaks are of "
            "the bytes alive, and measured steps correct them. Unset it for better first plans."
        )

    def floor_advice(self, op: Op) -> str:
        """Returns advice on how a GPU's convolution takes less scratch; empty for other ops."""
        return WORKSPACE_ADVICE if on_gpu() and op.kind in kinds.CONVOLUTIONS else ""

    def missing_statistics_advice(self) -> str:
        """Returns a sentence on how peaks could be measured; empty where they can."""
        if self.has_statistics:
            return ""
        if self.name.startswith("GPU"):
            return (
                f"The allocator of {self.name} keeps no statistics: unset TF_GPU_ALLOCATOR, and "
                "peaks are measured."
            )
        return (
            "TensorFlow's CPU allocator keeps no statistics here: put "
            "keras_remat.enable_cpu_memory_stats() right after the imports, and peaks are measured."
        )


def enable_cpu_statistics() -> bool:
    """Implements :func:`keras_remat.enable_cpu_memory_stats`."""
    if private.has_made_devices():
        return TensorFlowDevice().has_statistics
    if tf.config.get_visible_devices("GPU") or private.onednn_is_on():
        return True
    os.environ.setdefault(_USE_BFC, "1")
    if not _bfc_is_asked_for():
        return False
    machine_mib = machine_bytes() // MIB
    if machine_mib > _DEFAULT_BFC_LIMIT_MIB:  # else BFC would hand out no more than its default
        os.environ.setdefault(_BFC_LIMIT_MIB, str(machine_mib))
    return True


def bytes_in_use() -> int:
    """Returns the bytes the device's allocator has handed out now; 0 without statistics."""
    return _memory_info(device_name())["current"]


def measure(
    step: Callable[[], Any], *, wait: bool = True, device: TensorFlowDevice | None = None
) -> tuple[Any, Usage]:
    """Runs ``step`` once and returns its result with its time and peak.

    The allocator's peak statistic is reset before. Without statistics the peak is 0.

    Args:
        step: the function to run.
        wait: whether to wait until the result is computed.
        device: device whose peak is measured; ``None`` for the training device.
    """
    device = device or TensorFlowDevice()
    device.begin_watch()
    started = time.perf_counter()
    if wait:
        with tf.profiler.experimental.Trace(MEASURED_STEP):
            result = step()
            synchronize(result)
    else:
        result = step()
    elapsed = time.perf_counter() - started
    peak_bytes = device.peak_bytes()
    _POOL_BYTES[device.name] = max(peak_bytes, _POOL_BYTES.get(device.name, 0))
    return result, Usage(elapsed, peak_bytes)


def synchronize(result: Any) -> None:
    """Waits until every tensor in ``result`` has been computed."""
    for leaf in tf.nest.flatten(result):
        if isinstance(leaf, tf.Tensor):
            leaf.numpy()


@cache
def _counts(name: str) -> bool:
    """Returns whether a device's allocator keeps statistics. The answer is cached: a refusal takes
    ten times as long as an answer, and every step needs it."""
    try:
        tf.config.experimental.get_memory_info(name)
    except ValueError:
        return False
    return True


def _memory_info(name: str) -> dict[str, int]:
    if not _counts(name):
        return {"current": 0, "peak": 0}
    info: dict[str, int] = tf.config.experimental.get_memory_info(name)
    return info


def _reset_peak(name: str) -> None:
    if _counts(name):
        tf.config.experimental.reset_memory_stats(name)


def _is_async() -> bool:
    """Returns whether CUDA itself hands out a GPU's memory."""
    return on_gpu() and os.environ.get(_GPU_ALLOCATOR) == _ASYNC


def _is_counted(nbytes: int) -> bool:
    """Returns whether the statistics count a tensor of ``nbytes`` bytes."""
    return _counted_bytes(nbytes) > 0


def _counted_bytes(nbytes: int) -> int:
    """Returns the bytes that the statistics show for a tensor of ``nbytes`` bytes; 0 where they do
    not count it.

    A chunk is less than twice the request. A number far off includes the input pipeline's requests,
    which go on in other threads: then the tensor is made again.
    """
    for _ in range(_PROBES):
        before = bytes_in_use()
        with tf.device(device_name()):
            held = tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8)
        counted = bytes_in_use() - before
        del held
        if nbytes <= counted < 2 * max(nbytes, GRANULE_BYTES):
            return counted
    return 0


def _bfc_is_asked_for() -> bool:
    return os.environ.get(_USE_BFC, "").lower() in _TRUE


def _bfc_limit_bytes() -> int:
    """Returns the most bytes that BFC hands out on a CPU."""
    return int(os.environ.get(_BFC_LIMIT_MIB, _DEFAULT_BFC_LIMIT_MIB)) * MIB
