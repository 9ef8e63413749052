"""What planning finds on JAX, it leaves: mutable arrays, arrays that somebody else holds, a model
that cannot be built."""

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest

import keras_remat
from keras_remat.backends import keras_private
from keras_remat.backends.base import preserved_state
from keras_remat.backends.jax import JaxBackend, private


def planned(model, batch, **options):
    return keras_remat.make_plan(model, batch, "8GiB", solver="greedy", **options)


def search(model, batch):
    limit = JaxBackend().device.in_use_bytes() + 2**20
    return keras_remat.find_max_batch_size(model, batch, limit, margin=0.0, time_limit_s=2.0)


def built():
    keras.utils.set_random_seed(0)
    model = models.small()
    batch = models.batch(model, 8)
    keras_private.build(model, batch)
    return model, batch


def arrays_of(model):
    held = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    return [variable.value for variable in held]


def test_mutable_arrays_come_back():
    calls, large = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.ones((64, 4)))

    class Counts(keras.layers.Layer):
        def call(self, x):
            calls[...] += 1.0
            large[...] *= 2.0
            return x

    inputs = keras.Input((4,))
    model = models.compiled(keras.Sequential([inputs, Counts(), keras.layers.Dense(10)]))
    batch = models.batch(model, 8)
    planned(model, batch)
    search(model, batch)
    assert float(calls[...]) == 0.0
    np.testing.assert_array_equal(large[...], np.ones((64, 4)))
    model.fit(*batch, verbose=0)
    assert float(calls[...]) == 1.0


@pytest.mark.parametrize("plan", [planned, pytest.param(search, marks=pytest.mark.slow)])
def test_arrays_that_somebody_else_holds_stay(plan):
    model, batch = built()
    values = [np.array(array) for array in arrays_of(model)]
    kept = [model.trainable_variables[0].value, *arrays_of(model)[-2:]]
    alias = jax.device_put(model.trainable_variables[1].value, jax.devices()[0])
    teacher = keras.models.clone_model(model)
    for theirs, ours in zip(teacher.weights, model.weights, strict=True):
        theirs.assign(ours)
    plan(model, batch)
    for array, value in zip(arrays_of(model), values, strict=True):
        np.testing.assert_array_equal(array, value)
    assert model.trainable_variables[0].value is kept[0]
    assert not any(array.is_deleted() for array in (alias, *kept))
    for theirs, ours in zip(teacher.weights, model.weights, strict=True):
        np.testing.assert_array_equal(theirs.value, ours.value)


def test_arrays_that_nobody_else_holds_are_not_copied():
    """The device holds them once: a model may take more than half of it."""
    model, _ = built()
    for _ in range(2):  # to be asked leaves nothing that counts as somebody else's
        assert private.arrays_held_elsewhere(model) == {}
    first = model.trainable_variables[0]
    held = first.value
    assert list(private.arrays_held_elsewhere(model).values()) == [held]


def test_what_is_held_comes_back_as_often_as_asked():
    model, batch = built()
    backend = JaxBackend()
    batch = backend.example_batch(model, batch)
    traced = backend.trace(model, batch)
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
    step = backend.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
    first = model.trainable_variables[0]
    held, value = first.value, np.array(first.value)
    with preserved_state(backend, model) as put_back:
        for _ in range(2):
            step(batch)
            step(batch)
            assert not np.array_equal(first.value, value)
            put_back()
            assert first.value is held
    np.testing.assert_array_equal(held, value)


def test_a_model_that_cannot_be_built_stays_one():
    """Keras's own ``fit`` takes it for built the second time."""

    class NoCall(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

    model = NoCall()
    model.compile("sgd", "mse")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="build"):
            planned(model, (np.ones((4, 3)), np.ones((4, 1))), profile="estimated")
        assert not model.built
