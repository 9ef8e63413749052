"""What Keras's own step divides by when it runs is divided by here, too, and not multiplied with a
reciprocal: the bits are the same for batches of a fixed size, and of any size."""

from types import SimpleNamespace

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from tight_fits import plan_with_plain_bits

from keras_remat.backends.installed import Caller
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule

BACKEND = backend()
BATCH, ROWS, WIDTH = 6, 7, 12  # no power of two among the counts
INTS = [*range(BATCH, BATCH + WIDTH)]


def make():
    """A model whose layers divide by counts of the batch, by captured constants, and by ints of
    which the first is the batch size."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((ROWS, WIDTH))
    x = layers.Normalization(mean=[0.4] * WIDTH, variance=[0.07] * WIDTH)(inputs)
    for _ in range(2):
        x = layers.Dense(WIDTH, activation="tanh")(x)
        x = layers.Lambda(lambda x: x / tf.cast(tf.constant(INTS), x.dtype))(x)
        x = layers.BatchNormalization()(x)
        x = layers.LayerNormalization()(x)
    x = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    generator = np.random.default_rng(0)
    x = generator.random((BATCH, ROWS, WIDTH), dtype=np.float32)
    return model, (x, generator.integers(0, 3, BATCH).astype(np.int32))


@pytest.fixture(scope="module")
def case():
    model, batch = make()
    data = BACKEND.example_batch(model, batch)
    traced = BACKEND.trace(model, data)
    return model, data, traced, keras_models.state_of(model)


def trained(case, run, steps=3):
    """The state after some steps from the first one."""
    model, data, _, first = case
    for variable, value in zip(keras_models.variables_of(model), first, strict=True):
        variable.assign(value)
    for _ in range(steps):
        run(data)
    return keras_models.state_of(model)


@pytest.mark.parametrize("size", [BATCH, None])
def test_a_step_has_the_bits_of_keras_own_for_fixed_and_for_any_batch_size(case, size):
    model, data, traced, _ = case
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec((size, *t.shape[1:]), t.dtype), data)
    plain = tf.function(model.train_step).get_concrete_function(specs)
    problem = Problem(traced.graph, BACKEND.estimated_profile(traced))
    store_all = Schedule.store_all(traced.graph)
    ours = LoweredStep(traced, problem, store_all, any_size=size is None)
    expected = trained(case, plain)
    np.testing.assert_equal(trained(case, plain), expected)
    np.testing.assert_equal(trained(case, ours), expected)


def test_products_with_reciprocals_of_counts_have_a_division_in_reserve(case):
    """Those of gradients of means over the batch, and none of the captured constant."""
    divided = case[2].divisions
    assert divided
    assert all("gradient_tape/" in name or "loss" in name for name in divided)
    for divisor, division in divided.values():
        count = float(tf.make_ndarray(divisor.attr["value"].tensor))
        assert count in (BATCH, BATCH * ROWS, ROWS, WIDTH)
        assert division.op == "RealDiv"
        assert division.input[1] == divisor.name


def test_a_division_is_computed_again_as_a_division(case):
    """A copy reads the same constant."""
    _, _, traced, _ = case
    problem = Problem(traced.graph, BACKEND.estimated_profile(traced))
    name = next(iter(traced.divisions))
    again = traced.op_id[name]
    order = Schedule.store_all(traced.graph).order
    at = order.index(again) + 1
    twice = Schedule((*order[:at], again, *order[at:]))
    nodes = LoweredStep(traced, problem, twice, any_size=True)._function.graph.as_graph_def().node
    copies = [node for node in nodes if node.name in (name, f"{name}/remat_1")]
    assert [node.op for node in copies] == ["RealDiv"] * 2
    assert len({node.input[1] for node in copies}) == 1


@pytest.mark.parametrize("last", [0, 2])
def test_the_data_set_says_whether_the_batch_has_a_fixed_size(last):
    installed = InstalledTrainFunction.__new__(InstalledTrainFunction)
    installed.original = lambda iterator: None  # nothing was traced for other batches before
    installed._runner = SimpleNamespace(caller=lambda iterator: Caller.FIT)
    installed._steps = lambda iterator: None
    data = tf.data.Dataset.range(3 * BATCH + last).batch(BATCH, drop_remainder=not last)
    installed(iter(data))
    assert installed.any_size == bool(last)


@pytest.mark.parametrize("last", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_fit_under_a_tight_limit_has_plain_bits_with_and_without_a_smaller_last_batch(last):
    size, rows = 2500, 14  # what other tests hold is nothing beside it

    def wide():
        keras.utils.set_random_seed(0)
        inputs = x = keras.Input((rows, WIDTH))
        for _ in range(2):
            x = keras.layers.BatchNormalization()(keras.layers.Dense(32, activation="gelu")(x))
        x = keras.layers.GlobalAveragePooling1D()(x)
        model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
        generator = np.random.default_rng(0)
        x = generator.random((3 * size + last, rows, WIDTH), dtype=np.float32)
        return model, (x, generator.integers(0, 3, len(x)).astype(np.int32))

    def batches(*data):
        return tf.data.Dataset.from_tensor_slices(data).batch(size, drop_remainder=not last)

    plan_with_plain_bits(wide, 0.6, size, epochs=2, in_form=batches)
