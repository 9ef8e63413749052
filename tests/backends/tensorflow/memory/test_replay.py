"""Orders replayed through the allocator, against cases worked out by hand."""

import pytest

from keras_remat.backends.tensorflow.memory import replayed
from keras_remat.backends.tensorflow.memory.best_fit import Extent
from keras_remat.backends.tensorflow.memory.pool import Pool
from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.units import GIB, KIB, MIB


def peak_bytes(problem, *order, smallest_bytes=0, region_bytes=0):
    memory = ReplayedMemory(smallest_bytes=smallest_bytes, region_bytes=region_bytes)
    return memory.peak_bytes(problem, Schedule(order))


def problem_of(ops, sizes_mib, outputs, workspace_mib=(), resident_mib=0):
    producers = {v: op.id for op in ops for v in op.outputs}
    values = tuple(
        Value(v, f"v{v}", int(size * MIB), producer=producers.get(v))
        for v, size in enumerate(sizes_mib)
    )
    workspace = tuple(n * MIB for n in workspace_mib) or (0,) * len(ops)
    profile = Profile((1.0,) * len(ops), workspace, resident_mib * MIB)
    return Problem(Graph(tuple(ops), values, outputs), profile)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 0, 4)])
def test_one_large_region_has_about_the_simulated_peak(order):
    """The running example, bytes 4 1 6 1 2 in units of 64 MiB: no chunk is much too large."""
    unit, chain = 64 * MIB, chain_example()
    values = tuple(Value(v.id, v.name, v.nbytes * unit, producer=v.producer) for v in chain.values)
    problem = Problem(Graph(chain.ops, values, chain.outputs), Profile((1.0,) * 5, (0,) * 5, 0))
    simulated = simulate(problem, Schedule(order)).peak_bytes
    assert simulated <= peak_bytes(problem, *order, region_bytes=64 * unit) <= simulated + 2 * unit


def test_resident_bytes_are_in_the_one_region_and_beside_growing_ones():
    problem = problem_of([Op(0, "a", "a", (), (0,))], [2], (0,), resident_mib=3)
    assert peak_bytes(problem, 0) == peak_bytes(problem, 0, region_bytes=64 * MIB) == 5 * MIB
    # the 3 MiB that they leave of the region are handed out whole
    assert peak_bytes(problem, 0, region_bytes=6 * MIB) == 6 * MIB


def test_a_dying_input_gives_its_buffer():
    ops = [Op(0, "a", "a", (), (0,)), Op(1, "b", "b", (0,), (1,), may_reuse=(0,))]
    problem = problem_of(ops, [1, 1], (1,), resident_mib=5)
    assert peak_bytes(problem, 0, 1, region_bytes=64 * MIB) == 6 * MIB


def test_a_chunk_is_handed_out_whole_unless_it_is_twice_the_request():
    """6 MiB lies in the chunk of 10 that the first value left, while 1 MiB is alive behind it."""
    ops = [
        Op(0, "a", "a", (), (0,)),
        Op(1, "b", "b", (0,), (1,)),
        Op(2, "c", "c", (1,), (2,)),
        Op(3, "d", "d", (1, 2), (3,)),
    ]
    problem = problem_of(ops, [10, 1, 6, 1], (3,))
    assert peak_bytes(problem, 0, 1, 2, 3, region_bytes=64 * MIB) == 12 * MIB
    assert simulate(problem, Schedule((0, 1, 2, 3))).peak_bytes == 11 * MIB


def test_requests_too_small_for_the_pool_do_not_count():
    ops = [Op(0, "a", "a", (), (0,)), Op(1, "b", "b", (0,), (1,))]
    problem = problem_of(ops, [0.125, 1], (1,))
    assert peak_bytes(problem, 0, 1, smallest_bytes=256 * KIB, region_bytes=64 * MIB) == MIB
    assert peak_bytes(problem, 0, 1, region_bytes=64 * MIB) == MIB + 128 * KIB


@pytest.mark.parametrize(("kind", "peak"), [("AssignVariableOp", 8), ("Anything", 7)])
def test_an_assigned_value_becomes_the_variable(kind, peak):
    """The 3 MiB that the variable had are free from then on: the first value of 2 gets them whole.
    Nothing is counted twice."""
    ops = [
        Op(0, "new", "x", (), (0,)),
        Op(1, "assign", kind, (0,), ()),
        *(Op(at, f"{at}", "x", (), (at - 1,)) for at in (2, 3)),
    ]
    problem = problem_of(ops, [3, 2, 2], (1, 2), resident_mib=3)
    assert peak_bytes(problem, 0, 1, 2, 3, region_bytes=64 * MIB) == peak * MIB


