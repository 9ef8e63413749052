"""Looks at the pool before a first plan: what is free is asked for, piece by piece, and given back,
while TensorFlow's profiler writes down where each piece lies.

Nothing is written to the pieces, so nothing comes to be resident that was not. The regions that the
allocator adds for them are those that a step of as many bytes would have it add: a piece is never
larger than the region that comes next. It takes 0.03 s.

What it is for: a ConvLSTM's first plan for 116.9 MiB, made for an empty pool, took 154 and 162 in
its first steps (a value of 33 MiB is handed a free region of 64 whole); made for the pool that was
seen, it took 112 and 115.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.profiler.events import Allocations
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.units import MIB

#: The first region that the CPU's allocator adds, and how many pieces are of one size: more than
#: half of all regions are in use then, and the next one is as large as all of them.
_FIRST_BYTES, _OF_ONE_SIZE = 2 * MIB, 32


def seen_allocations(most_bytes: int, smallest_bytes: int) -> Allocations:
    """Returns what the allocator was asked for, and given back; empty where the user's own profiler
    runs.

    Args:
        most_bytes: what may be in use meanwhile.
        smallest_bytes: of a piece.
    """
    recorder, held = Recorder(), list[tf.Tensor]()
    if not recorder.start():
        return []
    try:
        for nbytes in _pieces(most_bytes, smallest_bytes):
            held.append(tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8))
    except tf.errors.ResourceExhaustedError:
        pass  # it has less, and was seen whole
    finally:
        del held[::2]  # the profiler tells nothing of free bytes that are all in one chunk
        held.clear()
        recording = recorder.stop()
    return recording.allocations


def _pieces(most_bytes: int, smallest_bytes: int) -> Iterator[int]:
    """Yields the bytes of pieces, each of which has to be asked for: larger and larger ones, and
    then ever smaller ones, until as much is in use as may be."""
    nbytes, count = _FIRST_BYTES, 0
    while bytes_in_use() + nbytes <= most_bytes:
        yield nbytes
        count += 1
        if count % _OF_ONE_SIZE == 0:
            nbytes *= 2
    while nbytes >= max(1, smallest_bytes):
        if bytes_in_use() + nbytes <= most_bytes:
            yield nbytes
        else:
            nbytes //= 2
