"""Runs TensorFlow op by op: the executor obeys an order, and the allocator's peak can be measured,
on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import keras
import tensorflow as tf

from keras_remat.backends.base import ProfileRecorder, RunStep
from keras_remat.backends.example_batches import example_batch
from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.keras_private import is_own, layers
from keras_remat.backends.memory import MemoryModel, SimulatedMemory
from keras_remat.backends.processes import Processes
from keras_remat.backends.tensorflow.graph import trace as tracing
from keras_remat.backends.tensorflow.memory import (
    best_fit,
    exhausted,
    measure,
    variables,
)
from keras_remat.backends.tensorflow.memory.donated import nbytes
from keras_remat.backends.tensorflow.memory.look import seen_allocations
from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.backends.tensorflow.ordered import ordering
from keras_remat.backends.tensorflow.ordered import profile as profiling
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")


class _Recorder:
    """Holds a :class:`.profiler.recorder.Recorder` behind the backend's interface.

    Args:
        memory: memory model that gets the recorded pool; ``None`` where several replicas share the
            pool.

    Attributes:
        remark: why the op times of the profile are estimates; empty where they were measured.
    """

    def __init__(self, memory: ReplayedMemory | None) -> None:
        self._recorder, self._memory = Recorder(), memory
        self.remark = ""

    def start(self) -> bool:
        return self._recorder.start()

    def stop(self, lowered: RunStep, resident_bytes: int | None) -> Profile | None:
        recording = self._recorder.stop()
        if not isinstance(lowered, LoweredStep):
            raise TypeError(f"a recording is of steps in order, not of {type(lowered).__name__}")
        self.remark = profiling.blindness(recording)
        if self._memory is not None:
            self._memory.find_pool(recording.allocations, lowered.problem)
        return profiling.measured_profile(lowered, recording, resident_bytes)


class TensorFlowBackend:
    """Implements :class:`keras_remat.backends.base.Backend` for steps in order."""

    name = "tensorflow"
    compilation = "ordered"
    measures_op_times = True
    runs_slices = True
    auto_solver = "auto"
    processes = Processes()
    #: The train function of the running ``fit``.
    _installed: InstalledTrainFunction | None = None

    def __init__(self) -> None:
        # id of its handle → variable that traced steps touch; and the ids of those they may write
        self._touched: dict[int, Any] = {}
        self._written: set[int] = set()
        # large constants of lowered steps, while a step holds them
        self._constants: MutableMapping[bytes, tf.Tensor] = WeakValueDictionary()

    @property
    def guesses_workspaces(self) -> bool:
        """Returns whether cuDNN may choose kernels; the workspace of TensorFlow's own follows from
        their shapes."""
        return on_gpu()

    @property
    def batch_multiple(self) -> int:
        """Returns 1: one device trains whole batches."""
        return 1

    @cached_property
    def device(self) -> measure.TensorFlowDevice:
        """Returns the device. It is made on first use, since that makes TensorFlow's devices."""
        return measure.TensorFlowDevice()

    @cached_property
    def memory(self) -> MemoryModel:
        """Returns the memory model, made on first use: probing the allocator makes tensors."""
        return allocator_memory(self.device)

    def check(self, model: Any) -> str | None:
        if model.run_eagerly or tf.config.functions_run_eagerly():
            how = "run_eagerly=True" if model.run_eagerly else "tf.config.run_functions_eagerly"
            raise UnsupportedModelError(
                f"The model runs eagerly ({how}): there is no graph to schedule."
            )
        ordered = "jit_compile=True: the rematerialized step runs without XLA, op by op in order."
        remarks = (ordered if model.jit_compile else None, self.device.remark())
        return " ".join(filter(None, remarks)) or None

    def example_batch(self, model: Any, batch: Any) -> Any:
        arrays = example_batch(model, batch)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arrays
        )

    def resized_spec(self, batch: Any, size: int) -> Any:
        return tracing.resized_spec(batch, size)

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> Any:
        _build_optimizer(model)
        made: list[Any] = []

        def noted(make: Callable[..., Any], **options: Any) -> Any:
            made.append(make(**options))
            return made[-1]

        with tf.variable_creator_scope(noted):
            traced = self._traced(model, batch, micro_batches)
        self._touched.update({id(v.handle): v for v in traced.variables.all})
        self._written.update(id(v.handle) for v in traced.variables.written)
        # variables made while tracing share their zeros until they are written: write them now
        parts = model.distribute_strategy.experimental_local_results
        variables.snapshot([part for variable in made for part in parts(variable)])()
        return traced

    def _traced(self, model: Any, batch: Any, micro_batches: int) -> Any:
        return tracing.trace(model, batch, micro_batches, smallest_counted_bytes(self.device))

    def estimated_profile(self, traced: Any, resident_bytes: int | None = None) -> Profile:
        profile = profiling.estimated_profile(traced, resident_bytes)
        in_use = sum(nbytes(constant) for constant in self._constants.values())  # of other steps
        more_bytes = max(0, sum(traced.held_bytes) - in_use)
        return replace(profile, resident_bytes=profile.resident_bytes + more_bytes)

    def recorder(self) -> ProfileRecorder:
        memory = None if self.device.is_shared else self.memory
        return _Recorder(memory if isinstance(memory, ReplayedMemory) else None)

    def lower(
        self,
        traced: Any,
        problem: Problem,
        schedule: Schedule,
        writing: Writing | None = None,
    ) -> RunStep:
        any_size = self._installed is not None and self._installed.any_size
        return LoweredStep(
            traced, problem, schedule, ordering.SMALL_BYTES,
            any_size=any_size, constants=self._constants,
        )  # fmt: skip

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        return measure.measure(run, wait=wait, device=self.device)

    is_out_of_memory = staticmethod(exhausted.is_out_of_memory)

    def snapshot(self, model: Any) -> Callable[[], None]:
        parts = model.distribute_strategy.experimental_local_results  # of a variable, by device
        of_optimizer = getattr(model.optimizer, "variables", ())
        known = (*model.variables, *model.metrics_variables, *of_optimizer)
        of_model = [part for variable in known for part in parts(variable.value)]
        by_handle = {id(v.handle): v for v in of_model} | self._touched
        updated = {id(v) for handle, v in by_handle.items() if handle in self._written}
        return variables.snapshot(list(by_handle.values()), updated)

    def install(self, model: Any, runner: StepRunner) -> Installed:
        self._installed = InstalledTrainFunction(model, runner)
        return self._installed


