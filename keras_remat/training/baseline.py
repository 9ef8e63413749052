"""Tells what Keras's own step takes: measured where it runs, predicted where it cannot.

The steps of a plan are measured, and by op times a plain one takes so much less. What that leaves
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


class Baseline:
    """The plain step's time and peak in a report.

    A predicted one follows the plan's steps from epoch to epoch: a device that slows down would
    slow the plain step down, too.

    Args:
        report: gets the baseline.
    """

    def __init__(self, report: AutotuneReport):
        self._report = report
        self._plan_share, self._peak_bytes = 1.0, 0
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def measured(self, batch_size: int, usage: Usage) -> None:
        """Notes what plain steps of ``batch_size`` samples took."""
        self._report.baseline, self._report.baseline_source = usage, "measured"
        self._report.baseline_batch_size = batch_size

    def predict(self, plan: Plan, batch_size: int, time_s: float) -> None:
        """Notes a plan whose steps were seen to take ``time_s`` seconds; the steps that follow tell
        better. Nothing is predicted where plain steps were measured."""
        if self._report.baseline_source == "measured":
            return
        self._plan_share = (
            plan.store_all.time_s / plan.predicted.time_s if plan.predicted.time_s > 0 else 1.0
        )
        self._peak_bytes = plan.store_all.peak_bytes
        self._steps_s.clear()
        self._report.baseline_batch_size, self._report.baseline_source = batch_size, "predicted"
        self._set(time_s)

    def epoch_begins(self) -> None:
        """Compares with the steps of this epoch from here on."""
        self._steps_s.clear()

    def step(self, time_s: float) -> None:
        """Notes one more step of the plan that the baseline is predicted from."""
        if self._report.baseline_source == "predicted":
            self._steps_s.append(time_s)
            self._set(median(self._steps_s))

    def _set(self, time_s: float) -> None:
        self._report.baseline = Usage(self._plan_share * time_s, self._peak_bytes)
