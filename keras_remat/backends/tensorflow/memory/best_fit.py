"""Imitates TensorFlow's BFC allocator, which does not split every chunk.

The allocator's ``bytes_in_use`` counts whole chunks. A free chunk is handed out whole unless it is
at least twice the request or 128 MiB larger (``BFCAllocator::FindChunkPtr`` of TensorFlow 2.21), so
a step's measured peak is above the sum of its live tensors, by a little on large models and by a
third on small ones. Replaying a schedule's allocations through the same rules predicts that part of
the peak (:mod:`.replay`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from keras_remat.units import KIB, MIB

#: Chunks are multiples of this size.
GRANULE_BYTES = 256
_MAX_INTERNAL_FRAGMENTATION_BYTES = 128 * MIB
_FIRST_REGION_BYTES = 2 * MIB
#: Distance between the addresses of two regions that the replay adds.
_APART = 2**50
#: oneDNN's CPU allocator sends smaller requests to the system's allocator and leaves them out of
#: its statistics.
ONEDNN_SMALL_BYTES = 256 * KIB


class Extent(NamedTuple):
    """Holds the place of a chunk.

    Args:
        address: its first address.
        nbytes: bytes of the whole chunk.
        requested_bytes: bytes that were requested; 0 where the chunk is free.
    """

    address: int
    nbytes: int
    requested_bytes: int = 0

    @property
    def end(self) -> int:
        """Returns the first address behind the chunk."""
        return self.address + self.nbytes


class Block:
    """Represents a chunk of the imitated pool, free or in use."""

    __slots__ = ("address", "before", "behind", "free", "size")

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: Block | None = None
        self.behind: Block | None = None


class BestFitAllocator:
    """Allocates by best fit with coalescing, over one region or growing ones.

    Args:
        smallest_bytes: requests below this are not served here (they return ``None`` and count
            nothing).
        region_bytes: bytes of one region taken at the start, as on a GPU. Where it is used up, or
            0, regions are added that double in size, as on the CPU.

    Attributes:
        bytes_in_use, peak_bytes: bytes of the chunks handed out now, and the most so far.
    """

    def __init__(self, *, smallest_bytes: int = 0, region_bytes: int = 0):
        self._free: list[tuple[int, int]] = []  # size, address
        self._chunk_at: dict[int, Block] = {}
        self._smallest = smallest_bytes
        self._next_region_bytes = _FIRST_REGION_BYTES
        self._next_address = count(_APART, _APART)
        self.bytes_in_use = self.peak_bytes = 0
        if region_bytes:
            self._add(Block(next(self._next_address), region_bytes))

    def add_regions(self, extents: Iterable[Extent], total_bytes: int) -> list[Block]:
        """Takes over the chunks of existing regions; returns those in use.

        Args:
            extents: the chunks, by address.
            total_bytes: bytes of all regions.
        """
        before, in_use = None, []
        for extent in extents:
            chunk = Block(extent.address, extent.nbytes)
            if before is not None and before.address + before.size == chunk.address:
                chunk.before, before.behind = before, chunk
            if extent.requested_bytes:
                chunk.free = False
                self.bytes_in_use += chunk.size
                in_use.append(chunk)
            else:
                self._add(chunk)
            before = chunk
        while self._next_region_bytes <= total_bytes:
            self._next_region_bytes *= 2
        return in_use

    @property
    def free_chunks(self) -> tuple[tuple[int, int], ...]:
        """Returns size and address of every free chunk, in the order in which they are tried."""
        return tuple(self._free)

    def _add(self, chunk: Block) -> None:
        insort(self._free, (chunk.size, chunk.address))
        self._chunk_at[chunk.address] = chunk

    def _extend(self, nbytes: int) -> None:
        grown = False
        while nbytes > self._next_region_bytes:
            self._next_region_bytes *= 2
            grown = True
        self._add(Block(next(self._next_address), self._next_region_bytes))
        if not grown:
            self._next_region_bytes *= 2

    def allocate(self, nbytes: int) -> Block | None:
        """Hands out a chunk of at least ``nbytes``; ``None`` for 0 bytes and for requests that
        another allocator serves."""
        if nbytes <= 0 or nbytes < self._smallest:
            return None
        request = rounded(nbytes)
        at = bisect_left(self._free, (request, -1))
        if at == len(self._free):
            self._extend(request)
            at = bisect_left(self._free, (request, -1))
        chunk = self._chunk_at[self._free.pop(at)[1]]
        if _is_split(chunk.size, request):
            rest = Block(chunk.address + request, chunk.size - request)
            rest.before, rest.behind = chunk, chunk.behind
            if chunk.behind is not None:
                chunk.behind.before = rest
            chunk.behind, chunk.size = rest, request
            self._add(rest)
        chunk.free = False
        self.bytes_in_use += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return chunk

    def unplaced(self, nbytes: int) -> Block:
        """Returns a chunk in use that is counted already and whose place is unknown: it has no
        neighbours."""
        chunk = Block(next(self._next_address), nbytes)
        chunk.free = False
        self._chunk_at[chunk.address] = chunk
        return chunk

    def release(self, chunk: Block | None) -> None:
        """Takes a chunk back and joins it with its free neighbours."""
        if chunk is None:
            return
        self.bytes_in_use -= chunk.size
        chunk.free = True
        for left, right in ((chunk, chunk.behind), (chunk.before, chunk)):
            if left is None or right is None or not (left.free and right.free):
                continue
            other = right if left is chunk else left
            del self._free[bisect_left(self._free, (other.size, other.address))]
            left.size += right.size
            left.behind = right.behind
            if right.behind is not None:
                right.behind.before = left
            chunk = left
        self._add(chunk)


def rounded(nbytes: int) -> int:
    """Returns the bytes that TensorFlow's allocators round a request up to."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def _is_split(chunk_bytes: int, request_bytes: int) -> bool:
    """Returns whether a chunk is split for a request rather than handed out whole."""
    return (
        chunk_bytes >= 2 * request_bytes
        or chunk_bytes - request_bytes >= _MAX_INTERNAL_FRAGMENTATION_BYTES
    )
