"""The default solver: valid, no worse than greedy, honest bounds, anytime, and fine without
OR-Tools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
from random_problems import (
    chain_problem,
    mixed_problem,
    training_problem,
    with_budget_fraction,
)

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.calibrated_solve import within_budget
from keras_remat.solvers import SOLVERS, auto, solve
from keras_remat.solvers.engines import cp_sat, native
from keras_remat.solvers.orders import reorder
from keras_remat.solvers.search import anneal, greedy, intervals
from tests.solvers.brute_force import fastest


@pytest.mark.parametrize("seed", range(8))
def test_valid_and_no_worse_than_greedy(seed: int) -> None:
    problem = mixed_problem(seed)
    try:
        first = simulate(problem, SOLVERS["greedy"](problem).schedule).time_s
    except ScheduleNotFoundError:
        first = float("inf")
    try:
        solution = solve(problem, time_limit_s=0.5)
    except (ScheduleNotFoundError, InfeasibleBudgetError):
        assert first == float("inf")
        return
    assert solution.usage is not None
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= solution.usage.time_s * (1 + 1e-9)
    assert solution.usage.time_s <= first


def test_a_chain_is_proved_optimal() -> None:
    """The window bound meets the schedule found: six ops each way under five bytes."""
    solution = solve(chain_problem(6).with_budget(6), time_limit_s=20)
    assert solution.status == "optimal"


def test_without_a_budget_store_all_is_optimal() -> None:
    solution = solve(chain_problem(5))
    assert solution.status == "optimal"
    assert solution.schedule == Schedule.store_all(chain_problem(5).graph)


def test_goes_on_without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "available", lambda: False)
    problem = chain_problem(12).with_budget(9)
    assert solve(problem, time_limit_s=2).usage is not None


def test_goes_on_when_the_cp_sat_process_dies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not cp_sat.available():
        pytest.skip("ortools is not installed")
    monkeypatch.setattr(cp_sat, "MEMORY_LIMIT_BYTES", 2**20)
    monkeypatch.setattr(auto, "OPTIONS", replace(auto.OPTIONS, process_s=0.0))
    problem = with_budget_fraction(training_problem(random.Random(11), 12), 0.7)
    assert solve(problem, time_limit_s=10.0, patience=25.0).usage is not None
    assert "goes on without CP-SAT" in caplog.text


@pytest.mark.parametrize("solver", ["auto", "anneal"])
def test_memory_aware_orders_are_made_once_per_graph(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Graph] = []
    make = reorder._Hoist

    def counted(graph: Graph) -> reorder._Hoist:
        made.append(graph)
        return make(graph)

    monkeypatch.setattr(reorder, "_ORDERS", WeakKeyDictionary())
    monkeypatch.setattr(reorder, "_Hoist", counted)
    problem = training_problem(random.Random(1), 12)
    for share in (0.6, 0.8):
        with suppress(ScheduleNotFoundError):
            solve(with_budget_fraction(problem, share), solver=solver, time_limit_s=0.1)
    assert made == [problem.graph]


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over whenever somebody asks, as on a machine that is slow beyond measure."""
    monkeypatch.setattr(Deadline, "spent_s", lambda _: 1e9)


LARGE = training_problem(random.Random(3), 400)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
@pytest.mark.parametrize("plain", [LARGE, training_problem(random.Random(3), 40)])
def test_the_first_schedule_needs_no_clock(plain: Problem, share: float, no_time: None) -> None:
    """What greedy finds by steps alone is there, in graphs that are coarsened, too."""
    problem = with_budget_fraction(plain, share)
    bases = reorder.base_orders(problem)
    first = next(greedy.candidates(problem, deadline=NO_DEADLINE, orders=bases), Schedule(()).order)
    assert first
    for solver in ("greedy", "greedy_first", "auto"):
        found = solve(problem, solver=solver, time_limit_s=0.001)
        assert found.usage is not None
        assert found.usage.time_s <= simulate(problem, Schedule(first)).time_s


def test_the_large_problem_is_one_that_is_coarsened() -> None:
    assert len(LARGE.graph.needed) > auto.OPTIONS.large_ops


def test_what_comes_after_the_first_schedule_ends_by_the_clock(no_time: None) -> None:
    problem = with_budget_fraction(LARGE, 0.7)
    found = list(greedy.candidates(problem, deadline=Deadline(1.0)))
    assert len(found) == 1
    assert not list(greedy.candidates(problem, deadline=Deadline(1.0), anyway=False))


