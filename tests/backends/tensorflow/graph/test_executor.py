"""What several ops at once hold: more than one at a time, and never less than in one order."""

import pytest
from random_problems import mixed_problem

from keras_remat.backends.tensorflow.graph import executor
from keras_remat.backends.tensorflow.graph.executor import Executor
from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules


def executor_of(graph):
    """Every op is one node."""
    producer = {value.id: value.producer for value in graph.values}
    waits = {
        op.name: [
            graph.ops[before].name
            for before in (*(producer[value] for value in op.inputs), *op.after)
            if before is not None
        ]
        for op in graph.ops
    }
    return Executor(graph=graph, waits=waits, op_id={op.name: op.id for op in graph.ops})


def two_branches(times):
    """Two ops that need nothing, and one that reads what they make of 4 and 2 bytes."""
    workspaces = (5, 3, 0)
    ops = tuple(
        Op(id=i, name="abc"[i], kind="X", inputs=(0, 1) if i == 2 else (), outputs=(i,))
        for i in range(3)
    )
    values = tuple(Value(id=i, name=f"v{i}", nbytes=n, producer=i) for i, n in enumerate((4, 2, 1)))
    profile = Profile(
        op_time_s=times, op_workspace_bytes=workspaces, resident_bytes=100, source="estimated"
    )
    return Graph(ops=ops, values=values, outputs=(2,)), profile


@pytest.mark.parametrize(
    ("workers", "highest"),
    [
        (1, 9),  # a with its workspace, and then 4 + 2 + 3 bytes
        (2, 14),  # a and b
    ],
)
def test_ops_that_run_at_once_hold_their_workspaces_at_once(workers, highest):
    graph, profile = two_branches((1.0, 2.0, 1.0))
    assert executor_of(graph).activation_bytes(profile, workers) == highest


def test_what_is_ready_first_begins_first():
    """c waits for the longer of the two; d, which only waits for a, does not."""
    waits = {"a": [], "b": [], "c": ["a", "b"], "d": ["a"]}
    ops = tuple(Op(id=i, name="abcd"[i], kind="X", inputs=(), outputs=(i,)) for i in range(4))
    values = tuple(Value(id=i, name=f"v{i}", nbytes=1, producer=i) for i in range(4))
    graph = Graph(ops=ops, values=values, outputs=(0, 1, 2, 3))
    one = Executor(graph=graph, waits=waits, op_id={op.name: op.id for op in ops})
    assert one.order() == (0, 1, 3, 2)


def test_nodes_of_one_op_are_one_op():
    graph, profile = two_branches((1.0, 1.0, 1.0))
    whole = executor_of(graph)
    parts = Executor(
        graph=graph,
        waits={**whole.waits, "a, too": ["view"], "view": []},
        op_id={**whole.op_id, "a, too": 0},
    )
    assert sorted(parts.order()) == [0, 1, 2]
    assert parts.activation_bytes(profile, 2) == whole.activation_bytes(profile, 2)


@pytest.mark.parametrize("seed", range(40))
def test_one_worker_holds_what_its_order_does_where_no_buffer_is_taken_over(seed):
    problem = mixed_problem(seed)
    one, resident = executor_of(problem.graph), problem.profile.resident_bytes
    order = Schedule(one.order())
    check_rules(problem, order)
    assert sorted(order.order) == list(range(len(problem.graph.ops)))
    alone = one.activation_bytes(problem.profile, 1)
    in_order = simulate(problem, order).peak_bytes - resident
    assert alone >= in_order
    if not any(op.may_reuse for op in problem.graph.ops):
        assert alone == in_order
    everything = sum(v.nbytes for v in problem.graph.values if v.producer is not None)
    most = everything + sum(problem.profile.op_workspace_bytes)
    for workers in (2, 3, 100):
        several = one.activation_bytes(problem.profile, workers)
        assert problem.floor_bytes - resident <= several <= most


@pytest.mark.parametrize(("threads", "replicas", "expected"), [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_replicas_share_the_threads(monkeypatch, threads, replicas, expected):
    monkeypatch.setattr(executor, "cores", lambda: threads)
    monkeypatch.setattr(executor.tf.config.threading, "get_inter_op_parallelism_threads", lambda: 0)
    assert executor.workers(replicas) == expected
