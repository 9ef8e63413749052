"""The memory-aware order: legal, without recomputation, no worse than the order it is made of, and
what it is for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from graph_builder import Builder
from random_problems import mixed_problem, seeds, training_problem, with_budget_fraction

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.topology import predecessors
from keras_remat.core.validate import check_rules
from keras_remat.solvers.orders import reorder
from keras_remat.solvers.orders.reorder import base_orders

# ------------------------------------------------------------------ what it promises


def shuffled(problem: Problem, seed: int) -> Problem:
    """The needed ops in another default order: each after what it must follow, otherwise as the
    seed has it."""
    rng, order = random.Random(seed), list[int]()
    graph, profile = problem.graph, problem.profile
    waiting = {i: predecessors(graph, i) for i in graph.needed}
    while waiting:
        ready = sorted(i for i, before in waiting.items() if before <= set(order))
        order.append(rng.choice(ready))
        del waiting[order[-1]]
    now = {op_id: at for at, op_id in enumerate(order)}
    ops = [
        replace(op, id=now[op.id], after=tuple(now[i] for i in op.after if i in now))
        for op in (graph.ops[i] for i in order)
    ]
    values = [replace(v, producer=now.get(v.producer)) for v in graph.values]  # type: ignore[arg-type]
    costs = replace(
        profile,
        op_time_s=tuple(profile.op_time_s[i] for i in order),
        op_workspace_bytes=tuple(profile.op_workspace_bytes[i] for i in order),
    )
    return replace(problem, graph=Graph(tuple(ops), tuple(values), graph.outputs), profile=costs)


def memory_aware(problem: Problem) -> tuple[int, ...]:
    return base_orders(problem)[0]


def over_budget(problem: Problem, order: tuple[int, ...]) -> tuple[float, int]:
    """Bytes over the budget times seconds, and the peak."""
    live = live_bytes(problem, Schedule(order)).tolist()
    budget = max(live, default=0) if problem.budget_bytes is None else problem.budget_bytes
    times = (problem.profile.op_time_s[i] for i in order)
    over = (max(0, at - budget) * time_s for at, time_s in zip(live, times, strict=True))
    return sum(over), max(live, default=0)


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("seed", seeds(100, 40))
def test_it_is_legal_and_runs_every_op_once(seed: int, default: bool) -> None:
    problem = mixed_problem(seed) if default else shuffled(mixed_problem(seed), seed)
    order = memory_aware(problem)
    check_rules(problem, Schedule(order))
    assert sorted(order) == sorted(problem.graph.needed)


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("seed", seeds(100, 40))
def test_without_a_budget_its_peak_is_no_higher(seed: int, default: bool) -> None:
    problem = mixed_problem(seed, budget=False)
    if not default:
        problem = shuffled(problem, seed)
    order, base = Schedule(memory_aware(problem)), Schedule.store_all(problem.graph)
    assert simulate(problem, order).peak_bytes <= simulate(problem, base).peak_bytes


@pytest.mark.parametrize("seed", seeds(100, 40))
def test_it_is_no_further_over_the_budget(seed: int) -> None:
    problem = mixed_problem(seed)
    base = Schedule.store_all(problem.graph).order
    assert over_budget(problem, memory_aware(problem)) <= over_budget(problem, base)


def test_it_often_has_a_lower_peak() -> None:
    lower = 0
    for seed in range(100):
        problem = shuffled(mixed_problem(seed, "training", budget=False), seed)
        base = Schedule.store_all(problem.graph).order
        lower += over_budget(problem, memory_aware(problem))[1] < over_budget(problem, base)[1]
    assert lower > 20


def test_the_order_of_nothing_is_empty() -> None:
    problem = Problem(Graph((), (), ()), Profile((), (), 0))
    assert base_orders(problem) == ((),)


def test_the_base_orders_are_the_memory_aware_one_and_the_default_one() -> None:
    problem = updates_at_the_end(8)
    base = Schedule.store_all(problem.graph).order
    first, second = base_orders(problem)
    assert second == base
    assert over_budget(problem, first) < over_budget(problem, base)


def test_an_op_is_examined_again_only_where_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = with_budget_fraction(training_problem(random.Random(1), 600), 0.5)
    examined: list[int] = []
    examine = reorder._Hoist._shrinking_cluster

    def counted(hoist: reorder._Hoist, first: int, longest: int) -> list[int]:
        examined.append(first)
        return examine(hoist, first, longest)

    monkeypatch.setattr(reorder._Hoist, "_shrinking_cluster", counted)
    memory_aware(problem)
    assert len(examined) < 12 * len(problem.graph.ops), len(examined) / len(problem.graph.ops)


def test_an_op_that_must_follow_another_waits_for_it() -> None:
    """The update would free the gradient at once, but a reader of the old weight comes first."""
    graph = Graph(
        (
            Op(0, "gradient", "", (), (0,)),
            Op(1, "other", "", (), (1,)),
            Op(2, "reader", "", (1,), (2,)),
            Op(3, "update", "", (0,), (), recomputable=False, after=(2,)),
        ),
        tuple(Value(i, f"v{i}", 10, producer=i) for i in range(3)),
        (2,),
    )
    problem = Problem(graph, Profile((1.0,) * 4, (0,) * 4, 0))
    order = memory_aware(problem)
    assert order.index(3) > order.index(2)
    assert order.index(0) > order.index(2), "nothing is gained by an early gradient"


# ------------------------------------------------------------------ what it is for


def updates_at_the_end(layers: int) -> Problem:
    """Gradients 0..layers-1, each 10 bytes and read by its own update (no output), all updates at
    the end."""
    gradients = [Op(i, f"g{i}", "Grad", (i - 1,) if i else (), (i,)) for i in range(layers)]
    updates = [
        Op(layers + i, f"u{i}", "Assign", (i,), (), recomputable=False, after=(i,))
        for i in range(layers)
    ]
    values = tuple(Value(i, f"g{i}", 10, producer=i) for i in range(layers))
    return Problem(
        Graph((*gradients, *updates), values, ()),
        Profile((1.0,) * 2 * layers, (0,) * 2 * layers, 0),
    )


def test_updates_follow_their_gradients() -> None:
    problem = updates_at_the_end(8)
    order = memory_aware(problem)
    check_rules(problem, Schedule(order))
    assert simulate(problem, Schedule.store_all(problem.graph)).peak_bytes == 80
    assert simulate(problem, Schedule(order)).peak_bytes == 20


@pytest.mark.parametrize("momentum", [False, True])
def test_updates_run_early_though_they_read_a_value_computed_late(momentum: bool) -> None:
    """The learning rate is read once per weight, after everything; each update takes its read
    along, and so the momentum times its decay."""
    weights = 4
    builder = Builder()
    add = builder.add
    chain = add("x", 10)
    gradients = []
    for _ in range(weights):
        chain = add("backward", 10, (chain,))
        gradients.append(add("gradient", 100, (chain,)))
    for gradient in gradients:
        rate = add("rate", 1)
        scaled = add("scaled", 100, (gradient, rate), may_reuse=(gradient,))
        if momentum:
            decayed = add("decayed", 100)
            scaled = add("slot", 100, (scaled, decayed), may_reuse=(scaled, decayed))
        add("assign", 0, (scaled,), recomputable=False)
    problem = builder.problem((chain,))
    before = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    after = simulate(problem, Schedule(memory_aware(problem))).peak_bytes
    assert before > 400
    assert after < (350 if momentum else 250)


def test_many_quick_updates_do_not_keep_the_order_as_it_is() -> None:
    """Updates that run early are many ops where much is alive; what counts is how long that
    lasts."""
    builder = Builder()
    chain = builder.add("x", 100)
    activations = [chain := builder.add("forward", 100, (chain,)) for _ in range(4)]
    gradients = []
    for activation in reversed(activations):
        chain = builder.add("backward", 100, (chain, activation))
        gradients.append(builder.add("gradient", 30, (chain,)))
    quick = len(builder.ops)
    for gradient in gradients:
        for _ in range(10):
            gradient = builder.add("scaled", 30, (gradient,))
        builder.add("assign", 0, (gradient,), recomputable=False)
    problem = builder.problem((chain,), 250, (1.0,) * quick + (1e-6,) * (len(builder.ops) - quick))
    order = memory_aware(problem)
    assert order.index(gradients[-1]) > max(order.index(i) for i in range(quick, quick + 11))


def test_a_reduction_runs_at_once_and_an_expansion_late() -> None:
    builder = Builder()
    gradient = builder.add("gradient", 100)
    spread = builder.add("spread", 100)
    other = builder.add("to input", 100, (gradient,))
    small = builder.add("to weight", 5, (gradient,))
    result = builder.add("sum", 100, (other, spread))
    problem = builder.problem((small, result), 250)
    assert memory_aware(problem) == (gradient, small, other, spread, result)
