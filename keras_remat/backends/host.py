"""How much memory the machine gives this process."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keras_remat.units import MIB

#: Address space kept out of an ``RLIMIT_AS``, beside a tenth of what is left, and more for every
#: core: a process that cannot start a thread aborts, and a thread takes a stack and a heap of its
#: own.
_RESERVED_ADDRESS_BYTES, _RESERVED_BYTES_PER_CORE = 64 * MIB, 32 * MIB


def cores() -> int:
    """Returns how many processor cores this process may use; all, where no system call tells."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reserved_bytes() -> int:
    return _RESERVED_ADDRESS_BYTES + cores() * _RESERVED_BYTES_PER_CORE


@contextmanager
def address_space_for_threads() -> Iterator[None]:
    """Keeps some of a limited address space from what runs inside, so that threads can be started
    after it.

    An allocator that grows by doubling takes what is left of the address space when it gets less
    than it asks for.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    kept: mmap.mmap | None = None
    if soft != resource.RLIM_INFINITY:
        try:
            kept = mmap.mmap(-1, _reserved_bytes())  # never touched: no memory stands behind it
        except OSError:  # there is not that much left
            kept = None
    try:
        yield
    finally:
        if kept is not None:
            kept.close()


def host_memory_bytes(in_use_bytes: int) -> int:
    """Returns the least of the machine's memory, the container's limit (cgroup) and what the
    address space limit (``RLIMIT_AS``) leaves.

    Threads' stacks, Python and the planner take from the same address space, so some of it is left
    for them.

    Args:
        in_use_bytes: of what is mapped, the bytes that tensors take: they count as available.
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
