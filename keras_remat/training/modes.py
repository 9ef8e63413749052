"""Lets the modes of a ``fit`` compete by measurement, where several are possible.

Training begins with the first mode; one that cannot carry the step, or finds no schedule under the
limit, gives way to the next. Once the first one's step is final and under a plan, the next one is
tried under a quick plan: both train a few batches in turn, and the faster of those within the limit
stays. Then the next mode is tried against it. Every batch is trained exactly once, by the mode in
force. The rules are in :mod:`keras_remat.training.contest`; this module applies and reports them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.errors import BudgetError, PlanMismatchError, UnsupportedModelError
from keras_remat.training import steps, tell
from keras_remat.training.contest import MOST_OPS, Contest, Trial, Tried, better
from keras_remat.training.fit_state import FitState
from keras_remat.training.record import FitRecord, Mode, begun
from keras_remat.training.shape_state import (
    PlannedShape,
    StepConstraints,
    layout_of,
)
from keras_remat.training.tools import Tools, running_tools, tools_of

#: Errors that a mode raises where it cannot train a batch.
FAILURES = (BudgetError, UnsupportedModelError, PlanMismatchError)


def begun_anew(fit: FitState) -> FitRecord:
    """Returns the record of a fit whose model was compiled anew: what is known of the device stays,
    and samples that are held."""
    for mode in fit.record.contest.sides:
        close(fit, mode)
    new = begun(fit.options, len(fit.backends))
    sizes = fit.record.sizes.for_new_steps(is_searching=new.sizes.is_searching)
    return replace(fit.record, contest=new.contest, steps={}, sizes=sizes, baseline=new.baseline)


def stopped(fit: FitState) -> FitRecord:
    """Returns the record once the recordings and solvers of all modes are stopped."""
    record = fit.record
    return replace(record, steps={mode: steps.stopped(of) for mode, of in record.steps.items()})


def settled(fit: FitState, batch: Any) -> tuple[Tools, PlannedShape] | None:
    """Returns the tools and the shape that train a loader batch, where its step is settled.

    Returns ``None`` where another size or mode is looked for, or a look at the step is due.
    """
    layout = layout_of(batch)
    settled: tuple[Tools, PlannedShape] | None = fit.settled.get(layout)
    if settled is None:
        shape = _settled_shape(fit, batch)
        if shape is None:
            return None
        settled = fit.settled[layout] = running_tools(fit), shape
    return None if steps.is_look_due(settled[0]) else settled


def _settled_shape(fit: FitState, batch: Any) -> PlannedShape | None:
    record, contest = fit.record, fit.record.contest
    may_try = contest.may_try and fit.options.plan is None
    if may_try or contest.trial is not None or not record.trains_as_given:
        return None
    return steps.settled_shape(running_tools(fit), fit.signatures.of(batch))


def constraints_in(contest: Contest[Mode], constraints: StepConstraints) -> StepConstraints:
    """Returns the constraints on how the running mode trains a batch.

    The batch is split only once no other mode is left, and no mode may miss the limit while more
    micro-batches may be tried.
    """
    return replace(
        constraints,
        may_split=constraints.may_split and not contest.may_try,
        allow_over_limit=constraints.allow_over_limit and not contest.chooses_micro_batches,
    )


def after_step(fit: FitState, size: int) -> FitRecord:
    """Returns the record after a batch of ``size`` samples was trained.

    Once its step is final, a trial of another mode may begin, go on or end.
    """
    record, contest = fit.record, fit.record.contest
    if not record.running.is_final:
        return record
    if contest.trial is None:
        return _begin_trial(fit, size)
    trial, turn = contest.trial, None
    peaks = (record.of(side).settled_usage.peak_bytes for side in contest.sides)
    if all(map(fit.limit.holds, peaks)):
        trial = trial.noting(contest.running, record.running.settled_usage)
        turn = trial.turn()
    if turn is None:
        return _compared(fit, trial)
    return record.in_contest(replace(contest, trial=trial, running=turn))


def after_failure(fit: FitState, limit: Limit | None, size: int, error: Exception) -> FitRecord:
    """Returns the record after the running mode could not train a batch of ``size`` samples.

    Where another mode takes over, the record's running mode is that one.

    Args:
        limit: the lowered limit before the batch; ``None`` if there was none.
    """
    failed, trial = fit.record.mode, fit.record.contest.trial
    contest = fit.record.contest.after_failure(
        Tried(failed.micro_batches, over_bytes=_over_bytes(error)),
        is_unsupported=isinstance(error, UnsupportedModelError),
    )
    if trial is not None:
        kept = trial.rival if failed is trial.champion else trial.champion
        kind = _kind(trial.champion, trial.rival)
        news = tell.cannot_be_used(kind, name_of(fit, failed), name_of(fit, kept), error)
        return _ended(fit, contest, trial, kept, news)
    if contest.has_grown:  # where a larger batch failed, the limit from before it is in force again
        return replace(fit.record, contest=contest, lowered_limit=limit)
    contest, following = _following(fit, contest, size)
    if failed.micro_batches > fit.options.micro_batches and not contest.chooses_micro_batches:
        # it cannot be split: the whole batch is the last mode
        following = Mode(failed.at, fit.options.micro_batches, plain_may_run=False)
    if following is None:
        return replace(fit.record, contest=contest)
    names = name_of(fit, failed), name_of(fit, following)
    fit.event(*tell.gives_way(_kind(failed, following), *names, error))
    close(fit, failed)
    return fit.record.in_contest(contest.going_on(following))


def close(fit: FitState, mode: Mode) -> None:
    """Stops a mode's recordings and solvers, and frees its tools."""
    steps.stopped(fit.record.of(mode))
    fit.handles.pop(mode, None)


