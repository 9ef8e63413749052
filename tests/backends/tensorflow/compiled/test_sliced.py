"""Steps that XLA compiles in slices compute what whole ones do, in less memory."""

import jax_models
import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_remat
from keras_remat.backends.tensorflow.compiled import CompiledBackend
from keras_remat.backends.tensorflow.compiled.lower import LoweredStep
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.slices import Slicing

MIB = 2**20


def noisy(batch=8):
    """Draws of odd sizes, a constant of the batch's size, views, and a sort that stays whole."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((7, 4))
    x = layers.GaussianNoise(0.1)(layers.Dropout(0.2)(layers.Dense(5)(x)))
    x = layers.Lambda(lambda x: keras.ops.sort(x, 0) + tf.constant(0.5, shape=(batch, 7, 5)))(x)
    x = layers.Flatten()(layers.Permute((2, 1))(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(batch, 7, 4)).astype("float32"), rng.integers(0, 4, batch))


@pytest.mark.parametrize("name", [pytest.param("convnet", marks=pytest.mark.slow), "noisy"])
def test_a_step_in_slices_is_the_whole_step_up_to_the_order_of_sums(name):
    made = noisy if name == "noisy" else keras_models.MODELS[name]
    model, data = made(**({"optimizer": "sgd"} if name == "convnet" else {}))
    model.jit_compile = True
    data = tf.nest.map_structure(tf.convert_to_tensor, data)
    step = CompiledBackend().trace(model, data)
    rules = step.slicer.rules
    chosen = (i for i, rule in rules.items() if rule.divides and rule.divides % 2 == 0)
    sliced = step.slicer.sliced(Slicing(tuple(sorted(chosen)), 2))
    kinds = {op.kind for op in sliced.graph.ops if "/slice_" in op.name}
    assert {"noisy": {"MatMul", "BiasAdd"}, "convnet": {"Conv2D", "Mean"}}[name] <= kinds
    variables, first = keras_models.variables_of(model), keras_models.state_of(model)

    def trained(traced):
        for variable, value in zip(variables, first, strict=True):
            variable.assign(value)
        run = LoweredStep(traced, Schedule.store_all(traced.graph))
        logs = [tf.nest.map_structure(np.asarray, run(data)) for _ in range(3)]
        return keras_models.state_of(model), logs

    (state, logs), (ours, our_logs) = trained(step), trained(sliced)
    for mine, theirs in zip(our_logs, logs, strict=True):
        for key in theirs:
            np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-6)
    for mine, theirs in zip(ours, state, strict=True):
        if np.issubdtype(np.asarray(theirs).dtype, np.floating):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.card
def test_a_card_trains_the_head_of_a_language_model_in_a_fifth():
    model, batch = jax_models.head(32768, 64, jit_compile=True)
    on = CompiledBackend(card("H100"))
    step = on.trace(model, on.example_batch(model, batch))
    problem = Problem(step.graph, on.estimated_profile(step))
    resident = problem.profile.resident_bytes
    plain = on.memory.peak_bytes(problem, Schedule.store_all(step.graph)) - resident
    limit = resident + plain // 5
    assert limit < problem.floor_bytes
    plan = keras_remat.make_plan(model, batch, limit, card="H100", margin=0.0, solver="greedy")
    assert plan.slicing is not None
    assert plan.compiled.peak_bytes <= limit
