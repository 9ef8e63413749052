"""Whether a step's schedule runs compiled as one (XLA) or op by op in order: measured, where both
are possible.

A compiled step fuses and may be faster; the executor obeys an order exactly and can time single
ops, so its plans hold tighter limits. Which of the two wins depends on device and model (XLA on a
CPU is slow at convolutions). So training begins with the first backend; one that cannot carry the
step, or finds no schedule under the limit, gives way to the next. Once the first one's step is
final and recomputes, the next one is tried under a quick plan, and the faster of those within the
limit stays. Every batch is trained exactly once, by whichever is in force.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend, Installed, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Usage
from keras_remat.errors import (
    InfeasibleBudgetError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.fit_plans import TunerOptions
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training.step_trainer import StepCounter, StepTuner
from keras_remat.units import format_bytes, format_seconds

#: Seconds the solver may take for a plan that is on trial.
_TRIAL_SOLVE_S = 8.0

_FAILURES = (InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError, PlanMismatchError)


class StepChoice:
    """Trains batches as a :class:`~keras_remat.training.step_trainer.StepTuner` does, by the better
    of several backends.

    Args:
        model: compiled and built, inside ``fit``.
        backends: the one to begin with, and those it may give way to.
        options: see :class:`~keras_remat.planning.fit_plans.TunerOptions`.
        report: gets the events and the baseline.
        progress: as in :class:`~keras_remat.training.step_trainer.StepTuner`.
    """

    def __init__(
        self,
        model: Any,
        backends: Sequence[Backend],
        options: TunerOptions,
        report: AutotuneReport,
        progress: Callable[[str], Any],
    ):
        self._model, self._options, self._report, self._progress = model, options, report, progress
        self._left = list(backends[1:])
        self._tuner = StepTuner(model, backends[0], options, report, progress)
        self._champion: StepTuner | None = (
            None  # whose step is final, while the next backend is on trial
        )
        self._size = 0  # of the batches the trial is about
        self._grown = False

    # ---------------------------------------------------------------- one batch

    def run(self, batch: Any, *, may_split: bool = False) -> Any:
        """Trains one batch and returns its logs.

        Args:
            batch: what ``train_step`` gets.
            may_split: whether a batch that fits under no schedule of any backend may be trained in
                micro-batches.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit; this batch
                was not trained.
            UnsupportedModelError: no backend can carry the step; this batch was not trained.
        """
        if self._champion is not None and batch_size_of(batch) != self._size:
            return self._champion.run(batch)
        while True:
            try:
                result = self._tuner.run(batch, may_split=may_split and not self._left)
            except _FAILURES as error:
                if not self._gives_way(error):
                    raise
                continue
            if self._tuner.settled:
                self._after_settling(batch)
            return result

    def _gives_way(self, error: Exception) -> bool:
        """Whether another backend takes over from the one that failed."""
        name = self._tuner.backend.compilation
        if self._champion is not None:
            kept = self._champion.backend.compilation
            self._end_trial(
                self._champion,
                f"The {name} step was tried and cannot be used, the {kept} one stays: {error}",
            )
            return True
        if not self._left or self._grown:
            return False
        following = self._left.pop(0)
        self.event(
            "compilation", f"No {name} step, training goes on {following.compilation}: {error}"
        )
        self._switch(self._make(following, self._options))
        return True

    def _after_settling(self, batch: Any) -> None:
        champion = self._champion
        if champion is None:
            plan = self._tuner.plan
            if (
                plan is None
                or plan.measured is None
                or not self._left
                or self._options.plan is not None
            ):
                return
            holds = plan.measured.peak_bytes <= self.limit_bytes
            options = self._options
            if (
                holds
            ):  # a trial is worth little time; where the limit is broken the next one has to do it
                solver = "greedy" if options.solver == "auto" else options.solver
                limit_s = min(_TRIAL_SOLVE_S, options.solver_time_limit_s)
                options = replace(options, solver=solver, solver_time_limit_s=limit_s)
            self._champion, self._size = self._tuner, batch_size_of(batch)
            rival = self._make(self._left.pop(0), options)
            self.event(
                "compilation",
                f"The {self._tuner.backend.compilation} step is final; {rival.backend.compilation} is tried.",
            )
            self._tuner = rival
            return
        first, second = _measured(champion), _measured(self._tuner)
        better = (
            champion
            if _rank(first, self.limit_bytes) <= _rank(second, self.limit_bytes)
            else self._tuner
        )
        told = ", ".join(
            f"{tuner.backend.compilation} {format_seconds(usage.time_s)} and {format_bytes(usage.peak_bytes)}"
            for tuner, usage in ((champion, first), (self._tuner, second))
        )
        self._end_trial(
            better, f"Measured per step: {told}. Training goes on {better.backend.compilation}."
        )

    def _end_trial(self, better: StepTuner, message: str) -> None:
        champion = self._champion
        assert champion is not None
        loser = self._tuner if better is champion else champion
        self.event("compilation", message)
        loser.close()
        better.counter += loser.counter
        better.steps_run = max(better.steps_run, loser.steps_run)
        self._champion, self._tuner = None, better

    def _switch(self, tuner: StepTuner) -> None:
        self._tuner.close()
        tuner.counter = self._tuner.counter
        self._tuner = tuner

    def _make(self, backend: Backend, options: TunerOptions) -> StepTuner:
        """A tuner that never runs the plain step: what was tried first has told that it does not
        fit."""
        tuner = StepTuner(
            self._model, backend, options, self._report, self._progress, plain_may_run=False
        )
        tuner.installed, tuner.steps_run = self._tuner.installed, self._tuner.steps_run
        return tuner

    # ---------------------------------------------------------------- the tuner in force

    @property
    def installed(self) -> Installed | None:
        """The train function that asks for every batch."""
        return self._tuner.installed

    @installed.setter
    def installed(self, installed: Installed) -> None:
        self._tuner.installed = installed

    @property
    def backend(self) -> Backend:
        """Whose step is in force."""
        return self._tuner.backend

    @property
    def settled(self) -> bool:
        """Whether the main batch shape's step is final, and no other is on trial."""
        return self._champion is None and self._tuner.settled

    @property
    def settled_peak_bytes(self) -> int | None:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        return self._tuner.settled_peak_bytes if self.settled else None

    @property
    def micro_batches(self) -> int:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        return self._tuner.micro_batches

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._tuner.plan

    @property
    def problem(self) -> Problem | None:
        """The main batch shape's step with its costs."""
        return self._tuner.problem

    @property
    def limit_bytes(self) -> int:
        """The memory limit in force."""
        return self._tuner.limit_bytes

    @property
    def usable_bytes(self) -> int:
        """The limit less the margin."""
        return self._tuner.usable_bytes

    def measured_main(self) -> tuple[TracedStep, Problem]:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        return self._tuner.measured_main()

    def measured_elsewhere(self) -> dict[int, Profile]:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        return self._tuner.measured_elsewhere()

    def forget_main(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """The next batch's shape becomes the main one; one that does not fit is refused, not handed
        to another backend."""
        self._grown = True
        self._tuner.forget_main(expected, costs)

    def event(self, kind: str, message: str) -> None:
        """Notes what happened, for the report and the log."""
        self._tuner.event(kind, message)

    def long_task(self, text: str) -> Any:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        return self._tuner.long_task(text)

    def take_counter(self) -> StepCounter:
        """Returns what was counted since the last call, by every backend, and starts again from
        zero."""
        counter = self._tuner.take_counter()
        return counter if self._champion is None else counter + self._champion.take_counter()

    def epoch_begins(self) -> None:
        """As in :class:`~keras_remat.training.step_trainer.StepTuner`."""
        self._tuner.epoch_begins()

    def close(self) -> None:
        """Stops a recording that is under way."""
        self._tuner.close()


def _measured(tuner: StepTuner) -> Usage:
    assert tuner.plan is not None
    assert tuner.plan.measured is not None
    return tuner.plan.measured


def _rank(usage: Usage, limit_bytes: int) -> tuple[bool, float]:
    """Within the limit the faster one comes first, above it the smaller one."""
    over = usage.peak_bytes > limit_bytes
    return over, usage.peak_bytes if over else usage.time_s
