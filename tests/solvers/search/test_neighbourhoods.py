"""Large-neighbourhood search: better orders within the budget, the same for the same seed, and
other decisions left alone."""

from __future__ import annotations

import random

import pytest

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import SOLVERS
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.search import greedy, interval_program, neighbourhoods
from tests.random_problems import mixed_problem, training_problem, with_budget_fraction

needs_ortools = pytest.mark.skipif(not cp_sat.available(), reason="ortools is not installed")


def problem_and_start(seed: int) -> tuple[Problem, tuple[int, ...]]:
    problem = with_budget_fraction(training_problem(random.Random(seed), 60), 0.5)
    *_, start = greedy.candidates(problem, deadline=Deadline(float("inf")), max_steps=5000)
    return problem, start


@needs_ortools
def test_improves_and_repeats_itself() -> None:
    problem, start = problem_and_start(4)
    runs = [
        list(
            neighbourhoods.improve(
                problem, start, deadline=Deadline(60.0), work=0.15, depth=4, seed=1
            )
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    times = [simulate(problem, Schedule(order)).time_s for order in (start, *runs[0])]
    assert times == sorted(times, reverse=True)
    assert len(times) > 1
    for order in runs[0]:
        validate(problem, Schedule(order))
        assert tuple(dict.fromkeys(order)) == tuple(dict.fromkeys(start))


@pytest.mark.parametrize("seed", range(30))
def test_order_of_puts_recomputations_back(seed: int) -> None:
    problem = mixed_problem(seed)
    try:
        order = SOLVERS["greedy"](problem).schedule.order
    except ScheduleNotFoundError:
        return
    base = tuple(dict.fromkeys(order))
    chosen = set(interval_program.recomputations(order, base))
    again = neighbourhoods.order_of(base, chosen)
    assert tuple(dict.fromkeys(again)) == base
    assert set(interval_program.recomputations(again, base)) == chosen


@pytest.mark.parametrize("seed", range(40))
def test_a_fixed_recomputation_stays(seed: int) -> None:
    """A program with everything fixed has the order itself as its only one, and rows that hold for
    it when it fits."""
    problem = mixed_problem(seed)
    try:
        order = SOLVERS["greedy"](problem).schedule.order
    except ScheduleNotFoundError:
        return
    base = tuple(dict.fromkeys(order))
    fixed = set(interval_program.recomputations(order, base))
    model = interval_program.Model(problem, base, set(), order, fixed)
    assert model.order(frozenset()) == neighbourhoods.order_of(base, fixed)
    free = set(list(fixed)[:1])
    model = interval_program.Model(problem, base, free, order, fixed - free)
    assert model.program.hint is not None
    assert model.order(frozenset(model.program.hint)) == neighbourhoods.order_of(base, fixed)


def test_neighbourhoods_are_of_the_size_asked_for() -> None:
    rng = random.Random(0)
    pairs = [(slot, op_id) for slot in range(30) for op_id in range(10)]
    for _ in range(50):
        found = neighbourhoods.neighbourhood(pairs, 40, rng)
        assert 20 <= len(found) <= 40
    assert neighbourhoods.neighbourhood(pairs[:3], 40, rng) == set(pairs[:3])
