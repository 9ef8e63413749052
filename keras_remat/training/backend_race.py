"""Trains batches by the best of several ways: measured, where several are possible.

Training begins with the first way; one that cannot carry the step, or finds no schedule under the
limit, gives way to the next. Once the first one's step is final and under a plan, the next one is
tried under a quick plan: both train a few batches in turn, and the faster of those within the limit
stays. Then the next way is tried against it. Every batch is trained exactly once, by whichever is
in force. What decides is in :mod:`keras_remat.training.contest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
)
from keras_remat.planning.plan import Plan
from keras_remat.training import tell
from keras_remat.training.arguments import FitOptions
from keras_remat.training.contest import MOST_OPS, Contest, Trial, Tried, better
from keras_remat.training.fit_state import FitState
from keras_remat.training.shape_state import USUAL_TERMS, Terms
from keras_remat.training.step_trainer import StepTrainer

#: Seconds the solver may take for a plan that is on trial.
_TRIAL_SOLVE_S = 8.0

_FAILURES = (InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError, PlanMismatchError)


class BackendRace:
    """Trains batches by the best of several ways.

    Args:
        fit: what the steps of all ways share: events, counters, the train function.
        backends: the one to begin with, and those it may give way to.

    Attributes:
        contest: who trains, and what is known of the ways; nothing else of this object changes.
    """

    def __init__(self, fit: FitState, backends: Sequence[Backend], options: FitOptions):
        self.fit = fit
        self._options, self._backends = options, tuple(backends)
        self.contest = Contest(
            running=StepTrainer(fit, backends[0], options),
            modes_left=len(backends) - 1,
            chooses_pieces=options.chooses_pieces,
        )

    @property
    def trainer(self) -> StepTrainer:
        """The way that is in force, or on trial."""
        return self.contest.running

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
        size, trial = batch_size_of(batch), self.contest.trial
        if size == 0:  # there is nothing to plan
            return self.fit.installed.run_plain(batch)
        if trial is not None and size != trial.size:
            return trial.champion.run(batch)
        limit = self.fit.limit if self.contest.has_grown else None
        while True:
            contest = self.contest
            may_split = terms.may_split and not contest.may_try
            may_miss = terms.may_miss and not contest.chooses_pieces
            try:
                result = self.trainer.run(
                    batch,
                    replace(terms, may_split=may_split, may_miss=may_miss),
                    timed=timed or contest.trial is not None,
                )
            except _FAILURES as error:
                if not self._gives_way(error, batch):
                    if limit is not None:  # what a larger batch ran into is its own
                        self.fit.set_limit(limit)
                    raise
                continue
            if self.trainer.settled:
                self._follow(size, batch)
            return result

    @property
    def settled_trainer(self) -> StepTrainer | None:
        """The way that is in force, where no other one will be tried."""
        contest = self.contest
        may_try = contest.may_try and self._options.plan is None
        return None if may_try or contest.trial is not None else contest.running

    def _follow(self, size: int, batch: Any) -> None:
        """Goes on after a batch that a final step trained."""
        contest = self.contest
        if contest.trial is None:
            self._begin_trial(batch)
            return
        trial, turn = contest.trial, None
        peaks = (side.settled_usage.peak_bytes for side in contest.sides)
        if all(map(self.fit.limit.holds, peaks)):
            trial = trial.noting(self.trainer, self.trainer.settled_usage)
            turn = trial.turn()
        if turn is None:
            self._compare(trial)
        else:
            self.contest = replace(contest, trial=trial, running=turn)

    def _gives_way(self, error: Exception, batch: Any) -> bool:
        """Whether another way takes over from the one that failed."""
        failed, trial = self.trainer, self.contest.trial
        self.contest = self.contest.after_failure(
            Tried(failed.pieces, over_bytes=_over_bytes(error)),
            is_unsupported=isinstance(error, UnsupportedModelError),
        )
        if trial is not None:
            kept = trial.rival if failed is trial.champion else trial.champion
            news = tell.cannot_be_used(
                _kind(trial.champion, trial.rival), _way(failed), _way(kept), error
            )
            self._end_trial(trial, kept, news)
            return True
        if self.contest.has_grown:
            return False
        following = self._following(batch, self._options)
        if failed.pieces > self._options.micro_batches and not self.contest.chooses_pieces:
            # it cannot be cut: the whole batch is the last way
            following = StepTrainer(self.fit, failed.backend, self._options, plain_may_run=False)
        if following is None:
            return False
        self.fit.event(
            *tell.gives_way(_kind(failed, following), _way(failed), _way(following), error)
        )
        failed.close()
        self.contest = self.contest.going_on(following)
        return True

    def _begin_trial(self, batch: Any) -> None:
        """Lets the next way show what it can do, where the first one's step is under a plan."""
        first, options = self.trainer, self._options
        if not self.contest.may_try or options.plan is not None:
            return
        usage, limit = first.settled_usage, self.fit.limit
        if first.plan is None and limit.holds(usage.peak_bytes):
            return
        self.contest = self.contest.judging(_tried(first, usage, limit))
        if limit.holds(usage.peak_bytes):
            # a trial is worth little time; where the limit is broken the next one has to do it
            solver = "greedy" if options.solver == "auto" else options.solver
            limit_s = min(_TRIAL_SOLVE_S, options.solver_time_limit_s)
            options = replace(options, solver=solver, solver_time_limit_s=limit_s)
        rival = self._following(batch, options)
        if rival is None:
            return
        self.contest = self.contest.trying(rival, batch_size_of(batch))
        self.fit.event(*tell.is_tried(_kind(first, rival), _way(first), _way(rival)))

    def _compare(self, trial: Trial[StepTrainer]) -> None:
        """Ends a trial by what both steps took."""
        sides, limit = (trial.champion, trial.rival), self.fit.limit
        old, new = usages = [trial.usage(side, side.settled_usage) for side in sides]
        more_pieces = trial.rival.pieces > trial.champion.pieces
        stays = better(trial, old, new, limit, more_pieces=more_pieces)
        tried = [_tried(*side, limit) for side in zip(sides, usages, strict=True)]
        named = {_way(side): usage for side, usage in zip(sides, usages, strict=True)}
        news = tell.were_compared(_kind(*sides), named, _way(stays))
        self._end_trial(trial, stays, news, *tried)

    def _end_trial(
        self, trial: Trial[StepTrainer], stays: StepTrainer, news: tell.News, *tried: Tried
    ) -> None:
        self.fit.event(*news)
        (trial.rival if stays is trial.champion else trial.champion).close()
        self.contest = self.contest.going_on(stays, *tried)

    def _following(self, batch: Any, options: FitOptions) -> StepTrainer | None:
        """Returns the next way's trainer, which never runs the plain step: what was tried first has
        told that it does not fit; ``None`` where no way is left."""
        contest, backend = self.contest, self.trainer.backend
        if contest.modes_left:
            backend = self._backends[-contest.modes_left]
            self.contest = replace(contest, modes_left=contest.modes_left - 1)
        else:
            most = MOST_OPS * self.trainer.pieces // max(1, self.trainer.record.traced_ops)
            pieces = contest.next_pieces(min(most, batch_size_of(batch)))
            if pieces is None:
                self.contest = replace(contest, chooses_pieces=False)
                return None
            options = replace(options, micro_batches=pieces)
        return StepTrainer(self.fit, backend, options, plain_may_run=False)

    # ---------------------------------------------------------------- for others

    @property
    def settled(self) -> bool:
        """Whether the reference shape's step is final, and no other is on trial."""
        return self.contest.trial is None and self.trainer.settled

    def runs_plain(self, *, may_grow: bool) -> bool:
        """Returns whether nothing is to be done; see :meth:`StepTrainer.runs_plain`."""
        return self.contest.trial is None and self.trainer.runs_plain(may_grow=may_grow)

    def close(self) -> None:
        """Stops recordings and solvers that are under way."""
        for trainer in self.contest.sides:
            trainer.close()

    def begin_shape(self, expected: Plan | None = None, costs: Problem | None = None) -> None:
        """Makes the next batch's shape the reference shape; one that does not fit is refused, not
        handed to another way."""
        self.contest = replace(self.contest, has_grown=True)
        self.trainer.begin_shape(expected, costs)


def _tried(trainer: StepTrainer, usage: Usage, limit: Limit) -> Tried:
    """Returns what a way's final step says about more pieces."""
    plan, problem, time_s = trainer.plan, trainer.problem, usage.time_s
    over = not limit.holds(usage.peak_bytes)
    share = 1.0
    if plan is not None and problem is not None and plan.predicted.time_s > 0:
        share = problem.store_all_time_s / plan.predicted.time_s  # slices cost time of their own
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
