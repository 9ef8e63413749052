"""The forward phase as a chain of cuts."""

import random

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.solvers.orders.linearize import Linearized
from tests.random_problems import chain_problem, training_problem


def test_every_cut_of_a_chain_is_an_articulation_point() -> None:
    linear = Linearized(chain_problem(6))
    assert linear.forward == (0, 1, 2, 3, 4, 5)
    assert linear.articulation_cuts == linear.all_cuts == (0, 1, 2, 3, 4)
    assert linear.crossing_counts == [1, 1, 1, 1, 1, 0]
    assert linear.comes_first


def test_without_phases_the_forward_phase_ends_at_the_peak() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    linear = Linearized(problem)
    assert linear.forward == (0, 1, 2)  # 4 + 1 + 6 bytes are alive while c runs
    assert linear.last_forward_read == {0: 1, 1: 2, 2: 2}


def test_crossing_counts_by_definition() -> None:
    for seed in range(20):
        problem = training_problem(random.Random(seed), 12)
        linear = Linearized(problem)
        graph = problem.graph
        for at in linear.all_cuts:
            early, late = set(linear.forward[: at + 1]), set(linear.forward[at + 1 :])
            crossing = {
                v for i in late for v in graph.ops[i].inputs if graph.values[v].producer in early
            }
            assert linear.crossing_counts[at] == len(crossing)
