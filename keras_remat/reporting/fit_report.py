"""What ``RematAutotune`` did and what it gained: events as they happened, epochs as they were
measured.

Every number says where it is from: ``baseline_source`` is ``"measured"`` when plain steps ran,
``"predicted"`` when they never could.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Literal

from keras_remat.core.schedule import Usage
from keras_remat.core.serialize import write_json
from keras_remat.units import GIB, format_bytes, format_seconds

#: Keys every epoch's logs get; numeric and the same from epoch 0 on.
LOG_KEYS = ("remat_speedup", "remat_batch_size", "remat_peak_gib", "remat_samples_per_s")


@dataclass(frozen=True)
class Event:
    """Something that happened: ``step`` counts train steps of this ``fit`` from 0."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True)
class EpochUsage:
    """One epoch, measured over its train steps; time spent planning and compiling is apart.

    Args:
        epoch: as Keras counts it.
        samples, steps: how many were trained.
        step_time_s: seconds of training: inside steps, and between them for putting batches
            together.
        planning_time_s: seconds spent tracing, solving and compiling during the epoch.
        peak_bytes: the allocator's highest peak over the measured steps.
        batch_size: samples per executed step at the epoch's end.
        plain_samples_per_s: of the plain step, as far as it was known at the epoch's end; a
            predicted one follows the steps of its epoch.
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
        return self.samples / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass
class AutotuneReport:
    """The whole story of one ``fit``.

    Attributes:
        limit_bytes: the memory limit in force; ``None`` before the first batch.
        max_batch_size: the largest batch found to fit; ``None`` when none was searched for.
        batch_size: samples per executed step now.
        baseline: seconds and peak of one plain step of ``baseline_batch_size`` samples.
        baseline_source: whether plain steps ran or were predicted.
        epochs, events: in order.
    """

    limit_bytes: int | None = None
    max_batch_size: int | None = None
    batch_size: int | None = None
    baseline: Usage | None = None
    baseline_batch_size: int | None = None
    baseline_source: Literal["measured", "predicted"] | None = None
    epochs: list[EpochUsage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def baseline_samples_per_s(self) -> float | None:
        """Samples per second of the plain step, or ``None`` before it is known."""
        if self.baseline is None or not self.baseline_batch_size or self.baseline.time_s <= 0:
            return None
        return self.baseline_batch_size / self.baseline.time_s

    def speedup(self, epoch: EpochUsage) -> float:
        """Samples per second of ``epoch`` over the plain step's; 1.0 while that is unknown."""
        plain = epoch.plain_samples_per_s or self.baseline_samples_per_s
        return epoch.samples_per_s / plain if plain and epoch.samples_per_s > 0 else 1.0

    def epoch_logs(self, epoch: EpochUsage) -> dict[str, float]:
        """The log entries of an epoch, under :data:`LOG_KEYS`."""
        numbers = (
            self.speedup(epoch),
            float(epoch.batch_size),
            epoch.peak_bytes / GIB,
            epoch.samples_per_s,
        )
        return dict(zip(LOG_KEYS, numbers, strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as JSON."""
        write_json({"format": "keras_remat.report", "version": 1, **asdict(self)}, path)

    def __str__(self) -> str:
        lines = ["epoch  batch  samples/s  speedup       peak    in steps   planning"]
        for epoch in self.epochs:
            lines.append(
                f"{epoch.epoch:5d}  {epoch.batch_size:5d}  {epoch.samples_per_s:9.1f}  {self.speedup(epoch):6.2f}x  "
                f"{format_bytes(epoch.peak_bytes):>10}  {format_seconds(epoch.step_time_s):>10} {format_seconds(epoch.planning_time_s):>10}"
            )
        if self.baseline is not None:
            lines.append(
                f"plain step of {self.baseline_batch_size}: {format_seconds(self.baseline.time_s)}, "
                f"{format_bytes(self.baseline.peak_bytes)} ({self.baseline_source})"
            )
        lines += [f"step {event.step}: {event.message}" for event in self.events]
        return "\n".join(lines)
