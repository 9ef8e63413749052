"""The one door for plans: what is asked for is a record, and :func:`plan_for` answers it.

A request says all that the answer depends on, so that it can be answered anywhere: here, by the
first of several processes for all of them, or in a process beside training
(:mod:`keras_remat.planning.background`). Without a framework and without state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Self

from keras_remat.backends.base import Backend
from keras_remat.backends.memory import DeviceMemory, MemoryModel
from keras_remat.backends.processes import Processes
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.advice import advising
from keras_remat.planning.plan import Plan
from keras_remat.planning.plan_problem import closest_plan, plan_problem

logger = logging.getLogger(__name__)

#: What is raised where no plan is found.
NOT_FOUND = (InfeasibleBudgetError, ScheduleNotFoundError)
#: Seconds a quick solver may take.
_QUICK_SOLVE_S = 4.0


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Says what plan is asked for.

    Args:
        problem: the traced step with its costs.
        batch_size: of the step; errors say what batch would do.
        limit: what the plan has to keep to.
        memory: predicts the peaks that the device will show.
        auto_solver: the solver that ``"auto"`` stands for.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        seconds: for solving.
        is_quick: whether a plan to measure under is asked for: one that a quick solver finds, or
            the chosen one in half of its time or all.
        headroom_bytes: what the plan leaves free beside the margin, where one does.
        known: a legal order that will do where no faster one is found.
        below_bytes: where no plan keeps to the limit, the closest one will do if it is predicted to
            need less than this; ``None`` where it will not do.
        avoid: orders that measured over the limit, and are not the closest.
        failure: why no plan keeps to the limit, where that is known: the closest one is asked for.
        device: says what would lower an op's need; ``None`` where errors give no advice.
        where: of these processes the first one makes the plan, for all of them.
    """

    problem: Problem
    batch_size: int
    limit: Limit
    memory: MemoryModel
    auto_solver: str
    solver: str = "auto"
    seed: int = 0
    seconds: float = 30.0
    is_quick: bool = False
    headroom_bytes: int = 0
    known: Schedule | None = None
    below_bytes: int | None = None
    avoid: frozenset[Schedule] = frozenset()
    failure: InfeasibleBudgetError | ScheduleNotFoundError | None = None
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
        """Returns the request as another process can answer it, which knows no device."""
        return replace(self, device=None, where=Processes())

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """What the plan may need: with the headroom left, where that can be, or without."""
        usable = self.limit.usable_bytes
        return (usable - self.headroom_bytes, usable) if self.headroom_bytes else (usable,)


def plan_for(request: PlanRequest) -> Plan:
    """Returns the plan that is asked for.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: there is none.
    """
    return request.where.of_first(lambda: _planned(request))


def _planned(request: PlanRequest) -> Plan:
    failure = request.failure
    if failure is None:
        try:
            return _within_limit(request)
        except NOT_FOUND as error:
            if request.below_bytes is None:
                raise
            failure = error
    return _closest(request, failure)


def _within_limit(request: PlanRequest) -> Plan:
    """Returns the plan of the first try that finds one: with headroom, or else without; a quick
    solver's, where that will do, or else the chosen one's."""
    usable, solver, seconds = request.limit.usable_bytes, request.solver, request.seconds
    tries = [(solver, seconds, budget) for budget in request.budgets_bytes]
    if request.is_quick:
        quick_s = min(_QUICK_SOLVE_S, seconds)
        tries = [("greedy_first", quick_s, budget) for budget in request.budgets_bytes]
        tries += [(solver, seconds / 2, usable), (solver, seconds, usable)]
    *tries, last = tries
    for solver, seconds, budget in tries:
        try:
            found = _solved(replace(request, solver=solver, seconds=seconds), budget)
            return replace(found, budget_bytes=usable) if request.is_quick else found
        except InfeasibleBudgetError:
            if budget == usable:
                raise
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
    solver, seconds, budget = last
    return _solved(replace(request, solver=solver, seconds=seconds), budget)


def _solved(request: PlanRequest, budget_bytes: int) -> Plan:
    with advising(request.problem, request.limit, request.batch_size, request, seed=request.seed):
        return plan_problem(
            request.problem,
            budget_bytes,
            request,
            solver=request.solver,
            time_limit_s=request.seconds,
            seed=request.seed,
            known=request.known,
        )


def _closest(request: PlanRequest, failure: InfeasibleBudgetError | ScheduleNotFoundError) -> Plan:
    """Returns the plan that comes closest to the limit: the closest that was found when none kept
    to it, or, where no compiler has told its peak, one by a quick solver.

    It is worth a measured step, however little it is predicted to save; where the allocator
    decides and other orders were measured, whatever is predicted: what a pool adds differs from
    order to order (a plan predicted at 95 MiB measured 74).

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: ``failure``, where there is none.
    """
    seen: Plan | None = getattr(failure, "closest", None)
    found = [] if seen is None else [seen]
    if seen is None or request.memory.order_matters:
        try:
            found.append(
                closest_plan(
                    request.problem,
                    request.limit.usable_bytes,
                    request,
                    time_limit_s=_QUICK_SOLVE_S,
                    seed=request.seed,
                )
            )
        except NOT_FOUND as error:
            logger.debug("keras_remat: %s", error)
        found = [one for one in found if one.solution.schedule not in request.avoid]
    closest = min(found, key=lambda one: one.predicted.peak_bytes, default=None)
    measuring_tells = bool(request.avoid) and request.memory.order_matters
    if closest is None:
        raise failure
    below = request.below_bytes
    if below is not None and closest.predicted.peak_bytes >= below and not measuring_tells:
        raise failure
    return closest