def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(auto.cut_bound, "lower_bound_s", interrupted)
    problem = chain_problem(12).with_budget(9)
    solution = solve(problem, time_limit_s=5)
    assert solution.solver in ("greedy", "dtr", "anneal")
    with pytest.raises(KeyboardInterrupt):  # a plan for a fit, which the interrupt is to end
        within_budget(problem, 9, SimulatedMemory())
    monkeypatch.setattr(auto.greedy, "candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve(problem, time_limit_s=5)


def test_progress_gets_better_solutions() -> None:
    seen: list[Solution] = []
    problem = chain_problem(14).with_budget(10)
    final = solve(problem, time_limit_s=3, progress=seen.append)
    times = [s.usage.time_s for s in seen if s.usage is not None]
    assert times == sorted(times, reverse=True)
    assert final.usage is not None
    assert times[-1] == final.usage.time_s


def test_large_graphs_are_coarsened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "OPTIONS", replace(auto.OPTIONS, large_ops=10))
    problem = training_problem(random.Random(1), 20)
    problem = with_budget_fraction(problem, 0.8)
    assert solve(problem, time_limit_s=0.5).usage is not None


def test_a_large_graph_keeps_its_first_schedule_where_the_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy finds one schedule of the coarse graph, and none again."""
    monkeypatch.setattr(auto, "OPTIONS", replace(auto.OPTIONS, large_ops=10))
    real = auto._Search._greedy

    def in_time(self, view, bases, most=None, **options):  # type: ignore[no-untyped-def]
        return real(self, view, bases, most, **options) if most == 1 else []

    monkeypatch.setattr(auto._Search, "_greedy", in_time)
    problem = with_budget_fraction(training_problem(random.Random(1), 20), 0.8)
    solution = solve(problem, time_limit_s=0.5)
    validate(problem, solution.schedule)


@pytest.mark.parametrize(("time_limit_s", "sure"), [(0.1, {False}), (1.0, {True})])
def test_a_late_solve_looks_for_its_first_schedule_once(
    time_limit_s: float, sure: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the whole graph, whatever the clock says; coarse ones get what their time allows."""
    monkeypatch.setattr(auto, "OPTIONS", replace(auto.OPTIONS, large_ops=10))
    looks = []

    def none(problem, *, anyway, **options):  # type: ignore[no-untyped-def]
        looks.append(anyway)
        return iter(())

    monkeypatch.setattr(greedy, "candidates", none)
    problem = with_budget_fraction(training_problem(random.Random(1), 20), 0.8)
    with suppress(ScheduleNotFoundError):  # annealing may find one
        solve(problem, time_limit_s=time_limit_s)
    assert looks[0]
    assert set(looks[1:]) == sure


CROSS_CHECKS = ("greedy", "dtr", "dtr_local", "chen_greedy_linear", "backward")


def check_random_problem(seed: int, time_limit_s: float) -> str:
    """Solves the problem of a seed; ``solve`` validates, and what is called infeasible no other
    solver may solve."""
    problem = mixed_problem(seed)
    try:
        solve(problem, time_limit_s=time_limit_s)
    except InfeasibleBudgetError:
        for name in CROSS_CHECKS:
            with pytest.raises((InfeasibleBudgetError, ScheduleNotFoundError)):
                solve(problem, solver=name, time_limit_s=1.0)
        if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9:
            assert fastest(problem) is None
        return "infeasible"
    except ScheduleNotFoundError:
        return "not found"
    return "solved"


def test_random_problems_are_solved_or_proved_infeasible() -> None:
    found = [check_random_problem(seed, 0.3) for seed in range(15)]
    assert found.count("solved") > 7


@pytest.mark.slow
def test_five_thousand_random_problems_stay_within_their_budgets() -> None:
    """Chains, U-shapes, layered graphs and mirrored training graphs; every twentieth long enough
    for all steps."""
    counts = Counter(
        check_random_problem(seed, 3.0 if seed % 20 == 0 else 0.3) for seed in range(5000)
    )
    print(dict(counts))
    assert counts["solved"] > 3000


@pytest.mark.parametrize("name", ["auto", "anneal", "greedy"])
@pytest.mark.parametrize("seed", [4, pytest.param(11, marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_schedule(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little work under a long time limit, so that the clock cannot strike. Until the moves are
    compiled, a round has fewer of them."""
    native.is_compiled(native.LONGEST_S)
    monkeypatch.setattr(intervals, "WORK_PER_S", 0.002)
    monkeypatch.setattr(anneal, "MOVE_S", 1e-3)
    problem = with_budget_fraction(training_problem(random.Random(seed), 8), 0.7)
    first, second = (
        solve(problem, solver=name, time_limit_s=30, seed=1).schedule for _ in range(2)
    )
    assert len(first) > len(problem.graph.needed)
    assert first == second


@pytest.mark.skipif(not cp_sat.available(), reason="ortools is not installed")
def test_an_unfinished_search_is_repeatable_too() -> None:
    """The work limit strikes long before the program is solved, and the clock does not."""
    problem = with_budget_fraction(training_problem(random.Random(5), 40), 0.6)
    base = tuple(sorted(problem.graph.needed))
    known = list(
        greedy.candidates(problem, deadline=Deadline(float("inf")), max_steps=2000, orders=[base])
    )
    solved = []

    def search() -> Iterator[tuple[int, ...]]:
        end = yield from intervals.improve(
            problem, base, known, deadline=Deadline(60.0), work=0.05, depths=(4,)
        )
        solved.append(end)

    assert list(search()) == list(search())
    assert solved == [False, False]
