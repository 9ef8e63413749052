"""Bytes and seconds of a compiled step.

Bytes are known before the step ever runs: ``memory_analysis()`` tells what XLA's buffer assignment will allocate, exactly. The peak is
arguments (state and batch) + outputs − outputs that live in donated arguments + temporary buffers. On a GPU ``memory_stats()`` adds what
the allocator saw, other users of the device included. Seconds are measured, on a copy of the state, because the step donates it.

Known limit: on a CPU, scratch memory that a library behind one operation allocates for itself (convolutions) is not in the analysis.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from keras_remat.schedule import Usage


@dataclass(frozen=True)
class CompiledMemory:
    """What XLA's buffer assignment allocates for one call of a compiled step, in bytes.

    Args:
        argument_bytes: state and batch.
        output_bytes: logs and new state.
        alias_bytes: those of ``output_bytes`` that are in donated arguments.
        temp_bytes: alive only during the call.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Everything the call needs at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def memory(compiled: Any) -> CompiledMemory:
    """Returns what a ``jax.stages.Compiled`` allocates.

    Raises:
        RuntimeError: this platform's compiler does not tell.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError(f"no memory analysis on {jax.default_backend()}")
    return CompiledMemory(
        int(stats.argument_size_in_bytes),
        int(stats.output_size_in_bytes),
        int(stats.alias_size_in_bytes),
        int(stats.temp_size_in_bytes),
    )


def copy_state(state: Any) -> Any:
    """Returns a copy of every array, so that the original survives donation."""
    return jax.tree.map(jnp.copy, state)


def measure(compiled: Any, state: Any, batch: Any, *, steps: int = 3) -> Usage:
    """Runs a compiled step on a copy of the state and returns its median time and its peak.

    Args:
        compiled: from :mod:`~keras_remat.backends.jax.lower`.
        state: the trainer's state; it is left as it is.
        batch: a batch of the traced shapes.
        steps: timed calls, after one that is not timed.

    Raises:
        Exception: whatever the device raises, out of memory included; results are waited for.
    """
    current = copy_state(state)
    batch = jax.tree.map(jnp.asarray, batch)
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        logs, current = compiled(current, batch)
        jax.block_until_ready((logs, current))
        seconds.append(time.perf_counter() - started)
    return Usage(statistics.median(seconds[1:] or seconds), memory(compiled).peak_bytes)


def device_peak_bytes(device: Any = None) -> int | None:
    """Returns the most bytes the device's allocator has had in use, or ``None`` where it keeps no statistics (CPU)."""
    device = jax.devices()[0] if device is None else device
    stats = device.memory_stats()
    return None if not stats else int(stats["peak_bytes_in_use"])


def device_limit_bytes(device: Any = None) -> int | None:
    """Returns the bytes the device's allocator may use, or ``None`` where it does not tell (CPU)."""
    device = jax.devices()[0] if device is None else device
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None
