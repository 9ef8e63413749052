"""Reconstructs the allocator's pool between two steps from a recording of steps.

TensorFlow's profiler records every allocation with its address, the bytes in use after it, and the
fragmentation: the share of the free bytes that is not in the largest free chunk
(``BFCAllocator::AddTraceMe`` of TensorFlow 2.21). That is enough to know the pool. Chunks that a
step allocates and frees are free between steps. Two events with the same largest chunk give the
bytes of all regions. Given those, every event gives the size of the largest chunk, and an
allocation from that chunk shows its place.

Known limit: a recording does not show where untouched free bytes lie, only how many there are and
how large the largest chunk is. They are assumed to be the largest chunk, or the rest of a chunk
whose front the steps used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np

from keras_remat.backends.tensorflow.memory.best_fit import GRANULE_BYTES, Extent, rounded
from keras_remat.backends.tensorflow.profiler.events import Allocations
from keras_remat.units import MIB

#: Keys that an event must have.
_SAID = frozenset(
    {"addr", "allocation_bytes", "requested_bytes", "bytes_allocated", "fragmentation"}
)
#: Regions are multiples of this size, unless the system has less.
_REGION_BYTES = 2 * MIB
#: Address given to unseen chunks: behind all seen ones.
_ELSEWHERE = 2**60
#: Rounding error of the fragmentation, which is written with six digits.
_ROUNDING = 1e-6
#: Two events give the regions' bytes only if their fragmentation differs by at least the first
#: number. A result of a smaller share of such pairs than the second number is an accident.
_LEAST_DIFFERENCE, _OFTEN_SHARE = 1e-4, 0.1
#: Largest error, as a share, of a number of bytes that still counts as the expected one.
_NEAR_SHARE = 0.01


class Pool(NamedTuple):
    """Holds what is known of a pool between two steps.

    Args:
        extents: free chunks, and chunks that a recorded step allocated and that are still in use
            after the last step; by address.
        region_bytes: bytes of all regions.
        seen_bytes: bytes of the free extents that were seen.
        batch_bytes: bytes of each array of the batch that is not among the extents.
    """

    extents: tuple[Extent, ...]
    region_bytes: int
    seen_bytes: int
    batch_bytes: tuple[int, ...] = ()

    def shows_more_than(self, other: Pool) -> bool:
        """Returns whether it shows the same regions, and more free bytes in them."""
        same_regions = self.region_bytes == other.region_bytes
        return same_regions and self.seen_bytes > other.seen_bytes


class _Event(NamedTuple):
    """Holds one allocation or deallocation.

    Args:
        is_new: whether it is an allocation.
        chunk: the chunk that is allocated or freed.
        in_use_bytes: bytes in use after it.
        largest_share: share of the free bytes that is in the largest free chunk, after it.
    """

    is_new: bool
    chunk: Extent
    in_use_bytes: int
    largest_share: float


def recorded_pool(memory: Allocations, region_bytes: int = 0) -> Pool | None:
    """Returns the pool after the recorded steps; ``None`` where the recording does not show it.

    Args:
        memory: allocations and deallocations of the steps.
        region_bytes: bytes of the allocator's only region; 0 where it adds regions.
    """
    events = list(_events(memory))
    region_bytes, since = _regions(events, region_bytes)
    events = events[since:]
    if not region_bytes:
        return None
    in_use: dict[int, Extent] = {}
    for event in events:
        if event.is_new:
            in_use[event.chunk.address] = event.chunk
        else:
            in_use.pop(event.chunk.address, None)
    extents = list(_extents(_touched(events, region_bytes), in_use))
    seen_bytes = sum(extent.nbytes for extent in extents if not extent.requested_bytes)
    unseen_bytes = region_bytes - events[-1].in_use_bytes - seen_bytes
    if unseen_bytes < -_NEAR_SHARE * region_bytes:
        return None  # a contradiction
    largest_bytes = round(events[-1].largest_share * (region_bytes - events[-1].in_use_bytes))
    cut: dict[int, int] = {}
    for _, chunk, *_ in events:
        if chunk.nbytes == rounded(chunk.requested_bytes):
            cut[chunk.end] = max(chunk.nbytes, cut.get(chunk.end, 0))
    _add_unseen(extents, cut, max(0, unseen_bytes), largest_bytes)
    return Pool(tuple(extents), region_bytes, seen_bytes)


def _add_unseen(
    extents: list[Extent], cut: dict[int, int], unseen_bytes: int, largest_bytes: int
) -> None:
    """Adds the free bytes that no step touched.

    They are the largest chunk, if no extent is that large; the rest of a chunk whose front the
    steps used; and one more chunk.

    Args:
        cut: end of a chunk that may have been split off a larger one → bytes of the chunk. The
            rest of the larger chunk has at least as many bytes.
    """

    def add(nbytes: int) -> int:
        extents.append(Extent(max(_ELSEWHERE, extents[-1].end + 1), nbytes))
        return nbytes

    behind = [*(extent.address for extent in extents[1:]), _ELSEWHERE]
    # every free extent, and the bytes between it and the next extent
    free = [
        (extent, following - extent.end)
        for extent, following in zip(extents, behind, strict=True)
        if not extent.requested_bytes
    ]
    most = max((extent.nbytes for extent, _ in free), default=0)
    is_seen = most + GRANULE_BYTES >= largest_bytes
    if not is_seen and largest_bytes <= unseen_bytes:
        unseen_bytes -= add(largest_bytes)
    # if the largest chunk was not seen, it can only begin at a front with room for all of it
    least_bytes = 0 if is_seen else largest_bytes
    fronts = [
        (extent, room_bytes)
        for extent, room_bytes in free
        if cut.get(extent.end, unseen_bytes) < unseen_bytes
        and extent.nbytes + room_bytes >= least_bytes
    ]
    if fronts:
        # prefer the front that becomes the largest chunk when all unseen bytes are added to it
        front, room_bytes = min(
            fronts, key=lambda front: abs(front[0].nbytes + unseen_bytes - largest_bytes)
        )
        rest = min(unseen_bytes, room_bytes, max(0, largest_bytes - front.nbytes))
        extents[extents.index(front)] = front._replace(nbytes=front.nbytes + rest)
        unseen_bytes -= rest
    if unseen_bytes >= GRANULE_BYTES:
        add(unseen_bytes)


def _events(memory: Allocations) -> Iterator[_Event]:
    """Yields the events that have all needed keys. Skips those of a full pool, whose fragmentation
    is not a number."""
    for _, name, said in memory:
        if not said.keys() >= _SAID or not isfinite(said["fragmentation"]):
            continue
        yield _Event(
            name == "MemoryAllocation",
            Extent(said["addr"], said["allocation_bytes"], said["requested_bytes"]),
            said["bytes_allocated"],
            1 - said["fragmentation"],
        )


def _regions(events: Sequence[_Event], expected_bytes: int) -> tuple[int, int]:
    """Returns the bytes of all regions at the end, and the index of the first event with them; 0
    and 0 where no events show them.

    The largest chunk is a share ``s`` of the free bytes ``T - u``. Where two events have the same
    largest chunk, ``s₁(T - u₁) = s₂(T - u₂)`` gives the regions' bytes ``T``. Where they do not,
    every pair gives another ``T``.

    Six digits of ``s`` are too few to compute the bytes of a card's region. They only confirm the
    expected bytes.
    """
    share = np.array([event.largest_share for event in events])
    used = np.array([event.in_use_bytes for event in events], dtype=float)
    pairs = np.flatnonzero(np.abs(np.diff(share)) > _LEAST_DIFFERENCE)
    total = np.diff(share * used)[pairs] / np.diff(share)[pairs]
    if not total.size:
        return 0, 0
    near = np.abs(total - expected_bytes) < _NEAR_SHARE * expected_bytes
    if near.mean() >= _OFTEN_SHARE:
        return expected_bytes, 0
    regions = np.rint(total / _REGION_BYTES).astype(np.int64)
    said, counts = np.unique(regions, return_counts=True)
    often = said[counts >= max(2, _OFTEN_SHARE * len(pairs))]
    if not often.size:
        return 0, 0
    newest = often.max()  # regions are never given back
    return int(newest) * _REGION_BYTES, int(pairs[np.argmax(regions == newest)])


def _touched(events: Sequence[_Event], region_bytes: int) -> list[tuple[int, int]]:
    """Returns first address and end of the events' chunks, and of the largest free chunks that some
    of them were taken from."""
    chunks = sorted({(event.chunk.address, event.chunk.end) for event in events})
    starts = [start for start, _ in chunks]
    rounding = _ROUNDING * region_bytes
    largest = [event.largest_share * (region_bytes - event.in_use_bytes) for event in events]
    for event, before, after in zip(events[1:], largest, largest[1:], strict=False):
        taken, (address, nbytes, _) = before - after, event.chunk
        if event.is_new and abs(taken - nbytes) <= 2 * rounding < nbytes / 4:
            end = address + round(before / GRANULE_BYTES) * GRANULE_BYTES
            at = bisect_left(starts, end - rounding)
            if at < len(starts) and starts[at] <= end + rounding:
                end = starts[at]  # a known chunk begins there, to rounding: it is the next one
            chunks.append((address, end))
    return sorted(chunks)


def _extents(chunks: Sequence[tuple[int, int]], in_use: dict[int, Extent]) -> Iterator[Extent]:
    """Yields the chunks in use and the free ones between them, by address.

    Args:
        chunks: first address and end of every known part of the pool; they may overlap.
        in_use: address → chunk.
    """
    joined: list[tuple[int, int]] = []
    for start, end in chunks:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    kept = sorted(in_use.values())
    for start, end in joined:
        for chunk in kept[bisect_left(kept, (start,)) : bisect_left(kept, (end,))]:
            if start < chunk.address:
                yield Extent(start, chunk.address - start)
            yield chunk
            start = chunk.end
        if start < end:
            yield Extent(start, end - start)
