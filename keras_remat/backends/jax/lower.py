"""A schedule as one compiled step: :mod:`keras_remat.backends.xla.protect` on JAX, and Keras's own
step beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from keras_remat.backends.jax import private
from keras_remat.backends.jax.barrier import guard, never
from keras_remat.backends.jax.flatten import FlatProgram, nbytes
from keras_remat.backends.jax.kinds import KINDS, POOLING_PIECES, in_pieces
from keras_remat.backends.jax.sharding import Layout, mesh_of
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.xla.protect import Run
from keras_remat.core.schedule import Schedule


class _Writer:
    """JAX as :class:`keras_remat.backends.xla.protect.Writer`: values are tracers or arrays."""

    def __init__(self, program: FlatProgram):
        self._program = program
        self.uses_branches = jax.default_backend() == "cpu"

    def given(self, values: Sequence[Any]) -> None:
        """Takes the step's inputs and constants, by number."""

    def may_trigger(self, number: int) -> bool:
        return True

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        equation = self._program.equations[at]
        with jax.named_scope(equation.scope):
            if self.uses_branches and in_pieces(equation.source):
                return _bind_in_pieces(equation.source, inputs)
            return private.bind(equation.source, inputs)

    def literal(self, atom: Any) -> Any:
        return atom.val

    def array(self, atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype)

    def literal_bytes(self, atom: Any) -> int:
        return nbytes(atom.aval)

    def is_inexact(self, value: Any) -> bool:
        return bool(jnp.issubdtype(value.dtype, jnp.inexact))

    def may_guard(self, equation: Any, value: Any) -> bool:
        return True

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        return never(triggers, in_branch)

    def guard(self, value: Any, condition: Any) -> Any:
        return guard(value, condition)

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        def draw(*operands: Any) -> list[Any]:
            inner: dict[int, Any] = dict(zip(given, operands, strict=True))
            for at in equations:
                equation = self._program.equations[at]
                inputs = [inner[a] if isinstance(a, int) else a.val for a in equation.inputs]
                inner.update(
                    zip(equation.outputs, private.bind(equation.source, inputs), strict=True)
                )
            return [inner[number] for number in wanted]

        def nothing(*operands: Any) -> list[Any]:
            return [lax.full_like(x, 0) for x in jax.eval_shape(draw, *operands)]

        return list(lax.cond(condition, nothing, draw, *given.values()))


class _ShardedWriter(_Writer):
    """The same on several devices: each reads its own part of a trigger and guards its own part of
    a value, so that none waits for another.

    A guard's condition is an array with one element per device. Nothing is written in branches,
    because a branch would have to be taken on all devices at once.
    """

    def __init__(self, traced: JaxTracedStep):
        super().__init__(traced.program)
        self.uses_branches = False
        self._mesh, self._layouts = traced.mesh, traced.layouts
        self._everywhere = PartitionSpec(tuple(traced.mesh.axis_names))
        self._known: dict[int, tuple[Any, Layout]] = {}  # by the value's id, which stays alive

    def may_trigger(self, number: int) -> bool:
        """What every device has a part of. To wait for what they add up together would keep XLA
        from adding all of it up at once."""
        return any(self._layouts[number])

    def given(self, values: Sequence[Any]) -> None:
        self._known.update((id(v), (v, self._layouts[at])) for at, v in enumerate(values))

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        results = super().write(at, inputs)
        for number, value in zip(self._program.equations[at].outputs, results, strict=True):
            self._known[id(value)] = value, self._layouts[number]
        return results

    def _partition(self, value: Any) -> PartitionSpec:
        known = self._known.get(id(value))
        return PartitionSpec() if known is None else PartitionSpec(*known[1])

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        parts = tuple(map(self._partition, triggers))
        return self._on_each(lambda *local: never(local)[None], parts, self._everywhere)(*triggers)

    def guard(self, value: Any, condition: Any) -> Any:
        part = self._partition(value)
        guarded = self._on_each(
            lambda local, own: guard(local, own[0]), (part, self._everywhere), part
        )(value, condition)
        self._known[id(guarded)] = guarded, self._known.get(id(value), (None, tuple(part)))[1]
        return guarded

    def _on_each(self, run: Callable[..., Any], parts: Any, result: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self._mesh, in_specs=parts, out_specs=result, check_vma=False
        )
        return mapped


def _bind_in_pieces(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs an equation that treats samples alike on a part of them after the other."""
    parts = [x.reshape(POOLING_PIECES, -1, *x.shape[1:]) for x in inputs]
    results = lax.map(lambda part: private.bind(eqn, part), parts)
    return [x.reshape(-1, *x.shape[2:]) for x in results]


def step_function(traced: JaxTracedStep, schedule: Schedule) -> Callable[[Any, Any], Any]:
    """Returns ``(state, batch) → (logs, state)`` that runs a schedule; traceable, not compiled."""
    program, n_state = traced.program, len(jax.tree.leaves(traced.state_specs))

    def remat_step(state: Any, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten((state, batch))
        if tree != traced.in_tree:
            raise TypeError(
                f"the step was traced for arguments {traced.in_tree}, and was called with {tree}"
            )
        given = [*leaves, *program.constants]
        early = set(range(len(given))) - set(range(n_state, program.n_inputs))
        writer = _Writer(program) if traced.mesh is None else _ShardedWriter(traced)
        writer.given(given)
        run = Run(traced, KINDS, writer, given, early)
        for op_id in schedule.order:
            run.op(op_id)
        return jax.tree.unflatten(traced.out_tree, [run.output(a) for a in program.outputs])

    return remat_step


def lower(
    traced: JaxTracedStep, schedule: Schedule, options: Mapping[str, Any] | None = None
) -> Any:
    """Compiles a schedule.

    Args:
        traced: from :func:`~keras_remat.backends.jax.trace.trace`.
        schedule: a legal order for ``traced.graph``.
        options: for the compiler.

    Returns:
        A ``jax.stages.Compiled`` of ``(state, batch) → (logs, state)`` for the traced shapes; the
        state is donated.
    """
    step = step_function(traced, schedule)
    return compile_step(step, traced.state_specs, traced.batch_specs, options)


def lower_plain(traced: JaxTracedStep, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles what was traced without a schedule (the model's own train step, as Keras would): the
    baseline."""
    return compile_step(traced.train_step, traced.state_specs, traced.batch_specs, options)


def compile_step(
    step: Callable[[Any, Any], Any],
    state_specs: Any,
    batch_specs: Any,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles ``(state, batch) → (logs, state)`` with the state donated, as Keras does."""
    out = None
    if mesh_of(state_specs) is not None:  # the new state lies as the old one, as Keras asks for
        out = (None, jax.tree.map(lambda x: x.sharding, state_specs))
    lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(state_specs, batch_specs)
    return lowered.compile(compiler_options=dict(options) if options else None)
