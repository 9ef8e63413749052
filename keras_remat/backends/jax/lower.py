"""A schedule as one compiled step: the equations in the schedule's order, recomputations protected from the compiler.

XLA reads dependencies, not order. The first run of every op is written down as it is; a repeated op must (a) not be merged with its
first run and (b) not start before its turn. Both are had by one data dependency (:mod:`~keras_remat.backends.jax.guard`) on what the
step had computed by then: the *trigger*, one element of each value that the ops since the last recomputation left behind.

As few guards as that needs:

* an equation whose input already depends on the current trigger needs none;
* an equation with a small result needs none: merged or early, it costs nothing;
* a view needs none, its reader gets it;
* else the cheapest input is guarded: a scalar literal, a bias, a kernel, before an activation.

The backward phase is guarded in one more way, whatever the schedule: what it computes from forward values alone, and the small values
it spreads over large ones, are kept apart from the forward phase. The graph says that a value inside a chain does not exist; merged
with an equal one of the forward phase it would exist from there to here.

On CPU an op that draws random numbers becomes the branch of a condition (:meth:`_Run._random` says why).

Equal equations on equal inputs are written once, so a chain that stands in several clusters does not blow the program up.

XLA decides the order inside these bounds. What it makes of the plan is measured (:mod:`~keras_remat.backends.jax.measure`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import Equation, nbytes
from keras_remat.backends.jax.fusion import ELEMENTWISE, RANDOM, VIEWS
from keras_remat.backends.jax.guard import guard, never
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.schedule import Schedule

SMALL_RESULT_BYTES = 16384
"""An equation with a smaller result is not guarded: keeping it costs no more than this."""

MAX_TRIGGERS = 6
"""Most values a trigger is made of; the newest are taken."""


STALE_OPS = 8
"""A spread bias makes do with a trigger that is this many ops old."""


class _Run:
    """One symbolic execution of a schedule."""

    def __init__(self, traced: JaxTracedStep, given: Sequence[Any]):
        self._program = traced.program
        self._graph = traced.graph
        self._handles = traced.handles
        self._numbers = traced.numbers
        self._env: dict[int, Any] = dict(enumerate(given))
        self._written: dict[Any, tuple[tuple[Any, ...], list[Any]]] = {}
        self._ran: set[int] = set()
        batch = range(len(jax.tree.leaves(traced.state_specs)), traced.program.n_inputs)
        self._early = set(range(len(given))) - set(batch)  # numbers that need nothing of the batch
        self._since: list[int] = []  # ops that ran for the first time since the last trigger
        self._condition: Any = None
        self._guards: dict[int, tuple[Any, Any]] = {}
        self._current: set[int] = set()  # ids of values that depend on the newest trigger
        self._late: set[int] = set()  # ids of values that depend on any trigger of the backward phase
        self._held: list[Any] = []  # values whose ids are in the sets above stay alive, so that no id is used twice
        self._condition_phase = FORWARD
        self._conditional_random = jax.default_backend() == "cpu"

    def op(self, op_id: int) -> None:
        """Runs one position of the order."""
        op = self._graph.ops[op_id]
        again = op_id in self._ran
        early = all(self._numbers[v] in self._early for v in op.inputs)
        if any(self._program.equations[at].kind in RANDOM for at in self._handles[op_id]) and self._conditional_random:
            results = self._random(op_id)
        else:
            results = self._chain(op_id, again)
        for value_id in op.outputs:
            number = self._numbers[value_id]
            self._env[number] = results[number]
            if early:
                self._early.add(number)
        if not again:
            self._ran.add(op_id)
            if op.phase != UPDATE and not early:
                self._since.append(op_id)

    def _chain(self, op_id: int, again: bool) -> dict[int, Any]:
        """Runs the equations of one op, protected where they run for the second time."""
        phase = self._graph.ops[op_id].phase
        inner: dict[int, Any] = {}
        for at in self._handles[op_id]:
            equation = self._program.equations[at]
            inputs = self._inputs(equation, inner)
            if self._guardable(equation):
                if again and not any(id(x) in self._current for x in inputs):
                    self._guard_cheapest(equation, inputs)
                elif not again and phase == BACKWARD:
                    self._keep_from_forward(equation, inputs)
            outputs = self._run(at, equation, inputs)
            inner.update(zip(equation.outputs, outputs, strict=True))
        return inner

    def _inputs(self, equation: Equation, inner: dict[int, Any]) -> list[Any]:
        return [a.val if isinstance(a, private.Literal) else inner[a] if a in inner else self._env[a] for a in equation.inputs]

    def _random(self, op_id: int) -> dict[int, Any]:
        """Runs an op that draws random numbers, as the branch of a condition that always takes it.

        XLA:CPU starts every random loop of a step at its very beginning, since it reads nothing but seeds, and rather keeps the random
        bits for the backward phase than the mask made of them, four times as much. It does neither across the border of a branch; and the
        condition, which is the newest trigger, protects a recomputation as a guard does.
        """
        op = self._graph.ops[op_id]
        numbers = [self._numbers[v] for v in op.inputs]
        operands = [self._env[n] for n in numbers]
        if self._since:
            self._new_trigger()
        condition = never(operands) if self._condition is None else self._condition

        def draw(*given: Any) -> list[Any]:
            inner: dict[int, Any] = dict(zip(numbers, given, strict=True))
            for at in self._handles[op_id]:
                equation = self._program.equations[at]
                inner.update(zip(equation.outputs, private.bind(equation.source, self._inputs(equation, inner)), strict=True))
            return [inner[self._numbers[v]] for v in op.outputs]

        def nothing(*given: Any) -> list[Any]:
            return [lax.full_like(x, 0) for x in jax.eval_shape(draw, *given)]

        results = lax.cond(condition, nothing, draw, *operands)
        self._current.update(map(id, results))
        if op.phase != FORWARD or op_id in self._ran:
            self._late.update(map(id, results))
        self._held.extend(results)
        return dict(zip((self._numbers[v] for v in op.outputs), results, strict=True))

    def output(self, atom: Any) -> Any:
        """Returns the value of one program output."""
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, private.Literal) else self._env[atom]

    def _run(self, at: int, equation: Equation, inputs: list[Any]) -> list[Any]:
        """Writes an equation down, or finds it written for the same inputs."""
        key = (at, *(None if isinstance(a, private.Literal) and x is a.val else id(x)
                     for a, x in zip(equation.inputs, inputs, strict=True)))  # fmt: skip
        if key not in self._written:
            with jax.named_scope(equation.scope):
                self._written[key] = (tuple(inputs), private.bind(equation.source, inputs))
        outputs = self._written[key][1]
        for known in (self._current, self._late):
            if any(id(x) in known for x in inputs):
                known.update(map(id, outputs))
        return outputs

    def _guardable(self, equation: Equation) -> bool:
        """Whether it matters if an equation is merged with another or starts early."""
        large = sum(nbytes(self._program.avals[o]) for o in equation.outputs) >= SMALL_RESULT_BYTES
        return large and bool(equation.reads) and equation.kind not in VIEWS

    def _keep_from_forward(self, equation: Equation, inputs: list[Any]) -> None:
        """Makes an equation of the backward phase share nothing large with the forward phase.

        One that reads forward values only is guarded. Of another, the small values it spreads over its result are: a bias or scale is
        spread in the forward phase too, and merged, the full-size copy would live from the one phase to the other.
        """
        if not any(id(x) in self._late for x in inputs):
            self._guard_cheapest(equation, inputs)
        elif equation.kind in ELEMENTWISE:
            size = nbytes(self._program.avals[equation.outputs[0]])
            for at, atom in enumerate(equation.inputs):
                if isinstance(atom, int) and nbytes(self._program.avals[atom]) * 8 <= size and id(inputs[at]) not in self._late:
                    self._guard_input(equation, inputs, at, stale_ops=STALE_OPS)

    def _guard_cheapest(self, equation: Equation, inputs: list[Any]) -> None:
        """Replaces the cheapest input by its guarded self."""

        def cost(at: int) -> tuple[bool, int]:
            atom = equation.inputs[at]
            if isinstance(atom, private.Literal):
                return False, nbytes(atom.aval)
            return not jnp.issubdtype(inputs[at].dtype, jnp.inexact), nbytes(self._program.avals[atom])

        literals = equation.kind in ELEMENTWISE
        usable = [at for at, atom in enumerate(equation.inputs) if literals or isinstance(atom, int)]
        self._guard_input(equation, inputs, min(usable, key=cost))

    def _guard_input(self, equation: Equation, inputs: list[Any], at: int, stale_ops: int = 1) -> None:
        """Replaces one input by its guarded self; the trigger may be almost ``stale_ops`` ops old."""
        if self._since and (self._condition is None or self._condition_phase == FORWARD or len(self._since) >= stale_ops):
            self._new_trigger()
        if self._condition is None:  # nothing has run yet: nothing to merge with, nothing to wait for
            return
        atom = equation.inputs[at]
        if isinstance(atom, private.Literal):
            original, key = jnp.asarray(atom.val, atom.aval.dtype), id(atom)
        else:
            original, key = inputs[at], id(inputs[at])
        if key not in self._guards:
            self._guards[key] = (original, guard(original, self._condition))
            self._held.append(self._guards[key])
        inputs[at] = self._guards[key][1]
        self._current.add(id(inputs[at]))
        self._late.add(id(inputs[at]))

    def _new_trigger(self) -> None:
        """Makes the newest results that nothing has read yet the condition of the recomputations that follow."""
        read = {v for op_id in self._since for v in self._graph.ops[op_id].inputs}
        left = [
            self._env[self._numbers[v]]
            for op_id in self._since
            for v in self._graph.ops[op_id].outputs
            if v not in read and self._graph.values[v].nbytes > 0
        ]
        if left:
            self._condition = never(left[-MAX_TRIGGERS:])
            self._condition_phase = self._graph.ops[self._since[-1]].phase
            self._guards, self._current = {}, set()
        self._since = []


def step_function(traced: JaxTracedStep, schedule: Schedule) -> Callable[[Any, Any], Any]:
    """Returns ``(state, batch) → (logs, state)`` that runs a schedule; traceable, not compiled."""
    program = traced.program

    def remat_step(state: Any, batch: Any) -> Any:
        leaves, tree = jax.tree.flatten((state, batch))
        if tree != traced.in_tree:
            raise TypeError(f"the step was traced for arguments {traced.in_tree}, and was called with {tree}")
        run = _Run(traced, [*leaves, *program.constants])
        for op_id in schedule.order:
            run.op(op_id)
        return jax.tree.unflatten(traced.out_tree, [run.output(a) for a in program.outputs])

    return remat_step


def lower(traced: JaxTracedStep, schedule: Schedule) -> Any:
    """Compiles a schedule.

    Args:
        traced: from :func:`~keras_remat.backends.jax.trace.trace`.
        schedule: a legal order for ``traced.graph``.

    Returns:
        A ``jax.stages.Compiled`` of ``(state, batch) → (logs, state)`` for the traced shapes; the state is donated.
    """
    return compile_step(step_function(traced, schedule), traced.state_specs, traced.batch_specs)


def lower_plain(traced: JaxTracedStep) -> Any:
    """Compiles the model's own train step for the traced shapes, as Keras would: the baseline."""
    return compile_step(traced.model.train_step, traced.state_specs, traced.batch_specs)


def compile_step(step: Callable[[Any, Any], Any], state_specs: Any, batch_specs: Any) -> Any:
    """Compiles ``(state, batch) → (logs, state)`` with the state donated, as Keras does."""
    return jax.jit(step, donate_argnums=0).lower(state_specs, batch_specs).compile()
