"""Holds time limits and the work they stand for: the one place where solvers read the clock.

A search that ends by the clock gives another answer whenever the machine is busier. The heuristics
therefore count steps (ops run, moves tried, CP-SAT's deterministic time), and each has a rate of
steps per second that an idle machine of today exceeds. Work limits follow from the time limit by
these rates (:func:`work_budget_s`). So results depend on the clock only where it ends a search
before the counted work does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadline:
    """Counts a number of seconds from when it is made.

    Args:
        seconds: seconds of the limit; infinite for none.
        started: ``time.perf_counter()`` when it began.
        patience: factor on ``seconds``; by the clock, the deadline is over only after that many
            times as long. Work that is counted by ``seconds`` then still ends by itself on a
            machine that is up to as many times busier.

    >>> Deadline(0.0).is_over, Deadline(float("inf")).is_over
    (True, False)
    >>> Deadline(60.0).share(0.5).seconds
    30.0
    >>> Deadline(0.0, patience=4.0).is_over
    True
    """

    seconds: float
    started: float = field(default_factory=lambda: time.perf_counter())
    patience: float = 1.0

    def spent_s(self) -> float:
        """Returns the seconds since it began."""
        return time.perf_counter() - self.started

    def left_s(self) -> float:
        """Returns the seconds left, at least 0; each lasts ``patience`` seconds of the clock."""
        return max(0.0, self.seconds - self.spent_s() / self.patience)

    @property
    def is_over(self) -> bool:
        """Returns whether its seconds are spent."""
        return self.spent_s() >= self.seconds * self.patience

    def share(self, share: float) -> Deadline:
        """Returns the deadline at which this share of its seconds is spent."""
        return Deadline(self.seconds * share, self.started, self.patience)


NO_DEADLINE = Deadline(float("inf"))
"""A deadline that is never over."""


def work_budget_s(time_limit_s: float) -> float:
    """Returns the seconds from which work limits are computed.

    From one second on, they are whole seconds, so that time limits that differ by an instant mean
    the same work.
    """
    return float(round(time_limit_s)) if time_limit_s >= 1 else time_limit_s
