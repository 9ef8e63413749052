"""Rewrites of the optimized graph: the same numbers, with less held at once."""

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.base import load_backend
from keras_remat.backends.tensorflow.graph.rewrite import attached_nodes, rewrite_for_memory
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule


def node(name, op, *inputs, dtype=tf.float32, **types):
    """A NodeDef with the type attribute ``T``; ``types`` makes ``T`` a list."""
    made = tf.compat.v1.NodeDef(name=name, op=op)
    made.input.extend(inputs)
    if op == "IdentityN":
        made.attr["T"].list.type.extend(t.as_datatype_enum for t in types["T"])
    elif op == "Placeholder":
        made.attr["dtype"].type = dtype.as_datatype_enum
    elif op != "NoOp":
        made.attr["T"].type = dtype.as_datatype_enum
    return made


def rewritten(nodes, *roots, order=None):
    return rewrite_for_memory(
        {n.name: n for n in nodes},
        roots,
        {n.name: at for at, n in enumerate(nodes)} if order is None else order,
    )


def inputs_of(nodes):
    return {name: list(n.input) for name, n in nodes.items()}


def run(nodes, outputs, feeds):
    """Runs a graph of NodeDefs."""
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.extend(nodes)
    with tf.Graph().as_default():
        fetches = tf.graph_util.import_graph_def(graph_def, return_elements=outputs, name="")
        with tf.compat.v1.Session() as session:
            return session.run(fetches, {f"{name}:0": value for name, value in feeds.items()})


# ------------------------------------------------------------------ IdentityN


def test_identity_n_becomes_one_identity_per_output():
    nodes = [
        node("a", "Placeholder"),
        node("b", "Placeholder", dtype=tf.int32),
        node("c", "NoOp"),
        node("join", "IdentityN", "a", "b:0", "^c", T=(tf.float32, tf.int32)),
        node("first", "Neg", "join"),
        node("second", "Neg", "join:1", dtype=tf.int32),
        node("later", "Neg", "a", "^join"),
    ]
    result = rewritten(nodes, "first", "second", "later")
    inputs = inputs_of(result)
    assert inputs["first"] == ["join/part_0"]
    assert inputs["second"] == ["join/part_1"]
    assert inputs["join/part_0"] == ["a", "^c"]
    assert inputs["join/part_1"] == ["b:0", "^c"]
    assert "IdentityN" not in {n.op for n in result.values()}
    assert result["join/part_1"].attr["T"].type == tf.int32.as_datatype_enum
    assert inputs["later"] == ["a", "^join"], "who waits for the node waits for all of it"
    assert inputs["join"] == ["^join/part_0", "^join/part_1"]
    feeds = {"a": np.float32(3), "b": np.int32(4)}
    assert run(result.values(), ["first:0", "second:0", "later:0"], feeds) == [-3.0, -4, -3.0]


def test_reader_of_one_output_no_longer_waits_for_the_others():
    nodes = [
        node("a", "Placeholder"),
        node("b", "Placeholder"),
        node("join", "IdentityN", "a", "b", T=(tf.float32, tf.float32)),
        node("first", "Neg", "join"),
    ]
    assert set(rewritten(nodes, "first")) == {"a", "join/part_0", "first"}


# ------------------------------------------------------------------ AddN


def test_add_n_becomes_a_chain_in_traced_order():
    terms = [node(name, "Placeholder") for name in "dacb"]
    total = node("sum", "AddN", "a", "b", "c", "d")  # by name, as Grappler sorts
    result = rewritten([*terms, total, node("out", "Neg", "sum")], "out")
    inputs = inputs_of(result)
    assert inputs["sum/sum_1"] == ["d", "a"]
    assert inputs["sum/sum_2"] == ["sum/sum_1", "c"]
    assert inputs["sum"] == ["sum/sum_2", "b"]
    assert {result[name].op for name in ("sum/sum_1", "sum/sum_2", "sum")} == {"AddV2"}
    feeds = {
        name: np.float32(value) for name, value in zip("abcd", (1e8, 1.0, -1e8, 2.0), strict=True)
    }
    expected = ((np.float32(2.0) + np.float32(1e8)) + np.float32(-1e8)) + np.float32(1.0)
    assert run(result.values(), ["out:0"], feeds) == [-expected]


