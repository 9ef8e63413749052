"""Makes the moves that the table decides on: each returns how a shape is trained next.

Each move has a function of its name. A function that needs a plan raises
:class:`~keras_remat.errors.InfeasibleBudgetError` or
:class:`~keras_remat.errors.ScheduleNotFoundError` where none is found, and
:class:`~keras_remat.errors.UnsupportedModelError` where the step cannot be swapped; :func:`make`
returns the error as a fact for the next decision (:mod:`keras_remat.training.decide`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keras_remat.core.schedule import Usage
from keras_remat.errors import BudgetError, UnsupportedModelError, statement_of
from keras_remat.planning.background import PlanProcess, PlanProcessError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import plan_for
from keras_remat.planning.slicing import told_whole
from keras_remat.training import tell
from keras_remat.training.decide import Move, Phase, Recorded
from keras_remat.training.record import FitRecord
from keras_remat.training.shape_state import (
    Costs,
    OverLimit,
    PlainShape,
    PlannedShape,
    Recording,
    ShapeState,
    Solving,
    TracedShape,
)
from keras_remat.training.tighter import for_less, tighter
from keras_remat.training.tools import Tools
from keras_remat.training.undo import Outcome, OutOfMemory

logger = logging.getLogger(__name__)

#: Least seconds that a faster plan must be able to save; below, it is not solved for.
_LEAST_SOLVE_S = 0.5


def costs_of(tools: Tools, shape: ShapeState, batch: Any) -> Costs:
    """Returns the costs of a shape's step, which is traced where it was not."""
    if isinstance(shape, TracedShape):
        return shape.costs
    return tools.costs.trace(batch, tools.known(shape))


