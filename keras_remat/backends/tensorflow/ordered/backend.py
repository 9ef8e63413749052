"""TensorFlow op by op: the executor obeys an order, and the allocator's peak can be measured, on a
CPU too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_remat.backends import batches
from keras_remat.backends.base import Installed, ProfileRecorder, RunStep, StepRunner
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import trace as tracing
from keras_remat.backends.tensorflow.memory import (
    best_fit,
    exhausted,
    measure,
    probe,
    replay,
    variables,
)
from keras_remat.backends.tensorflow.ordered import lower as lowering
from keras_remat.backends.tensorflow.ordered import profile as profiling
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Pool, Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")


#: How much of what is free of the limit is reserved at most, where the device has it: a chunk is
#: cut when it is at least twice what is asked for. The allocator's own tables take a thirty-second
#: of its regions.
_RESERVED_LIMITS = 2


class _Recorder:
    """:class:`.profiler.recorder.Recorder` behind the backend's interface.

    Attributes:
        remark: why the op times of the profile are estimates; empty where they were measured.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()
        self.remark = ""

    def start(self) -> bool:
        return self._recorder.start()

    def stop(self, lowered: RunStep, resident_bytes: int) -> Profile | None:
        recording = self._recorder.stop()
        if not isinstance(lowered, lowering.LoweredStep):
            raise TypeError(f"a recording is of steps in order, not of {type(lowered).__name__}")
        self.remark = profiling.blindness(recording)
        return profiling.measured_profile(lowered, recording, resident_bytes)


