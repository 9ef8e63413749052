"""Holds the state that all steps of one ``fit`` share on any backend, and its record."""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.backends.installed import Installed
from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.planning.make_plan import limit_on
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.reporting.records import Event
from keras_remat.training.arguments import FitOptions
from keras_remat.training.learning_rate import LearningRateScaling
from keras_remat.training.record import FitRecord, Mode, begun
from keras_remat.training.shape_state import PlannedShape, Signatures

logger = logging.getLogger(__name__)

#: Before the first plan trains, plans are improved until set-up has taken as long as 20 predicted
#: plain steps, or 20 seconds where that is more.
_SETUP_STEPS, _SETUP_S = 20, 20.0


def setup_limit_s(plain_s: float) -> float:
    """Returns the seconds after which set-up improves no plan any more.

    Args:
        plain_s: seconds that a plain step is predicted to take.
    """
    return max(_SETUP_S, _SETUP_STEPS * plain_s)


def limit_of(backend: Backend, options: FitOptions) -> Limit:
    """Returns the limit that was asked for, on the device as it is now.

    Several processes that train one model all get the smallest limit among them.
    """
    limit = limit_on(backend.device, options.memory_limit, options.margin)
    (least_bytes,) = backend.processes.least(limit.total_bytes)
    return limit.lowered(least_bytes)


@dataclass
class StepCounter:
    """Counts the steps since the last :meth:`FitState.take_counter`."""

    samples: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    planning_time_s: float = 0.0
    training_s: float = 0.0  # as a stopwatch would say: planning, and batches that are put together
    peak_bytes: int = 0


