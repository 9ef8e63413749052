"""Bounds the time of every legal schedule from below, whatever its order, by a single cut.

Take an op that every schedule runs, the cut. When it first runs, each value that is needed
afterwards is alive, or its op runs again. That is the program of
:mod:`keras_remat.solvers.bounds.window_bound` with a single cut, and its linear relaxation is
solved in a second for 10,000 ops. The bound is the largest over some cuts: the recomputations that
different cuts enforce are not added up.
"""

from __future__ import annotations

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.core.topology import ancestors_of, descendants_of
from keras_remat.solvers.bounds import window_bound

CUTS = 6
SAMPLE = 40
"""Number of ops among which the cuts are chosen."""


def lower_bound_s(problem: Problem, *, deadline: Deadline) -> float:
    """Returns seconds that no legal schedule within the budget beats; at least the store-all time.

    Args:
        problem: a problem with a budget or without.
        deadline: no cut is tried after it.
    """
    best = problem.store_all_time_s
    if problem.budget_bytes is None:
        return best
    for op_id in promising_cuts(problem):
        if deadline.is_over:
            break
        limit_s = max(0.1, deadline.left_s())
        bound = window_bound.lower_bound_s(problem, [op_id], limit_s=limit_s, relax=True)
        best = max(best, bound)
    return best


def promising_cuts(problem: Problem) -> list[int]:
    """Returns ops at whose first run most bytes must be alive or recomputed, most first."""
    order = Schedule.store_all(problem.graph).order
    live = live_bytes(problem, Schedule(order))
    over = np.flatnonzero(live > (problem.budget_bytes or 0))
    if not len(over):
        return []
    sample = over[np.linspace(0, len(over) - 1, min(len(over), SAMPLE)).astype(int)]
    picked = dict.fromkeys([int(np.argmax(live)), *(int(at) for at in sample)])
    crossing = {order[at]: crossing_bytes(problem, order[at]) for at in picked}
    return sorted(crossing, key=lambda op_id: (-crossing[op_id], op_id))[:CUTS]


def crossing_bytes(problem: Problem, cut: int) -> int:
    """Returns the bytes of the values that cross a cut, and of the cut's outputs.

    These values are computed by ancestors of ``cut``, and read by it or its descendants.
    """
    graph = problem.graph
    later = descendants_of(graph, cut) | {cut}
    total = sum(graph.values[v].nbytes for v in graph.ops[cut].outputs)
    for op_id in ancestors_of(graph, cut):
        for value_id in graph.ops[op_id].outputs:
            if not later.isdisjoint(graph.readers[value_id]):
                total += graph.values[value_id].nbytes
    return total
