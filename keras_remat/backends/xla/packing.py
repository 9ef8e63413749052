"""Computes the heap XLA needs for a schedule, which is more than the bytes alive.

XLA gives every temporary value one place in one heap for as long as it lives: the smallest gap that
is free all that time (``GlobalDecreasingSizeBestFitHeap`` in ``xla/service/heap_simulator``). It
packs twice and takes the smaller heap: once with the largest values first (of equally large ones
the longest-lived), once with the longest-lived first. In the first order, the time after a value
takes over a buffer does not count: a residual sum that is added in place and waits for the whole
step is placed last. Because of that, 7 % of the heap of a GPT-like's plan for half on an H100 are
gaps. No sum of bytes shows which schedules are left with gaps: of the heap of a U-Net's plan for a
T4 (``benchmarks/cards.py``), 0.3 % is unused at 0.7, and 15 % at 0.35.

A value that waits keeps its one place all that time. If it is computed again for its later readers
instead, it gets another place, and gaps close. The heap of that plan shrinks by 9 MiB where one
image of 18 is computed once more, while the most bytes alive stay the same
(:func:`with_fewer_gaps`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import InvalidScheduleError

PLACED_SHARE = 1e-4
"""Smallest buffer that is placed, as a share of the bytes alive; smaller ones fit into gaps. Of
EfficientNetB0's 1,816 buffers that leaves 645, in a quarter of the time and with 0.5 % less
heap."""


LEAST_GAPS = 0.01
"""Smallest gaps worth closing, as a share of the heap."""


class Buffer(NamedTuple):
    """Holds bytes from one position of an order to another one, both included.

    Args:
        nbytes: size in bytes.
        first, last: the positions.
        first_ends: last position of the buffer's first value; later values take the buffer over.
    """

    nbytes: int
    first: int
    last: int
    first_ends: int


def heap_bytes(buffers: Sequence[Buffer]) -> int:
    """Returns the size of the heap that XLA packs buffers into.

    >>> heap_bytes([Buffer(4, 0, 1, 1), Buffer(2, 1, 3, 3), Buffer(4, 2, 4, 4)])
    6
    """
    largest = sorted(buffers, key=lambda one: (-one.nbytes, one.first - one.first_ends, one.first))
    longest = sorted(buffers, key=lambda one: (one.first - one.last, -one.nbytes, one.first))
    return min(_placed_bytes(largest), _placed_bytes(longest))


def _placed_bytes(order: Sequence[Buffer]) -> int:
    """Returns the size of the heap if buffers are placed in this order."""
    first, last = np.asarray([one[1:3] for one in order], np.int64).reshape(-1, 2).T
    at, end = np.zeros((2, len(order)), np.int64)
    for k, (nbytes, born, dies, _) in enumerate(order):
        beside = np.flatnonzero((first[:k] <= dies) & (last[:k] >= born))
        beside = beside[np.argsort(at[beside], kind="stable")]
        free = np.maximum.accumulate(np.append(0, end[beside]))  # where gaps begin
        gaps = at[beside] - free[:-1]
        fits = np.flatnonzero(gaps >= nbytes)
        at[k] = free[fits[np.argmin(gaps[fits])]] if fits.size else free[-1]
        end[k] = at[k] + nbytes
    return int(end.max(initial=0))


def buffers_of(problem: Problem, schedule: Schedule, least_bytes: float = 1) -> list[Buffer]:
    """Returns the buffers of a schedule beside the resident bytes, as
    :func:`~keras_remat.core.simulate.simulate` counts them. A value that takes over another one's
    buffer prolongs that buffer. Buffers smaller than ``least_bytes`` are left out."""
    values, final = problem.graph.values, len(schedule.order) - 1
    buffers: list[Buffer] = []
    held: dict[int, int] = {}  # value → its newest buffer
    for k, instances in enumerate(last_reads(problem.graph, schedule.order)):
        op = problem.graph.ops[schedule.order[k]]
        free = [
            held[v]
            for v in op.may_reuse
            if v in held and buffers[held[v]].last == k
            if k < final or v not in problem.graph.outputs
        ]
        for value, last in instances.items():
            nbytes = values[value].nbytes
            if nbytes < least_bytes:
                continue
            held[value] = next((b for b in free if buffers[b].nbytes == nbytes), len(buffers))
            if held[value] == len(buffers):
                buffers.append(Buffer(nbytes, k, last, last))
            else:
                free.remove(held[value])
                buffers[held[value]] = buffers[held[value]]._replace(last=last)
        workspace = problem.profile.op_workspace_bytes[op.id]
        if workspace >= least_bytes:
            buffers.append(Buffer(workspace, k, k, k))
    return buffers


def packed_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns the bytes of XLA's heap for a schedule, beside the resident bytes."""
    alive = alive_bytes(problem, schedule)
    return max(alive, heap_bytes(buffers_of(problem, schedule, max(1, PLACED_SHARE * alive))))


def alive_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns the most bytes alive beside the resident ones."""
    return simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes


def with_fewer_gaps(problem: Problem, schedule: Schedule, deadline_s: float) -> Schedule | None:
    """Returns a schedule in which one op runs once more, or later, to close gaps.

    It is the one whose heap is smallest; ``None`` if none shrinks the heap, or if gaps are small.
    Each op whose result is at least half as large as the gaps is tried before each later read of
    the result. The search ends at ``deadline_s`` by ``time.thread_time``, so other processes take
    nothing of its time. In the search, buffers smaller than an eighth of the gaps are not placed.
    """
    packed = packed_bytes(problem, schedule)
    gaps = packed - alive_bytes(problem, schedule)
    if gaps < LEAST_GAPS * packed:
        return None

    def roughly(order: Schedule) -> int:
        return heap_bytes(buffers_of(problem, order, gaps / 8))

    least, found = roughly(schedule), None
    for other in _with_one_more(problem, schedule, gaps / 2):
        if time.thread_time() >= deadline_s:
            break
        if (now := roughly(other)) < least and _is_legal(problem, other):
            least, found = now, other
    return found if found and packed_bytes(problem, found) < packed else None


def _with_one_more(problem: Problem, schedule: Schedule, nbytes: float) -> Iterator[Schedule]:
    """Yields orders in which an op with a result of at least ``nbytes`` runs once more, right
    before a later read of the result. If nothing has read the op's results until then, the op runs
    only there."""
    graph, order = problem.graph, schedule.order
    for k, instances in enumerate(last_reads(problem.graph, schedule.order)):
        large = {v: last for v, last in instances.items() if graph.values[v].nbytes >= nbytes}
        is_read = False
        for at in range(k + 1, max(large.values(), default=k) + 1):
            inputs = graph.ops[order[at]].inputs
            if at > k + 1 and any(last >= at and v in inputs for v, last in large.items()):
                yield Schedule((*order[: k + is_read], *order[k + 1 : at], order[k], *order[at:]))
            is_read = is_read or any(last >= at and v in inputs for v, last in instances.items())


def _is_legal(problem: Problem, schedule: Schedule) -> bool:
    try:
        check_rules(problem, schedule)
    except InvalidScheduleError:
        return False
    return True
