"""What Keras's own step would take where it cannot run.

The steps that do run are measured, and by op times a plain one takes so much less. What that leaves
out: a rematerialized step runs its ops one after the other, and Keras's own runs those at once that
do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from keras_remat.core.schedule import Usage
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport

#: How many of an epoch's newest steps tell what the plan takes.
_STEPS = 100


class PredictedBaseline:
    """The plain step's time in a report, predicted from measured steps of a plan.

    It follows them from epoch to epoch: a device that slows down would slow the plain step down,
    too.

    Args:
        report: gets the baseline.
    """

    def __init__(self, report: AutotuneReport):
        self._report = report
        self._plan_share, self._peak_bytes = 1.0, 0
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self, plan: Plan, batch_size: int, time_s: float) -> None:
        """A plan whose steps were seen to take ``time_s`` seconds; the steps that follow tell
        better."""
        self._plan_share = (
            plan.store_all.time_s / plan.predicted.time_s if plan.predicted.time_s > 0 else 1.0
        )
        self._peak_bytes = plan.store_all.peak_bytes
        self._steps_s.clear()
        self._report.baseline_batch_size, self._report.baseline_source = batch_size, "predicted"
        self._set(time_s)

    def epoch_begins(self) -> None:
        """What is compared from here on is this epoch's."""
        self._steps_s.clear()

    def step(self, time_s: float) -> None:
        """One more step of the plan, that nothing was copied before."""
        self._steps_s.append(time_s)
        self._set(median(self._steps_s))

    def _set(self, time_s: float) -> None:
        self._report.baseline = Usage(self._plan_share * time_s, self._peak_bytes)
