"""Finds schedules whose peak on the device keeps to a budget.

A quick solver comes first. A slow one then starts from the target at which the quick one ended
(:mod:`keras_remat.planning.budget_search`).

:mod:`keras_remat.planning.request` calls :func:`within_budget` and :func:`least_over_budget`; a
search for a batch size calls :func:`new_order`.
"""

from __future__ import annotations

import logging
import math
import time

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import BudgetError, ScheduleNotFoundError
from keras_remat.planning.budget_candidate import BudgetCandidate, known_order
from keras_remat.planning.budget_search import OPTIONS, BudgetSearch
from keras_remat.planning.quick_orders import QUICK
from keras_remat.solvers import check_floor

logger = logging.getLogger(__name__)


def new_order(
    problem: Problem,
    budget_bytes: int,
    target_share: float,
    memory: MemoryModel,
    *,
    solver: str,
    time_limit_s: float,
    near: Schedule | None,
    seed: int,
    patience: float,
) -> tuple[Schedule, float, int]:
    """Solves once, and returns the order of the least peak on the device.

    The order need not fit, so the time is bounded also where none does.

    Args:
        target_share: the solver's budget as a share of ``budget_bytes``.
        patience: as in :func:`keras_remat.solvers.solve`.

    Returns:
        The order, the ratio of its peak to its bytes alive, and how many peaks were predicted.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
    """
    target = min(budget_bytes, max(problem.floor_bytes, int(target_share * budget_bytes)))
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed)
    found = search.solve_at(target, time_limit_s, near, patience)
    least = min(found, key=lambda one: one.peak_bytes)
    return least.schedule, least.peak_bytes / max(1, least.usage.peak_bytes), len(found)


def within_budget(
    problem: Problem,
    budget_bytes: int,
    memory: MemoryModel,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    clock_s: float = math.inf,
    seed: int = 0,
    known: Schedule | None = None,
) -> BudgetCandidate:
    """Returns the fastest schedule found whose peak on the *device* keeps to a budget.

    Args:
        budget_bytes: bytes that the device may have in use.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for all solves together; each gets a part of the time left. Compiling
            comes on top.
        clock_s: seconds, compiling included, after which a schedule is not improved any more.
        known: a legal order that will do where "auto" finds no faster one, such as the order that
            runs now. Even where it is over the budget, solvers stop at the time limit, also with
            nothing found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: no schedule was found; the second one has the
            candidate of the least peak.
    """
    within = problem.with_budget(budget_bytes)
    check_floor(within)
    # this may compile, so it runs before the solvers' time begins; the peak is remembered
    memory.peak_bytes(within, Schedule.store_all(problem.graph))
    most_s, began_s = min(time_limit_s, clock_s), time.perf_counter()
    deadline_s, end_s = began_s + most_s, began_s + clock_s
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed, end_s)
    if solver != "auto":
        return search.run(budget_bytes, deadline_s)[0]
    # the known order or a quick solver shows how much the device needs above the bytes alive; the
    # slow solver's first target is lower by as much
    start, is_patient = budget_bytes, known is None
    quick = None if known is None else known_order(problem, known, budget_bytes, memory)
    if quick is not None:
        start -= max(0, quick.surplus_bytes)
    else:
        quick_search = BudgetSearch(problem, budget_bytes, memory, QUICK, seed, end_s)
        sure = OPTIONS.corrections if is_patient else 1
        try:
            quick_deadline_s = time.perf_counter() + OPTIONS.quick * most_s
            quick, start = quick_search.run(budget_bytes, quick_deadline_s, sure=sure)
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
        deadline_s = quick_search.put_off(deadline_s)
    deadline_s = max(deadline_s, time.perf_counter() + OPTIONS.slow * most_s)
    try:
        sure = OPTIONS.sure_corrections if is_patient else 1
        slow, _ = search.run(start, deadline_s, sure=sure)
    except BudgetError:
        if quick is None:
            raise
        return quick
    return slow if quick is None or slow.time_s <= quick.time_s else quick


def least_over_budget(
    problem: Problem, budget_bytes: int, memory: MemoryModel, *, time_limit_s: float, seed: int = 0
) -> BudgetCandidate:
    """Returns a quick solver's schedule of the least peak, which may be over the budget.

    Raises:
        ScheduleNotFoundError: no schedule was found, not even one over the budget.
    """
    search = BudgetSearch(problem, budget_bytes, memory, QUICK, seed)
    start, deadline_s = max(budget_bytes, problem.floor_bytes), time.perf_counter() + time_limit_s
    try:
        return search.run(start, deadline_s, sure=1, approach=True)[0]
    except ScheduleNotFoundError:
        if search.least is None:
            raise
        return search.least
