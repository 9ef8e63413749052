"""Which chunks the CPU's allocator has free, told by asking it for memory.

Where a step's tensors land, and how much of each chunk is wasted, depends on the chunks that earlier steps left free between what is resident.
TensorFlow has no call that lists them, but its best-fit allocator (:mod:`.allocator`) hands a free chunk out whole when it is less than twice
the request, and its trace says for every allocation how large the chunk was and how fragmented the rest is:
*fragmentation* = (free − largest free chunk) / free. So growing requests meet the free chunks in order of size. Each one found is held until
the end; when fragmentation is 0, one is left, and its size follows from the fragmentation before. No request is ever larger than the
largest free chunk, so the pool does not grow, and what was held goes back: the pool is as before.

Known limits: a session of the user's own profiler, or a single free chunk of unknown size, gives no answer; two chunks of exactly the size of a
request count as one.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow.allocator import CPU_SMALL_BYTES
from keras_remat.backends.tensorflow.profile import Recorder, allocation_events

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256
#: Growth of the requests; below 2, so that no chunk is passed over.
_GROWTH = 1.9
#: The first request; odd, so that hardly a chunk is of just this size.
_FIRST_BYTES = CPU_SMALL_BYTES + 37 * _ALIGNMENT_BYTES
_MOST_REQUESTS = 400


def free_chunk_bytes() -> tuple[int, ...]:
    """Sizes of the free chunks of at least :data:`~.allocator.CPU_SMALL_BYTES`, ascending; empty where they cannot be told."""
    held: list[Any] = []
    found: list[int] = []
    request = _FIRST_BYTES
    before = _fragmentation_now()
    for _ in range(_MOST_REQUESTS):
        if not before:  # one chunk of unknown size, or no trace
            return ()
        allocated = _allocate(request)
        if allocated is None:
            return ()
        tensor, chunk_bytes, after = allocated
        allocated = None  # the tensor's only owner is the list, or nobody
        if chunk_bytes == request:  # cut off a chunk of at least twice this size
            tensor = None
            request = int(request * _GROWTH) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
            continue
        held.append(tensor)
        found.append(chunk_bytes)
        if after == 0:  # before: chunk / (chunk + last)
            return (*found, round(chunk_bytes * (1 - before) / before / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        before = after
        request = max(request, chunk_bytes - _ALIGNMENT_BYTES)
    logger.debug("keras_remat: the allocator has more than %d free chunks", len(found))
    return ()


def _fragmentation_now() -> float | None:
    """Fragmentation of the pool as it is, from a chunk that is taken and given back."""
    recorder = Recorder()
    if not recorder.start():
        return None
    tensor = tf.raw_ops.Empty(shape=[_FIRST_BYTES], dtype=tf.uint8)
    del tensor
    freed = [stats for _, name, stats in allocation_events(recorder.stop()) if name == "MemoryDeallocation"]
    return float(freed[-1]["fragmentation"]) if freed else None


def _allocate(nbytes: int) -> tuple[Any, int, float] | None:
    """A tensor of ``nbytes``, the size of its chunk, and the fragmentation of what is free then."""
    recorder = Recorder()
    if not recorder.start():
        return None
    tensor = tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8)
    events = allocation_events(recorder.stop())
    ours = [s for _, name, s in events if name == "MemoryAllocation" and s.get("requested_bytes") == nbytes]
    if not ours:
        return None
    return tensor, int(ours[-1]["allocation_bytes"]), float(ours[-1]["fragmentation"])
