"""Which chunks the CPU's allocator has free, told by asking it for memory; and where a step's
variables are.

Where a step's tensors land, and how much of each chunk is wasted, depends on the chunks that
earlier steps left free between what is resident. TensorFlow has no call that lists them, but its
best-fit allocator (:mod:`.best_fit`) hands a free chunk out whole when it is less than twice the
request, and its statistics say how large the chunk was: growing requests meet the free chunks in
order of size. Each one found is held until the end. No request must be larger than the largest free
chunk L, or the pool would grow; the allocator's trace tells how far one may go, by its
*fragmentation* f = (F − L) / F of the F bytes that are free. With f₀ before and f after an
allocation of a chunk of d bytes

    F (1 − f₀) = (F − d) (1 − f)        when d was not taken from the largest chunk (then f < f₀),
    so F = d (1 − f) / (f₀ − f) F (1 − f₀) − d = (F − d) (1 − f)    when it was (then f > f₀), so F
    = d f / (f − f₀)

and when F − L is used up, only the largest chunk is left, whose size is by then known well enough
to ask for all of it. What was held goes back: the pool is as it was before. Nothing is taken from
the system and no page is touched, but the allocator counts what is held, so its peak is reset
afterwards.

A variable's tensor tells where it is, and its own size, not that of its chunk: that is taken to
reach to what comes next, where this is less than twice as far. Where the batches are that the input
pipeline holds, nobody says: they are taken to be in gaps of just their size.

Where all that is free is one chunk, f is 0 and tells nothing; a hole is made in it first.

Known limits: while a session of the user's own profiler runs, there is no answer; nothing else may
allocate meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from keras_remat.backends import host
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.trace import TensorFlowStep
from keras_remat.backends.tensorflow.memory.best_fit import CPU_SMALL_BYTES
from keras_remat.backends.tensorflow.profiler.device import device_name, on_gpu
from keras_remat.backends.tensorflow.profiler.events import allocation_events
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.core.profile import Chunk
from keras_remat.units import MIB

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256
#: Growth of the requests; below 2, so that no chunk is passed over.
_GROWTH = 1.9
#: The first request; odd, so that hardly a chunk is of just this size.
_FIRST_BYTES = CPU_SMALL_BYTES + 37 * _ALIGNMENT_BYTES
_MOST_REQUESTS = 400
#: Chunks that are held at most to have one cut.
_MOST_HELD = 16
#: The largest chunk is handed out whole for a request that is this share of it, and no further
#: below it than that.
_WHOLE_SHARE, _WHOLE_BYTES = 0.75, 100 * MIB


def free_chunks() -> tuple[Chunk, ...]:
    """The free chunks of at least :data:`~.best_fit.CPU_SMALL_BYTES`, the smallest first; empty
    where they cannot be told."""
    try:
        return _probed()
    finally:
        tf.config.experimental.reset_memory_stats(device_name())


def reserve(nbytes: int) -> bool:
    """Has the CPU's pool grow by a region of at least ``nbytes``, unless it has a free chunk of
    that size; no page of it is touched.

    Returns whether it has one now.

    A pool that grows as it is needed has regions of 2, 4, 8 … MiB, which no chunk reaches across. A
    process whose address space is limited keeps those: a region that is reserved would be missing
    elsewhere. A GPU's pool takes all it may have when it starts.
    """
    if nbytes < CPU_SMALL_BYTES or host.address_space_is_limited() or on_gpu():
        return False
    try:
        tf.raw_ops.Empty(shape=[-(-nbytes // MIB), MIB], dtype=tf.uint8)
        return True
    except (
        tf.errors.ResourceExhaustedError
    ):  # more than the machine promises: it grows as it is needed
        logger.debug("keras_remat: no free region of %d bytes", nbytes)
        return False
    finally:
        tf.config.experimental.reset_memory_stats(device_name())


@contextmanager
def spaced(nbytes: int) -> Iterator[None]:
    """While it is open, what would be wasted of the chunk for a request of ``nbytes`` is held: the
    chunk is cut to fit."""
    tensor, chunk_bytes = _allocate(nbytes)
    address = _address(tensor)
    del tensor
    spare = chunk_bytes - _aligned(nbytes + _ALIGNMENT_BYTES - 1)
    held: list[Any] = []
    # smaller chunks may come first
    while (
        spare >= CPU_SMALL_BYTES
        and len(held) < _MOST_HELD
        and (not held or _address(held[-1]) != address)
    ):
        held.append(tf.raw_ops.Empty(shape=[spare], dtype=tf.uint8))
    try:
        yield
    finally:
        held.clear()


class Residents:
    """What a step's variables and constants occupy of the pool.

    Args:
        traced: the step.
        free: what :func:`free_chunks` told just before.
    """

    def __init__(self, traced: TensorFlowStep, free: Sequence[Chunk]):
        captured: dict[str, tuple[int, int]] = {}  # name → address and bytes
        for name, external in traced.captures.items():
            tensor = external if external.dtype != tf.resource else _value(external)
            nbytes = 0 if tensor is None else tensor.dtype.size * tensor.shape.num_elements()
            if tensor is None or nbytes < CPU_SMALL_BYTES:
                continue
            address = _address(tensor)
            # a variable with sparse updates is copied when it is read, to where it is not
            if not any(chunk.address <= address < chunk.address + chunk.nbytes for chunk in free):
                captured[name] = address, -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        starts = sorted(
            {chunk.address for chunk in free} | {address for address, _ in captured.values()}
        )
        following = dict(pairwise(starts))
        self._chunk: dict[str, Chunk] = {}
        for name, (address, nbytes) in captured.items():
            reach = following.get(address, address) - address
            self._chunk[name] = Chunk(address, reach if nbytes <= reach < 2 * nbytes else nbytes)
        self._traced, self._known = (
            traced,
            sorted({*free, *self._chunk.values()}, key=lambda chunk: chunk.address),
        )

    def homes(self) -> Iterator[tuple[str, Chunk]]:
        """Name of an op that makes a value's buffer a variable's → the chunk that the variable is
        in, for the large ones."""
        for op in self._traced.graph.ops:
            chunk = (
                self._chunk.get(self._traced.nodes[op.name].input[0])
                if op.kind in kinds.TAKES_OVER
                else None
            )
            if chunk is not None:
                yield op.name, chunk

    def gaps(self, sizes: Sequence[int]) -> Iterator[Chunk]:
        """What lies between known chunks and could hold one of ``sizes`` bytes."""
        for before, behind in pairwise(self._known):
            start = before.address + before.nbytes
            nbytes = behind.address - start
            if any(size <= nbytes < 2 * size for size in sizes):
                yield Chunk(start, nbytes)


def _value(handle: Any) -> Any:
    """The tensor of the variable behind a handle, which is not copied; ``None`` where there is
    none."""
    spec = private.variable_spec(handle)
    if spec is None:
        return None
    try:
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
    except tf.errors.FailedPreconditionError:  # not initialized
        return None


def _address(tensor: Any) -> int:
    """Where a tensor's first byte is; nothing is copied."""
    plain = tensor if tensor.dtype.is_bool else tf.bitcast(tensor, tf.uint8)
    address: int = np.asarray(memoryview(plain)).ctypes.data
    return address


