"""Keras's whole JAX train step as a graph: forward, loss, backward, optimizer, metrics.

``jax.make_jaxpr(model.train_step)(state, data)`` on shapes alone, so nothing is allocated and the model's variables are not
touched. The jaxpr is flattened (:mod:`~keras_remat.backends.jax.flatten`) and cut into the clusters XLA will materialize
(:mod:`~keras_remat.backends.jax.fusion`); one cluster is one op of the graph. ``Op.kind`` is the name of the cluster's last primitive.

Three decisions that a reader of the graph should know:

* *State in, state out.* The new state is written over the donated old one, so a new-state value has 0 bytes here (its buffer is
  already among the resident bytes) and comes ``after`` every reader of what it overwrites. Where a reader itself depends on the new
  value the buffers cannot be shared, and the value is counted. So is a small one (a seed, a moving average): a few bytes are not worth
  forbidding every later copy of its readers, dropout among them.
* *Order.* Weight updates stand right behind their gradient, not at the end of the step as JAX writes them: gradients
  need not all live at once, and XLA's scheduler does the same.
* *Phases.* Backward is what JAX marks ``transpose(…)`` in its name stack; update is what depends on the backward phase and is
  needed by no backward equation; the rest (metrics, seeds, moving averages) is forward.

Every equation of a jaxpr is pure, random ones included (the seed is an input), so all of them may be recomputed except those with an
effect and those that write state.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_remat.backends.base import TracedStep
from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import FlatProgram, flatten, nbytes
from keras_remat.backends.jax.fusion import Cluster, clusters
from keras_remat.errors import UnsupportedModelError
from keras_remat.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Value

SMALL_STATE_BYTES = 16384
"""Below this a new-state value is counted like any other instead of being tied to the buffer of the old one."""


@dataclass(frozen=True)
class JaxTracedStep(TracedStep):
    """A traced Keras JAX train step.

    Args:
        program: the flat equations; ``handles[op.id]`` holds the indices of an op's equations in it.
        numbers: number in the program of every value of the graph (``numbers[value.id]``).
        state_specs: shapes and dtypes of the trainer's state.
        batch_specs: shapes and dtypes of the batch.
        in_tree: structure of ``(state, batch)``.
        out_tree: structure of ``(logs, state)``.
        model: whose ``train_step`` it is.
    """

    program: FlatProgram
    numbers: tuple[int, ...]
    state_specs: Any
    batch_specs: Any
    in_tree: Any
    out_tree: Any
    model: Any


def as_specs(batch: Any) -> Any:
    """Returns a batch of arrays or specs as specs with the dtypes JAX will use."""

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(spec, batch)


def check_supported(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` with the reason when the model's JAX step cannot be rematerialized."""
    if keras.config.is_nnx_enabled():
        raise UnsupportedModelError("Keras's NNX mode is on: its variables are no plain state of the train step.")
    if private.distribution() is not None:
        raise UnsupportedModelError(
            "A keras.distribution is active: the step would lose its sharding constraints. Train on one device, or without "
            "rematerialization."
        )
    if not getattr(model, "compiled", False):
        raise UnsupportedModelError("The model is not compiled: call model.compile(...) first.")
    if model.optimizer is None:
        raise UnsupportedModelError("The model has no optimizer: there is no train step to plan for.")
    if model.run_eagerly or not model.jit_compile:
        raise UnsupportedModelError(
            "The model runs without compilation (run_eagerly=True or jit_compile=False); there is no compiled step to plan for."
        )


def trace(model: Any, batch: Any, like: JaxTracedStep | None = None) -> JaxTracedStep:
    """Traces ``model.train_step`` for one batch shape, without running or allocating anything.

    Args:
        model: a compiled Keras model on the JAX backend. Unbuilt parts (model, optimizer, metrics) are built as ``fit`` would.
        batch: ``(x, y[, sample_weight])`` of arrays or ``jax.ShapeDtypeStruct``.
        like: the same step for another batch size, if its ops are wanted: which values exist depends on how sizes compare, and so differs a
            little from one batch size to another.

    Raises:
        UnsupportedModelError: not compiled, eager, or under a ``keras.distribution``.
    """
    check_supported(model)
    batch_specs = as_specs(batch)
    private.build(model, batch_specs)
    state_specs = private.state_specs(model)
    closed, out_shape = jax.make_jaxpr(model.train_step, return_shape=True)(state_specs, batch_specs)
    program = flatten(closed)
    n_state = len(jax.tree.leaves(state_specs))
    n_logs = len(jax.tree.leaves(out_shape[0]))
    same = like is not None and [e.kind for e in like.program.equations] == [e.kind for e in program.equations]
    sizes = [nbytes(aval) for aval in (like.program if like is not None and same else program).avals]
    graph, numbers, handles = _graph(program, n_state, n_logs, sizes)
    return JaxTracedStep(
        graph, handles, "jax",
        program=program, numbers=numbers, state_specs=state_specs, batch_specs=batch_specs,
        in_tree=jax.tree.structure((state_specs, batch_specs)), out_tree=jax.tree.structure(out_shape), model=model,
    )  # fmt: skip


