"""Watches steps from Keras's hooks, while Keras's own train function is in place.

A look waits for the steps before it, asks the device for its peak, and ends when the answer is
taken in. The first looks come after every step. Later ones are so rare that all of them together
take a small share of the time. Nothing is lost by that, because a peak stays until it is asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from keras_remat.backends.installed import Installed
from keras_remat.backends.memory import DeviceMemory
from keras_remat.core.schedule import Usage

#: Looks take at most this share of the time.
_SHARE = 1 / 250


class Pace:
    """Says when a look is due.

    Args:
        first_looks: number of looks at the begin, which are always due.
    """

    def __init__(self, first_looks: int):
        self._first_left, self._not_before_s = first_looks, 0.0

    def is_due(self) -> bool:
        """Returns whether a look may come now."""
        return self._first_left > 0 or time.perf_counter() >= self._not_before_s

    def looked(self, cost_s: float) -> None:
        """Notes that a look has ended, which took ``cost_s`` seconds more than the steps."""
        self._first_left -= 1
        self._not_before_s = time.perf_counter() + cost_s / _SHARE


@dataclass(frozen=True)
class Watched:
    """Holds the usage of steps that were not measured one by one.

    Args:
        steps: how many there were.
        usage: the mean time of one, and the largest peak.
    """

    steps: int
    usage: Usage


class Watch:
    """Watches the steps between two looks.

    Args:
        installed: the train function that stands aside.
        first_looks: as in :class:`Pace`.
    """

    def __init__(self, installed: Installed, device: DeviceMemory, first_looks: int):
        self._installed, self._device, self._pace = installed, device, Pace(first_looks)
        self.steps = 0
        self._began_s = self._looked_s = 0.0

    def passes(self) -> bool:
        """Notes that a step begins, if no look is due before it; returns whether that is so."""
        if not self.steps or self._pace.is_due():
            return False
        self.steps += 1
        return True

    def step_begins(self) -> Watched | None:
        """Notes that a step begins; returns the usage of those before it, where a look was due."""
        watched = self.look() if self.steps and self._pace.is_due() else None
        if not self.steps:
            self._device.begin_watch()
            self._began_s = time.perf_counter()
        self.steps += 1
        return watched

    def look(self) -> Watched:
        """Returns the usage of the steps since the last look, at least one, and begins anew."""
        self._looked_s = time.perf_counter()
        self._installed.synchronize()
        time_s = (time.perf_counter() - self._began_s) / self.steps
        watched = Watched(self.steps, Usage(time_s, self._device.watched_peak_bytes()))
        self.steps = 0
        return watched

    def look_ends(self) -> None:
        """Notes that the result of a look is taken in."""
        self._pace.looked(time.perf_counter() - self._looked_s)
