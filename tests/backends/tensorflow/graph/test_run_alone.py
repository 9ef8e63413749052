"""Outputs whose size only the kernel knows."""

from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kinds, run_alone
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


class Compiled(keras.layers.Layer):
    """Calls what XLA compiles; it counts its calls in a variable."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

    @tf.function(jit_compile=True)
    def call(self, x):
        self.calls.assign_add(1.0)
        return tf.matmul(x, self.kernel) + tf.sort(x)


def traced_with_compiled(layers):
    inputs = x = keras.Input((64,))
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    batch = (np.ones((4096, 64), np.float32), np.ones((4096, 1), np.float32))
    return BACKEND.trace(model, BACKEND.example_batch(model, batch))


def test_equal_calls_of_what_xla_compiles_run_once_and_change_nothing(monkeypatch):
    if not BACKEND.device.has_statistics:
        pytest.skip("scratch is measured")
    layers, ran = [Compiled(), Compiled()], []
    traced = traced_with_compiled(layers)
    measured = run_alone._scratch_bytes

    def counted(*call):
        ran.append(call)
        return measured(*call)

    monkeypatch.setattr(run_alone, "_scratch_bytes", counted)
    scratch = traced.compiled_scratch_bytes
    assert len(scratch) == 2 * len(ran) == 4, "forward and backward of each"
    assert [float(layer.calls) for layer in layers] == [0, 0]
    assert traced.compiled_scratch_bytes is scratch


def test_the_scratch_of_a_call_that_cannot_run_alone_is_not_known(monkeypatch):
    traced = traced_with_compiled([Compiled()])

    def fails(*given):
        raise tf.errors.InvalidArgumentError(None, None, "no")

    monkeypatch.setattr(run_alone, "_alone", fails)
    assert traced.compiled_scratch_bytes == {}


@pytest.mark.parametrize(("dtype", "is_known"), [(tf.float32, True), (tf.variant, False)])
def test_no_tensor_is_made_up_for_a_list(dtype, is_known):
    call = tf.compat.v1.NodeDef(name="n", op="PartitionedCall", input=["a"])
    call.attr["Tin"].list.type.append(dtype.as_datatype_enum)
    assert (run_alone._operands(call, {}, {"a:0": ()}) is not None) is is_known


def test_without_statistics_nothing_runs(monkeypatch):
    monkeypatch.setattr(run_alone.TensorFlowDevice, "has_statistics", False)
    monkeypatch.setattr(run_alone, "_scratch_bytes", lambda *call: pytest.fail("it ran"))
    assert traced_with_compiled([Compiled()]).compiled_scratch_bytes == {}


def traced_with_convolutions(samples):
    inputs = x = keras.Input((8, 8, 4))
    for _ in range(2):
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", jit_compile=False)
    data = np.ones((samples, 8, 8, 4), np.float32)
    traced = BACKEND.trace(model, BACKEND.example_batch(model, (data, data)))
    return traced, {
        op.name: op.id for op in traced.graph.ops if op.kind in run_alone._OF_ONE_SAMPLE
    }


@pytest.mark.parametrize(("samples", "runs", "nbytes"), [(1, 1, 7), (2, 0, 0)])
def test_equal_convolutions_of_one_sample_run_once_and_tell_their_scratch(
    samples, runs, nbytes, monkeypatch
):
    ran, fresh = [], lru_cache(run_alone._convolution_scratch_bytes.__wrapped__)
    monkeypatch.setattr(run_alone, "_convolution_scratch_bytes", fresh)
    monkeypatch.setattr(run_alone, "_scratch_bytes", lambda *call: ran.append(call) or 7)
    monkeypatch.setattr(run_alone, "runs_own_kernels", lambda: False)
    monkeypatch.setattr(run_alone.TensorFlowDevice, "has_statistics", True)
    traced, convolutions = traced_with_convolutions(samples)
    workspace = BACKEND.estimated_profile(traced).op_workspace_bytes
    assert {workspace[op_id] for op_id in convolutions.values()} == {nbytes}
    assert len(convolutions) == 2
    assert len(ran) == runs


def test_onednn_tells_what_a_convolution_of_one_sample_asks_for():
    traced, convolutions = traced_with_convolutions(1)
    found = traced.one_sample_scratch_bytes
    is_told = BACKEND.device.has_statistics and not run_alone.runs_own_kernels()
    assert set(found) == (set(convolutions) if is_told else set())
    assert all(nbytes >= 0 for nbytes in found.values())


def test_the_warning_of_a_convolution_that_cannot_run_alone_names_its_kind(monkeypatch, caplog):
    """Equal convolutions run once, so no layer's name is there."""
    monkeypatch.setattr(run_alone, "runs_own_kernels", lambda: False)
    monkeypatch.setattr(run_alone.TensorFlowDevice, "has_statistics", True)
    incomplete = node("Conv2D", T=tf.float32)
    assert run_alone.one_sample_scratch_bytes({"n": incomplete}, {"a:0": (1, 4, 4, 1)}) == {}
    assert "the scratch of Conv2D is not known" in caplog.text
