"""TensorFlow's BFC allocator, in miniature: what an order of allocations takes once chunks cannot be split at will.

The allocator's ``bytes_in_use`` counts whole chunks. A free chunk is handed out whole unless it is at least twice the request or 128 MiB larger
(``BFCAllocator::FindChunkPtr`` of TensorFlow 2.21), so a step's measured peak is above the sum of its live tensors, by a little on large
models and by a third on small ones. Replaying a schedule's allocations through the same rules predicts that part of the peak.

The replay begins with the chunks that are free and those that variables and batches are in, where the profile knows them (:mod:`.pool`). From
there it repeats a step chunk for chunk, so that what it says and what is measured differ by no more than the alignment of small values.

What is wasted in a chunk is wasted as long as its tensor lives. An order that recomputes can do without most of that: a *spacer*, memory that is
asked for just before an op and given back right after it, takes what would be wasted of the op's chunk, so that the chunk is cut to fit and the rest
of it free for others. While the op runs nothing is saved, afterwards all of it. Which ops are worth one is told by the first step of the replay.

Known limits: where the pool is not known, it is taken to be new; when the input pipeline makes its batches, and where the next region lies that
the pool grows by, is a guess.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import count
from math import ceil
from typing import Any

from keras_remat.backends.tensorflow import kinds
from keras_remat.problem import Problem
from keras_remat.profile import Chunk
from keras_remat.schedule import Schedule
from keras_remat.units import KIB, MIB

_MIN_ALLOCATION_BYTES = 256
_MAX_INTERNAL_FRAGMENTATION_BYTES = 128 * MIB
_FIRST_REGION_BYTES = 2 * MIB
#: From one region that the replay adds to the next.
_APART = 2**50
#: oneDNN's CPU allocator sends smaller requests to the system's allocator and leaves them out of its statistics.
CPU_SMALL_BYTES = 256 * KIB
#: Steps for which ``fit``'s input pipeline holds as many batches as it can; then the epoch ends, and it holds one less at every step.
_FULL_STEPS = 3
#: A spacer below this is not worth its two nodes.
_LEAST_SPACER_BYTES = 512 * KIB
#: Problems for which it is remembered what their ops do with the pool.
_REMEMBERED = 3
#: More than this it does not hold; what is in use beside it is the waste in chunks that variables have moved to.
_MOST_AHEAD = 3
#: A share of a batch that is none: garbage, or what was freed since the epoch began.
_LITTLE = 0.1


class _Chunk:
    __slots__ = ("address", "before", "behind", "free", "size")

    def __init__(self, address: int, size: int):
        self.address, self.size, self.free = address, size, True
        self.before: _Chunk | None = None
        self.behind: _Chunk | None = None


class BestFitAllocator:
    """Best fit with coalescing over growing regions.

    Args:
        smallest_bytes: requests below this are not served here (they return ``None`` and count nothing).
        pool_bytes: size of one region taken at the start, as on a GPU; where it is used up, or 0, regions grow by doubling, as on the CPU.
        free_chunks, used_chunks: what is free and in use at the start, where that is known.
        used_bytes: all that is in use at the start; with what is free it tells how large the next region will be.

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
        self._chunk_at: dict[int, _Chunk] = {}
        self._smallest = smallest_bytes
        self._region_bytes = _FIRST_REGION_BYTES
        self._next_address = count(_APART, _APART)
        self.bytes_in_use = self.peak_bytes = 0
        if pool_bytes:
            self._add(_Chunk(next(self._next_address), pool_bytes))
        before: _Chunk | None = None
        for known in sorted((*free_chunks, *used_chunks), key=lambda chunk: chunk.address):
            chunk = _Chunk(known.address, known.nbytes)
            if before is not None and before.address + before.size == chunk.address:
                before.behind, chunk.before = chunk, before
            before = self._chunk_at[chunk.address] = chunk
        for known in free_chunks:
            self._add(self._chunk_at[known.address])
        for known in used_chunks:
            self._chunk_at[known.address].free = False
        while free_chunks and self._region_bytes < (sum(chunk.nbytes for chunk in free_chunks) + used_bytes) // 2:
            self._region_bytes *= 2  # as large as all regions before it together, or nearly

    @property
    def free_chunks(self) -> tuple[tuple[int, int], ...]:
        """Size and address of every free chunk, in the order in which they are asked."""
        return tuple(self._free)

    def _add(self, chunk: _Chunk) -> None:
        insort(self._free, (chunk.size, chunk.address))
        self._chunk_at[chunk.address] = chunk

    def _remove(self, chunk: _Chunk) -> None:
        del self._free[bisect_left(self._free, (chunk.size, chunk.address))]

    def _extend(self, nbytes: int) -> None:
        grown = False
        while nbytes > self._region_bytes:
            self._region_bytes *= 2
            grown = True
        self._add(_Chunk(next(self._next_address), self._region_bytes))
        if not grown:
            self._region_bytes *= 2

    def allocate(self, nbytes: int) -> _Chunk | None:
        """Hands out a chunk of at least ``nbytes``; ``None`` for nothing or for requests served elsewhere."""
        if nbytes <= 0 or nbytes < self._smallest:
            return None
        rounded = _rounded(nbytes)
        at = bisect_left(self._free, (rounded, -1))
        if at == len(self._free):
            self._extend(rounded)
            at = bisect_left(self._free, (rounded, -1))
        chunk = self._chunk_at[self._free.pop(at)[1]]
        if _is_cut(chunk.size, rounded):
            rest = _Chunk(chunk.address + rounded, chunk.size - rounded)
            rest.before, rest.behind = chunk, chunk.behind
            if chunk.behind is not None:
                chunk.behind.before = rest
            chunk.behind, chunk.size = rest, rounded
            self._add(rest)
        chunk.free = False
        self.bytes_in_use += chunk.size
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_use)
        return chunk

    def spacer_bytes(self, nbytes: int) -> int:
        """What has to be held while ``nbytes`` are allocated, so that their chunk fits; 0 where it does, or no spacer would come from that chunk."""
        if nbytes <= 0 or nbytes < self._smallest:
            return 0
        rounded = _rounded(nbytes)
        at = bisect_left(self._free, (rounded, -1))
        if at == len(self._free):
            return 0
        size = self._free[at][0]
        spare = size - rounded
        if (
            _is_cut(size, rounded)
            or spare < max(self._smallest, _LEAST_SPACER_BYTES)
            or bisect_left(self._free, (spare, -1)) != at
        ):
            return 0
        return spare

    def chunk_at(self, address: int) -> _Chunk:
        """The chunk that begins there.

        Raises:
            KeyError: none does.
        """
        return self._chunk_at[address]

    def foreign(self, nbytes: int) -> _Chunk:
        """A chunk in use that is among the bytes in use already, of which is not known where it is: next to nothing that is free."""
        chunk = _Chunk(next(self._next_address), nbytes)
        chunk.free = False
        self._chunk_at[chunk.address] = chunk
        return chunk

    def release(self, chunk: _Chunk | None) -> None:
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
    return chunk_bytes >= 2 * request_bytes or chunk_bytes - request_bytes >= _MAX_INTERNAL_FRAGMENTATION_BYTES


