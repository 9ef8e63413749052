"""Answers every request for a plan: a request is a record, and :func:`plan_for` answers it.

A request holds everything the answer depends on, so that any process can answer it: this one, the
first of several processes for all of them, or a process beside training
(:mod:`keras_remat.planning.background`). Answering needs no framework and keeps no state.

:mod:`keras_remat.planning.calibrated_solve` finds a schedule for one budget. This module decides
which budgets and solvers are tried, and which schedule will do where none keeps to the limit.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

from keras_remat.backends.base import Backend
from keras_remat.backends.memory import DeviceMemory, MemoryModel
from keras_remat.backends.processes import Processes
from keras_remat.core.deadline import Deadline
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import (
    BudgetError,
    InfeasibleBudgetError,
    ScheduleNotFoundError,
    statement_of,
)
from keras_remat.planning.advice import advising
from keras_remat.planning.budget_candidate import BudgetCandidate, known_order
from keras_remat.planning.calibrated_solve import least_over_budget, within_budget
from keras_remat.planning.plan import Plan

logger = logging.getLogger(__name__)

#: Seconds a quick solver may take.
_QUICK_SOLVE_S = 4.0
#: Share of the limit's usable bytes less the resident ones. Where headroom leaves less than this
#: above the floor, it is given up at once: finding that there is no schedule takes many times as
#: long as finding one.
_LEAST_ROOM = 0.02


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Holds a request for a plan.

    Args:
        problem: the traced step with its costs.
        batch_size: number of samples of the step; errors advise a smaller one by it.
        limit: memory limit that the plan has to keep to.
        memory: predicts the peaks that the device will show.
        auto_solver: the solver that ``"auto"`` stands for.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        seconds: seconds for solving; compiling comes on top.
        clock_s: seconds, compiling included, after which a plan is not improved any more.
        is_quick: whether a plan to measure under is enough: a quick solver's, else the chosen
            solver's in half of its time, else in all of it.
        headroom_bytes: bytes that the plan leaves free beside the margin, if such a plan is found.
        known: a legal order that will do where the solver ``"auto"`` finds no faster one; other
            solvers do not use it.
        below_bytes: bytes. Where no plan keeps to the limit, the plan of the least peak will do if
            that peak is predicted below this; ``None`` where no plan over the limit will do.
        avoid: orders that measured over the limit; no plan over the limit may have one of them.
        failure: the error that no plan keeps to the limit, where it is known. Then the plan of the
            least peak is asked for.
        device: advises how an op could need less; ``None`` where errors give no advice.
        where: processes that train together; the first one makes the plan for all.
    """

    problem: Problem
    batch_size: int
    limit: Limit
    memory: MemoryModel
    auto_solver: str
    solver: str = "auto"
    seed: int = 0
    seconds: float = 30.0
    clock_s: float = math.inf
    is_quick: bool = False
    headroom_bytes: int = 0
    known: Schedule | None = None
    below_bytes: int | None = None
    avoid: frozenset[Schedule] = frozenset()
    failure: BudgetError | None = None
    device: DeviceMemory | None = None
    where: Processes = field(default_factory=Processes)

    @classmethod
    def on(cls, backend: Backend, **asked: Any) -> Self:
        """Returns a request for a step that a backend runs."""
        return cls(
            memory=backend.memory,
            auto_solver=backend.auto_solver,
            device=backend.device,
            **asked,
        )

    def elsewhere(self) -> Self:
        """Returns the request for another process, which knows no device."""
        return replace(self, device=None, where=Processes())

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """Returns the budgets to try: with headroom first, where it leaves room, then without."""
        usable, problem = self.limit.usable_bytes, self.problem
        within = usable - self.headroom_bytes
        least = problem.floor_bytes + _LEAST_ROOM * (usable - problem.profile.resident_bytes)
        return (usable,) if within == usable or within < least else (within, usable)


def plan_for(request: PlanRequest) -> Plan:
    """Returns the plan that is asked for.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: there is none.
    """
    return request.where.of_first(lambda: _plan_for(request))


def _plan_for(request: PlanRequest) -> Plan:
    failure, budget_bytes = request.failure, request.limit.usable_bytes
    if failure is None:
        try:
            found, asked_bytes = _within_limit(request)
            budget_bytes = budget_bytes if request.is_quick else asked_bytes
            return plan_of(request.problem, budget_bytes, request.memory, found)
        except BudgetError as error:
            if request.below_bytes is None:
                raise
            failure = error
    found = _least_over_limit(request, failure)
    return plan_of(request.problem, budget_bytes, request.memory, found)


