"""Runs TensorFlow with ``jit_compile=True``: plans the values that XLA will put into memory, and
runs the plan as one compiled step.

It shares device and train function with
:class:`~keras_remat.backends.tensorflow.ordered.backend.TensorFlowBackend`. Two things differ.
Single ops cannot be timed, so op times stay estimates. And XLA decides how much memory a schedule
takes. On a CPU the schedule is compiled before it runs, which gives the size of its one buffer, and
the allocator is asked which chunk that buffer would get. On a GPU the memory is known once the
schedule has run, and later predictions learn from it
(:mod:`keras_remat.backends.xla.compiled_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from keras_remat.backends.base import RunStep
from keras_remat.backends.example_batches import example_batch
from keras_remat.backends.memory import MemoryModel
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled import profile as profiling
from keras_remat.backends.tensorflow.compiled import trace as tracing
from keras_remat.backends.tensorflow.compiled.absent_device import AbsentDevice
from keras_remat.backends.tensorflow.compiled.kinds import kinds_of
from keras_remat.backends.tensorflow.compiled.lower import LoweredStep, ways_of
from keras_remat.backends.tensorflow.compiled.sliced import StepSlicer
from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice
from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.backends.xla.card_compiler import CardCompiler
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.backends.xla.module_costs import costs
from keras_remat.backends.xla.step_times import StepTimes
from keras_remat.backends.xla.ways import Written
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.target import Target
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError


class CompiledBackend(TensorFlowBackend):
    """Implements :class:`keras_remat.backends.base.Backend` for compiled steps of one model: an
    instance remembers its measurements.

    Args:
        target: where steps will run; the live device, if not given. For an absent card steps are
            traced, planned and compiled, but not run.
        compiler: compiler for an absent card; a new one, if not given.
    """

    compilation = "compiled"
    measures_op_times = guesses_workspaces = False
    auto_solver = (
        "greedy"  # a slower solver gains on estimated times, but XLA does not keep that gain
    )

    def __init__(self, target: Target | None = None, compiler: CardCompiler | None = None) -> None:
        super().__init__()
        self._card = None if target is None or target.is_live else target
        self._compiler = compiler
        if self._card is not None and compiler is None:
            self._compiler = CardCompiler()
        self._asked: Any = None  # for an absent card: the batch, as specs without tensors
        self._traced_here: dict[str, tracing.CompiledStep] = {}  # by fingerprint
        # (fingerprint, schedule or ``None`` for Keras's own step) → bytes and time of the step
        # compiled for an absent card
        self._on_card: dict[tuple[str, Schedule | None], Written] = {}
        self._newest_trace: tracing.CompiledStep | None = None
        self._newest_lowered: LoweredStep | None = None
        self._step_times = StepTimes(profiling.estimated_profile)

    @cached_property
    def device(self) -> TensorFlowDevice:
        return TensorFlowDevice() if self._card is None else AbsentDevice(self._card)

    @cached_property
    def memory(self) -> MemoryModel:
        """Returns the memory model. It asks the compiler on a CPU and for an absent card; on a
        live GPU it learns from runs."""
        if self._card is not None:
            return CompiledMemory(
                self._compile_bytes,
                on_gpu=True,
                rewrites=True,
                compiled_time_s=self._compiled_time_s,
                writing_of=self._writing_of,
            )
        if on_gpu():
            return CompiledMemory(self._compile_bytes, on_gpu=True)
        return CompiledMemory(self._compile_bytes, chunk_bytes=self.device.chunk_bytes)

    def _compile_bytes(self, problem: Problem, schedule: Schedule | None) -> int | None:
        """Returns the bytes a step adds to the resident ones; ``None`` where only a run tells."""
        traced = self._traced_here.get(problem.graph.fingerprint)
        if traced is None:
            return None
        if self._card is None:
            return self._live_bytes(traced, problem, schedule)
        key = traced.graph.fingerprint, schedule
        if schedule is not None:

            def write(writing: Writing) -> Written:
                function = LoweredStep(traced, schedule, writing=writing).function
                return self._compiled_for_card(private.serialized_hlo(function), writing)

            room_bytes, known = problem.room_bytes, self._on_card.get(key)
            self._on_card[key] = ways_of(traced).within(schedule, write, room_bytes, known)
        elif key not in self._on_card:
            self._on_card[key] = self._compiled_for_card(private.serialized_hlo(traced.function))
        return self._on_card[key].added_bytes

    def _compiled_for_card(self, module: bytes, writing: Writing | None = None) -> Written:
        """Compiles a module for the card; keeps its bytes and its time by the roofline."""
        assert self._card is not None
        assert self._compiler is not None
        step = self._compiler.compiled(module, self._card)
        return Written(costs(step.text, self._card.rates).time_s, step.added_bytes, writing)

    def _compiled_time_s(self, problem: Problem, schedule: Schedule | None) -> float | None:
        """Returns the seconds of a step compiled for a card, by the card's roofline."""
        written = self._on_card.get((problem.graph.fingerprint, schedule))
        return None if written is None else float(written.step)

    def _writing_of(self, problem: Problem, schedule: Schedule) -> Writing | None:
        """Returns how a schedule was written for an absent card; ``None`` on the live device,
        where no compiler is asked."""
        written = self._on_card.get((problem.graph.fingerprint, schedule))
        return None if written is None else written.writing

    def _live_bytes(
        self, traced: tracing.CompiledStep, problem: Problem, schedule: Schedule | None
    ) -> int | None:
        """Returns the bytes that XLA:CPU reports for a step; ``None`` where it is not asked.

        It is not asked on a GPU, where compiling would try kernels. Nor is it asked about Keras's
        own step where its answer changes nothing: without a budget, where all values together fit,
        or where the values alive at once do not.
        """
        if traced.target.on_gpu:
            return None
        if schedule is not None:
            return _compiled_bytes(self._lowered(traced, schedule).function)
        budget, most = problem.budget_bytes, problem.profile.resident_bytes + traced.made_bytes
        if traced.function is None or budget is None or budget >= most:
            return None
        least = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
        return _compiled_bytes(traced.function) if least <= budget else None

    def _lowered(
        self, traced: tracing.CompiledStep, schedule: Schedule, writing: Writing = Writing.STRICT
    ) -> LoweredStep:
        """Returns the step that runs a schedule. The newest is remembered, since it will run."""
        newest, asked = self._newest_lowered, (schedule, writing)
        if (
            newest is None
            or newest.traced is not traced
            or (newest.schedule, newest.writing) != asked
        ):
            try:
                newest = LoweredStep(traced, schedule, self._step_times, writing)
            except (KeyError, ValueError) as error:
                raise UnsupportedModelError(
                    f"The schedule cannot be written for XLA: {type(error).__name__}: {error}"
                ) from error
            self._newest_lowered = newest
        return newest

    def written_plain(self, problem: Problem) -> Callable[[], None]:
        """Writes Keras's own step for a card; returns a function that compiles it in any thread."""
        traced = self._traced_here[problem.graph.fingerprint]
        module = private.serialized_hlo(traced.function)

        def compile_plain() -> None:
            self._on_card[traced.graph.fingerprint, None] = self._compiled_for_card(module)

        return compile_plain

    def taken_over(self, traced: tracing.CompiledStep) -> tracing.CompiledStep | None:
        """Returns a step traced for another card as one for this card; ``None`` where XLA treats
        its ops differently here."""
        if self._card is None or kinds_of(traced.target) != kinds_of(self._card):
            return None
        traced = replace(traced, target=self._card, slicer=None)
        self._note(traced)
        return replace(traced, slicer=StepSlicer(traced, self._note))

    def _note(self, traced: tracing.CompiledStep) -> None:
        self._traced_here[traced.graph.fingerprint] = traced

    def example_batch(self, model: Any, batch: Any) -> Any:
        if self._card is None:
            return super().example_batch(model, batch)
        arrays = example_batch(model, batch, seed=None)
        self._asked = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype), arrays
        )
        return self._asked

    def check(self, model: Any) -> str | None:
        super().check(model)
        return self.device.remark()

    def _traced(self, model: Any, batch: Any, micro_batches: int) -> Any:
        like = self._newest_trace if micro_batches == 1 else None
        try:
            traced = tracing.trace(model, batch, micro_batches, like, self._card)
        except (
            KeyError,
            ValueError,
            tf.errors.OpError,
        ) as error:  # if the train step itself is at fault, other backends report it too
            raise UnsupportedModelError(
                f"The train step cannot be traced for XLA: {type(error).__name__}: {error}"
            ) from error
        leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
        runs = batch is self._asked or all(isinstance(leaf, tf.Tensor) for leaf in leaves)
        if runs:
            self._note(traced)
        if micro_batches > 1:
            return traced
        self._newest_trace = self._newest_trace or traced
        return replace(traced, slicer=StepSlicer(traced, self._note if runs else lambda _: None))

    def estimated_profile(self, traced: Any, resident_bytes: int | None = None) -> Profile:
        return profiling.estimated_profile(traced, resident_bytes)

    def recorder(self) -> StepTimes:
        return self._step_times

    def lower(
        self,
        traced: Any,
        problem: Problem,
        schedule: Schedule,
        writing: Writing | None = None,
    ) -> RunStep:
        on_gpu = traced.target.on_gpu
        return self._lowered(traced, schedule, writing if writing and on_gpu else Writing.STRICT)


def _compiled_bytes(function: Any) -> int | None:
    try:
        return private.compiled_bytes(function)
    except ValueError as error:
        raise UnsupportedModelError(
            f"XLA cannot compile the step: {str(error).splitlines()[0]}"
        ) from error
