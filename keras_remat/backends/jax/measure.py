"""Reads the bytes of a compiled step before it runs.

``memory_analysis()`` tells what XLA's buffer assignment will allocate, exactly. The peak is
arguments (state and batch) + outputs − outputs that live in donated arguments + temporary buffers.
On a GPU ``memory_stats()`` adds what the allocator saw, other users of the device included.

XLA:GPU chooses its kernels by running them, and the choice decides about scratch memory. On an H200
(``benchmarks/results/gpu.md``) a step of 649 MiB takes 1,358 with the kernels that were fastest,
and choosing them cost no time that could be told from the compiler's own (3.1 s with, 3.5 s
without). So on a live GPU a step is compiled as it will run, even if only its bytes are asked for,
and that compilation is the one that runs. A card that is not there gets
:func:`keras_remat.backends.jax.absent_device.compiler_options`.

Known limit: on a CPU, scratch memory that a library behind one operation allocates for itself
(convolutions) is not in the analysis.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import keras

from keras_remat.core.target import Target, live
from keras_remat.errors import UnsupportedModelError
from keras_remat.units import format_bytes

OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "hipErrorOutOfMemory",
    "No algorithm worked!",
)
"""Texts in out-of-memory errors, of JAX or of a library behind it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether JAX raised an error because the device had no memory left, when compiling or
    running."""
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY
    )


def refused(error: Exception, compiler: str = "XLA") -> str:
    """Returns the message that a compiler does not compile a step, with the first line of the
    reason."""
    told = str(error).strip().splitlines() or [type(error).__name__]
    return f"{compiler} does not compile the step: {told[0][:200]}"


def live_target() -> Target:
    """Returns the target of the device that trains."""
    device = first_device()
    on_gpu = device.platform in ("gpu", "cuda", "rocm")
    name = f"{device.platform}:{device.id} {device.device_kind}"
    # such as "9.0"; AMD's are no numbers
    words = str(getattr(device, "compute_capability", "")).split(".")
    numbers = [int(word) for word in words if word.isdigit()]
    capability = (numbers[0], numbers[1]) if len(numbers) == 2 else None
    return live("gpu" if on_gpu else "cpu", name, capability)


def check_device(target: Target) -> str | None:
    """Returns a remark about how much of a GPU JAX may use, or ``None``.

    Raises:
        UnsupportedModelError: it is not known how much.
    """
    if not (target.on_gpu and target.is_live):
        return None
    limit = device_statistic("bytes_limit")
    if limit is None:
        raise UnsupportedModelError(
            "JAX's allocator keeps no statistics here, so neither the device's memory nor a "
            "step's peak is known. Train without "
            "XLA_PYTHON_CLIENT_ALLOCATOR=platform."
        )
    if {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & set(os.environ):
        return None
    return (
        f"JAX may use {format_bytes(limit)} of the GPU, three quarters of it by default; "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives it more."
    )


def added_bytes(compiled: Any) -> int:
    """Returns the bytes that a call of a ``jax.stages.Compiled`` needs beside its arguments.

    Raises:
        RuntimeError: this platform's compiler has no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("this platform's compiler has no memory analysis")
    new_outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(new_outputs + stats.temp_size_in_bytes)


def counted_devices() -> list[Any]:
    """Returns the devices of this process that train. They are those of an active
    ``keras.distribution``. Without one, it is the configured default device, given itself or by its
    platform, or the first device."""
    active = keras.distribution.distribution()
    if active is not None:
        return list(active.device_mesh.backend_mesh.local_devices)
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return [chosen]


def first_device() -> Any:
    """Returns the first of the devices that train."""
    return counted_devices()[0]


def check_placed(state: Any) -> None:
    """Raises :class:`UnsupportedModelError` if arrays are bound to another device than the one that
    counts, for which steps are compiled."""
    device = first_device()
    for leaf in jax.tree.leaves(state):
        if leaf.committed and leaf.sharding.device_set != {device}:
            raise UnsupportedModelError(
                f"The model's variables are bound to {leaf.sharding}, and a step is planned for "
                f"{device}: jax.config.update('jax_default_device', ...) chooses another."
            )


def device_statistic(name: str) -> int | None:
    """Returns one of the allocator's statistics (``"bytes_in_use"``, ``"peak_bytes_in_use"``,
    ``"bytes_limit"``). Over the devices that train it is the most, of limits the least. Returns
    ``None`` if an allocator keeps none (CPU)."""
    statistics = [device.memory_stats() or {} for device in counted_devices()]
    if any(name not in one for one in statistics):
        return None
    return int((min if name == "bytes_limit" else max)(one[name] for one in statistics))
