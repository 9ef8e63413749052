"""Outputs whose size only the kernel knows."""

import keras
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.run_alone import output_shapes

BACKEND = backend()


def node(kind, **types):
    made = tf.compat.v1.NodeDef(name="n", op=kind, input=["a"])
    for name, dtype in types.items():
        made.attr[name].type = dtype.as_datatype_enum
    return made


UNIQUE = node("Unique", T=tf.float32, out_idx=tf.int32)


def test_the_kernel_tells():
    """Ones have one distinct value."""
    assert output_shapes(UNIQUE, [((7,), tf.float32)]) == [(1,), (7,)]


@pytest.mark.parametrize(
    ("made", "operands"),
    [
        (UNIQUE, [(None, tf.float32)]),
        (UNIQUE, [((), tf.resource)]),
        (node("Cholesky", T=tf.float32), [((2, 3), tf.float32)]),
    ],
)
def test_what_cannot_run_alone_is_not_known(made, operands):
    assert output_shapes(made, operands) == []


class Distinct(keras.layers.Layer):
    def call(self, x):
        return x * tf.cast(tf.size(tf.unique(tf.reshape(x, [-1])).y), x.dtype)


def test_traced_values_have_the_size(monkeypatch):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, Distinct()(keras.layers.Dense(4)(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    batch = BACKEND.example_batch(model, 4)

    def sizes():
        graph = BACKEND.trace(model, batch).graph
        (op,) = (op for op in graph.ops if op.kind == "Unique")
        return [graph.values[v].nbytes for v in op.outputs]

    assert 0 in sizes()
    monkeypatch.setattr(kinds, "SIZED_BY_LIBRARY", frozenset({"Unique"}))
    assert 0 not in sizes()
