"""The default solver never loses to one of its own parts in the same time, and finds schedules
where the order itself decides.

The published graphs are not part of the repository: ``KERAS_REMAT_GRAPHS`` gives their folder, and
without it those tests are skipped.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from random_problems import (
    chain_problem,
    training_problem,
    u_shape_problem,
    with_budget_fraction,
)

from benchmarks.suite import check as check_file
from benchmarks.suite import make_problems
from benchmarks.suite.layered import layered
from keras_remat.core import deadline, serialize
from keras_remat.core.problem import Problem
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers import SOLVERS, auto, solve
from keras_remat.solvers.engines import cp_sat, native
from keras_remat.solvers.search import anneal, backward, greedy, intervals

WHOLE_PARTS = ("greedy", "dtr", "dtr_local", "dtr_msps", "backward")
"""What the default solver runs as they are."""
PARTS = (*WHOLE_PARTS, "anneal", "intervals")
"""Those, and what gets more time when it runs alone."""
TOLERANCE = 1e-5
"""Relative; what the default solver takes for the same time."""


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """The first solve after an installation makes fewer moves than the second."""
    native.is_compiled(native.LONGEST_S)


def seconds(problem: Problem, solver: str, time_limit_s: float) -> float:
    """Seconds of a solver's schedule; infinite where it finds none."""
    try:
        usage = solve(problem, solver=solver, time_limit_s=time_limit_s).usage
    except (ScheduleNotFoundError, InfeasibleBudgetError):
        return float("inf")
    assert usage is not None
    return usage.time_s


def check(problem: Problem, time_limit_s: float, parts: Sequence[str] = PARTS) -> None:
    """Compares the default solver with its parts."""
    ours = seconds(problem, "auto", time_limit_s)
    theirs = {name: seconds(problem, name, time_limit_s) for name in parts}
    assert ours <= min(theirs.values()) * (1 + TOLERANCE), theirs


@pytest.mark.slow
def test_auto_is_as_good_as_its_parts() -> None:
    """On a problem that needs as many recomputations as there are ops, by the clock."""
    check(with_budget_fraction(training_problem(random.Random(3), 12), 0.7), 4.0, WHOLE_PARTS)


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of half a second within a minute, so that the clock decides nothing."""

    def work_budget_s(time_limit_s: float) -> float:
        return deadline.work_budget_s(time_limit_s) / 120

    for module in (auto, anneal, backward, greedy, intervals):
        monkeypatch.setattr(module, "work_budget_s", work_budget_s)
    monkeypatch.setattr(auto, "OPTIONS", replace(auto.OPTIONS, provable_ops=0))
    monkeypatch.setattr(cp_sat, "available", lambda: False)


BY_THE_CLOCK = {
    "auto",
    "intervals",
    "checkmate_milp",
    "checkmate_milp_cbc",
    "checkmate_lp",
    "lp_rounding",
}
"""What is not compared: ends by the clock, or needs a process of its own."""
SMALL: dict[str, tuple[Problem, Sequence[float]]] = {
    "training": (training_problem(random.Random(5), 14), (0.85,)),
    "chain": (chain_problem(12, rng=random.Random(2)), (0.85, 0.55)),
    "u_shape": (u_shape_problem(random.Random(1), 8), (0.85, 0.55)),
    "layered": (layered(60, 2), (0.7,)),
}


@pytest.mark.parametrize(
    "name", [*(n for n in SMALL if n != "layered"), pytest.param("layered", marks=pytest.mark.slow)]
)
def test_auto_is_as_good_as_every_solver_at_equal_work(name: str, little_work: None) -> None:
    plain, shares = SMALL[name]
    for share in shares:
        problem = with_budget_fraction(plain, share)
        check(problem, 60.0, sorted(set(SOLVERS) - BY_THE_CLOCK))


def test_a_large_graph_has_a_schedule_whatever_making_it_coarse_takes() -> None:
    """Greedy finds one on the whole graph; its schedules of the coarse one do not fit at first."""
    document = check_file.read(make_problems.PROBLEMS / "densenet121_b64.json.gz")
    problem = serialize.problem_from_dict(document).with_budget(2_372_415_316)
    assert seconds(problem, "auto", 1.0) <= seconds(problem, "greedy_first", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_auto_is_as_good_as_its_parts_on_generated_problems(seed: int) -> None:
    rng = random.Random(seed)
    make = training_problem if seed % 2 else u_shape_problem
    check(with_budget_fraction(make(rng, rng.randint(8, 30)), rng.uniform(0.5, 0.9)), 8.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6, 0.5])
@pytest.mark.parametrize("ops", [60, 100, 250])
def test_auto_is_as_good_as_its_parts_on_layered_graphs(ops: int, share: float) -> None:
    check(with_budget_fraction(layered(ops, 1), share), 15.0)


@pytest.mark.slow
@pytest.mark.skipif("KERAS_REMAT_GRAPHS" not in os.environ, reason="KERAS_REMAT_GRAPHS is not set")
@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
@pytest.mark.parametrize(
    "path",
    sorted(Path(os.environ.get("KERAS_REMAT_GRAPHS", ".")).glob("*.json")),
    ids=lambda p: p.stem,
)
def test_auto_is_as_good_as_its_parts_on_published_graphs(path: Path, share: float) -> None:
    check(with_budget_fraction(serialize.load_problem(path), share), 30.0)


def test_a_layered_graph_has_a_schedule_at_0_7() -> None:
    """Greedy, DTR and the interval search find none there."""
    if not native.is_compiled(native.LONGEST_S):
        pytest.skip("Numba is not installed, or has no place for its machine code")
    problem = with_budget_fraction(layered(100, 2), 0.7)
    usage = solve(problem, time_limit_s=1.0, patience=10.0).usage
    assert usage is not None
    assert usage.time_s <= 1.03 * problem.store_all_time_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ops", "overhead"), [(100, 0.03), (500, 0.08), (1000, 0.08)])
def test_large_layered_graphs_have_cheap_schedules_at_0_7(
    ops: int, overhead: float, seed: int
) -> None:
    problem = with_budget_fraction(layered(ops, seed), 0.7)
    assert seconds(problem, "auto", 30.0) <= (1 + overhead) * problem.store_all_time_s
