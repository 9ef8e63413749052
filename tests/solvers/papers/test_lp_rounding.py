"""Rounding S and repairing R: always legal, never over the budget."""

import random

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import check_rules
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.engines.milp import optimize
from keras_remat.solvers.papers.checkmate import build
from keras_remat.solvers.papers.lp_rounding import relaxation, repaired_order, roundings
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction
from tests.solvers.brute_force import fastest


def test_every_rounding_is_legal() -> None:
    made = 0
    for seed in range(60):
        problem = mixed_problem(seed)
        program, answer = relaxation(problem, Deadline(5.0))
        if answer.x is None:
            continue
        for rng in (None, np.random.default_rng(seed)):
            for order in roundings(program, answer.x, rng):
                made += 1
                check_rules(problem, Schedule(tuple(order)))
    assert made > 200


def test_keeping_nothing_and_keeping_everything() -> None:
    problem = chain_problem(6).with_budget(13)
    program, _ = relaxation(problem, Deadline(5.0))
    everything: dict[int, set[int]] = {}
    for t, v in program.keep:
        everything.setdefault(t, set()).add(v)
    store_all = list(range(12))
    assert repaired_order(program, everything, recompute=False) == store_all
    nothing = repaired_order(program, {}, recompute=False)
    check_rules(problem, Schedule(tuple(nothing)))
    assert len(nothing) > len(store_all)


def test_lp_below_optimum_below_rounding() -> None:
    """The bound that is attached ≤ optimum ≤ rounding."""
    compared = 0
    for seed in range(80):
        problem = mixed_problem(seed, ("random", "training")[seed % 2])
        if len(problem.graph.needed) > 7 or len(problem.graph.values) > 9:
            continue
        best = fastest(problem)
        if best is None:
            continue
        try:
            rounded = solve(problem, solver="lp_rounding", time_limit_s=1.0)
        except ScheduleNotFoundError:
            continue
        compared += 1
        assert rounded.usage is not None
        assert rounded.lower_bound_s is not None
        assert problem.store_all_time_s <= rounded.lower_bound_s <= best[0] + 1e-9
        assert rounded.usage.time_s >= best[0] - 1e-9
    assert compared > 15


def test_the_bound_grows_as_the_budget_shrinks_and_is_more_than_trivial() -> None:
    base = chain_problem(12, rng=random.Random(2))
    bounds = [
        solve(with_budget_fraction(base, share), solver="checkmate_lp").lower_bound_s or 0.0
        for share in (1.0, 0.8, 0.6, 0.5)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] == base.store_all_time_s
    assert bounds[-1] > 1.05 * base.store_all_time_s


def test_the_bound_of_all_rows_is_at_least_as_tight() -> None:
    problem = with_budget_fraction(chain_problem(8, rng=random.Random(4)), 0.6)
    few, many = (
        program.seconds(optimize(program, 30.0, relax=True).bound)
        for program in (build(problem, ()), build(problem))
    )
    assert many >= few - 1e-3


def test_randomized_depends_on_the_seed_only() -> None:
    problem = with_budget_fraction(chain_problem(8, rng=random.Random(3)), 0.55)
    first = solve(problem, solver="lp_rounding", time_limit_s=60.0, seed=1)
    assert (
        solve(problem, solver="lp_rounding", time_limit_s=60.0, seed=1).schedule == first.schedule
    )


def test_randomized_is_never_worse_than_deterministic() -> None:
    for seed in range(2):
        problem = with_budget_fraction(chain_problem(10, rng=random.Random(seed)), 0.6)
        both = solve(problem, solver="lp_rounding", time_limit_s=60.0).usage
        one = solve(problem, solver="checkmate_lp", time_limit_s=60.0).usage
        assert both is not None
        assert one is not None
        assert both.time_s <= one.time_s
