"""Traces Keras's whole TensorFlow train step as a graph of the values XLA will put into memory.

``train_step`` is traced as for ``jit_compile=True`` (loops and their gradients are traced
differently for XLA), made stateless (:mod:`.flatten`), cut into clusters and ordered
(:mod:`keras_remat.backends.xla.fused_graph`). Operations that the gradient tape traced are the
backward phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from keras_remat.backends.memory import MemoryModel
from keras_remat.backends.micro_batches import watched_micro_batches
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram, Stateless, flatten
from keras_remat.backends.tensorflow.compiled.kinds import kinds_of
from keras_remat.backends.tensorflow.graph.accumulate import accumulated_train_step
from keras_remat.backends.tensorflow.graph.step import TouchedVariables, without_graph
from keras_remat.backends.tensorflow.graph.trace import data_spec, touched_variables
from keras_remat.backends.tensorflow.profiler.device import live_target
from keras_remat.backends.xla.fused_graph import FusedStep, fused_graph
from keras_remat.core.problem import Problem
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class CompiledStep(FusedStep):
    """Holds a train step traced for XLA.

    Args:
        stateless: the step as a pure function, which ``program`` computes.
        output_structure: structure of ``train_step``'s result, from
            :func:`~keras_remat.backends.tensorflow.graph.step.without_graph`.
        variables: the variables that the step touches.
        target: where it will run.
        function: Keras's own step, where a compiler can report its bytes; ``None`` on a live GPU,
            and where Keras does not compile it.
        plain_is_compiled: whether Keras compiles its own step.
    """

    stateless: Stateless
    output_structure: Any
    variables: TouchedVariables
    target: Target
    function: Any = None
    plain_is_compiled: bool = True

    @cached_property
    def made_bytes(self) -> int:
        """Returns the bytes of all values that the step's operations make."""
        return sum(self.program.sizes[self.program.n_given :])

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the predicted peak of Keras's own step. If that step is not compiled, nothing
        here says which values are alive at once, so all values together are an upper bound."""
        if self.plain_is_compiled:
            return super().plain_peak_bytes(problem, memory)
        return problem.profile.resident_bytes + self.made_bytes


def trace(
    model: Any,
    batch: Any,
    micro_batches: int = 1,
    like: CompiledStep | None = None,
    target: Target | None = None,
) -> CompiledStep:
    """Traces ``model.train_step`` for batches of this shape; the model is not changed.

    Args:
        model, batch, micro_batches: as in
            :func:`keras_remat.backends.tensorflow.graph.trace.trace`.
        like: the same step for another batch size, if the same ops are wanted.
        target: where the step will run; the live device, if not given.

    Raises:
        UnsupportedModelError: the step cannot be compiled as one; the message says which operation,
            and why.
    """
    target = target or live_target()
    structure = data_spec(batch)
    train_step = accumulated_train_step(model, micro_batches, structure, separated=True)
    traced = tf.function(train_step, autograph=False, jit_compile=True)
    with watched_micro_batches(model, micro_batches, tf.init_scope) as differences:
        concrete = private.concrete_function(traced, structure)
    stateless = flatten(concrete.graph)
    program = stateless.program
    _check_shapes(program)
    is_compiled = bool(model.jit_compile) or not target.is_live
    state = list(stateless.written.items())
    graph, numbers, handles = fused_graph(
        program,
        kinds_of(target),
        state,
        lambda e: "gradient_tape/" in f"{e.scope}/",
        like,
    )
    return CompiledStep(
        graph,
        handles,
        program=program,
        stateless=stateless,
        numbers=numbers,
        output_structure=without_graph(concrete.structured_outputs),
        variables=touched_variables(concrete.graph),
        target=target,
        function=concrete if is_compiled and not (target.is_live and target.on_gpu) else None,
        plain_is_compiled=is_compiled,
        differences=tuple(differences),
    )


def _check_shapes(program: FlatProgram) -> None:
    unknown = sorted(
        {
            e.kind
            for e in program.equations
            for o in e.outputs
            if program.shapes[o] is None and program.dtypes[o] != tf.variant
        }
    )
    if unknown:
        raise UnsupportedModelError(
            f"The shape of what {', '.join(unknown)} computes is not known, as XLA needs it."
        )
