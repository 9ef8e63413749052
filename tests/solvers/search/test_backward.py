"""The search backwards: legal, within the budget, finds what walking forwards misses, and its
proofs hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers import SOLVERS, solve
from keras_remat.solvers.search import backward
from tests.random_problems import (
    build,
    chain_problem,
    mixed_problem,
    random_problem,
    with_budget_fraction,
)
from tests.solvers.brute_force import fastest

SORTS: tuple[backward.Sort, ...] = ("once", "few")


@pytest.mark.parametrize("sort", SORTS)
def test_running_example(sort: backward.Sort) -> None:
    """Under 7 bytes the path back from e is d, c, b, a: a is computed again just before e."""
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)
    assert backward.search(problem, sort, max_steps=1000) == (0, 1, 2, 3, 0, 4)
    with pytest.raises(InfeasibleBudgetError):
        backward.search(problem.with_budget(6), sort, max_steps=1000)


@pytest.mark.parametrize("sort", SORTS)
def test_answers_against_exhaustive_search(sort: backward.Sort) -> None:
    """Any order is allowed here, while the exhaustive search keeps to the default order of first
    runs: it may find less, never more."""
    infeasible = found = 0
    for seed in range(200):
        problem = mixed_problem(seed)
        order, proved = None, False
        try:
            order = backward.search(problem, sort, max_steps=20_000)
        except InfeasibleBudgetError:
            proved = True
        if order is not None:
            found += 1
            validate(problem, Schedule(order))
        if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9:
            best = fastest(problem)
            if proved:
                infeasible += 1
                assert best is None
            elif best is not None and sort == "few":
                assert order is not None
    assert found > 100
    assert infeasible > 0


def test_fits_where_greedy_finds_nothing() -> None:
    stuck = helped = 0
    for seed in range(15):
        problem = random_problem(random.Random(seed), 14)
        problem = problem.with_budget(problem.floor_bytes)
        try:
            SOLVERS["greedy"](problem)
        except ScheduleNotFoundError:
            stuck += 1
            try:
                helped += backward.search(problem, "once", max_steps=20_000) is not None
            except InfeasibleBudgetError:
                helped += 1
    assert stuck > 0
    assert helped == stuck


def test_a_long_chain_at_its_floor() -> None:
    problem = chain_problem(40)
    problem = problem.with_budget(problem.floor_bytes + 1)
    solution = solve(problem, solver="backward")
    assert solution.usage is not None
    assert solution.usage.peak_bytes <= problem.floor_bytes + 1


def test_a_proof_raises_with_a_floor_above_the_budget() -> None:
    """a → b and c → d, 3 and 1 bytes each, and e reads b and d: while the later of b and d is
    computed from 3 bytes, the other waits."""
    problem = build(random.Random(0), [[], [0], [], [2], [1, 3]], max_bytes=1)
    sizes = (3, 1, 3, 1, 1)
    values = tuple(
        replace(value, nbytes=size) for value, size in zip(problem.graph.values, sizes, strict=True)
    )
    problem = replace(problem, graph=replace(problem.graph, values=values), budget_bytes=4)
    assert problem.floor_bytes == 4
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(problem, solver="backward")
    assert (caught.value.floor_bytes, caught.value.by_search) == (5, True)
    assert solve(problem.with_budget(5), solver="backward").status == "optimal"


def test_cut_off() -> None:
    problem = with_budget_fraction(chain_problem(60), 0.2)
    assert backward.search(problem, "once", max_steps=10) is None
