"""The timeline keeps the live bytes of simulate; annealing improves, stays legal, and repeats
itself for a seed."""

from __future__ import annotations

import random

import pytest
from random_problems import mixed_problem

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.core.validate import check_rules, validate
from keras_remat.solvers.orders.timeline import Timeline
from keras_remat.solvers.search import anneal, greedy


@pytest.mark.parametrize("seed", range(120))
def test_timeline_equals_simulate_after_every_change(seed: int) -> None:
    problem = mixed_problem(seed)
    rng = random.Random(seed)
    needed = sorted(problem.graph.needed)
    again = [i for i in needed if problem.graph.ops[i].recomputable]
    line = Timeline(problem, needed)
    for _ in range(40):
        cell = rng.randrange(line.end)
        if line.op_at[cell] >= 0:
            line.remove(cell)
        elif again:
            line.insert(rng.choice(again), cell)
        schedule = Schedule(line.order())
        check_rules(problem, schedule)
        expected = live_bytes(problem, schedule)
        used = [at for at in range(line.end) if line.op_at[at] >= 0]
        assert line.live[used].tolist() == expected.tolist()
        assert line.live.max() == expected.max()
        assert line.time_s == pytest.approx(
            sum(problem.profile.op_time_s[i] for i in schedule.order)
        )


@pytest.mark.parametrize("seed", range(25))
def test_improvements_are_valid_and_faster(seed: int) -> None:
    problem = mixed_problem(seed)
    start = None
    for schedule in greedy.candidates(problem, deadline_s=float("inf")):
        start = schedule.order
    time_s = float("inf") if start is None else sum(problem.profile.op_time_s[i] for i in start)
    for order in anneal.improve(problem, start, deadline_s=float("inf"), seed=seed, max_rounds=1):
        validate(problem, Schedule(order))
        faster = sum(problem.profile.op_time_s[i] for i in order)
        assert faster < time_s
        time_s = faster


def test_the_same_seed_gives_the_same_orders() -> None:
    problem = mixed_problem(11, "training")
    first, second = (
        list(anneal.improve(problem, None, deadline_s=float("inf"), seed=3, max_rounds=2))
        for _ in range(2)
    )
    assert first == second


def test_reordering_saves_what_no_recomputation_can() -> None:
    """Two branches whose first values are both alive at once in the default order; run one after
    the other they fit."""
    reads: tuple[tuple[int, ...], ...] = ((), (), (0,), (1,), (2, 3))
    graph = Graph(
        tuple(Op(i, f"op{i}", "", reads[i], (i,), recomputable=False) for i in range(5)),
        tuple(Value(i, f"v{i}", (10, 10, 1, 1, 1)[i], producer=i) for i in range(5)),
        (4,),
    )
    problem = Problem(graph, Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=12)
    orders = list(anneal.improve(problem, None, deadline_s=float("inf"), max_rounds=4))
    assert orders
    validate(problem, Schedule(orders[-1]))
    assert len(orders[-1]) == 5
