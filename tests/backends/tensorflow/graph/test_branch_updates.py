"""Updates inside of branches run one after another, and compute what they did."""

from functools import partial
from itertools import pairwise

import keras
import numpy as np
import tensorflow as tf
from tight_fits import plan_with_plain_bits

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph.branch_updates import order_branch_updates
from keras_remat.backends.tensorflow.graph.nodes import called_functions

SIZE, VARIABLES = 1024, 5
ROWS, SCALE = 2048, 2.0**32


def updating():
    """Variables, and the graph of a function that updates them in a branch, after what joins the
    gradients of all."""
    variables = [tf.Variable(tf.fill((SIZE,), float(at))) for at in range(VARIABLES)]

    def update(*gradients):
        joined = tf.raw_ops.IdentityN(input=[2.0 * g for g in gradients])
        for variable, gradient in zip(variables, joined, strict=True):
            variable.assign_sub(gradient * gradient)
        return tf.constant(True)

    def run(*gradients):
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        return tf.cond(finite, lambda: update(*gradients), lambda: tf.constant(False))

    specs = [tf.TensorSpec((SIZE,), tf.float32)] * VARIABLES
    return variables, tf.function(run, autograph=False).get_concrete_function(*specs).graph


def branch(document):
    """The function that updates."""
    functions = {f.signature.name: f for f in document.library.function}
    (node,) = [node for node in document.node if node.op == "If"]
    return max((functions[n] for n in called_functions(node)), key=lambda f: len(f.node_def))


def test_every_update_waits_for_the_one_before_it_and_nothing_joins_all():
    _, graph = updating()
    document = graph.as_graph_def()
    assert any(node.op == "IdentityN" for node in branch(document).node_def)
    names = {f.signature.name for f in document.library.function}
    order_branch_updates(document)
    assert names.isdisjoint(f.signature.name for f in document.library.function)
    nodes = list(branch(document).node_def)
    assert not any(node.op == "IdentityN" for node in nodes)
    updates = [at for at, node in enumerate(nodes) if node.op == "AssignSubVariableOp"]
    assert len(updates) == VARIABLES
    for before, after in pairwise(updates):
        of_update = nodes[before + 1 : after + 1]
        waits = [n for n in of_update if f"^{nodes[before].name}" in n.input]
        assert sum(node.op == "Mul" for node in of_update) == 2
        assert any(node.op == "Mul" for node in waits)


def test_a_branch_without_updates_is_left_alone():
    def run(x):
        return tf.cond(x[0] > 0, lambda: tf.sin(x) + tf.cos(x), lambda: x)

    spec = tf.TensorSpec((SIZE,), tf.float32)
    document = tf.function(run).get_concrete_function(spec).graph.as_graph_def()
    before = document.SerializeToString(deterministic=True)
    order_branch_updates(document)
    assert document.SerializeToString(deterministic=True) == before


def scaled(rows=ROWS, width=128, layers=3, rule=keras.optimizers.Adam):
    """Dense layers in half precision with batch normalization; the loss scale overflows first."""
    keras.utils.set_random_seed(0)
    half = keras.DTypePolicy("mixed_float16")
    inputs = x = keras.Input((64,))
    for _ in range(layers):
        x = keras.layers.Dense(width, use_bias=False, dtype=half)(x)  # of a bias oneDNN is slow
        x = keras.layers.ReLU(dtype=half)(keras.layers.BatchNormalization(dtype=half)(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    optimizer = keras.optimizers.LossScaleOptimizer(
        rule(1e-3), initial_scale=SCALE, dynamic_growth_steps=2
    )
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(rows, 64)).astype("f"), rng.random((rows, 1), "float32"))


def test_conditional_updates_need_those_of_one_weight_at_a_time():
    model, data = scaled(width=256)  # oneDNN's allocator counts no less than 256 KiB
    tensorflow = backend()
    traced = tensorflow.trace(model, tensorflow.example_batch(model, data))
    (op,) = [op for op in traced.graph.ops if op.kind == "If"]
    largest = 256 * 256 * 4
    workspace = tensorflow.estimated_profile(traced).op_workspace_bytes[op.id]
    assert largest <= workspace < 3 * largest


def test_a_step_whose_loss_scale_overflows_trains_under_a_tight_limit():
    # So many layers that a schedule of whole ops fits: slices would sum in another order.
    make = partial(scaled, 2 * ROWS, layers=8, rule=keras.optimizers.SGD)
    plan, model = plan_with_plain_bits(make, 0.7, ROWS)
    assert float(model.optimizer.dynamic_scale) < SCALE
    assert plan.slicing is None
