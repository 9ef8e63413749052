"""What XLA's heap takes: placed anew, byte by byte, by a program that shares no code."""

import math
import random

import numpy as np
from assigned_buffers import alive
from random_problems import mixed_problem
from random_schedules import random_schedule

from keras_remat.backends.xla.packing import (
    Buffer,
    buffers_of,
    heap_bytes,
    packed_bytes,
    with_fewer_gaps,
)
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, live_bytes, simulate
from keras_remat.core.validate import check_rules


def placed_byte_by_byte(buffers):
    """The size of the smaller heap of both orders."""
    largest = sorted(buffers, key=lambda one: (-one.nbytes, one.first - one.first_ends, one.first))
    longest = sorted(buffers, key=lambda one: (one.first - one.last, -one.nbytes, one.first))
    return min(table_bytes(largest), table_bytes(longest))


def table_bytes(order):
    """The size of the heap by a table of bytes and positions."""
    n = max(one.last for one in order) + 1
    taken = np.zeros((sum(one.nbytes for one in order), n), bool)
    for one in order:
        free = ~taken[:, one.first : one.last + 1].any(axis=1)
        gaps, start = [], None
        for at, is_free in enumerate([*free, False]):
            if is_free and start is None:
                start = at
            elif not is_free and start is not None:
                is_end = at == len(free)  # what lies above all that is alive is no gap
                gaps.append((is_end, at - start, start))
                start = None
        at = min(gap for gap in gaps if gap[1] >= one.nbytes)[2]
        taken[at : at + one.nbytes, one.first : one.last + 1] = True
    return int(taken.any(axis=1).nonzero()[0].max()) + 1


def test_buffers_are_placed_as_a_table_of_bytes_places_them():
    gaps = 0
    for seed in range(100):
        rng = random.Random(seed)
        spans = [sorted((rng.randrange(30), rng.randrange(30))) for _ in range(rng.randint(1, 25))]
        buffers = [
            Buffer(rng.choice((1, 2, 3, 6, 7)), first, last, rng.randint(first, last))
            for first, last in spans
        ]
        heap = heap_bytes(buffers)
        assert heap == placed_byte_by_byte(buffers)
        gaps += heap > max(alive(buffers, 30))
    assert 10 < gaps < 100, "some have gaps, and not all"
    assert heap_bytes([]) == 0


def test_buffers_are_what_is_simulated_at_every_position():
    for seed in range(100):
        problem, rng = mixed_problem(seed), random.Random(seed)
        resident = problem.profile.resident_bytes
        for schedule in (Schedule.store_all(problem.graph), random_schedule(rng, problem.graph)):
            buffers = buffers_of(problem, schedule)
            counted = [resident + nbytes for nbytes in alive(buffers, len(schedule.order))]
            assert counted == live_bytes(problem, schedule).tolist()
            packed = packed_bytes(problem, schedule)
            assert (
                packed == heap_bytes(buffers) >= simulate(problem, schedule).peak_bytes - resident
            )


def test_a_buffer_that_is_taken_over_is_placed_by_its_first_value():
    """What waits in it is placed after shorter ones, and no gap is free for all that time."""
    waits = Buffer(2, 1, 4, 4)
    others = [Buffer(2, 1, 2, 2), Buffer(2, 4, 6, 6), Buffer(3, 6, 6, 6)]
    assert heap_bytes([*others, waits]) == 5
    assert heap_bytes([*others, waits._replace(first_ends=2)]) == 7


def test_a_value_that_takes_over_a_buffer_prolongs_it():
    ops = tuple(
        Op(i, f"o{i}", "K", (i - 1,) if i else (), (i,), may_reuse=(0,) if i == 1 else ())
        for i in range(3)
    )
    values = tuple(Value(i, f"v{i}", 4, producer=i) for i in range(3))
    problem = Problem(Graph(ops, values, (2,)), Profile((1.0,) * 3, (0, 0, 5), 7))
    assert buffers_of(problem, Schedule((0, 1, 2))) == [
        Buffer(4, 0, 2, 1), Buffer(4, 2, 2, 2), Buffer(5, 2, 2, 2),
    ]  # fmt: skip
    assert packed_bytes(problem, Schedule((0, 1, 2))) == 13


def in_vain(problem, schedule):
    """How many runs nobody reads anything of before the op runs again."""
    return sum(
        max(instances.values()) == k and op_id in schedule.order[k + 1 :]
        for k, (op_id, instances) in enumerate(
            zip(schedule.order, last_reads(problem.graph, schedule.order), strict=True)
        )
        if instances
    )


def test_a_value_that_is_computed_again_or_later_closes_gaps():
    closed = 0
    for seed in range(80):
        problem, rng = mixed_problem(seed), random.Random(seed)
        for schedule in (Schedule.store_all(problem.graph), random_schedule(rng, problem.graph)):
            other = with_fewer_gaps(problem, schedule, math.inf)
            if other is not None:
                check_rules(problem, other)
                assert len(other.order) - len(schedule.order) in (0, 1)
                assert schedule.recomputed or not in_vain(problem, other)
                assert packed_bytes(problem, other) < packed_bytes(problem, schedule)
                closed += 1
            assert with_fewer_gaps(problem, schedule, -math.inf) is None
    assert closed > 10
