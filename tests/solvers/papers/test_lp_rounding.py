"""Rounding S and repairing R: always legal, never over the budget."""

import random

import numpy as np

from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import check_rules
from keras_remat.solvers import solve
from keras_remat.solvers.papers.checkmate_lp import relaxation
from keras_remat.solvers.papers.lp_rounding import repaired_order, roundings
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction


def test_every_rounding_is_legal() -> None:
    made = 0
    for seed in range(60):
        problem = mixed_problem(seed)
        answer = relaxation(problem, 5.0)
        if answer.x is None or answer.program is None:
            continue
        for rng in (None, np.random.default_rng(seed)):
            for order in roundings(answer.program, answer.x, rng):
                made += 1
                check_rules(problem, Schedule(tuple(order)))
    assert made > 200


def test_keeping_nothing_and_keeping_everything() -> None:
    problem = chain_problem(6).with_budget(13)
    program = relaxation(problem, 5.0).program
    assert program is not None
    everything: dict[int, set[int]] = {}
    for t, v in program.keep:
        everything.setdefault(t, set()).add(v)
    store_all = list(range(12))
    assert repaired_order(program, everything, recompute=False) == store_all
    nothing = repaired_order(program, {}, recompute=False)
    check_rules(problem, Schedule(tuple(nothing)))
    assert len(nothing) > len(store_all)


def test_randomized_depends_on_the_seed_only() -> None:
    problem = with_budget_fraction(chain_problem(14, rng=random.Random(3)), 0.55)
    first = solve(problem, solver="lp_rounding", time_limit_s=60.0, seed=1)
    assert (
        solve(problem, solver="lp_rounding", time_limit_s=60.0, seed=1).schedule == first.schedule
    )


def test_randomized_is_never_worse_than_deterministic() -> None:
    for seed in range(3):
        problem = with_budget_fraction(chain_problem(10, rng=random.Random(seed)), 0.6)
        both = solve(problem, solver="lp_rounding", time_limit_s=60.0).usage
        one = solve(problem, solver="checkmate_lp", time_limit_s=60.0).usage
        assert both is not None
        assert one is not None
        assert both.time_s <= one.time_s
