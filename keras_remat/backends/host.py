"""Finds how much memory the machine gives this process's tensors, and how many cores."""

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


def machine_bytes() -> int:
    """Returns the bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_memory_bytes(held_bytes: int) -> int:
    """Returns the bytes that tensors may take on this machine: what they hold, and what is left.

    That is the least of what the machine, the container (cgroup) and the address space limit
    (``RLIMIT_AS``) have left. Other processes, Python and the data of a fit use the same memory. In
    an address space, threads' stacks do so, too; some of it is kept for them.

    What is left of machine and container changes all the time, and a limit ought not to: both count
    in steps of a 32nd of the machine's memory or the container's limit. One step stays free for
    what a fit comes to take beside tensors.

    Args:
        held_bytes: what the tensors' allocator holds.
    """
    limits = [
        _in_steps(left_bytes + held_bytes, limit_bytes)
        for limit_bytes, left_bytes in ((machine_bytes(), _machine_left_bytes()), *_containers())
    ]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        room = max(0, soft - mapped)
        limits.append(max(0, room - room // 10 - _reserved_bytes()) + held_bytes)
    return min(limits)


def _in_steps(nbytes: int, limit_bytes: int) -> int:
    step_bytes = max(1, limit_bytes // 32)
    return max(1, min(nbytes, limit_bytes) // step_bytes - 1) * step_bytes


def _machine_left_bytes() -> int:
    """Returns what the machine can still hand out without swapping; all its memory where the system
    does not say."""
    left_kib = _numbers("/proc/meminfo").get("MemAvailable:")
    return machine_bytes() if left_kib is None else left_kib * 1024


def _containers() -> Iterator[tuple[int, int]]:
    """Yields the limit of every control group that has one, and what it has left, in bytes.

    Files that were read and are not in use any more count as left.
    """
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):  # fmt: skip
        if (text := _text(f"{folder}/{limit}")).isdigit():
            used_bytes = int(_text(f"{folder}/{used}") or 0)
            used_bytes -= _numbers(f"{folder}/memory.stat").get(cached, 0)
            yield int(text), max(0, int(text) - used_bytes)


def _text(name: str) -> str:
    """Returns the text of a file of the system; empty where there is none."""
    path = Path(name)
    return path.read_text().strip() if path.exists() else ""


def _numbers(name: str) -> dict[str, int]:
    """Returns the numbers in a file of lines that begin with a name and a number."""
    rows = (line.split() for line in _text(name).splitlines())
    return {row[0]: int(row[1]) for row in rows}
