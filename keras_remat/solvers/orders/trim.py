"""Takes back recomputations the budget has room for.

A planner that decides while it runs (DTR) or by a rule (segments) recomputes values it could have
kept. Removing one repeated run from an order leaves it legal, saves that run's time, and costs
memory only between the last read of the instance before it and the removed position. Runs that save
the most time per byte and position are tried first. The bytes alive are kept as an array. Between
two simulations they are never underestimated, so every accepted order fits. Passes repeat until one
removes nothing.

O(passes · repeated runs · length of a gap) with vectorized gaps: fractions of a second for orders
of thousands of ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, live_bytes

MAX_PASSES = 10


def trimmed(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """Returns the order without the repeated runs that the problem's budget has room to avoid.

    Args:
        problem: a problem with a budget.
        order: a legal order; returned as it is when it does not fit.
    """
    current = tuple(order)
    for _ in range(MAX_PASSES):
        removed = _removable(problem, current)
        if not removed:
            break
        current = tuple(op_id for at, op_id in enumerate(current) if at not in removed)
    return current


def _removable(problem: Problem, order: tuple[int, ...]) -> set[int]:
    """Returns positions that can be removed together."""
    graph, time_s = problem.graph, problem.profile.op_time_s
    budget_bytes = problem.budget_bytes or 0
    live = live_bytes(problem, Schedule(order))
    if len(live) == 0 or live.max() > budget_bytes:
        return set()
    born = last_reads(problem.graph, order)
    newest: dict[int, int] = {}
    repeats: list[tuple[float, int, int]] = []
    for at, op_id in enumerate(order):
        before = newest.get(op_id)
        if before is not None:
            cost = sum(
                graph.values[v].nbytes * (at - born[before][v]) for v in graph.ops[op_id].outputs
            )
            repeats.append((-(time_s[op_id] + 1e-12) / (cost + 1), at, before))
        newest[op_id] = at
    removed: set[int] = set()
    busy: set[int] = set()  # instances whose end has changed in this pass
    for _, at, before in sorted(repeats):
        if at in busy or before in busy:
            continue
        op = graph.ops[order[at]]
        growth = np.zeros(at - before, dtype=np.int64)  # of positions before .. at - 1
        for v in op.outputs:
            end = born[before][v]
            # a takeover at its last read no longer happens
            first = end if v in graph.ops[order[end]].may_reuse else end + 1
            growth[first - before :] += graph.values[v].nbytes
        if int((live[before:at] + growth).max()) <= budget_bytes:
            live[before:at] += growth
            live[at] = 0
            removed.add(at)
            busy.update((at, before))
    return removed
