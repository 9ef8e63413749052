"""Bytes of a compiled step, known before it runs.

``memory_analysis()`` tells what XLA's buffer assignment will allocate, exactly. The peak is
arguments (state and batch) + outputs − outputs that live in donated arguments + temporary buffers.
On a GPU ``memory_stats()`` adds what the allocator saw, other users of the device included.

Known limit: on a CPU, scratch memory that a library behind one operation allocates for itself
(convolutions) is not in the analysis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


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
        return self.argument_bytes + self.added_bytes

    @property
    def added_bytes(self) -> int:
        """What the call needs beside its arguments."""
        return self.output_bytes - self.alias_bytes + self.temp_bytes


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


def device_statistic(name: str) -> int | None:
    """Returns one of the first device's allocator statistics (``"bytes_in_use"``,
    ``"peak_bytes_in_use"``, ``"bytes_limit"``), or ``None`` where it keeps none (CPU)."""
    statistics = jax.devices()[0].memory_stats()
    return int(statistics[name]) if statistics and name in statistics else None