def replayed(
    problem: Problem,
    schedule: Schedule,
    *,
    smallest_bytes: int = 0,
    pool_bytes: int = 0,
    pipeline: bool = False,
    steps: int = 20,
    spaced: bool = False,
) -> tuple[int, dict[int, int]]:
    """Runs a schedule through the allocator, without spacers and, where that is wanted, the schedule recomputes, and the pool is known, with them.

    Args:
        problem: the graph and its costs.
        schedule: a legal order.
        smallest_bytes: requests below this do not count (:data:`CPU_SMALL_BYTES` on the CPU).
        pool_bytes: as in :class:`BestFitAllocator`; the resident bytes are taken from it.
        pipeline: whether every step has a batch of its own, and as many more lie beside it as the pool's ``ahead_bytes`` come to; else it is
            the same one again and again.
        steps: at most; each finds the pool as the one before left it, and variables that are assigned, and the batch, lie elsewhere every time.
            Once a step finds what an earlier one did, the rest would repeat.
        spaced: whether there may be spacers.

    Returns:
        The peak over all steps, resident bytes included, and position in the order → bytes of its spacer; none where they lower nothing.
    """
    uses = _uses(problem, smallest_bytes)
    arguments = problem, uses.of(schedule), smallest_bytes, pool_bytes, pipeline, steps
    peak = _replay(*arguments, None)
    if not spaced or problem.profile.pool is None or len(set(schedule.order)) == len(schedule.order):
        return peak, {}
    spacers: dict[int, int] = {}
    spaced_peak = _replay(*arguments, spacers)
    return (spaced_peak, {at: nbytes for at, nbytes in spacers.items() if nbytes}) if spaced_peak < peak else (peak, {})