class TensorFlowBackend:
    """The verbs of :class:`keras_remat.backends.base.Backend`."""

    name = "tensorflow"
    compilation = "ordered"
    measures_op_times = True
    fragments = True
    auto_solver = "auto"
    _has_pipeline = False  # whether the steps are those of a ``fit``
    #: Whether steps have cuts: they count on chunks that come back as they were, in one region that
    #: is large enough. The steps of a ``fit`` have none: where its input pipeline puts the next
    #: batches is not known, and an order may need more with cuts made for another pool.
    may_cut = False

    def check(self, model: Any) -> str | None:
        if model.run_eagerly:
            raise UnsupportedModelError(
                "The model runs eagerly (run_eagerly=True): there is no graph to schedule."
            )
        if (
            type(model.distribute_strategy) is not type(tf.distribute.get_strategy())
            or tf.distribute.has_strategy()
        ):
            raise UnsupportedModelError(
                f"The model trains under {type(model.distribute_strategy).__name__}: schedules for several replicas are not supported."
            )
        if model.jit_compile:
            return "jit_compile=True: the rematerialized step runs without XLA, op by op in order."
        return None

    def example_batch(self, model: Any, batch: Any) -> Any:
        arrays = batches.example_batch(model, batch)
        tensors = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arrays
        )
        private.build_model(model, tensors)
        return tensors

    def resized_spec(self, batch: Any, size: int) -> Any:
        samples = batches.batch_size_of(batch)

        def resize(leaf: Any) -> Any:
            if leaf is None:
                return None
            if len(leaf.shape) == 0 or leaf.shape[0] != samples:
                raise UnsupportedModelError(
                    f"An array of shape {tuple(leaf.shape)} does not have the {samples} samples of its batch."
                )
            return tf.TensorSpec((size, *leaf.shape[1:]), leaf.dtype)

        return tf.nest.map_structure(resize, batch)

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> tracing.TensorFlowStep:
        return tracing.trace(model, batch, micro_batches)

    def estimated_profile(self, traced: Any, resident_bytes: int | None = None) -> Profile:
        return profiling.estimated_profile(traced, resident_bytes)

    def with_pool(self, traced: Any, problem: Problem, idle_bytes: int) -> Problem:
        if device.on_gpu():
            return problem
        free = probe.free_chunks()
        if not free:
            return replace(problem, profile=replace(problem.profile, pool=None))
        in_use = measure.bytes_in_use()
        inputs = [
            v.nbytes
            for v in problem.graph.values
            if v.producer is None and v.nbytes >= _smallest_bytes()
        ]
        resident = problem.profile.resident_bytes
        if not inputs:  # no batch is the pool's, so nothing comes and goes between steps
            resident = min(resident, in_use or traced.resident_bytes)
        ahead = max(0, resident - idle_bytes - problem.graph.input_bytes) if inputs else 0
        held = max(0, in_use - idle_bytes) if inputs else problem.graph.input_bytes
        residents = probe.Residents(traced, free)
        known = Pool(
            free,
            tuple(residents.homes()),
            tuple(residents.gaps(inputs)) if held else (),
            held,
            ahead,
        )
        return replace(
            problem, profile=replace(problem.profile, resident_bytes=resident, pool=known)
        )

    def reserve(self, limit_bytes: int) -> None:
        in_use = measure.bytes_in_use()
        nbytes = min(
            _RESERVED_LIMITS * (limit_bytes - in_use), measure.device_memory_bytes() - in_use
        )
        if nbytes > 0:
            # what regions are; one byte more would take twice as much
            self.may_cut = probe.reserve(2 ** (nbytes.bit_length() - 1)) or self.may_cut

    def tidy(self, model: Any) -> None:
        if not device.on_gpu():  # there, variables are put back by assigning to them
            self.snapshot(model)()

    def room_for(self, like: Any, samples: int) -> AbstractContextManager[None]:
        nbytes = tf.as_dtype(like.dtype).size * samples * math.prod(like.shape[1:])
        in_pool = nbytes >= best_fit.CPU_SMALL_BYTES and not device.on_gpu()
        return probe.spaced(nbytes) if in_pool else nullcontext()

    def recorder(self) -> ProfileRecorder:
        return _Recorder()

    def lower(self, traced: Any, problem: Problem, schedule: Schedule) -> RunStep:
        return lowering.lower(
            traced, problem, schedule, _smallest_bytes(), self.replayed(problem, schedule)[1]
        )

    def predicted_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        return self.replayed(problem, schedule)[0]

    def replayed(
        self, problem: Problem, schedule: Schedule
    ) -> tuple[int, dict[int, tuple[best_fit.Cut, ...]]]:
        """The peak of a schedule's steps and, by position, the cuts that they would have
        (:func:`.replay.replayed`)."""
        return replay.replayed(
            problem, schedule, smallest_bytes=_smallest_bytes(), pipeline=self._has_pipeline,
            may_cut=self.may_cut and not self._has_pipeline,
        )  # fmt: skip

    def lowered_peak_bytes(self, problem: Problem, schedule: Schedule) -> int | None:
        return None

    def measure(self, run: Callable[[], Result]) -> tuple[Result, Usage]:
        return measure.measure(run)

    def bytes_in_use(self) -> int:
        return measure.bytes_in_use()

    def device_memory_bytes(self) -> int:
        return measure.device_memory_bytes()

    def peak_bytes(self) -> int:
        return measure.peak_bytes()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return exhausted.is_out_of_memory(error)

    def snapshot(self, model: Any) -> Callable[[], None]:
        of_optimizers = (v for optimizer in _optimizers(model) for v in optimizer.variables)
        saved = [*model.variables, *model.metrics_variables, *of_optimizers]
        return variables.snapshot(list({id(v): v for v in saved}.values()))

    def install(self, model: Any, runner: StepRunner) -> Installed:
        self._has_pipeline = True
        return InstalledTrainFunction(model, runner)


def _smallest_bytes() -> int:
    """What the device's pool serves at least."""
    return 0 if device.on_gpu() else best_fit.CPU_SMALL_BYTES


def _optimizers(model: Any) -> Iterator[Any]:
    """The optimizers a model holds as attributes, or in lists or dictionaries among them (a GAN has
    two)."""
    for held in vars(model).values():
        items = (
            held
            if isinstance(held, (list, tuple))
            else held.values()
            if isinstance(held, dict)
            else (held,)
        )
        yield from (item for item in items if isinstance(item, keras.optimizers.Optimizer))
