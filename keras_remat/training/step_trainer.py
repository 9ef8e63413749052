"""Drives the batches of one ``fit`` through the phases: which step runs for which batch.

Without Keras's life cycle (that is :mod:`keras_remat.callback`), without a framework
(:mod:`keras_remat.backends`), without solving (:mod:`keras_remat.planning.request`) and without
deciding (:mod:`keras_remat.training.phases`). Every batch that comes in is trained exactly once: a
step that runs out of memory is undone (:mod:`keras_remat.training.undo`) and its batch trained
again, under a plan for what the device had.

The first call of a step traces and tunes kernels, which takes time and memory that later calls do
not: nothing that it measures decides, except that it ran out of memory.

One file, though long: every method reads or sets the shapes of one ``fit``.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.backends.batches import batch_size_of
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import UnsupportedBatchError, UnsupportedModelError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import NOT_FOUND
from keras_remat.training import tell
from keras_remat.training.arguments import FitOptions
from keras_remat.training.costs import StepCosts
from keras_remat.training.first_plan import FirstPlans
from keras_remat.training.fit_state import FitState
from keras_remat.training.moves import Moves
from keras_remat.training.phases import Facts, Move, Phase, Recorded, Tries, decide
from keras_remat.training.record import StepsRecord
from keras_remat.training.shape_family import ShapeFamily
from keras_remat.training.shape_state import (
    USUAL_TERMS,
    Known,
    PlainShape,
    PlannedShape,
    Recording,
    ShapeState,
    Signature,
    Signatures,
    Solving,
    Terms,
    TracedShape,
)
from keras_remat.training.undo import Outcome, OutOfMemory, StepGuard, Trained
from keras_remat.training.watch import Pace

logger = logging.getLogger(__name__)

#: Plain steps from so many seconds on are compared with larger ones in earnest; in shorter ones,
#: what is not the ops' weighs more than what is. So many of them are measured then.
_LONG_STEP_S, _COMPARED_STEPS = 0.1, 8
#: How much more than it takes a plain step may be predicted to need: one of ConvLSTM layers is
#: predicted at 92 MiB and takes 88, and ours may be as far off.
_PLAIN_OFF = 1.25
#: One of so many steps that go on for long on a GPU, or in several processes, is waited for.
_TIMED_EVERY = 20
#: What it costs to wait for a step on a GPU, as a share of the step.
_GAP_SHARE = 0.08


class StepTrainer:
    """Trains batches under a memory limit.

    Args:
        plain_may_run: ``False`` where it is known that Keras's own step does not fit.

    Attributes:
        pieces: in how many pieces a batch is asked to be trained.
        record: how batches of all shapes are trained; nothing else of this object changes.
    """

    def __init__(
        self, fit: FitState, backend: Backend, options: FitOptions, *, plain_may_run: bool = True
    ):
        self.backend, self._plain_may_run = backend, plain_may_run
        self.pieces = options.micro_batches
        self._fit, self._options = fit, options
        self._costs = StepCosts(fit, backend)
        self._first_plans = FirstPlans(fit, backend, options, self._costs)
        self._moves = Moves(fit, backend, self._costs, self._first_plans, self._known)
        self._guard = StepGuard(fit.model, backend, fit.facts)
        self._signatures, self._family = Signatures(), ShapeFamily()
        self._pace = Pace(options.profile_steps)  # of looks at final steps
        self.record = StepsRecord()

    # ---------------------------------------------------------------- one batch

    def run(self, batch: Any, terms: Terms = USUAL_TERMS, *, timed: bool = False) -> Any:
        """Trains one batch and returns its logs.

        Args:
            terms: those of a shape's first batch stay, but for ``may_miss``: a batch that was
                larger may have become the one that trains.
            timed: whether the step is waited for, whatever that costs.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit; this batch
                was not trained.
        """
        key = self._signatures.of(batch)
        settled = None if timed else self._settled(key, terms.may_miss)
        if settled is not None:
            return self.run_final(settled, batch)
        if key not in self.record.shapes:
            with self._fit.planning():
                self._set(self._prepare(batch, terms))
        self.record = self.record.after_batch(key, may_miss=terms.may_miss)
        for shape in self.record.recorded_beside(key):
            self._set(self._moves.end_recording(shape))  # this step is none of its
        while True:
            outcome = self._attempt(self.record.shapes[key], batch, timed)
            before = self.record.shapes[key]
            self._set(self._follow(before, outcome))
            self._learn(before, self.record.shapes[key])
            if isinstance(outcome, Trained):
                return outcome.result

    def settled_shape(self, batch: Any) -> PlannedShape | None:
        """Returns the shape of a batch on the usual terms, where its step is settled; ``None``
        where it is not."""
        return self._settled(self._signatures.of(batch), USUAL_TERMS.may_miss)

    def _settled(self, key: Signature, may_miss: bool) -> PlannedShape | None:
        """Returns a batch's shape where its step is final under a plan, and no look at it is due;
        ``None`` where something is to be found out or to be done."""
        shape = self.record.settled_shape(key, may_miss=may_miss)
        return None if shape is None or self._is_look_due() else shape

    def _is_look_due(self) -> bool:
        """Returns whether the next final step is waited for and timed. What one of several
        processes measures is told to the others, which have to ask at the same step."""
        if self.backend.processes.count > 1:
            return self._fit.steps_run % _TIMED_EVERY == 0
        return self._pace.is_due()

    def run_final(self, shape: PlannedShape, batch: Any) -> Any:
        """Runs a final step and returns its logs, at the cost of little more than a call of it."""
        outcome = self._guard.run_settled(shape.run, batch)
        self._fit.facts.is_scattered = False
        self._fit.count(shape.batch_size, outcome.usage)
        has_statistics, limit = self.backend.device.has_statistics, self._fit.limit
        if has_statistics and not limit.holds(outcome.usage.peak_bytes):
            self._set(self._follow(replace(shape, steps=(outcome.usage,)), outcome))
        return outcome.result

    def _learn(self, before: ShapeState, after: ShapeState) -> None:
        """Tells those who predict what a step took, before and after the move that followed."""
        reference = self.record.reference or before.signature
        self._fit.baseline.follow(
            before, after, reference, self.backend.compilation, self._plain_peak_bytes
        )
        if isinstance(before, PlainShape) and before.phase is Phase.PLAIN and before.peak_bytes:
            self._costs.observe_plain(before.costs, before.peak_bytes)

    def _attempt(self, shape: ShapeState, batch: Any, timed: bool) -> Trained | OutOfMemory:
        """Runs the shape's step on the batch and notes what it took."""
        if isinstance(shape, Recording) and shape.recorded is not Recorded.NONE:
            shape = self._follow(shape, Outcome(batch))  # a step of another shape has ended it
        is_plain = not isinstance(shape, PlannedShape) and not shape.tries.plain_ruled_out
        if is_plain and self._is_over(shape):  # it was seen from outside
            shape = self._follow(shape, Outcome(batch))
        if isinstance(shape, Recording) and not shape.started:
            self._set(replace(shape, started=True))  # an interrupt may come right after it
            started = not self._fit.is_profiled() and shape.recorder.start()
            recorded = Recorded.NONE if started else Recorded.BUSY
            shape = replace(shape, started=started, recorded=recorded)
        self._set(shape)
        guarded, timed = self._is_guarded(shape), timed or self._is_timed(shape)
        began_s = time.perf_counter()
        outcome = self._guard.attempt(
            shape.run, batch, guarded=guarded, gathered=self._is_gathered(shape), timed=timed
        )
        self._fit.facts.is_scattered = not isinstance(shape, PlannedShape)
        if isinstance(outcome, OutOfMemory):
            self.close()
            return outcome
        self._fit.count(shape.batch_size, outcome.usage)
        in_use_bytes = self.backend.device.in_use_bytes()
        self._fit.note_phase("between steps", in_use_bytes)
        shape = shape.after_step(outcome.usage, in_use_bytes)
        if timed and isinstance(shape, PlannedShape) and shape.phase is Phase.FINAL:
            self._looked(began_s, outcome.usage.time_s)
        # no step more than needed runs over the limit
        is_over = self._is_over(shape)
        enough = is_over or len(shape.steps) >= self._options.profile_steps
        if isinstance(shape, Recording) and enough:
            if is_over:
                self._fit.event(
                    *tell.recorded_exceeds(shape.batch_size, shape.peak_bytes, self._fit.limit)
                )
            shape = self._moves.end_recording(shape)
        self._set(shape)
        return outcome

    def _looked(self, began_s: float, step_s: float) -> None:
        """Notes what it costs to wait for a final step: on a GPU, gaps between kernels, too."""
        cost_s = time.perf_counter() - began_s - step_s
        self._pace.looked(max(cost_s, _GAP_SHARE * step_s if self.on_gpu else 0.0))

    def _is_over(self, shape: ShapeState) -> bool:
        """Returns whether a step of this phase measured over the limit."""
        return self.backend.device.has_statistics and not self._fit.limit.holds(shape.peak_bytes)

    def _is_guarded(self, shape: ShapeState) -> bool:
        """Returns whether the next step has to be undone if it runs out of memory, whatever the
        copy costs: copies make steps up to a fifth slower, and plain steps are compared with
        others."""
        first_only = self.on_gpu or shape.phase in (Phase.PLAIN, Phase.FINAL)
        return not (first_only and shape.called)

    def _is_gathered(self, shape: ShapeState) -> bool:
        """Returns whether the variables are brought together before the next step, if it is
        guarded: Keras's own step leaves them anywhere in the allocator's pool, in chunks of up to
        twice their size (of VGG19's 180 MiB made 237), and a step in order leaves them where they
        are."""
        in_order = isinstance(shape, PlannedShape) and self.backend.memory.order_matters
        return in_order and self._fit.facts.is_scattered and not self.on_gpu

    def _is_timed(self, shape: ShapeState) -> bool:
        """Returns whether the next step is waited for. On a GPU that leaves gaps between kernels,
        and a final step's peak is known when its call returns. Several processes tell each other
        what such a step took, which takes time."""
        if isinstance(shape, PlannedShape) and shape.phase is Phase.FINAL:
            return self.backend.processes.count == 1 or self._is_look_due()
        costs_time = self.on_gpu or self.backend.processes.count > 1
        asynchronous = costs_time and shape.phase in (Phase.SOLVE, Phase.FINAL) and shape.called
        return not asynchronous or self._fit.steps_run % _TIMED_EVERY == 0

    @property
    def on_gpu(self) -> bool:
        """Whether the steps run on another device than the host, which holds the data."""
        return not self.backend.device.name.upper().startswith("CPU")

    def _follow(self, shape: ShapeState, outcome: Outcome) -> ShapeState:
        """Returns the shape after the move that its facts ask for; where that cannot be made, the
        next one is.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError: the batch ran out
                of memory and cannot be trained.
        """
        facts, failure = self._facts(shape, outcome), None
        while True:
            move, phase = decide(facts)
            shape = replace(shape, tries=shape.tries.after(move))
            if move is Move.REFUSE:
                raise self._moves.refusal(shape, outcome, failure)
            try:
                with self._fit.planning():
                    return self._moves.make(move, shape, outcome, phase)
            except (*NOT_FOUND, UnsupportedModelError) as error:
                logger.debug("keras_remat: %s cannot be made: %s", move.name, error)
                if isinstance(error, UnsupportedModelError):
                    self._fit.event(*tell.remark(error))
                failure, facts = error, replace(facts, failed=facts.failed | {move})
                shape = replace(shape, tries=shape.tries.without(move))

    def _facts(self, shape: ShapeState, outcome: Outcome) -> Facts:
        out_of_memory = isinstance(outcome, OutOfMemory)
        return Facts(
            phase=shape.phase,
            enough_steps=len(shape.steps) >= self._wanted_steps(shape),
            over_limit=self._is_over(shape),
            attempts_left=shape.tries.attempts_left(out_of_memory=out_of_memory),
            may_split=shape.terms.may_split and shape.tries.splits_left,
            may_miss=shape.terms.may_miss or not self.backend.device.has_statistics,
            runs_a_plan=isinstance(shape, PlannedShape),
            # a plain step was measured to fit before it is profiled
            plain_fits=shape.tries.profiled or self._plain_is_predicted_to_fit(shape),
            plain_ruled_out=shape.tries.plain_ruled_out,
            plain_may_be_smaller=self._plain_may_be_smaller(shape),
            wants_profile=shape.terms.wants_profile
            and shape.recorded is Recorded.NONE
            and not shape.tries.profiled,
            recorded=shape.recorded,
            # on a CPU, solving would share the cores with the steps that are measured
            solves_beside=self.on_gpu and self.backend.processes.count == 1,
            solved=isinstance(shape, Solving) and shape.solved,
            out_of_memory=out_of_memory,
        )

    def _plain_is_predicted_to_fit(self, shape: ShapeState) -> bool:
        """Returns whether by the costs that were just recorded Keras's own step fits."""
        if not isinstance(shape, Recording) or shape.recorded is not Recorded.MEASURED:
            return False
        peak_bytes = self._costs.plain_bound_bytes(shape.costs)
        return shape.costs.micro_batches == 1 and self.plain_fits(peak_bytes)

    def _plain_may_be_smaller(self, shape: ShapeState) -> bool:
        """Returns whether Keras's own step is worth measuring where no plan keeps to the limit:
        predicted, it does not take much more than what measured least."""
        if not isinstance(shape, PlannedShape) or not self._is_over(shape):
            return False
        tried = (*shape.over_limit, shape)
        is_measured = shape.tries.plain_tried or any(isinstance(one, PlainShape) for one in tried)
        if not self._plain_may_run:  # another way may have measured it
            is_measured |= self._fit.report.baseline_source == "measured"
        in_pieces = shape.costs.micro_batches > 1 or self.pieces > 1
        if is_measured or in_pieces or shape.terms.in_order:
            return False
        least_bytes = min(one.peak_bytes for one in tried)
        return self._costs.plain_peak_bytes(shape.costs) <= _PLAIN_OFF * least_bytes

    def _wanted_steps(self, shape: ShapeState) -> int:
        """Returns how many steps of a phase are measured: more plain ones where larger ones will
        take over that are compared with them."""
        compared = shape.phase is Phase.PLAIN and shape.terms.may_split and bool(shape.steps)
        if compared and min(step.time_s for step in shape.steps) >= _LONG_STEP_S:
            return max(self._options.profile_steps, _COMPARED_STEPS)
        return self._options.profile_steps

    # ---------------------------------------------------------------- a new shape

    def _prepare(self, batch: Any, terms: Terms) -> ShapeState:
        """Returns how a batch of a new shape is trained first.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
        """
        size, pieces = batch_size_of(batch), min(batch_size_of(batch), self.pieces)
        in_order = terms.in_order and self.backend.memory.order_matters
        may_run_plain = self._plain_may_run and pieces == 1 and not in_order
        self._fit.report.batch_size = self._fit.report.batch_size or size
        self._fit.tell_statistics(self.backend.device)
        shape = ShapeState(
            signature=self._signatures.of(batch),
            batch_size=size,
            run=self._fit.installed.run_plain,
            phase=Phase.FINAL,
            terms=terms,
            tries=Tries(plain_ruled_out=in_order or not self._plain_may_run),
            recorded=Recorded.NONE if self.backend.measures_op_times else Recorded.BLIND,
        )
        if may_run_plain and self._plain_is_known_to_fit(shape.signature):
            return shape
        known = self._known(shape)
        try:
            costs = self._costs.trace_as_asked(batch, known, pieces)
        except UnsupportedBatchError as error:
            self._fit.warn(*tell.remark(error))
            return replace(shape, tries=Tries(plain_ruled_out=True))  # nothing can be planned
        is_first = not self.record.traced_ops
        self.record = self.record.after_trace(costs)
        self._family.learn(shape.signature, costs)
        given = self._first_plans.given(costs) if is_first else None
        if given is not None:
            costs = self._first_plans.costs_under(given, costs)
            return self._first_plans.lowered(shape, costs, given, Phase.VERIFY)
        peak = self._costs.plain_bound_bytes(costs)
        if may_run_plain and self.plain_fits(peak):
            return shape.plainly(self._fit.installed.run_plain, costs, Phase.PLAIN)
        if may_run_plain:
            self._fit.event(*tell.plain_risks(size, peak, self._fit.limit))
        plan, costs, phase = self._first_plans.find(shape, costs, batch, known)
        return self._first_plans.lowered(shape, costs, plan, phase)

    def _plain_is_known_to_fit(self, signature: Signature) -> bool:
        """Returns whether Keras's own step fits by what other shapes tell, without a trace."""
        shapes = self.record.shapes
        if self.record.reference is None:
            return False
        if self._family.is_within_plain(shapes, signature):
            return True
        costs = self._family.costs_at(shapes, signature)
        if costs is None:
            return False
        return self.plain_fits(self._costs.plain_bound_bytes(costs, is_traced=False))

    def _known(self, shape: ShapeState) -> Known:
        """Returns what is known of a shape that is not traced yet."""
        if self.record.reference is None:
            return self.record.expected
        return self._family.known(self.record.shapes, shape.signature)

    def _set(self, shape: ShapeState) -> None:
        self.record = self.record.with_shape(shape)

    def _plain_peak_bytes(self, shape: PlainShape) -> int:
        """Returns what plain steps measured; where they cannot, what is predicted."""
        if self.backend.device.has_statistics:
            return shape.peak_bytes
        return self._costs.plain_peak_bytes(shape.costs)

    # ---------------------------------------------------------------- for others

    def plain_fits(self, predicted_bytes: int) -> bool:
        """Returns whether Keras's own step may run, which is predicted to need so many bytes."""
        return self._fit.limit.fits(predicted_bytes)

    def begin_shape(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """Makes the next batch's shape the reference shape.

        Args:
            expected: a plan for it to begin with, or for another size of the same step.
            costs: what is known of its costs from other sizes.
        """
        known = Known(costs=() if costs is None else (costs,))
        if expected is not None and expected.problem is not None:
            plan = (expected, expected.problem.graph, Phase.WARM_UP)
            known = replace(known, plans=(plan,))
        self.record = self.record.expecting(known)

    @property
    def plan(self) -> Plan | None:
        """The plan of the shape that training is about; ``None`` while it runs plainly."""
        return self.record.plan

    @property
    def batch_size(self) -> int:
        """The samples of a batch of the reference shape; 0 before there is one."""
        shape = self.record.reference_shape
        return 0 if shape is None else shape.batch_size

    @property
    def measured_steps(self) -> int:
        """How many plain steps are measured at the beginning."""
        return self._options.profile_steps

    @property
    def settled(self) -> bool:
        """Whether the reference shape's step is final."""
        shape = self.record.reference_shape
        return shape is not None and shape.phase is Phase.FINAL

    @property
    def problem(self) -> Problem | None:
        """The reference shape's traced step with its costs, measured ones once there are any."""
        shape = self.record.reference_shape
        return shape.costs.problem if isinstance(shape, TracedShape) else None

    @property
    def estimated_step_s(self) -> float:
        """The seconds that the reference shape's plain step is estimated to take, without a
        measurement; 0 where it was not traced."""
        shape = self.record.reference_shape
        if not isinstance(shape, TracedShape):
            return 0.0
        profile = self.backend.estimated_profile(shape.costs.traced, 0)
        return sum(profile.op_time_s)

    @property
    def micro_batches(self) -> int:
        """How many pieces the reference shape's step trains its batch in."""
        shape = self.record.reference_shape
        return shape.costs.micro_batches if isinstance(shape, PlannedShape) else 1

    @property
    def in_slices(self) -> bool:
        """Whether some ops of the reference shape's step run in slices."""
        return self.plan is not None and self.plan.slicing is not None

    @property
    def schedules(self) -> dict[Signature, Schedule]:
        """The order of every batch shape that is trained under a plan."""
        shapes = self.record.shapes.items()
        return {key: shape.schedule for key, shape in shapes if isinstance(shape, PlannedShape)}

    @property
    def settled_usage(self) -> Usage:
        """What the newest steps of the reference shape measured.

        Raises:
            LookupError: it is not final.
        """
        shape = self.record.reference_shape
        if shape is None or not self.settled:
            raise LookupError("the step is not final")
        return shape.measured

    @property
    def settled_peak_bytes(self) -> int | None:
        """The measured peak of the reference shape's final step, where it has a plan, or stays
        though it is over the limit; ``None`` for a plain step that keeps it."""
        shape = self.record.reference_shape
        if shape is None or not self.settled:
            return None
        if self.plan is None:
            return shape.peak_bytes if self._is_over(shape) else None
        return None if self.plan.measured is None else self.plan.measured.peak_bytes

    def is_reference(self, batch: Any) -> bool:
        """Returns whether a batch has the reference shape."""
        return self._signatures.of(batch) == self.record.reference

    def reference_costs(self, batch: Any) -> tuple[Problem, dict[int, Profile]]:
        """Returns the costs of the reference shape's step, and the profiles of its ops that were
        measured at other batch sizes, by size.

        After plain steps, estimated op times are scaled to the measured step.

        Args:
            batch: of the reference shape; it is traced where it was known to fit without that.

        Raises:
            LookupError: there is no reference shape.
            UnsupportedModelError: nothing can be planned for it.
        """
        shape, baseline = self.record.reference_shape, self._fit.report.baseline
        if shape is None:
            raise LookupError("no batch was trained")
        if not isinstance(shape, TracedShape):
            with self._fit.planning():
                costs = self._moves.costs_of(shape, batch)
            self._family.learn(shape.signature, costs)
            shape = shape.traced(costs)
            self._set(shape)
        problem = shape.costs.problem
        if problem.profile.source == "estimated" and baseline and problem.store_all_time_s > 0:
            ratio = baseline.time_s / problem.store_all_time_s
            op_time_s = tuple(time_s * ratio for time_s in problem.profile.op_time_s)
            problem = replace(problem, profile=replace(problem.profile, op_time_s=op_time_s))
        return problem, self._family.profiles_by_size(
            self.record.shapes, shape.signature, problem.graph
        )

    def runs_plain(self, *, may_grow: bool) -> bool:
        """Returns whether Keras's own step trains all shapes, with room to spare: nothing is to be
        done.

        Args:
            may_grow: whether batches may come that are larger than those that came. Then there has
                to be as much room again as the step takes.
        """
        shape, shapes = self.record.reference_shape, self.record.shapes.values()
        if shape is None or not shape.called or shape.phase not in (Phase.PLAIN, Phase.FINAL):
            return False
        if any(isinstance(one, PlannedShape) or one.tries.plain_ruled_out for one in shapes):
            return False
        if may_grow and shape.phase is not Phase.FINAL:
            return False
        peak_bytes = shape.peak_bytes
        if not peak_bytes and isinstance(shape, TracedShape):
            peak_bytes = self._costs.plain_bound_bytes(shape.costs)
        return self._fit.limit.fits((1 + may_grow) * peak_bytes)

    def watched(self, usage: Usage) -> None:
        """Takes in what steps of the reference shape took that were watched from outside; where
        that is over the limit, its next batch is planned for."""
        shape = self.record.reference_shape
        if not isinstance(shape, PlainShape):
            return
        seen = (*shape.steps, usage) if shape.phase is Phase.PLAIN else (usage,)
        before = replace(shape, steps=seen)
        after: ShapeState = before
        if not self._is_over(before):
            after = self._follow(before, Trained(None, None, usage))
        self._set(after)
        self._learn(before, after)

    def epoch_begins(self) -> None:
        """Tells the baseline that an epoch begins."""
        self._fit.baseline.epoch_begins()

    def close(self) -> None:
        """Stops recordings and solvers that are under way."""
        for shape in self.record.shapes.values():
            if isinstance(shape, Recording) and shape.started:
                shape.recorder.stop(shape.run, 0)
                self._set(replace(shape, started=False))
            if isinstance(shape, Solving) and shape.process is not None:
                shape.process.end()
                self._set(replace(shape, process=None))