def _replay(
    problem: Problem, runs: list[_Run], smallest_bytes: int, pool_bytes: int, pipeline: bool, steps: int,
    spacers: dict[int, int] | None,
) -> int:  # fmt: skip
    """The peak; ``spacers`` is filled in by the first step, and is what the others keep to."""
    profile, pool = problem.profile, problem.profile.pool
    homes = dict(pool.homes) if pool else {}
    allocator = BestFitAllocator(
        smallest_bytes=smallest_bytes, pool_bytes=pool_bytes, free_chunks=pool.free_chunks if pool else (),
        used_chunks=tuple(dict.fromkeys((*homes.values(), *(pool.batch_chunks if pool else ())))), used_bytes=profile.resident_bytes,
    )  # fmt: skip
    resident = allocator.allocate(profile.resident_bytes) if pool_bytes else None
    base = 0 if pool_bytes else profile.resident_bytes
    # the batches are in chunks of the pool too, some of them already
    inputs = [v.nbytes for v in problem.graph.values if v.producer is None and v.nbytes >= smallest_bytes] if pool else []
    ahead, batches = 0, deque[list[_Chunk | None]]()
    if pool:
        base += pool.held_bytes - pool.ahead_bytes - problem.graph.input_bytes  # what is in use now
    if pool and inputs:
        ahead = min(_MOST_AHEAD, ceil(pool.ahead_bytes / sum(inputs) - _LITTLE)) if pipeline else 0
        held = min(ahead + 1, round(pool.held_bytes / sum(inputs)))
        places = list(pool.batch_chunks)
        batches.extend([_placed(allocator, places, nbytes) for nbytes in inputs] for _ in range(held))
    # by its first home, or the op that assigns it → where the variable is
    variables: dict[Any, _Chunk | None] = {home.address: allocator.chunk_at(home.address) for home in homes.values()}
    seen: set[tuple[Any, ...]] = set()
    for step in range(steps):
        chunks: dict[int, _Chunk | None] = {}
        of_epoch = step % (_FULL_STEPS + ahead)
        placed = [*(chunk for batch in batches for chunk in batch), *variables.values()]
        found = (of_epoch, *allocator.free_chunks, *(chunk and chunk.address for chunk in placed))
        if found in seen:
            break
        seen.add(found)
        while len(batches) <= min(ahead, _FULL_STEPS + ahead - 1 - of_epoch):
            batches.append([allocator.allocate(nbytes) for nbytes in inputs])
        for position, writes, donors, early, late, name, ending in runs:
            dying = ending
            taken_over: set[int] = set()
            spacer: _Chunk | None = None
            if spacers is not None:
                if step == 0 and writes and not any(size == writes[0][1] and v in ending for v, size in donors):
                    spacers[position] = allocator.spacer_bytes(writes[0][1])
                spacer = allocator.allocate(spacers.get(position, 0))
            before = allocator.allocate(early)
            for value_id, nbytes in writes:
                donor = next((v for v, size in donors if size == nbytes and v in ending and v not in taken_over), None)
                if donor is None:
                    chunks[value_id] = allocator.allocate(nbytes)
                else:
                    taken_over.add(donor)
                    chunks[value_id] = chunks.pop(donor)
            allocator.release(allocator.allocate(late))
            allocator.release(before)
            if name is not None and dying:
                # the variable's buffer is the value's from now on, and the one it had is free
                taken, *dying = dying
                variable = homes[name].address if name in homes else name
                old = variables[variable] if variable in variables else allocator.foreign(problem.graph.values[taken].nbytes)
                variables[variable] = chunks.pop(taken)
                allocator.release(old)
            for value_id in dying:
                allocator.release(chunks.pop(value_id, None))
            allocator.release(spacer)
        for chunk in (*chunks.values(), *(batches.popleft() if pipeline else ())):
            allocator.release(chunk)
    allocator.release(resident)
    return base + allocator.peak_bytes


