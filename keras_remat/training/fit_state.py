"""Holds what all steps of one ``fit`` share, whichever backend runs them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keras_remat.backends.base import Backend, Installed
from keras_remat.backends.memory import DeviceMemory
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.planning.make_plan import limit_on
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.reporting.records import Event
from keras_remat.training import tell
from keras_remat.training.arguments import FitOptions
from keras_remat.training.baseline import Baseline
from keras_remat.training.device_facts import DeviceFacts

logger = logging.getLogger(__name__)


def limit_of(backend: Backend, options: FitOptions) -> Limit:
    """Returns the limit that was asked for, of what the device has now; of several processes that
    train one model, the least that one of them has."""
    limit = limit_on(backend.device, options.memory_limit, options.margin)
    (least_bytes,) = backend.processes.least(limit.total_bytes)
    return limit.lowered(least_bytes)


@dataclass
class StepCounter:
    """What the steps since the last :meth:`FitState.take_counter` came to."""

    samples: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    planning_time_s: float = 0.0
    peak_bytes: int = 0


class FitState:
    """The report, the counters and the train function of one ``fit``, and what is known of its
    device: the limit in force above all.

    Args:
        read_limit: asked once for the limit, when it is first needed.
        progress: ``progress(text)`` as a context manager around everything that takes long.
        most_steps: that the ``fit`` can have; ``None`` where that is not known.
        is_profiled: whether another callback records, or is going to.

    Attributes:
        facts: what steps have shown of the device.
        baseline: tells what Keras's own step takes.
        steps_run: how many steps this ``fit`` has trained.
        counter: what was counted since :meth:`take_counter`.
    """

    def __init__(
        self,
        model: Any,
        report: AutotuneReport,
        read_limit: Callable[[], Limit],
        progress: Callable[[str], Any],
        installed: Installed,
        most_steps: int | None = None,
        is_profiled: Callable[[], bool] = lambda: False,
    ):
        self.model, self.report = model, report
        self.progress, self.installed, self.is_profiled = progress, installed, is_profiled
        self.facts, self.baseline = DeviceFacts(), Baseline(report)
        self.steps_run = 0
        self._most_steps = most_steps
        self.counter = StepCounter()
        self._is_planning = False
        self._read_limit = read_limit
        self._limit: Limit | None = None

    @property
    def limit(self) -> Limit:
        """The limit in force: what was asked for, or less where the device turned out to have less.

        It is read after the first trace: on the host, tracing takes from the same memory.
        """
        if self._limit is None:
            return self.set_limit(self._read_limit())
        return self._limit

    def set_limit(self, limit: Limit) -> Limit:
        """Puts a limit in force for all steps of the ``fit`` and for its report; returns it."""
        self._limit, self.report.limit_bytes = limit, limit.total_bytes
        return limit

    @property
    def most_steps_left(self) -> int | None:
        """The steps that may come; ``None`` where that is not known."""
        return None if self._most_steps is None else max(0, self._most_steps - self.steps_run)

    def begin_epoch(self, most_steps: int | None) -> None:
        """Notes how many steps can come from this epoch on; ``None`` where nobody knows."""
        self._most_steps = None if most_steps is None else self.steps_run + most_steps

    def count(self, samples: int, usage: Usage) -> None:
        """Counts a step that was trained."""
        self.steps_run += 1
        self.counter.samples += samples
        self.counter.steps += 1
        self.counter.step_time_s += usage.time_s
        self.counter.peak_bytes = max(self.counter.peak_bytes, usage.peak_bytes)

    def count_watched(self, steps: int, samples: int, usage: Usage) -> None:
        """Counts steps that Keras's own train function has trained; of fewer than none, takes back
        what was counted too many."""
        self.steps_run += steps
        self.counter.samples += samples
        self.counter.steps += steps
        self.counter.step_time_s += usage.time_s * max(0, steps)
        self.counter.peak_bytes = max(self.counter.peak_bytes, usage.peak_bytes)

    def note_phase(self, phase: str, peak_bytes: int) -> None:
        """Notes what another phase than training had in use; 0 where nothing counts."""
        peaks = self.report.phase_peak_bytes
        if peak_bytes:
            peaks[phase] = max(peak_bytes, peaks.get(phase, 0))

    def take_counter(self) -> StepCounter:
        """Returns what was counted since the last call and starts again from zero."""
        counter, self.counter = self.counter, StepCounter()
        return counter

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Counts what runs inside as planning, once where such contexts are nested."""
        if self._is_planning:
            yield
            return
        started, self._is_planning = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_planning = False
            self.counter.planning_time_s += time.perf_counter() - started

    @contextmanager
    def long_task(self, text: str) -> Iterator[None]:
        """Something that takes long and is no training: counted apart, with a progress bar."""
        with self.planning(), self.progress(text):
            yield

    def event(self, kind: EventKind, message: str) -> None:
        """Notes what happened, for the report and the log."""
        self.report.events.append(Event(self.steps_run, kind, message))
        logger.info("keras_remat: %s", message)

    def is_told(self, message: str) -> bool:
        """Returns whether an event has said so."""
        return any(event.message == message for event in self.report.events)

    def warn(self, kind: EventKind, message: str) -> None:
        """Notes what happened and warns of it, once."""
        if not self.is_told(message):
            warnings.warn(f"keras_remat: {message}", stacklevel=2)
            self.event(kind, message)

    def tell_statistics(self, device: DeviceMemory) -> None:
        """Warns, once, where peaks are predicted and not measured."""
        if not device.has_statistics:
            self.warn(*tell.no_statistics(device.name))
