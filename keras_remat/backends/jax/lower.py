"""A schedule as one compiled step: :mod:`keras_remat.backends.xla.protect` on JAX, and Keras's own
step beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from keras_remat.backends.jax import absent_device, private
from keras_remat.backends.jax.kinds import CONVOLUTION, kinds_of
from keras_remat.backends.jax.measure import memory
from keras_remat.backends.jax.sharding import mesh_of
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.jax.writer import writer_of
from keras_remat.backends.xla.fused_graph import SMALL_STATE_BYTES
from keras_remat.backends.xla.holding import waits_for_updates
from keras_remat.backends.xla.protect import Run, Writing
from keras_remat.core.graph import UPDATE
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Target


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


@dataclass(frozen=True)
class Written:
    """Holds a compiled step.

    Args:
        step: a ``jax.stages.Compiled``.
        ways: in which it was written, the quickest first; this one takes least of them.
    """

    step: Any
    ways: tuple[Writing, ...] = ()

    @property
    def added_bytes(self) -> int:
        """Returns what it takes beside its arguments."""
        return memory(self.step).added_bytes


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
        room_bytes: what it may add to the resident bytes; ``None`` for no limit.
        known: the same, compiled for another limit.
    """
    ways = _ways(traced, schedule)
    found = known or Written(lower(traced, schedule, ways[0]), ways[:1])
    for writing in ways[ways.index(found.ways[-1]) + 1 :]:
        over_bytes = 0 if room_bytes is None else found.added_bytes - room_bytes
        if over_bytes <= 0:
            break
        if writing is Writing.UPDATED and over_bytes > _dense_state_bytes(traced):
            continue
        other = Written(lower(traced, schedule, writing))
        least = min(found, other, key=lambda written: written.added_bytes)
        found = replace(least, ways=(*found.ways, writing))
    return found


def _ways(traced: JaxTracedStep, schedule: Schedule) -> tuple[Writing, ...]:
    """Returns how a schedule may be written where the step will run, the quickest way first; not
    loosely where gradients that wait for their updates would take more than all that is left."""
    if not traced.target.on_gpu:
        return (Writing.STRICT,)
    shapes = {traced.program.avals[at].shape for at in _dense_state(traced)}
    updates = {
        op.id
        for op in traced.graph.ops
        if op.phase == UPDATE
        if any(traced.program.avals[traced.numbers[v]].shape in shapes for v in op.outputs)
    }
    waits = waits_for_updates(traced.graph, schedule.order, updates)
    return tuple(Writing)[waits:]


def _dense_state(traced: JaxTracedStep) -> list[int]:
    """Returns numbers of large weights and optimizer slots, kernels of convolutions left out."""
    program, n_state = traced.program, len(jax.tree.leaves(traced.state_specs))
    convolutions = (e for e in program.equations if e.kind == CONVOLUTION)
    kernels = {program.avals[e.reads[-1]].shape for e in convolutions}
    large = (at for at in range(n_state) if program.sizes[at] >= SMALL_STATE_BYTES)
    return [at for at in large if program.avals[at].shape not in kernels]


def _dense_state_bytes(traced: JaxTracedStep) -> int:
    """Returns bytes of weights and optimizer slots, kernels of convolutions left out: no more is
    held by updates that are put off. (ResNet50's plan for 0.7 takes no less with early ones.)"""
    return sum(traced.program.sizes[at] for at in _dense_state(traced))


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
    """Compiles what was traced without a schedule (the model's own train step, as Keras would): the
    baseline."""
    return written_plain(traced)()


def written_plain(traced: JaxTracedStep) -> Callable[[], Any]:
    """Writes the same down; what is returned compiles it, in any thread."""
    return _written(traced.train_step, traced.state_specs, traced.batch_specs, traced.target)


def compile_step(
    step: Callable[[Any, Any], Any],
    state_specs: Any,
    batch_specs: Any,
    target: Target | None = None,
) -> Any:
    """Compiles ``(state, batch) → (logs, state)`` with the state donated, as Keras does; for the
    device on which it will run, or a card that is not there."""
    return _written(step, state_specs, batch_specs, target)()


def _written(
    step: Callable[[Any, Any], Any],
    state_specs: Any,
    batch_specs: Any,
    target: Target | None,
) -> Callable[[], Any]:
    """Writes a step down, which is JAX's own time; what is returned is the compiler's."""
    if target is not None and not target.is_live:
        compiler, card = absent_device.compiler(), target
        compiler.begin()
        module = private.bytecode(absent_device.lowered(step, state_specs, batch_specs))
        return lambda: compiler.compiled(module, card)
    out = None
    if mesh_of(state_specs) is not None:  # the new state lies as the old one, as Keras asks for
        out = (None, jax.tree.map(lambda x: x.sharding, state_specs))
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state_specs, batch_specs)

    def compiled() -> Any:
        return lowered.compile()

    return compiled
