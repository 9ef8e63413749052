"""A traced step tells what Keras's own step needs: its ops as they were traced, and what is in none
of them."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.tensorflow import backend
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate


@pytest.fixture
def step():
    """Each gradient of the batch normalizations waits for the one before, by a control edge."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((16, 16, 8))
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", "mse")
    one = backend()
    traced = one.trace(model, (tf.zeros((64, 16, 16, 8)), tf.zeros((64, 1))))
    return traced, Problem(traced.graph, one.estimated_profile(traced))


def test_the_plain_step_is_predicted_as_it_was_traced(step):
    traced, problem = step
    as_traced = simulate(problem, Schedule.store_all(traced.graph))
    assert traced.plain_peak_bytes(problem, SimulatedMemory()) == as_traced.peak_bytes


@pytest.mark.parametrize(("least", "surplus"), [(0, 3_000), (2**40, 0), (2**40, 3_000)])
def test_what_no_op_holds_is_added(step, least, surplus):
    traced, problem = step
    activations = traced.plain_peak_bytes(problem, SimulatedMemory())
    activations -= problem.profile.resident_bytes
    vars(traced).update(plain_least_bytes=least, plain_surplus_bytes=surplus)  # both are cached
    needed = traced.plain_peak_bytes(problem, SimulatedMemory()) - problem.profile.resident_bytes
    assert needed == max(activations, least) + surplus
