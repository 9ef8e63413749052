"""From a traced problem to a plan: solve → validate, under the budget that the device's *allocator*
has to keep.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from keras_remat.backends.memory import MemoryModel
from keras_remat.checks import check_seconds
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.calibrated_solve import BudgetCandidate, BudgetSearch
from keras_remat.planning.plan import Plan
from keras_remat.solvers import check_floor

logger = logging.getLogger(__name__)

#: Of the time for a plan, what the quick solver may take before "auto", and what "auto" has at
#: least.
_QUICK_SHARE, _SLOW_SHARE = 0.25, 0.5


class PlanningBackend(Protocol):
    """What solving for a plan asks of a backend."""

    @property
    def memory(self) -> MemoryModel:
        """Predicts the peaks that the device will show."""

    @property
    def auto_solver(self) -> str:
        """Returns the solver that ``"auto"`` stands for."""


def plan_problem(
    problem: Problem,
    budget_bytes: int,
    backend: PlanningBackend,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    seed: int = 0,
    known: Schedule | None = None,
) -> Plan:
    """Solves a traced problem so that the *allocator's* peak stays under the budget.

    The allocator rounds and fragments, so a schedule is solved for a little less than the budget
    (:mod:`keras_remat.planning.calibrated_solve`).

    Args:
        budget_bytes: what the device may have in use.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for all solves together; each gets a part of what is left, and a late
            one a tenth of it at least.
        known: a legal order that may keep to the budget and will do where "auto" finds no faster
            one, the one that runs now for instance. Where it does not keep to it, solvers stop at
            the time limit all the same, also with nothing found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
        ValueError, TypeError: a time limit that is not positive and finite.
    """
    check_seconds("time_limit_s", time_limit_s)
    check_floor(problem.with_budget(budget_bytes))
    memory = backend.memory
    # may compile, which is no solver's time; remembered
    memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    deadline_s = time.perf_counter() + time_limit_s
    chosen = backend.auto_solver if solver == "auto" else solver
    if chosen != "auto":
        try:
            search = BudgetSearch(problem, budget_bytes, memory, chosen, seed)
            return _solved(search, budget_bytes, deadline_s)[0]
        except ScheduleNotFoundError as error:  # names the solver that was asked for
            raise error.retold(solver=solver) from error
    # how much the allocator needs above a schedule is told by the known one or by a quick solver;
    # the slow one starts from there
    quick = None if known is None else reused_plan(problem, known, budget_bytes, memory)
    start, patient = budget_bytes, known is None
    if quick is not None:
        alive = simulate(problem, quick.solution.schedule).peak_bytes
        start -= max(0, quick.predicted.peak_bytes - alive)
    else:
        search = BudgetSearch(problem, budget_bytes, memory, "greedy_first", seed)
        quick_deadline_s = time.perf_counter() + _QUICK_SHARE * time_limit_s
        try:
            quick, start = _solved(search, budget_bytes, quick_deadline_s, patient=patient)
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
    deadline_s = max(deadline_s, time.perf_counter() + _SLOW_SHARE * time_limit_s)
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed)
    try:
        plan, _ = _solved(search, start, deadline_s, patient=patient)
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        if quick is None:
            raise
        return quick
    return plan if quick is None or plan.predicted.time_s <= quick.predicted.time_s else quick


def _solved(
    search: BudgetSearch, start: int, deadline_s: float, *, patient: bool = True
) -> tuple[Plan, int]:
    """Returns one solver's plan that keeps to the budget, and the target it was solved for."""
    try:
        found, target = search.run(start, deadline_s, patient=patient)
    except ScheduleNotFoundError as error:
        if search.closest is not None:
            error.closest = plan_of(
                search.problem, search.budget_bytes, search.memory, search.closest
            )
        raise
    return plan_of(search.problem, search.budget_bytes, search.memory, found), target


def closest_plan(
    problem: Problem,
    budget_bytes: int,
    backend: PlanningBackend,
    *,
    time_limit_s: float,
    seed: int,
) -> Plan:
    """Returns a quick solver's plan that comes closest to a budget that none may keep to.

    Raises:
        ScheduleNotFoundError: not even one over the budget was found.
    """
    search = BudgetSearch(problem, budget_bytes, backend.memory, "greedy_first", seed)
    start, deadline_s = max(budget_bytes, problem.floor_bytes), time.perf_counter() + time_limit_s
    try:
        found, _ = search.run(start, deadline_s, patient=False, approach=True)
    except ScheduleNotFoundError:
        if search.closest is None:
            raise
        found = search.closest
    return plan_of(problem, budget_bytes, backend.memory, found)


def plan_of(
    problem: Problem, budget_bytes: int, memory: MemoryModel, found: BudgetCandidate
) -> Plan:
    """Returns a schedule that was found as a plan."""
    store_all = Schedule.store_all(problem.graph)
    plain_bytes = memory.peak_bytes(problem, store_all)
    usage = Usage(found.time_s, found.peak_bytes)
    return Plan(
        problem.graph.fingerprint,
        budget_bytes,
        found.solution,
        Usage(simulate(problem, store_all).time_s, plain_bytes),
        usage,
        compiled=usage if found.is_exact else None,
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def reused_plan(
    problem: Problem, schedule: Schedule, budget_bytes: int, memory: MemoryModel
) -> Plan | None:
    """Returns a plan for a known order; ``None`` where it needs more than the budget.

    Args:
        schedule: an order of ops with the same ids, inputs and outputs, found for another batch
            size; it is therefore legal here.
    """
    usage, peak = simulate(problem, schedule), memory.peak_bytes(problem, schedule)
    if peak > budget_bytes:
        return None
    solution = Solution(schedule, "reused", "feasible", 0.0, None, usage)
    return plan_of(problem, budget_bytes, memory, BudgetCandidate(solution, usage.time_s, peak))