def test_term_that_grappler_made_stands_where_its_last_input_does():
    a, b, c, d = (node(name, "Placeholder") for name in "abcd")
    made, total = node("made", "Neg", "b"), node("sum", "AddN", "c", "made", "d", "a")
    result = rewritten(
        [a, b, c, d, made, total], "sum", order={"a": 0, "b": 1, "c": 2, "d": 3, "sum": 4}
    )
    inputs = inputs_of(result)
    assert (inputs["sum/sum_1"], inputs["sum/sum_2"], inputs["sum"]) == (
        ["a", "made"],
        ["sum/sum_1", "c"],
        ["sum/sum_2", "d"],
    )


def test_sum_of_three_is_added_as_its_kernel_does():
    a, b, c = (node(name, "Placeholder") for name in "abc")
    result = rewritten([a, b, c, node("sum", "AddN", "c", "a", "b")], "sum")
    assert inputs_of(result)["sum/sum_1"] == ["c", "a"]
    assert inputs_of(result)["sum"] == ["sum/sum_1", "b"]


def test_sum_that_grappler_made_keeps_its_order():
    terms = [node(name, "Placeholder") for name in "abcd"]
    result = rewritten(
        [*terms, node("sum", "AddN", *"cadb")],
        "sum",
        order={name: at for at, name in enumerate("abcd")},
    )
    assert inputs_of(result)["sum/sum_1"] == ["c", "a"]
    assert inputs_of(result)["sum/sum_2"] == ["sum/sum_1", "d"]
    assert inputs_of(result)["sum"] == ["sum/sum_2", "b"]


def test_control_edges_stay_on_every_part_of_the_sum():
    terms = [node(name, "Placeholder") for name in "abc"]
    result = rewritten(
        [*terms, node("wait", "NoOp"), node("sum", "AddN", "a", "b", "c", "^wait")], "sum"
    )
    assert inputs_of(result)["sum/sum_1"] == ["a", "b", "^wait"]
    assert inputs_of(result)["sum"] == ["sum/sum_1", "c", "^wait"]


@pytest.mark.parametrize("terms", ["a", "ab"])
def test_sums_of_one_and_two_stay(terms):
    nodes = [*(node(name, "Placeholder") for name in terms), node("sum", "AddN", *terms)]
    assert rewritten(nodes, "sum")["sum"] == nodes[-1]


def test_sums_of_variants_stay():
    nodes = [
        *(node(name, "Placeholder", dtype=tf.variant) for name in "abc"),
        node("sum", "AddN", *"abc", dtype=tf.variant),
    ]
    assert rewritten(nodes, "sum")["sum"].op == "AddN"


# ------------------------------------------------------------------ what oneDNN would fuse


@pytest.mark.parametrize(
    ("reader", "producer", "apart"),
    [
        ("BiasAdd", "Conv2D", True),
        ("BiasAdd", "MatMul", True),
        ("BiasAdd", "Neg", False),
        ("Conv2D", "Pad", True),
        ("Conv2D", "Neg", False),
        ("BiasAddGrad", "Neg", False),
        ("Neg", "Conv2D", False),
    ],
)
def test_an_identity_stands_between_what_would_be_fused(reader, producer, apart):
    nodes = [
        node("x", "Placeholder"),
        node("w", "Placeholder"),
        node("first", producer, "x", "w"),
        node("second", reader, "first:0", "w"),
    ]
    result = rewritten(nodes, "second")
    if not apart:
        assert result == {n.name: n for n in nodes}
        return
    assert list(result["second"].input) == ["second/apart", "w"]
    assert result["second/apart"].op == "Identity"
    assert list(result["second/apart"].input) == ["first:0"]
    assert result["second/apart"].attr["T"].type == tf.float32.as_datatype_enum
    assert list(nodes[-1].input) == ["first:0", "w"], "the node that was given is not changed"


