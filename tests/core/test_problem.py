"""Problem invariants, and the floor: a bound that no schedule beats."""

import random

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import InvalidProblemError

UNIT_COSTS = Profile((1.0,) * 5, (0,) * 5, 0)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "8GiB", float("nan")])
def test_budget_is_a_positive_int(budget):
    with pytest.raises(InvalidProblemError) as caught:
        Problem(chain_example(), UNIT_COSTS, budget)
    assert caught.value.field == "budget_bytes"
    assert repr(budget) in str(caught.value)


def test_profile_is_for_the_graphs_ops():
    with pytest.raises(
        InvalidProblemError, match="the profile has 4 ops, the graph has 5"
    ) as caught:
        Problem(chain_example(), Profile((1.0,) * 4, (0,) * 4, 0))
    assert caught.value.field == "profile"


def test_with_budget_changes_the_budget_only():
    problem = Problem(chain_example(), UNIT_COSTS, name="chain")
    assert problem.with_budget(7) == Problem(chain_example(), UNIT_COSTS, 7, "chain")
    assert problem.with_budget(7).with_budget(None) == problem


def test_floor_of_the_chain_example():
    problem = Problem(chain_example(), UNIT_COSTS)
    assert [problem.op_floor_bytes(i) for i in range(5)] == [4, 5, 7, 7, 7]
    assert (problem.floor_op, problem.floor_bytes, problem.store_all_time_s) == (2, 7, 5.0)


def test_floor_counts_resident_and_workspace():
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0, 5, 0, 0, 0), 100))
    assert (problem.floor_op, problem.floor_bytes) == (1, 110)


def test_floor_ignores_step_inputs_and_ops_nobody_needs():
    graph = Graph(
        (Op(0, "a", "K", (0,), (1,)), Op(1, "unneeded", "K", (1,), (2,))),
        (Value(0, "w", 50), Value(1, "a", 3, producer=0), Value(2, "b", 99, producer=1)),
        (1,),
    )
    assert Problem(graph, Profile((1.0, 1.0), (0, 0), 60)).floor_bytes == 63


@pytest.mark.parametrize(("workspace", "setter", "floor"), [(3, None, 62), (4, 2, 62), (5, 2, 63)])
def test_floor_counts_all_outputs_at_the_end(workspace, setter, floor):
    """Three outputs, one of which is listed twice; a step input is among the resident bytes."""
    ops = (Op(0, "a", "K", (3,), (0,)), Op(1, "b", "K", (), (1,)), Op(2, "c", "K", (1,), (2,)))
    values = (*(Value(i, f"v{i}", 4, producer=i) for i in range(3)), Value(3, "w", 50))
    problem = Problem(
        Graph(ops, values, (0, 1, 1, 2, 3)), Profile((1.0,) * 3, (0, 0, workspace), 50)
    )
    assert (problem.floor_op, problem.floor_bytes) == (setter, floor)


def test_empty_problem_needs_its_resident_bytes():
    problem = Problem(Graph((), (), ()), Profile((), (), 17))
    assert (problem.floor_op, problem.floor_bytes, problem.store_all_time_s) == (None, 17, 0)


def reuse_problem(recomputable):
    """``b`` may overwrite ``a``, and both are outputs: possible only when ``a`` can be computed
    once more."""
    ops = (
        Op(0, "a", "K", (), (0,), recomputable=recomputable),
        Op(1, "b", "K", (0,), (1,), may_reuse=(0,)),
        Op(2, "c", "K", (1,), (2,)),
    )
    values = (
        Value(0, "a", 4, producer=0),
        Value(1, "b", 4, producer=1),
        Value(2, "c", 1, producer=2),
    )
    return Problem(Graph(ops, values, (0, 2)), Profile((1.0,) * 3, (0,) * 3, 0))


def test_floor_lets_an_output_be_overwritten_that_can_be_computed_again():
    assert reuse_problem(recomputable=True).op_floor_bytes(1) == 4
    assert simulate(reuse_problem(recomputable=True), Schedule((0, 1, 2, 0))).peak_bytes == 5
    assert simulate(reuse_problem(recomputable=True), Schedule((0, 1, 2))).peak_bytes == 9


def test_floor_keeps_an_output_that_cannot():
    assert reuse_problem(recomputable=False).op_floor_bytes(1) == 8


def test_no_schedule_beats_the_floor():
    for seed in range(1000):
        problem = mixed_problem(seed, budget=False)
        peak = simulate(problem, random_schedule(random.Random(seed), problem.graph)).peak_bytes
        assert peak >= problem.floor_bytes, seed
        assert simulate(problem, Schedule.store_all(problem.graph)).time_s == pytest.approx(
            problem.store_all_time_s
        ), seed