def test_workspace_is_alive_while_its_op_runs():
    ops = [Op(0, "a", "a", (), (0,)), Op(1, "b", "b", (0,), (1,))]
    problem = problem_of(ops, [1, 2], (1,), workspace_mib=(5, 1))
    assert peak_bytes(problem, 0, 1, region_bytes=64 * MIB) == 6 * MIB


def test_what_was_measured_corrects_orders_as_tight():
    ops = [Op(0, "a", "a", (), (0,)), Op(1, "b", "b", (0,), (1,))]
    problem = problem_of(ops, [4, 4], (1,), resident_mib=2)
    memory, order = ReplayedMemory(smallest_bytes=0, region_bytes=64 * MIB), Schedule((0, 1))
    assert memory.order_matters
    assert memory.restores_after_plain
    assert not ReplayedMemory(smallest_bytes=0, on_gpu=True).restores_after_plain
    assert memory.compiled_peak_bytes(problem, order) is None
    assert memory.peak_bytes(problem, order) == 10 * MIB
    memory.observe(problem, order, 12 * MIB)
    assert memory.peak_bytes(problem, order) == 12 * MIB
    assert memory.plain_step_peak_bytes(problem, order) == 12 * MIB


def test_problems_are_told_apart_by_their_graphs_and_by_their_profiles():
    problem = problem_of([Op(0, "a", "a", (), (0,))], [4], (0,))
    large = problem_of([Op(0, "a", "a", (), (0,))], [6], (0,))
    asks = problem_of([Op(0, "a", "a", (), (0,))], [4], (0,), workspace_mib=(1,))
    memory, order = ReplayedMemory(smallest_bytes=0, region_bytes=64 * MIB), Schedule((0,))
    with_its_graph = Problem(large.graph, problem.profile)
    with_its_profile = Problem(problem.graph, asks.profile)
    for _ in range(2):
        assert memory.peak_bytes(problem, order) == 4 * MIB
        assert memory.peak_bytes(with_its_graph, order) == 6 * MIB
        assert memory.peak_bytes(with_its_profile, order) == 5 * MIB


@pytest.fixture
def shown(monkeypatch):
    """What recordings show, the next one first."""
    pools = []
    monkeypatch.setattr(replayed, "recorded_pool", lambda memory, region_bytes: pools.pop(0))
    return pools


def pool_of(*free_mib, in_use_mib=(), region_mib=64, seen_mib=None):
    """Chunks of those sizes, none next to another."""
    sizes = [(n * MIB, 0) for n in free_mib] + [(n * MIB, n * MIB) for n in in_use_mib]
    extents = tuple(Extent(at * GIB, *size) for at, size in enumerate(sizes))
    return Pool(extents, region_mib * MIB, sum(free_mib if seen_mib is None else [seen_mib]) * MIB)


def test_a_recorded_pool_is_what_an_order_finds(shown):
    """A chunk of 10 MiB is handed out whole for 6, as is a new region of 8; one of 16 is cut."""
    problem = problem_of([Op(0, "a", "a", (), (0,))], [6], (0,), resident_mib=5)
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0,))
    assert memory.peak_bytes(problem, order) == 13 * MIB
    memory.look(problem, [], 64 * MIB)  # it has nothing to look with
    shown += [pool_of(10, 32), pool_of(16, 32), None]
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == 15 * MIB
    assert memory.plain_step_peak_bytes(problem, order) == 13 * MIB
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == 11 * MIB
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == 11 * MIB, "one that shows nothing changes nothing"


@pytest.mark.parametrize(("kind", "peak_mib"), [("MaxPoolGrad", 9), ("Conv2DBackpropInput", 8)])
def test_what_is_requested_first_gets_the_smallest_chunk(shown, kind, peak_mib):
    """All of its 5 MiB: be it the workspace of 3 or the output of 4."""
    problem = problem_of([Op(0, "a", kind, (), (0,))], [4], (0,), workspace_mib=(3,))
    memory = ReplayedMemory(smallest_bytes=0)
    shown += [pool_of(5, 32)]
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, Schedule((0,))) == peak_mib * MIB


