"""Which way a step runs: compiled as one (XLA) or op by op in order, on the whole batch or in
pieces: measured, where several ways are possible.

A compiled step fuses and may be faster; the executor obeys an order exactly and can time single
ops, so its plans hold tighter limits. Which of the two wins depends on device and model (XLA on a
CPU is slow at convolutions). Pieces need less memory and less recomputation
(:mod:`keras_remat.training.pieces`). So training begins with the first way; one that cannot carry
the step, or finds no schedule under the limit, gives way to the next. Once the first one's step is
final and under a plan, the next one is tried under a quick plan: both train a few batches, one
after the other, and the faster of those within the limit stays. Then the next way is tried against
it. Every batch is trained exactly once, by whichever is in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.backends.batches import batch_size_of
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Usage
from keras_remat.errors import (
    InfeasibleBudgetError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    statement_of,
)
from keras_remat.planning.plan import Plan
from keras_remat.training.arguments import FitOptions
from keras_remat.training.fit_state import FitState
from keras_remat.training.pieces import MOST_OPS, Tried, next_pieces, pays
from keras_remat.training.shape_state import USUAL_TERMS, Terms
from keras_remat.training.step_trainer import StepTrainer
from keras_remat.units import format_bytes, format_seconds

#: Seconds the solver may take for a plan that is on trial.
_TRIAL_SOLVE_S = 8.0
#: Both sides of a trial train so many steps in turn, so many times, before it ends; the first one
#: after a change of sides tells nothing.
_STEPS_A_TURN, _TURNS = 3, 2

_FAILURES = (InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError, PlanMismatchError)


class Trial:
    """Two steps that train the same batches, until it is known which of them is faster.

    The rival trains until its step is final; then both are measured shortly after each other,
    because devices slow down and speed up from one minute to the next.
    """

    def __init__(self, fit: FitState, champion: StepTrainer, rival: StepTrainer, size: int):
        self._fit, self.champion, self.rival, self.size = fit, champion, rival, size
        self._sides = [champion] * _STEPS_A_TURN + [rival] * _STEPS_A_TURN
        self._sides *= _TURNS
        self._usages: list[Usage] = []  # what the steps of the turns took

    def turn(self) -> StepTrainer | None:
        """Returns who trains the next batch, once the rival's step is final; ``None`` when both
        were measured, or one is over the limit."""
        at, both = len(self._usages), (self.champion, self.rival)
        peaks = (trainer.settled_usage.peak_bytes for trainer in both)
        if at == len(self._sides) or not all(map(self._fit.limit.holds, peaks)):
            return None
        return self._sides[at]

    def note(self, trainer: StepTrainer) -> None:
        """Notes what a final step took, where it was the trainer's turn."""
        if trainer is self.turn():
            self._usages.append(trainer.settled_usage)

    def usage(self, trainer: StepTrainer) -> Usage:
        """Returns what a side's steps took."""
        steps = [
            usage
            for at, (side, usage) in enumerate(zip(self._sides, self._usages, strict=False))
            if side is trainer and at % _STEPS_A_TURN
        ]
        if not steps:
            return trainer.settled_usage
        peak_bytes = max(trainer.settled_usage.peak_bytes, *(step.peak_bytes for step in steps))
        return Usage(median(step.time_s for step in steps), peak_bytes)


