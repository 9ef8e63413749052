"""Invariants G1 to G3 of a graph, each broken once, and what is derived from a legal one."""

import dataclasses

import numpy as np
import pytest

from keras_remat.core.graph import Graph, Op, Value, chain_example, reused_bytes
from keras_remat.errors import InvalidProblemError


def graph(ops, values, outputs=()):
    """Ops as (inputs, outputs, extra fields), values as (nbytes, producer)."""
    return Graph(
        tuple(
            Op(i, f"op{i}", "K", inputs, made, **extra)
            for i, (inputs, made, extra) in enumerate(ops)
        ),
        tuple(
            Value(i, f"v{i}", nbytes, producer=producer)
            for i, (nbytes, producer) in enumerate(values)
        ),
        outputs,
    )


TWO_VALUES = [(1, 0), (1, 1)]
BROKEN = {
    "G1 reads a later value": (
        lambda: graph([((1,), (0,), {}), ((), (1,), {})], TWO_VALUES),
        "ops[0].inputs",
        "G1",
    ),
    "G1 reads its own later sibling": (
        lambda: graph([((1,), (0,), {}), ((0,), (1,), {})], TWO_VALUES),
        "ops[0].inputs",
        "G1",
    ),
    "G1 unknown value": (
        lambda: graph([((7,), (0,), {})], [(1, 0)]),
        "ops[0].inputs",
        "unknown value id 7",
    ),
    "G1 negative value": (
        lambda: graph([((-1,), (0,), {})], [(1, 0)]),
        "ops[0].inputs",
        "unknown value id -1",
    ),
    "G1 bool value": (
        lambda: graph([((), (0,), {}), ((False,), (1,), {})], TWO_VALUES),
        "ops[1].inputs",
        "unknown value id False",
    ),
    "G1 float value": (
        lambda: graph([((), (0,), {}), ((0.0,), (1,), {})], TWO_VALUES),
        "ops[1].inputs",
        "unknown value id 0.0",
    ),
    "G1 after itself": (
        lambda: graph([((), (0,), {"after": (0,)})], [(1, 0)]),
        "ops[0].after",
        "G1",
    ),
    "G1 after a later op": (
        lambda: graph([((), (0,), {"after": (1,)}), ((), (1,), {})], TWO_VALUES),
        "ops[0].after",
        "G1",
    ),
    "G1 after a negative op": (
        lambda: graph([((), (0,), {}), ((), (1,), {"after": (-1,)})], TWO_VALUES),
        "ops[1].after",
        "G1",
    ),
    "G1 after a bool": (
        lambda: graph([((), (0,), {}), ((), (1,), {"after": (False,)})], TWO_VALUES),
        "ops[1].after",
        "G1",
    ),
    "G2 two producers": (
        lambda: graph([((), (0,), {}), ((), (0,), {})], [(1, 0)]),
        "ops[1].outputs",
        "G2",
    ),
    "G2 twice by one op": (lambda: graph([((), (0, 0), {})], [(1, 0)]), "ops[0].outputs", "G2"),
    "G2 value names a producer that does not make it": (
        lambda: graph([((), (), {})], [(1, 0)]),
        "values[0].producer",
        "G2",
    ),
    "G2 value denies its producer": (
        lambda: graph([((), (0,), {})], [(1, None)]),
        "values[0].producer",
        "G2",
    ),
    "G2 unknown output": (
        lambda: graph([((), (3,), {})], [(1, None)]),
        "ops[0].outputs",
        "unknown value id 3",
    ),
    "G3 writes a step input it reads": (
        lambda: graph([((0,), (0,), {})], [(1, None)]),
        "ops[0].outputs",
        "G3",
    ),
    "may_reuse what it does not read": (
        lambda: graph([((), (0,), {"may_reuse": (0,)})], [(1, 0)]),
        "ops[0].may_reuse",
        "subset",
    ),
    "unknown graph output": (
        lambda: graph([((), (0,), {})], [(1, 0)], (0, 2)),
        "outputs[1]",
        "unknown value id 2",
    ),
    "negative bytes": (lambda: graph([((), (0,), {})], [(-1, 0)]), "values[0].bytes", "got -1"),
    "float bytes": (lambda: graph([((), (0,), {})], [(1.0, 0)]), "values[0].bytes", "got 1.0"),
    "bool bytes": (lambda: graph([((), (0,), {})], [(True, 0)]), "values[0].bytes", "got True"),
    "NumPy bytes": (
        lambda: graph([((), (0,), {})], [(np.int64(4), 0)]),
        "values[0].bytes",
        "got np.int64",
    ),
    "unknown phase": (
        lambda: graph([((), (0,), {"phase": "middle"})], [(1, 0)]),
        "ops[0].phase",
        "middle",
    ),
    "recomputable is no bool": (
        lambda: graph([((), (0,), {"recomputable": None})], [(1, 0)]),
        "ops[0].recomputable",
        "None",
    ),
    "value id is not its position": (
        lambda: Graph((), (Value(1, "v", 1),), ()),
        "values[0].id",
        "id 1 at position 0",
    ),
    "op id is not its position": (
        lambda: Graph((Op(2, "o", "K", (), ()),), (), ()),
        "ops[0].id",
        "id 2 at position 0",
    ),
    "bool as an op id": (
        lambda: Graph((Op(False, "o", "K", (), ()),), (), ()),
        "ops[0].id",
        "id False at position 0",
    ),
    "negative dimension": (
        lambda: Graph((), (Value(0, "v", 4, shape=(-1, 2)),), ()),
        "values[0].shape",
        "(-1, 2)",
    ),
    "unknown dimension": (
        lambda: Graph((), (Value(0, "v", 4, shape=(None, 2)),), ()),
        "values[0].shape",
        "None",
    ),
}


