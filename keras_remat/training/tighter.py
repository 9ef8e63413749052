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
    """Returns a tighter plan and its costs: of the ops that ran, or in other slices.

    Other slices are tried where the ops that ran have no plan or only a slow one. Where a step of
    whole ops has no plan within the limit, the plan that needs least may do, because the bytes that
    a device adds differ from order to order. Where one op alone needs more than the limit, slices
    come before it.

    Args:
        needed_bytes: bytes that the plan that ran is predicted to need now.
        orders: schedules that measured over the limit.

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
    """Returns a plan in other slices than those that ran.

    Where none is found, returns the plan that needs least for the ops that ran.
    """
    try:
        return tools.plans.in_slices(shape, shape.costs, error)
    except BudgetError:
        if request.below_bytes is not None:
            raise  # no plan of the ops that ran needs less
        least = replace(request, below_bytes=needed_bytes, failure=error)
        return plan_for(least), shape.costs


def _cheaper(tools: Tools, shape: PlannedShape, found: Plan) -> tuple[Plan, Costs]:
    """Returns the plan, or, where slices make it slow, a faster one in other slices.

    A GRU's tighter plan in the same slices took three times as long.
    """
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
    """Returns a plan and its costs after a step ran out of memory.

    The plan keeps to ``limit``, or else needs less than ``needed_bytes``. A running ``fit`` does
    not end because the chosen solver finds no plan: ``auto`` is asked next, and then ops run in
    slices.

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
