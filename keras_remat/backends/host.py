"""Finds how much memory the machine gives this process."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keras_remat.units import MIB

#: Address space kept free under an ``RLIMIT_AS``, beside a tenth of the room left: fixed bytes, and
#: bytes per core. A process that cannot start a thread aborts, and every thread takes a stack and a
#: heap.
_RESERVED_ADDRESS_BYTES, _RESERVED_BYTES_PER_CORE = 64 * MIB, 32 * MIB


def cores() -> int:
    """Returns how many processor cores this process may use; all where the system cannot say."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reserved_bytes() -> int:
    return _RESERVED_ADDRESS_BYTES + cores() * _RESERVED_BYTES_PER_CORE


@contextmanager
def address_space_for_threads() -> Iterator[None]:
    """Reserves part of a limited address space while the context lasts, so that threads can be
    started afterwards.

    An allocator that grows by doubling takes all the rest of the address space when it cannot
    double.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    kept: mmap.mmap | None = None
    if soft != resource.RLIM_INFINITY:
        try:
            kept = mmap.mmap(-1, _reserved_bytes())  # never touched, so it uses no memory
        except OSError:  # not enough address space is left
            kept = None
    try:
        yield
    finally:
        if kept is not None:
            kept.close()


def host_memory_bytes(in_use_bytes: int) -> int:
    """Returns the least of the machine's memory, the container's limit (cgroup) and the room left
    by the address space limit (``RLIMIT_AS``), in bytes.

    Threads' stacks, Python and the planner use the same address space, so some of it is kept for
    them.

    Args:
        in_use_bytes: bytes of tensors, which are mapped but count as available.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(file)
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        room = max(0, soft - mapped)
        limits.append(max(0, room - room // 10 - _reserved_bytes()) + in_use_bytes)
    return min(limits)
