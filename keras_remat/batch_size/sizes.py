"""Decides which batch size is tried next; pure, and the same for ``fit`` and for a search outside.

A search predicts how large a batch can be; only a device tells. So sizes are run, and from what
came of them follows what is tried next: smaller ones until one has trained, then larger ones, until
a size that trains and one that does not are a resolution apart. Nothing here knows a backend, a
solver or a clock: :mod:`keras_remat.batch_size.size_chooser` states the :class:`SizeFacts` and does
what :func:`next_size` says. The tests enumerate the facts: there is always an answer, and
every path ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

#: A size is the largest when one that is this share larger does not train.
RESOLUTION = 0.03
#: How many updates an epoch keeps at least when larger batches were not asked for by number.
UPDATES_PER_EPOCH = 10
#: Samples per second that are this share apart are taken to be the same.
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
    """States all that the next size depends on.

    Args:
        predicted: the largest size by prediction.
        at_most: no size above it is wanted.
        trained: the largest size that trained within the limit; 0 where none has.
        failed: the smallest size that did not; above ``at_most`` where none failed.
        failed_is_measured: whether the peak of that size is known, so that predictions follow it.
        failures: how many sizes have failed since one trained.
        reached: the largest size up to the most that is worth running which a known order reaches
            by prediction; 0 where none does.
        solves_left: how many more new orders may be solved for before a size runs.
        time_to_run, time_to_solve: whether there is time left for it.
        runs_left: how many more sizes may run.
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

    Until one has trained, that is every size up to one a little below the last failure: the first
    steps down are small, the next ones longer, because there is a way up again. Then it is every
    size above the resolution and below the failure, or half of the way to one of unknown peak.
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
    """Returns the share by which the next try is smaller after so many failures, at least one."""
    return min(1.0, RESOLUTION * 2.0 ** (failures - 1))


def next_size(facts: SizeFacts) -> tuple[SizeMove, int]:
    """Returns the next action, and its size (0 for :attr:`SizeMove.STOP`).

    A first size is run, and smaller ones, however late it is; larger ones only in time.

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
    # a new order is made for a size a little above the least one, so that it reaches that one; of
    # few samples, one more may be much more
    aim = int(sizes[0] * (1 + RESOLUTION)) if facts.trained else sizes[-1]
    return SizeMove.SOLVE, min(aim, sizes[-1])


def largest_wanted(wanted: int | str, loader: int, samples: int | None) -> int | None:
    """Returns the largest batch that is wanted; ``None`` where only memory bounds it.

    Args:
        wanted: an int, or a word where the size was left open: then an epoch keeps its updates.
        loader: samples of the batches that ``fit`` was given.
        samples: of an epoch; ``None`` where that is unknown.
    """
    if isinstance(wanted, int):
        return wanted if samples is None else min(wanted, samples)
    return None if samples is None else max(loader, samples // UPDATES_PER_EPOCH)


def faster_size(samples_per_s: Mapping[int, float], largest: int) -> int:
    """Returns the size to measure next for the most samples per second, or, when it is among those
    measured, the answer.

    Sizes are doubled as long as that pays. Of sizes that measure equally fast, the smallest is the
    answer: it changes the training least.

    Args:
        samples_per_s: size → what it measured; at least one.
        largest: the largest size that fits.
    """
    most = max(samples_per_s.values())
    best = min(size for size, rate in samples_per_s.items() if rate >= most * (1 - NOISE))
    following = min(2 * max(samples_per_s), largest)
    return following if best == max(samples_per_s) and following > best else best
