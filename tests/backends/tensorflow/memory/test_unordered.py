"""Steps in no order, several ops at once: what they hold, against cases worked out by hand."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from random_problems import mixed_problem

from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.units import MIB


def gradients(scratch_mib):
    """The gradient of an image, 2 MiB, and the two of the convolution before it, which read it:
    each asks for scratch and makes 1 MiB. The update reads both."""
    ops = (
        Op(0, "image", "a", (), (0,)),
        Op(1, "of the filter", "b", (0,), (1,)),
        Op(2, "of the input", "c", (0,), (2,)),
        Op(3, "update", "d", (1, 2), (3,)),
    )
    sizes = (2, 1, 1, 1)
    values = tuple(Value(v, f"v{v}", n * MIB, producer=v) for v, n in enumerate(sizes))
    profile = Profile((1.0,) * 4, (0, *(n * MIB for n in scratch_mib), 0), 5 * MIB)
    return Problem(Graph(ops, values, (3,)), profile)


def unordered(memory, problem, at_once, spare_bytes=0, ahead=MappingProxyType({})):
    return memory.unordered_peak_bytes(problem, at_once, spare_bytes, ahead)


def test_kernels_that_run_at_once_hold_their_scratch_at_once():
    """In order, 4 of the 36 MiB come before the second gradient's 32, which the first one had."""
    problem, memory = gradients((32, 32)), ReplayedMemory(smallest_bytes=0)
    in_order = memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    assert in_order == (5 + 4 + 32) * MIB
    assert unordered(memory, problem, 1) == in_order
    assert unordered(memory, problem, 2) == in_order + 32 * MIB


def test_what_loops_hold_ahead_is_beside_their_workspace():
    problem, memory = gradients((8, 8)), ReplayedMemory(smallest_bytes=0)
    ahead = {1: 24 * MIB}
    found = unordered(memory, problem, 2, ahead=ahead)
    assert found == unordered(memory, gradients((32, 8)), 2)


def test_what_is_not_counted_is_held_nowhere():
    problem, memory = gradients((1, 1)), ReplayedMemory(smallest_bytes=2 * MIB)
    assert unordered(memory, problem, 2) == 7 * MIB


def test_nothing_is_simulated_where_all_that_is_made_would_fit():
    """Twice 5 MiB, and twice the scratch, since a chunk may be twice as large as what it is for."""
    problem, memory = gradients((32, 32)), ReplayedMemory(smallest_bytes=0)
    most = (5 + 2 * (5 + 64)) * MIB
    roomy = problem.with_budget(most)
    assert unordered(memory, roomy, 2) == most
    assert unordered(memory, roomy, 2, spare_bytes=1) == (5 + 4 + 64) * MIB


@pytest.mark.parametrize("seed", range(20))
def test_several_at_once_hold_no_less_than_one_op_alone_and_no_more_than_all(seed):
    problem, memory = mixed_problem(seed), ReplayedMemory(smallest_bytes=0)
    everything = unordered(ReplayedMemory(smallest_bytes=0), problem.with_budget(2**60), 100)
    for at_once in (1, 2, 100):
        found = unordered(memory, problem, at_once)
        assert problem.floor_bytes <= found <= everything
        again = ReplayedMemory(smallest_bytes=0)
        same = replace(problem, profile=replace(problem.profile))
        assert unordered(again, same, at_once) == found, "the same in every process"
