"""What every solver must do, for every name in ``SOLVERS``: legal schedules within the budget, or
an honest error."""

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    InvalidScheduleError,
    RematError,
    ScheduleNotFoundError,
)
from keras_remat.solvers import SOLVERS, solve
from keras_remat.solvers.orders.timeline import TOO_MANY_BYTES
from tests.random_problems import (
    EVERYTHING,
    SHAPES,
    chain_problem,
    layered_problem,
    mixed_problem,
    training_problem,
    with_budget_fraction,
    with_random_budget,
)  # fmt: skip
from tests.solvers.brute_force import fastest

QUICK = {
    "store_all",
    "chen_sqrt_n",
    "chen_sqrt_n_ap",
    "chen_sqrt_n_linear",
    "chen_greedy",
    "chen_greedy_ap",
    "chen_greedy_linear",
    "griewank",
    "chain_dp",
    "dtr",
    "dtr_eq",
    "dtr_local",
    "dtr_msps",
    "dtr_lru",
    "dtr_size",
    "dtr_random",
    "greedy_first",
}
ENDS_LATE = {"anneal", "auto", *(solver for solver in QUICK if solver.startswith("dtr"))}
NEEDS = {"checkmate_milp_cbc": "cylp", "intervals": "ortools"}


def available(solver: str) -> str:
    if solver in NEEDS:
        pytest.importorskip(NEEDS[solver])
    return solver


@pytest.mark.parametrize("solver", sorted(QUICK))
def test_bytes_that_solvers_cannot_add_up_are_refused(solver: str) -> None:
    """They take all of less than 2**61 and nothing of more."""
    graph = chain_example()
    least = TOO_MANY_BYTES - 1 - sum(value.nbytes for value in graph.values)
    problem = Problem(graph, Profile((1.0,) * 5, (0,) * 5, least), least + 8)
    with suppress(ScheduleNotFoundError):
        solve(problem, solver=available(solver), time_limit_s=1.0)
    problem = Problem(graph, Profile((1.0,) * 5, (0,) * 5, least + 1), least + 9)
    with pytest.raises(InvalidProblemError, match=str(TOO_MANY_BYTES)) as caught:
        solve(problem, solver=solver)
    assert caught.value.value == TOO_MANY_BYTES


@pytest.mark.parametrize("op_s", [0.0, 1e-201, 8e198])
@pytest.mark.parametrize("solver", sorted(QUICK))
def test_any_seconds_that_solvers_can_add_up_are_taken(solver: str, op_s: float) -> None:
    problem = chain_problem(6)
    profile = replace(problem.profile, op_time_s=(op_s,) * len(problem.graph.ops))
    problem = replace(problem, profile=profile)
    for budget in (problem.floor_bytes, problem.floor_bytes + 1):
        check(problem.with_budget(budget), available(solver))


@pytest.mark.parametrize("op_s", [5e-324, 1e-320, 1e200, 1e308])
@pytest.mark.parametrize("solver", sorted(QUICK))
def test_seconds_that_solvers_cannot_add_up_are_refused(solver: str, op_s: float) -> None:
    """They gave NaN scores and infinite costs, of which SciPy's solver made an error of its own."""
    problem = chain_problem(6)
    profile = replace(problem.profile, op_time_s=(op_s,) * len(problem.graph.ops))
    problem = replace(problem, profile=profile).with_budget(problem.floor_bytes + 1)
    with pytest.raises(InvalidProblemError, match="Give times in another unit"):
        solve(problem, solver=solver)


def test_a_budget_below_the_outputs_together_is_refused_and_no_op_is_blamed() -> None:
    problem = layered_problem(random.Random(1), 10, 8)
    outputs = sum(problem.graph.values[v].nbytes for v in problem.graph.outputs)
    with pytest.raises(InfeasibleBudgetError, match=f"every schedule needs {outputs} B") as caught:
        solve(problem.with_budget(outputs - 1), solver="greedy")
    assert (caught.value.floor_bytes, caught.value.op_name) == (outputs, None)


def check_not_found(problem: Problem, error: ScheduleNotFoundError) -> None:
    """The numbers of the error belong to the problem."""
    assert error.floor_bytes == problem.floor_bytes
    assert problem.budget_bytes is not None
    assert error.best_peak_bytes is None or error.best_peak_bytes > problem.budget_bytes


