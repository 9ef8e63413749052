"""Times whole compiled steps: nothing inside an XLA program can be timed from outside."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from keras_remat.backends.xla.kernel_costs import scaled
from keras_remat.core.profile import Profile


class StepTimes:
    """Measures the total time of a profile; its split over the ops stays an estimate.

    See :class:`keras_remat.backends.base.ProfileRecorder`.

    Args:
        estimated_profile: returns the profile of a traced step, given its resident bytes.
    """

    remark = ""

    def __init__(self, estimated_profile: Callable[[Any, int | None], Profile]):
        self._estimated_profile = estimated_profile
        self.times_s: list[float] | None = None  # of the steps that ran since the recording began

    def start(self) -> bool:
        """Starts a recording."""
        self.times_s = []
        return True

    def stop(self, lowered: Any, resident_bytes: int | None) -> Profile | None:
        """Ends the recording and returns the profile of a lowered step, scaled so that its schedule
        takes the median time of the recorded steps; ``None`` if none ran."""
        times_s, self.times_s = self.times_s, None
        if not times_s:
            return None
        profile = self._estimated_profile(lowered.traced, resident_bytes)
        return scaled(profile, lowered.schedule, median(times_s))
