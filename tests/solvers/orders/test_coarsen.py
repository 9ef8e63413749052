"""Coarse problems expand to legal orders of everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from random_problems import mixed_problem, seeds

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.solvers.orders import coarsen
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.timeline import Timeline
from keras_remat.solvers.search import greedy


def coarse_problem(seed: int) -> coarsen.Coarse:
    problem = mixed_problem(seed)
    base = base_orders(problem)[0 if seed % 2 else -1]
    return coarsen.Coarse(problem, base, random.Random(seed).randint(1, 9))


@pytest.mark.parametrize("seed", seeds(200, 50))
def test_the_base_order_comes_back(seed: int) -> None:
    coarse = coarse_problem(seed)
    identity = tuple(range(len(coarse.ops)))
    check_rules(coarse.problem, Schedule(identity))
    assert coarse.expand(identity) == coarse.base
    assert coarse.project(coarse.base) == identity


@pytest.mark.parametrize("seed", seeds(200, 50))
def test_changed_orders_expand_to_legal_ones(seed: int) -> None:
    """Random legal changes of the coarse order: runs added, moved and taken away."""
    coarse = coarse_problem(seed)
    if not coarse.ops:
        return
    rng = random.Random(seed)
    line = Timeline(coarse.problem, range(len(coarse.ops)), compiled=False)
    for _ in range(60):
        op_id, cell = rng.randrange(len(coarse.ops)), rng.randrange(line.end)
        old = next(cell for cell, run in enumerate(line.op_at) if run == op_id)
        if line.kernel.insert(*line.state, op_id, cell) and (
            rng.random() < 0.5 or not coarse.problem.graph.ops[op_id].recomputable
        ):
            assert line.kernel.remove(*line.state, old) or line.kernel.remove(*line.state, cell)
    order = line.order()
    check_rules(coarse.problem, Schedule(order))
    full = coarse.expand(order)
    check_rules(coarse.full, Schedule(full))
    assert coarse.project(full) == order


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_threshold_one_loses_nothing(seed: int) -> None:
    """With no small values the coarse peak is the full one."""
    problem = mixed_problem(seed)
    coarse = coarsen.Coarse(problem, Schedule.store_all(problem.graph).order, 1)
    for order in greedy.candidates(coarse.problem, deadline=Deadline(float("inf"))):
        full, part = Schedule(coarse.expand(order)), Schedule(order)
        assert simulate(problem, full).peak_bytes <= simulate(coarse.problem, part).peak_bytes


def test_small_values_stay_below_their_share() -> None:
    problem = mixed_problem(5, "training").with_budget(10**6)
    base = Schedule.store_all(problem.graph).order
    threshold = coarsen.small_value_threshold(problem, base)
    assert coarsen.small_peak(problem, base, threshold) <= coarsen.SMALL_SHARE * 10**6


@pytest.mark.parametrize("seed", seeds(100, 25))
def test_small_values_are_counted_as_if_the_others_had_no_bytes(seed: int) -> None:
    problem = mixed_problem(seed)
    graph, costs = problem.graph, problem.profile
    base = Schedule.store_all(graph)
    for threshold in range(1, 11):
        values = tuple(v if v.nbytes < threshold else replace(v, nbytes=0) for v in graph.values)
        small = replace(
            problem,
            graph=replace(graph, values=values),
            profile=replace(costs, op_workspace_bytes=(0,) * len(graph.ops), resident_bytes=0),
        )
        assert (
            coarsen.small_peak(problem, base.order, threshold) == simulate(small, base).peak_bytes
        )


def test_thresholds_are_compared_without_a_new_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mixed_problem(5, "training").with_budget(10**6)
    base = Schedule.store_all(problem.graph).order
    monkeypatch.setattr(Graph, "__post_init__", lambda graph: pytest.fail("a new graph"))
    assert coarsen.small_value_threshold(problem, base) > 1


@pytest.mark.parametrize("seed", seeds(20, 5))
def test_what_is_resident_does_not_decide_what_is_small(seed: int) -> None:
    problem = mixed_problem(seed, "training").with_budget(300)
    base = Schedule.store_all(problem.graph).order
    weights = 10**6
    costs = replace(problem.profile, resident_bytes=problem.profile.resident_bytes + weights)
    heavier = replace(problem, profile=costs, budget_bytes=300 + weights)
    threshold = coarsen.small_value_threshold(problem, base)
    assert coarsen.small_value_threshold(heavier, base) == threshold