def _within_limit(request: PlanRequest) -> tuple[BudgetCandidate, int]:
    """Returns the first schedule found within the limit, and the budget it was found for.

    The budget with headroom is tried before the one without, and for a quick plan a quick solver
    before the chosen one.
    """
    usable, solver, seconds = request.limit.usable_bytes, request.solver, request.seconds
    tries = [(solver, seconds, budget) for budget in request.budgets_bytes]
    if request.is_quick:
        quick_s = min(_QUICK_SOLVE_S, seconds)
        tries = [("greedy_first", quick_s, budget) for budget in request.budgets_bytes]
        tries += [(solver, seconds / 2, usable), (solver, seconds, usable)]
    clock, tried = Deadline(request.clock_s), set[tuple[str, int]]()
    while True:
        (solver, seconds, budget), *tries = tries
        tried.add((solver, budget))
        try:
            return _solved(request, solver, seconds, budget, clock), budget
        except InfeasibleBudgetError:
            if budget == usable:
                raise
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", statement_of(error))
            if clock.is_over:  # with no time left, the same try again finds nothing new
                tries = [one for one in tries if (one[0], one[-1]) not in tried]
            if not tries:
                raise


def _solved(
    request: PlanRequest, solver: str, seconds: float, budget_bytes: int, clock: Deadline
) -> BudgetCandidate:
    problem = request.problem
    with advising(problem, request.limit, request.batch_size, request, seed=request.seed):
        try:
            return within_budget(
                problem,
                budget_bytes,
                request.memory,
                solver=request.auto_solver if solver == "auto" else solver,
                time_limit_s=seconds,
                clock_s=clock.left_s(),
                seed=request.seed,
                known=request.known,
            )
        except ScheduleNotFoundError as error:  # names the solver that was asked for
            raise error.with_context(solver=solver) from error


def _least_over_limit(request: PlanRequest, failure: BudgetError) -> BudgetCandidate:
    """Returns the schedule of the least peak, where none keeps to the limit.

    It is the best that the failed search found. Where that search found none, or the order of ops
    matters, a quick solver's best is compared with it.

    A small predicted saving is enough for a schedule to be measured. Where the order of ops matters
    and other orders were measured, it is measured whatever is predicted, because the device's
    surplus over a prediction differs from order to order (a plan predicted at 95 MiB measured 74).

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: ``failure``, where no schedule will do.
    """
    problem, memory, usable = request.problem, request.memory, request.limit.usable_bytes
    seen: BudgetCandidate | None = getattr(failure, "least_over_limit", None)
    found = [] if seen is None else [seen]
    if seen is None or memory.order_matters:
        try:
            quick = least_over_budget(
                problem, usable, memory, time_limit_s=_QUICK_SOLVE_S, seed=request.seed
            )
            found.append(quick)
        except BudgetError as error:
            logger.debug("keras_remat: %s", statement_of(error))
    allowed = (one for one in found if one.schedule not in request.avoid)
    least = min(allowed, key=lambda one: one.peak_bytes, default=None)
    measuring_tells = bool(request.avoid) and memory.order_matters
    if least is None:
        raise failure
    below = request.below_bytes
    if below is not None and least.peak_bytes >= below and not measuring_tells:
        raise failure
    return least


def plan_by(
    problem: Problem, schedule: Schedule, budget_bytes: int, memory: MemoryModel
) -> Plan | None:
    """Returns the plan for a known order; ``None`` where it needs more than the budget.

    Args:
        schedule: as in :func:`keras_remat.planning.budget_candidate.known_order`.
    """
    found = known_order(problem, schedule, budget_bytes, memory)
    return None if found is None else plan_of(problem, budget_bytes, memory, found)


def plan_of(
    problem: Problem, budget_bytes: int, memory: MemoryModel, found: BudgetCandidate
) -> Plan:
    """Returns the plan for a candidate."""
    store_all = Schedule.store_all(problem.graph)
    predicted = Usage(found.time_s, found.peak_bytes)
    told_s = memory.compiled_step_s(problem, found.schedule) if found.is_exact else None
    told = predicted if told_s is None else Usage(told_s, found.peak_bytes)
    return Plan(
        problem.graph.fingerprint,
        budget_bytes,
        found.solution,
        Usage(
            problem.store_all_time_s,
            memory.peak_bytes(problem.with_budget(budget_bytes), store_all),
        ),
        predicted,
        compiled=told if found.is_exact else None,
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
        smallest_bytes=memory.smallest_bytes,
        writing=memory.writing(problem, found.schedule),
    )
