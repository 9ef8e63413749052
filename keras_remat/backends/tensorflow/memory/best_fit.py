"""TensorFlow's BFC allocator, in miniature: what an order of allocations takes once chunks cannot
be split at will.

The allocator's ``bytes_in_use`` counts whole chunks. A free chunk is handed out whole unless it is
at least twice the request or 128 MiB larger (``BFCAllocator::FindChunkPtr`` of TensorFlow 2.21), so
a step's measured peak is above the sum of its live tensors, by a little on large models and by a
third on small ones. Replaying a schedule's allocations through the same rules predicts that part of
the peak (:mod:`.replay`).

Most of it need not be. Where an op would get a chunk that is too large, a :class:`Cut` before the
op leaves it one that fits: the spare part of the chunk is taken, then an *edge* of 320 KiB behind
it, and the spare part given back. What is left behind the edge is just what the op asks for, and
the edge keeps it from growing together with the rest::

    free chunk            |                              |
    take spare and edge   |    spare    |edge|           |
    give spare back       |             |edge|    fits   |
    the op runs           |             |edge|// output /|

Smaller chunks that would be handed out for spare or edge are taken before them, and given back with
the spare part (*plugs*). All that is in use for a moment only, and no page of it is touched. Where
even that moment would take too much, a larger edge needs fewer plugs: at worst the edge is all that
is spare, which is wasted while the op runs, and no longer afterwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from keras_remat.core.profile import Chunk
from keras_remat.units import KIB, MIB

_MIN_ALLOCATION_BYTES = 256
_MAX_INTERNAL_FRAGMENTATION_BYTES = 128 * MIB
_FIRST_REGION_BYTES = 2 * MIB
#: From one region that the replay adds to the next.
_APART = 2**50
#: oneDNN's CPU allocator sends smaller requests to the system's allocator and leaves them out of
#: its statistics.
CPU_SMALL_BYTES = 256 * KIB
#: Less than this is not worth cutting off.
_LEAST_SPARE_BYTES = 512 * KIB
#: The smallest piece of a cut: chunks of this size are among those that are known to be free
#: (:mod:`.probe`), and smaller ones may not be.
_LEAST_EDGE_BYTES = 320 * KIB


@dataclass(frozen=True)
class Cut:
    """What is taken of the pool before an op, so that there is a chunk that fits.

    Args:
        plugs: sizes of the chunks taken first, in order; given back before the op runs.
        spare_bytes: taken next, and given back before the op runs; 0 for nothing.
        edge_bytes: taken last, and held while the op runs.
    """

    plugs: tuple[int, ...]
    spare_bytes: int
    edge_bytes: int


class Block:
    """A chunk of the miniature pool, free or in use."""

    __slots__ = ("address", "before", "behind", "free", "size")

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: Block | None = None
        self.behind: Block | None = None


class BestFitAllocator:
    """Best fit with coalescing over growing regions.

    Args:
        smallest_bytes: requests below this are not served here (they return ``None`` and count
            nothing).
        pool_bytes: size of one region taken at the start, as on a GPU; where it is used up, or 0,
            regions grow by doubling, as on the CPU.
        free_chunks, used_chunks: what is free and in use at the start, where that is known.
        used_bytes: all that is in use at the start; with what is free it tells how large the next
            region will be.

    Attributes:
        bytes_in_use, peak_bytes: whole chunks handed out now, and the most so far.
    """

    def __init__(
        self,
        *,
        smallest_bytes: int = 0,
        pool_bytes: int = 0,
        free_chunks: Sequence[Chunk] = (),
        used_chunks: Sequence[Chunk] = (),
        used_bytes: int = 0,
    ):
        self._free: list[tuple[int, int]] = []  # size, address
        self._chunk_at: dict[int, Block] = {}
        self._smallest = smallest_bytes
        self._region_bytes = _FIRST_REGION_BYTES
        self._next_address = count(_APART, _APART)
        self.bytes_in_use = self.peak_bytes = 0
        if pool_bytes:
            self._add(Block(next(self._next_address), pool_bytes))
        before: Block | None = None
        for known in sorted((*free_chunks, *used_chunks), key=lambda chunk: chunk.address):
            chunk = Block(known.address, known.nbytes)
            if before is not None and before.address + before.size == chunk.address:
                before.behind, chunk.before = chunk, before
            before = self._chunk_at[chunk.address] = chunk
        for known in free_chunks:
            self._add(self._chunk_at[known.address])
        for known in used_chunks:
            self._chunk_at[known.address].free = False
        while (
            free_chunks
            and self._region_bytes < (sum(chunk.nbytes for chunk in free_chunks) + used_bytes) // 2
        ):
            self._region_bytes *= 2  # as large as all regions before it together, or nearly

    @property
    def free_chunks(self) -> tuple[tuple[int, int], ...]:
        """Size and address of every free chunk, in the order in which they are asked."""
        return tuple(self._free)

    def _add(self, chunk: Block) -> None:
        insort(self._free, (chunk.size, chunk.address))
        self._chunk_at[chunk.address] = chunk

    def _remove(self, chunk: Block) -> None:
        del self._free[bisect_left(self._free, (chunk.size, chunk.address))]

    def _extend(self, nbytes: int) -> None:
        grown = False
        while nbytes > self._region_bytes:
            self._region_bytes *= 2
            grown = True
        self._add(Block(next(self._next_address), self._region_bytes))
        if not grown:
            self._region_bytes *= 2

    def allocate(self, nbytes: int) -> Block | None:
        """Hands out a chunk of at least ``nbytes``; ``None`` for nothing or for requests served
        elsewhere."""
        if nbytes <= 0 or nbytes < self._smallest:
            return None
        rounded = _rounded(nbytes)
        at = bisect_left(self._free, (rounded, -1))
        if at == len(self._free):
            self._extend(rounded)
            at = bisect_left(self._free, (rounded, -1))
        chunk = self._chunk_at[self._free.pop(at)[1]]
        if _is_cut(chunk.size, rounded):
            rest = Block(chunk.address + rounded, chunk.size - rounded)
            rest.before, rest.behind = chunk, chunk.behind
            if chunk.behind is not None:
                chunk.behind.before = rest
            chunk.behind, chunk.size = rest, rounded
            self._add(rest)
        chunk.free = False
        self.bytes_in_use += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return chunk

    def cut_for(self, nbytes: int, wanted_bytes: int, room_bytes: int) -> Cut | None:
        """What leaves a chunk for ``nbytes`` that fits; ``None`` where there is one already, or it
        would take more than is wasted otherwise.

        Args:
            nbytes: the request.
            wanted_bytes: the request and those that follow while it is held.
            room_bytes: what may be in use beside what is now; at least ``wanted_bytes``.
        """
        rounded, least = _rounded(nbytes), _LEAST_EDGE_BYTES
        at = bisect_left(self._free, (rounded, -1))
        if nbytes < max(1, self._smallest) or at == len(self._free):
            return None
        size = self._free[at][0]
        spare = size - rounded
        if _is_cut(size, rounded) or spare < _LEAST_SPARE_BYTES:
            return None
        smaller = [other for other, _ in self._free[:at] if other >= least]
        up_to = [0, *accumulate(smaller)]
        just_above = [other + _MIN_ALLOCATION_BYTES for other in smaller]
        best = (
            spare,
            0,
            0,
        )  # bytes over the room, less the edge, and how many of the smaller chunks need no plug
        for edge in {least, spare, *just_above, *(spare - other for other in just_above)}:
            rest = spare - edge
            if edge < least or rest < 0 or 0 < rest < least:
                continue
            first = bisect_left(smaller, min(edge, rest) if rest else edge)
            plugged = up_to[-1] - up_to[first]
            best = min(
                best,
                (
                    max(0, plugged + spare - room_bytes, wanted_bytes + edge - room_bytes),
                    -edge,
                    first,
                ),
            )
        edge = -best[1]
        return Cut(tuple(smaller[best[2] :]), spare - edge, edge) if edge else None

    def take(self, cut: Cut) -> Block | None:
        """Does what a cut says; returns the edge, to be released after the op."""
        taken = [self.allocate(nbytes) for nbytes in (*cut.plugs, cut.spare_bytes)]
        edge = self.allocate(cut.edge_bytes)
        for chunk in taken:
            self.release(chunk)
        return edge

    def chunk_at(self, address: int) -> Block:
        """The chunk that begins there.

        Raises:
            KeyError: none does.
        """
        return self._chunk_at[address]

    def foreign(self, nbytes: int) -> Block:
        """A chunk in use that is among the bytes in use already, of which is not known where it is:
        next to nothing that is free."""
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
            self._remove(other)
            left.size += right.size
            left.behind = right.behind
            if right.behind is not None:
                right.behind.before = left
            chunk = left
        self._add(chunk)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _MIN_ALLOCATION_BYTES) * _MIN_ALLOCATION_BYTES


def _is_cut(chunk_bytes: int, request_bytes: int) -> bool:
    """Whether a chunk is split for a request, and not handed out whole."""
    return (
        chunk_bytes >= 2 * request_bytes
        or chunk_bytes - request_bytes >= _MAX_INTERNAL_FRAGMENTATION_BYTES
    )
