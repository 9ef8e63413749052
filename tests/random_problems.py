"""Random problems for property tests: chains, U-shapes, layered graphs and training graphs, plain
or with every feature.

Every generator takes a ``random.Random``, so a failing case is named by its seed. Shapes only say
which op reads which earlier op (``reads[i]``); :func:`build` turns them into a problem and adds the
features asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import SliceRule, Slicing, sliced_graph


def seeds(count: int, quick: int) -> list[Any]:
    """Parameters of a test of random problems: all but the first few are slow tests."""
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, count))
    return [*range(quick), *slow]


@dataclass(frozen=True)
class Features:
    """What a random problem may contain beyond ops with one output each."""

    multi_outputs: bool = False
    workspace: bool = False
    resident: bool = False
    may_reuse: bool = False
    after: bool = False
    non_recomputable: bool = False
    step_inputs: bool = False
    unneeded_ops: bool = False


PLAIN = Features()
EVERYTHING = Features(**{field.name: True for field in fields(Features)})


def random_features(rng: random.Random) -> Features:
    """Each feature on or off with even odds."""
    return Features(**{field.name: rng.random() < 0.5 for field in fields(Features)})


def build(
    rng: random.Random,
    reads: Sequence[Sequence[int]],
    features: Features = PLAIN,
    *,
    phases: Sequence[str] | None = None,
    max_bytes: int = 9,
    max_time: int = 5,
    outputs: Sequence[int] | None = None,
    name: str = "",
) -> Problem:
    """A problem without a budget.

    Args:
        rng: source of bytes, times and features.
        reads: for every op the earlier ops it reads from.
        features: what to add.
        phases: phase per op; all ``"forward"`` when missing.
        max_bytes: values get 1 to this many bytes.
        max_time: ops take 1 to this many seconds.
        outputs: ops whose first output is a graph output; the ops nobody reads when missing (one of
            them with ``unneeded_ops``).
        name: name of the problem.
    """
    values: list[Value] = []
    made: list[list[int]] = []
    step_inputs = 0
    if features.step_inputs:
        step_inputs = rng.randint(1, 3)
        values += [Value(i, f"w{i}", rng.randint(1, max_bytes)) for i in range(step_inputs)]
    read_ops = {p for sources in reads for p in sources}
    ops: list[Op] = []
    for i, sources in enumerate(reads):
        inputs = [rng.choice(made[p]) for p in sources]
        if features.step_inputs and rng.random() < 0.4:
            inputs.append(rng.randrange(step_inputs))
        produced = []
        for _ in range(rng.choice((1, 1, 2, 3)) if features.multi_outputs else 1):
            values.append(
                Value(len(values), f"v{i}.{len(produced)}", rng.randint(1, max_bytes), producer=i)
            )
            produced.append(values[-1].id)
        made.append(produced)
        activations = [v for v in dict.fromkeys(inputs) if v >= step_inputs]
        may_reuse = tuple(v for v in activations if features.may_reuse and rng.random() < 0.5)
        earlier = [j for j in range(i) if j not in sources]
        after = (rng.choice(earlier),) if features.after and earlier and rng.random() < 0.2 else ()
        recomputable = not (features.non_recomputable and rng.random() < 0.2)
        ops.append(
            Op(
                i,
                f"op{i}",
                "Random",
                tuple(inputs),
                tuple(produced),
                phases[i] if phases else "forward",
                recomputable,
                after,
                may_reuse,
            )
        )
    if outputs is None:
        leaves = [i for i in range(len(reads)) if i not in read_ops]
        outputs = [rng.choice(leaves)] if features.unneeded_ops else leaves
    if features.may_reuse:  # takeovers need equal sizes, so make them likely
        values = [
            Value(v.id, v.name, rng.choice((2, 4)), producer=v.producer)
            if rng.random() < 0.7
            else v
            for v in values
        ]
    profile = Profile(
        tuple(float(rng.randint(1, max_time)) for _ in ops),
        tuple(
            rng.choice((0, 0, rng.randint(1, max_bytes))) if features.workspace else 0 for _ in ops
        ),
        rng.randint(1, 20) if features.resident else 0,
    )
    graph = Graph(tuple(ops), tuple(values), tuple(made[i][0] for i in outputs))
    return Problem(graph, profile, name=name)


def with_random_budget(rng: random.Random, problem: Problem) -> Problem:
    """The same problem with a budget between its floor and its store-all peak, both included."""
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    return problem.with_budget(max(1, rng.randint(problem.floor_bytes, peak)))


def with_budget_fraction(problem: Problem, fraction: float) -> Problem:
    """The same problem with a budget of ``fraction`` of the store-all peak, but not below the
    floor."""
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    return problem.with_budget(max(problem.floor_bytes, int(peak * fraction)))


def random_problem(
    rng: random.Random, max_ops: int = 7, features: Features = PLAIN, *, max_reads: int = 3
) -> Problem:
    """Any directed acyclic graph of 1 to ``max_ops`` ops."""
    n = rng.randint(1, max_ops)
    reads = [
        sorted(rng.sample(range(i), rng.randint(0 if i == 0 else 1, min(i, max_reads))))
        for i in range(n)
    ]
    return build(rng, reads, features, name=f"random{n}")


def chain_problem(
    n: int, *, nbytes: int = 1, time_s: float = 1.0, rng: random.Random | None = None
) -> Problem:
    """A training chain: ``n`` forward ops, then ``n`` backward ops, each reading the gradient
    before it and what its forward op read and computed. Uniform, or with random bytes and times
    when ``rng`` is given."""
    size = (lambda: rng.randint(1, 9)) if rng else (lambda: nbytes)
    seconds = (lambda: float(rng.randint(1, 5))) if rng else (lambda: time_s)
    ops, values = [], []
    for i in range(n):
        ops.append(Op(i, f"f{i}", "Forward", (i - 1,) if i else (), (i,), "forward"))
    for i in range(n):
        layer = n - 1 - i
        inputs = [n + i - 1] if i else []
        inputs += [layer - 1, layer] if layer else [layer]
        ops.append(Op(n + i, f"b{layer}", "Backward", tuple(inputs), (n + i,), "backward"))
    values = [Value(i, f"x{i}", size(), producer=i) for i in range(2 * n)]
    profile = Profile(tuple(seconds() for _ in ops), (0,) * len(ops), 0)
    return Problem(Graph(tuple(ops), tuple(values), (2 * n - 1,)), profile, name=f"chain{n}")


def u_shape_problem(rng: random.Random, depth: int, features: Features = PLAIN) -> Problem:
    """Down ``depth`` ops and up again, each op on the way up also reading its partner on the way
    down."""
    reads: list[list[int]] = [[i - 1] if i else [] for i in range(depth)]
    reads += [sorted({depth - 1 + i, depth - 1 - i}) for i in range(depth)]
    return build(rng, reads, features, name=f"u{depth}")


def layered_problem(
    rng: random.Random, layers: int, width: int, features: Features = PLAIN
) -> Problem:
    """Layers of 1 to ``width`` ops, each reading up to three ops of the layer before and now and
    then one further back."""
    reads: list[list[int]] = []
    previous: list[int] = []
    for _ in range(layers):
        layer = list(range(len(reads), len(reads) + rng.randint(1, width)))
        for _ in layer:
            sources = set(rng.sample(previous, min(len(previous), rng.randint(1, 3))))
            if previous and rng.random() < 0.15:
                sources.add(rng.randrange(layer[0]))
            reads.append(sorted(sources))
        previous = layer
    return build(rng, reads, features, name=f"layered{layers}x{width}")


def training_problem(
    rng: random.Random, forward_ops: int = 6, features: Features = PLAIN, *, chain: bool = False
) -> Problem:
    """A random forward graph and its mirror: the backward op of ``i`` reads the gradients of
    ``i``'s readers, the values ``i`` read, and now and then the value ``i`` computed. The outputs
    are the gradients of the ops that read no other op, and the loss."""
    n = forward_ops
    reads = [[i - 1] if i else [] for i in range(n)]
    if not chain:
        reads = [sorted(rng.sample(range(i), min(i, rng.choice((1, 1, 2))))) for i in range(n)]
        for i in range(n - 1):  # everything leads to the loss, so that it has a gradient
            if not any(i in r for r in reads[i + 1 :]):
                reads[i + 1] = sorted({*reads[i + 1], i})
    everything = [list(r) for r in reads]
    gradient: dict[int, int] = {}
    for i in reversed(range(n)):
        sources = {gradient[j] for j in range(i + 1, n) if i in reads[j]} | set(reads[i])
        if rng.random() < 0.5 or not sources:
            sources.add(i)
        gradient[i] = len(everything)
        everything.append(sorted(sources))
    phases = ["forward"] * n + ["backward"] * n
    outputs = sorted({n - 1, *(gradient[i] for i in range(n) if not reads[i])})
    return build(rng, everything, features, phases=phases, outputs=outputs, name=f"training{n}")


SHAPES: dict[str, Callable[[random.Random, Features], Problem]] = {
    "random": lambda rng, features: random_problem(rng, 12, features),
    "chain": lambda rng, features: training_problem(rng, rng.randint(2, 10), features, chain=True),
    "u_shape": lambda rng, features: u_shape_problem(rng, rng.randint(2, 6), features),
    "layered": lambda rng, features: layered_problem(rng, rng.randint(2, 5), 3, features),
    "training": lambda rng, features: training_problem(rng, rng.randint(2, 9), features),
}


def mixed_problem(seed: int, shape: str | None = None, *, budget: bool = True) -> Problem:
    """The problem a seed stands for: a shape (any when missing), random features, and a random
    budget unless told not to."""
    rng = random.Random(seed)
    problem = SHAPES[shape or rng.choice(sorted(SHAPES))](rng, random_features(rng))
    return with_random_budget(rng, problem) if budget else problem


def two_branches() -> Problem:
    """Two branches that fit the budget one after the other; in the default order the large values
    of both are alive at once."""
    reads: tuple[tuple[int, ...], ...] = ((), (), (0,), (1,), (2, 3))
    graph = Graph(
        tuple(Op(i, f"op{i}", "", reads[i], (i,), recomputable=False) for i in range(5)),
        tuple(Value(i, f"v{i}", (10, 10, 1, 1, 1)[i], producer=i) for i in range(5)),
        (4,),
    )
    return Problem(graph, Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=12)


def normalized_in_slices(layers: int, parts: int, nbytes: int = 64) -> tuple[Problem, int]:
    """Layers that normalize over the batch, in slices: each reads a sum over what the one before
    makes, forward and backward. Returns the problem, and the floor of its whole ops."""
    ops: list[Op] = []
    values, rules = [Value(0, "x", nbytes)], {}

    def add(name: str, read: tuple[int, ...], whole: tuple[int, ...], is_sum: bool) -> int:
        value = Value(len(values), name, 1 if is_sum else nbytes, producer=len(ops))
        rules[len(ops)] = SliceRule(
            frozenset(read), frozenset(whole), frozenset({value.id} if is_sum else ()), divides=64
        )
        ops.append(Op(len(ops), name, name, (*read, *whole), (value.id,)))
        values.append(value)
        return value.id

    made, sums, outputs = [0], [], []
    for at in range(layers):
        made.append(add(f"y_{at}", (made[-1],), tuple(sums[-1:]), is_sum=False))
        sums.append(add(f"s_{at}", (made[-1],), (), is_sum=True))
    gradient = add("loss", (made[-1],), (sums[-1],), is_sum=False)
    for at in reversed(range(layers)):
        read = gradient, made[at + 1]
        outputs.append(add(f"t_{at}", read, (sums[at],), is_sum=True))
        gradient = add(f"g_{at}", read, (sums[at], outputs[-1]), is_sum=False)
    graph = Graph(tuple(ops), tuple(values), tuple(outputs))
    sliced = sliced_graph(graph, rules, Slicing(tuple(rules), parts)).graph
    whole, costs = (
        Problem(of, Profile((1.0,) * len(of.ops), (0,) * len(of.ops), nbytes))
        for of in (graph, sliced)
    )
    return costs, whole.floor_bytes
