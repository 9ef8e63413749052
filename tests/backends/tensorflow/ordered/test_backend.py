"""The verbs of the backend that runs steps in order."""

import keras
import numpy as np
import tensorflow as tf

from keras_remat.backends.tensorflow import backend


class Counts(keras.layers.Layer):
    """Keeps two numbers that are none of its weights."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0)
        self.sums = {"of": (tf.Variable(0.0),)}

    def call(self, x):
        self.calls.assign_add(1.0)
        self.sums["of"][0].assign_add(tf.reduce_sum(x))
        return x


def test_a_snapshot_holds_the_variables_that_are_no_weights_of_their_layers():
    """A step that ran out of memory may have moved them, and is run again."""
    inputs = keras.Input(batch_shape=(2, 3, 4))
    recurrent = keras.layers.LSTM(5, stateful=True)
    counts = Counts()
    model = keras.Sequential([inputs, recurrent, counts, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    held = [*(state.value for state in recurrent.states), counts.calls, *counts.sums["of"]]
    data = np.ones((2, 3, 4), "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(*data)
    before = [variable.numpy() for variable in held]
    weights = model.get_weights()
    put_back = backend().snapshot(model)
    model.train_on_batch(*data)
    assert not any(np.array_equal(v.numpy(), old) for v, old in zip(held, before, strict=True))
    put_back()
    for variable, old in zip(held, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
    for mine, old in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, old)


class Draws(keras.layers.Layer):
    """Draws from a generator of TensorFlow's own."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


def test_a_snapshot_holds_the_state_of_random_generators():
    draws = Draws()
    model = keras.Sequential([keras.Input((4,)), draws, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((2, 4), "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(*data)
    before, put_back = draws.generator.state.numpy(), backend().snapshot(model)
    model.train_on_batch(*data)
    assert draws.generator.state.numpy().tolist() != before.tolist()
    put_back()
    assert draws.generator.state.numpy().tolist() == before.tolist()