@pytest.mark.parametrize(
    ("kernels", "biases", "attached"),
    [
        (["dy"], ["dy"], {"bias_0": "kernel_0"}),
        (["dy"], ["other"], {}),
        (["dy", "dy"], ["dy"], {}),
        (["dy"], ["dy", "dy"], {}),
        (["dy", "dz"], ["dz", "dy"], {"bias_0": "kernel_1", "bias_1": "kernel_0"}),
    ],
)
def test_gradients_of_one_convolutions_kernel_and_bias_are_one_op(kernels, biases, attached):
    nodes = [
        node(f"kernel_{at}", "Conv2DBackpropFilter", "x", "sizes", dy)
        for at, dy in enumerate(kernels)
    ]
    nodes += [node(f"bias_{at}", "BiasAddGrad", dy) for at, dy in enumerate(biases)]
    assert attached_nodes({n.name: n for n in nodes}) == attached


# ------------------------------------------------------------------ what nobody needs


def test_what_no_root_depends_on_is_dropped():
    nodes = [
        node("a", "Placeholder"), node("dead", "Neg", "a"), node("deader", "Neg", "dead"),
        node("effect", "NoOp", "^b"), node("b", "Neg", "a"), node("out", "Neg", "a:0"),
    ]  # fmt: skip
    assert set(rewritten(nodes, "out", "effect")) == {"a", "b", "out", "effect"}
    assert set(rewritten(nodes, "out")) == {"a", "out"}


def dense_model(optimizer, width=40):
    """A model that ``optimizer`` trains."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((width,)), keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, 4),
        ({"weight_decay": 0.01}, 4),
        ({"clipnorm": 0.1}, 4),
        ({"nesterov": True}, 0),
        ({"use_ema": True}, 4),
    ],
)
def test_momentum_is_one_op_with_the_bits_of_plain_training(options, fused):
    """Nesterov's way reads the momentum twice and stays as it is."""
    x = np.random.default_rng(0).standard_normal((16, 40), dtype=np.float32)
    batch = (x, x[:, :1])
    plain, ours = (
        dense_model(keras.optimizers.SGD(0.1, momentum=0.9, **options)) for _ in range(2)
    )
    backend = load_backend()
    traced = backend.trace(ours, batch)
    kinds = [op.kind for op in traced.graph.ops]
    assert kinds.count("ResourceApplyKerasMomentum") == fused
    assert traced.plain_surplus_bytes == (2 * 40 * 40 * 4 if fused else 0)
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    run = backend.lower(traced, problem, Schedule.store_all(traced.graph))
    train = plain.make_train_function() or plain.train_function
    for _ in range(5):
        train(iter([batch]))
        run(batch)
    keras_models.assert_same_bits(keras_models.state_of(plain), keras_models.state_of(ours))


def test_momentum_that_somebody_else_reads_is_left_alone():
    """The difference has a second reader."""
    scalar = {"mu", "eta"}
    nodes = {
        n.name: n
        for n in (
            node("w", "Placeholder", dtype=tf.resource),
            node("m", "Placeholder", dtype=tf.resource),
            node("g", "Placeholder"),
            node("mu", "Const"),
            node("eta", "Const"),
            node("read", "ReadVariableOp", "m"),
            node("a", "Mul", "read", "mu"),
            node("b", "Mul", "g", "eta"),
            node("s", "Sub", "a", "b"),
            node("assign", "AssignVariableOp", "m", "s"),
            node("again", "ReadVariableOp", "m", "^assign"),
            node("add", "AssignAddVariableOp", "w", "again"),
            node("look", "Abs", "s"),
        )
    }
    order = {name: at for at, name in enumerate(nodes)}
    watched = rewrite_for_memory(nodes, ["add", "assign", "look"], order, scalar)
    assert watched["add"].op == "AssignAddVariableOp"
    alone = rewrite_for_memory(
        {n: d for n, d in nodes.items() if n != "look"}, ["add", "assign"], order, scalar
    )
    assert alone["add"].op == "ResourceApplyKerasMomentum"
    assert list(alone["add"].input) == ["w", "m", "eta", "g", "mu"]
    assert set(alone) == {"w", "m", "g", "mu", "eta", "add"}
    unknown = rewrite_for_memory(
        {n: d for n, d in nodes.items() if n != "look"}, ["add", "assign"], order
    )
    assert unknown["add"].op == "AssignAddVariableOp", "which factor is the rate is not known"
