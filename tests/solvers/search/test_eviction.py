"""One pass of greedy eviction: machine code and Python decide the same, and the clock ends it."""

from __future__ import annotations

from functools import cache
from math import inf

import pytest
from random_problems import mixed_problem, normalized_in_slices

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.solvers.engines import evictions, native
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.search import eviction, greedy
from keras_remat.solvers.search.eviction import Eviction, StuckError


def tight(seed: int) -> Problem:
    """Returns a problem with every feature, halfway between its floor and its peak; or a step in
    slices below the floor of its whole ops."""
    if seed < 2:
        problem, floor = normalized_in_slices(layers=8, parts=8)
        return problem.with_budget(int((0.8, 0.9)[seed] * floor))
    problem = mixed_problem(seed)
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    return problem.with_budget((problem.floor_bytes + peak) // 2)


def passes(problem: Problem, *, compiled: bool) -> list[tuple[object, int]]:
    """Returns what all policies find on all base orders, or why they get stuck; and their steps."""
    found: list[tuple[object, int]] = []
    for base in base_orders(problem):
        for policy in greedy.POLICIES:
            for most_s, steps in ((inf, 30), (1.2 * problem.store_all_time_s, 30), (inf, 1)):
                run = Eviction(problem, base, policy, NO_DEADLINE, most_s)
                try:
                    order: object = run.run(steps * len(base), compiled=compiled)
                except StuckError as error:
                    order = str(error)
                found.append((order, run.steps))
    return found


@cache
def in_python(seed: int) -> list[tuple[object, int]]:
    return passes(tight(seed), compiled=False)


@pytest.mark.parametrize("seed", range(30))
def test_machine_code_decides_as_python_does(seed: int) -> None:
    if not native.is_compiled(native.LONGEST_S):
        pytest.skip("Numba is not installed, or has no place for its machine code")
    problem = tight(seed)
    found = passes(problem, compiled=True)
    assert found == in_python(seed)
    for order, _ in found:
        if not isinstance(order, str):
            validate(problem, Schedule(order))  # type: ignore[arg-type]


def test_all_kinds_of_ends_are_compared() -> None:
    """The test above would say little if no pass got stuck, or all did."""
    ended = [end for seed in range(30) for end, _ in in_python(seed)]
    ends = {type(end) if isinstance(end, tuple) else end for end in ended}
    assert tuple in ends
    assert len(ends) >= 4


@pytest.mark.parametrize("seed", range(12))
def test_a_pass_that_is_stopped_goes_on_where_it_was(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_python(seed)
    monkeypatch.setattr(evictions, "ORDER_PLACES", 7)
    assert passes(tight(seed), compiled=False) == whole


def test_no_pass_goes_on_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tight(0)
    base = base_orders(problem)[-1]
    monkeypatch.setattr(evictions, "ORDER_PLACES", 50)
    run = Eviction(problem, base, greedy.SLICED_POLICIES[0], Deadline(0.0), inf)
    with pytest.raises(StuckError, match="no time left"):
        run.run(130 * len(base))
    assert run.steps < 2 * 50 + len(base)


def test_small_graphs_load_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(native, "is_compiled", lambda wait_s=0.0: bool(asked.append(wait_s)))
    problem = tight(0)
    assert len(problem.graph.ops) < eviction.NATIVE_OPS
    next(greedy.candidates(problem, deadline=NO_DEADLINE))
    assert not asked
    monkeypatch.setattr(eviction, "NATIVE_OPS", 1)
    next(greedy.candidates(problem, deadline=NO_DEADLINE))
    assert asked
