"""Greedy eviction: the theorem of the paper, its seven scores, and the union-find."""

import random
from dataclasses import replace

import pytest

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.solvers import solve
from keras_remat.solvers.papers.dtr import planned_order
from keras_remat.solvers.papers.eviction_scores import SCORES, Neighbourhood
from tests.random_problems import SHAPES, chain_problem, mixed_problem, with_budget_fraction


def plan(problem: Problem, score: str, budget_bytes: int, seed: int = 0) -> list[int] | None:
    return planned_order(problem, score, budget_bytes, seed, Deadline(60.0))


@pytest.mark.parametrize("n", [16, 64, 256, 400])
def test_kirisame_2021_theorem_3_1_chain_in_linear_runs_with_sqrt_budget(n: int) -> None:
    """An N-op chain trains in O(N) op runs with a budget of c · √N."""
    problem = chain_problem(n)
    budget = 3 * round(n**0.5) + 3
    order = plan(problem, "dtr", budget)
    assert order is not None
    assert len(order) <= 2 * (2 * n)
    assert simulate(problem, Schedule(tuple(order))).peak_bytes <= budget
    if n <= 64:
        assert len(solve(problem.with_budget(budget), solver="dtr").schedule) <= len(order)


@pytest.mark.parametrize("score", SCORES)
def test_every_score_makes_legal_orders(score: str) -> None:
    for seed in range(80):
        problem = mixed_problem(seed, sorted(SHAPES)[seed % len(SHAPES)])
        assert problem.budget_bytes is not None
        order = plan(problem, score, problem.budget_bytes)
        if order is not None:
            check_rules(problem, Schedule(tuple(order)))


@pytest.mark.parametrize("score", SCORES)
def test_every_score_saves_memory(score: str) -> None:
    problem = with_budget_fraction(chain_problem(30, rng=random.Random(0)), 0.7)
    solution = solve(problem, solver="dtr" if score == "dtr" else f"dtr_{score}")
    assert solution.schedule.recomputed


def test_scores_with_neighbourhoods_beat_random_and_lru_on_a_tight_chain() -> None:
    problem = chain_problem(60).with_budget(18)

    def runs(score: str) -> int:
        order = plan(problem, score, 18)
        return 10**9 if order is None else len(order)

    assert runs("dtr") < runs("random")
    assert runs("dtr") <= runs("lru")
    assert runs("eq") < runs("random")


def test_enough_memory_means_no_eviction() -> None:
    problem = chain_problem(10)
    assert plan(problem, "dtr", 1000) == list(range(20))


def test_unknown_score() -> None:
    with pytest.raises(ValueError, match="no_such"):
        plan(chain_problem(3), "no_such", 5)


def test_thrashing_is_given_up() -> None:
    assert plan(chain_problem(300), "lru", 4) is None


def test_exact_neighbourhood_on_the_running_example() -> None:
    """a → b → c → d with b and c gone: recomputing d costs both, and losing a would cost both
    more."""
    evicted = [False, True, True, False, False]
    around = Neighbourhood(chain_example(), (1.0, 2.0, 4.0, 8.0, 16.0), evicted)
    assert around.exact(3) == 6.0
    assert around.exact(0) == 6.0
    assert around.ancestors(3, {3}) == 6.0
    assert around.ancestors(0, {0}) == 0.0
    assert around.descendants(0, {0}) == 6.0


def test_union_find_joins_and_leaves_as_in_the_paper() -> None:
    """Components merge when an op between them is evicted; an op that runs again takes its cost
    with it and splits nothing."""
    evicted = [False] * 5
    around = Neighbourhood(chain_example(), (1.0, 2.0, 4.0, 8.0, 16.0), evicted)
    for op_id in (1, 3):
        evicted[op_id] = True
        around.join(op_id)
    assert around.equivalence(0) == 2.0
    assert around.equivalence(2) == 2.0 + 8.0
    evicted[2] = True
    around.join(2)
    assert around.equivalence(0) == 2.0 + 4.0 + 8.0
    evicted[2] = False
    around.leave(2)
    assert around.equivalence(0) == 2.0 + 8.0


def test_memory_of_the_plan_is_searched_above_the_budget() -> None:
    problem = with_budget_fraction(chain_problem(40, rng=random.Random(3)), 0.5)
    assert problem.budget_bytes is not None
    order = plan(problem, "dtr", problem.budget_bytes)
    solution = solve(problem, solver="dtr")
    assert order is not None
    assert solution.usage is not None
    assert solution.usage.time_s <= simulate(problem, Schedule(tuple(order))).time_s


def test_values_nobody_may_recompute_are_kept() -> None:
    graph = chain_example()
    pinned = replace(graph, ops=(replace(graph.ops[0], recomputable=False), *graph.ops[1:]))
    problem = Problem(pinned, Profile((1.0,) * 5, (0,) * 5, 0))
    order = plan(problem, "size", 7)
    assert order is not None
    assert order.count(0) == 1
