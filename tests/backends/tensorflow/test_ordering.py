"""How early ops may start: never so early that memory goes over the budget."""

import random

import numpy as np
import pytest
from random_problems import PLAIN, mixed_problem, training_problem
from random_schedules import random_schedule

from keras_remat.backends.tensorflow import ordering
from keras_remat.backends.tensorflow.ordering import SMALL_OP_BYTES, allocated_bytes, anchors, fences
from keras_remat.graph import Graph, Op, Value
from keras_remat.problem import Problem
from keras_remat.profile import Profile
from keras_remat.schedule import Schedule
from keras_remat.simulate import simulate


def case(seed):
    """A problem with a random legal schedule and a budget from the schedule's own peak to far above it."""
    rng = random.Random(seed)
    problem = mixed_problem(seed, budget=False)
    schedule = random_schedule(rng, problem.graph)
    return problem, schedule, simulate(problem, schedule).peak_bytes * rng.choice((1, 2, 10, 100, 1000))


def bytes_after(problem, schedule, finished):
    """Bytes alive between two ops, once the first ``finished`` have finished: counted instance by instance."""
    order, graph = schedule.order, problem.graph
    total = problem.profile.resident_bytes
    for value in graph.values:
        copies = [k for k in range(finished) if value.producer is not None and order[k] == value.producer]
        if not copies:
            continue
        later = range(finished, len(order))
        again = next((k for k in later if order[k] == value.producer), len(order))
        read = any(value.id in graph.ops[order[k]].inputs for k in later if k < again)
        if read or (value.id in graph.outputs and again == len(order)):
            total += value.nbytes
    return total


@pytest.mark.parametrize("seed", range(60))
def test_anchors_do_not_decrease_and_point_back(seed):
    problem, schedule, budget = case(seed)
    anchor = anchors(problem, schedule, budget)
    assert len(anchor) == len(schedule.order)
    assert (np.diff(anchor) >= 0).all()
    assert (anchor < np.arange(len(anchor))).all()
    assert (anchor >= -1).all()


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("share", [ordering.AHEAD_SHARE, 1.0])
def test_whatever_starts_early_stays_under_the_budget(seed, share, monkeypatch):
    """The worst case of every state: all that may have started has allocated, and nothing of it has freed anything yet."""
    monkeypatch.setattr(ordering, "AHEAD_SHARE", share)
    problem, schedule, budget = case(seed)
    budget = budget if share < 1 else simulate(problem, schedule).peak_bytes + seed  # where the budget itself is what binds
    anchor = anchors(problem, schedule, budget)
    size = [
        sum(problem.graph.values[v].nbytes for v in problem.graph.ops[i].outputs) + problem.profile.op_workspace_bytes[i]
        for i in schedule.order
    ]
    for finished in range(len(schedule.order)):
        started = [k for k in range(finished, len(schedule.order)) if anchor[k] < finished]
        assert started[0] == finished, "the next op may always start"
        if len(started) > 1 and sum(size[k] for k in started[1:]):  # one op at a time is the simulated order itself
            assert bytes_after(problem, schedule, finished) + sum(size[k] for k in started) <= budget


def test_plenty_of_memory_leaves_nothing_to_wait_for():
    problem = training_problem(random.Random(3), 9, PLAIN)
    schedule = Schedule.store_all(problem.graph)
    assert (anchors(problem, schedule, 10**9) == -1).all()
    assert fences(problem, schedule, 10**9) == {}


def test_no_slack_is_a_strict_chain(monkeypatch):
    monkeypatch.setattr(ordering, "AHEAD_SHARE", 0.0)
    problem = training_problem(random.Random(3), 9, PLAIN)
    schedule = Schedule.store_all(problem.graph)
    budget = simulate(problem, schedule).peak_bytes
    assert anchors(problem, schedule, budget).tolist() == list(range(-1, len(schedule.order) - 1))


def test_allocated_bytes_are_outputs_and_workspace():
    ops = (Op(0, "a", "a", (), (0, 1)), Op(1, "b", "b", (0,), (2,), may_reuse=(0,)))
    values = (Value(0, "x", 5, producer=0), Value(1, "y", 6, producer=0), Value(2, "z", 5, producer=1))
    problem = Problem(Graph(ops, values, (2,)), Profile((1.0, 1.0), (3, 4), 100))
    assert allocated_bytes(problem, Schedule((0, 1, 0))).tolist() == [14, 9, 14]


@pytest.mark.parametrize("seed", range(60))
def test_recomputations_always_wait(seed):
    problem, schedule, budget = case(seed)
    waits = fences(problem, schedule, budget)
    seen = set()
    for k, op_id in enumerate(schedule.order):
        if op_id in seen:
            assert 0 <= waits[k] < k
        else:
            assert k not in waits, "an op that allocates a few bytes waits for nothing but its inputs"
        seen.add(op_id)


def test_large_ops_wait_and_small_ones_do_not():
    sizes = [SMALL_OP_BYTES - 1, SMALL_OP_BYTES, SMALL_OP_BYTES - 1, SMALL_OP_BYTES]
    ops = tuple(Op(i, f"op{i}", "x", (i - 1,) if i else (), (i,)) for i in range(4))
    graph = Graph(ops, tuple(Value(i, f"v{i}", n, producer=i) for i, n in enumerate(sizes)), (3,))
    problem = Problem(graph, Profile((1.0,) * 4, (0,) * 4, 0))
    schedule = Schedule.store_all(graph)
    assert fences(problem, schedule, simulate(problem, schedule).peak_bytes) == {1: 0, 3: 2}


def test_cases_have_windows_of_many_ops_and_recomputations():
    """The properties above speak of something: schedules repeat ops, and windows hold more than one op that allocates."""
    cases = [case(seed) for seed in range(60)]
    assert sum(bool(schedule.recomputed) for _, schedule, _ in cases) > 20
    ahead = sum((anchors(*entry) < np.arange(len(entry[1].order)) - 1).any() for entry in cases)
    assert ahead > 20