def check(problem: Problem, solver: str, time_limit_s: float = 1.0) -> bool:
    """Solves, checks the promises every solution makes, and says whether there was one."""
    try:
        solution = solve(problem, solver=solver, time_limit_s=time_limit_s)
    except ScheduleNotFoundError as not_found:
        check_not_found(problem, not_found)
        return False
    except InfeasibleBudgetError:
        assert (
            fastest(problem) is None
        )  # with_random_budget stays above the floor, so this must have been proved
        return False
    validate(problem, solution.schedule)
    assert solution.usage == simulate(problem, solution.schedule)
    assert solution.usage is not None
    assert solution.usage.time_s >= problem.store_all_time_s - 1e-9
    assert solution.solver in SOLVERS
    assert solution.gap is None or 0 <= solution.gap <= 1
    if solution.lower_bound_s is not None:
        assert solution.lower_bound_s <= solution.usage.time_s + 1e-9
    return True


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_random_problems(solver: str, shape: str) -> None:
    available(solver)
    limit_s = 0.2 if solver in ENDS_LATE else 1.0
    count = 8 if solver in QUICK and solver not in ENDS_LATE else 3
    solved = sum(check(mixed_problem(1000 + seed, shape), solver, limit_s) for seed in range(count))
    assert solved > 0 or solver == "store_all"


@pytest.mark.slow
@pytest.mark.parametrize("solver", sorted(QUICK))
def test_five_thousand_random_problems(solver: str) -> None:
    solved = sum(check(mixed_problem(seed), solver) for seed in range(5000))
    assert solved > 500


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_running_example(solver: str) -> None:
    available(solver)
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    assert solve(problem, solver=solver, time_limit_s=2.0).schedule.order == (0, 1, 2, 3, 4)
    assert solve(problem.with_budget(11), solver=solver, time_limit_s=2.0).status == "optimal"
    with pytest.raises(InfeasibleBudgetError):
        solve(problem.with_budget(6), solver=solver, time_limit_s=2.0)
    check(problem.with_budget(7), solver)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_bounds_and_optimal_claims_against_exhaustive_search(solver: str) -> None:
    available(solver)
    seed = 0
    for _ in range(6 if solver in QUICK else 3):
        while True:
            seed += 1
            problem = mixed_problem(seed, ("random", "training", "chain")[seed % 3])
            if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9:
                break
        try:
            solution = solve(problem, solver=solver, time_limit_s=1.0)
        except RematError:
            continue
        best = fastest(problem)
        assert solution.usage is not None
        if best is None:  # only another order of first runs can fit, and that is a find
            continue
        if solution.lower_bound_s is not None:
            assert solution.lower_bound_s <= best[0] + 1e-6
        if solution.status == "optimal":
            assert solution.usage.time_s <= best[0] + 1e-6


@pytest.mark.parametrize("solver", sorted(QUICK))
def test_same_seed_same_schedule(solver: str) -> None:
    problem = with_budget_fraction(training_problem(random.Random(5), 12, chain=True), 0.7)
    try:
        first = solve(problem, solver=solver, seed=3)
    except ScheduleNotFoundError:
        with pytest.raises(ScheduleNotFoundError):
            solve(problem, solver=solver, seed=3)
    else:
        assert solve(problem, solver=solver, seed=3).schedule == first.schedule


@pytest.mark.parametrize("solver", ["chen_sqrt_n", "chen_greedy", "griewank", "dtr", "dtr_eq"])
def test_larger_graphs_with_every_feature(solver: str) -> None:
    rng = random.Random(0)
    check(with_random_budget(rng, training_problem(rng, 60, EVERYTHING)), solver, 0.5)
    check(with_random_budget(rng, layered_problem(rng, 25, 4, EVERYTHING)), solver, 0.5)


@pytest.mark.parametrize("solver", sorted(QUICK - {"store_all"}))
def test_recomputes_on_a_training_chain(solver: str) -> None:
    problem = with_budget_fraction(chain_problem(25), 0.6)
    solution = solve(problem, solver=solver)
    assert solution.usage is not None
    assert solution.schedule.recomputed
    assert solution.usage.time_s < 3 * problem.store_all_time_s


def test_unknown_solver_and_time_limit() -> None:
    with pytest.raises(ValueError, match="no_such"):
        solve(chain_problem(2), solver="no_such")
    for limit_s in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time_limit_s"):
            solve(chain_problem(2), solver="store_all", time_limit_s=limit_s)


def test_a_solver_gets_numbers_of_python(monkeypatch):
    got = []

    def solver(problem, *, seed, time_limit_s, **options):
        got.extend((type(seed), type(time_limit_s)))
        return Solution(Schedule.store_all(problem.graph), "store_all", "feasible", 0.0)

    monkeypatch.setitem(SOLVERS, "store_all", solver)
    solve(chain_problem(2), solver="store_all", seed=np.int64(3), time_limit_s=np.float32(2))
    assert got == [int, float]


@pytest.mark.parametrize("tells", [True, False])
def test_an_illegal_order_is_neither_told_nor_returned(monkeypatch, tells):
    wrong, told = Solution(Schedule((1, 2, 3, 4)), "store_all", "feasible", 0.0), []

    def solver(problem, *, progress, **options):
        if tells:
            progress(wrong)
        return wrong

    monkeypatch.setitem(SOLVERS, "store_all", solver)
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    with pytest.raises(InvalidScheduleError):
        solve(problem, solver="store_all", progress=told.append)
    assert told == []
