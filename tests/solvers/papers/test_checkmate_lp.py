"""The relaxation is a bound: below the optimum, below the program's, and not below store-all."""

import random

import pytest

from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.papers.checkmate_lp import lower_bound_s
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction
from tests.solvers.brute_force import fastest


def test_lp_below_optimum_below_rounding() -> None:
    """checkmate_lp ≤ optimum ≤ lp_rounding."""
    compared = 0
    for seed in range(80):
        problem = mixed_problem(seed, ("random", "training")[seed % 2])
        if len(problem.graph.needed) > 7 or len(problem.graph.values) > 9:
            continue
        best = fastest(problem)
        bound = lower_bound_s(problem, 10.0)
        assert bound >= problem.store_all_time_s
        if best is None:
            continue
        assert bound <= best[0] + 1e-9
        try:
            rounded = solve(problem, solver="lp_rounding", time_limit_s=1.0)
        except ScheduleNotFoundError:
            continue
        compared += 1
        assert rounded.usage is not None
        assert rounded.usage.time_s >= best[0] - 1e-9
    assert compared > 15


def test_grows_as_the_budget_shrinks_and_is_more_than_trivial() -> None:
    base = chain_problem(20, rng=random.Random(2))
    bounds = [lower_bound_s(with_budget_fraction(base, f), 30.0) for f in (1.0, 0.8, 0.6, 0.5)]
    assert bounds == sorted(bounds)
    assert bounds[0] == base.store_all_time_s
    assert bounds[-1] > 1.05 * base.store_all_time_s


def test_within_stages_is_at_least_as_tight() -> None:
    problem = with_budget_fraction(chain_problem(8, rng=random.Random(4)), 0.6)
    assert lower_bound_s(problem, 30.0, within_stages=True) >= lower_bound_s(problem, 30.0) - 1e-3


def test_edges() -> None:
    problem = chain_problem(5)
    assert lower_bound_s(problem) == problem.store_all_time_s
    with pytest.raises(InfeasibleBudgetError):
        lower_bound_s(problem.with_budget(1))


def test_as_a_solver_it_attaches_the_bound() -> None:
    problem = with_budget_fraction(chain_problem(12, rng=random.Random(1)), 0.7)
    solution = solve(problem, solver="checkmate_lp")
    assert solution.lower_bound_s == pytest.approx(
        min(lower_bound_s(problem), solution.usage.time_s if solution.usage else 0.0)
    )
