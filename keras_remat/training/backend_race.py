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

from keras_remat.backends.base import Backend, Installed
from keras_remat.backends.batches import batch_size_of
from keras_remat.core.events import EventKind
from keras_remat.core.problem import Problem
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
from keras_remat.training.fit_state import FitState
from keras_remat.training.step_trainer import StepTrainer
from keras_remat.units import format_bytes, format_seconds

#: Seconds the solver may take for a plan that is on trial.
_TRIAL_SOLVE_S = 8.0

_FAILURES = (InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError, PlanMismatchError)


class BackendRace:
    """Trains batches by the better of several backends.

    Args:
        model: compiled and built, inside ``fit``.
        backends: the one to begin with, and those it may give way to.
        options: see :class:`~keras_remat.planning.fit_plans.TunerOptions`.
        report: gets the events and the baseline.
        progress: ``progress(text)`` as a context manager around everything that takes long.
        installed: the train function that asks for every batch.

    Attributes:
        fit: what the steps of all backends share: events, counters, the train function.
        trainer: the backend's that is in force, or on trial.
    """

    def __init__(
        self,
        model: Any,
        backends: Sequence[Backend],
        options: TunerOptions,
        report: AutotuneReport,
        progress: Callable[[str], Any],
        installed: Installed,
    ):
        self.fit = FitState(model, report, progress, installed)
        self._options, self._left = options, list(backends[1:])
        self.trainer = StepTrainer(self.fit, backends[0], options)
        self._champion: StepTrainer | None = (
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
                result = self.trainer.run(batch, may_split=may_split and not self._left)
            except _FAILURES as error:
                if not self._gives_way(error):
                    raise
                continue
            if self.trainer.settled and self._champion is None:
                self._begin_trial(batch)
            elif self.trainer.settled and self._champion is not None:
                self._compare(self._champion)
            return result

    def _gives_way(self, error: Exception) -> bool:
        """Whether another backend takes over from the one that failed."""
        name = self.trainer.backend.compilation
        champion = self._champion
        if champion is not None:
            kept = champion.backend.compilation
            message = f"The {name} step was tried and cannot be used, the {kept} one stays: {error}"
            self._end_trial(champion, champion, message)
            return True
        if not self._left or self._grown:
            return False
        following = self._rival(self._options)
        self.fit.event(
            EventKind.COMPILATION,
            f"No {name} step, training goes on {following.backend.compilation}: {error}",
        )
        self.trainer.close()
        self.trainer = following
        return True

    def _begin_trial(self, batch: Any) -> None:
        """Lets the next backend show what it can do, where the first one's step recomputes."""
        first = self.trainer
        if first.plan is None or not self._left or self._options.plan is not None:
            return
        options = self._options
        if first.settled_usage.peak_bytes <= first.limit_bytes:
            # a trial is worth little time; where the limit is broken the next one has to do it
            solver = "greedy" if options.solver == "auto" else options.solver
            limit_s = min(_TRIAL_SOLVE_S, options.solver_time_limit_s)
            options = replace(options, solver=solver, solver_time_limit_s=limit_s)
        self._champion, self._size = first, batch_size_of(batch)
        self.trainer = self._rival(options)
        self.fit.event(
            EventKind.COMPILATION,
            f"The {first.backend.compilation} step is final; "
            f"{self.trainer.backend.compilation} is tried.",
        )

    def _compare(self, champion: StepTrainer) -> None:
        """Ends a trial: the faster of both steps stays, of those within the limit."""
        limit = champion.limit_bytes
        both = (champion, self.trainer)
        better = min(both, key=lambda trainer: _rank(trainer.settled_usage, limit))
        told = ", ".join(
            f"{trainer.backend.compilation} {format_seconds(trainer.settled_usage.time_s)} and "
            f"{format_bytes(trainer.settled_usage.peak_bytes)}"
            for trainer in both
        )
        kept = better.backend.compilation
        self._end_trial(champion, better, f"Measured per step: {told}. Training goes on {kept}.")

    def _end_trial(self, champion: StepTrainer, better: StepTrainer, message: str) -> None:
        loser = self.trainer if better is champion else champion
        self.fit.event(EventKind.COMPILATION, message)
        loser.close()
        self._champion, self.trainer = None, better

    def _rival(self, options: TunerOptions) -> StepTrainer:
        """Returns the next backend's trainer, which never runs the plain step: what was tried first
        has told that it does not fit."""
        return StepTrainer(self.fit, self._left.pop(0), options, plain_may_run=False)

    # ---------------------------------------------------------------- for others

    @property
    def settled(self) -> bool:
        """Whether the reference shape's step is final, and no other is on trial."""
        return self._champion is None and self.trainer.settled

    def begin_shape(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """Makes the next batch's shape the reference shape; one that does not fit is refused, not
        handed to another backend.

        Args:
            expected, costs: as in :meth:`.step_trainer.StepTrainer.begin_shape`.
        """
        self._grown = True
        self.trainer.begin_shape(expected, costs)


def _rank(usage: Usage, limit_bytes: int) -> tuple[bool, float]:
    """Within the limit the faster one comes first, above it the smaller one."""
    over = usage.peak_bytes > limit_bytes
    return over, usage.peak_bytes if over else usage.time_s