def _probed() -> tuple[Chunk, ...]:
    fragmentation = _fragmentation(_FIRST_BYTES)
    if fragmentation is None:
        return ()
    measured = _free_and_largest(fragmentation) if fragmentation[1] > 0 else _only_chunk()
    if measured is None:
        return ()
    if measured[0] == measured[1]:
        return (_largest_chunk(measured[1]),)
    # more exactly, by a larger allocation
    measured = _free_and_largest(_fragmentation(_aligned(max(_FIRST_BYTES, measured[1] / 4))))
    if measured is None:
        return ()
    free, largest = measured
    held: list[Any] = []
    found: list[Chunk] = []
    request = _FIRST_BYTES
    for _ in range(_MOST_REQUESTS):
        beside_bytes = free - largest - sum(chunk.nbytes for chunk in found)
        if beside_bytes < request / 2:  # that is no chunk of this size
            break
        if request > largest:
            logger.debug(
                "keras_remat: the allocator's free chunks do not add up to its fragmentation"
            )
            return ()
        tensor, chunk_bytes = _allocate(request)
        if chunk_bytes > request:
            held.append(tensor)
            found.append(Chunk(_address(tensor), chunk_bytes))
            request = max(request, chunk_bytes - _ALIGNMENT_BYTES)
        else:  # cut off a chunk of at least twice this size
            request = _aligned(request * _GROWTH)
        del tensor
    return (*found, _largest_chunk(largest))


def _largest_chunk(nbytes: float) -> Chunk:
    """The largest chunk, of about ``nbytes``, while the others are held."""
    tensor, chunk_bytes = _allocate(_aligned(max(_WHOLE_SHARE * nbytes, nbytes - _WHOLE_BYTES)))
    return Chunk(_address(tensor), chunk_bytes)


def _only_chunk() -> tuple[float, float] | None:
    """Free bytes, twice, where all of them are one chunk: with a hole of a bytes cut off its
    beginning and b held behind it, f = a / (F − b)."""
    hole, nbytes = _allocate(_FIRST_BYTES)
    if nbytes > _FIRST_BYTES:  # it was handed out whole
        return nbytes, nbytes
    kept, _ = _allocate(_FIRST_BYTES)
    apart = _address(kept) - _address(hole)
    del hole
    measured = _free_and_largest(_fragmentation(_FIRST_BYTES)) if apart == _FIRST_BYTES else None
    if measured is None or abs(measured[0] - measured[1] - _FIRST_BYTES) > _ALIGNMENT_BYTES:
        return None  # there are more of them
    free = measured[0] + _FIRST_BYTES
    return free, free


def _aligned(nbytes: float) -> int:
    return int(nbytes) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def _free_and_largest(fragmentation: tuple[int, float, float] | None) -> tuple[float, float] | None:
    """Free bytes, and those of the largest free chunk, from what :func:`_fragmentation` says;
    ``None`` where that does not tell."""
    if fragmentation is None:
        return None
    taken, before, after = fragmentation
    if not 0 < before < 1 or not 0 <= after < 1 or after == before:
        return None
    free = (
        taken * (1 - after) / (before - after)
        if after < before
        else taken * after / (after - before)
    )
    return free, free * (1 - before)


def _fragmentation(nbytes: int) -> tuple[int, float, float] | None:
    """The chunk that ``nbytes`` got for a moment, and the fragmentation without and with it;
    ``None`` where no recording says."""
    recorder = Recorder()
    if not recorder.start():
        return None
    tensor, taken = _allocate(nbytes)
    del tensor
    said = {
        name: float(stats["fragmentation"])
        for _, name, stats in allocation_events(recorder.stop().planes)
        if stats.get("requested_bytes") == nbytes and "fragmentation" in stats
    }
    before, after = said.get("MemoryDeallocation"), said.get("MemoryAllocation")
    return None if before is None or after is None else (taken, before, after)


def _allocate(nbytes: int) -> tuple[Any, int]:
    """A tensor of ``nbytes`` and the size of its chunk."""
    before = _bytes_in_use()
    tensor = tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8)
    return tensor, _bytes_in_use() - before


def _bytes_in_use() -> int:
    return int(tf.config.experimental.get_memory_info(device_name())["current"])
