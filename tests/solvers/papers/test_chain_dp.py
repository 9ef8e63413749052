"""The chain program: its table tells the truth, and nothing persistent beats it."""

import random
from functools import cache

import numpy as np
import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.orders.linearize import Linearized
from keras_remat.solvers.papers.chain_dp import Stages, Table, action_order
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction


def table_of(problem: Problem, units: int) -> Table:
    linear = Linearized(problem)
    return Table(Stages(linear, linear.articulation_cuts), 1, units)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_table_says_is_what_the_simulator_finds(seed: int) -> None:
    problem = chain_problem(12, rng=random.Random(seed))
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    table = table_of(problem, peak)
    feasible = 0
    for units in range(peak + 1):
        cost = table.cost[0, -1, units]
        if np.isfinite(cost):
            feasible += 1
            usage = simulate(
                problem, Schedule(tuple(action_order(table.stages, table.actions(units))))
            )
            assert usage.time_s == pytest.approx(cost)
            assert usage.peak_bytes <= units
    assert feasible > 5
    assert np.all(np.diff(table.cost[0, -1][np.isfinite(table.cost[0, -1])]) <= 0)


@pytest.mark.parametrize("seed", range(4))
def test_beaumont_2019_theorem_1_recursion(seed: int) -> None:
    """The vectorized table equals theorem 1 written down as a recursion."""
    problem = chain_problem(7, rng=random.Random(seed))
    units = 60
    table = table_of(problem, units)
    stages = table.stages
    forward = [stages.seconds(ops) for ops in stages.forward]
    both = [f + stages.seconds(ops) for f, ops in zip(forward, stages.backward, strict=True)]
    w, saved, delta = map(stages.sizes, (stages.output, stages.saved, stages.gradients))

    @cache
    def cost(s: int, t: int, m: int) -> float:
        if m < 0:
            return float("inf")
        all_need = max(stages.forward_all_peak[s] + delta[t], stages.backward_peak[s])
        if s == t:
            return both[s] if m >= all_need else float("inf")
        best = float("inf")
        if m >= all_need:
            best = both[s] + cost(s + 1, t, m - saved[s])
        need = max([w[s]] + [w[j - 1] + w[j] for j in range(s + 1, t)]) + delta[t]
        if m >= need:
            for kept in range(s + 1, t + 1):
                best = min(
                    best,
                    sum(forward[s:kept]) + cost(kept, t, m - w[kept - 1]) + cost(s, kept - 1, m),
                )
        return best

    for m in range(units + 1):
        assert table.cost[0, -1, m] == pytest.approx(
            cost(0, 6, m)
        )  # both infinite when nothing fits


@pytest.mark.parametrize("seed", range(5))
def test_never_slower_than_segments_or_revolve_on_chains(seed: int) -> None:
    base = chain_problem(16, rng=random.Random(seed))
    for fraction in (0.8, 0.6, 0.5, 0.4):
        problem = with_budget_fraction(base, fraction)
        best = solve(problem, solver="chain_dp").usage
        assert best is not None
        for other in ("chen_sqrt_n", "chen_greedy", "griewank"):
            try:
                usage = solve(problem, solver=other).usage
            except ScheduleNotFoundError:
                continue
            assert usage is not None
            assert best.time_s <= usage.time_s


def test_reaches_the_floor_of_a_uniform_chain() -> None:
    problem = chain_problem(20).with_budget(4)
    assert problem.floor_bytes == 4
    usage = solve(problem, solver="chain_dp").usage
    assert usage is not None
    assert usage.peak_bytes == 4


def test_finds_nothing_when_branches_run_in_parallel() -> None:
    reads = [(), (), (0,), (1,), (2,), (3,), (4, 5), (6, 0, 1, 2, 3)]
    phases = ["forward"] * 7 + ["backward"]
    graph = Graph(
        tuple(Op(i, f"o{i}", "", r, (i,), phases[i]) for i, r in enumerate(reads)),
        tuple(Value(i, "", 5, producer=i) for i in range(8)), (7,),
    )  # fmt: skip
    problem = Problem(graph, Profile((1.0,) * 8, (0,) * 8, 0), 30)
    linear = Linearized(problem)
    assert linear.articulation_cuts == (0,)
    with pytest.raises(ScheduleNotFoundError):
        solve(problem, solver="chain_dp")


def test_every_plan_is_legal_on_any_graph_with_cuts() -> None:
    checked = 0
    for seed in range(60):
        problem = mixed_problem(seed, ("training", "chain", "u_shape")[seed % 3], budget=False)
        linear = Linearized(problem)
        if linear.articulation_cuts and linear.comes_first:
            peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
            table = table_of(problem, peak)
            for units in range(0, peak + 1, 5):
                if np.isfinite(table.cost[0, -1, units]):
                    checked += 1
                    check_rules(
                        problem, Schedule(tuple(action_order(table.stages, table.actions(units))))
                    )
    assert checked > 100