@pytest.mark.parametrize(("make", "field", "part"), BROKEN.values(), ids=BROKEN)
def test_broken_invariants_are_refused_with_field_and_value(make, field, part):
    with pytest.raises(InvalidProblemError) as caught:
        make()
    assert caught.value.field == field
    assert part in str(caught.value)
    assert field in str(caught.value)


def test_legal_corner_cases():
    assert graph([], []).ops == ()
    assert graph([((), (), {})], []).needed == frozenset()
    repeated_input = graph([((), (0,), {}), ((0, 0), (1,), {})], TWO_VALUES)
    assert repeated_input.readers[0] == (1,)
    assert graph([((0,), (1,), {})], [(1, None), (0, 0)], (0, 1)).outputs == (0, 1)


def test_records_are_frozen_and_hold_tuples():
    op, value = Op(0, "a", "K", [0], [1], after=[], may_reuse=[0]), Value(0, "v", 4, [2, 2])
    assert (op.inputs, op.outputs, op.after, op.may_reuse, value.shape) == (
        (0,),
        (1,),
        (),
        (0,),
        (2, 2),
    )
    assert hash(op) == hash(Op(0, "a", "K", (0,), (1,), may_reuse=(0,)))
    for record, field in ((op, "name"), (value, "nbytes"), (chain_example(), "ops")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_readers_of_the_chain_example_and_what_they_compute():
    assert chain_example().readers == ((1, 4), (2,), (3,), (4,), ())
    assert chain_example().children == ((1, 4), (2,), (3,), (4,), ())


def test_needed_follows_outputs_and_effects():
    ops = [
        ((), (0,), {}),
        ((0,), (1,), {}),
        ((), (2,), {}),
        ((2,), (), {"recomputable": False}),
        ((), (3,), {}),
    ]
    assert graph(ops, [(1, 0), (1, 1), (1, 2), (1, 4)], (0,)).needed == {0, 2, 3}


def test_needed_does_not_recurse():
    n = 15_000
    chain = graph(
        [((i - 1,) if i else (), (i,), {}) for i in range(n)], [(1, i) for i in range(n)], (n - 1,)
    )
    assert len(chain.needed) == n


def test_fingerprint_ignores_names_alone_and_what_has_the_same_ops_ignores_sizes_too():
    base = chain_example()
    renamed = Graph(
        tuple(dataclasses.replace(op, name="x" + op.name) for op in base.ops),
        tuple(dataclasses.replace(value, name="y") for value in base.values),
        base.outputs,
    )
    assert renamed.fingerprint == base.fingerprint

    def with_op(**changes):
        return Graph(
            (*base.ops[:4], dataclasses.replace(base.ops[4], **changes)), base.values, base.outputs
        )

    def with_value(**changes):
        return Graph(
            base.ops,
            (*base.values[:4], dataclasses.replace(base.values[4], **changes)),
            base.outputs,
        )

    other_ops = [
        with_op(kind="other"),
        with_op(recomputable=False),
        with_op(after=(0,)),
        with_op(inputs=(3, 0)),
        with_op(inputs=(3,)),
        Graph(base.ops[:4], base.values[:4], (3,)),
    ]
    same_ops = [
        with_op(may_reuse=(0,)),
        with_value(nbytes=3),
        with_value(shape=(2,)),
        with_value(dtype="int8"),
        Graph(base.ops, base.values, (3, 4)),
    ]
    fingerprints = {graph.fingerprint for graph in (base, *other_ops, *same_ops)}
    assert len(fingerprints) == 1 + len(other_ops) + len(same_ops)
    assert not any(base.has_ops_of(other) for other in other_ops)
    assert all(base.has_ops_of(other) for other in same_ops)


def test_reused_bytes_matches_sizes_once_each():
    values = tuple(Value(i, "", n) for i, n in enumerate((4, 4, 4, 8, 4, 4)))
    op = Op(0, "", "", inputs=(0, 1, 3), outputs=(2, 4, 5), may_reuse=(0, 1, 3))
    assert reused_bytes(op, values, {0, 1, 3}) == 8
    assert reused_bytes(op, values, {0, 3}) == 4
    assert reused_bytes(op, values, {3}) == 0
    assert reused_bytes(dataclasses.replace(op, may_reuse=(1,)), values, {0, 1, 3}) == 4


def test_the_maker_of_a_value_is_the_op_that_computes_it():
    assert chain_example().maker(4) == 4
    graph = Graph((), (Value(0, "weight", 4),), ())
    with pytest.raises(LookupError, match="step input"):
        graph.maker(0)
