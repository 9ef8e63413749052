"""The memory semantics, sentence by sentence, on graphs small enough to count by hand."""

import dataclasses
import random

import numpy as np
import pytest
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import last_reads, live_bytes, simulate
from keras_remat.core.validate import executed_peak_bytes

CHAIN = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
STORE_ALL, RECOMPUTE_A = Schedule((0, 1, 2, 3, 4)), Schedule((0, 1, 2, 3, 0, 4))


def chain_of(nbytes, *, outputs, reuse=(), workspace=None, resident=0):
    """A chain of one-output ops; the ops in ``reuse`` may take over their input's buffer."""
    n = len(nbytes)
    ops = tuple(
        Op(i, f"o{i}", "K", (i - 1,) if i else (), (i,), may_reuse=(i - 1,) if i in reuse else ())
        for i in range(n)
    )
    values = tuple(Value(i, f"v{i}", nbytes[i], producer=i) for i in range(n))
    return Problem(
        Graph(ops, values, outputs), Profile((1.0,) * n, workspace or (0,) * n, resident)
    )


def test_the_chain_example():
    assert live_bytes(CHAIN, STORE_ALL).tolist() == [4, 5, 11, 11, 7]
    assert live_bytes(CHAIN, RECOMPUTE_A).tolist() == [4, 5, 7, 7, 5, 7]
    assert simulate(CHAIN, STORE_ALL) == Usage(5.0, 11)
    assert simulate(CHAIN, RECOMPUTE_A) == Usage(6.0, 7)


def test_last_reads_of_each_instance():
    assert last_reads(CHAIN.graph, RECOMPUTE_A.order) == [
        {0: 1},
        {1: 2},
        {2: 3},
        {3: 5},
        {0: 5},
        {4: 5},
    ]


def test_workspace_and_resident_bytes():
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0, 0, 10, 0, 0), 100))
    assert live_bytes(problem, STORE_ALL).tolist() == [104, 105, 121, 111, 107]


def test_an_instance_nobody_reads_lives_while_its_op_runs():
    assert live_bytes(CHAIN, Schedule((0, 0, 1, 2, 3, 3, 0, 4))).tolist() == [
        4,
        4,
        5,
        7,
        7,
        7,
        5,
        7,
    ]
    side = Problem(
        Graph(
            (Op(0, "a", "K", (), (0,)), Op(1, "b", "K", (), (1,))),
            (Value(0, "a", 9, producer=0), Value(1, "b", 1, producer=1)),
            (1,),
        ),
        Profile((1.0, 1.0), (0, 0), 0),
    )
    assert live_bytes(side, Schedule((0, 1))).tolist() == [9, 1]


def test_outputs_live_to_the_end():
    assert live_bytes(chain_of((8, 1, 1), outputs=(0, 2)), Schedule((0, 1, 2))).tolist() == [
        8,
        9,
        10,
    ]


def test_an_output_computed_again_lives_twice():
    assert live_bytes(chain_of((8, 1, 1), outputs=(0, 2)), Schedule((0, 1, 2, 0))).tolist() == [
        8,
        9,
        2,
        9,
    ]


def test_an_output_takes_over_the_buffer_of_a_dying_input():
    assert live_bytes(chain_of((4, 4, 4), outputs=(2,)), Schedule((0, 1, 2))).tolist() == [4, 8, 8]
    assert live_bytes(
        chain_of((4, 4, 4), outputs=(2,), reuse=(1, 2)), Schedule((0, 1, 2))
    ).tolist() == [4, 4, 4]


def test_no_takeover_of_another_size_or_of_a_value_read_later():
    assert live_bytes(
        chain_of((4, 3, 3), outputs=(2,), reuse=(1,)), Schedule((0, 1, 2))
    ).tolist() == [4, 7, 6]
    assert live_bytes(chain_of((4, 4), outputs=(0, 1), reuse=(1,)), Schedule((0, 1))).tolist() == [
        4,
        8,
    ]
    graph = dataclasses.replace(
        chain_example(),
        ops=tuple(dataclasses.replace(op, may_reuse=op.inputs) for op in CHAIN.graph.ops),
    )
    assert live_bytes(Problem(graph, CHAIN.profile), STORE_ALL).tolist() == [4, 5, 11, 11, 7]


def test_a_step_inputs_buffer_is_never_taken_over_or_counted():
    graph = Graph(
        (Op(0, "a", "K", (0,), (1,), may_reuse=(0,)),),
        (Value(0, "w", 4), Value(1, "a", 4, producer=0)),
        (1,),
    )
    assert simulate(Problem(graph, Profile((1.0,), (0,), 4)), Schedule((0,))) == Usage(1.0, 8)


def test_each_buffer_is_taken_over_once():
    ops = (Op(0, "a", "K", (), (0,)), Op(1, "b", "K", (0,), (1, 2), may_reuse=(0,)))
    graph = Graph(ops, tuple(Value(i, f"v{i}", 4, producer=min(i, 1)) for i in range(3)), (1, 2))
    assert live_bytes(
        Problem(graph, Profile((1.0, 1.0), (0, 0), 0)), Schedule((0, 1))
    ).tolist() == [4, 8]


def test_the_empty_order_holds_the_resident_bytes():
    assert simulate(Problem(Graph((), (), ()), Profile((), (), 17)), Schedule(())) == Usage(0.0, 17)
    assert simulate(Problem(Graph((), (), ()), Profile((), (), 0)), Schedule(())) == Usage(0.0, 0)


def test_types_are_plain():
    usage = simulate(CHAIN, Schedule(np.array([0, 1, 2, 3, 4])))
    assert (type(usage.time_s), type(usage.peak_bytes)) == (float, int)
    assert live_bytes(CHAIN, STORE_ALL).dtype == np.int64


def test_bytes_do_not_overflow():
    assert (
        simulate(chain_of((2**62, 2**62, 2**62), outputs=(0, 1, 2)), Schedule((0, 1, 2))).peak_bytes
        == 3 * 2**62
    )


def test_simulate_equals_the_validators_executor():
    """Two programs that share no code agree on the peak of 3,000 random schedules of 1,500 random
    problems."""
    recomputed = saved = 0
    for seed in range(1500):
        problem = mixed_problem(seed, budget=False)
        rng = random.Random(seed)
        for schedule in (Schedule.store_all(problem.graph), random_schedule(rng, problem.graph)):
            usage = simulate(problem, schedule)
            assert usage.peak_bytes == executed_peak_bytes(problem, schedule), seed
            assert usage.peak_bytes == int(live_bytes(problem, schedule).max()), seed
            assert usage.time_s == pytest.approx(
                sum(problem.profile.op_time_s[i] for i in schedule.order)
            ), seed
            recomputed += bool(schedule.recomputed)
            saved += bool(any(problem.graph.ops[i].may_reuse for i in schedule.order))
    assert min(recomputed, saved) > 500, "the generator must reach recomputation and buffer reuse"
