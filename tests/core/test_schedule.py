"""A schedule is an order of ids; a solution derives its gap."""

import numpy as np
import pytest

from keras_remat.core.graph import Graph, Op, chain_example
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.errors import InvalidScheduleError


def test_any_iterable_of_integers_becomes_a_tuple_of_int():
    for order in ([0, 1, 0], (0, 1, 0), np.array([0, 1, 0]), iter([0, np.int32(1), 0])):
        schedule = Schedule(order)
        assert schedule == Schedule((0, 1, 0))
        assert hash(schedule) == hash(Schedule((0, 1, 0)))
        assert {type(i) for i in schedule.order} == {int}


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, np.bool_(True), np.float64(1)])
def test_ids_are_integers(bad):
    with pytest.raises(TypeError, match="position 1 must be an int"):
        Schedule((0, bad))


def test_ids_are_not_negative():
    with pytest.raises(InvalidScheduleError, match="unknown op id -3 at position 2") as caught:
        Schedule((0, -1, -3))
    assert (caught.value.rule, caught.value.position) == ("S2", 2)


def test_status_is_one_of_two():
    with pytest.raises(ValueError, match="got 'best'"):
        Solution(Schedule(()), "auto", "best", 0.0)


def test_length_and_recomputed():
    schedule = Schedule((0, 1, 2, 0, 3, 0, 2))
    assert len(schedule) == 7
    assert schedule.recomputed == {0: 2, 2: 1}
    assert Schedule(()).recomputed == {}


def test_store_all_runs_each_needed_op_once_in_default_order():
    assert Schedule.store_all(chain_example()) == Schedule(range(5))
    effect = Op(1, "print", "K", (), (), recomputable=False)
    assert Schedule.store_all(Graph((Op(0, "dead", "K", (), ()), effect), (), ())) == Schedule((1,))


@pytest.mark.parametrize(
    ("bound", "usage", "gap"),
    [
        (None, Usage(10.0, 1), None),
        (8.0, None, None),
        (8.0, Usage(10.0, 1), 0.2),
        (10.0, Usage(10.0, 1), 0.0),
        (10.000001, Usage(10.0, 1), 0.0),
        (0.0, Usage(0.0, 1), 0.0),
    ],
)
def test_gap(bound, usage, gap):
    solution = Solution(
        Schedule((0,)), "store_all", "feasible", 0.1, lower_bound_s=bound, usage=usage
    )
    assert solution.gap == (None if gap is None else pytest.approx(gap))