class FitState:
    """Holds the report, the counters and the train function of one ``fit``, and its record.

    Args:
        options: the callback's options.
        backends: backends that can train the model; training begins with the first.
        progress: ``progress(text)`` as a context manager around everything that takes long.
        most_steps: most steps that the ``fit`` can have; ``None`` where that is not known.
        steps_per_epoch: number of batches in an epoch, as ``fit`` was given them; ``None`` where
            that is not known.
        is_profiled: returns whether another callback records a profile, or is going to.

    Attributes:
        record: what is known of the fit; :mod:`keras_remat.training.driver` alone assigns it.
        learning_rate: scales the learning rate in the steps of larger batches.
        signatures: finds the signatures of batches.
        handles: mode → its tools; see :mod:`keras_remat.training.tools`.
        steps_run: how many steps this ``fit`` has trained.
        counter: counts since the last :meth:`take_counter`.
        settled: layout of a batch → the tools and the shape that train it, for shapes whose step is
            settled; emptied when the record changes.
        pending: the result of the newest step, where that was not waited for and may run still.
    """

    def __init__(
        self,
        model: Any,
        report: AutotuneReport,
        options: FitOptions,
        backends: Sequence[Backend],
        progress: Callable[[str], Any],
        installed: Installed,
        *,
        most_steps: int | None = None,
        steps_per_epoch: int | None = None,
        is_profiled: Callable[[], bool] = lambda: False,
    ):
        self.model, self.report, self.options, self.backends = model, report, options, backends
        self.progress, self.installed, self.is_profiled = progress, installed, is_profiled
        self.learning_rate = LearningRateScaling(
            model, options.learning_rate_scaling, installed.variables
        )
        self.signatures = Signatures()
        self.handles: dict[Mode, Any] = {}
        self.steps_per_epoch, self._most_steps = steps_per_epoch, most_steps
        self.steps_run = 0
        self.counter = StepCounter()
        self.pending: Any = None
        self.settled: dict[Hashable, tuple[Any, PlannedShape]] = {}
        self._planning_since: float | None = None
        self._record = begun(options, len(backends))
        self._asked_limit: Limit | None = None

    @property
    def record(self) -> FitRecord:
        """Returns what is known of the fit."""
        return self._record

    @record.setter
    def record(self, record: FitRecord) -> None:
        self._record, report, baseline = record, self.report, record.baseline
        self.settled.clear()
        report.baseline, report.baseline_source = baseline.usage, baseline.source
        report.baseline_batch_size = baseline.batch_size
        if record.setup is not None:
            report.setup_s, report.setup_limit_s = record.setup.spent_s, record.setup.limit_s
        if self._asked_limit is not None:
            self.report.limit_bytes = self.limit.total_bytes

    @property
    def limit(self) -> Limit:
        """Returns the limit in force: the one asked for, or less where the device has less.

        The limit asked for is computed after the first trace: on the host, tracing takes from the
        same memory.
        """
        if self._asked_limit is None:
            self._asked_limit = limit_of(self.backends[0], self.options)
            self.report.limit_bytes = self._asked_limit.total_bytes
        return self.record.lowered_limit or self._asked_limit

    @property
    def most_steps_left(self) -> int | None:
        """Returns the steps that may come; ``None`` where that is not known."""
        return None if self._most_steps is None else max(0, self._most_steps - self.steps_run)

    def begin_epoch(self, most_steps: int | None) -> None:
        """Notes how many steps can come from this epoch on; ``None`` where nobody knows."""
        self._most_steps = None if most_steps is None else self.steps_run + most_steps

    def count(self, samples: int, usage: Usage, pending: Any = None) -> None:
        """Counts a step that was trained.

        Args:
            pending: its result, where it was not waited for.
        """
        self.pending = pending
        self.count_watched(1, samples, usage)

    def count_watched(self, steps: int, samples: int, usage: Usage) -> None:
        """Counts steps that Keras's own train function trained; negative numbers correct the
        count."""
        self.steps_run += steps
        self.counter.samples += samples
        self.counter.steps += steps
        self.counter.step_time_s += usage.time_s * max(0, steps)
        self.counter.peak_bytes = max(self.counter.peak_bytes, usage.peak_bytes)

    def note_phase(self, phase: str, peak_bytes: int, predicted_bytes: int = 0) -> None:
        """Notes the peak of a phase other than training.

        Args:
            phase: its name in the report.
            peak_bytes: measured peak; 0 where the device counts nothing.
            predicted_bytes: predicted peak, which is taken there; 0 where there is none.
        """
        report, most_bytes = self.report, peak_bytes or predicted_bytes
        if not peak_bytes and most_bytes and phase not in report.phase_peak_bytes:
            report.predicted_phases.append(phase)
        if most_bytes:
            known = report.phase_peak_bytes.get(phase, 0)
            report.phase_peak_bytes[phase] = max(most_bytes, known)

    def take_counter(self) -> StepCounter:
        """Returns the counts since the last call and starts again from zero."""
        counter, self.counter = self.counter, StepCounter()
        return counter

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Counts the time inside as planning, once where such contexts are nested."""
        if self._planning_since is not None:
            yield
            return
        started = self._planning_since = time.perf_counter()
        try:
            yield
        finally:
            self._planning_since = None
            self.counter.planning_time_s += time.perf_counter() - started

    @property
    def setup_s(self) -> float:
        """Returns the seconds of planning so far, in all epochs."""
        since = self._planning_since
        running_s = 0.0 if since is None else time.perf_counter() - since
        return self.report.planning_time_s + self.counter.planning_time_s + running_s

    def setup_left_s(self, plain_s: float) -> float:
        """Returns the seconds for which plans may still be improved before the first one trains;
        infinite once one has.

        Args:
            plain_s: seconds that a plain step is predicted to take.
        """
        if self.record.setup is not None:
            return math.inf
        return max(0.0, setup_limit_s(plain_s) - self.setup_s)

    @contextmanager
    def long_task(self, text: str) -> Iterator[None]:
        """Counts a long task apart from training, and shows a progress bar.

        Frees the reference cycles that it leaves: errors that were caught hold the frames below
        them, and with these the newest batch.
        """
        with self.planning(), self.progress(text):
            try:
                yield
            finally:
                gc.collect()

    def event(self, kind: EventKind, message: str) -> None:
        """Notes an event, for the report and the log."""
        self.report.events.append(Event(self.steps_run, kind, message))
        logger.info("keras_remat: %s", message)

    def was_reported(self, message: str) -> bool:
        """Returns whether an event has had this message."""
        return any(event.message == message for event in self.report.events)

    def warn(self, kind: EventKind, message: str) -> None:
        """Notes an event and warns of it, once."""
        if not self.was_reported(message):
            warnings.warn(f"keras_remat: {message}", stacklevel=2)
            self.event(kind, message)
