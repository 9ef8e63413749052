"""Looks at the pool before a first plan: allocates the free memory in pieces and frees it again.

Meanwhile TensorFlow's profiler records where each piece lies. A step's peak depends on which chunks
are free, since the allocator hands out a free chunk whole if it is less than twice the request.

Nothing is written to the pieces, so they use no physical memory. The allocator adds regions for
them, but only those it would add for a step of as many bytes: a piece is never larger than the next
region.
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

#: Least bytes of the first piece, and how many pieces have one size. Each piece is taken from the
#: smallest free chunk that is large enough, and the last piece in a chunk gets all of its rest. So
#: chunks are seen whole, small ones first.
_FIRST_BYTES, _OF_ONE_SIZE = 16 * KIB, 64


def seen_allocations(
    held_bytes: Sequence[int], most_bytes: int, smallest_bytes: int
) -> Allocations:
    """Returns allocations and deallocations of the pieces; empty where the user's own profiler
    runs.

    Args:
        held_bytes: bytes of each tensor that will be allocated before a step and not freed.
        most_bytes: the most bytes that may be in use meanwhile.
        smallest_bytes: the least bytes of a piece.
    """
    recorder = Recorder()
    held = _taken(held_bytes, most_bytes)
    if not recorder.start():
        return []
    try:
        pieces = _taken(_sizes(smallest_bytes), most_bytes)
        del pieces[::2]  # the recording shows nothing while all free bytes are in one chunk
        pieces.clear()
    finally:
        recording = recorder.stop()
        held.clear()
    return recording.allocations


def _sizes(smallest_bytes: int) -> Iterator[int]:
    """Yields the bytes of the pieces, in growing sizes."""
    nbytes = max(_FIRST_BYTES, smallest_bytes)
    while True:
        yield from repeat(nbytes, _OF_ONE_SIZE)
        nbytes *= 2


def _taken(sizes: Iterable[int], most_bytes: int) -> list[tf.Tensor]:
    """Allocates tensors of the given sizes, until ``most_bytes`` bytes are in use."""
    taken: list[tf.Tensor] = []
    with suppress(tf.errors.ResourceExhaustedError):  # the device has less memory
        for nbytes in sizes:
            if bytes_in_use() + 2 * nbytes > most_bytes:  # a chunk may be nearly twice as large
                break
            taken.append(tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8))
    return taken
