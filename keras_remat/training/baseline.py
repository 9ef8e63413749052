"""Tells what Keras's own step takes: measured where it runs, predicted where it cannot.

Under a plan, the plain step's time is the measured time less that of the recomputed ops. This
ignores that the plain step runs independent ops in parallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from keras_remat.core.schedule import Usage
from keras_remat.planning.plan import Plan
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.training.decide import Phase
from keras_remat.training.shape_state import PlainShape, PlannedShape, ShapeState, Signature

#: How a step is trained: how it is compiled, and in how many micro-batches.
TrainedBy = tuple[str, int]

#: How many of an epoch's newest steps tell what the plan takes.
_STEPS = 100


class Baseline:
    """The plain step's time and peak in a report.

    A predicted one follows the plan's steps from epoch to epoch: a device that slows down would
    slow the plain step down, too. Where a ``fit`` trains in several modes, each has a plan of its
    own, and all of them tell of the one plain step.
    """

    def __init__(self, report: AutotuneReport):
        self._report = report
        self._shape: Signature | None = None  # of the one that the baseline is told from
        self._shares: dict[
            TrainedBy, float
        ] = {}  # of the steps of a mode's plan, what a plain one takes
        self._peak_bytes = 0
        self._plain_s: deque[float] = deque(maxlen=_STEPS)

    def follow(
        self,
        before: ShapeState,
        after: ShapeState,
        reference: Signature,
        compilation: str,
        plain_peak_bytes: Callable[[PlainShape], int],
    ) -> None:
        """Tells the baseline from a step that was trained.

        Args:
            before: the shape, right after the step.
            after: the shape after the move that followed.
            reference: signature of the main shape. The first shape measured defines the baseline.
            compilation: how its step is compiled.
            plain_peak_bytes: asked for the peak of a plain step that was measured.
        """
        if before.signature != (self._shape or reference) or not before.steps:
            return
        if isinstance(before, PlainShape) and before.phase in (Phase.PLAIN, Phase.VERIFY):
            self._shape = before.signature
            self._report.baseline = replace(before.measured, peak_bytes=plain_peak_bytes(before))
            self._report.baseline_source = "measured"
            self._report.baseline_batch_size = before.batch_size
        elif before.phase is Phase.FINAL:
            self.step(before.steps[-1].time_s, _mode(compilation, before))
        elif isinstance(after, PlannedShape) and after.phase is Phase.FINAL:
            self._shape = after.signature
            mode = _mode(compilation, after)
            self.predict(after.plan, after.batch_size, after.measured.time_s, mode)

    def predict(self, plan: Plan, batch_size: int, time_s: float, mode: TrainedBy) -> None:
        """Notes a plan whose steps were seen to take ``time_s`` seconds; the steps that follow tell
        better. Nothing is predicted where plain steps were measured.

        Where the plan trains in micro-batches, one for the whole batch tells better what a plain
        step takes, if there was one.
        """
        known, (_, micro_batches) = self._report.baseline, mode
        if self._report.baseline_source == "measured":
            return
        self._plain_s.clear()
        if micro_batches > 1 and known is not None and time_s > 0:
            self._shares[mode] = known.time_s / time_s
            return
        predicted_s = plan.predicted.time_s
        self._shares[mode] = plan.store_all.time_s / predicted_s if predicted_s > 0 else 1.0
        self._peak_bytes = plan.store_all.peak_bytes
        self._report.baseline_batch_size, self._report.baseline_source = batch_size, "predicted"
        self._set(self._shares[mode] * time_s)

    def epoch_begins(self) -> None:
        """Compares with the steps of this epoch from here on."""
        self._plain_s.clear()

    def step(self, time_s: float, mode: TrainedBy) -> None:
        """Notes one more step of a plan that the baseline is predicted from."""
        if self._report.baseline_source == "predicted" and mode in self._shares:
            self._plain_s.append(self._shares[mode] * time_s)
            self._set(median(self._plain_s))

    def _set(self, time_s: float) -> None:
        self._report.baseline = Usage(time_s, self._peak_bytes)


def _mode(compilation: str, shape: ShapeState) -> TrainedBy:
    return compilation, shape.costs.micro_batches if isinstance(shape, PlannedShape) else 1
