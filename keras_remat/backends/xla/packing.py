"""How large a heap XLA needs for a schedule, which is more than the bytes alive.

XLA gives every temporary value one place in one heap, for as long as it lives. It places the
largest first, of equally large ones the one that lives longest, each into the smallest gap that is
free all that time (``GlobalDecreasingSizeBestFitHeap`` in ``xla/service/heap_simulator``). Which
schedules that leaves with gaps no sum of bytes tells: of the heap of a U-Net's plan for a T4
(``benchmarks/cards.py``), 0.3 % is in no use at 0.7, and 15 % at 0.35.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, simulate

PLACED_SHARE = 1e-4
"""What is smaller, as a share of the bytes alive, is not placed: it fits into gaps. Of
EfficientNetB0's 1,816 buffers that leaves 645, in a quarter of the time and 0.5 % less heap."""


class Buffer(NamedTuple):
    """Holds bytes from one position of an order to another one, both included."""

    nbytes: int
    first: int
    last: int


def heap_bytes(buffers: Sequence[Buffer]) -> int:
    """Returns the size of the heap that XLA packs buffers into.

    >>> heap_bytes([Buffer(4, 0, 1), Buffer(2, 1, 3), Buffer(4, 2, 4)])
    6
    """
    order = sorted(buffers, key=lambda one: (-one.nbytes, one.first - one.last, one.first))
    first, last = np.asarray([one[1:] for one in order], np.int64).reshape(-1, 2).T
    at, end = np.zeros((2, len(order)), np.int64)
    for k, (nbytes, born, dies) in enumerate(order):
        beside = np.flatnonzero((first[:k] <= dies) & (last[:k] >= born))
        beside = beside[np.argsort(at[beside], kind="stable")]
        free = np.maximum.accumulate(np.append(0, end[beside]))  # where gaps begin
        gaps = at[beside] - free[:-1]
        fits = np.flatnonzero(gaps >= nbytes)
        at[k] = free[fits[np.argmin(gaps[fits])]] if fits.size else free[-1]
        end[k] = at[k] + nbytes
    return int(end.max(initial=0))


def buffers_of(problem: Problem, schedule: Schedule) -> list[Buffer]:
    """Returns what a schedule has in memory beside the resident bytes, as
    :func:`~keras_remat.core.simulate.simulate` counts it: a value that takes over the buffer of
    another one prolongs it."""
    values, final = problem.graph.values, len(schedule.order) - 1
    buffers: list[Buffer] = []
    held: dict[int, int] = {}  # value → its newest buffer
    for k, instances in enumerate(last_reads(problem, schedule)):
        op = problem.ops[schedule.order[k]]
        free = [
            held[v]
            for v in op.may_reuse
            if v in held and buffers[held[v]].last == k
            if k < final or v not in problem.graph.outputs
        ]
        for value, last in instances.items():
            nbytes = values[value].nbytes
            held[value] = next((b for b in free if buffers[b].nbytes == nbytes), len(buffers))
            if held[value] == len(buffers):
                buffers.append(Buffer(nbytes, k, last))
            else:
                free.remove(held[value])
                buffers[held[value]] = buffers[held[value]]._replace(last=last)
        buffers.append(Buffer(problem.op_workspace_bytes[op.id], k, k))
    return [one for one in buffers if one.nbytes]


def packed_bytes(problem: Problem, schedule: Schedule) -> int:
    """Returns what XLA's heap takes for a schedule, beside the resident bytes."""
    alive = simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
    buffers = buffers_of(problem, schedule)
    return max(alive, heap_bytes([one for one in buffers if one.nbytes >= PLACED_SHARE * alive]))
