"""The gradient of max pooling with a start value of its own: TensorFlow's own numbers, to the
bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow.compiled import pooling


def traced_gradient(image, **options):
    """The ``MaxPoolGrad`` of pooling an image, its inputs, and what it computes."""

    def pooled_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            pooled = keras.ops.max_pool(x, **options)
            weights = tf.reshape(tf.range(tf.size(pooled)), pooled.shape) % 7
            loss = tf.reduce_sum(pooled * tf.cast(weights, x.dtype))
        return tape.gradient(loss, x), tf.cast(weights, x.dtype)

    function = tf.function(pooled_and_gradient, autograph=False, jit_compile=True)
    concrete = function.get_concrete_function(tf.TensorSpec(image.shape, image.dtype))
    nodes = concrete.graph.as_graph_def().node
    (node,) = [node for node in nodes if node.op.startswith("MaxPool") and node.op.endswith("Grad")]
    return node, *function(image)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 8, 8, 2), {"pool_size": 2}),
        ((2, 9, 11, 3), {"pool_size": 3, "strides": 2, "padding": "same"}),
        ((2, 9, 9, 1), {"pool_size": (2, 3), "strides": 1, "padding": "valid"}),
        ((2, 5, 6, 7, 2), {"pool_size": 2, "strides": 2, "padding": "same"}),
    ],
)
def test_bits_are_those_of_tensorflow(shape, options):
    """Images with ties, too: the same one of equal elements gets the gradient."""
    image = tf.constant(np.random.default_rng(0).integers(0, 5, shape).astype("float32"))
    node, expected, gradient = traced_gradient(image, **options)

    @tf.function(autograph=False, jit_compile=True)
    def with_start(x, g):
        return pooling.with_start(node, x, g, tf.zeros([], x.dtype))

    np.testing.assert_array_equal(with_start(image, gradient), expected)


def test_a_layout_that_keras_does_not_write_is_left_alone():
    node = tf.compat.v1.NodeDef(op="MaxPoolGrad")
    node.attr["padding"].s, node.attr["data_format"].s = b"VALID", b"NCHW"
    assert pooling.with_start(node, None, None, None) is None
