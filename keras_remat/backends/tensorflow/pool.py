"""Which chunks the CPU's allocator has free, told by asking it for memory.

Where a step's tensors land, and how much of each chunk is wasted, depends on the chunks that earlier steps left free between what is resident.
TensorFlow has no call that lists them, but its best-fit allocator (:mod:`.allocator`) hands a free chunk out whole when it is less than twice
the request, and its statistics say how large the chunk was: growing requests meet the free chunks in order of size. Each one found is held
until the end. No request must be larger than the largest free chunk L, or the pool would grow; the allocator's trace tells how far one may
go, by its *fragmentation* f = (F − L) / F of the F bytes that are free. With f₀ before and f after an allocation of a
chunk of d bytes

    F (1 − f₀) = (F − d) (1 − f)        when d was not taken from the largest chunk (then f < f₀), so F = d (1 − f) / (f₀ − f)
    F (1 − f₀) − d = (F − d) (1 − f)    when it was (then f > f₀), so F = d f / (f − f₀)

and when F − L is used up, only the largest chunk is left. What was held goes back: the pool is as it was before. Nothing is taken from the
system and no page is touched, but the allocator counts what is held, so its peak is reset afterwards.

Known limits: while a session of the user's own profiler runs, or with a single free chunk, there is no answer; nothing else may allocate
meanwhile.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow.allocator import CPU_SMALL_BYTES
from keras_remat.backends.tensorflow.profile import Recorder, allocation_events, device_name

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256
#: Growth of the requests; below 2, so that no chunk is passed over.
_GROWTH = 1.9
#: The first request; odd, so that hardly a chunk is of just this size.
_FIRST_BYTES = CPU_SMALL_BYTES + 37 * _ALIGNMENT_BYTES
_MOST_REQUESTS = 400


def free_chunk_bytes() -> tuple[int, ...]:
    """Sizes of the free chunks of at least :data:`~.allocator.CPU_SMALL_BYTES`, ascending; empty where they cannot be told."""
    try:
        return _probed()
    finally:
        tf.config.experimental.reset_memory_stats(device_name())


def _probed() -> tuple[int, ...]:
    measured = _free_and_largest(_FIRST_BYTES)
    if measured is None:
        return ()
    # more exactly, by a larger allocation
    measured = _free_and_largest(_aligned(max(_FIRST_BYTES, measured[1] / 4)))
    if measured is None:
        return ()
    free, largest = measured
    held: list[Any] = []
    found: list[int] = []
    request = _FIRST_BYTES
    for _ in range(_MOST_REQUESTS):
        if free - sum(found) - largest < request / 2:  # what is left beside the largest chunk is no chunk of this size
            break
        if request > largest:
            logger.debug("keras_remat: the allocator's free chunks do not add up to its fragmentation")
            return ()
        tensor, chunk_bytes = _allocate(request)
        if chunk_bytes > request:
            held.append(tensor)
            found.append(chunk_bytes)
            request = max(request, chunk_bytes - _ALIGNMENT_BYTES)
        else:  # cut off a chunk of at least twice this size
            request = _aligned(request * _GROWTH)
        del tensor
    return (*found, _aligned(largest))


def _aligned(nbytes: float) -> int:
    return int(nbytes) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def _free_and_largest(nbytes: int) -> tuple[float, float] | None:
    """Free bytes, and those of the largest free chunk, from an allocation of ``nbytes`` that is given back at once; ``None`` where that does not
    tell."""
    recorder = Recorder()
    if not recorder.start():
        return None
    tensor, taken = _allocate(nbytes)
    del tensor
    said = {
        name: float(stats["fragmentation"])
        for _, name, stats in allocation_events(recorder.stop())
        if stats.get("requested_bytes") == nbytes and "fragmentation" in stats
    }
    before, after = said.get("MemoryDeallocation"), said.get("MemoryAllocation")
    if before is None or after is None or not 0 < before < 1 or not 0 <= after < 1 or after == before:
        return None
    free = taken * (1 - after) / (before - after) if after < before else taken * after / (after - before)
    return free, free * (1 - before)


def _allocate(nbytes: int) -> tuple[Any, int]:
    """A tensor of ``nbytes`` and the size of its chunk."""
    before = _bytes_in_use()
    tensor = tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8)
    return tensor, _bytes_in_use() - before


def _bytes_in_use() -> int:
    return int(tf.config.experimental.get_memory_info(device_name())["current"])
