"""What a plan's order needs on a GPU: which ops must not share a kernel, and when weights are
updated."""

from dataclasses import replace

import pytest
from flat_program import KINDS, LARGE
from graph_builder import Builder

from keras_remat.backends.xla.holding import (
    apart,
    needed,
    updated_early,
    waiting,
    waits_for_updates,
)
from keras_remat.core.graph import BACKWARD, UPDATE


def relu():
    """A product, a sum of it, what reads the sum, and another sum of the product."""
    b = Builder()
    made = b.add("dot", LARGE)
    cut = b.add("add", LARGE, (made,))
    read = b.add("call", LARGE, (cut,))
    other = b.add("add", LARGE, (made,), phase=BACKWARD)
    return b.problem((read, b.add("call", LARGE, (other,), phase=BACKWARD))).graph


def test_what_reads_the_value_of_one_that_ran_again_and_is_let_go_runs_alone():
    graph = relu()
    assert apart(graph, [0, 1, 1, 2, 3, 4], KINDS) == {4}
    assert not apart(graph, [0, 1, 2, 3, 4], KINDS), "XLA cannot bring the phases together"
    assert not apart(graph, [0, 1, 1, 3, 2, 4], KINDS), "both are there at one time"
    assert not apart(graph, [0, 1, 1, 2, 0, 3, 4], KINDS), "it reads another copy"


def test_small_values_share_a_kernel():
    graph = relu()
    small = replace(graph, values=tuple(replace(v, nbytes=4) for v in graph.values))
    assert not apart(small, [0, 1, 1, 2, 3, 4], KINDS)


@pytest.mark.parametrize(("share", "is_needed"), [(0.5, False), (3, True)])
def test_a_sum_is_held_where_what_it_is_made_of_would_be_the_most_that_is_alive(share, is_needed):
    """With it and what comes between it and its readers."""
    b = Builder()
    two = b.add("dot", LARGE), b.add("dot", LARGE)
    made = b.add("add", LARGE, two)
    between = b.add("dot", int(share * LARGE))
    ends = [b.add("sum", 4, (made, between)), b.add("sum", 4, (made,))]
    graph, order = b.problem(tuple(ends)).graph, range(6)
    asked = waiting(graph, order, KINDS)
    assert asked == {2}
    assert needed(graph, order, KINDS, asked, ()) == (asked if is_needed else frozenset())


def test_weights_are_updated_behind_what_reads_the_old_ones():
    """A rate that only updates need comes first; what waits for nothing stays where it is."""
    b = Builder()
    first = b.add("dot", LARGE)  # 0
    gradient = b.add("dot", LARGE, (first,), phase=BACKWARD)  # 1
    moment = b.add("add", 0, (gradient,), phase=UPDATE)  # 2
    back = b.add("dot", LARGE, (first,), phase=BACKWARD)  # 3
    last = b.add("call", LARGE, (back,), phase=BACKWARD)  # 4
    rate = b.add("exp", 4)  # 5
    weight = b.add("add", 0, (moment, rate), phase=UPDATE, after=(3,))  # 6
    loss = b.add("sum", 4, (first,))  # 7
    graph = b.problem((moment, weight, last, loss)).graph
    assert updated_early(graph, range(8), [6]) == (5, 0, 1, 2, 3, 6, 4, 7)
    assert updated_early(graph, [0, 1, 2, 3, 4, 3, 5, 6, 7], [6]) == (5, 0, 1, 2, 3, 4, 3, 6, 7)
    assert updated_early(graph, range(8), []) == tuple(range(8))


@pytest.mark.parametrize(("share", "waits"), [(0.1, False), (0.5, True)])
def test_gradients_that_wait_for_their_updates_are_told(share, waits):
    b = Builder()
    first = b.add("dot", LARGE)
    gradient = b.add("dot", int(share * LARGE), (first,), phase=BACKWARD)
    weight = b.add("add", 0, (gradient,), phase=UPDATE)
    back = b.add("dot", LARGE, (first,), phase=BACKWARD)
    graph = b.problem((weight, back)).graph
    assert waits_for_updates(graph, range(4), {2}) == waits
    assert not waits_for_updates(graph, range(4), ())
