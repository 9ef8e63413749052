"""Recompute or fetch in one plan: as good as exhaustive search, never worse than recomputation
alone, free where transfers are, and monotone between."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from random_problems import (
    chain_problem,
    mixed_problem,
    training_problem,
    u_shape_problem,
    with_budget_fraction,
)

from keras_remat.core.offload import Offload
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.search import anneal
from tests.solvers.brute_force import fastest

RATES = (0.0, 0.5, 2.0, 8.0, math.inf)


def seconds(problem: Problem, solver: str, time_limit_s: float = 1.0) -> float:
    """Seconds of a solver's schedule; infinite where it finds none."""
    try:
        solution = solve(problem, solver=solver, time_limit_s=time_limit_s)
    except (ScheduleNotFoundError, InfeasibleBudgetError):
        return math.inf
    validate(problem, solution.schedule)
    assert solution.usage is not None
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= solution.usage.time_s
    return solution.usage.time_s


def small_problems(count: int) -> list[Problem]:
    """Problems of at most seven ops that exhaustive search can solve, every other one with a
    latency or an overlap."""
    found: list[Problem] = []
    seed = 0
    while len(found) < count:
        rng = random.Random(seed)
        problem = mixed_problem(seed, ("random", "training", "layered")[seed % 3])
        seed += 1
        if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9:
            offload = Offload(rng.choice(RATES), rng.choice([0.0, 0.5]), rng.choice([0.0, 0.5]))
            found.append(replace(problem, offload=offload))
    return found


def test_the_integer_program_equals_exhaustive_search() -> None:
    helped = 0
    for problem in small_problems(60):
        staged, free = fastest(problem, stages=True), fastest(problem)
        ours = seconds(problem, "checkmate_milp", 10.0)
        if staged is None:
            continue
        assert free is not None
        assert free[0] - 1e-9 <= ours <= staged[0] + 1e-9
        alone = fastest(replace(problem, offload=None))
        helped += alone is None or free[0] < alone[0]
    assert helped > 5


@pytest.mark.parametrize(("solver", "misses"), [("auto", 0), ("anneal", 0), ("greedy", 2)])
def test_searches_against_exhaustive_search(solver: str, misses: int) -> None:
    problems = small_problems(40 if solver == "greedy" else 12)
    missed = 0
    for problem in problems:
        best = fastest(problem)
        missed += best is not None and seconds(problem, solver, 2.0) > best[0] + 1e-9
    assert missed <= misses


@pytest.mark.parametrize("solver", ["greedy", "checkmate_milp"])
def test_free_transfers_cost_nothing_down_to_the_floor(solver: str) -> None:
    """Where every op has one output and only the last value lives to the end."""
    rng = random.Random(1)
    for problem in (chain_problem(7, rng=rng), u_shape_problem(rng, 5)):
        problem = replace(problem, offload=Offload(math.inf))
        problem = problem.with_budget(problem.floor_bytes)
        assert seconds(problem, solver, 10.0) == problem.store_all_time_s


@pytest.mark.parametrize("solver", ["greedy", "chen_sqrt_n", "dtr"])
def test_no_bandwidth_is_recomputation_alone(solver: str) -> None:
    for seed in range(20):
        problem = mixed_problem(seed)
        assert seconds(replace(problem, offload=Offload(0.0)), solver) == seconds(problem, solver)


def test_more_bandwidth_is_never_slower() -> None:
    for problem in small_problems(25):
        times = [
            seconds(replace(problem, offload=Offload(rate, 0.25)), "checkmate_milp", 10.0)
            for rate in RATES
        ]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_auto_is_never_worse_than_recomputation_alone(rate: float) -> None:
    plain = with_budget_fraction(training_problem(random.Random(4), 12), 0.7)
    assert seconds(replace(plain, offload=Offload(rate)), "auto", 3.0) <= seconds(
        plain, "auto", 3.0
    )


def test_a_schedule_that_fits_as_it_is_has_no_fetches() -> None:
    problem = replace(chain_problem(5), offload=Offload(1.0))
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    solution = solve(problem.with_budget(peak))
    assert (solution.status, solution.schedule) == ("optimal", Schedule.store_all(problem.graph))


def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Annealing is interrupted, in the search without fetches and in the one that follows it."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    problem = replace(chain_problem(12).with_budget(9), offload=Offload(1e-3))
    recomputed = seconds(replace(problem, offload=None), "greedy")
    monkeypatch.setattr(anneal, "improve", interrupted)
    assert seconds(problem, "auto") <= recomputed