class BackendRace:
    """Trains batches by the best of several ways.

    Args:
        fit: what the steps of all ways share: events, counters, the train function.
        backends: the one to begin with, and those it may give way to.

    Attributes:
        trainer: the way's that is in force, or on trial.
    """

    def __init__(self, fit: FitState, backends: Sequence[Backend], options: FitOptions):
        self.fit = fit
        self._options, self._left = options, list(backends[1:])
        self._chooses_pieces = options.chooses_pieces
        self._tried: list[Tried] = []  # the best so far, and the newest
        self._is_judged = False  # whether the step in force is among them
        self.trainer = StepTrainer(self.fit, backends[0], options)
        self._trial: Trial | None = None
        self._grown = False

    # ---------------------------------------------------------------- one batch

    def run(self, batch: Any, terms: Terms = USUAL_TERMS, *, timed: bool = False) -> Any:
        """Trains one batch and returns its logs.

        Args:
            timed: whether the step is waited for, whatever that costs.
            terms: a batch is split after the last way has failed, and no way misses the limit where
                pieces may be tried.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit; this batch
                was not trained.
            UnsupportedModelError: no backend can carry the step; this batch was not trained.
        """
        if batch_size_of(batch) == 0:  # there is nothing to plan
            return self.fit.installed.run_plain(batch)
        if self._trial is not None and batch_size_of(batch) != self._trial.size:
            return self._trial.champion.run(batch)
        limit = self.fit.limit if self._grown else None
        while True:
            is_last = not self._left and not self._chooses_pieces
            try:
                result = self.trainer.run(
                    batch,
                    replace(
                        terms,
                        may_split=terms.may_split and is_last,
                        may_miss=terms.may_miss and not self._chooses_pieces,
                    ),
                    timed=timed or self._trial is not None,
                )
            except _FAILURES as error:
                if not self._gives_way(error, batch):
                    if limit is not None:  # what a larger batch ran into is its own
                        self.fit.set_limit(limit)
                    raise
                continue
            if self.trainer.settled:
                self._follow(batch)
            return result

    def run_settled(self, batch: Any) -> Any:
        """Trains one batch and returns its logs, where its step is settled; ``None`` where not."""
        may_try = (self._left or self._chooses_pieces) and self._options.plan is None
        return None if may_try or self._trial is not None else self.trainer.run_settled(batch)

    def _follow(self, batch: Any) -> None:
        """Goes on after a batch that a final step trained."""
        if self._trial is None:
            self._begin_trial(batch)
            return
        self._trial.note(self.trainer)
        turn = self._trial.turn()
        if turn is None:
            self._compare(self._trial)
        else:
            self.trainer = turn

    def _gives_way(self, error: Exception, batch: Any) -> bool:
        """Whether another way takes over from the one that failed."""
        failed, trial = self.trainer, self._trial
        self._tried.append(Tried(failed.pieces, over_bytes=_over_bytes(error)))
        self._is_judged = trial is not None and failed is trial.rival
        if isinstance(error, UnsupportedModelError) and not self._left:
            self._chooses_pieces = False
        if trial is not None:
            kept = trial.rival if failed is trial.champion else trial.champion
            message = (
                f"The {_way(failed)} step was tried and cannot be used, the {_way(kept)} one "
                f"stays: {statement_of(error)}"
            )
            self._end_trial(trial, kept, message)
            return True
        if self._grown:
            return False
        following = self._following(batch, self._options)
        if failed.pieces > self._options.micro_batches and not self._chooses_pieces:
            # it cannot be cut: the whole batch is the last way
            following = StepTrainer(self.fit, failed.backend, self._options, plain_may_run=False)
        if following is None:
            return False
        self.fit.event(
            _kind(failed, following),
            f"No {_way(failed)} step, training goes on {_way(following)}: {statement_of(error)}",
        )
        failed.close()
        self.trainer = following
        return True

    def _begin_trial(self, batch: Any) -> None:
        """Lets the next way show what it can do, where the first one's step is under a plan."""
        first = self.trainer
        no_way_left = not self._left and not self._chooses_pieces
        if no_way_left or self._options.plan is not None:
            return
        if first.plan is None and self.fit.limit.holds(first.settled_usage.peak_bytes):
            return
        if not self._is_judged:
            self._tried.append(_tried(first, first.settled_usage, self.fit.limit))
            self._is_judged = True
        options = self._options
        if self.fit.limit.holds(first.settled_usage.peak_bytes):
            # a trial is worth little time; where the limit is broken the next one has to do it
            solver = "greedy" if options.solver == "auto" else options.solver
            limit_s = min(_TRIAL_SOLVE_S, options.solver_time_limit_s)
            options = replace(options, solver=solver, solver_time_limit_s=limit_s)
        rival = self._following(batch, options)
        if rival is None:
            return
        self._trial, self.trainer = Trial(self.fit, first, rival, batch_size_of(batch)), rival
        self.fit.event(
            _kind(first, rival), f"The {_way(first)} step is final; {_way(rival)} is tried."
        )

    def _compare(self, trial: Trial) -> None:
        """Ends a trial: the faster of both steps stays, of those within the limit."""
        champion, rival = trial.champion, trial.rival
        old, new = trial.usage(champion), trial.usage(rival)
        limit = self.fit.limit
        self._tried = [_tried(champion, old, limit), _tried(rival, new, limit)]
        within = limit.holds(max(old.peak_bytes, new.peak_bytes))
        if within and rival.pieces > champion.pieces:
            better = rival if pays(new.time_s, old.time_s) else champion
        else:
            better = champion if _rank(old, limit) <= _rank(new, limit) else rival
        told = ", ".join(
            f"{_way(trainer)} {format_seconds(usage.time_s)} and {format_bytes(usage.peak_bytes)}"
            for trainer, usage in ((champion, old), (rival, new))
        )
        self._end_trial(
            trial, better, f"Measured per step: {told}. Training goes on {_way(better)}."
        )

    def _end_trial(self, trial: Trial, better: StepTrainer, message: str) -> None:
        self.fit.event(_kind(trial.champion, trial.rival), message)
        (trial.rival if better is trial.champion else trial.champion).close()
        self._trial, self.trainer = None, better

    def _following(self, batch: Any, options: FitOptions) -> StepTrainer | None:
        """Returns the next way's trainer, which never runs the plain step: what was tried first has
        told that it does not fit; ``None`` where no way is left."""
        backend = self.trainer.backend
        if self._left:
            backend = self._left.pop(0)
        else:
            self._chooses_pieces &= not self._grown
            most = MOST_OPS * self.trainer.pieces // max(1, self.trainer.traced_ops)
            most = min(most, batch_size_of(batch))
            pieces = next_pieces(self._tried, most) if self._chooses_pieces else None
            if pieces is None:
                self._chooses_pieces = False
                return None
            options = replace(options, micro_batches=pieces)
        return StepTrainer(self.fit, backend, options, plain_may_run=False)

    # ---------------------------------------------------------------- for others

    @property
    def settled(self) -> bool:
        """Whether the reference shape's step is final, and no other is on trial."""
        return self._trial is None and self.trainer.settled

    def runs_plain(self, *, may_grow: bool) -> bool:
        """Returns whether nothing is to be done; see :meth:`StepTrainer.runs_plain`."""
        return self._trial is None and self.trainer.runs_plain(may_grow=may_grow)

    def close(self) -> None:
        """Stops recordings and solvers that are under way."""
        trial = self._trial
        for trainer in (self.trainer,) if trial is None else (trial.champion, trial.rival):
            trainer.close()

    def begin_shape(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """Makes the next batch's shape the reference shape; one that does not fit is refused, not
        handed to another way."""
        self._grown = True
        self.trainer.begin_shape(expected, costs)


def _tried(trainer: StepTrainer, usage: Usage, limit: Limit) -> Tried:
    """Returns what a way's final step says about more pieces."""
    plan, time_s = trainer.plan, usage.time_s
    over = not limit.holds(usage.peak_bytes)
    share = 1.0
    if plan is not None and plan.predicted.time_s > 0:
        share = plan.store_all.time_s / plan.predicted.time_s
    return Tried(trainer.pieces) if over else Tried(trainer.pieces, time_s, time_s * share)


def _over_bytes(error: Exception) -> int:
    """Returns by how much one op alone is over the limit, where an error says so."""
    if isinstance(error, InfeasibleBudgetError | ScheduleNotFoundError):
        return error.floor_bytes - error.budget_bytes
    return 0


def _way(trainer: StepTrainer) -> str:
    """Returns the words for how a trainer's steps run."""
    name = "plain" if trainer.plan is None and trainer.settled else trainer.backend.compilation
    return name if trainer.pieces == 1 else f"{name} in {trainer.pieces} pieces"


def _kind(first: StepTrainer, second: StepTrainer) -> EventKind:
    same = first.backend is second.backend
    return EventKind.MICRO_BATCHES if same else EventKind.COMPILATION


def _rank(usage: Usage, limit: Limit) -> tuple[bool, float]:
    """Within the limit the faster one comes first, above it the smaller one."""
    over = not limit.holds(usage.peak_bytes)
    return over, usage.peak_bytes if over else usage.time_s
