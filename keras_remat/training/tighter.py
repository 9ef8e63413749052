"""Finds the plan that follows one that measured over the limit, or ran out of memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.errors import BudgetError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.planning.slicing import is_dear
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import Costs, PlannedShape, ShapeState
from keras_remat.training.tools import Tools


def tighter(
    tools: Tools, shape: PlannedShape, needed_bytes: int, orders: Collection[Schedule]
) -> tuple[Plan, Costs]:
    """Returns a plan, and what it costs: of the ops that ran, or in other slices where those find
    none, or a dear one.

    Where a step of whole ops has no plan within the limit, the one that needs least may do: what a
    device adds differs from order to order. Where one op alone needs more, slices come before it.

    Args:
        needed_bytes: what the plan that ran is predicted to need now.
        orders: those that measured over the limit.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: none was found.
    """
    costs, failure = shape.costs, None
    least_may_do = costs.is_whole and tools.fit.limit.fits(costs.problem.floor_bytes)
    if least_may_do and shape.tries.replan_failed:  # costs are known to have no plan
        failure = tools.plans.not_found(costs.problem, shape.peak_bytes)
    request = tools.plans.request(
        costs.problem,
        shape.batch_size,
        below_bytes=needed_bytes if least_may_do else None,
        avoid=frozenset(orders),
        failure=failure,
    )
    found = tools.plans.reused(costs.problem, tools.known(shape), Phase.VERIFY, orders)
    try:
        found = found or plan_for(request)
    except BudgetError as error:
        return _in_other_slices(tools, shape, request, needed_bytes, error)
    return _cheaper(tools, shape, found)


def _in_other_slices(
    tools: Tools,
    shape: PlannedShape,
    request: PlanRequest,
    needed_bytes: int,
    error: BudgetError,
) -> tuple[Plan, Costs]:
    """Returns a plan in other slices than those that ran; where none is found, the plan of the ops
    that ran that needs least."""
    try:
        return tools.plans.in_slices(shape, shape.costs, error)
    except BudgetError:
        if request.below_bytes is not None:
            raise  # there was none
        least = replace(request, below_bytes=needed_bytes, failure=error)
        return plan_for(least), shape.costs


def _cheaper(tools: Tools, shape: PlannedShape, found: Plan) -> tuple[Plan, Costs]:
    """Returns a plan, or, where it is dear in the slices that ran, one in others that is faster:
    of a GRU, a tighter plan of the same slices took three times as long."""
    costs, time_s = shape.costs, found.predicted.time_s
    if costs.is_whole or not is_dear(time_s, costs.as_whole.problem):
        return found, costs
    error = tools.plans.not_found(costs.problem, shape.peak_bytes)
    try:
        return tools.plans.in_slices(shape, costs, error, below_s=time_s)
    except BudgetError:
        return found, costs


def for_less(
    tools: Tools, shape: ShapeState, costs: Costs, limit: Limit, needed_bytes: int
) -> tuple[Plan, Costs]:
    """Returns a plan, and what it costs, for a step that ran out of memory: one for a lower limit,
    or else one that needs less than ``needed_bytes``.

    A ``fit`` that runs does not end because the chosen solver finds none: ``auto`` is asked after
    it, and then ops run in slices.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: none was found.
    """
    request = tools.plans.request(
        costs.problem, shape.batch_size, limit=limit, below_bytes=needed_bytes
    )
    failure: BudgetError
    for solver in dict.fromkeys((request.solver, "auto")):
        try:
            return plan_for(replace(request, solver=solver)), costs
        except BudgetError as error:
            failure = error
    try:
        return tools.plans.in_slices(shape, costs, failure, limit=limit)
    finally:
        del failure  # it holds this frame, and with it the batch
