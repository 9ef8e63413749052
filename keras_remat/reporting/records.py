"""What is shown of a plan and of a ``fit``.

Plans and reports are made in layers above this folder, or import what draws them; texts, pages and
pictures ask no more of them than the protocols here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution, Usage
from keras_remat.core.slices import Slicing


class Planned(Protocol):
    """Says what is shown of a plan; :class:`keras_remat.planning.plan.Plan` is one."""

    @property
    def name(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def solution(self) -> Solution: ...
    @property
    def store_all(self) -> Usage: ...
    @property
    def predicted(self) -> Usage: ...
    @property
    def compiled(self) -> Usage | None: ...
    @property
    def measured(self) -> Usage | None: ...
    @property
    def card(self) -> str | None: ...
    @property
    def slicing(self) -> Slicing | None: ...
    @property
    def overhead(self) -> float: ...
    @property
    def profile_source(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def problem(self) -> Problem | None: ...
    @property
    def smallest_bytes(self) -> int: ...
    @property
    def uncounted_bytes(self) -> int: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Event:
    """Tells of something that happened: ``step`` counts train steps of this ``fit`` from 0."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True)
class EpochUsage:
    """Says what one epoch took, by its train steps; planning and compiling are counted apart.

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
        """Returns samples per second of training; 0 where no time passed."""
        return self.samples / self.step_time_s if self.step_time_s > 0 else 0.0


class Reported(Protocol):
    """Says what is shown of a ``fit``; :class:`keras_remat.reporting.fit_report.AutotuneReport` is
    one."""

    @property
    def limit_bytes(self) -> int | None: ...
    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def peaks_source(self) -> str: ...
    @property
    def planning_time_s(self) -> float: ...
    @property
    def baseline(self) -> Usage | None: ...
    @property
    def baseline_source(self) -> str | None: ...
    @property
    def baseline_peak_source(self) -> str: ...
    @property
    def baseline_samples_per_s(self) -> float | None: ...
    @property
    def plan(self) -> Planned | None: ...
    @property
    def epochs(self) -> Sequence[EpochUsage]: ...
    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def speedups(self) -> Sequence[float]: ...
