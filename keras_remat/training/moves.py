"""Makes the moves that the phase table decides on: each returns how the shape is trained next.

A move that needs a plan raises :class:`~keras_remat.errors.InfeasibleBudgetError` or
:class:`~keras_remat.errors.ScheduleNotFoundError` where none is found, and
:class:`~keras_remat.errors.UnsupportedModelError` where the step cannot be swapped; the driver then
asks the table for another one (:mod:`keras_remat.training.phases`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.core.schedule import Usage
from keras_remat.planning.background import PlanProcess, PlanProcessError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import NOT_FOUND, plan_for
from keras_remat.planning.slicing import told_whole
from keras_remat.training import tell
from keras_remat.training.costs import StepCosts
from keras_remat.training.first_plan import FirstPlans
from keras_remat.training.fit_state import FitState
from keras_remat.training.phases import Move, Phase, Recorded
from keras_remat.training.shape_state import (
    Costs,
    Known,
    PlainShape,
    PlannedShape,
    Recording,
    ShapeState,
    Solving,
    TracedShape,
)
from keras_remat.training.undo import Outcome, OutOfMemory

#: Seconds below which solving for a faster plan is not begun.
_LEAST_SOLVE_S = 0.5


class Moves:
    """The moves of one backend's steps; ``known`` tells what is known of a shape before it is
    traced."""

    def __init__(
        self,
        fit: FitState,
        backend: Backend,
        costs: StepCosts,
        first_plans: FirstPlans,
        known: Callable[[ShapeState], Known],
    ):
        self._fit, self._backend, self._costs = fit, backend, costs
        self._first_plans, self._known = first_plans, known
        self._by_move: dict[Move, Callable[..., ShapeState]] = {
            Move.STAY: self._stay,
            Move.FINISH: self._finish,
            Move.PLAN: self._plan,
            Move.PROFILE: self._profile,
            Move.START_RECORDER: self._start_recorder,
            Move.KEEP_PLAN: self._keep_plan,
            Move.RUN_PLAIN: self._return_to_plain,
            Move.START_SOLVER: self._start_solver,
            Move.REPLAN: self._replan,
            Move.TIGHTEN: self._tighten,
            Move.SPLIT: self._split,
            Move.TRY_PLAIN: self._try_plain,
            Move.KEEP_SMALLEST: self._keep_smallest,
            Move.LOWER_LIMIT: self._lower_limit,
        }

    def make(self, move: Move, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        """Returns how the shape is trained after a move other than REFUSE.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError: no plan was found
                that it needs, or none can be run.
        """
        return self._by_move[move](shape, outcome, phase)

    def costs_of(self, shape: ShapeState, batch: Any) -> Costs:
        """Returns the costs of a shape's step, which is traced where it was not."""
        if isinstance(shape, TracedShape):
            return shape.costs
        return self._costs.trace(batch, self._known(shape))

    def _stay(self, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        return shape

    def _plan(self, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        """Plans for a plain step that measured over the limit.

        It ran in no order and by other ops, which says little about ours: those are planned for as
        if it had not run.
        """
        costs = self.costs_of(shape, outcome.batch)
        predicted = self._costs.plain_peak_bytes(costs)
        self._fit.event(
            *tell.plain_exceeds(shape.batch_size, shape.peak_bytes, predicted, self._fit.limit)
        )
        is_final = costs.problem.profile.source == "measured"
        with self._fit.progress("planning"):
            found = plan_for(
                self._first_plans.roomy(shape, costs, self._known(shape), is_final=is_final)
            )
        shape = shape.traced(costs) if not isinstance(shape, TracedShape) else shape
        shape = shape.with_over_limit()
        return self._first_plans.lowered(shape, costs, found, phase)

    def _profile(self, shape: PlainShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Runs a quick plan in place of the plain step, which fits, so that it can be recorded."""
        costs, known = shape.costs, self._known(shape)
        with self._fit.progress("planning steps that are recorded"):
            found = plan_for(self._first_plans.roomy(shape, costs, known, is_final=False))
        planned = self._first_plans.lowered(shape, costs, found, phase)
        self._fit.event(*tell.will_record())
        return planned

    def _start_recorder(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Records the next steps, unless the same ops were measured at a larger shape."""
        recording = shape.recording(self._backend.recorder(), phase)
        problem, seen = shape.costs.problem, self._known(shape).costs
        larger = [c for c in seen if c.graph.input_bytes >= problem.graph.input_bytes]
        if not shape.costs.is_whole or not larger or larger[0].profile.source != "measured":
            return recording
        profile = transfer_costs(larger[0], problem.graph).profile
        profile = replace(profile, resident_bytes=problem.profile.resident_bytes)
        known = replace(shape.costs, problem=replace(problem, profile=profile))
        return replace(recording, recorded=Recorded.MEASURED, costs=known)

    def end_recording(self, shape: Recording) -> Recording:
        """Returns the shape with what the recorder has seen of its steps."""
        with self._fit.long_task("reading the profile"):
            profile = shape.recorder.stop(shape.run, shape.resident_bytes)
            if shape.recorder.remark:
                self._fit.event(*tell.recorded(shape.recorder.remark))
            if profile is None:
                return replace(shape, started=False, recorded=Recorded.BLIND)
            costs = replace(shape.costs, problem=replace(shape.costs.problem, profile=profile))
            shape = replace(shape, started=False, recorded=Recorded.MEASURED, costs=costs)
            self._observe(shape)
            return shape

    def _observe(self, shape: PlannedShape) -> None:
        """Tells the memory model what the steps of this phase measured."""
        if self._backend.device.has_statistics and shape.steps:
            problem, peak = shape.costs.problem, shape.peak_bytes
            self._backend.memory.observe(problem, shape.schedule, peak)

    def _keep_plan(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Keeps the plan; what it predicts follows the newest profile."""
        if shape.recorded is not Recorded.MEASURED:
            self._fit.event(*tell.recorded_nothing(is_busy=shape.recorded is Recorded.BUSY))
        problem = shape.costs.problem
        now = self._costs.predict(problem, shape.schedule)
        told = replace(
            shape.plan,
            predicted=now,
            store_all=self._costs.predict(problem, shape.costs.store_all),
            profile_source=problem.profile.source,
        )
        told = told_whole(told, shape.costs.traced, problem, self._backend.memory)
        return replace(shape.planned(shape.run, shape.costs, told, phase), called=True)

    def _return_to_plain(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        if shape.tries.profiled:
            self._fit.event(*tell.plain_is_back())
        else:
            needed = self._costs.plain_peak_bytes(shape.costs)
            self._fit.event(*tell.plain_fits_after_all(needed, self._fit.limit))
        return shape.plainly(self._fit.installed.run_plain, shape.costs, phase)

    def _start_solver(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Lets a process solve while training goes on, unless there is nothing to solve."""
        costs, known = shape.costs, self._known(shape)
        most_s = self._most_saved_s(costs, self._costs.predict(costs.problem, shape.schedule))
        reused = self._first_plans.reused(costs.problem, known, Phase.VERIFY)
        if most_s < _LEAST_SOLVE_S or reused is not None:
            return shape.solving(None, phase)
        request = self._first_plans.roomy(shape, costs, known, shape.schedule, most_s=most_s)
        try:
            process = PlanProcess(request)
        except OSError as error:
            self._fit.warn(*tell.cannot_solve_beside(error))
            return shape.solving(None, phase)
        self._fit.event(*tell.solves_beside())
        return shape.solving(process, phase)

    def _solved_beside(self, shape: PlannedShape) -> Plan | None:
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
            self._fit.warn(*tell.solved_nothing_beside(error))
            return None
        except NOT_FOUND as error:  # of a part of the limit
            raise self._first_plans.not_found(problem) from error
        # steps were measured meanwhile
        now = self._costs.predict(problem, found.solution.schedule)
        return replace(found, predicted=now) if self._fit.limit.fits(now.peak_bytes) else None

    def _replan(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Plans again from the measured profile, or keeps the plan where it is as good.

        An order that was made so for another shape will do, where it fits.
        """
        costs, known = shape.costs, self._known(shape)
        now = self._costs.predict(costs.problem, shape.schedule)
        fits = self._fit.limit.fits(now.peak_bytes)
        most_s = self._most_saved_s(costs, now)
        if most_s < _LEAST_SOLVE_S:
            self._fit.event(*tell.saves_too_little(self._fit.most_steps_left, _LEAST_SOLVE_S))
            return self._keep_plan(shape, outcome, phase)
        try:
            with self._fit.progress("solving for the schedule"):
                request = self._first_plans.roomy(
                    shape, costs, known, shape.schedule, most_s=most_s
                )
                found = (
                    self._first_plans.reused(costs.problem, known, Phase.VERIFY)
                    or self._solved_beside(shape)
                    or plan_for(request)
                )
        except NOT_FOUND as error:
            self._fit.event(*tell.kept(error))
            raise
        if fits and found.predicted.time_s >= now.time_s:
            return self._keep_plan(shape, outcome, phase)
        self._fit.event(*tell.swapped(found))
        return self._first_plans.lowered(shape, costs, found, phase)

    def _most_saved_s(self, costs: Costs, now: Usage) -> float:
        """Returns the seconds that a faster plan can save: solving for it may take as long. There
        is no bound where the one that runs does not fit, the steps that are left are not known, or
        a plan is kept for other fits."""
        steps, fits = self._fit.most_steps_left, self._fit.limit.fits(now.peak_bytes)
        if steps is None or self._first_plans.keeps_plans or not fits:
            return math.inf
        return steps * (now.time_s - costs.problem.store_all_time_s)

    def _tighten(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Plans again for what the measured peak was too much."""
        peak, limit = shape.peak_bytes, self._fit.limit
        self._fit.event(*tell.tightens(peak, shape.plan.predicted.peak_bytes, limit))
        costs = shape.costs
        self._observe(shape)
        needed = self._costs.predict(costs.problem, shape.schedule).peak_bytes
        shape, known = shape.with_over_limit(), self._known(shape)
        orders = {other.schedule for other in shape.over_limit if isinstance(other, PlannedShape)}
        with self._fit.progress("solving for the schedule"):
            request = self._first_plans.request(
                costs.problem, shape.batch_size, below_bytes=needed, avoid=frozenset(orders)
            )
            found = self._first_plans.reused(
                costs.problem, known, Phase.VERIFY, orders
            ) or plan_for(request)
        misses = not limit.holds(found.predicted.peak_bytes)
        if found.solution.schedule in orders or (misses and not shape.terms.may_miss):
            raise self._first_plans.not_found(costs.problem, peak)
        self._fit.event(*tell.swapped(found))
        return self._first_plans.lowered(shape, costs, found, phase)

    def _split(self, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        """Trains the batch in micro-batches, or in more of them."""
        costs = self.costs_of(shape, outcome.batch)
        too_large = self._first_plans.not_found(costs.problem, shape.peak_bytes or None)
        found, split = self._first_plans.split(shape, costs, outcome.batch, too_large)
        if isinstance(shape, PlannedShape) and shape.steps:
            shape = shape.with_over_limit()
        if shape.recorded is not Recorded.BLIND:
            shape = replace(shape, recorded=Recorded.NONE)
        return self._first_plans.lowered(shape, split, found, phase)

    def _try_plain(self, shape: PlannedShape, outcome: Outcome, phase: Phase) -> ShapeState:
        """Measures Keras's own step where no plan keeps to the limit."""
        self._fit.event(*tell.plain_is_tried(self._fit.limit))
        run = self._fit.installed.run_plain
        return shape.with_over_limit().plainly(run, shape.costs, phase)

    def _keep_smallest(self, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        """Goes on with the step that measured least of those over the limit."""
        measured = [other for other in (*shape.over_limit, shape) if other.steps]
        kept = min(measured, key=lambda other: other.peak_bytes)
        goes_on = shape.terms.may_miss
        news = tell.stays_over(
            shape.batch_size,
            kept.peak_bytes,
            self._fit.limit,
            is_plain=not isinstance(kept, PlannedShape),
            goes_on=goes_on,
        )
        (self._fit.warn if goes_on else self._fit.event)(*news)
        if isinstance(kept, Recording | Solving):
            plainer = kept.planned(kept.run, kept.costs, kept.plan, phase)
            kept = replace(plainer, called=True, steps=kept.steps)
        return self._finish(replace(kept, tries=shape.tries), outcome, phase)

    def _finish(self, shape: ShapeState, outcome: Outcome, phase: Phase) -> ShapeState:
        """Goes on with what was measured."""
        usage, limit = shape.measured, self._fit.limit
        if isinstance(shape, PlannedShape):
            return self._finish_plan(shape, usage, phase)
        if limit.holds(usage.peak_bytes):
            seen = usage.peak_bytes if self._backend.device.has_statistics else None
            self._fit.event(*tell.plain_fits(shape.batch_size, seen, limit))
        return replace(shape, phase=phase, steps=(usage,))

    def _finish_plan(self, shape: PlannedShape, usage: Usage, phase: Phase) -> ShapeState:
        """Goes on with a plan; what it measured is the plan's, where peaks can be measured."""
        final, limit = shape.plan, self._fit.limit
        has_peak = self._backend.device.has_statistics
        if has_peak:
            final = replace(final, measured=usage)
        try:
            self._first_plans.keep(final, shape.costs.problem.graph)
        except OSError as error:
            self._fit.warn(*tell.cache_is_closed(error))
        predicted = final.predicted.peak_bytes
        self._fit.event(
            *tell.measured(shape.batch_size, predicted, usage, limit, has_peak=has_peak)
        )
        return replace(shape, plan=final, phase=phase, steps=(usage,))

    def _lower_limit(self, shape: ShapeState, outcome: OutOfMemory, phase: Phase) -> ShapeState:
        """Plans for what the device had when the step failed."""
        costs = self.costs_of(shape, outcome.batch)
        problem, before = costs.problem, self._fit.limit
        schedule = shape.schedule if isinstance(shape, PlannedShape) else costs.store_all
        predicted = self._costs.predict(problem, schedule).peak_bytes
        self._fit.event(*tell.out_of_memory(shape.batch_size, predicted, outcome.peak_bytes))
        self._fit.set_limit(before.lowered(min(predicted - 1, outcome.peak_bytes)))
        with self._fit.progress("solving for the schedule"):
            found = plan_for(
                self._first_plans.request(problem, shape.batch_size, below_bytes=predicted)
            )
        if not self._fit.limit.fits(found.predicted.peak_bytes):
            # out of reach; all that is known for certain is what was too much
            self._fit.set_limit(before.lowered(predicted - 1))
        self._fit.event(*tell.lowered_limit(self._fit.limit, found))
        return self._first_plans.lowered(shape, costs, found, phase)

    def refusal(self, shape: ShapeState, outcome: Any, failure: Exception | None) -> Exception:
        """Returns the error of a batch that cannot be trained; its cause is the framework's."""
        if failure is None:
            failure = self._first_plans.not_found(self.costs_of(shape, outcome.batch).problem)
        # Keras drops the cause of what fit raises; a note stays
        what = f"{type(outcome.cause).__name__}: {str(outcome.cause)[:500]}"
        failure.add_note(f"The device ran out of memory: {what}")
        failure.__cause__ = outcome.cause
        return failure
