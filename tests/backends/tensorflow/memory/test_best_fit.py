"""Best fit with coalescing, against cases worked out by hand from the rules of TensorFlow's BFC
allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator, Cut
from keras_remat.backends.tensorflow.memory.replay import replayed
from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Chunk, Pool, Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.units import KIB, MIB


def replayed_peak_bytes(*arguments, **options):
    peak, cuts = replayed(*arguments, **options)
    assert not cuts
    return peak


def chunks(*sizes_mib):
    """Free chunks that are no neighbours."""
    return tuple(Chunk((at + 1) * 2**40, int(mib * MIB)) for at, mib in enumerate(sizes_mib))


def test_requests_are_rounded_to_256_bytes():
    pool = BestFitAllocator(pool_bytes=MIB)
    pool.allocate(1)
    assert pool.bytes_in_use == 256
    pool.allocate(257)
    assert pool.bytes_in_use == 256 + 512


def test_a_free_chunk_below_twice_the_request_is_handed_out_whole():
    pool = BestFitAllocator(pool_bytes=64 * MIB)
    first = pool.allocate(10 * MIB)
    pool.allocate(MIB)  # keeps the first chunk from joining the rest
    pool.release(first)
    pool.allocate(6 * MIB)
    assert pool.bytes_in_use == 11 * MIB
    assert pool.peak_bytes == 11 * MIB


def test_a_free_chunk_of_twice_the_request_is_split():
    pool = BestFitAllocator(pool_bytes=64 * MIB)
    first = pool.allocate(10 * MIB)
    pool.allocate(MIB)
    pool.release(first)
    pool.allocate(5 * MIB)
    pool.allocate(5 * MIB)  # the other half
    assert pool.bytes_in_use == 11 * MIB


def test_neighbours_join_when_they_are_free():
    pool = BestFitAllocator(pool_bytes=12 * MIB)
    chunks = [pool.allocate(4 * MIB) for _ in range(3)]
    for chunk in (chunks[0], chunks[2], chunks[1]):
        pool.release(chunk)
    assert pool.bytes_in_use == 0
    assert pool.allocate(12 * MIB).size == 12 * MIB


def test_replay_begins_with_the_chunks_that_are_free():
    """Three chunks that do not join: 6 MiB is served by 10 whole, 1 MiB is cut off 2, and 3 MiB
    takes 4 whole."""
    pool = BestFitAllocator(free_chunks=chunks(2, 4, 10))
    assert [pool.allocate(n * MIB).size // MIB for n in (6, 1, 3)] == [10, 1, 4]
    assert pool.bytes_in_use == 15 * MIB


@pytest.mark.parametrize(("kind", "peak"), [("AssignVariableOp", 5), ("Anything", 4)])
def test_an_assignment_moves_the_variable(kind, peak):
    """A variable of 3 MiB comes to lie in a chunk of 4, which the value of 4 MiB after it then
    cannot have: it leaves a hole of 3 instead."""
    ops = (
        Op(0, "new", "x", (), (0,)),
        Op(1, "assign", kind, (0,), ()),
        Op(2, "large", "x", (), (1,), after=(1,)),
    )
    graph = Graph(
        ops, (Value(0, "v", 3 * MIB, producer=0), Value(1, "t", 4 * MIB, producer=2)), (1,)
    )
    problem = Problem(graph, Profile((1.0,) * 3, (0,) * 3, 10 * MIB, pool=Pool(chunks(4, 16))))
    assert replayed_peak_bytes(problem, Schedule((0, 1, 2)), steps=1) == (10 + peak) * MIB


@pytest.mark.parametrize(("address_mib", "found"), [(3, True), (4, False)])
def test_used_chunk_joins_the_free_one_behind_it(address_mib, found):
    """3 MiB used beside 5 free ones: given back they are 8 in one piece, unless something unknown
    lies between."""
    pool = BestFitAllocator(
        free_chunks=[Chunk(address_mib * MIB, 5 * MIB)], used_chunks=[Chunk(0, 3 * MIB)]
    )
    pool.release(pool.chunk_at(0))
    assert (pool.allocate(8 * MIB).address == 0) == found


@pytest.mark.parametrize(
    ("free", "request_mib", "cut"),
    [
        ((10,), 6, Cut((), 4 * MIB - 320 * KIB, 320 * KIB)),  # it would be handed out whole
        ((12,), 6, None),  # it is cut in any case
        ((6, 10), 6, None),  # the first fits
        (
            (4, 10),
            6,
            Cut((4 * MIB,), 4 * MIB - 320 * KIB, 320 * KIB),
        ),  # without the plug, 4 MiB would be found elsewhere
        ((5.5, 10), 6, Cut((int(5.5 * MIB),), 4 * MIB - 320 * KIB, 320 * KIB)),
        ((5, 5, 10), 6, None),  # plugs would take more than the cut saves
        ((0.5, 10), 6, Cut((), 0, 4 * MIB)),  # all that is spare is held, where there is room
        ((10,), 11, None),  # the pool grows
        ((10,), 0, None),
        ((400,), 250, None),  # 128 MiB more are cut off
    ],
)
def test_cut_leaves_a_chunk_that_fits(free, request_mib, cut):
    pool = BestFitAllocator(free_chunks=chunks(*free), smallest_bytes=256 * KIB)
    request = request_mib * MIB
    room = request + 4 * MIB if cut is not None and not cut.spare_bytes else request
    assert pool.cut_for(request, request, room) == cut


def test_where_plugs_would_take_too_much_all_that_is_spare_is_held():
    """As much as would be wasted, but while the op runs only."""
    pool = BestFitAllocator(free_chunks=chunks(15, 15, 40))
    assert pool.cut_for(24 * MIB, 24 * MIB, 24 * MIB) == Cut((), 0, 16 * MIB)


def test_cut_of_less_than_half_a_mib_is_not_worth_it():
    nbytes = 10 * MIB - 300 * KIB
    assert BestFitAllocator(free_chunks=chunks(10)).cut_for(nbytes, nbytes, nbytes) is None


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 60), st.integers(0, 40))
def test_cuts_take_no_more_than_they_save_and_leave_the_pool_as_it_was(free, quarters, more):
    """Sizes in quarters of a MiB: no more is in use beside the request, and before it, than would
    have been wasted."""
    quarter = MIB // 4
    pool = BestFitAllocator(
        free_chunks=tuple(Chunk((at + 1) * 2**40, n * quarter) for at, n in enumerate(free)),
        smallest_bytes=256 * KIB,
    )
    request, room, before = quarters * quarter, (quarters + more) * quarter, pool.free_chunks
    wasted = (
        BestFitAllocator(free_chunks=tuple(Chunk(a, n) for n, a in before)).allocate(request).size
        - request
    )
    cut = pool.cut_for(request, request, room)
    if cut is None:
        return
    edge = pool.take(cut)
    chunk = pool.allocate(request)
    assert chunk.size == request
    assert pool.peak_bytes - room <= wasted
    pool.release(chunk)
    pool.release(edge)
    assert pool.bytes_in_use == 0
    assert pool.free_chunks == before


def cut_example(pool=None):
    """A value of 6 MiB, which would lie in the chunk of 10 as long as one of 3 is needed beside it;
    a small one is computed twice."""
    ops = (
        Op(0, "a", "x", (), (0,)),
        Op(1, "b", "x", (0,), (1,)),
        Op(2, "c", "x", (0, 1), (2,)),
        Op(3, "d", "x", (2,), (3,)),
    )
    sizes = (6, 3, 1, 1)
    graph = Graph(
        ops, tuple(Value(v, f"v{v}", n * MIB, producer=v) for v, n in enumerate(sizes)), (3,)
    )
    return Problem(graph, Profile((1.0,) * 4, (0,) * 4, 20 * MIB, pool=pool))


def test_cut_leaves_the_rest_of_a_chunk_to_what_comes_next():
    problem = cut_example(Pool((Chunk(0, 10 * MIB), Chunk(64 * MIB, 32 * MIB))))
    twice = Schedule((0, 1, 2, 2, 3))
    assert replayed(problem, twice) == ((20 + 10 + 3 + 1) * MIB, {})
    peak, cuts = replayed(problem, twice, may_cut=True)
    assert peak == (20 + 6 + 3 + 1) * MIB
    assert cuts[0] == (Cut((), 0, 4 * MIB),)  # there is room for it then


def test_no_cuts_without_recomputation_or_a_known_pool_or_a_gain():
    known = Pool((Chunk(0, 10 * MIB), Chunk(64 * MIB, 32 * MIB)))
    assert replayed(cut_example(known), Schedule((0, 1, 2, 3)), may_cut=True)[1] == {}
    assert replayed(cut_example(), Schedule((0, 1, 2, 2, 3)), may_cut=True)[1] == {}
    assert replayed(cut_example(Pool(chunks(64))), Schedule((0, 1, 2, 2, 3)), may_cut=True)[1] == {}


def test_cuts_for_several_requests_of_an_op_are_made_one_after_the_other():
    """Two outputs of 6 and 5 MiB and chunks of 9 and 10 that would be handed out whole."""
    ops = (Op(0, "a", "x", (), (0, 1)), Op(1, "b", "x", (0, 1), (2,)), Op(2, "c", "x", (2,), (3,)))
    values = tuple(
        Value(v, f"v{v}", n * MIB, producer=p)
        for v, (n, p) in enumerate(((6, 0), (5, 0), (1, 1), (1, 2)))
    )
    problem = Problem(
        Graph(ops, values, (3,)), Profile((1.0,) * 3, (0,) * 3, 0, pool=Pool((*chunks(9, 9.5),)))
    )
    order = Schedule((0, 1, 1, 2))
    assert replayed(problem, order)[0] == int(18.5 * MIB) + MIB
    peak, cuts = replayed(problem, order, smallest_bytes=256 * KIB, may_cut=True)
    assert peak == int(
        13.5 * MIB
    )  # for a moment, with two plugs: what the first request will get, and what its cut has left
    assert cuts[0][1] == Cut(
        (6 * MIB, 3 * MIB - 320 * KIB), cuts[0][1].spare_bytes, cuts[0][1].edge_bytes
    )


def test_two_assignments_of_one_variable_move_it_twice():
    """The first frees the variable's home of 6 MiB, the second what the first has put there: 12 MiB
    are never in use beside the home."""
    ops = (
        Op(0, "a", "x", (), (0,)),
        Op(1, "first", "AssignVariableOp", (0,), ()),
        Op(2, "b", "x", (), (1,), after=(1,)),
        Op(3, "second", "AssignVariableOp", (1,), (), after=(1,)),
    )
    graph = Graph(ops, (Value(0, "a", 6 * MIB, producer=0), Value(1, "b", 6 * MIB, producer=2)), ())
    home = Chunk(64 * MIB, 6 * MIB)
    pool = Pool(chunks(6, 32), (("first", home), ("second", home)))
    problem = Problem(graph, Profile((1.0,) * 4, (0,) * 4, 10 * MIB, pool=pool))
    assert replayed_peak_bytes(problem, Schedule((0, 1, 2, 3)), steps=3) == (10 + 6) * MIB


@pytest.mark.parametrize(
    ("pipeline", "held", "ahead", "peak"),
    [(False, 0, 0, 6), (True, 0, 0, 7), (True, 3, 0, 6), (True, 0, 3, 10)],
)
def test_inputs_take_chunks_of_a_known_pool(pipeline, held, ahead, peak):
    """A batch gets a chunk of 4 MiB for 3, unless it is made outside of ``fit``, or there is one
    already, whose chunk serves the next; one more ahead gets 3."""
    ops = (Op(0, "a", "a", (0,), (1,)),)
    graph = Graph(ops, (Value(0, "x", 3 * MIB), Value(1, "a", MIB, producer=0)), (1,))
    pool = Pool(chunks(4, 64), (), (), held * MIB, ahead * MIB)
    problem = Problem(graph, Profile((1.0,), (0,), (5 + ahead) * MIB, pool=pool))
    assert replayed_peak_bytes(problem, Schedule((0,)), pipeline=pipeline) == peak * MIB


def test_pipeline_holds_less_at_the_end_of_an_epoch_and_fills_again():
    """Two batches of 3 MiB lie ahead; however often they are used up and made again, no more are in
    use than at the beginning."""
    ops = (Op(0, "a", "a", (0,), (1,)),)
    graph = Graph(ops, (Value(0, "x", 3 * MIB), Value(1, "a", MIB, producer=0)), (1,))
    problem = Problem(
        graph, Profile((1.0,), (0,), 10 * MIB, pool=Pool(chunks(64), (), (), 9 * MIB, 6 * MIB))
    )
    assert replayed_peak_bytes(problem, Schedule((0,)), pipeline=True, steps=20) == 11 * MIB


def test_what_was_in_use_at_other_times_is_not_there():
    """10 MiB were the most between two steps, 3 of them no batch of the pool's; 1 is computed."""
    ops = (Op(0, "a", "a", (0,), (1,)),)
    graph = Graph(ops, (Value(0, "x", KIB), Value(1, "a", MIB, producer=0)), (1,))
    pool = Pool(chunks(64), (), (), 0, 3 * MIB)
    problem = Problem(graph, Profile((1.0,), (0,), 10 * MIB, pool=pool))
    assert (
        replayed_peak_bytes(problem, Schedule((0,)), smallest_bytes=256 * KIB, pipeline=True)
        == 8 * MIB - KIB
    )


