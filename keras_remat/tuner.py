"""Which step runs for which batch: plain, under an estimated plan, recorded, under a measured plan.

A state machine over the batches of one ``fit``, without Keras's life cycle (that is :mod:`keras_remat.callback`) and without a framework
(that is :mod:`keras_remat.backends`). Every batch that comes in is trained exactly once, by one of these steps:

1. The step is traced and its plain peak predicted. If that fits under the limit with the margin, plain steps run and are measured;
   if they keep within the limit, nothing is changed.
2. Otherwise the plain step never runs. A first plan comes from an estimated profile; under it training starts.
3. The next steps are recorded by the profiler; the plan is made again from what was measured, and swapped in.
4. The measured peak decides: over the limit, the plan is tightened by what was too much, a bounded number of times.

Over 400 lines because the states are only understood side by side: each method is one transition.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from keras_remat.backends.base import Backend, Installed, ProfileRecorder, RunStep, TracedStep
from keras_remat.backends.examples import batch_size_of
from keras_remat.errors import InfeasibleBudgetError, InvalidProblemError, ScheduleNotFoundError
from keras_remat.graph import Graph
from keras_remat.plan import Plan, cache_path, cached_plan, describe_limit_error, plan_problem, usable_bytes
from keras_remat.problem import Problem
from keras_remat.report import AutotuneReport, Event
from keras_remat.schedule import Schedule, Usage
from keras_remat.simulate import simulate
from keras_remat.units import format_bytes, format_seconds, parse_bytes

logger = logging.getLogger(__name__)

#: How often a plan is tightened because its measured peak is over the limit.
_MAX_TIGHTENINGS = 3
#: Shares of a tightening that are tried when all of it is out of reach.
_PARTIAL_CORRECTIONS = (0.85, 0.7, 0.5, 0.25)
#: Seconds the first, estimated plan may take to solve.
_QUICK_SOLVE_S = 8.0


@dataclass(frozen=True)
class TunerOptions:
    """The arguments of ``RematAutotune`` that decide about steps; see there."""

    memory_limit: int | str | None = None
    batch_size: int | str = "max"
    solver: str = "auto"
    solver_time_limit_s: float = 30.0
    profile_steps: int = 3
    margin: float = 0.05
    seed: int = 0
    plan: Plan | None = None
    cache_dir: str | os.PathLike[str] | None = None


@dataclass
class _Candidate:
    """How batches of one signature are trained now."""

    batch_size: int
    run: RunStep
    phase: str  # "plain", "warm-up", "record", "verify", "settled"
    traced: TracedStep | None = None
    problem: Problem | None = None
    plan: Plan | None = None
    steps_in_phase: int = 0
    tightenings: int = 0
    resident_bytes: int = 0  # the most in use between two of its steps
    measured: list[Usage] = field(default_factory=list)
    failure: InfeasibleBudgetError | ScheduleNotFoundError | None = None  # why no further batch can be trained

    def enter(self, phase: str) -> None:
        self.phase, self.steps_in_phase = phase, 0
        self.measured.clear()


@dataclass
class StepCounter:
    """What the steps since the last :meth:`take` came to."""

    samples: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    planning_time_s: float = 0.0
    peak_bytes: int = 0


class StepTuner:
    """Trains batches under a memory limit.

    Args:
        model: compiled and built, inside ``fit``.
        backend: of the framework Keras runs on.
        options: see :class:`TunerOptions`.
        report: gets the events and the baseline.
        progress: ``progress(text)`` as a context manager around everything that takes long.
    """

    def __init__(
        self, model: Any, backend: Backend, options: TunerOptions, report: AutotuneReport, progress: Callable[[str], Any]
    ):
        self._model, self._backend, self._options, self._report = model, backend, options, report
        self._progress = progress
        self._candidates: dict[Any, _Candidate] = {}
        self._main: _Candidate | None = None
        self._recorder: ProfileRecorder | None = None
        self._step = 0
        self.installed: Installed | None = None
        self.plan: Plan | None = None
        self.counter = StepCounter()

    # ---------------------------------------------------------------- one batch

    def run(self, batch: Any) -> Any:
        """Trains one batch and returns its logs.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit; this batch was not trained.
        """
        key = _signature(batch)
        candidate = self._candidates.get(key)
        if candidate is None:
            with self._planning():
                candidate = self._candidates[key] = self._prepare(batch)
        self._main = self._main or candidate
        if candidate.failure is not None:
            raise candidate.failure
        if candidate.phase == "record" and candidate.steps_in_phase == 0:
            self._recorder = self._backend.recorder()
            if not self._recorder.start():
                self._recorder = None
                self.event("profile", "A profiler session is running already; the plan stays with estimated op times.")
                candidate.enter("verify")
        result, usage = self._backend.measure(lambda: candidate.run(batch))
        self._count(candidate, usage)
        candidate.measured.append(usage)
        # the input pipeline holds more batches at some steps than at others
        candidate.resident_bytes = max(candidate.resident_bytes, self._backend.bytes_in_use())
        candidate.steps_in_phase += 1
        self._advance(candidate)
        return result

    @property
    def settled(self) -> bool:
        """Whether the main batch shape's step is final."""
        return self._main is not None and self._main.phase == "settled"

    @property
    def settled_peak_bytes(self) -> int | None:
        """The measured peak of the main step's plan, once it is final."""
        if not self.settled or self._main is None or self._main.plan is None or self._main.plan.measured is None:
            return None
        return self._main.plan.measured.peak_bytes

    def measured_main(self) -> tuple[TracedStep, Problem]:
        """The main shape's trace and costs; after plain steps the estimated op times are scaled to the measured step."""
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
            main.problem, profile=replace(profile, op_time_s=tuple(t * ratio for t in profile.op_time_s))
        )

    def forget_main(self) -> None:
        """The next batch's shape becomes the main one."""
        self._main = None

    def close(self) -> None:
        """Stops a recording that is under way."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._main is not None:
            recorder.stop(self._main.run, 0)

    def _count(self, candidate: _Candidate, usage: Usage) -> None:
        self._step += 1
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
        """The traced step of the main batch shape with its costs, measured ones once there are any."""
        return self._main.problem if self._main is not None else None

    @property
    def limit_bytes(self) -> int:
        if self._report.limit_bytes is None:
            total = self._backend.device_memory_bytes()
            limit = self._options.memory_limit
            self._report.limit_bytes = total if limit is None else parse_bytes(limit, total_bytes=total)
        return self._report.limit_bytes

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.limit_bytes, self._options.margin)

    def _run_plain(self, batch: Any) -> Any:
        assert self.installed is not None
        return self.installed.run_plain(batch)

    def _prepare(self, batch: Any) -> _Candidate:
        size = batch_size_of(batch)
        self._report.batch_size = self._report.batch_size or size
        if self._main is not None and self._fits_in_proportion(size):
            return _Candidate(size, self._run_plain, "settled")
        with self._progress("tracing the train step"):
            traced = self._backend.trace(self._model, batch)
        profile = self._backend.estimated_profile(traced, self._backend.bytes_in_use())
        problem = Problem(traced.graph, profile, name=self._model.name)
        peak = self._backend.predicted_peak_bytes(problem, Schedule.store_all(traced.graph))
        if self._options.plan is not None and not self._candidates:  # it is for the shape that training begins with
            self._options.plan.check(problem)
            return self._with_plan(_Candidate(size, self._run_plain, "plain", traced, problem), self._options.plan, "verify")
        candidate = _Candidate(size, self._run_plain, "plain", traced, problem)
        if peak <= self.usable_bytes:
            return candidate
        self.event(
            "risk",
            f"The plain step of {size} samples is predicted to need {format_bytes(peak)}, over {format_bytes(self.usable_bytes)} "
            f"(limit {format_bytes(self.limit_bytes)} less {self._options.margin:.0%} margin): it will not be run.",
        )
        cached = self._cached(problem)
        if cached is not None:
            self.event("cache", f"A plan for this graph and limit was cached. {cached}")
            return self._with_plan(candidate, cached, "verify")
        with self._progress("first plan, from estimated op times"):
            plan = self._first_plan(candidate, problem)
        return self._with_plan(candidate, plan, "warm-up")

    def _cached(self, problem: Problem) -> Plan | None:
        if self._options.cache_dir is None:
            return None
        try:
            return cached_plan(self._options.cache_dir, problem, self.usable_bytes)
        except InvalidProblemError as error:
            self.event("cache", f"A cached plan cannot be used and is made again: {error}")
            return None

    def _cache(self, plan: Plan, graph: Graph) -> None:
        """Keeps a measured plan that held its limit."""
        if self._options.cache_dir is None or plan.measured is None or plan.measured.peak_bytes > self.limit_bytes:
            return
        path = cache_path(self._options.cache_dir, graph, self.usable_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)

    def _first_plan(self, candidate: _Candidate, problem: Problem) -> Plan:
        """A plan to train under while profiling: a quick one, or, where none is found quickly, one by the chosen solver in its full time."""
        limit_s = self._options.solver_time_limit_s
        try:
            return self._solve(candidate, problem, solver="greedy", time_limit_s=min(_QUICK_SOLVE_S, limit_s))
        except ScheduleNotFoundError:
            return self._solve(candidate, problem, solver=self._options.solver, time_limit_s=limit_s)

    def _fits_in_proportion(self, size: int) -> bool:
        """Whether a batch smaller than the main one fits plainly, its bytes above the resident ones taken as proportional."""
        main = self._main
        assert main is not None
        if main.problem is None or size > main.batch_size:
            return False
        resident = main.problem.profile.resident_bytes
        peak = self._backend.predicted_peak_bytes(main.problem, Schedule.store_all(main.problem.graph))
        return resident + (peak - resident) * size / main.batch_size <= self.usable_bytes

    def _solve(
        self, candidate: _Candidate, problem: Problem, *, solver: str, time_limit_s: float, correction_bytes: int = 0
    ) -> Plan:
        try:
            return plan_problem(
                problem, self.usable_bytes, self._backend,
                solver=solver, time_limit_s=time_limit_s, seed=self._options.seed, correction_bytes=correction_bytes,
            )  # fmt: skip
        except InfeasibleBudgetError as error:
            advice = describe_limit_error(error, self.limit_bytes, candidate.batch_size, problem.profile.resident_bytes)
            raise InfeasibleBudgetError(error.budget_bytes, error.floor_bytes, error.op_name, advice=advice) from error

    def _with_plan(self, candidate: _Candidate, plan: Plan, phase: str) -> _Candidate:
        assert candidate.traced is not None
        assert candidate.problem is not None
        with self._progress("building the rematerialized step"):
            schedule = plan.solution.schedule
            # parallelism may use what the schedule itself needs at its peak, not what the allocator loses above that
            peak = simulate(candidate.problem, schedule).peak_bytes
            candidate.run = self._backend.lower(candidate.traced, candidate.problem, schedule, peak)
        candidate.plan = plan
        if self._main is None or candidate is self._main:
            self.plan = plan
        candidate.enter(phase)
        return candidate

    def _advance(self, candidate: _Candidate) -> None:
        """What follows from the steps measured so far."""
        if candidate.phase == "plain" and candidate.steps_in_phase > self._options.profile_steps:
            self._after_plain(candidate)
        elif candidate.phase == "warm-up" and candidate.steps_in_phase >= 1:
            candidate.enter("record")
        elif candidate.phase == "record" and candidate.steps_in_phase >= self._options.profile_steps:
            with self._planning():
                self._after_recording(candidate)
        elif candidate.phase == "verify":
            self._verify(candidate)

    def _after_plain(self, candidate: _Candidate) -> None:
        steps = candidate.measured[1:]  # the first one compiles
        usage = Usage(median(u.time_s for u in steps), max(u.peak_bytes for u in candidate.measured))
        if candidate is self._main and self._report.baseline is None:
            self._baseline(usage, candidate.batch_size, "measured")
        if usage.peak_bytes <= self.limit_bytes:
            self.event(
                "fits",
                f"The plain step of {candidate.batch_size} samples takes {format_bytes(usage.peak_bytes)} measured, within "
                f"{format_bytes(self.limit_bytes)}: nothing is changed.",
            )
            candidate.enter("settled")
            return
        assert candidate.problem is not None
        predicted = self._backend.predicted_peak_bytes(candidate.problem, Schedule.store_all(candidate.problem.graph))
        self.event(
            "exceeded",
            f"The plain step takes {format_bytes(usage.peak_bytes)} measured ({format_bytes(predicted)} predicted), over "
            f"{format_bytes(self.limit_bytes)}: planning.",
        )
        with self._planning():
            try:
                with self._progress("first plan, from estimated op times"):
                    plan = self._solve(
                        candidate, candidate.problem, solver="greedy", time_limit_s=_QUICK_SOLVE_S,
                        correction_bytes=max(0, usage.peak_bytes - predicted),
                    )  # fmt: skip
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                candidate.failure = error  # this batch is trained already; the next one is refused
                return
            self._with_plan(candidate, plan, "warm-up")

    def _after_recording(self, candidate: _Candidate) -> None:
        assert self._recorder is not None
        assert candidate.problem is not None
        assert candidate.plan is not None
        recorder, self._recorder = self._recorder, None
        with self._progress("reading the profile"):
            profile = recorder.stop(candidate.run, candidate.resident_bytes)
        if profile is None:
            self.event("profile", "The profiler saw too few ops; the plan stays with estimated op times.")
            candidate.enter("verify")
            return
        candidate.problem = replace(candidate.problem, profile=profile)
        self._replan(candidate, 0)

    def _replan(self, candidate: _Candidate, correction_bytes: int) -> None:
        """Plans again from ``candidate.problem``; keeps the plan that runs when no better one is found."""
        assert candidate.problem is not None
        assert candidate.plan is not None
        try:
            with self._progress("solving for the schedule"):
                plan = self._tightened(candidate, candidate.problem, correction_bytes)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self.event("kept", f"The plan that is running stays: {error}")
            candidate.tightenings = _MAX_TIGHTENINGS  # there is nothing tighter; what the running plan takes is still measured
            self._keep_running(candidate)
            return
        running = self._predict(candidate.problem, candidate.plan.solution.schedule)
        if not correction_bytes and running.peak_bytes <= self.usable_bytes and plan.predicted.time_s >= running.time_s:
            self._keep_running(candidate)
            return
        self._with_plan(candidate, plan, "verify")
        self.event("swap", f"Swapped in. {plan}")

    def _tightened(self, candidate: _Candidate, problem: Problem, correction_bytes: int) -> Plan:
        """A plan for ``correction_bytes`` less than the limit, or, where there is none, for as much of that as a quick solver reaches."""
        options = self._options
        try:
            return self._solve(
                candidate,
                problem,
                solver=options.solver,
                time_limit_s=options.solver_time_limit_s,
                correction_bytes=correction_bytes,
            )
        except (InfeasibleBudgetError, ScheduleNotFoundError):
            for share in _PARTIAL_CORRECTIONS if correction_bytes else ():
                try:
                    return self._solve(
                        candidate,
                        problem,
                        solver="greedy",
                        time_limit_s=_QUICK_SOLVE_S,
                        correction_bytes=int(share * correction_bytes),
                    )
                except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                    logger.debug("keras_remat: %s", error)
            raise

    def _predict(self, problem: Problem, schedule: Schedule) -> Usage:
        return Usage(simulate(problem, schedule).time_s, self._backend.predicted_peak_bytes(problem, schedule))

    def _keep_running(self, candidate: _Candidate) -> None:
        """The running plan stays; what it predicts follows the newest profile."""
        problem, plan = candidate.problem, candidate.plan
        assert problem is not None
        assert plan is not None
        predicted, store_all = (self._predict(problem, s) for s in (plan.solution.schedule, Schedule.store_all(problem.graph)))
        candidate.plan = replace(plan, predicted=predicted, store_all=store_all, profile_source=problem.profile.source)
        if candidate is self._main:
            self.plan = candidate.plan
        candidate.enter("verify")

    def _verify(self, candidate: _Candidate) -> None:
        assert candidate.plan is not None
        peak = max(u.peak_bytes for u in candidate.measured)
        if peak > self.limit_bytes and candidate.tightenings < _MAX_TIGHTENINGS:
            candidate.tightenings += 1
            over = peak - self.usable_bytes
            self.event(
                "tighten",
                f"Measured peak {format_bytes(peak)} is over the limit of {format_bytes(self.limit_bytes)} "
                f"({format_bytes(candidate.plan.predicted.peak_bytes)} predicted): planning again for {format_bytes(over)} less.",
            )
            with self._planning():
                self._replan(candidate, over)
            return
        if candidate.steps_in_phase <= self._options.profile_steps and peak <= self.limit_bytes:
            return
        usage = Usage(median(u.time_s for u in candidate.measured[1:] or candidate.measured), peak)
        candidate.plan = replace(candidate.plan, measured=usage)
        assert candidate.problem is not None
        self._cache(candidate.plan, candidate.problem.graph)
        if candidate is self._main:
            self.plan = candidate.plan
            self._predicted_baseline(candidate, usage)
        verdict = "within" if peak <= self.limit_bytes else "STILL OVER"
        if peak > self.limit_bytes:
            logger.warning(
                "keras_remat: the step takes %s measured, over the limit of %s; no schedule that takes less was found.",
                format_bytes(peak), format_bytes(self.limit_bytes),
            )  # fmt: skip
        self.event(
            "measured",
            f"Step of {candidate.batch_size} samples: {format_bytes(peak)} measured ({format_bytes(candidate.plan.predicted.peak_bytes)} "
            f"predicted), {verdict} the limit of {format_bytes(self.limit_bytes)}; {format_seconds(usage.time_s)} measured.",
        )
        candidate.enter("settled")

    def _predicted_baseline(self, candidate: _Candidate, usage: Usage) -> None:
        """The plain step never ran: its time is predicted from the measured one, by the ratio of op times."""
        if self._report.baseline is not None:
            return
        assert candidate.plan is not None
        plan = candidate.plan
        ratio = plan.store_all.time_s / plan.predicted.time_s if plan.predicted.time_s > 0 else 1.0
        self._baseline(Usage(usage.time_s * ratio, plan.store_all.peak_bytes), candidate.batch_size, "predicted")

    def _baseline(self, usage: Usage, batch_size: int, source: Any) -> None:
        self._report.baseline, self._report.baseline_batch_size, self._report.baseline_source = usage, batch_size, source

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
        self._report.events.append(Event(self._step, kind, message))
        logger.info("keras_remat: %s", message)


def _signature(batch: Any) -> tuple[Any, ...]:
    import keras

    return tuple(
        None if leaf is None else (tuple(leaf.shape), getattr(leaf.dtype, "name", str(leaf.dtype)))
        for leaf in keras.tree.flatten(batch)
    )
