"""Fetches in place of recomputations: never slower, never more bytes, and only true claims."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from random_problems import chain_problem, mixed_problem, with_budget_fraction
from random_schedules import forget, random_schedule

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.offload import Offload
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import SOLVERS, solve
from keras_remat.solvers.orders.fetch import with_fetches


def test_it_is_never_slower_and_never_needs_more() -> None:
    changed = 0
    for seed in range(300):
        rng = random.Random(seed)
        offload = Offload(rng.choice([1.0, 4.0, math.inf]), rng.choice([0.0, 0.5]))
        problem = replace(mixed_problem(seed, budget=False), offload=offload)
        before = random_schedule(rng, problem.graph, recompute=0.4)
        after = Schedule(with_fetches(problem, before.order))
        check_rules(problem, after)
        old, new = simulate(problem, before), simulate(problem, after)
        assert new.time_s <= old.time_s + 1e-9
        assert new.peak_bytes <= old.peak_bytes
        changed += before != after
    assert changed > 100


def test_a_chain_of_recomputations_becomes_one_fetch() -> None:
    """Every single run is cheaper than its fetch, all of them together are not."""
    reads = ((), (0,), (1,), (2,), (2, 3))
    graph = Graph(
        tuple(Op(i, f"op{i}", "", reads[i], (i,)) for i in range(5)),
        tuple(Value(i, f"v{i}", 1, producer=i) for i in range(5)),
        (4,),
    )
    problem = Problem(graph, Profile((1.0,) * 5, (0,) * 5, 0), offload=Offload(1.0, latency_s=0.5))
    assert with_fetches(problem, (0, 1, 2, 3, 0, 1, 2, 4)) == (0, 1, 2, 3, 7, 4)


def test_without_a_second_memory_nothing_changes() -> None:
    problem = chain_problem(6)
    order = forget(problem.graph).order
    assert with_fetches(problem, order) == order


@pytest.mark.parametrize("solver", ["chen_sqrt_n", "dtr", "chain_dp", "griewank"])
def test_solvers_that_know_nothing_of_it_gain(solver: str) -> None:
    plain = with_budget_fraction(chain_problem(12), 0.6)
    free = replace(plain, offload=Offload(math.inf))
    without, found = (solve(each, solver=solver) for each in (plain, free))
    assert without.usage is not None
    assert found.usage is not None
    assert found.usage.time_s == plain.store_all_time_s < without.usage.time_s
    assert found.lower_bound_s == plain.store_all_time_s


@pytest.mark.parametrize("solver", ["backward", "auto"])
def test_what_is_proved_of_recomputation_alone_is_not_claimed(solver: str) -> None:
    """The chain cannot be recomputed at all; fetched it fits."""
    plain = chain_problem(6)
    graph = replace(
        plain.graph, ops=tuple(replace(op, recomputable=False) for op in plain.graph.ops)
    )
    problem: Problem = replace(plain, graph=graph, budget_bytes=plain.floor_bytes + 1)
    problem = replace(problem, offload=Offload(1.0))
    if solver == "backward":
        with pytest.raises(ScheduleNotFoundError):
            SOLVERS[solver](problem, time_limit_s=2.0, seed=0, progress=None)
    else:
        assert solve(problem, solver=solver, time_limit_s=2.0).usage is not None
