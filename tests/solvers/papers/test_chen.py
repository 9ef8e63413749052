"""Segment checkpoints: the paper's chain, and graphs that are none."""

import random

import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.orders.linearize import Linearized
from keras_remat.solvers.papers.chen import (
    MAX_TRIALS,
    greedy_cuts,
    segmented_order,
    spread,
    sqrt_n_cuts,
)
from tests.random_problems import (
    SHAPES,
    chain_problem,
    mixed_problem,
    training_problem,
    with_budget_fraction,
)

FORMS = [
    "chen_sqrt_n",
    "chen_sqrt_n_ap",
    "chen_sqrt_n_linear",
    "chen_greedy",
    "chen_greedy_ap",
    "chen_greedy_linear",
]


@pytest.mark.parametrize("n", [16, 36, 64, 100, 144])
def test_chen_2016_sublinear_memory_for_one_more_forward_pass(n: int) -> None:
    """Sec. 4.2: √n segments take O(√n) memory and at most one more run of every forward op."""
    linear = Linearized(chain_problem(n))
    root = round(n**0.5)
    order = Schedule(tuple(segmented_order(linear, list(linear.all_cuts)[root - 1 :: root])))
    usage = simulate(linear.problem, order)
    assert usage.peak_bytes <= 2 * root + 3
    assert usage.time_s <= 3 * n
    assert set(order.recomputed.values()) == {1}
    assert simulate(linear.problem, Schedule.store_all(linear.problem.graph)).peak_bytes >= n


@pytest.mark.parametrize("solver", FORMS)
def test_finds_the_sublinear_schedule(solver: str) -> None:
    problem = chain_problem(64).with_budget(19)
    solution = solve(problem, solver=solver)
    assert solution.usage is not None
    assert solution.usage.time_s <= 3 * 64


def test_chain_forms_agree() -> None:
    problem = with_budget_fraction(chain_problem(30, rng=random.Random(1)), 0.6)
    times = {solve(problem, solver=solver).usage for solver in FORMS[:3]}
    assert len(times) == 1


def test_linear_form_recomputes_where_no_single_op_separates() -> None:
    rng = random.Random(4)
    problem = with_budget_fraction(training_problem(rng, 30), 0.85)
    solution = solve(problem, solver="chen_sqrt_n_linear")
    assert solution.schedule.recomputed


def test_ap_finds_nothing_when_branches_run_in_parallel() -> None:
    """Two parallel branches from the first op to the last: every cut is crossed by two values."""
    reads = [(), (), (0,), (1,), (2, 3), (4, 0, 1)]
    phases = ["forward"] * 5 + ["backward"]
    graph = Graph(
        tuple(Op(i, f"o{i}", "", r, (i,), phases[i]) for i, r in enumerate(reads)),
        tuple(Value(i, "", 5, producer=i) for i in range(6)), (5,),
    )  # fmt: skip
    problem = Problem(graph, Profile((1.0,) * 6, (0,) * 6, 0), 20)
    assert Linearized(problem).articulation_cuts == (
        0,
    )  # after the first op, before the other branch begins
    with pytest.raises(ScheduleNotFoundError):
        solve(problem, solver="chen_sqrt_n_ap")


def test_every_segmentation_is_legal() -> None:
    for seed in range(100):
        problem = mixed_problem(seed, sorted(SHAPES)[seed % len(SHAPES)], budget=False)
        linear = Linearized(problem)
        rng = random.Random(seed)
        cuts = [at for at in linear.all_cuts if rng.random() < 0.3]
        check_rules(problem, Schedule(tuple(segmented_order(linear, cuts))))


def test_cuts() -> None:
    assert next(sqrt_n_cuts(range(9))) == [2, 5, 8]
    assert list(sqrt_n_cuts([])) == []
    linear = Linearized(chain_problem(9))
    assert [] in list(greedy_cuts(linear, linear.all_cuts))
    assert max(map(len, greedy_cuts(linear, linear.all_cuts))) >= 4
    assert spread(range(5), 2) == [2, 1, 3, 0, 4]
    assert len(spread(range(10_000), 99)) <= MAX_TRIALS