def name_of(fit: FitState, mode: Mode) -> str:
    """Returns the words for how a mode's steps run."""
    known = fit.record.of(mode)
    is_plain = known.plan is None and known.is_final
    name = "plain" if is_plain else fit.backends[mode.at].compilation
    return name if mode.micro_batches == 1 else f"{name} in {mode.micro_batches} micro-batches"


def _begin_trial(fit: FitState, size: int) -> FitRecord:
    """Begins a trial of the next mode, where the first one's step is under a plan."""
    record, contest, first = fit.record, fit.record.contest, fit.record.mode
    if not contest.may_try or fit.options.plan is not None:
        return record
    usage = record.running.settled_usage
    holds = fit.limit.holds(usage.peak_bytes)
    if record.running.plan is None and holds:
        return record
    contest = contest.judging(_tried(fit, first, usage))
    # where the limit is broken, the next mode is planned for in full and not as a trial
    contest, rival = _following(fit, contest, size, is_on_trial=holds)
    if rival is None:
        return replace(record, contest=contest)
    fit.event(*tell.is_tried(_kind(first, rival), name_of(fit, first), name_of(fit, rival)))
    return record.in_contest(contest.trying(rival, size))


def _compared(fit: FitState, trial: Trial[Mode]) -> FitRecord:
    """Ends a trial: compares the steps of both sides."""
    record, sides = fit.record, (trial.champion, trial.rival)
    old, new = usages = [trial.usage(side, record.of(side).settled_usage) for side in sides]
    more = trial.rival.micro_batches > trial.champion.micro_batches
    stays = better(trial, old, new, fit.limit, more_micro_batches=more)
    tried = [_tried(fit, *side) for side in zip(sides, usages, strict=True)]
    named = {name_of(fit, side): usage for side, usage in zip(sides, usages, strict=True)}
    news = tell.were_compared(_kind(*sides), named, name_of(fit, stays))
    return _ended(fit, record.contest, trial, stays, news, *tried)


def _ended(
    fit: FitState,
    contest: Contest[Mode],
    trial: Trial[Mode],
    stays: Mode,
    news: tell.News,
    *tried: Tried,
) -> FitRecord:
    fit.event(*news)
    close(fit, trial.rival if stays is trial.champion else trial.champion)
    return fit.record.in_contest(contest.going_on(stays, *tried))


def _following(
    fit: FitState, contest: Contest[Mode], size: int, *, is_on_trial: bool = False
) -> tuple[Contest[Mode], Mode | None]:
    """Returns the contest once the next mode has begun, and that mode; ``None`` where none is left.

    A later mode never runs the plain step: the first one has shown that it does not fit.
    """
    failed, options = contest.running, fit.options
    if contest.modes_left:
        at = len(fit.backends) - contest.modes_left
        mode = Mode(at, options.micro_batches, plain_may_run=False, is_on_trial=is_on_trial)
        return replace(contest, modes_left=contest.modes_left - 1), mode
    most = MOST_OPS * failed.micro_batches // max(1, tools_of(fit, failed).traced_ops)
    count = contest.next_micro_batches(min(most, size))
    if count is None:
        return replace(contest, chooses_micro_batches=False), None
    return contest, Mode(failed.at, count, plain_may_run=False, is_on_trial=is_on_trial)


def _tried(fit: FitState, mode: Mode, usage: Usage) -> Tried:
    """Returns the result of a mode's final step, by which more micro-batches are chosen."""
    known, count, time_s = fit.record.of(mode), mode.micro_batches, usage.time_s
    plan, problem, share = known.plan, known.problem, 1.0
    if plan is not None and problem is not None and plan.predicted.time_s > 0:
        share = problem.store_all_time_s / plan.predicted.time_s  # slices cost time of their own
    over = not fit.limit.holds(usage.peak_bytes)
    return Tried(count) if over else Tried(count, time_s, time_s * share)


def _over_bytes(error: Exception) -> int:
    """Returns by how much one op alone is over the limit, where an error says so."""
    if isinstance(error, BudgetError):
        return error.floor_bytes - error.budget_bytes
    return 0


def _kind(first: Mode, second: Mode) -> EventKind:
    return EventKind.MICRO_BATCHES if first.at == second.at else EventKind.COMPILATION
