"""Annealing improves, stays legal, repeats itself for a seed, and does the same compiled or not."""

from __future__ import annotations

import pytest
from random_problems import mixed_problem, two_branches, with_budget_fraction

from benchmarks.suite.layered import layered
from keras_remat.core.deadline import NO_DEADLINE
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import validate
from keras_remat.solvers import SOLVERS
from keras_remat.solvers.engines import native
from keras_remat.solvers.search import anneal, greedy


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that ends over the budget has twelve more chunks, which Python walks slowly."""
    monkeypatch.setattr(anneal, "CHUNK_MOVES", 200)


def improved(
    problem: Problem,
    start: tuple[int, ...] | None = None,
    *,
    seed: int = 0,
    compiled: bool = False,
) -> list[tuple[int, ...]]:
    """Returns all orders that annealing finds with a few moves, each faster than the last."""
    return list(
        anneal.improve(
            problem,
            start,
            deadline=NO_DEADLINE,
            moves=800,
            compiled=compiled,
            coolings=(anneal.LOOSE, anneal.STIFF),
            seed=seed,
        )
    )


@pytest.mark.parametrize("seed", [9, 39, 44, 46, 49, 54])
def test_improvements_are_valid_and_faster(seed: int) -> None:
    """On these problems annealing finds more than greedy."""
    problem = mixed_problem(seed)
    start = None
    for order in greedy.candidates(problem, deadline=NO_DEADLINE):
        start = order
    time_s = float("inf") if start is None else sum(problem.profile.op_time_s[i] for i in start)
    orders = improved(problem, start, seed=seed)
    assert orders
    for order in orders:
        validate(problem, Schedule(order))
        faster = sum(problem.profile.op_time_s[i] for i in order)
        assert faster < time_s
        time_s = faster


def test_the_same_seed_gives_the_same_orders() -> None:
    """Of this seed no round has an order within the budget before it is repaired."""
    problem = mixed_problem(115)
    assert improved(problem, seed=115) == improved(problem, seed=115) != []


def test_reordering_saves_what_no_recomputation_can() -> None:
    """Two branches whose first values are both alive at once in the default order; run one after
    the other they fit."""
    problem = two_branches()
    orders = improved(problem)
    assert orders
    validate(problem, Schedule(orders[-1]))
    assert len(orders[-1]) == 5


@pytest.mark.parametrize("seed", [0, 10, 33, 44, 55])
def test_machine_code_makes_the_moves_of_the_python_oracle(seed: int) -> None:
    """Same seed, same orders, on problems with every feature; and on a layered graph."""
    if not native.is_compiled(native.LONGEST_S):
        pytest.skip("Numba is not installed, or has no place for its machine code")
    problem = mixed_problem(seed) if seed else with_budget_fraction(layered(60, 0), 0.75)
    assert improved(problem, seed=seed, compiled=True) == improved(problem, seed=seed)


@pytest.mark.parametrize("solver", ["anneal", "auto"])
def test_solving_goes_on_uncompiled_and_waits_longer_where_it_is_patient(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(native, "is_compiled", lambda wait_s=0.0: bool(waited.append(wait_s)))
    problem = with_budget_fraction(layered(60, 1), 0.8)
    solution = SOLVERS[solver](problem, time_limit_s=0.1, patience=4.0)
    validate(problem, solution.schedule)
    assert waited
    assert set(waited) == {0.1 * 4.0 * anneal.WAIT_SHARE}
