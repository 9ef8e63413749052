"""Runs steps: chooses the first step of a new shape, runs one attempt, and records its usage.

This module does not decide what follows (:mod:`keras_remat.training.decide`), and assigns nothing:
it takes a record and returns another one. A step that runs out of memory is undone
(:mod:`keras_remat.training.undo`).

The first call of a step traces and tunes kernels, which takes time and memory that later calls do
not need. So its measurements are ignored, unless it ran out of memory.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any, TypeGuard

from keras_remat.backends.batches import batch_size_of
from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedBatchError
from keras_remat.training import effects, tell
from keras_remat.training.decide import Phase, Recorded, RetryCounts
from keras_remat.training.fit_state import FitState, setup_limit_s
from keras_remat.training.record import FitRecord, SetUp, StepsRecord
from keras_remat.training.shape_state import (
    USUAL_CONSTRAINTS,
    PlainShape,
    PlannedShape,
    Recording,
    ShapeState,
    Signature,
    Solving,
    StepConstraints,
    TracedShape,
)
from keras_remat.training.tools import Tools, running_tools
from keras_remat.training.undo import OutOfMemory, Trained

#: On a GPU, or in several processes, one of 20 steps of a long phase is waited for.
_TIMED_EVERY = 20
#: Cost of waiting for a step on a GPU, as a share of the step's time.
_GAP_SHARE = 0.08


# -------------------------------------------------------------------- a batch of a new shape


def arrived(tools: Tools, batch: Any, key: Signature, constraints: StepConstraints) -> FitRecord:
    """Returns the record after a batch has come, with the step that trains it.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
    """
    steps = tools.steps
    if key not in steps.shapes:
        with tools.fit.planning():
            shape = _first_step(tools, batch, key, constraints)
            if isinstance(shape, PlannedShape):
                gc.collect()  # errors on the way are in reference cycles that hold the batch
        steps = steps.with_shape(shape)
    size, allow_over_limit = tools.fit.record.sizes.size, constraints.allow_over_limit
    steps = steps.after_batch(key, size, allow_over_limit=allow_over_limit)
    for shape in steps.recorded_beside(key):  # another shape's step ends it
        steps = steps.with_shape(effects.end_recording(tools, shape))
    return tools.fit.record.with_steps(tools.mode, steps)


def _first_step(
    tools: Tools, batch: Any, key: Signature, constraints: StepConstraints
) -> ShapeState:
    """Returns how a batch of a new shape is trained first."""
    fit, plans, size = tools.fit, tools.plans, batch_size_of(batch)
    fit.report.batch_size = fit.report.batch_size or size
    device = tools.backend.device
    if not device.has_statistics:
        fit.warn(*tell.no_statistics(device.name))
    rules_plain_out = _needs_plan(tools, constraints) or not tools.mode.plain_may_run
    shape = ShapeState(
        signature=key,
        batch_size=size,
        run=fit.installed.run_plain,
        phase=Phase.FINAL,
        constraints=constraints,
        tries=RetryCounts(plain_ruled_out=rules_plain_out),
        recorded=Recorded.NONE if tools.backend.measures_op_times else Recorded.BLIND,
    )
    if _is_known_to_fit(tools, shape):
        return shape
    known, is_first = tools.known(shape), not tools.traced_ops
    try:
        costs = tools.costs.trace_as_asked(batch, known, _micro_batches(tools, shape))
    except UnsupportedBatchError as error:
        fit.warn(*tell.remark(error))
        return replace(shape, tries=RetryCounts(plain_ruled_out=True))  # nothing can be planned
    tools.traced_ops = len(costs.problem.graph.ops)
    tools.family.learn(key, costs)
    given = plans.given(costs) if is_first else None
    if given is not None:
        return plans.lowered(shape, plans.costs_under(given, costs), given, Phase.VERIFY)
    if _may_run_plain(tools, shape):
        peak = tools.costs.plain_bound_bytes(costs)
        if tools.plain_fits(peak):
            return shape.plainly(fit.installed.run_plain, costs, Phase.PLAIN)
        fit.event(*tell.plain_risks(size, peak, fit.limit))
    costs = tools.costs.put_back(costs)
    tools.backend.memory.look(costs.problem, costs.traced.held_bytes, fit.limit.usable_bytes)
    plan, costs, phase = plans.find(shape, costs, batch, known)
    return plans.lowered(shape, costs, plan, phase)


def _is_known_to_fit(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether other shapes show, without a trace, that Keras's own step fits."""
    steps = tools.steps
    if steps.reference is None or not _may_run_plain(tools, shape):
        return False
    if tools.family.is_within_plain(steps.shapes, shape.signature):
        return True
    costs = tools.family.costs_at(steps.shapes, shape.signature)
    if costs is None:
        return False
    return tools.plain_fits(tools.costs.plain_bound_bytes(costs, is_traced=False))


