"""What touches the allocator's pool runs in the order of the schedule, and the rest is free."""

import random

import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.backends.tensorflow.ordered.ordering import ordered_positions
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule


def chain(sizes, workspace=None, kind="x"):
    """A chain of ops with one output each."""
    ops = tuple(Op(i, f"op{i}", kind, (i - 1,) if i else (), (i,)) for i in range(len(sizes)))
    graph = Graph(
        ops, tuple(Value(i, f"v{i}", n, producer=i) for i, n in enumerate(sizes)), (len(sizes) - 1,)
    )
    return Problem(
        graph,
        Profile((1.0,) * len(sizes), tuple(workspace or [0] * len(sizes)), 0),
        budget_bytes=2**40,
    )


def test_what_writes_or_reads_a_large_value_is_ordered():
    problem = chain([1, 100, 1, 1])
    assert ordered_positions(problem, Schedule.store_all(problem.graph), 100) == [
        False,
        True,
        True,
        False,
    ]


def test_workspace_and_loops_count():
    problem = chain([1, 1, 1], workspace=[0, 100, 99])
    assert ordered_positions(problem, Schedule.store_all(problem.graph), 100) == [
        False,
        True,
        False,
    ]
    loops = chain([1, 1], kind="While")
    assert ordered_positions(loops, Schedule.store_all(loops.graph), 100) == [True, True]


def test_without_a_budget_nothing_waits_unless_something_is_computed_again():
    problem = chain([100, 100, 100]).with_budget(None)
    assert ordered_positions(problem, Schedule((0, 1, 2)), 100) == [False, False, False]
    assert ordered_positions(problem, Schedule((0, 1, 0, 2)), 100) == [True, True, True, True]


def test_step_inputs_are_not_of_the_pool():
    ops = (Op(0, "a", "a", (0,), (1,)),)
    problem = Problem(
        Graph(ops, (Value(0, "w", 1000), Value(1, "y", 1, producer=0)), (1,)),
        Profile((1.0,), (0,), 0),
    )
    assert ordered_positions(problem, Schedule((0,)), 100) == [False]


def test_without_a_threshold_everything_that_holds_data_is_ordered():
    problem = chain([1, 0, 1])
    assert ordered_positions(problem, Schedule.store_all(problem.graph), 0) == [True, True, True]


@pytest.mark.parametrize("seed", range(60))
def test_recomputations_always_wait(seed):
    problem = mixed_problem(seed, budget=False)
    schedule = random_schedule(random.Random(seed), problem.graph)
    seen = set()
    for op_id, waits in zip(
        schedule.order, ordered_positions(problem, schedule, 2**40), strict=True
    ):
        assert waits == (op_id in seen)
        seen.add(op_id)


def test_what_stays_on_the_host_never_waits():
    """Nor is it waited for: a control edge across devices is a copy that waits."""
    problem = chain([100, 100, 100])
    order = Schedule((0, 1, 0, 1, 2))
    assert ordered_positions(problem, order, 100, {1}) == [True, False, True, False, True]
