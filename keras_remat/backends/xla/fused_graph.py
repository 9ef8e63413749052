"""Turns a compiled train step into a graph of the values XLA will put into memory.

The step is a flat program, compiled as one. It is cut into clusters
(:mod:`keras_remat.backends.xla.fusion`); one cluster is one op. ``Op.kind`` is the kind of its last
equation.

Three decisions that a reader of the graph should know:

* *State in, state out.* The new state is written over the donated old one. So a new-state value has
  0 bytes here (its buffer is already among the resident bytes) and comes ``after`` every reader of
  the state it overwrites. If such a reader itself depends on the new value, the buffers cannot be
  shared and the value is counted. A small new-state value (a seed, a moving average) is counted,
  too: a few bytes are not worth forbidding every later copy of its readers, dropout among them.
* *Order.* Weight updates stand right behind their gradient, not at the end of the step as they were
  traced. So gradients need not all live at once, and XLA's scheduler does the same. Effects keep
  the order in which they were traced.
* *Phases.* An equation is backward if the framework marks it as such. It is update if it depends on
  the backward phase and no backward equation needs it. All others (metrics, seeds, moving averages)
  are forward.

All equations may be recomputed except those with an effect and those that write state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from keras_remat.backends.base import TracedStep
from keras_remat.backends.xla.fusion import Cluster, Equation, Kinds, Program, clusters
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Value
from keras_remat.core.topology import topological_order

SMALL_STATE_BYTES = 16384
"""Below this a new-state value is counted like any other instead of being tied to the buffer of the
old one."""


@dataclass(frozen=True, eq=False)
class FusedStep(TracedStep):
    """Holds a traced step whose ops are clusters; ``handles[op.id]`` holds the indices of an op's
    equations in the program.

    Args:
        program: the flat equations.
        numbers: number in the program of every value of the graph (``numbers[value.id]``).
    """

    program: Any
    numbers: tuple[int, ...]


def fused_graph(
    program: Program,
    kinds: Kinds,
    state: Sequence[tuple[int, Any]],
    is_backward: Callable[[Equation], bool],
    like: FusedStep | None = None,
    copied: Collection[int] = (),
    along: Collection[int] = (),
) -> tuple[Graph, tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Returns the graph of a program, the program's number of every value, and the equations of
    every op.

    Args:
        program: the whole step.
        kinds: the framework's names.
        state: the number of each state input, and its new value among the program's outputs.
        is_backward: whether an equation was traced by differentiation.
        like: the same step for another batch size, if its ops are wanted: which values exist
            depends on how sizes compare, and so differs a little from one batch size to another.
        copied, along: see :func:`~keras_remat.backends.xla.fusion.clusters`.
    """
    is_same = like is not None and _kinds(like.program) == _kinds(program)
    sizes = like.program.sizes if like is not None and is_same else None
    parts = clusters(program, kinds, sizes, copied, along)
    makers = {number: at for at, part in enumerate(parts) for number in part.outputs}
    phases = _phases(program, parts, is_backward)
    order, after, overwritten = _arranged(program, parts, makers, phases, state)
    numbers = [*range(program.n_given), *(number for at in order for number in parts[at].outputs)]
    value_id = {number: at for at, number in enumerate(numbers)}
    op_id = {at: position for position, at in enumerate(order)}
    values = []
    for at, number in enumerate(numbers):
        shape, dtype = program.describe(number)
        producer = op_id[makers[number]] if number in makers else None
        size = 0 if number in overwritten else program.sizes[number]
        values.append(Value(at, f"v{number}", size, shape, dtype, producer))
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


def _kinds(program: Program) -> list[str]:
    return [equation.kind for equation in program.equations]


def _phases(
    program: Program, parts: list[Cluster], is_backward: Callable[[Equation], bool]
) -> list[str]:
    """Returns the phase of every cluster."""
    marked = [is_backward(equation) for equation in program.equations]
    downstream: set[int] = set()
    for equation, mark in zip(program.equations, marked, strict=True):
        if not equation.separates and (mark or not downstream.isdisjoint(equation.reads)):
            downstream.update(equation.outputs)
    feeds_backward: set[int] = set()
    for equation, mark in zip(reversed(program.equations), reversed(marked), strict=True):
        if not equation.separates and (mark or not feeds_backward.isdisjoint(equation.outputs)):
            feeds_backward.update(equation.reads)
    phases = []
    for part in parts:
        root = part.equations[-1]
        outputs = program.equations[root].outputs or part.reads
        below, feeds = not downstream.isdisjoint(outputs), not feeds_backward.isdisjoint(outputs)
        phases.append(FORWARD if not below else BACKWARD if marked[root] or feeds else UPDATE)
    return phases


def _arranged(
    program: Program,
    parts: list[Cluster],
    makers: dict[int, int],
    phases: list[str],
    state: Sequence[tuple[int, Any]],
) -> tuple[list[int], dict[int, list[int]], dict[int, int]]:
    """Returns an order in which the clusters can run; per cluster, those that must precede it
    although it reads none of their values; and per new state, the old state that it overwrites."""
    readers: dict[int, list[int]] = defaultdict(list)
    for at, part in enumerate(parts):
        for number in part.reads:
            readers[number].append(at)
    with_effect = [
        at for at, part in enumerate(parts) if program.equations[part.equations[-1]].has_effect
    ]
    effects = {later: [earlier] for earlier, later in pairwise(with_effect)}
    overwritten = _overwritten(program, parts, makers, readers, state)
    after = {
        makers[new]: [r for r in readers[old] if r != makers[new]]
        for new, old in overwritten.items()
    }
    after |= {at: [*after.get(at, ()), *earlier] for at, earlier in effects.items()}
    order = _order(parts, makers, phases, after)
    if len(order) == len(parts):
        return order, after, overwritten
    # two states that each depend on the other's new value: neither can be overwritten in place
    return _order(parts, makers, phases, effects), effects, {}


def _overwritten(
    program: Program,
    parts: list[Cluster],
    makers: dict[int, int],
    readers: dict[int, list[int]],
    state: Sequence[tuple[int, Any]],
) -> dict[int, int]:
    """Returns new-state number → number of the old-state input whose buffer it takes over."""
    result: dict[int, int] = {}
    for old, new in state:
        if not isinstance(new, int) or new not in makers or new in result:
            continue
        same = (
            program.describe(old) == program.describe(new)
            and program.sizes[old] >= SMALL_STATE_BYTES
        )
        late = {r for r in readers[old] if r > makers[new]}
        if same and not late & _descendants(
            makers[new], parts, readers, until=max(late, default=-1)
        ):
            result[new] = old
    return result


def _descendants(
    at: int, parts: list[Cluster], readers: dict[int, list[int]], until: int
) -> set[int]:
    """Returns the clusters up to ``until`` that depend on cluster ``at``."""
    seen: set[int] = set()
    stack = [at]
    while stack:
        for number in parts[stack.pop()].outputs:
            fresh = {c for c in readers[number] if c <= until} - seen
            seen |= fresh
            stack.extend(fresh)
    return seen


def _order(
    parts: list[Cluster], makers: dict[int, int], phases: list[str], after: dict[int, list[int]]
) -> list[int]:
    """Returns a topological order: as traced, but with updates as early as they can run. Clusters
    in a cycle are left out."""
    before = {
        at: {makers[n] for n in part.reads if n in makers} | set(after.get(at, ()))
        for at, part in enumerate(parts)
    }
    return topological_order(before, lambda at: phases[at] != UPDATE)