def _may_run_plain(tools: Tools, shape: ShapeState) -> bool:
    is_whole = _micro_batches(tools, shape) == 1
    return tools.mode.plain_may_run and is_whole and not _needs_plan(tools, shape.constraints)


def _micro_batches(tools: Tools, shape: ShapeState) -> int:
    return min(shape.batch_size, tools.mode.micro_batches)


def _needs_plan(tools: Tools, constraints: StepConstraints) -> bool:
    return constraints.require_planned and tools.backend.memory.order_matters


# -------------------------------------------------------------------- one attempt


def is_overtaken(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether a shape needs another decision before its next step.

    A step of another shape has ended its recording, or its own step measured over the limit, which
    another shape may have lowered since.
    """
    if isinstance(shape, Recording) and shape.recorded is not Recorded.NONE:
        return True
    if not tools.is_over(shape):
        return False
    if isinstance(shape, PlannedShape):
        is_measured = shape.phase in (Phase.VERIFY, Phase.FINAL)
        return is_measured and shape.tries.attempts_left(out_of_memory=False)
    return not shape.tries.plain_ruled_out


def is_to_be_recorded(shape: ShapeState) -> TypeGuard[Recording]:
    """Returns whether the next step is the first that is recorded."""
    return isinstance(shape, Recording) and not shape.started


def begin_recording(tools: Tools, shape: Recording) -> Recording:
    """Returns a shape whose recorder has started, if it can."""
    started = not tools.fit.is_profiled() and shape.recorder.start()
    recorded = Recorded.NONE if started else Recorded.BUSY
    return replace(shape, started=started, recorded=recorded)


def attempt(
    tools: Tools, key: Signature, batch: Any, *, timed: bool
) -> tuple[FitRecord, Trained | OutOfMemory]:
    """Runs a shape's step on a batch once; returns the record after it, and the outcome.

    Args:
        timed: whether the step is waited for, whatever that costs.
    """
    fit, shape = tools.fit, tools.steps.shapes[key]
    timed = timed or _is_timed(tools, shape)
    began_s = time.perf_counter()
    outcome, device = tools.guard.attempt(
        shape.run,
        batch,
        fit.record.device,
        guarded=_is_guarded(tools, shape),
        restored=isinstance(shape, PlannedShape) and tools.costs.is_to_be_put_back,
        timed=timed,
        pending=fit.pending,
    )
    device = replace(device, after_plain=not isinstance(shape, PlannedShape))
    record = replace(fit.record, device=device)
    if isinstance(outcome, OutOfMemory):
        return record.with_steps(tools.mode, stopped(tools.steps)), outcome
    if isinstance(shape, PlannedShape) and record.setup is None:
        record = replace(record, setup=_set_up(fit, shape))
    fit.count(shape.batch_size, outcome.usage, None if timed else outcome.result)
    in_use_bytes = tools.backend.device.in_use_bytes()
    fit.note_phase("between steps", in_use_bytes)
    shape = shape.after_step(outcome.usage, in_use_bytes)
    if timed and isinstance(shape, PlannedShape) and shape.phase is Phase.FINAL:
        _looked(tools, began_s, outcome.usage.time_s)
    # no step more than needed runs over the limit
    is_over = tools.is_over(shape)
    enough = is_over or len(shape.steps) >= fit.options.profile_steps
    if isinstance(shape, Recording) and shape.started and enough:
        if is_over:
            fit.event(*tell.recorded_exceeds(shape.batch_size, shape.peak_bytes, fit.limit))
        shape = effects.end_recording(tools, shape)
    return record.with_shape(tools.mode, shape), outcome


def _set_up(fit: FitState, shape: PlannedShape) -> SetUp:
    """Returns how long set-up took, once the first plan has trained."""
    setup = SetUp(fit.setup_s, setup_limit_s(shape.costs.problem.store_all_time_s))
    if setup.spent_s > setup.limit_s:
        fit.event(*tell.set_up_was_long(setup.spent_s, setup.limit_s))
    return setup


def stopped(steps: StepsRecord) -> StepsRecord:
    """Returns how a mode trains once its recordings and solvers are stopped."""
    for shape in steps.shapes.values():
        if isinstance(shape, Recording) and shape.started:
            shape.recorder.stop(shape.run, 0)
            steps = steps.with_shape(replace(shape, started=False))
        if isinstance(shape, Solving) and shape.process is not None:
            shape.process.end()
            steps = steps.with_shape(replace(shape, process=None))
    return steps


def _looked(tools: Tools, began_s: float, step_s: float) -> None:
    """Notes the cost of waiting for a final step: on a GPU, gaps between kernels count, too."""
    cost_s = time.perf_counter() - began_s - step_s
    tools.pace.looked(max(cost_s, _GAP_SHARE * step_s if tools.on_gpu else 0.0))


def _is_guarded(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether the next step has to be undone if it fails, whatever the copy costs.

    Not all steps are: copies make steps up to a fifth slower, and plain steps are compared with
    others.
    """
    first_only = tools.on_gpu or shape.phase in (Phase.PLAIN, Phase.FINAL)
    return not (first_only and shape.called) or _misses_lowered_limit(tools, shape)


def _misses_lowered_limit(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether a shape's plan is predicted to need more than a limit that was lowered since.

    Another shape ran out of memory after the plan was made.
    """
    if tools.fit.record.lowered_limit is None or not isinstance(shape, PlannedShape):
        return False
    return not tools.fit.limit.holds(shape.plan.predicted.peak_bytes)


def _is_timed(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether the next step is waited for.

    On a GPU, waiting leaves gaps between kernels, and a final step's peak is known when its call
    returns. Several processes tell each other the usage of such a step, which takes time.
    """
    processes = tools.backend.processes.count
    if isinstance(shape, PlannedShape) and shape.phase is Phase.FINAL:
        return processes == 1 or is_look_due(tools)
    costs_time = tools.on_gpu or processes > 1
    asynchronous = costs_time and shape.phase in (Phase.SOLVE, Phase.FINAL) and shape.called
    return not asynchronous or tools.fit.steps_run % _TIMED_EVERY == 0


def is_look_due(tools: Tools) -> bool:
    """Returns whether the next final step is waited for and timed.

    Several processes tell each other what they measure, so all of them have to ask at the same
    step.
    """
    if tools.backend.processes.count > 1:
        return tools.fit.steps_run % _TIMED_EVERY == 0
    return tools.pace.is_due()


# -------------------------------------------------------------------- steps that are final


def settled_shape(
    tools: Tools, key: Signature, constraints: StepConstraints = USUAL_CONSTRAINTS
) -> PlannedShape | None:
    """Returns a batch's shape where its step is final under a plan; ``None`` where a decision is
    due, or another shape's step is not final."""
    steps = tools.steps
    shape = steps.shapes.get(key)
    if not (isinstance(shape, PlannedShape) and shape.called and steps.is_settled):
        return None
    is_as_before = shape.constraints.allow_over_limit == constraints.allow_over_limit
    return shape if is_as_before and not is_overtaken(tools, shape) else None


def seen(shape: PlainShape, usage: Usage) -> PlainShape:
    """Returns a shape with the usage of its plain steps, which were watched from outside."""
    return replace(shape, steps=(*shape.steps, usage) if shape.phase is Phase.PLAIN else (usage,))


def settled_peak_bytes(tools: Tools) -> int | None:
    """Returns the measured peak of the reference shape's final step; ``None`` without one.

    It is ``None`` for a plain step within the limit, too.
    """
    steps, shape = tools.steps, tools.steps.reference_shape
    if shape is None or not steps.is_final:
        return None
    if steps.plan is None:
        return shape.peak_bytes if tools.is_over(shape) else None
    return None if steps.plan.measured is None else steps.plan.measured.peak_bytes


def runs_plain(fit: FitState, *, may_grow: bool) -> bool:
    """Returns whether Keras's own step trains all shapes with room to spare.

    Args:
        may_grow: whether batches may come that are larger than those that came. Then the limit has
            to hold twice the step's peak.
    """
    steps = fit.record.running
    shape, shapes = steps.reference_shape, steps.shapes.values()
    if isinstance(shape, PlannedShape) or shape is None or not shape.called:
        return False
    if fit.record.contest.trial is not None:
        return False
    if shape.phase is not Phase.FINAL and (may_grow or shape.phase is not Phase.PLAIN):
        return False
    if any(isinstance(one, PlannedShape) or one.tries.plain_ruled_out for one in shapes):
        return False
    tools, peak_bytes = running_tools(fit), shape.peak_bytes
    # where there are statistics, a peak of 0 is measured: an allocator may count no small array
    if isinstance(shape, TracedShape) and not (peak_bytes or tools.backend.device.has_statistics):
        peak_bytes = tools.costs.plain_bound_bytes(shape.costs)
    return fit.limit.fits((1 + may_grow) * peak_bytes)
