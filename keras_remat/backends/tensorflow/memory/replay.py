"""An order of ops, replayed through the allocator: the peak that will be measured, and the cuts
that make it lower.

The replay begins with the chunks that are free and those that variables and batches are in, where
the profile knows them (:mod:`.probe`). From there it repeats a step chunk for chunk, so that what
it says and what is measured differ by no more than the alignment of small values.

What is wasted in a chunk is wasted as long as its tensor lives. An order that recomputes may do
without that, by the cuts of :mod:`.best_fit`: the first step of the replay works out for every op
which ones it needs, and all steps keep to them.

Known limits: where the pool is not known, it is taken to be new; when the input pipeline makes its
batches, and where the next region lies that the pool grows by, is a guess.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator, Block, Cut
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Chunk
from keras_remat.core.schedule import Schedule

#: Steps for which ``fit``'s input pipeline holds as many batches as it can; then the epoch ends,
#: and it holds one less at every step.
_FULL_STEPS = 3
#: Problems for which it is remembered what their ops do with the pool.
_REMEMBERED = 3
#: More than this it does not hold; what is in use beside it is the waste in chunks that variables
#: have moved to.
_MOST_AHEAD = 3
#: For a cut that nothing else is in the way of.
_UNBOUNDED_BYTES = 2**62
#: A share of a batch that is none: garbage, or what was freed since the epoch began.
_LITTLE = 0.1


def replayed(
    problem: Problem,
    schedule: Schedule,
    *,
    smallest_bytes: int = 0,
    pool_bytes: int = 0,
    pipeline: bool = False,
    steps: int = 20,
    may_cut: bool = False,
) -> tuple[int, dict[int, tuple[Cut, ...]]]:
    """Runs a schedule through the allocator; where that is wanted, the schedule recomputes, and the
    pool is known, with cuts.

    Args:
        problem: the graph and its costs.
        schedule: a legal order.
        smallest_bytes: requests below this do not count (:data:`~.best_fit.CPU_SMALL_BYTES` on the
            CPU).
        pool_bytes: as in :class:`~.best_fit.BestFitAllocator`; the resident bytes are taken from
            it.
        pipeline: whether every step has a batch of its own, and as many more lie beside it as the
            pool's ``ahead_bytes`` come to; else it is the same one again and again, in chunks that
            fit.
        steps: at most; each finds the pool as the one before left it, and variables that are
            assigned, and the batch, lie elsewhere every time. Once a step finds what an earlier one
            did, the rest would repeat.
        may_cut: whether there may be cuts.

    Returns:
        The peak over all steps, resident bytes included, and position in the order → the cuts
        before its op, one after the other; none where they lower nothing.
    """
    runs = _uses(problem, smallest_bytes).of(schedule)
    arguments = problem, runs, smallest_bytes, pool_bytes, pipeline, steps
    if (
        not may_cut
        or problem.profile.pool is None
        or len(set(schedule.order)) == len(schedule.order)
    ):
        return _replay(*arguments, None), {}
    cuts: dict[int, tuple[Cut, ...]] = {}
    peak = _replay(*arguments, cuts)
    if peak <= problem.profile.resident_bytes + _most_alive(runs):
        return peak, cuts
    uncut = _replay(*arguments, None)
    return (peak, cuts) if peak < uncut else (uncut, {})


def _replay(
    problem: Problem,
    runs: list[_Run],
    smallest_bytes: int,
    pool_bytes: int,
    pipeline: bool,
    steps: int,
    cuts: dict[int, tuple[Cut, ...]] | None,
) -> int:
    """The peak; ``cuts`` is filled in by the first step, and is what the others keep to."""
    profile, pool = problem.profile, problem.profile.pool
    homes = dict(pool.homes) if pool else {}
    allocator = BestFitAllocator(
        smallest_bytes=smallest_bytes,
        pool_bytes=pool_bytes,
        free_chunks=pool.free_chunks if pool else (),
        used_chunks=tuple(dict.fromkeys((*homes.values(), *(pool.batch_chunks if pool else ())))),
        used_bytes=profile.resident_bytes,
    )
    resident = allocator.allocate(profile.resident_bytes) if pool_bytes else None
    base = 0 if pool_bytes else profile.resident_bytes
    # the batches are in chunks of the pool too, some of them already
    inputs = (
        [
            v.nbytes
            for v in problem.graph.values
            if v.producer is None and v.nbytes >= smallest_bytes
        ]
        if pool
        else []
    )
    ahead, batches = 0, deque[list[Block | None]]()
    if pool:
        base += pool.held_bytes - pool.ahead_bytes - problem.graph.input_bytes  # what is in use now
    if pool and inputs:
        ahead = min(_MOST_AHEAD, ceil(pool.ahead_bytes / sum(inputs) - _LITTLE)) if pipeline else 0
        held = min(ahead + 1, round(pool.held_bytes / sum(inputs)))
        places = list(pool.batch_chunks)
        batches.extend(
            [_placed(allocator, places, nbytes) for nbytes in inputs] for _ in range(held)
        )
    # what the peak would be without waste, counted as the allocator does
    target = profile.resident_bytes + _most_alive(runs) - base if cuts is not None else 0
    # by its first home, or the op that assigns it → where the variable is
    variables: dict[Any, Block | None] = {
        home.address: allocator.chunk_at(home.address) for home in homes.values()
    }
    seen: set[tuple[Any, ...]] = set()
    for step in range(steps):
        chunks: dict[int, Block | None] = {}
        of_epoch = step % (_FULL_STEPS + ahead)
        placed = [*(chunk for batch in batches for chunk in batch), *variables.values()]
        found = (of_epoch, *allocator.free_chunks, *(chunk and chunk.address for chunk in placed))
        if found in seen:
            break
        seen.add(found)
        while len(batches) <= min(ahead, _FULL_STEPS + ahead - 1 - of_epoch):
            batches.append(
                [
                    allocator.allocate(nbytes) if pipeline else _cut_to_fit(allocator, nbytes)
                    for nbytes in inputs
                ]
            )
        for position, early, writes, late, name, ending in runs:
            dying = ending
            edges: list[Block | None] = []
            if cuts is not None and step == 0:
                wanted = [early, *(nbytes for _, nbytes, donor in writes if donor is None), late]
                found_cuts, edges = _cut(allocator, wanted, target)
                if found_cuts:
                    cuts[position] = found_cuts
            elif cuts is not None and position in cuts:
                edges = [allocator.take(cut) for cut in cuts[position]]
            before = allocator.allocate(early)
            for value_id, nbytes, donor in writes:
                chunks[value_id] = (
                    allocator.allocate(nbytes) if donor is None else chunks.pop(donor)
                )
            allocator.release(allocator.allocate(late))
            allocator.release(before)
            if name is not None and dying:
                # the variable's buffer is the value's from now on, and the one it had is free
                taken, *dying = dying
                variable = homes[name].address if name in homes else name
                old = (
                    variables[variable]
                    if variable in variables
                    else allocator.foreign(problem.graph.values[taken].nbytes)
                )
                variables[variable] = chunks.pop(taken)
                allocator.release(old)
            for chunk in (*(chunks.pop(value_id, None) for value_id in dying), *edges):
                allocator.release(chunk)
        for chunk in (*chunks.values(), *(batches.popleft() if pipeline else ())):
            allocator.release(chunk)
    allocator.release(resident)
    return base + allocator.peak_bytes


def _cut(
    allocator: BestFitAllocator, requests: list[int], target_bytes: int
) -> tuple[tuple[Cut, ...], list[Block | None]]:
    """The cuts that an op needs for its requests, and their edges, which are taken.

    Args:
        allocator: as the op will find it.
        requests: bytes, in order; all are held together.
        target_bytes: what may be in use for a moment, where the op itself does not need more.
    """
    cuts, edges = list[Cut](), list[Block | None]()
    held = list[tuple[int, Block]]()
    wanted = sum(requests)
    for nbytes in requests:
        cut = allocator.cut_for(nbytes, wanted, max(wanted, target_bytes - allocator.bytes_in_use))
        if cut is not None:
            edges.append(allocator.take(cut))
            # requests before this one are in use by now, and are not when the cuts are made
            cuts.append(replace(cut, plugs=(*(size for size, _ in held), *cut.plugs)))
        chunk = allocator.allocate(nbytes)
        if chunk is not None:
            held.append((nbytes, chunk))
        wanted -= nbytes
    for _, chunk in held:
        allocator.release(chunk)
    return tuple(cuts), edges


def _most_alive(runs: list[_Run]) -> int:
    """The most bytes that values and workspaces take together."""
    alive = most = 0
    nbytes_of: dict[int, int] = {}
    for _, early, writes, late, _, dying in runs:
        most = max(
            most, alive + early + late + sum(nbytes for _, nbytes, donor in writes if donor is None)
        )
        for value_id, nbytes, _ in writes:
            nbytes_of[value_id] = nbytes
            alive += nbytes
        alive -= sum(nbytes_of.pop(value_id, 0) for value_id in dying)
    return most


class _Run(NamedTuple):
    """What a run of an op does with the pool.

    Args:
        position: in the order.
        early_bytes: workspace that it asks for before its outputs.
        writes: large values, their bytes, and the value whose buffer each takes over, if any.
        late_bytes: workspace that it asks for after its outputs.
        assigns: its name where it assigns a variable.
        dying: the large values that are read last here.
    """

    position: int
    early_bytes: int
    writes: list[tuple[int, int, int | None]]
    late_bytes: int
    assigns: str | None
    dying: list[int]


class _Uses:
    """What the ops of a graph do with the pool, worked out once for all schedules."""

    def __init__(self, problem: Problem, smallest_bytes: int):
        graph, values = problem.graph, problem.graph.values
        self._problem, self._smallest_bytes = weakref.ref(problem), smallest_bytes
        large = [
            max(1, smallest_bytes) <= value.nbytes and value.producer is not None
            for value in values
        ]
        kept = {v for v in graph.outputs if large[v]}
        self._kept = kept
        self._reads = [[v for v in op.inputs if large[v]] for op in graph.ops]
        self._writes = [[(v, values[v].nbytes) for v in op.outputs if large[v]] for op in graph.ops]
        self._donors = [
            [(v, values[v].nbytes) for v in op.may_reuse if v not in kept]
            if self._writes[op.id]
            else []
            for op in graph.ops
        ]
        workspace = [
            nbytes if nbytes >= smallest_bytes else 0
            for nbytes in problem.profile.op_workspace_bytes
        ]
        early = [op.kind in kinds.WORKSPACE_FIRST for op in graph.ops]
        self._workspace = [
            (n, 0) if first else (0, n) for n, first in zip(workspace, early, strict=True)
        ]
        self._assigns = [op.name if op.kind in kinds.TAKES_OVER else None for op in graph.ops]

    def are_of(self, problem: Problem, smallest_bytes: int) -> bool:
        """Whether they are those of just this problem."""
        return self._problem() is problem and self._smallest_bytes == smallest_bytes

    def of(self, schedule: Schedule) -> list[_Run]:
        """The runs of a schedule that the pool sees; a value dies where its newest instance is read
        last, or is computed and never read."""
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
            _Run(
                k,
                self._workspace[op_id][0],
                self._taking_over(op_id, dying[k]),
                self._workspace[op_id][1],
                self._assigns[op_id],
                dying[k],
            )
            for k, op_id in enumerate(schedule.order)
            if self._writes[op_id] or any(self._workspace[op_id]) or dying[k]
        ]

    def _taking_over(self, op_id: int, dying: list[int]) -> list[tuple[int, int, int | None]]:
        """What an op writes, each with the dying value of its size, if any, whose buffer it takes
        over."""
        result: list[tuple[int, int, int | None]] = []
        donors = [(v, size) for v, size in self._donors[op_id] if v in dying]
        for value_id, nbytes in self._writes[op_id]:
            donor = next((v for v, size in donors if size == nbytes), None)
            donors = [(v, size) for v, size in donors if v != donor]
            result.append((value_id, nbytes, donor))
        return result


_newest_uses: list[_Uses] = []


def _uses(problem: Problem, smallest_bytes: int) -> _Uses:
    """Remembered for the problems asked for last, which searches ask for again and again."""
    for uses in _newest_uses:
        if uses.are_of(problem, smallest_bytes):
            return uses
    _newest_uses.insert(0, _Uses(problem, smallest_bytes))
    del _newest_uses[_REMEMBERED:]
    return _newest_uses[0]


def _cut_to_fit(allocator: BestFitAllocator, nbytes: int) -> Block | None:
    """A chunk of just that size, as a batch outside of ``fit`` gets (:func:`.probe.spaced`)."""
    peak_bytes, cut = allocator.peak_bytes, allocator.cut_for(nbytes, nbytes, _UNBOUNDED_BYTES)
    edge = None if cut is None else allocator.take(cut)
    chunk = allocator.allocate(nbytes)
    allocator.release(edge)
    allocator.peak_bytes = max(peak_bytes, allocator.bytes_in_use)  # that was before the step
    return chunk


def _placed(allocator: BestFitAllocator, places: list[Chunk], nbytes: int) -> Block:
    """A chunk in use for an input of a batch that is there: the first of ``places`` that can hold
    it, which is taken out of them, or one elsewhere."""
    for at, place in enumerate(places):
        if nbytes <= place.nbytes < 2 * nbytes:
            del places[at]
            return allocator.chunk_at(place.address)
    return allocator.foreign(nbytes)