#: What a run of an op does with the pool: its position in the order, the large values it writes, those whose buffers it may take over, its
#: workspace that it asks for before its outputs and after them, its name where it assigns a variable, and the values that are read last here.
_Run = tuple[int, list[tuple[int, int]], list[tuple[int, int]], int, int, str | None, list[int]]


class _Uses:
    """What the ops of a graph do with the pool, worked out once for all schedules."""

    def __init__(self, problem: Problem, smallest_bytes: int):
        graph, values = problem.graph, problem.graph.values
        self._problem, self._smallest_bytes = weakref.ref(problem), smallest_bytes
        large = [max(1, smallest_bytes) <= value.nbytes and value.producer is not None for value in values]
        kept = {v for v in graph.outputs if large[v]}
        self._kept = kept
        self._reads = [[v for v in op.inputs if large[v]] for op in graph.ops]
        self._writes = [[(v, values[v].nbytes) for v in op.outputs if large[v]] for op in graph.ops]
        self._donors = [
            [(v, values[v].nbytes) for v in op.may_reuse if v not in kept] if self._writes[op.id] else [] for op in graph.ops
        ]
        workspace = [nbytes if nbytes >= smallest_bytes else 0 for nbytes in problem.profile.op_workspace_bytes]
        early = [op.kind in kinds.WORKSPACE_FIRST for op in graph.ops]
        self._workspace = [(n, 0) if first else (0, n) for n, first in zip(workspace, early, strict=True)]
        self._assigns = [op.name if op.kind in kinds.TAKES_OVER else None for op in graph.ops]

    def are_of(self, problem: Problem, smallest_bytes: int) -> bool:
        """Whether they are those of just this problem."""
        return self._problem() is problem and self._smallest_bytes == smallest_bytes

    def of(self, schedule: Schedule) -> list[_Run]:
        """The runs of a schedule that the pool sees; a value dies where its newest instance is read last, or is computed and never read."""
        last: dict[int, int] = {}
        dying: list[list[int]] = [[] for _ in schedule.order]
        for k, op_id in enumerate(schedule.order):
            for value_id in self._reads[op_id]:
                last[value_id] = k
            for value_id, _ in self._writes[op_id]:
                if value_id in last:
                    dying[last[value_id]].append(value_id)
                last[value_id] = k
        for value_id, k in last.items():
            if value_id not in self._kept:
                dying[k].append(value_id)
        return [
            (k, self._writes[op_id], self._donors[op_id], *self._workspace[op_id], self._assigns[op_id], dying[k])
            for k, op_id in enumerate(schedule.order)
            if self._writes[op_id] or any(self._workspace[op_id]) or dying[k]
        ]


_newest_uses: list[_Uses] = []


def _uses(problem: Problem, smallest_bytes: int) -> _Uses:
    """Remembered for the problems asked for last, which searches ask for again and again."""
    for uses in _newest_uses:
        if uses.are_of(problem, smallest_bytes):
            return uses
    _newest_uses.insert(0, _Uses(problem, smallest_bytes))
    del _newest_uses[_REMEMBERED:]
    return _newest_uses[0]


def _placed(allocator: BestFitAllocator, places: list[Chunk], nbytes: int) -> _Chunk:
    """A chunk in use for an input of a batch that is there: the first of ``places`` that can hold it, which is taken out of them, or one elsewhere."""
    for at, place in enumerate(places):
        if nbytes <= place.nbytes < 2 * nbytes:
            del places[at]
            return allocator.chunk_at(place.address)
    return allocator.foreign(nbytes)
