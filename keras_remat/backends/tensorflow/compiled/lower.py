"""Writes a schedule as one compiled step: :mod:`keras_remat.backends.xla.protect` on TensorFlow.

The operations are written into a ``tf.function(jit_compile=True)`` that first reads every variable
and at the end assigns the changed ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.barrier import guard, never
from keras_remat.backends.tensorflow.compiled import pooling
from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram
from keras_remat.backends.tensorflow.compiled.kinds import (
    FORWARD_CONVOLUTIONS,
    INPUT_GRADIENTS,
    KERNEL_GRADIENTS,
    KINDS,
    POOLING_GRADIENTS,
    kinds_of,
)
from keras_remat.backends.tensorflow.compiled.trace import CompiledStep
from keras_remat.backends.tensorflow.graph.nodes import run_node
from keras_remat.backends.tensorflow.graph.step import given_leaves, packed
from keras_remat.backends.tensorflow.memory import exhausted, measure
from keras_remat.backends.xla.protect import Run, Writer
from keras_remat.backends.xla.step_times import StepTimes
from keras_remat.backends.xla.ways import Ways
from keras_remat.core.schedule import Schedule
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError


class _Writer(Writer):
    """Implements :class:`keras_remat.backends.xla.protect.Writer` for TensorFlow: values are
    tensors of the function being traced."""

    def __init__(self, program: FlatProgram, uses_branches: bool, uses_barriers: bool = False):
        self._program, self.uses_branches = program, uses_branches
        self.uses_barriers = uses_barriers
        self._literals: dict[str, Any] = {}

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        return run_node(self._program.equations[at].source, inputs)

    def literal(self, atom: Any) -> Any:
        if atom.name not in self._literals:
            (self._literals[atom.name],) = run_node(self._program.constants[atom.name], ())
        return self._literals[atom.name]

    array = literal

    def literal_bytes(self, atom: Any) -> int:
        return int(atom.nbytes)

    def is_inexact(self, value: Any) -> bool:
        return bool(value.dtype.is_floating or value.dtype.is_complex)

    def may_guard(self, equation: Any, value: Any) -> bool:
        """Returns whether XLA may learn a value at run time. Shapes, axes and permutations must be
        known when it compiles; those are integers that are not random keys."""
        known_late = self.is_inexact(value) or value.dtype.is_bool or value.dtype.is_unsigned
        return bool(known_late or equation.kind in KINDS.elementwise)

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        return never(triggers, in_branch)

    def guard(self, value: Any, condition: Any) -> Any:
        return guard(value, condition)

    def hold(self, value: Any) -> Any:
        return private.optimization_barrier(value)

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        program = self._program

        def nothing() -> list[Any]:
            return [tf.zeros(program.shapes[n], program.dtypes[n]) for n in wanted]

        def draw() -> list[Any]:
            inner, known = _Writer(program, uses_branches=False), dict(given)
            for at in equations:
                equation = program.equations[at]
                inputs = [
                    known[a] if isinstance(a, int) else inner.literal(a) for a in equation.inputs
                ]
                known.update(zip(equation.outputs, inner.write(at, inputs), strict=True))
            return [known[number] for number in wanted]

        return list(tf.cond(condition, nothing, draw))


class _GpuWriter(_Writer):
    """Writes a step for a GPU.

    cuDNN wants a convolution's kernel in another layout. Its copy depends on the parameter alone
    and would be made before the first convolution, so the kernel waits for its image. Images are
    copied into another layout, too.
    """

    copying = FORWARD_CONVOLUTIONS | INPUT_GRADIENTS | KERNEL_GRADIENTS

    def __init__(self, program: FlatProgram):
        super().__init__(program, uses_branches=False, uses_barriers=True)

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        equation = self._program.equations[at]
        if equation.kind in POOLING_GRADIENTS:
            image, _, gradient = inputs
            start = tf.cast(self.never([gradient]), gradient.dtype)
            result = pooling.with_start(equation.source, image, gradient, start)
            if result is not None:
                return [result]
        if equation.kind in FORWARD_CONVOLUTIONS:
            image, kernel = inputs
            is_given = isinstance(equation.inputs[1], int)
            if is_given and equation.inputs[1] < self._program.n_given:
                inputs = [image, self.guard(kernel, self.never([image]))]
        return super().write(at, inputs)


class LoweredStep:
    """Runs one schedule as a step; call it with a batch of the traced shape. It is compiled at the
    first call.

    Args:
        traced: from :func:`~keras_remat.backends.tensorflow.compiled.trace.trace`.
        schedule: a legal order for ``traced.graph``.
        times: collects the seconds of its runs during a recording.
        writing: how much of the schedule is protected; see
            :mod:`keras_remat.backends.xla.protect`.

    Attributes:
        function: the step as a concrete function.
    """

    def __init__(
        self,
        traced: CompiledStep,
        schedule: Schedule,
        times: StepTimes | None = None,
        writing: Writing = Writing.STRICT,
    ):
        self.traced, self.schedule, self.writing, self._times = traced, schedule, writing, times
        target, stateless, program = traced.target, traced.stateless, traced.program
        batch = stateless.batch

        def remat_step(*leaves: Any) -> Any:
            variables = [
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=program.dtypes[batch + at])
                for at, handle in enumerate(stateless.handles)
            ]
            run = Run(
                traced,
                kinds_of(target),
                _GpuWriter(program) if target.on_gpu else _Writer(program, uses_branches=True),
                [*leaves, *variables, *map(private.capture, stateless.captured)],
                range(batch, program.n_given),
                writing=writing,
            )
            run.order(schedule.order)
            for number, atom in stateless.written.items():
                tf.raw_ops.AssignVariableOp(
                    resource=stateless.handles[number - batch], value=run.output(atom)
                )
            return [run.output(atom) for atom in stateless.returned]

        private.define_functions(program.library)
        specs = [tf.TensorSpec(program.shapes[at], program.dtypes[at]) for at in range(batch)]
        function = tf.function(remat_step, input_signature=specs, autograph=False, jit_compile=True)
        self.function = private.concrete_function(function)

    def __call__(self, batch: Any) -> Any:
        """Runs one step; returns what ``train_step`` returns."""
        leaves = map(tf.convert_to_tensor, given_leaves(batch))
        started = time.perf_counter()
        try:
            outputs = self.function(*leaves)
        except tf.errors.OpError as error:
            if exhausted.is_out_of_memory(error) or not private.is_xla_refusal(error):
                raise
            raise UnsupportedModelError(
                f"XLA cannot compile the step: {str(error.message).splitlines()[0]}"
            ) from error
        if self._times is not None and self._times.times_s is not None:
            measure.synchronize(outputs)
            self._times.times_s.append(time.perf_counter() - started)
        return packed(self.traced.output_structure, outputs)


def ways_of(traced: CompiledStep) -> Ways:
    """Returns the ways of writing a step's schedules for its target."""
    batch, handles = traced.stateless.batch, traced.stateless.handles
    state = range(batch, batch + len(handles))
    return Ways(traced, traced.target.on_gpu, state, FORWARD_CONVOLUTIONS)
