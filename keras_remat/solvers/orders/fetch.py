"""Fetches where a schedule recomputes, wherever that is faster.

Any solver that knows nothing of a second memory (:mod:`keras_remat.core.offload`) gives a start: a
repeated run can become a fetch at the same position, which stays legal and holds no more bytes,
since a fetch reads nothing. What was recomputed for its sake alone is then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers.orders.incumbent import Progress, run
from keras_remat.solvers.orders.trim import trimmed


def with_fetches(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """Returns a legal order that is nowhere slower, with a fetch for every repeated run that it
    replaces, together with what is then computed for nothing, at less time.

    Args:
        problem: with or without a second memory.
        order: a legal order; it may have fetches already.
    """
    if not problem.fetches:
        return tuple(order)
    count, times = len(problem.graph.ops), problem.op_time_s
    newest: dict[int, int] = {}
    made_by: list[set[int]] = []  # positions of the instances that a run reads
    reads = [0] * len(order)
    again = [False] * len(order)
    for at, op_id in enumerate(order):
        sources = problem.graph.producers(op_id) if op_id < count else ()
        made_by.append({newest[source] for source in sources})
        for instance in made_by[at]:
            reads[instance] += 1
        again[at] = problem.source_of(op_id) in newest
        newest[problem.source_of(op_id)] = at
    for value_id in problem.graph.outputs:
        producer = problem.graph.values[value_id].producer
        if producer is not None:
            reads[newest[producer]] += 1

    def exclusive(at: int) -> list[int]:
        """Returns the repeated runs that nothing needs once the one at a position reads nothing."""
        found, left, stack = [at], dict[int, int](), [at]
        while stack:
            for instance in made_by[stack.pop()]:
                left[instance] = left.get(instance, reads[instance]) - 1
                if not left[instance] and again[instance]:
                    found.append(instance)
                    stack.append(instance)
        return found

    ops: list[int | None] = list(order)
    for at in range(len(order) - 1, -1, -1):
        if ops[at] is None or not again[at]:
            continue
        op_id = order[at]
        gone = exclusive(at)
        if not reads[at]:
            ops[at] = None
        elif op_id < count and times[op_id + count] < sum(times[order[i]] for i in gone):
            ops[at] = op_id + count
        else:
            continue
        for instance in gone:
            for read in made_by[instance]:
                reads[read] -= 1
            made_by[instance] = set()
            ops[instance] = ops[instance] if instance == at else None
    return tuple(op_id for op_id in ops if op_id is not None)


def recomputing(
    search: Callable[..., None],
    problem: Problem,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Solution:
    """Runs a solver that knows nothing of fetches, and puts them where they are faster. Of its
    claims only those stay that hold with fetches, too.

    Args:
        search, problem, progress, options: as of
            :func:`keras_remat.solvers.orders.incumbent.run`.
    """
    if not problem.fetches:
        return run(search, problem, progress=progress, **options)
    plain, budget = replace(problem, offload=None), problem.budget_bytes
    if budget is not None and budget < plain.floor_bytes:
        raise ScheduleNotFoundError(budget, problem.floor_bytes)
    try:
        solution = run(search, plain, **options)
    except InfeasibleBudgetError as error:  # without fetches
        raise ScheduleNotFoundError(error.budget_bytes, problem.floor_bytes) from None
    order = with_fetches(problem, solution.schedule.order)
    if budget is not None:
        order = trimmed(problem, order, budget)
    usage = simulate(problem, Schedule(order))
    return replace(
        solution,
        schedule=Schedule(order),
        status="optimal" if len(order) == len(problem.graph.needed) else "feasible",
        lower_bound_s=min(problem.store_all_time_s, usage.time_s),
        usage=usage,
    )
