"""Which step runs for which batch: plain, under an estimated plan, recorded, under a measured plan.

A state machine over the batches of one ``fit``, without Keras's life cycle (that is
:mod:`keras_remat.callback`), without a framework (that is :mod:`keras_remat.backends`) and without
solving (that is :mod:`keras_remat.planning.fit_plans`). Every batch that comes in is trained
exactly once, by one of these steps:

1. The step is traced and its plain peak predicted. If that fits under the limit with the margin,
   plain steps run and are measured; if they keep within the limit, nothing is changed.
2. Otherwise the plain step does not run. A first plan comes from an estimated profile; under it
   training starts. Where no schedule keeps to the limit and the batch may be cut, it is trained in
   micro-batches.
3. The next steps are recorded by the profiler, and the prediction is calibrated by their measured
   peak. If the plain step fits by that, it takes over; else the plan is made again from what was
   measured, and swapped in.
4. The measured peak decides, of these steps and of all that follow: over the limit, the plan is
   made again for what was too much, a bounded number of times; then the batch is cut, where it may
   be; else the one that measured least stays.

A step that runs out of memory all the same is undone (:mod:`keras_remat.training.undo`) and its
batch trained under a plan for what the device had.

Over 400 lines because the states are only understood side by side: each method is one transition.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from keras_remat.backends.base import Backend, Installed, ProfileRecorder, RunStep, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.fit_plans import StepPlanner, TunerOptions
from keras_remat.planning.make_plan import counted_bytes
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport, Event
from keras_remat.training.baseline import PredictedBaseline
from keras_remat.training.undo import StepGuard, StepOutOfMemoryError
from keras_remat.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

#: How often a plan is made again because its measured peak is over the limit.
_MAX_TIGHTENINGS = 3
#: How often a batch shape may run out of memory before its error is the user's.
_MAX_OUT_OF_MEMORY = 4
#: Numbers of micro-batches that are tried for a batch that fits under no schedule.
_MICRO_BATCHES = (2, 4, 8)
#: Steps from so many seconds on are compared in earnest; in shorter ones, what is not the ops'
#: weighs more than what is. How many plain ones run then before larger batches take over, and how
#: many of them are guarded: the copies make steps up to a fifth slower.
_LONG_STEP_S, _PLAIN_STEPS, _GUARDED_PLAIN_STEPS = 0.1, 8, 2


@dataclass
class _Candidate:
    """How batches of one signature are trained now."""

    batch_size: int
    run: RunStep
    phase: str  # "plain", "warm-up", "record", "verify", "settled"
    traced: TracedStep | None = None
    problem: Problem | None = None
    plan: Plan | None = None  # None while the plain step runs
    micro_batches: int = 1
    may_split: bool = False
    steps_in_phase: int = 0
    resident_bytes: int = 0  # the most in use between two of its steps
    measured: list[Usage] = field(default_factory=list)
    tried: list[tuple[Usage, Plan, RunStep]] = field(
        default_factory=list
    )  # plans that measured over the limit
    plain_exceeded: bool = (
        False  # the plain step was measured, or ran out of memory, over the limit
    )
    recorder: ProfileRecorder | None = None  # while its steps are recorded
    profile: Profile | None = None  # of a recording that is over
    out_of_memory: int = 0

    def enter(self, phase: str) -> None:
        self.phase, self.steps_in_phase = phase, 0
        self.measured.clear()

    @property
    def schedule(self) -> Schedule:
        """What runs, as a schedule."""
        assert self.problem is not None
        return (
            Schedule.store_all(self.problem.graph)
            if self.plan is None
            else self.plan.solution.schedule
        )


@dataclass
class StepCounter:
    """What the steps since the last :meth:`StepTuner.take_counter` came to."""

    samples: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    planning_time_s: float = 0.0
    peak_bytes: int = 0

    def __add__(self, other: StepCounter) -> StepCounter:
        return StepCounter(
            self.samples + other.samples,
            self.steps + other.steps,
            self.step_time_s + other.step_time_s,
            self.planning_time_s + other.planning_time_s,
            max(self.peak_bytes, other.peak_bytes),
        )


class StepTuner:
    """Trains batches under a memory limit.

    Args:
        model: compiled and built, inside ``fit``.
        backend: of the framework Keras runs on.
        options: see :class:`~keras_remat.planning.fit_plans.TunerOptions`.
        report: gets the events and the baseline.
        progress: ``progress(text)`` as a context manager around everything that takes long.
        plain_may_run: ``False`` where it is known that Keras's own step does not fit.

    Attributes:
        backend: as given.
        steps_run: how many steps this ``fit`` has trained.
    """

    def __init__(
        self,
        model: Any,
        backend: Backend,
        options: TunerOptions,
        report: AutotuneReport,
        progress: Callable[[str], Any],
        *,
        plain_may_run: bool = True,
    ):
        self.backend, self._plain_may_run = backend, plain_may_run
        self._model, self._backend, self._options, self._report = model, backend, options, report
        self._progress = progress
        self._planner = StepPlanner(backend, options)
        self._guard = StepGuard(model, backend)
        self._candidates: dict[Any, _Candidate] = {}
        self._main: _Candidate | None = None
        self._baseline = PredictedBaseline(report)
        self._baseline_shape: _Candidate | None = (
            None  # whose steps the baseline is measured on, or predicted from
        )
        self._expected: Plan | None = None
        self._costs: Problem | None = None
        self.steps_run = 0
        self.installed: Installed | None = None
        self.plan: Plan | None = None
        self.counter = StepCounter()

    # ---------------------------------------------------------------- one batch

    def run(self, batch: Any, *, may_split: bool = False) -> Any:
        """Trains one batch and returns its logs.

        Args:
            batch: what ``train_step`` gets.
            may_split: whether the size of a step is not given: a batch that fits under no schedule
                may then be trained in micro-batches.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit; this batch
                was not trained.
        """
        key = _signature(batch)
        candidate = self._candidates.get(key)
        if candidate is None:
            with self._planning():
                candidate = self._candidates[key] = self._prepare(batch, may_split)
        self._main = self._main or candidate
        while True:
            try:
                return self._train(candidate, batch)
            except StepOutOfMemoryError as error:
                with self._planning():
                    self._after_out_of_memory(candidate, batch, error)

    def epoch_begins(self) -> None:
        """Tells the baseline that an epoch begins."""
        self._baseline.epoch_begins()

    def _train(self, candidate: _Candidate, batch: Any) -> Any:
        for other in self._candidates.values():
            if (
                other is not candidate
            ):  # its recording has to do with the steps it has seen: this one is none of its
                self._end_recording(other)
        if candidate.phase == "record" and candidate.recorder is None:
            if candidate.steps_in_phase:
                with self._planning():
                    self._after_recording(candidate)
            else:
                self._begin_recording(candidate)
        result, usage = self._guard.run(
            lambda: candidate.run(batch), guarded=self._must_be_guarded(candidate)
        )
        self._count(candidate, usage)
        candidate.steps_in_phase += 1
        if candidate.phase != "settled":
            candidate.measured.append(usage)
            # the input pipeline holds more batches at some steps than at others
            candidate.resident_bytes = max(
                candidate.resident_bytes, self._backend.device.in_use_bytes()
            )
            self._advance(candidate, batch)
        else:
            self._watch(candidate, batch, usage)
        return result

    def _must_be_guarded(self, candidate: _Candidate) -> bool:
        """Whether the next step has to be undone if it runs out of memory, whatever the copy
        costs."""
        if candidate.phase == "settled":
            return candidate.steps_in_phase == 0
        seen = candidate.phase == "plain" and candidate.steps_in_phase >= _GUARDED_PLAIN_STEPS
        return not (seen and self._takes_long(candidate))

    def _watch(self, candidate: _Candidate, batch: Any, usage: Usage) -> None:
        """Plans a final step again that takes more than the limit after all: what shares the
        allocator's pool changes as training goes on."""
        is_baseline = (
            candidate is self._baseline_shape and self._report.baseline_source == "predicted"
        )
        if is_baseline and candidate.steps_in_phase > 1:  # the first one is guarded
            self._baseline.step(usage.time_s)
        if (
            candidate.plan is None
            or usage.peak_bytes <= self.limit_bytes
            or len(candidate.tried) >= _MAX_TIGHTENINGS
        ):
            return
        if candidate.plan.solution.schedule not in [
            plan.solution.schedule for _, plan, _ in candidate.tried
        ]:
            candidate.measured.append(usage)
            self._verify(candidate, batch)

    @property
    def settled(self) -> bool:
        """Whether the main batch shape's step is final."""
        return self._main is not None and self._main.phase == "settled"

    @property
    def settled_peak_bytes(self) -> int | None:
        """The measured peak of the main step's plan, once it is final."""
        if (
            not self.settled
            or self._main is None
            or self._main.plan is None
            or self._main.plan.measured is None
        ):
            return None
        return self._main.plan.measured.peak_bytes

    @property
    def micro_batches(self) -> int:
        """How many pieces the main step trains its batch in."""
        return self._main.micro_batches if self._main is not None else 1

    def measured_main(self) -> tuple[TracedStep, Problem]:
        """The main shape's trace and costs; after plain steps the estimated op times are scaled to
        the measured step."""
        main = self._main
        assert main is not None
        assert main.traced is not None
        assert main.problem is not None
        profile = main.problem.profile
        baseline = self._report.baseline
        if profile.source == "measured" or baseline is None or main.problem.store_all_time_s <= 0:
            return main.traced, main.problem
        ratio = baseline.time_s / main.problem.store_all_time_s
        return main.traced, replace(
            main.problem,
            profile=replace(profile, op_time_s=tuple(t * ratio for t in profile.op_time_s)),
        )

    def measured_elsewhere(self) -> dict[int, Profile]:
        """Batch size → the profile that was measured at it, for every shape but the main one that
        has the main one's ops."""
        main = self._main
        assert main is not None
        assert main.traced is not None
        others = [
            c
            for c in self._candidates.values()
            if c is not main and c.micro_batches == 1 and c.problem is not None
        ]
        return {
            other.batch_size: other.problem.profile
            for other in others
            if other.problem is not None
            and other.problem.profile.source == "measured"
            and other.problem.graph.has_ops_of(main.traced.graph)
        }

    def forget_main(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """The next batch's shape becomes the main one.

        Args:
            expected: a plan for it to begin with, or for another size of the same step.
            costs: what is known of its costs from other sizes.
        """
        self._main, self._expected, self._costs = None, expected, costs

    def close(self) -> None:
        """Stops a recording that is under way."""
        for candidate in self._candidates.values():
            recorder, candidate.recorder = candidate.recorder, None
            if recorder is not None:
                recorder.stop(candidate.run, 0)

    def _count(self, candidate: _Candidate, usage: Usage) -> None:
        self.steps_run += 1
        self.counter.samples += candidate.batch_size
        self.counter.steps += 1
        self.counter.step_time_s += usage.time_s
        self.counter.peak_bytes = max(self.counter.peak_bytes, usage.peak_bytes)

    def take_counter(self) -> StepCounter:
        """Returns what was counted since the last call and starts again from zero."""
        counter, self.counter = self.counter, StepCounter()
        return counter

    # ---------------------------------------------------------------- decisions

    @property
    def problem(self) -> Problem | None:
        """The traced step of the main batch shape with its costs, measured ones once there are
        any."""
        return self._main.problem if self._main is not None else None

    @property
    def limit_bytes(self) -> int:
        """The memory limit in force."""
        self._report.limit_bytes = self._planner.limit_bytes
        return self._planner.limit_bytes

    @property
    def usable_bytes(self) -> int:
        """The limit less the margin."""
        return self._planner.usable_bytes

    def _run_plain(self, batch: Any) -> Any:
        assert self.installed is not None
        return self.installed.run_plain(batch)

    def _prepare(self, batch: Any, may_split: bool) -> _Candidate:
        size = batch_size_of(batch)
        self._report.batch_size = self._report.batch_size or size
        candidate = _Candidate(
            size,
            self._run_plain,
            "plain",
            may_split=may_split,
            plain_exceeded=not self._plain_may_run,
        )
        if self._plain_may_run and self._main is not None and self._fits_in_proportion(size):
            candidate.enter("settled")
            return candidate
        problem = self._trace(candidate, batch)
        peak = self._plain_peak_bytes(candidate)
        if (
            self._options.plan is not None and not self._candidates
        ):  # it is for the shape that training begins with
            self._options.plan.check(problem)
            return self._with_plan(candidate, self._options.plan, "verify")
        if self._plain_may_run and peak <= self.usable_bytes:
            return candidate
        if self._plain_may_run:
            self.event(
                "risk",
                f"The plain step of {size} samples is predicted to need {format_bytes(peak)}, over {format_bytes(self.usable_bytes)} "
                f"(limit {format_bytes(self.limit_bytes)} less {self._options.margin:.0%} margin): it will not be run.",
            )
        cached = self._cached(problem)
        if cached is not None:
            self.event("cache", f"A plan for this graph and limit was cached. {cached}")
            return self._with_plan(candidate, cached, "verify")
        expected, main = self._expected, self._main
        if expected is not None and expected.problem is not None and main is None:
            plan = self._planner.reused(problem, expected, expected.problem.graph)
            if plan is not None:
                return self._with_plan(candidate, plan, "warm-up")
        if main is not None and main.plan is not None and main.problem is not None:
            plan = self._planner.reused(problem, main.plan, main.problem.graph)
            if plan is not None:
                return self._with_plan(candidate, plan, "verify")
        try:
            with self._progress("first plan, from estimated op times"):
                plan = self._planner.quick(problem, size)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            plan = self._micro_batched(candidate, batch, error)
        return self._with_plan(candidate, plan, "warm-up")

    def _trace(self, candidate: _Candidate, batch: Any, micro_batches: int = 1) -> Problem:
        with self._progress("tracing the train step"):
            gc.collect()  # what an earlier fit left in reference cycles is not resident
            candidate.traced = self._backend.trace(self._model, batch, micro_batches)
        graph = candidate.traced.graph
        in_use = counted_bytes(self._backend.device)
        profile = self._backend.estimated_profile(candidate.traced, in_use)
        known = self._known_costs(candidate.batch_size)
        if known is not None and micro_batches == 1 and known.graph.has_ops_of(graph):
            profile = replace(
                profile,
                op_time_s=known.profile.op_time_s,
                op_workspace_bytes=known.profile.op_workspace_bytes,
            )
        candidate.problem = Problem(graph, profile, name=self._model.name)
        candidate.micro_batches = micro_batches
        return candidate.problem

    def _known_costs(self, size: int) -> Problem | None:
        """What tells times and workspace at ``size`` better than shapes do; those of a larger batch
        are as much as it can take."""
        main = self._main
        if main is None:
            return self._costs
        return main.problem if main.micro_batches == 1 and size <= main.batch_size else None

    def _micro_batched(
        self,
        candidate: _Candidate,
        batch: Any,
        error: InfeasibleBudgetError | ScheduleNotFoundError,
    ) -> Plan:
        """A plan that trains the batch in pieces and sums their gradients; raises ``error`` where
        that is not allowed or does not help."""
        most = candidate.batch_size if candidate.may_split else 1
        for count in (n for n in _MICRO_BATCHES if candidate.micro_batches < n <= most):
            try:
                problem = self._trace(candidate, batch, count)
            except UnsupportedModelError as reason:
                raise error from reason
            try:
                with self._progress(f"plan for {count} micro-batches"):
                    plan = self._planner.quick(problem, candidate.batch_size)
            except (InfeasibleBudgetError, ScheduleNotFoundError) as failed:
                logger.debug("keras_remat: %d micro-batches: %s", count, failed)
                continue
            message = (
                f"No schedule trains {candidate.batch_size} samples at once within {format_bytes(self.limit_bytes)}: each step trains them in "
                f"{count} micro-batches and adds up their gradients. Batch normalization sees one micro-batch at a time."
            )
            warnings.warn(f"keras_remat: {message}", stacklevel=2)
            self.event("micro-batches", message)
            return plan
        raise error

    def _cut(
        self,
        candidate: _Candidate,
        batch: Any,
        error: InfeasibleBudgetError | ScheduleNotFoundError,
    ) -> bool:
        """Whether a batch that came not to fit in its step goes on in micro-batches, or in more of
        them; ``error`` says why it does not."""
        before = candidate.traced, candidate.problem, candidate.micro_batches
        try:
            plan = self._micro_batched(candidate, batch, error)
        except (InfeasibleBudgetError, ScheduleNotFoundError):
            candidate.traced, candidate.problem, candidate.micro_batches = before
            return False
        candidate.tried.clear()
        self._with_plan(candidate, plan, "warm-up")
        return True

    def _plain_peak_bytes(self, candidate: _Candidate) -> int:
        """What Keras's own step is predicted to need."""
        problem, traced = candidate.problem, candidate.traced
        assert problem is not None
        assert traced is not None
        return (
            self._backend.memory.peak_bytes(problem, Schedule.store_all(problem.graph))
            + traced.plain_surplus_bytes
        )

    def _cached(self, problem: Problem) -> Plan | None:
        try:
            return self._planner.cached(problem)
        except InvalidProblemError as error:
            self.event("cache", f"A cached plan cannot be used and is made again: {error}")
            return None

    def _fits_in_proportion(self, size: int) -> bool:
        """Whether a batch smaller than the main one fits plainly, its bytes above the resident ones
        taken as proportional."""
        main = self._main
        assert main is not None
        if main.problem is None or size > main.batch_size or main.micro_batches > 1:
            return False
        resident = main.problem.profile.resident_bytes
        peak = self._plain_peak_bytes(main)
        return resident + (peak - resident) * size / main.batch_size <= self.usable_bytes

    def _with_plan(self, candidate: _Candidate, plan: Plan, phase: str) -> _Candidate:
        assert candidate.traced is not None
        assert candidate.problem is not None
        with self._progress("building the rematerialized step"):
            schedule = plan.solution.schedule
            problem = candidate.problem.with_budget(plan.budget_bytes)
            candidate.run = self._backend.lower(candidate.traced, problem, schedule)
        self._set_plan(candidate, plan)
        recording_helps = phase != "warm-up" or self._backend.measures_op_times
        candidate.enter(phase if recording_helps else "verify")
        return candidate

    def _set_plan(self, candidate: _Candidate, plan: Plan | None) -> None:
        candidate.plan = plan
        if self._main is None or candidate is self._main:
            self.plan = plan

    def _advance(self, candidate: _Candidate, batch: Any) -> None:
        """What follows from the steps measured so far."""
        if candidate.phase == "plain" and candidate.steps_in_phase > self._options.profile_steps:
            usage = self._measured_plain(candidate)
            if candidate.steps_in_phase > self._plain_steps(candidate, usage):
                self._after_plain(candidate, usage)
        elif candidate.phase == "warm-up" and candidate.steps_in_phase >= 1:
            candidate.enter("record")
        elif (
            candidate.phase == "record" and candidate.steps_in_phase >= self._options.profile_steps
        ):
            self._end_recording(candidate)
            with self._planning():
                self._after_recording(candidate)
        elif candidate.phase == "verify":
            self._verify(candidate, batch)

    def _plain_steps(self, candidate: _Candidate, usage: Usage) -> int:
        """How many plain steps are measured after the first: more where larger ones will take over
        that are compared with them."""
        compared = (
            candidate.may_split
            and candidate is self._baseline_shape
            and usage.peak_bytes <= self.limit_bytes
        )
        return max(
            self._options.profile_steps,
            _PLAIN_STEPS if compared and self._takes_long(candidate) else 0,
        )

    def _takes_long(self, candidate: _Candidate) -> bool:
        return min(usage.time_s for usage in candidate.measured) >= _LONG_STEP_S

    def _measured_plain(self, candidate: _Candidate) -> Usage:
        """What the plain steps so far took, which is the baseline if they are the first."""
        steps = candidate.measured[1:]  # the first one compiles
        if len(steps) > _GUARDED_PLAIN_STEPS:
            steps = candidate.measured[_GUARDED_PLAIN_STEPS:]
        usage = Usage(
            median(u.time_s for u in steps), max(u.peak_bytes for u in candidate.measured)
        )
        if candidate is self._main and self._baseline_shape in (None, candidate):
            self._baseline_shape = candidate
            self._report.baseline, self._report.baseline_batch_size = usage, candidate.batch_size
            self._report.baseline_source = "measured"
        return usage

    def _after_plain(self, candidate: _Candidate, usage: Usage) -> None:
        if usage.peak_bytes <= self.limit_bytes:
            self.event(
                "fits",
                f"The plain step of {candidate.batch_size} samples takes {format_bytes(usage.peak_bytes)} measured, within "
                f"{format_bytes(self.limit_bytes)}: nothing is changed.",
            )
            candidate.enter("settled")
            return
        assert candidate.problem is not None
        predicted = self._plain_peak_bytes(candidate)
        self.event(
            "exceeded",
            f"The plain step takes {format_bytes(usage.peak_bytes)} measured ({format_bytes(predicted)} predicted), over "
            f"{format_bytes(self.limit_bytes)}: planning.",
        )
        # it ran in no order and by other ops, which says little about ours: those are planned for
        # as if it had not run
        candidate.plain_exceeded = True
        profiled = candidate.problem.profile.source == "measured"
        with self._planning():
            with self._progress("planning"):
                plan = (self._planner.best if profiled else self._planner.quick)(
                    candidate.problem, candidate.batch_size
                )
            self._with_plan(candidate, plan, "verify" if profiled else "warm-up")

    def _begin_recording(self, candidate: _Candidate) -> None:
        recorder = self._backend.recorder()
        if recorder.start():
            candidate.recorder, candidate.profile = recorder, None
        else:
            self.event(
                "profile",
                "A profiler session is running already; the plan stays with estimated op times.",
            )
            candidate.enter("verify")

    def _end_recording(self, candidate: _Candidate) -> None:
        recorder, candidate.recorder = candidate.recorder, None
        if recorder is not None:
            with self._planning(), self._progress("reading the profile"):
                candidate.profile = recorder.stop(candidate.run, candidate.resident_bytes)

    def _after_recording(self, candidate: _Candidate) -> None:
        assert candidate.problem is not None
        assert candidate.plan is not None
        profile = candidate.profile
        if profile is None:
            self.event(
                "profile", "The profiler saw too few ops; the plan stays with estimated op times."
            )
            candidate.enter("verify")
            return
        candidate.problem = replace(candidate.problem, profile=profile)
        self._observe(candidate)
        plain = self._plain_peak_bytes(candidate)
        if (
            plain <= self.usable_bytes
            and candidate.micro_batches == 1
            and not candidate.plain_exceeded
        ):
            self.event(
                "plain",
                f"By what was measured the plain step needs {format_bytes(plain)}, within {format_bytes(self.usable_bytes)}: it comes back.",
            )
            self._set_plan(candidate, None)
            candidate.run = self._run_plain
            candidate.enter("plain")
            return
        self._replan(candidate)

    def _observe(self, candidate: _Candidate) -> None:
        """Tells the memory model what the steps of this phase measured."""
        assert candidate.problem is not None
        if self._backend.device.has_statistics:
            peak = max(usage.peak_bytes for usage in candidate.measured)
            self._backend.memory.observe(candidate.problem, candidate.schedule, peak)

    def _replan(self, candidate: _Candidate, saving_bytes: int = 0) -> None:
        """Plans again from ``candidate.problem``, to save ``saving_bytes`` against what runs or as
        much of it as can be; what runs stays when nothing better is found."""
        problem, running = candidate.problem, candidate.plan
        assert problem is not None
        assert running is not None
        try:
            with self._progress("solving for the schedule"):
                if saving_bytes:
                    needed = self._backend.memory.peak_bytes(problem, running.solution.schedule)
                    plan = self._planner.nearest(problem, candidate.batch_size, needed)
                else:
                    known = running.solution.schedule
                    plan = self._planner.best(problem, candidate.batch_size, known)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self.event("kept", f"The plan that is running stays: {error}")
            self._keep_running(candidate)
            return
        now = self._planner.predict(problem, running.solution.schedule)
        if (
            not saving_bytes
            and now.peak_bytes <= self.usable_bytes
            and plan.predicted.time_s >= now.time_s
        ):
            self._keep_running(candidate)
            return
        self._with_plan(candidate, plan, "verify")
        self.event("swap", f"Swapped in. {plan}")

    def _keep_running(self, candidate: _Candidate) -> None:
        """The running plan stays; what it predicts follows the newest profile and all that it took
        above its replay."""
        problem, plan = candidate.problem, candidate.plan
        assert problem is not None
        assert plan is not None
        predicted, store_all = (
            self._planner.predict(problem, s)
            for s in (plan.solution.schedule, Schedule.store_all(problem.graph))
        )
        plan = replace(
            plan, predicted=predicted, store_all=store_all, profile_source=problem.profile.source
        )
        self._set_plan(candidate, plan)
        candidate.enter("verify")

    def _verify(self, candidate: _Candidate, batch: Any) -> None:
        problem, plan = candidate.problem, candidate.plan
        assert problem is not None
        assert plan is not None
        usage = Usage(
            median(u.time_s for u in candidate.measured[1:] or candidate.measured),
            max(u.peak_bytes for u in candidate.measured),
        )
        if usage.peak_bytes > self.limit_bytes:
            over = usage.peak_bytes - self.usable_bytes
            candidate.tried.append((usage, plan, candidate.run))
            nothing_tighter = plan.solution.schedule in [
                tried.solution.schedule for _, tried, _ in candidate.tried[:-1]
            ]
            if len(candidate.tried) <= _MAX_TIGHTENINGS and not nothing_tighter:
                self.event(
                    "tighten",
                    f"Measured peak {format_bytes(usage.peak_bytes)} is over the limit of {format_bytes(self.limit_bytes)} "
                    f"({format_bytes(plan.predicted.peak_bytes)} predicted): planning again for {format_bytes(over)} less.",
                )
                self._observe(candidate)
                with self._planning():
                    self._replan(candidate, over)
                return
            over_limit = ScheduleNotFoundError(
                self.usable_bytes,
                problem.floor_bytes,
                usage.peak_bytes,
                solver=self._options.solver,
            )
            with self._planning():
                if self._cut(candidate, batch, over_limit):
                    return
            usage, plan, candidate.run = min(candidate.tried, key=lambda tried: tried[0].peak_bytes)
            logger.warning(
                "keras_remat: the step takes %s measured, over the limit of %s; no schedule that takes less was found.",
                format_bytes(usage.peak_bytes),
                format_bytes(self.limit_bytes),
            )
        elif candidate.steps_in_phase <= self._options.profile_steps:
            return
        self._settle(candidate, replace(plan, measured=usage), usage)

    def _settle(self, candidate: _Candidate, plan: Plan, usage: Usage) -> None:
        """``plan`` is what training goes on with; ``usage`` is what it measured."""
        assert candidate.problem is not None
        self._set_plan(candidate, plan)
        self._planner.keep(plan, candidate.problem.graph)
        if (
            candidate is self._main
            and self._report.baseline_source != "measured"
            and self._baseline_shape in (None, candidate)
        ):
            self._baseline_shape = candidate
            self._baseline.begin(plan, candidate.batch_size, usage.time_s)
        self.event(
            "measured",
            f"Step of {candidate.batch_size} samples: {format_bytes(usage.peak_bytes)} measured "
            f"({format_bytes(plan.predicted.peak_bytes)} predicted), "
            f"{'within' if usage.peak_bytes <= self.limit_bytes else 'STILL OVER'} the limit of {format_bytes(self.limit_bytes)}; "
            f"{format_seconds(usage.time_s)} measured.",
        )
        candidate.enter("settled")

    def _after_out_of_memory(
        self, candidate: _Candidate, batch: Any, error: StepOutOfMemoryError
    ) -> None:
        """The step was undone: plans for what the device had when it failed, so that the same batch
        can be trained.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: from the framework's error; no schedule
                takes that much less.
        """
        self.close()
        candidate.out_of_memory += 1
        problem = candidate.problem or self._trace(candidate, batch)
        cause, before = error.__cause__, self.limit_bytes
        predicted = self._backend.memory.peak_bytes(problem, candidate.schedule)
        self.event(
            "out-of-memory",
            f"The step of {candidate.batch_size} samples ({format_bytes(predicted)} predicted) ran out of memory with "
            f"{format_bytes(error.peak_bytes)} in use; what it had changed was put back, and its batch is trained again under a tighter plan.",
        )
        # Keras drops the cause of what fit raises; a note stays
        note = f"The device ran out of memory: {type(cause).__name__}: {str(cause)[:500]}"
        if candidate.out_of_memory > _MAX_OUT_OF_MEMORY:
            ended = ScheduleNotFoundError(
                before, problem.floor_bytes, predicted, solver=self._options.solver
            )
            ended.add_note(note)
            raise ended from cause
        candidate.plain_exceeded |= candidate.plan is None
        self._planner.limit_bytes = max(1, min(before, predicted - 1, error.peak_bytes))
        try:
            plan = self._planner.nearest(problem, candidate.batch_size, predicted)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as failure:
            if self._cut(candidate, batch, failure):
                return
            self._planner.limit_bytes = before
            failure.add_note(note)
            raise failure from cause
        if (
            plan.predicted.peak_bytes > self.usable_bytes
        ):  # out of reach; all that is known for certain is what was too much
            self._planner.limit_bytes = min(before, predicted - 1)
        self._with_plan(
            candidate, plan, "warm-up" if problem.profile.source == "estimated" else "verify"
        )
        self.event("swap", f"The limit is {format_bytes(self.limit_bytes)} from here on. {plan}")

    # ---------------------------------------------------------------- bookkeeping

    @contextmanager
    def _planning(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.counter.planning_time_s += time.perf_counter() - started

    @contextmanager
    def long_task(self, text: str) -> Iterator[None]:
        """Something that takes long and is no training: counted apart, with a progress bar."""
        with self._planning(), self._progress(text):
            yield

    def event(self, kind: str, message: str) -> None:
        """Notes what happened, for the report and the log."""
        self._report.events.append(Event(self.steps_run, kind, message))
        logger.info("keras_remat: %s", message)


def _signature(batch: Any) -> tuple[Any, ...]:
    import keras

    return tuple(
        None if leaf is None else (tuple(leaf.shape), getattr(leaf.dtype, "name", str(leaf.dtype)))
        for leaf in keras.tree.flatten(batch)
    )
