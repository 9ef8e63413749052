"""Plans what XLA puts into memory for Keras on JAX, and runs it as one compiled step.

Imports JAX and Keras, never TensorFlow, and no solver. Two things differ from a framework that runs
op by op. Compiling a schedule shows what it takes before it runs
(:class:`~keras_remat.backends.xla.compiled_memory.CompiledMemory`), so a plan that the compiler
breaks is never installed. And single ops cannot be timed, so op times stay estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from keras_remat.backends import batches
from keras_remat.backends.base import RunStep
from keras_remat.backends.example_batches import example_batch
from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.jax import cudnn, private
from keras_remat.backends.jax import lower as lowering
from keras_remat.backends.jax import trace as tracing
from keras_remat.backends.jax.device import AbsentDevice, Device
from keras_remat.backends.jax.kinds import kinds_of
from keras_remat.backends.jax.measure import (
    added_bytes,
    check_device,
    is_out_of_memory,
    live_target,
    refused,
)
from keras_remat.backends.jax.processes import JaxProcesses
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.sharding import batch_parts
from keras_remat.backends.jax.sliced import StepSlicer
from keras_remat.backends.jax.swap import InstalledTrainFunction
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.processes import Processes
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.backends.xla.module_costs import costs
from keras_remat.backends.xla.step_times import StepTimes
from keras_remat.backends.xla.ways import Written
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.target import Target
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")
#: How many compiled steps are kept, so that a schedule that is found again is not compiled again.
REMEMBERED_STEPS = 6


class LoweredStep:
    """Runs a compiled schedule that trains one batch of the traced shapes."""

    def __init__(self, traced: JaxTracedStep, schedule: Schedule, compiled: Any, device: Device):
        self.traced, self.schedule, self.compiled = traced, schedule, compiled
        self._added_bytes, self._device, self._has_run = added_bytes(compiled), device, False

    def __call__(self, batch: Any) -> Any:
        first, self._has_run = not self._has_run, True
        device, model = self._device, self.traced.model
        try:
            return device.run(model, self.compiled, batch, self._added_bytes, first=first)
        except private.InvalidValueError as error:  # JAX was asked to look for NaNs
            state = device.current_state(model)
            private.raise_where_invalid(error, self.traced.train_step, state, batch)


class JaxBackend:
    """Implements :class:`keras_remat.backends.base.Backend` for one model, and remembers its
    compiled steps.

    Args:
        target: where steps will run; ``None`` for the live device. For a card that is not there,
            steps are traced, planned and compiled, and none runs.
    """

    name, compilation = "jax", "compiled"
    measures_op_times = False
    guesses_workspaces = False
    runs_slices = True
    auto_solver = (
        "greedy"  # XLA does not keep what a slow solver gains by estimated times and a model of XLA
    )

    def __init__(self, target: Target | None = None) -> None:
        self._card = target
        self.processes = JaxProcesses() if jax.process_count() > 1 else Processes()
        self.device = Device(self.processes)
        if target is not None and not target.is_live:
            self.device = AbsentDevice(target)
        self._traced: dict[str, JaxTracedStep] = {}  # by fingerprint
        self._asked: Any = None  # the example batch, if it is specs and no arrays
        self._times_s: dict[Any, float] = {}  # key of a compiled step → seconds it takes
        self._newest: dict[Any, Written] = {}  # key → compiled step; the newest last

    @property
    def target(self) -> Target:
        """Returns where steps will run."""
        return self._card or live_target()

    @cached_property
    def memory(self) -> CompiledMemory:
        """Predicts peaks by asking the compiler."""
        on_gpu = self.target.on_gpu
        return CompiledMemory(
            self._compile_bytes,
            on_gpu=on_gpu,
            rewrites=on_gpu,
            compiled_time_s=self._compiled_time_s,
        )

    @property
    def batch_multiple(self) -> int:
        """Returns the number of parts that the active ``keras.distribution`` divides a batch
        into."""
        return batch_parts()

    def check(self, model: Any) -> str | None:
        tracing.check_supported(model)
        return check_device(self.target) or cudnn.remark(model, self.target)

    is_out_of_memory = staticmethod(is_out_of_memory)

    def example_batch(self, model: Any, batch: Any) -> Any:
        if self.processes.count > 1:
            raise UnsupportedModelError(
                "In several processes plans are made inside of fit: give fit the callback."
            )
        if self.target.is_live:
            return jax.tree.map(jnp.asarray, example_batch(model, batch))
        self._asked = tracing.as_specs(example_batch(model, batch, seed=None))
        return self._asked

    def resized_spec(self, batch: Any, size: int) -> Any:
        if self.processes.count > 1:
            raise UnsupportedModelError(
                "In several processes the batch stays as it is: each has a part of it."
            )

        def spec(shape: tuple[int, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = getattr(leaf, "sharding", None)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return batches.resized_spec(batch, size, spec)

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> JaxTracedStep:
        arrays = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
        runs = arrays or batch is self._asked
        known = [
            one
            for one in self._traced.values()
            if one.micro_batches == micro_batches and one.whole is None
        ]
        like = known[-1] if known and not runs else None
        own_step = self.device.own_step(model)
        state, target = self.device.state, self.target
        traced = tracing.trace(model, batch, micro_batches, like, state, own_step, target)
        self.device.note_refs(traced)
        if runs:
            self._note(traced)
        return self._with_slicer(traced, is_known=runs)

    def _note(self, traced: JaxTracedStep) -> None:
        self._traced[traced.graph.fingerprint] = traced

    def _with_slicer(self, traced: JaxTracedStep, *, is_known: bool) -> JaxTracedStep:
        """Returns a step with a slicer, if it trains on one device and its batch as a whole.

        Args:
            traced: the step.
            is_known: whether the compiler will be asked about it.
        """
        if traced.mesh is not None or traced.micro_batches > 1:
            return traced
        note = self._note if is_known else (lambda _: None)
        return replace(traced, slicer=StepSlicer(traced, note))

    def taken_over(self, traced: JaxTracedStep) -> JaxTracedStep | None:
        """Returns a step that was traced for another card as one for this target; ``None`` if XLA
        does other things to its ops here."""
        if kinds_of(traced.target) != kinds_of(self.target):
            return None
        traced = replace(traced, target=self.target, slicer=None)
        self._note(traced)
        return self._with_slicer(traced, is_known=True)

    estimated_profile = staticmethod(estimated_profile)

    def recorder(self) -> StepTimes:
        return self.device.step_times

    # ---------------------------------------------------------------- what schedules take

    def lower(
        self,
        traced: Any,
        problem: Problem,
        schedule: Schedule,
        writing: Writing | None = None,
    ) -> RunStep:
        try:
            compiled = self._compiled(traced, problem, schedule)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = error

            def does_not_compile(batch: Any) -> Any:
                raise reason

            return does_not_compile
        return LoweredStep(traced, schedule, compiled, self.device)

    def _compiled(self, traced: JaxTracedStep, problem: Problem, schedule: Schedule | None) -> Any:
        """Returns the compiled step of a schedule, or Keras's own for ``None``.

        The newest steps are remembered. A remembered schedule is written anew if it takes more than
        the problem's budget leaves.

        Raises:
            UnsupportedModelError: XLA does not compile the schedule.
            jax.errors.JaxRuntimeError: compiling ran out of memory, or Keras's own step does not
                compile.
        """
        key = self._key(traced, schedule)
        if schedule is None:
            if key not in self._newest:
                self._remember(key, lowering.written(lowering.lower_plain(traced)))
            return self._newest[key].step
        self._compiled_time_s(problem, None)  # before Keras's own step is dropped
        known, room_bytes = self._newest.get(key), problem.room_bytes
        try:
            self._remember(key, lowering.lower_within(traced, schedule, room_bytes, known))
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UnsupportedModelError(refused(error)) from error
        return self._newest[key].step

    def _key(self, traced: JaxTracedStep, schedule: Schedule | None) -> Any:
        # the ops do not tell steps apart: arguments of another structure may have the same ops, and
        # so may a model that has changed
        return self.device.times_forgotten, traced.graph.fingerprint, traced.in_tree, schedule

    def _remember(self, key: Any, written: Written) -> None:
        before = self._newest.pop(key, None)
        if before is None or before.step is not written.step:
            self._times_s.pop(key, None)
        self._newest[key] = written
        for old in list(self._newest)[:-REMEMBERED_STEPS]:
            del self._newest[old]

    def written_plain(self, problem: Problem) -> Callable[[], None]:
        """Writes Keras's own step down for a card. Returns a function that compiles it, in any
        thread."""
        traced = self._traced[problem.graph.fingerprint]
        compile_plain = lowering.written_plain(traced)
        return lambda: self._remember(self._key(traced, None), lowering.written(compile_plain()))

    def _compile_bytes(self, problem: Problem, schedule: Schedule | None) -> int | None:
        """Returns the bytes a step adds to the resident ones; ``None`` for a graph that was not
        traced to be run. If compiling runs out of memory, all bytes of the device are returned, so
        that the peak is more than there is."""
        traced = self._traced.get(problem.graph.fingerprint)
        if traced is None:
            return None
        try:
            compiled = self._compiled(traced, problem, schedule)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return self.device.total_bytes()
        return added_bytes(compiled)

    def _compiled_time_s(self, problem: Problem, schedule: Schedule | None) -> float | None:
        """Returns the seconds of a step compiled for a card that is not there, by the card's
        roofline. Returns ``None`` on a live device, where steps run, and if the step is no longer
        remembered."""
        traced = self._traced.get(problem.graph.fingerprint)
        if traced is None or traced.target.is_live:
            return None
        key = self._key(traced, schedule)
        if key not in self._times_s and key in self._newest:
            text = self._newest[key].step.as_text()
            self._times_s[key] = costs(text, traced.target.rates).time_s
        return self._times_s.get(key)

    # ---------------------------------------------------------------- the device

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        return self.device.measure(run, wait=wait)

    def snapshot(self, model: Any) -> Callable[[], None]:
        return self.device.snapshot(model)

    def install(self, model: Any, runner: StepRunner) -> Installed:
        return InstalledTrainFunction(model, runner, self.device)


def backend() -> JaxBackend:
    """Returns a backend for one model."""
    return JaxBackend()


def backends(model: Any, compilation: str, target: Target | None = None) -> list[JaxBackend]:
    """Returns the backends that can train a model on JAX, or plan for a card that is not there.

    Raises:
        UnsupportedModelError: an order was asked for, which a compiled step does not keep.
    """
    if compilation == "ordered":
        raise UnsupportedModelError(
            'compilation="ordered" needs an executor that keeps an order; on JAX every step is '
            "compiled."
        )
    return [JaxBackend(target)]