def test_small_requests_are_served_elsewhere():
    pool = BestFitAllocator(smallest_bytes=256 * KIB)
    assert pool.allocate(256 * KIB - 1) is None
    assert pool.allocate(0) is None
    pool.release(None)
    assert pool.peak_bytes == 0


def test_replay_of_the_running_example_has_the_simulated_peak():
    """Bytes 4 1 6 1 2, in units of 64 MiB so that no chunk is larger than asked for."""
    unit, chain = 64 * MIB, chain_example()
    graph = Graph(
        chain.ops,
        tuple(Value(v.id, v.name, v.nbytes * unit, producer=v.producer) for v in chain.values),
        chain.outputs,
    )
    problem = Problem(graph, Profile((1.0,) * 5, (0,) * 5, 0))
    for order in ((0, 1, 2, 3, 4), (0, 1, 2, 3, 0, 4)):
        schedule = Schedule(order)
        simulated = simulate(problem, schedule).peak_bytes
        assert (
            simulated
            <= replayed_peak_bytes(problem, schedule, pool_bytes=64 * unit)
            <= simulated + 2 * unit
        )


def test_replay_reuses_the_buffer_of_a_dying_input():
    ops = (Op(0, "a", "a", (), (0,)), Op(1, "b", "b", (0,), (1,), may_reuse=(0,)))
    values = (Value(0, "a", MIB, producer=0), Value(1, "b", MIB, producer=1))
    problem = Problem(Graph(ops, values, (1,)), Profile((1.0, 1.0), (0, 0), 5 * MIB))
    assert (
        replayed_peak_bytes(problem, Schedule((0, 1)), pool_bytes=0) == 6 * MIB  # 7 without
    )  # the 2 MiB region is not split for 1 MiB + rest


@pytest.mark.parametrize(("kind", "peak"), [("Conv2DBackpropInput", 4), ("MaxPoolGrad", 3)])
def test_workspace_lies_behind_the_output_or_before_it(kind, peak):
    """1 MiB of output and 1 of workspace are cut off 4: the next 2 get all 3 behind an output at
    the front, and just 2 behind one in the middle."""
    ops = (Op(0, "a", kind, (), (0,)), Op(1, "b", "b", (0,), (1,)))
    values = (Value(0, "a", MIB, producer=0), Value(1, "b", 2 * MIB, producer=1))
    profile = Profile((1.0, 1.0), (MIB, 0), 0, pool=Pool(chunks(4), (), (), 0, 0))
    assert (
        replayed_peak_bytes(Problem(Graph(ops, values, (1,)), profile), Schedule((0, 1)))
        == peak * MIB
    )
