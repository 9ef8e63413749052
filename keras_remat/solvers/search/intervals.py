"""Chooses retention intervals by CP-SAT, with as many recomputations per op as pay.

Bartan et al. 2023 (MOCCASIN, arXiv 2304.14463, sec. 3) give every op of a fixed order one or two
*retention intervals* with integer ends. Here an interval is written as a run of retained segments
instead, which needs Booleans only and lifts three limits of that model: an op may run again more
than once, values recomputed in one slot do not count all at once, and buffers that are taken over
count once.

The program is in :mod:`keras_remat.solvers.search.interval_program`. To keep it small, the
candidates are only the slots where a value has a reader after a long gap, and the slots of its
recomputed readers a few levels up.

Known limits: ops that run again between two first runs do so in the order of their first runs, each
once (twice in tiny orders). The order of first runs is fixed, so the program's bound does not hold
for other orders and is not reported. ``status`` is ``"optimal"`` only when nothing is recomputed,
or when the bound that holds for every order (:mod:`keras_remat.solvers.bounds.cut_bound`) is met.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Generator, Sequence

import numpy as np

from keras_remat.core.deadline import Deadline, work_budget_s
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.topology import last_runs
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.orders.incumbent import Incumbent, seconds_of
from keras_remat.solvers.search import greedy
from keras_remat.solvers.search.interval_program import (
    SMALL_OPS,
    TINY_OPS,
    Model,
    Pair,
    recomputations,
)

DEPTHS = (2, 4, 8, 16)
"""Depths of candidates, tried one after the other; the next is tried when the program of the last
was solved to its optimum."""
WORK_PER_S = 0.12
"""Units of CP-SAT's deterministic time per second of a time limit: fewer than CP-SAT does in a
second, so that the units run out first."""
TIGHT_SHARE = 0.9
"""A gap matters when more than this share of the budget is in use somewhere in it."""
MINIMUM_S = 1.0
"""Starting the solver's process with less time left is not worth it."""


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers the schedules that CP-SAT finds over the default order.

    Raises:
        MissingPackageError: OR-Tools is not installed (the extra ``solvers``).
    """
    cp_sat.require_ortools()
    if incumbent.offer_store_all():
        return
    problem, deadline = incumbent.problem, incumbent.deadline
    base = tuple(sorted(problem.graph.needed))
    steps = greedy.steps_limit(deadline.seconds / 4)
    known = list(greedy.candidates(problem, deadline=deadline, max_steps=steps, orders=[base]))
    for order in known:
        incumbent.offer(order)
    work = work_limit(0.75 * deadline.seconds)
    for order in improve(problem, base, known, deadline=deadline, work=work, seed=seed):
        incumbent.offer(order)


def work_limit(time_limit_s: float) -> float:
    """Returns the units of CP-SAT's deterministic time within a time limit."""
    return WORK_PER_S * work_budget_s(time_limit_s)


def improve(
    problem: Problem,
    base: Sequence[int],
    known: Sequence[tuple[int, ...]],
    *,
    deadline: Deadline,
    work: float,
    depths: Sequence[int] = DEPTHS,
    seed: int = 0,
) -> Generator[tuple[int, ...], None, bool]:
    """Yields legal orders within the budget as CP-SAT finds them.

    One program is solved after the other. Within a program, each order is better by its objective
    than the one before.

    Args:
        problem: a problem with a budget.
        base: the order of the first runs.
        known: legal orders with these first runs; their recomputations become candidates, and the
            search starts from the fastest.
        deadline: deadline at which the search ends.
        work: units of CP-SAT's deterministic time (:func:`work_limit`).
        depths: for each program, the levels of recomputed readers whose slots a value's producer
            inherits.
        seed: seed of the search.

    Returns:
        Whether all programs were solved to their optimum or shown to have no solution.
    """
    known = list(known)
    with cp_sat.Worker() as worker:
        for depth in depths:
            pairs = candidates(problem, base, depth)
            for order in known:
                pairs.update(recomputations(order, base))
            hint = min(known, key=lambda o: simulate(problem, Schedule(o)).time_s, default=None)
            model = Model(problem, base, pairs, hint)
            left = deadline.left_s()
            if left <= MINIMUM_S or work <= 0:
                return False
            worker.start(model.program, time_limit_s=left, work_limit=work, seed=seed)
            for incumbent in worker.answers():
                if incumbent.ones is not None:
                    order = model.order(incumbent.ones)
                    if seconds_of(problem, order) < float("inf"):
                        known.append(order)
                        yield order
            if incumbent.status not in ("OPTIMAL", "INFEASIBLE"):
                return False
            work -= incumbent.work or 0.0
    return True


def candidates(problem: Problem, base: Sequence[int], depth: int) -> set[Pair]:
    """Returns every op with the slots in which running it again may pay.

    A slot is one where an output of the op is read after a gap in which the base order comes close
    to the budget; or where a reader of an output is a candidate itself, up to ``depth`` readers
    away, unless the output is there anyway for a read much later. In a long order, gaps shorter
    than 1/300 of it are left alone; in a short one a value is a candidate too where an op could
    take its buffer over if it were computed again afterwards; in a tiny one, everywhere in the gap.
    """
    graph = problem.graph
    place = {op_id: at for at, op_id in enumerate(base)}
    last = last_runs(problem.graph, base)  # slot after which S4 forbids another run
    live = live_bytes(problem, Schedule(tuple(base)))
    tight = np.concatenate([[0], np.cumsum(live > TIGHT_SHARE * (problem.budget_bytes or 0))])
    least_gap = max(1, len(base) // 300)
    is_small = len(base) <= SMALL_OPS
    near = len(base) if is_small else len(base) // 10
    levels: dict[int, dict[int, int]] = {}
    for op_id in reversed(base):  # readers before the ops they read from
        op = graph.ops[op_id]
        if not op.recomputable:
            continue
        found: dict[int, int] = {}
        for value_id in op.outputs:
            if not graph.values[value_id].nbytes:
                continue
            reads = sorted(place[reader] for reader in graph.readers[value_id] if reader in place)
            if value_id in graph.outputs:
                reads.append(len(base))
            for previous, read in itertools.pairwise([place[op_id], *reads]):
                # for a read after the last allowed slot, the value is computed early and held
                slot = min(read, last[op_id])
                taken = (
                    is_small
                    and value_id in graph.ops[base[previous]].may_reuse
                    and tight[previous + 1] > tight[previous]
                )
                if taken or (slot - previous > least_gap and tight[slot] > tight[previous + 1]):
                    found |= dict.fromkeys(
                        range(previous + 2, slot) if len(base) <= TINY_OPS else (), 0
                    ) | {slot: 0}
            for reader in graph.readers[value_id]:
                for slot, level in levels.get(reader, {}).items():
                    if level < depth and slot > place[op_id] + 1:
                        at = bisect_left(reads, slot)
                        if at == len(reads) or reads[at] - slot <= near:
                            found[slot] = min(found.get(slot, depth), level + 1)
        levels[op_id] = {slot: level for slot, level in found.items() if slot <= last[op_id]}
    return {(slot, op_id) for op_id, found in levels.items() for slot in found}
