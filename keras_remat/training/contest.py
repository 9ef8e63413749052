"""Decides from measurements which mode trains a batch; pure.

A mode says whether a step is compiled as one (XLA) or runs op by op in order, and in how many
micro-batches it trains a batch. A compiled step fuses and may be faster; the executor obeys an
order exactly and can time single ops, so its plans hold tighter limits. Which of the two wins
depends on device and model (XLA on a CPU is slow at convolutions). Fewer samples at a time need
less memory, and less recomputation under a limit; but more micro-batches mean more calls of smaller
ops, which take longer for a sample on most devices, and less time on some.

So modes are measured while training, one against another: first compiled against ordered, then the
whole batch, two micro-batches, four and so on, each under its own schedule. It goes on while the
newest number of micro-batches was faster than those before, or still recomputes. Both sides of a
trial train the same batches in turn, because devices slow down and speed up from one minute to the
next.

This module uses no framework, no clock and no log; :mod:`keras_remat.training.modes` knows what a
side is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Generic, Self, TypeVar

from keras_remat.batch_size.sizes import NOISE, faster_size
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage

#: A mode that trains a batch.
Side = TypeVar("Side")

#: Most ops of a step in micro-batches that is traced: the trace writes out every micro-batch in
#: turn.
MOST_OPS = 20_000
#: Micro-batches that are predicted to be this share slower, even without recomputation, end the
#: search.
_HOPELESS_SHARE = 0.25
#: Steps in one turn, and turns of each side in a trial. The first step of a turn is not counted.
_STEPS_A_TURN, _TURNS = 3, 2


@dataclass(frozen=True)
class Tried:
    """Holds the result of training a batch in a number of micro-batches.

    Args:
        time_s: measured seconds of a step; infinite where no schedule keeps to the limit.
        least_s: predicted seconds of a step without recomputation; the measured seconds where
            nothing is recomputed.
        over_bytes: bytes that the largest op alone needs above the limit; at most 0 where it fits.
    """

    micro_batches: int
    time_s: float = math.inf
    least_s: float = 0.0
    over_bytes: int = 0


@dataclass(frozen=True)
class Trial(Generic[Side]):
    """Holds two sides that train batches of one size in turn, until it is known which is faster.

    Args:
        usages: usages of the steps that the sides trained in their turns, in order.
    """

    champion: Side
    rival: Side
    size: int
    usages: tuple[Usage, ...] = ()

    def turn(self) -> Side | None:
        """Returns whose turn it is; ``None`` when both had all of theirs."""
        turns = ([self.champion] * _STEPS_A_TURN + [self.rival] * _STEPS_A_TURN) * _TURNS
        return turns[len(self.usages)] if len(self.usages) < len(turns) else None

    def noting(self, side: Side, usage: Usage) -> Self:
        """Returns the trial after a step of a side; the step counts only in that side's turn."""
        return replace(self, usages=(*self.usages, usage)) if side is self.turn() else self

    def usage(self, side: Side, settled: Usage) -> Usage:
        """Returns the median time and the largest peak of a side's steps.

        Args:
            settled: usage of the side's newest step: the answer where no step was counted; its peak
                always counts.
        """
        steps = [
            usage
            for at, usage in enumerate(self.usages)
            if side is (self.rival if at // _STEPS_A_TURN % 2 else self.champion)
            and at % _STEPS_A_TURN
        ]
        if not steps:
            return settled
        peak_bytes = max(settled.peak_bytes, *(step.peak_bytes for step in steps))
        return Usage(median(step.time_s for step in steps), peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Contest(Generic[Side]):
    """Says which mode trains, and holds the results of the modes that were tried.

    Args:
        running: the mode that trains the next batch.
        modes_left: number of backends that were not tried.
        chooses_micro_batches: whether a batch may be trained in (more) micro-batches where that is
            faster.
        tried: results of the best mode so far and of the newest.
        is_judged: whether the running mode is in ``tried``.
        has_grown: whether the batch size is not the one that ``fit`` was given. A batch that does
            not fit is then refused, and no other mode is tried for it.
        trial: of the mode in force and another one.
    """

    running: Side
    modes_left: int
    chooses_micro_batches: bool
    tried: tuple[Tried, ...] = ()
    is_judged: bool = False
    has_grown: bool = False
    trial: Trial[Side] | None = None

    @property
    def may_try(self) -> bool:
        """Returns whether there is a mode that was not tried."""
        return self.modes_left > 0 or self.chooses_micro_batches

    @property
    def sides(self) -> tuple[Side, ...]:
        """Returns every mode that may train the next batches."""
        trial = self.trial
        return (self.running,) if trial is None else (trial.champion, trial.rival)

    def after_failure(self, tried: Tried, *, is_unsupported: bool) -> Self:
        """Returns the contest after the running mode has failed."""
        trial, chooses = self.trial, self.chooses_micro_batches
        return replace(
            self,
            tried=(*self.tried, tried),
            is_judged=trial is not None and self.running is trial.rival,
            chooses_micro_batches=chooses and not (is_unsupported and not self.modes_left),
        )

    def judging(self, tried: Tried) -> Self:
        """Returns the contest with the running mode's result in ``tried``."""
        return self if self.is_judged else replace(self, tried=(*self.tried, tried), is_judged=True)

    def next_micro_batches(self, most: int) -> int | None:
        """Returns the next number of micro-batches to try; ``None`` where there is none."""
        if not self.chooses_micro_batches or self.has_grown:
            return None
        return next_micro_batches(self.tried, most)

    def trying(self, rival: Side, size: int) -> Self:
        """Returns the contest where another mode trains until its step is final."""
        return replace(self, running=rival, trial=Trial(self.running, rival, size))

    def going_on(self, side: Side, *tried: Tried) -> Self:
        """Returns the contest where a side trains from here on.

        Args:
            tried: results of both sides, where a trial has ended.
        """
        return replace(self, running=side, trial=None, tried=tried or self.tried)


def better(
    trial: Trial[Side], old: Usage, new: Usage, limit: Limit, *, more_micro_batches: bool
) -> Side:
    """Returns the side that stays: the faster one within the limit, or the smaller if neither is.

    More micro-batches stay only where they are faster by more than measurement noise.

    Args:
        old, new: usage of a step of the champion and of the rival.
        more_micro_batches: whether the rival trains in more micro-batches than the champion.
    """
    if more_micro_batches and limit.holds(max(old.peak_bytes, new.peak_bytes)):
        return trial.rival if pays(new.time_s, old.time_s) else trial.champion
    return trial.champion if _rank(old, limit) <= _rank(new, limit) else trial.rival


def _rank(usage: Usage, limit: Limit) -> tuple[bool, float]:
    """Returns a sort key: within the limit the faster one comes first, above it the smaller."""
    over = not limit.holds(usage.peak_bytes)
    return over, usage.peak_bytes if over else usage.time_s


def pays(time_s: float, best_s: float) -> bool:
    """Returns whether ``time_s`` is faster than ``best_s``, both in seconds, by more than noise."""
    return time_s < best_s * (1 - NOISE)


def next_micro_batches(tried: Sequence[Tried], most: int) -> int | None:
    """Returns the next number of micro-batches to try; ``None`` where the fastest one tried stays.

    Args:
        tried: results so far, at least one, the newest last.
        most: the largest number that may be tried.

    Example:
        >>> next_micro_batches([Tried(1, 2.0, 1.9)], 8)
        2
        >>> next_micro_batches([Tried(1, 2.0, 1.9), Tried(2, 2.0, 2.0)], 8) is None
        True
        >>> next_micro_batches([Tried(1, over_bytes=50), Tried(2, over_bytes=40)], 8) is None
        True
    """
    newest, following = tried[-1], 2 * tried[-1].micro_batches
    before = tried[-2] if len(tried) > 1 else newest
    if (
        newest.micro_batches > before.micro_batches
        and 2 * newest.over_bytes > before.over_bytes > 0
    ):
        return None  # halving the batch took off too little: more than half the excess is left
    before_s = min((other.time_s for other in tried[:-1]), default=math.inf)
    recomputes = newest.least_s < newest.time_s
    hopeless = newest.least_s > before_s * (1 + _HOPELESS_SHARE)
    goes_on = (
        newest.micro_batches == 1
        or math.isinf(min(before_s, newest.time_s))
        or pays(newest.time_s, before_s)
        or (recomputes and not hopeless)
    )
    return following if goes_on and following <= most else None


def compared(
    samples_per_s: Mapping[int, float], size: int, step_s: float, loader: int, largest: int
) -> tuple[dict[int, float], int, bool]:
    """Returns the measured rates, the size that trains next, and whether that size stays.

    Devices slow down and speed up: before a size other than the loader's stays, the loader's is
    measured once more.

    Args:
        samples_per_s: size → samples per second measured so far.
        step_s: seconds of a step of ``size`` samples.
        loader: samples of the batches that ``fit`` was given.
        largest: the largest size that fits.

    Example:
        >>> compared({10: 5.0}, 20, 2.0, 10, 100)
        ({10: 5.0, 20: 10.0}, 40, False)
        >>> compared({10: 5.0, 20: 10.0}, 40, 4.0, 10, 100)
        ({10: 5.0, 20: 10.0, 40: 10.0}, 10, False)
        >>> compared({10: 5.0, 20: 10.0, 40: 10.0}, 10, 2.5, 10, 100)
        ({10: 5.0, 20: 10.0, 40: 10.0}, 20, True)
    """
    is_first = size not in samples_per_s
    rates = {**samples_per_s, size: max(size / step_s, samples_per_s.get(size, 0.0))}
    new = faster_size(rates, largest)
    if new in rates and new != loader and is_first:
        return rates, loader, False
    return rates, new, new in rates
