"""TensorFlow with ``jit_compile=True``: plan what XLA will put into memory, run the plan as one
compiled step.

The same verbs as :class:`~keras_remat.backends.tensorflow.ordered.backend.TensorFlowBackend`, whose
device, allocator and train function these are. What is different: single ops cannot be timed, so op
times stay estimates; and what a schedule takes is XLA's business, known once it ran, from which
later predictions learn (:mod:`keras_remat.backends.xla.calibrate`).

XLA takes its temporary memory as one buffer. TensorFlow's CPU allocator hands out whole chunks of
regions that double, and so would count up to twice as much; it is made to hold a region that the
buffer can be cut from, once, untouched (on a GPU there is such a region from the start).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import tensorflow as tf

from keras_remat.backends.base import RunStep
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled import lower as lowering
from keras_remat.backends.tensorflow.compiled import profile as profiling
from keras_remat.backends.tensorflow.compiled import trace as tracing
from keras_remat.backends.tensorflow.memory import exhausted, measure, probe
from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend
from keras_remat.backends.xla.calibrate import Calibration
from keras_remat.backends.xla.kernel_costs import scaled
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import UnsupportedModelError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
#: A chunk is cut when it is at least twice what is asked for, and the prediction may be half of
#: that.
_REGION_SHARE = 4
_Key = tuple[str, tuple[int, ...]]


class StepRun:
    """A lowered step that tells the backend when it runs."""

    def __init__(self, lowered: lowering.LoweredStep, problem: Problem, backend: CompiledBackend):
        self.lowered, self.problem, self._backend = lowered, problem, backend

    @property
    def key(self) -> _Key:
        """What it runs."""
        return self.problem.graph.fingerprint, self.lowered.schedule.order

    def __call__(self, batch: Any) -> Any:
        self._backend.ran = self
        started = time.perf_counter()
        try:
            result = self.lowered(batch)
        except tf.errors.OpError as error:
            if exhausted.is_out_of_memory(error) or not private.is_xla_refusal(error):
                raise
            raise UnsupportedModelError(
                f"XLA cannot compile the step: {str(error.message).splitlines()[0]}"
            ) from error
        if self._backend.times_s is not None:
            measure.synchronize(result)
            self._backend.times_s.append(time.perf_counter() - started)
        return result


class _Recorder:
    """Measures the whole step; the split over its ops stays an estimate."""

    def __init__(self, backend: CompiledBackend):
        self._backend = backend

    def start(self) -> bool:
        self._backend.times_s = []
        return True

    def stop(self, lowered: RunStep, resident_bytes: int) -> Profile | None:
        times, self._backend.times_s = self._backend.times_s, None
        assert isinstance(lowered, StepRun)
        if not times:
            return None
        profile = profiling.estimated_profile(lowered.lowered.traced, resident_bytes)
        return scaled(
            profile,
            lowered.lowered.schedule,
            sorted(times)[len(times) // 2],
            profile.resident_bytes,
        )


class CompiledBackend(TensorFlowBackend):
    """The verbs of :class:`keras_remat.backends.base.Backend`, for one model: an instance remembers
    what it measured."""

    compilation = "compiled"
    measures_op_times = False
    fragments = False  # one buffer holds all temporaries
    auto_solver = (
        "greedy"  # what a slow one gains by the model of XLA, on estimated times, XLA does not keep
    )

    def __init__(self) -> None:
        self._newest_trace: tracing.CompiledStep | None = None
        self._plain, self._lowered = Calibration(), Calibration()
        self._added_bytes: dict[_Key, int] = {}
        self._reserved_bytes = 0
        self.ran: StepRun | None = None  # since measuring began
        self.times_s: list[float] | None = None  # of the steps run while a recording is under way

    def check(self, model: Any) -> str | None:
        super().check(model)
        return None

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> Any:
        like = self._newest_trace if micro_batches == 1 else None
        try:
            traced = tracing.trace(model, batch, micro_batches, like)
        except (
            KeyError,
            ValueError,
            tf.errors.OpError,
        ) as error:  # what is the train step's own fault, other backends say too
            raise UnsupportedModelError(
                f"The train step cannot be traced for XLA: {type(error).__name__}: {error}"
            ) from error
        if micro_batches == 1:
            self._newest_trace = self._newest_trace or traced
        return traced

    def estimated_profile(self, traced: Any, resident_bytes: int | None = None) -> Profile:
        return profiling.estimated_profile(traced, resident_bytes)

    def with_pool(self, traced: Any, problem: Problem, idle_bytes: int) -> Problem:
        return problem

    def recorder(self) -> Any:
        return _Recorder(self)

    def lower(self, traced: Any, problem: Problem, schedule: Schedule) -> RunStep:
        try:
            step = StepRun(lowering.lower(traced, schedule), problem, self)
        except (KeyError, ValueError) as error:
            raise UnsupportedModelError(
                f"The schedule cannot be written for XLA: {type(error).__name__}: {error}"
            ) from error
        self._reserve(
            _REGION_SHARE
            * (self.predicted_peak_bytes(problem, schedule) - problem.profile.resident_bytes)
        )
        return step

    def reserve(self, limit_bytes: int) -> None:
        """Nothing: :meth:`lower` has the region made that a step's one buffer is cut from; a
        smaller one would be handed out whole."""

    def tidy(self, model: Any) -> None:
        """Nothing: all that a step needs is one buffer."""

    def room_for(self, like: Any, samples: int) -> AbstractContextManager[None]:
        """Nothing to do: one buffer holds all temporaries."""
        return nullcontext()

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._reserved_bytes:
            self._reserved_bytes = nbytes
            probe.reserve(nbytes)

    def predicted_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        resident = problem.profile.resident_bytes
        known = self._added_bytes.get((problem.graph.fingerprint, schedule.order))
        if known is None:
            store_all = Schedule.store_all(problem.graph)
            calibration = self._plain if schedule == store_all else self._lowered
            known = calibration.predict(*_simulated(problem, schedule))
        return resident + known

    def measure(self, run: Callable[[], Result]) -> tuple[Result, Usage]:
        self.ran = None
        before = measure.bytes_in_use()
        result, usage = super().measure(run)
        step = self.ran
        if step is not None:
            added = max(0, usage.peak_bytes - before)
            self._added_bytes[step.key] = max(added, self._added_bytes.get(step.key, 0))
            self._lowered.learn(
                *_simulated(step.problem, step.lowered.schedule), self._added_bytes[step.key]
            )
        return result, usage


def _simulated(problem: Problem, schedule: Schedule) -> tuple[int, int]:
    """Activation bytes of a schedule and of store-all, by the model of the compiler."""
    resident, store_all = problem.profile.resident_bytes, Schedule.store_all(problem.graph)
    return simulate(problem, schedule).peak_bytes - resident, simulate(
        problem, store_all
    ).peak_bytes - resident