def smallest_counted_bytes(device: measure.TensorFlowDevice) -> int:
    """Returns the bytes of the smallest request that the allocator counts."""
    return best_fit.ONEDNN_SMALL_BYTES if device.allocator == "onednn" else 0


def allocator_memory(device: measure.TensorFlowDevice) -> MemoryModel:
    """Returns the memory model for the device's allocator, which is probed."""
    if device.allocator not in ("bfc", "onednn"):
        return SimulatedMemory()
    smallest_bytes = smallest_counted_bytes(device)
    # no look on a GPU: nearly all of its one region is free in one piece, as the model assumes
    is_seen = not on_gpu() and not device.is_shared
    return ReplayedMemory(
        smallest_bytes=smallest_bytes,
        region_bytes=device.region_bytes(),
        on_gpu=on_gpu(),
        see=partial(seen_allocations, smallest_bytes=smallest_bytes) if is_seen else None,
    )


def _build_optimizer(model: Any) -> None:
    """Makes the optimizer's slots before tracing, which spares a trace.

    They get the same names as in Keras's own step, also those of an optimizer inside another one.

    Two kinds of models make their slots themselves, in the first step. A user's ``train_step`` may
    update only some variables. And a model that Keras takes for built after ``model.build(shape)``
    may have layers without weights yet.
    """
    optimizer = getattr(model, "optimizer", None)
    steps_itself = is_own(model, "train_step", keras.Model)
    is_built = model.built and all(layer.built for layer in layers(model))
    if optimizer is not None and not optimizer.built and is_built and not steps_itself:
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        variables = model.trainable_variables
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(tuple(variables) if scales else variables)  # as it comes to keep them