def stay(tools: Tools, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
    """Changes nothing."""
    return shape


def plan(tools: Tools, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
    """Plans for a plain step that measured over the limit.

    It ran in no order and with other ops, so its peak says little about a plan's: the plan is made
    as if it had not run.
    """
    costs = costs_of(tools, shape, outcome.batch)
    predicted = tools.costs.plain_peak_bytes(costs)
    tools.fit.event(
        *tell.plain_exceeds(shape.batch_size, shape.peak_bytes, predicted, tools.fit.limit)
    )
    costs = tools.costs.put_back(costs)
    is_final = costs.problem.profile.source == "measured"
    with tools.fit.progress("planning"):
        request = tools.plans.with_headroom(shape, costs, tools.known(shape), is_final=is_final)
        found = plan_for(request)
    shape = shape.traced(costs) if not isinstance(shape, TracedShape) else shape
    shape = shape.with_over_limit()
    return tools.plans.lowered(shape, costs, found, phase)


def profile(tools: Tools, shape: PlainShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Runs a quick plan in place of the plain step, which fits, so that it can be recorded."""
    costs, known = shape.costs, tools.known(shape)
    with tools.fit.progress("planning steps that are recorded"):
        found = plan_for(tools.plans.with_headroom(shape, costs, known, is_final=False))
    planned = tools.plans.lowered(shape, costs, found, phase)
    tools.fit.event(*tell.will_record())
    return planned


def start_recorder(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Records the next steps, unless the same ops were measured at a larger shape."""
    recording = shape.recording(tools.backend.recorder(), phase)
    problem, seen = shape.costs.problem, tools.known(shape).costs
    larger = [c for c in seen if c.graph.input_bytes >= problem.graph.input_bytes]
    if not shape.costs.is_whole or not larger or larger[0].profile.source != "measured":
        return recording
    told = tools.costs.as_seen(problem, larger[0])
    told = replace(told, profile=replace(told.profile, source="measured"))
    known = replace(shape.costs, problem=told)
    return replace(recording, recorded=Recorded.MEASURED, costs=known)


def end_recording(tools: Tools, shape: Recording) -> Recording:
    """Ends a recording and returns the shape with its measured profile, if there is one."""
    resident = shape.resident_bytes if tools.backend.device.has_statistics else None
    with tools.fit.long_task("reading the profile"):
        profile = shape.recorder.stop(shape.run, resident)
        if shape.recorder.remark:
            tools.fit.event(*tell.recorded(shape.recorder.remark))
        if profile is None:
            return replace(shape, started=False, recorded=Recorded.BLIND)
        costs = replace(shape.costs, problem=replace(shape.costs.problem, profile=profile))
        shape = replace(shape, started=False, recorded=Recorded.MEASURED, costs=costs)
        _observe(tools, shape)
        return shape


def _observe(tools: Tools, shape: PlannedShape) -> None:
    """Tells the memory model what the steps of this phase measured."""
    if tools.backend.device.has_statistics and shape.steps:
        problem, peak = shape.costs.problem, shape.peak_bytes
        tools.backend.memory.observe(problem, shape.schedule, peak)


def keep_plan(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Keeps the plan, and predicts it again by the newest profile."""
    if shape.recorded is not Recorded.MEASURED:
        tools.fit.event(*tell.recorded_nothing(is_busy=shape.recorded is Recorded.BUSY))
    problem = shape.costs.problem
    now = tools.costs.predict(problem, shape.schedule)
    told = replace(
        shape.plan,
        predicted=now,
        store_all=tools.costs.predict(problem, shape.costs.store_all),
        profile_source=problem.profile.source,
    )
    told = told_whole(told, shape.costs.traced, problem, tools.backend.memory)
    return replace(shape.planned(shape.run, shape.costs, told, phase), called=True)


def run_plain(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Goes on with Keras's own step, which fits by measurement."""
    if shape.tries.profiled:
        tools.fit.event(*tell.plain_is_back())
    else:
        needed = tools.costs.plain_peak_bytes(shape.costs)
        tools.fit.event(*tell.plain_fits_after_all(needed, tools.fit.limit))
    return shape.plainly(tools.fit.installed.run_plain, shape.costs, phase)


def start_solver(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Lets a process solve while training goes on, unless there is nothing to solve."""
    costs, known = shape.costs, tools.known(shape)
    most_s = tools.most_saved_s(costs.problem, tools.costs.predict(costs.problem, shape.schedule))
    reused = tools.plans.reused(costs.problem, known, Phase.VERIFY)
    if most_s < _LEAST_SOLVE_S or reused is not None:
        return shape.solving(None, phase)
    request = tools.plans.with_headroom(shape, costs, known, shape.schedule, most_s=most_s)
    try:
        process = PlanProcess(request)
    except OSError as error:
        tools.fit.warn(*tell.cannot_solve_beside(error))
        return shape.solving(None, phase)
    tools.fit.event(*tell.solves_beside())
    return shape.solving(process, phase)


def _solved_beside(tools: Tools, shape: PlannedShape) -> Plan | None:
    """Returns what the process beside training found; ``None`` where it cannot be used.

    Raises:
        ScheduleNotFoundError: it found nothing.
    """
    if not isinstance(shape, Solving) or shape.process is None:
        return None
    problem = shape.costs.problem
    try:
        found = shape.process.answer()
    except PlanProcessError as error:
        tools.fit.warn(*tell.solved_nothing_beside(error))
        return None
    except BudgetError as error:  # its budget is a part of the limit
        raise tools.plans.not_found(problem) from error
    # the memory model has seen more steps meanwhile
    now = tools.costs.predict(problem, found.solution.schedule)
    return replace(found, predicted=now) if tools.fit.limit.fits(now.peak_bytes) else None


def replan(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Plans again from the measured profile, or keeps the plan where it is as good.

    An order that was made this way for another shape is taken, where it fits.
    """
    costs, known = shape.costs, tools.known(shape)
    now = tools.costs.predict(costs.problem, shape.schedule)
    fits = tools.fit.limit.fits(now.peak_bytes)
    most_s = tools.most_saved_s(costs.problem, now)
    if most_s < _LEAST_SOLVE_S:
        tools.fit.event(*tell.saves_too_little(tools.fit.most_steps_left, _LEAST_SOLVE_S))
        return keep_plan(tools, shape, outcome, phase)
    try:
        with tools.fit.progress("solving for the schedule"):
            request = tools.plans.with_headroom(shape, costs, known, shape.schedule, most_s=most_s)
            found = (
                tools.plans.reused(costs.problem, known, Phase.VERIFY)
                or _solved_beside(tools, shape)
                or plan_for(request)
            )
    except BudgetError as error:
        tools.fit.event(*tell.kept(error))
        raise
    if fits and found.predicted.time_s >= now.time_s:
        return keep_plan(tools, shape, outcome, phase)
    tools.fit.event(*tell.swapped(found))
    return tools.plans.lowered(shape, costs, found, phase)


def tighten(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Plans again for a smaller peak, because the measured one is over the limit."""
    peak, limit, costs = shape.peak_bytes, tools.fit.limit, shape.costs
    tools.fit.event(*tell.tightens(peak, shape.plan.predicted.peak_bytes, limit))
    _observe(tools, shape)
    needed = tools.costs.predict(costs.problem, shape.schedule).peak_bytes
    shape = shape.with_over_limit()
    orders = {seen.plan.solution.schedule for seen in shape.over_limit if seen.plan is not None}
    with tools.fit.progress("solving for the schedule"):
        found, costs = tighter(tools, shape, needed, orders)
    misses = not limit.holds(found.predicted.peak_bytes)
    is_written_anew = tools.backend.memory.rewrites and found.predicted.peak_bytes < peak
    is_known = found.solution.schedule in orders and not is_written_anew
    if is_known or (misses and not shape.constraints.allow_over_limit):
        raise tools.plans.not_found(costs.problem, peak)
    tools.fit.event(*tell.swapped(found))
    return tools.plans.lowered(shape, costs, found, phase)


def split(tools: Tools, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
    """Trains the batch in micro-batches, or in more of them."""
    costs = costs_of(tools, shape, outcome.batch)
    too_large = tools.plans.not_found(costs.problem, shape.peak_bytes or None)
    found, costs = tools.plans.split(shape, costs, outcome.batch, too_large)
    if isinstance(shape, PlannedShape) and shape.steps:
        shape = shape.with_over_limit()
    if shape.recorded is not Recorded.BLIND:
        shape = replace(shape, recorded=Recorded.NONE)
    return tools.plans.lowered(shape, costs, found, phase)


def try_plain(tools: Tools, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
    """Measures Keras's own step where no plan keeps to the limit."""
    tools.fit.event(*tell.plain_is_tried(tools.fit.limit))
    run = tools.fit.installed.run_plain
    return shape.with_over_limit().plainly(run, shape.costs, phase)


def keep_smallest(tools: Tools, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
    """Goes on with the step whose measured peak, though over the limit, is smallest."""
    least = min(
        (seen for seen in shape.over_limit if seen.steps),
        key=lambda seen: seen.peak_bytes,
        default=None,
    )
    kept = shape
    if least is not None and (not shape.steps or least.peak_bytes <= shape.peak_bytes):
        kept = replace(_built_again(tools, shape, least, phase), steps=least.steps)
    elif isinstance(shape, Recording | Solving):
        plainer = shape.planned(shape.run, shape.costs, shape.plan, phase)
        kept = replace(plainer, called=True, steps=shape.steps)
    goes_on = shape.constraints.allow_over_limit
    news = tell.stays_over(
        shape.batch_size,
        kept.peak_bytes,
        tools.fit.limit,
        is_plain=not isinstance(kept, PlannedShape),
        goes_on=goes_on,
    )
    (tools.fit.warn if goes_on else tools.fit.event)(*news)
    return finish(tools, kept, outcome, phase)


def _built_again(tools: Tools, shape: ShapeState, seen: OverLimit, phase: Phase) -> ShapeState:
    """Builds a step that measured over the limit again, and returns its record."""
    if seen.plan is None:
        return shape.plainly(tools.fit.installed.run_plain, seen.costs, phase)
    return tools.plans.lowered(shape, seen.costs, seen.plan, phase)


def finish(tools: Tools, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
    """Makes the measured step final."""
    usage, limit = shape.measured, tools.fit.limit
    if isinstance(shape, TracedShape) and tools.backend.device.has_statistics:
        order = shape.schedule if isinstance(shape, PlannedShape) else shape.costs.store_all
        tools.costs.tell_uncounted(shape.costs.problem, order, usage.peak_bytes)
    if isinstance(shape, PlannedShape):
        return _finish_plan(tools, shape, usage, phase)
    if limit.holds(usage.peak_bytes):
        seen = usage.peak_bytes if tools.backend.device.has_statistics else None
        tools.fit.event(*tell.plain_fits(shape.batch_size, seen, limit))
    return replace(shape, phase=phase, steps=(usage,))


def _finish_plan(tools: Tools, shape: PlannedShape, usage: Usage, phase: Phase) -> ShapeState:
    """Makes a plan's step final; the plan keeps its measured usage, if peaks can be measured."""
    final, limit = shape.plan, tools.fit.limit
    has_peak = tools.backend.device.has_statistics
    if has_peak:
        final = replace(final, measured=usage)
    try:
        tools.plans.keep(final, shape.costs.problem.graph)
    except OSError as error:
        tools.fit.warn(*tell.cache_is_closed(error))
    predicted = final.predicted.peak_bytes
    tools.fit.event(*tell.measured(shape.batch_size, predicted, usage, limit, has_peak=has_peak))
    return replace(shape, plan=final, phase=phase, steps=(usage,))


def lower_limit(
    tools: Tools, shape: ShapeState, outcome: OutOfMemory, phase: Phase
) -> tuple[FitRecord, Exception | None]:
    """Lowers the limit to what the device had when the step failed, and plans for it.

    The limit stays lowered even where no plan is found.
    """
    fit, before = tools.fit, tools.fit.limit
    costs = costs_of(tools, shape, outcome.batch)
    schedule = shape.schedule if isinstance(shape, PlannedShape) else costs.store_all
    needed = tools.costs.predict(costs.problem, schedule).peak_bytes
    fit.event(*tell.out_of_memory(shape.batch_size, needed, outcome.peak_bytes))
    limit = before.lowered(min(needed - 1, outcome.peak_bytes))
    try:
        with fit.progress("solving for the schedule"):
            found, costs = for_less(tools, shape, costs, limit, needed)
        if not limit.fits(found.predicted.peak_bytes):
            # out of reach; for certain, the failed step needed too much
            limit = before.lowered(needed - 1)
        fit.event(*tell.lowered_limit(limit, found))
        shape = tools.plans.lowered(shape, costs, found, phase)
    except (BudgetError, UnsupportedModelError) as error:
        return replace(fit.record, lowered_limit=limit), error
    return replace(fit.record.with_shape(tools.mode, shape), lowered_limit=limit), None


def refusal(tools: Tools, shape: ShapeState, outcome: Any, failure: Exception | None) -> Exception:
    """Returns the error of a batch that cannot be trained; its cause is the framework's."""
    if failure is None:
        failure = tools.plans.not_found(costs_of(tools, shape, outcome.batch).problem)
    # Keras drops the cause of what fit raises; a note stays
    what = f"{type(outcome.cause).__name__}: {str(outcome.cause)[:500]}"
    failure.add_note(f"The device ran out of memory: {what}")
    failure.__cause__ = outcome.cause
    return failure


_DO: Mapping[Move, Callable[..., ShapeState]] = {
    Move.STAY: stay,
    Move.FINISH: finish,
    Move.PLAN: plan,
    Move.PROFILE: profile,
    Move.START_RECORDER: start_recorder,
    Move.KEEP_PLAN: keep_plan,
    Move.RUN_PLAIN: run_plain,
    Move.START_SOLVER: start_solver,
    Move.REPLAN: replan,
    Move.TIGHTEN: tighten,
    Move.SPLIT: split,
    Move.TRY_PLAIN: try_plain,
    Move.KEEP_SMALLEST: keep_smallest,
}

#: Moves that make a plan.
PLANNING = frozenset(
    {Move.PLAN, Move.PROFILE, Move.REPLAN, Move.TIGHTEN, Move.LOWER_LIMIT, Move.SPLIT}
)


def make(
    tools: Tools, move: Move, shape: ShapeState, outcome: Outcome, phase: Phase
) -> tuple[FitRecord, Exception | None]:
    """Makes a move other than REFUSE.

    Returns:
        The record after the move, and the error where it could not be made: the plan it needs was
        not found, or cannot be run.
    """
    failure: Exception | None
    fit = tools.fit
    try:
        with fit.planning():
            if isinstance(outcome, OutOfMemory) and move is Move.LOWER_LIMIT:
                record, failure = lower_limit(tools, shape, outcome, phase)
            else:
                made = _DO[move](tools, shape, outcome, phase)
                record, failure = fit.record.with_shape(tools.mode, made), None
    except (BudgetError, UnsupportedModelError) as error:
        record, failure = fit.record, error
    if failure is not None:
        logger.debug("keras_remat: %s cannot be made: %s", move.name, statement_of(failure))
        if isinstance(failure, UnsupportedModelError):
            fit.event(*tell.remark(failure))
    return record, failure
