"""Orders with the same runs and less waste, on an allocator that punishes the distance between an
op and its reader."""

import random

import pytest
from fake_backend import FakeBackend
from random_problems import PLAIN, training_problem

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.planning import defragment as compaction
from keras_remat.planning.defragment import compacted


def pairs(n=6):
    """``n`` independent pairs of ops; the default order runs all first halves first."""
    ops = tuple(Op(i, f"op{i}", "x", () if i < n else (i - n,), (i,)) for i in range(2 * n))
    unit = compaction._SMALL_BYTES
    values = tuple(Value(i, f"v{i}", 4 * unit if i < n else unit, producer=i) for i in range(2 * n))
    return Problem(
        Graph(ops, values, tuple(range(n, 2 * n))), Profile((1.0,) * 2 * n, (0,) * 2 * n, 1000)
    )


def test_stops_at_the_budget_with_the_same_runs():
    problem = pairs()
    start = Schedule.store_all(problem.graph)
    budget = simulate(problem, start).peak_bytes * 7 // 10
    found = compacted(problem, start, budget, FakeBackend(), time_limit_s=5.0)
    validate(problem.with_budget(budget), found)
    assert sorted(found.order) == sorted(start.order)


def test_same_seed_same_order():
    problem = pairs()
    start = Schedule.store_all(problem.graph)
    one, two = (
        compacted(problem, start, 1, FakeBackend(), time_limit_s=0.05, seed=7) for _ in range(2)
    )
    assert simulate(problem, one).peak_bytes <= simulate(problem, start).peak_bytes
    assert sorted(one.order) == sorted(two.order)


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_back_is_legal_and_not_worse(seed, monkeypatch):
    monkeypatch.setattr(compaction, "_SMALL_BYTES", 1)
    problem = training_problem(random.Random(seed), 9, PLAIN)
    start = Schedule.store_all(problem.graph)
    found = compacted(problem, start, 1, FakeBackend(), time_limit_s=0.05, seed=seed)
    validate(problem, found)
    assert simulate(problem, found).peak_bytes <= simulate(problem, start).peak_bytes
