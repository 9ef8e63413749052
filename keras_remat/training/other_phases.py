"""Counts the memory that a ``fit`` takes beside its train steps: validation, data held whole.

A validation batch goes forward only. The traced train step predicts its memory: its forward ops run
in their order, and no value is kept for a backward phase. Beside them lies what is in use when the
validation begins (its arrays as a whole, where the device counts them), and two batches: the one
that runs and the next one. This is a prediction, because Keras's test function has no dropout and
runs in no fixed order. Where the device counts all memory, the peak is measured, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import keras

from keras_remat.backends.keras_private import (
    validate_in,
    validation_batch_size,
    validation_samples,
)
from keras_remat.backends.memory import DeviceMemory
from keras_remat.backends.sample_wise import validates_sample_wise
from keras_remat.core.graph import FORWARD
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.training import tell
from keras_remat.training.callers import validation_batches_are_told, validation_of_fit
from keras_remat.training.fit_state import FitState

#: Data that takes at least this share of the limit is reported.
_LARGE_DATA_SHARE = 0.1


def forward_bytes(problem: Problem) -> int:
    """Returns the most bytes alive, beside the resident ones, while the forward ops run in order.

    Every value is freed after its last forward reader. No op takes over a buffer, so the result is
    on the high side.
    """
    ops = tuple(replace(op, may_reuse=()) for op in problem.graph.ops)
    apart = replace(problem, graph=replace(problem.graph, ops=ops))
    forward = Schedule(tuple(op.id for op in ops if op.phase == FORWARD))
    return simulate(apart, forward).peak_bytes - problem.profile.resident_bytes


@dataclass(frozen=True)
class ValidationNeed:
    """Holds the bytes that a validation is predicted to need.

    Args:
        resident_bytes: bytes that stay in memory, beside the activations.
        sample_bytes: bytes of one sample's activations; a float, because it is a share.
        size: samples of a validation batch.
        data_bytes: bytes of one sample's inputs, targets and weight, a float; 0 where unknown.
        samples: samples of the validation; ``None`` where unknown.
    """

    resident_bytes: int
    sample_bytes: float
    size: int
    data_bytes: float = 0.0
    samples: int | None = None

    @classmethod
    def of(cls, problem: Problem, batch_size: int, size: int, factor: float) -> ValidationNeed:
        """Returns the need of a validation.

        Args:
            problem: the train step.
            batch_size: samples of the train step.
            size: samples of a validation batch.
            factor: measured over predicted activations of earlier validations.
        """
        sample_bytes = factor * forward_bytes(problem) / batch_size
        return cls(problem.profile.resident_bytes, sample_bytes, size)

    @property
    def needed_bytes(self) -> int:
        """Returns the bytes that are predicted to be in use."""
        following = self.size if self.samples is None else max(0, self.samples - self.size)
        batches = self.size + min(self.size, following)
        activations = self.size * self.sample_bytes
        return self.resident_bytes + int(activations + batches * self.data_bytes)

    def fitting_size(self, limit: Limit) -> int:
        """Returns the most samples that keep to a limit; 0 where not one does."""
        room = max(0, limit.usable_bytes - self.resident_bytes)
        return int(room / max(1.0, self.sample_bytes + 2 * self.data_bytes))


def even_size(samples: int, most: int) -> int:
    """Returns the largest batch size up to ``most`` that divides ``samples``.

    Then no smaller batch is left at the end, which would be another shape. Where such a size would
    be half of ``most`` or less, it is ``most``.
    """
    return next((size for size in range(most, most // 2, -1) if samples % size == 0), most)


class Validation:
    """Keeps the validation of one ``fit`` within the limit, and notes its peak.

    Batches that would need too much are made smaller before the first one runs. That is done only
    where the user named no validation batch size, and where the size changes no number
    (:mod:`keras_remat.backends.sample_wise`). Elsewhere a warning names a size that fits. What a
    validation takes above its prediction corrects the next prediction.
    """

    def __init__(self, model: Any, fit: FitState, device: DeviceMemory):
        self._model, self._fit, self._device = model, fit, device
        self._runs, self._has_warned, self._factor = False, False, 1.0
        self._need: ValidationNeed | None = None

    def begins(self) -> None:
        """Makes the batches smaller, or warns, where they are predicted not to fit."""
        self._runs, self._need = True, self._predicted()
        if self._need is not None and not self._fit.limit.holds(self._need.needed_bytes):
            self._need = self._made_smaller(self._need)
        self._device.begin_watch()

    def _predicted(self) -> ValidationNeed | None:
        running, size = self._fit.record.running, validation_batch_size(self._model)
        costs, trained = running.costs, running.batch_size
        if size is None or costs is None:
            return None
        problem, whole = costs.problem, costs.traced.whole
        if whole is not None:
            problem = whole.problem(problem)
        else:
            trained = -(-trained // costs.micro_batches)
        need, samples = ValidationNeed.of(problem, trained, size, self._factor), None
        data, data_bytes = validation_of_fit(self._model), 0.0
        if data and (samples := validation_samples(self._model)):
            data_bytes = _array_bytes(data) / samples
        resident = max(need.resident_bytes, self._device.in_use_bytes())
        return replace(need, resident_bytes=resident, data_bytes=data_bytes, samples=samples)

    def _made_smaller(self, need: ValidationNeed) -> ValidationNeed:
        limit, data = self._fit.limit, validation_of_fit(self._model)
        most, samples = need.fitting_size(limit), validation_samples(self._model)
        may_cut = most > 0 and samples is not None and validates_sample_wise(self._model)
        is_told = validation_batches_are_told(self._model)
        if not data or samples is None or is_told or not may_cut:
            if not self._has_warned:
                news = tell.large_validation(need.size, need.needed_bytes, limit, most)
                self._fit.warn(*news)
            self._has_warned = True
            return need
        size = even_size(samples, most)
        validate_in(self._model, data, size)
        self._fit.event(*tell.smaller_validation(need.size, need.needed_bytes, limit, size))
        return replace(need, size=size)

    def ends(self) -> None:
        """Notes the most that was in use while the ``fit`` validated."""
        if not self._runs:
            return
        self._runs = False
        measured, need = self._device.phase_peak_bytes(), self._need
        predicted = 0 if need is None else need.needed_bytes
        self._fit.note_phase("validation", measured, predicted)
        if need is not None and measured > predicted > need.resident_bytes:
            added = predicted - need.resident_bytes
            self._factor *= (measured - need.resident_bytes) / added


def _array_bytes(data: Any) -> int:
    return sum(getattr(array, "nbytes", 0) for array in keras.tree.flatten(data))


def whole_data_news(data: Any, on_host: bool, limit: Limit) -> tell.News | None:
    """Returns the news that ``fit`` holds large data whole; ``None`` where it does not.

    Args:
        data: the arrays that ``fit`` was given.
        on_host: whether the limit counts the host's memory.
        limit: the ``fit``'s limit.
    """
    nbytes = _array_bytes(data)
    large = on_host and nbytes >= _LARGE_DATA_SHARE * limit.total_bytes
    return tell.whole_data(nbytes, limit) if large else None
