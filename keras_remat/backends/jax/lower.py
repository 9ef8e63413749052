"""Compiles a schedule as one step, by :mod:`keras_remat.backends.xla.protect`; also Keras's own
step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from keras_remat.backends.jax import absent_device, private
from keras_remat.backends.jax.kinds import CONVOLUTION, copied_operands, kinds_of
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.jax.sharding import mesh_of
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.jax.writer import writer_of
from keras_remat.backends.xla.protect import Run
from keras_remat.backends.xla.ways import Ways, Written
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Target
from keras_remat.core.writing import Writing


def step_function(
    traced: JaxTracedStep, schedule: Schedule, writing: Writing = Writing.STRICT
) -> Callable[[Any, Any], Any]:
    """Returns ``(state, batch) → (logs, state)`` that runs a schedule; traceable, not compiled.

    Args:
        traced: the step.
        schedule: a legal order for ``traced.graph``.
        writing: see :mod:`keras_remat.backends.xla.protect`.
    """
    program, n_state = traced.program, len(jax.tree.leaves(traced.state_specs))

    def remat_step(state: Any, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten((state, batch))
        if tree != traced.in_tree:
            raise TypeError(
                f"the step was traced for arguments {traced.in_tree}, and was called with {tree}"
            )
        given = [*leaves, *program.constants]
        early = set(range(len(given))) - set(range(n_state, program.n_inputs))
        writer = writer_of(traced)
        writer.given(given)
        run = Run(traced, kinds_of(traced.target), writer, given, early, writing=writing)
        run.order(schedule.order)
        logs, new_state = jax.tree.unflatten(
            traced.out_tree, [run.output(a) for a in program.outputs]
        )
        return logs, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(new_state))

    return remat_step


def lower_within(
    traced: JaxTracedStep,
    schedule: Schedule,
    room_bytes: int | None,
    known: Written | None = None,
) -> Written:
    """Compiles a schedule in the quickest way that keeps to a limit, else in the one that takes
    least.

    Args:
        traced: from :func:`~keras_remat.backends.jax.trace.trace`.
        schedule: a legal order for ``traced.graph``.
        room_bytes: bytes it may add to the resident ones; ``None`` for no limit.
        known: the schedule as compiled for another limit.
    """

    def write(writing: Writing) -> Written:
        return written(lower(traced, schedule, writing), writing)

    return ways_of(traced).within(schedule, write, room_bytes, known)


def written(step: Any, writing: Writing | None = None) -> Written:
    """Returns a ``jax.stages.Compiled`` with the bytes it takes."""
    return Written(step, added_bytes(step), writing)


def ways_of(traced: JaxTracedStep) -> Ways:
    """Returns the ways in which schedules of a step may be written where it will run."""
    state = range(len(jax.tree.leaves(traced.state_specs)))
    copied = {
        equation.inputs[at]
        for equation in traced.program.equations
        for at in copied_operands(equation, traced.target)
    }
    return Ways(traced, traced.target.on_gpu, state, {CONVOLUTION}, copied)


def lower(traced: JaxTracedStep, schedule: Schedule, writing: Writing = Writing.STRICT) -> Any:
    """Compiles a schedule.

    Args:
        traced: from :func:`~keras_remat.backends.jax.trace.trace`.
        schedule: a legal order for ``traced.graph``.
        writing: see :mod:`keras_remat.backends.xla.protect`.

    Returns:
        A ``jax.stages.Compiled`` of ``(state, batch) → (logs, state)`` for the traced shapes; the
        state is donated.
    """
    step = step_function(traced, schedule, writing)
    return compile_step(step, traced.state_specs, traced.batch_specs, traced.target)


def lower_plain(traced: JaxTracedStep) -> Any:
    """Compiles the traced step without a schedule, as Keras would: the baseline."""
    return written_plain(traced)()


def written_plain(traced: JaxTracedStep) -> Callable[[], Any]:
    """Writes the traced step down without a schedule. Returns a function that compiles it, in any
    thread."""
    return _written(traced.train_step, traced.state_specs, traced.batch_specs, traced.target)


def compile_step(
    step: Callable[[Any, Any], Any],
    state_specs: Any,
    batch_specs: Any,
    target: Target | None = None,
) -> Any:
    """Compiles ``(state, batch) → (logs, state)`` with the state donated, as Keras does. It is
    compiled for the device on which it will run, or for a card that is not there."""
    return _written(step, state_specs, batch_specs, target)()


def _written(
    step: Callable[[Any, Any], Any],
    state_specs: Any,
    batch_specs: Any,
    target: Target | None,
) -> Callable[[], Any]:
    """Writes a step down, which takes JAX's time. Returns a function that compiles it, which takes
    the compiler's."""
    if target is not None and not target.is_live:
        compiler, card = absent_device.compiler(), target
        compiler.begin()
        module = private.bytecode(absent_device.lowered(step, state_specs, batch_specs))
        return lambda: compiler.compiled(module, card)
    out = None
    if mesh_of(state_specs) is not None:  # the new state lies like the old one, as in Keras
        out = (None, jax.tree.map(lambda x: x.sharding, state_specs))
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state_specs, batch_specs)
    compiled: Callable[[], Any] = lowered.compile
    return compiled
