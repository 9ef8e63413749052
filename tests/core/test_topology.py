"""Ancestors and descendants agree with each other, and follow ``after`` as well as values."""

from __future__ import annotations

import pytest
from random_problems import mixed_problem

from keras_remat.core.graph import Graph, Op
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.topology import ancestors_of, descendants_of, last_runs, predecessors


@pytest.mark.parametrize("seed", range(30))
def test_an_ancestor_has_its_descendant(seed: int) -> None:
    graph = mixed_problem(seed).graph
    for op_id in sorted(graph.needed):
        for earlier in ancestors_of(graph, op_id):
            assert op_id in descendants_of(graph, earlier)
        for later in descendants_of(graph, op_id) & graph.needed:
            assert op_id in ancestors_of(graph, later)


def test_what_an_op_must_follow_counts() -> None:
    graph = Graph(
        (
            Op(0, "a", "", (), (), recomputable=False),
            Op(1, "b", "", (), (), recomputable=False, after=(0,)),
        ),
        (),
        (),
    )
    assert predecessors(graph, 1) == {0}
    assert descendants_of(graph, 0) == {1}


def test_the_first_follower_and_an_effect_end_the_runs_of_an_op() -> None:
    graph = Graph(
        (
            Op(0, "a", "", (), ()),
            Op(1, "b", "", (), (), recomputable=False),
            Op(2, "c", "", (), (), after=(0,)),
            Op(3, "d", "", (), (), after=(0, 1, 2)),
        ),
        (),
        (),
    )
    problem = Problem(graph, Profile((1.0,) * 4, (0,) * 4, 0))
    assert last_runs(problem.graph, (1, 0, 2, 3)) == [2, -1, 3, 4]