@pytest.mark.parametrize(("region_mib", "peak_mib"), [(64, 15), (128, 11)])
def test_a_recording_that_shows_less_of_the_same_regions_is_not_believed(
    shown, region_mib, peak_mib
):
    problem = problem_of([Op(0, "a", "a", (), (0,))], [6], (0,), resident_mib=5)
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0,))
    shown += [pool_of(10, 32), pool_of(16, 32, region_mib=region_mib, seen_mib=20)]
    memory.find_pool([], problem)
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == peak_mib * MIB


def test_what_was_learnt_of_another_pool_is_forgotten(shown):
    problem = problem_of([Op(0, "a", "a", (), (0,))], [6], (0,), resident_mib=5)
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0,))
    memory.observe(problem, order, 20 * MIB)
    assert memory.peak_bytes(problem, order) == 20 * MIB
    shown += [pool_of(10, 32)]
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == 15 * MIB


def test_a_pool_that_was_looked_at_serves_until_steps_were_recorded(shown):
    """A look is asked for no more than it may have in use; what steps show is believed, however
    little it is."""
    asked, problem = [], problem_of([Op(0, "a", "a", (), (0,))], [6], (0,), resident_mib=5)
    memory = ReplayedMemory(smallest_bytes=0, see=lambda *given: asked.append(given) or [])
    shown += [pool_of(10, 32), None, pool_of(8, 32), pool_of(16, 32, seen_mib=1)]
    peaks_mib = []
    for _ in range(3):
        memory.look(problem, [MIB], 40 * MIB)
        peaks_mib.append(memory.peak_bytes(problem, Schedule((0,))) // MIB)
    memory.find_pool([], problem)
    memory.look(problem, [MIB], 40 * MIB)
    peaks_mib.append(memory.peak_bytes(problem, Schedule((0,))) // MIB)
    assert peaks_mib == [15, 15, 13, 11]
    assert asked == [([MIB], 40 * MIB)] * 3


@pytest.mark.parametrize(("on_gpu", "peak_mib"), [(False, 10), (True, 9)])
def test_a_batch_that_came_before_the_recording_lies_elsewhere(shown, on_gpu, peak_mib):
    """The value of 4 MiB gets the whole chunk of 5. On a GPU the batch's 3 are copied there first,
    and the value gets a part of the large one."""
    problem = problem_of([Op(0, "a", "a", (0,), (1,))], [3, 4], (1,), resident_mib=5)
    memory, order = ReplayedMemory(smallest_bytes=0, on_gpu=on_gpu), Schedule((0,))
    shown += [pool_of(5, 32)]
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == peak_mib * MIB


def test_a_batch_of_another_size_lies_in_the_pool_and_is_among_the_resident_bytes(shown):
    """3 MiB of it take the chunk of 4, so that the value gets a part of the large one."""
    recorded, problem = (
        problem_of([Op(0, "a", "a", (0,), (1,))], [batch_mib, 4], (1,), resident_mib=5)
        for batch_mib in (2, 3)
    )
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0,))
    shown += [pool_of(4, 32)]
    memory.find_pool([], recorded)
    assert memory.peak_bytes(problem, order) == 9 * MIB


def test_batches_that_wait_keep_their_chunks(shown):
    """Of 3 MiB each: were one free, the value would get all of it. The 2 MiB are of another one."""
    problem = problem_of([Op(0, "a", "a", (0,), (1,))], [3, 2.5], (1,), resident_mib=6)
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0,))
    shown += [pool_of(32, in_use_mib=(3, 3, 2), region_mib=40)]
    memory.find_pool([], problem)
    assert memory.peak_bytes(problem, order) == int(8.5 * MIB)


def test_chunks_in_use_are_those_of_variables_that_are_assigned_or_free(shown):
    """The variable's 3 MiB are free once its new value is there; the batch's 5 at once."""
    ops = [
        Op(0, "new", "x", (), (0,)),
        Op(1, "assign", "AssignVariableOp", (0,), ()),
        Op(2, "b", "b", (), (1,)),
    ]
    problem = problem_of(ops, [3, 5], (1,), resident_mib=3)
    memory, order = ReplayedMemory(smallest_bytes=0), Schedule((0, 1, 2))
    shown += [pool_of(6, in_use_mib=(5, 3), region_mib=14)]
    memory.find_pool([], problem)
    uses = memory._uses_of(problem)
    assert uses.assigned == [("assign", 3 * MIB)]
    # the new value takes the 5 MiB that the batch left, and the value behind it all of the 6
    assert memory.peak_bytes(problem, order) == (3 + 5 - 3 + 6) * MIB
