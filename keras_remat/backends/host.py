"""How much memory the machine gives this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from keras_remat.units import MIB

#: Address space kept out of an ``RLIMIT_AS``, beside a tenth of what is left: a process that cannot start a thread aborts.
_RESERVED_ADDRESS_BYTES = 96 * MIB


def host_memory_bytes(in_use_bytes: int) -> int:
    """The least of the machine's memory, the container's limit (cgroup) and what the address space limit (``RLIMIT_AS``) leaves.

    Threads' stacks, Python and the planner take from the same address space, so some of it is left for them.

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
        limits.append(max(0, room - room // 10 - _RESERVED_ADDRESS_BYTES) + in_use_bytes)
    return min(limits)
