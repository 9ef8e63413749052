"""A traced step tells what Keras's own step needs: its order is the executor's."""

from statistics import median

import keras
import pytest
import tensorflow as tf
from keras import layers

from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import step as step_module
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import check_rules


def encoder():
    """The gradient of GELU needs much that waits for no gradient."""
    inputs = layers.Input((256,), dtype="int32")
    x = layers.Embedding(50, 64)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        hidden = layers.Dense(256, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(64)(hidden))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    return model, tf.zeros((16, 256), tf.int32), tf.zeros((16, 1))


def normalized_blocks():
    """Each gradient of the batch normalizations waits for the one before, by a control edge."""
    inputs = x = layers.Input((16, 16, 8))
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x)))
    outputs = layers.Dense(1)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), tf.zeros((64, 16, 16, 8)), tf.zeros((64, 1))


@pytest.mark.parametrize("make", [pytest.param(encoder, marks=pytest.mark.slow), normalized_blocks])
def test_plain_step_is_predicted_in_the_executors_order(make):
    keras.utils.set_random_seed(0)
    model, *batch = make()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    one, batch = backend(), tuple(batch)
    traced = one.trace(model, batch)
    profile = one.estimated_profile(traced, one.device.in_use_bytes() or None)
    problem = Problem(traced.graph, profile)
    check_rules(problem, traced.plain_order)
    assert sorted(traced.plain_order.order) == list(range(len(traced.graph.ops)))
    in_order, as_traced = (
        one.memory.peak_bytes(problem, order)
        for order in (traced.plain_order, Schedule.store_all(traced.graph))
    )
    if make is normalized_blocks:
        assert in_order == pytest.approx(as_traced, rel=0.05)
        return
    resident = profile.resident_bytes  # what other tests hold is in it
    assert in_order - resident > 1.1 * (as_traced - resident)
    if not one.device.has_statistics:
        pytest.skip("the allocator keeps no statistics")
    step = tf.function(model.train_step).get_concrete_function(batch)
    peaks = [one.measure(lambda: step(batch))[1].peak_bytes for _ in range(6)]
    # which of two ops that wait for nothing runs first differs from run to run
    assert median(peaks[1:]) == pytest.approx(in_order, rel=0.3)


def test_branches_that_run_at_once_are_predicted_to(monkeypatch):
    """One after the other, the bytes of the first are free when the second begins."""
    inputs = layers.Input((64, 64, 8))
    heads = [layers.Conv2D(32, 3, padding="same")(inputs) for _ in range(4)]
    heads = [layers.GlobalMaxPooling2D()(layers.ReLU()(head)) for head in heads]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(heads)))
    model.compile("sgd", "mse")
    one, batch = backend(), (tf.zeros((8, 64, 64, 8)), tf.zeros((8, 1)))
    traced = one.trace(model, batch)
    problem = Problem(traced.graph, one.estimated_profile(traced))
    needed = {}
    for at_once in (1, 4):
        monkeypatch.setattr(step_module, "workers", lambda replicas, n=at_once: n)
        needed[at_once] = traced.plain_peak_bytes(problem, one.memory)
    assert needed[4] > 1.1 * needed[1]
    monkeypatch.setattr(step_module.device, "on_gpu", lambda: True)
    assert traced.plain_peak_bytes(problem, one.memory) == needed[1], "one after the other there"
