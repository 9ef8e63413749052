"""Where the memory goes: parts add up to the simulated peak."""

import pytest
from random_problems import mixed_problem

from keras_remat.cards.breakdown import PARTS, activations_by_layer, parts_at_peak
from keras_remat.core.graph import BACKWARD, FORWARD, Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate


def peak_of(problem):
    return simulate(problem, Schedule.store_all(problem.graph)).peak_bytes


@pytest.mark.parametrize("seed", range(40))
def test_parts_add_up_to_the_simulated_peak(seed):
    problem = mixed_problem(seed)
    parts = parts_at_peak(problem, 0, 0)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == peak_of(problem)


def test_parts_of_the_example():
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0, 0, 3, 0, 0), 10))
    parts = parts_at_peak(problem, 4, 5)
    assert peak_of(problem) == 24
    assert parts == {
        "weights": 4,
        "slots": 5,
        "gradients": 0,
        "batch": 1,
        "activations": 11,
        "workspace": 3,
    }


def test_values_of_the_backward_phase_are_gradients():
    ops = (
        Op(0, "net_1/a_1/MatMul", "K", (), (0,), FORWARD),
        Op(1, "net_1/b_1/MatMul", "K", (0,), (1,), FORWARD),
        Op(2, "gradient_tape/net_1/b_1/MatMul", "K", (0, 1), (2,), BACKWARD),
    )
    values = tuple(Value(i, f"v{i}", nbytes, producer=i) for i, nbytes in enumerate((4, 8, 2)))
    problem = Problem(Graph(ops, values, (2,)), Profile((1.0,) * 3, (0,) * 3, 0), name="net")
    parts = parts_at_peak(problem, 0, 0)
    assert (parts["activations"], parts["gradients"]) == (12, 2)
    assert list(activations_by_layer(problem).items()) == [("b", 8), ("a", 4)]


def test_an_empty_step_has_no_parts():
    problem = Problem(Graph((), (), ()), Profile((), (), 7))
    assert sum(parts_at_peak(problem, 7, 0).values()) == 7
    assert activations_by_layer(problem) == {}
