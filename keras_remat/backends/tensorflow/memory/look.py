"""Looks at the pool before a first plan: what is free is asked for, piece by piece, and given back,
while TensorFlow's profiler writes down where each piece lies.

Nothing is written to the pieces, so no memory of the system's is used up. The regions that the
allocator adds for them are those that a step of as many bytes would have it add: a piece is never
larger than the region that comes next.

A free chunk is handed out whole that is less than twice the request. So what a step takes depends
on which chunks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat

import tensorflow as tf

from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.profiler.events import Allocations
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.units import KIB

#: Bytes of a first piece at least, and how many pieces have one size: each takes from the smallest
#: free chunk that will do, and the last piece that a chunk has room for gets all of its rest. So
#: chunks are seen whole, small ones first.
_FIRST_BYTES, _OF_ONE_SIZE = 16 * KIB, 64


def seen_allocations(
    held_bytes: Sequence[int], most_bytes: int, smallest_bytes: int
) -> Allocations:
    """Returns what the allocator was asked for, and given back; empty where the user's own profiler
    runs.

    Args:
        held_bytes: of what will be asked for before a step, and not be given back, each.
        most_bytes: what may be in use meanwhile.
        smallest_bytes: of a piece, at least.
    """
    recorder = Recorder()
    held = _taken(held_bytes, most_bytes)
    if not recorder.start():
        return []
    try:
        pieces = _taken(_sizes(smallest_bytes), most_bytes)
        del pieces[::2]  # the profiler tells nothing of free bytes that are all in one chunk
        pieces.clear()
    finally:
        recording = recorder.stop()
        held.clear()
    return recording.allocations


def _sizes(smallest_bytes: int) -> Iterator[int]:
    """Yields the bytes of pieces, larger and larger ones."""
    nbytes = max(_FIRST_BYTES, smallest_bytes)
    while True:
        yield from repeat(nbytes, _OF_ONE_SIZE)
        nbytes *= 2


def _taken(sizes: Iterable[int], most_bytes: int) -> list[tf.Tensor]:
    """Returns what the allocator hands out for requests, up to so many bytes in use."""
    taken: list[tf.Tensor] = []
    with suppress(tf.errors.ResourceExhaustedError):  # it has less
        for nbytes in sizes:
            if bytes_in_use() + 2 * nbytes > most_bytes:  # a chunk may be nearly twice as large
                break
            taken.append(tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8))
    return taken
