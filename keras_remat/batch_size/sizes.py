"""Decides which batch size is tried next; pure, and the same for ``fit`` and for a search outside.

A search predicts how large a batch can be; only a device shows it. So sizes are run, and their
results decide which size is tried next: smaller ones until one has trained, then larger ones, until
a size that trains and one that does not are a resolution apart. Nothing here knows a backend, a
solver or a clock: :mod:`keras_remat.batch_size.size_chooser` states the :class:`SizeFacts` and
carries out the move that :func:`next_size` returns. The tests enumerate the facts: there is always
an answer, and every path ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

#: Share of a size. A size is the largest when one larger by this share does not train.
RESOLUTION = 0.03
#: Least number of updates per epoch, when the batch size was not asked for by number.
UPDATES_PER_EPOCH = 10
#: Samples per second that differ by no more than this share are taken to be the same.
NOISE = 0.03


class SizeMove(Enum):
    """Names the next action."""

    RUN = auto()
    """A size is run by the order that reaches it."""
    SOLVE = auto()
    """A new order is solved for at a size."""
    STOP = auto()
    """The largest size that trained is the answer."""


@dataclass(frozen=True, kw_only=True)
class SizeFacts:
    """Holds the facts that the next size depends on.

    Args:
        predicted: the largest size by prediction.
        at_most: the largest size that is wanted.
        trained: the largest size that trained within the limit; 0 where none has.
        failed: the smallest size that did not train; above ``at_most`` where none failed.
        failed_is_measured: whether the peak of that size is known, so that predictions follow it.
        failures: number of sizes that have failed since one trained.
        reached: the largest size that a known order reaches by prediction, among those worth
            running or below; 0 where there is none.
        solves_left: number of orders that may still be solved for before a size runs.
        time_to_run, time_to_solve: whether there is time left to run a size, or to solve.
        runs_left: number of sizes that may still run.
    """

    predicted: int
    at_most: int
    trained: int
    failed: int
    failed_is_measured: bool
    failures: int
    reached: int
    solves_left: int
    time_to_run: bool
    time_to_solve: bool
    runs_left: int


def worth_running(facts: SizeFacts) -> range:
    """Returns the sizes that are worth running next; empty where none is.

    Until a size has trained, these are all sizes up to one a little below the last failure: the
    first steps down are small, the next ones longer, because sizes can go up again. After that,
    they are the sizes more than the resolution above the largest trained one and below the smallest
    failed one; where its peak is not known, only up to half of the way to it.
    """
    if not facts.trained:
        if not facts.failures:
            return range(1, min(facts.predicted, facts.at_most, facts.failed - 1) + 1)
        largest = int(facts.failed * (1 - shorter_by(facts.failures)))
        return range(1, min(facts.failed - 1, largest) + 1)
    least = max(facts.trained + 1, math.ceil(facts.trained * (1 + RESOLUTION)))
    most = min(facts.at_most, facts.failed - 1)
    if facts.failed <= facts.at_most and not facts.failed_is_measured:
        most = min(most, max(least, (facts.trained + facts.failed) // 2))
    return range(least, most + 1)


def shorter_by(failures: int) -> float:
    """Returns the share by which the next size is smaller after ``failures``, at least one."""
    return min(1.0, RESOLUTION * 2.0 ** (failures - 1))


def next_size(facts: SizeFacts) -> tuple[SizeMove, int]:
    """Returns the next action, and its size (0 for :attr:`SizeMove.STOP`).

    A first size, and smaller ones after it, run however late it is; larger ones only in time.

    Example:
        >>> facts = SizeFacts(predicted=100, at_most=1000, trained=0, failed=1001, failures=0,
        ...               failed_is_measured=False, reached=100, solves_left=1, time_to_run=True,
        ...               time_to_solve=True, runs_left=10)
        >>> next_size(facts)
        (<SizeMove.RUN: 1>, 100)
    """
    sizes = worth_running(facts)
    if not sizes or not facts.runs_left or (facts.trained and not facts.time_to_run):
        return SizeMove.STOP, 0
    if facts.reached in sizes:
        return SizeMove.RUN, facts.reached
    if not facts.solves_left or (facts.trained and not facts.time_to_solve):
        return SizeMove.STOP, 0
    # a new order is made for a size a little above the least one, so that it surely reaches that
    # one; at few samples, one sample more may be much more
    aim = int(sizes[0] * (1 + RESOLUTION)) if facts.trained else sizes[-1]
    return SizeMove.SOLVE, min(aim, sizes[-1])


def largest_wanted(wanted: int | str, loader: int, samples: int | None) -> int | None:
    """Returns the largest batch that is wanted; ``None`` where only memory bounds it.

    Args:
        wanted: the batch size, or a word where it was left open: then an epoch keeps at least
            :data:`UPDATES_PER_EPOCH` updates.
        loader: number of samples of the batches that ``fit`` was given.
        samples: number of samples of an epoch; ``None`` where that is unknown.
    """
    if isinstance(wanted, int):
        return wanted if samples is None else min(wanted, samples)
    return None if samples is None else max(loader, samples // UPDATES_PER_EPOCH)


def faster_size(samples_per_s: Mapping[int, float], largest: int) -> int:
    """Returns the size to measure next, in search of the most samples per second.

    A size that was measured already is the answer. Sizes are doubled as long as that pays. Of sizes
    that measure equally fast, the smallest is the answer: it changes the training least.

    Args:
        samples_per_s: size → measured samples per second; at least one.
        largest: the largest size that fits.
    """
    most = max(samples_per_s.values())
    best = min(size for size, rate in samples_per_s.items() if rate >= most * (1 - NOISE))
    following = min(2 * max(samples_per_s), largest)
    return following if best == max(samples_per_s) and following > best else best