def _graph(
    program: FlatProgram, n_state: int, n_logs: int, sizes: list[int]
) -> tuple[Graph, tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Returns the graph of a program, the program's number of every value, and the equations of every op."""
    parts = clusters(program, sizes)
    makers = {number: at for at, part in enumerate(parts) for number in part.outputs}
    phases = _phases(program, parts, makers)
    overwritten = _overwritten(program, parts, makers, n_state, n_logs)
    readers: dict[int, list[int]] = defaultdict(list)
    for at, part in enumerate(parts):
        for number in part.reads:
            readers[number].append(at)
    after = {makers[new]: [r for r in readers[old] if r != makers[new]] for new, old in overwritten.items()}
    order = _order(parts, makers, phases, after)
    if order is None:  # two states that each depend on the other's new value: neither can be overwritten in place
        overwritten, after = {}, {}
        order = _order(parts, makers, phases, after)
    assert order is not None, "a jaxpr is acyclic"

    n_given = program.n_inputs + len(program.constants)
    numbers = [*range(n_given), *(number for at in order for number in parts[at].outputs)]
    value_id = {number: at for at, number in enumerate(numbers)}
    op_id = {at: position for position, at in enumerate(order)}
    values = []
    for at, number in enumerate(numbers):
        aval = program.avals[number]
        producer = op_id[makers[number]] if number in makers else None
        size = 0 if number in overwritten else nbytes(aval)
        values.append(Value(at, f"v{number}", size, tuple(map(int, aval.shape)), str(aval.dtype), producer))
    ops, handles = [], {}
    for position, at in enumerate(order):
        part = parts[at]
        root = program.equations[part.equations[-1]]
        pure = not any(program.equations[e].has_effect for e in part.equations)
        ops.append(
            Op(
                position,
                f"{root.scope}/{root.kind}" if root.scope else root.kind,
                root.kind,
                tuple(value_id[n] for n in part.reads),
                tuple(value_id[n] for n in part.outputs),
                phases[at],
                pure and not any(n in overwritten for n in part.outputs),
                tuple(sorted(op_id[r] for r in after.get(at, ()))),
                tuple(value_id[n] for n in part.may_reuse),
            )
        )
        handles[position] = part.equations
    outputs = tuple(dict.fromkeys(value_id[a] for a in program.outputs if isinstance(a, int)))
    return Graph(tuple(ops), tuple(values), outputs), tuple(numbers), handles


def _phases(program: FlatProgram, parts: list[Cluster], makers: dict[int, int]) -> list[str]:
    """Phase of every cluster."""
    marked = ["transpose(" in program.equations[part.equations[-1]].scope for part in parts]
    downstream = list(marked)
    for at, part in enumerate(parts):
        downstream[at] = downstream[at] or any(n in makers and downstream[makers[n]] for n in part.reads)
    feeds_backward = list(marked)
    for at in range(len(parts) - 1, -1, -1):
        if feeds_backward[at]:
            for n in parts[at].reads:
                if n in makers:
                    feeds_backward[makers[n]] = True
    return [
        FORWARD if not below else BACKWARD if mark or feeds else UPDATE
        for mark, below, feeds in zip(marked, downstream, feeds_backward, strict=True)
    ]


def _overwritten(
    program: FlatProgram, parts: list[Cluster], makers: dict[int, int], n_state: int, n_logs: int
) -> dict[int, int]:
    """New-state numbers that take over the buffer of an old-state input, with that input."""
    consumers: dict[int, list[int]] = defaultdict(list)
    for at, part in enumerate(parts):
        for number in part.reads:
            consumers[number].append(at)
    result: dict[int, int] = {}
    for old, new in enumerate(program.outputs[n_logs : n_logs + n_state]):
        if not isinstance(new, int) or new not in makers or new in result:
            continue
        a, b = program.avals[old], program.avals[new]
        same = a.shape == b.shape and a.dtype == b.dtype and nbytes(a) >= SMALL_STATE_BYTES
        late = {r for r in consumers[old] if r > makers[new]}
        if same and not late & _descendants(makers[new], parts, consumers, until=max(late, default=-1)):
            result[new] = old
    return result


def _descendants(at: int, parts: list[Cluster], consumers: dict[int, list[int]], until: int) -> set[int]:
    """Clusters up to ``until`` that depend on cluster ``at``."""
    seen: set[int] = set()
    stack = [at]
    while stack:
        for number in parts[stack.pop()].outputs:
            fresh = {c for c in consumers[number] if c <= until} - seen
            seen |= fresh
            stack.extend(fresh)
    return seen


def _order(parts: list[Cluster], makers: dict[int, int], phases: list[str], after: dict[int, list[int]]) -> list[int] | None:
    """A topological order, as JAX wrote it but with updates as early as they can run; ``None`` when there is a cycle."""
    waiting = [0] * len(parts)
    unlocks: dict[int, list[int]] = defaultdict(list)
    for at, part in enumerate(parts):
        needs = {makers[n] for n in part.reads if n in makers} | set(after.get(at, ()))
        waiting[at] = len(needs)
        for need in needs:
            unlocks[need].append(at)
    ready = [((phases[at] != UPDATE), at) for at in range(len(parts)) if not waiting[at]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        at = heapq.heappop(ready)[1]
        order.append(at)
        for follower in unlocks[at]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (phases[follower] != UPDATE, follower))
    return order if len(order) == len(parts) else None
