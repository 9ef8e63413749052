"""Checkmate through both solvers: optimal within its stages, honest about what lies beyond them."""

import builtins
import random

import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.errors import MissingPackageError, ScheduleNotFoundError
from keras_remat.planning.files import solution_to_dict
from keras_remat.reporting.text import status_text
from keras_remat.solvers import SOLVERS, solve
from keras_remat.solvers.engines.milp import optimize
from keras_remat.solvers.papers.checkmate import build
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction
from tests.solvers.brute_force import fastest

BOTH = ["checkmate_milp", "checkmate_milp_cbc"]


def small(seed: int) -> Problem | None:
    problem = mixed_problem(seed, ("random", "training", "layered")[seed % 3])
    return problem if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9 else None


@pytest.mark.parametrize("solver", BOTH)
def test_agrees_with_exhaustive_search(solver: str) -> None:
    if solver.endswith("cbc"):
        pytest.importorskip("cylp")
    compared = optimal = 0
    for seed in range(120):
        problem = small(seed)
        if problem is None:
            continue
        staged, free = fastest(problem, stages=True), fastest(problem)
        try:
            solution = solve(problem, solver=solver, time_limit_s=20.0)
        except ScheduleNotFoundError:
            assert staged is None
            continue
        assert solution.usage is not None
        assert free is not None
        assert solution.usage.time_s >= free[0] - 1e-9
        if staged is not None:
            compared += 1
            assert solution.usage.time_s <= staged[0] + 1e-9
        if solution.status == "optimal":
            optimal += 1
            assert solution.usage.time_s == pytest.approx(free[0])
    assert compared > 20
    assert optimal > 15


@pytest.mark.parametrize("solver", ["checkmate_milp", "checkmate_lp", "lp_rounding"])
def test_a_proof_says_that_it_is_of_the_order_the_graph_came_in(solver: str) -> None:
    """To run c before b saves both recomputations."""
    ops = (
        Op(0, "a", "", (), (0,)), Op(1, "b", "", (), (1,)),
        Op(2, "c", "", (0,), (2,)), Op(3, "d", "", (1, 2), (3,)),
    )  # fmt: skip
    sizes = (4, 4, 1, 1)
    values = tuple(Value(i, "abcd"[i], nbytes, producer=i) for i, nbytes in enumerate(sizes))
    problem = Problem(Graph(ops, values, (3,)), Profile((1.0,) * 4, (0,) * 4, 0), 6)
    kept, free = (solve(problem, solver=name, time_limit_s=5.0) for name in (solver, "auto"))
    assert kept.usage is not None
    assert free.usage is not None
    assert free.usage.time_s < (kept.lower_bound_s or 0.0)
    assert (kept.keeps_order, free.keeps_order) == (True, False)
    assert status_text(kept).endswith(" without reordering")
    assert status_text(free).endswith("proved to be the best possible")
    assert solution_to_dict(kept)["keeps_order"]
    assert "keeps_order" not in solution_to_dict(free)


def test_stages_written_lazily_give_the_optimum_of_the_whole_program() -> None:
    for seed in range(5):
        problem = with_budget_fraction(chain_problem(7, rng=random.Random(seed)), 0.6)
        whole = build(problem)
        answer = optimize(whole, 60.0)
        solution = solve(problem, solver="checkmate_milp")
        assert answer.x is not None
        assert solution.usage is not None
        assert solution.usage.time_s == pytest.approx(whole.seconds(float(answer.x @ whole.cost)))


@pytest.mark.parametrize("solver", BOTH)
def test_chain_of_the_paper_is_proved_optimal(solver: str) -> None:
    if solver.endswith("cbc"):
        pytest.importorskip("cylp")
    problem = with_budget_fraction(chain_problem(8), 0.7)
    solution = solve(problem, solver=solver)
    assert solution.status == "optimal"
    assert solution.gap == pytest.approx(0, abs=1e-5)


def test_dtr_stands_in_when_time_is_short() -> None:
    problem = with_budget_fraction(chain_problem(40, rng=random.Random(0)), 0.4)
    solution = SOLVERS["checkmate_milp"](problem, time_limit_s=1.0)
    assert solution.usage is not None
    assert solution.lower_bound_s is not None
    assert problem.store_all_time_s <= solution.lower_bound_s <= solution.usage.time_s


def test_missing_cylp_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("cylp"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError) as caught:
        solve(with_budget_fraction(chain_problem(5), 0.7), solver="checkmate_milp_cbc")
    assert caught.value.package == "cylp"
