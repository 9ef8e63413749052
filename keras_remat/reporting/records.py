"""Holds the numbers of a ``fit`` that texts, pages and pictures show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.schedule import Usage

#: Seconds of planning below which no plan was made in an epoch.
_NO_PLAN_S = 0.05


@dataclass(frozen=True)
class Event:
    """Tells of something that happened: ``step`` counts train steps of this ``fit`` from 0."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True)
class EpochUsage:
    """Holds the usage of one epoch's train steps; planning and compiling are counted apart.

    Args:
        epoch: number of the epoch, as Keras counts.
        samples, steps: numbers of samples and steps that were trained.
        step_time_s: seconds of training, inside steps and for putting batches together between
            them.
        planning_time_s: seconds spent tracing, solving and compiling during the epoch.
        peak_bytes: the allocator's highest peak over the measured steps.
        batch_size: samples per executed step at the epoch's end.
        plain_samples_per_s: samples per second of the plain step, as known at the epoch's end; a
            predicted rate follows the steps of its epoch.
    """

    epoch: int
    samples: int
    steps: int
    step_time_s: float
    planning_time_s: float
    peak_bytes: int
    batch_size: int
    plain_samples_per_s: float | None = None

    @property
    def samples_per_s(self) -> float:
        """Returns samples per second of training; 0 where no time passed."""
        return self.samples / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass
class ReportRecord:
    """Holds what is known of one ``fit``; :class:`keras_remat.reporting.fit_report.AutotuneReport`
    explains the fields."""

    limit_bytes: int | None = None
    max_batch_size: int | None = None
    batch_size: int | None = None
    baseline: Usage | None = None
    baseline_batch_size: int | None = None
    baseline_source: Literal["measured", "predicted"] | None = None
    epochs: list[EpochUsage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    plan: PlanRecord | None = field(default=None, repr=False)
    phase_peak_bytes: dict[str, int] = field(default_factory=dict)
    predicted_phases: list[str] = field(default_factory=list)
    setup_s: float | None = None
    setup_limit_s: float | None = None

    @property
    def baseline_samples_per_s(self) -> float | None:
        """Returns samples per second of the plain step, or ``None`` before it is known."""
        if self.baseline is None or not self.baseline_batch_size or self.baseline.time_s <= 0:
            return None
        return self.baseline_batch_size / self.baseline.time_s

    def speedup(self, epoch: EpochUsage) -> float:
        """Returns samples per second of ``epoch`` over the plain step's; 1.0 while unknown."""
        plain = epoch.plain_samples_per_s or self.baseline_samples_per_s
        return epoch.samples_per_s / plain if plain and epoch.samples_per_s > 0 else 1.0

    @property
    def speedups(self) -> list[float]:
        """Returns the :meth:`speedup` of every epoch."""
        return [self.speedup(epoch) for epoch in self.epochs]

    @property
    def peak_bytes(self) -> int | None:
        """Returns the peak of the last step that ran; ``None`` while unknown. See ``peaks_source``.

        Beside the last plan's measured peak, that of the last epoch counts only if no plan was made
        in it: else it may be an earlier plan's.
        """
        if not self.epochs:
            return None
        last = self.epochs[-1]
        measured = self.plan.measured if self.plan is not None else None
        if measured is None:
            return last.peak_bytes or None  # 0: the device's allocator tells nothing
        later = last.peak_bytes if len(self.epochs) > 1 and last.planning_time_s < _NO_PLAN_S else 0
        return max(measured.peak_bytes, later)

    @property
    def peaks_source(self) -> Literal["measured", "predicted"]:
        """Returns whether peaks were measured or predicted.

        They are predicted where the device's allocator keeps no statistics.
        """
        is_predicted = any(event.kind == "predicted" for event in self.events)
        return "predicted" if is_predicted else "measured"

    @property
    def baseline_peak_source(self) -> Literal["measured", "predicted"]:
        """Returns whether the plain step's peak was measured or predicted.

        Its time may be measured where its peak is not.
        """
        return "predicted" if self.baseline_source == "predicted" else self.peaks_source

    @property
    def planning_time_s(self) -> float:
        """Returns seconds spent tracing, solving and compiling in all epochs."""
        return sum(epoch.planning_time_s for epoch in self.epochs)
