import jax
import jax_models as models
import keras
import numpy as np
import pytest

from keras_remat.backends.jax.lower import lower
from keras_remat.backends.jax.private import state_values
from keras_remat.backends.jax.swap import RematTrainFunction, restore, swap
from keras_remat.backends.jax.trace import trace


class Swap(keras.callbacks.Callback):
    """Installs a compiled schedule after the first batch, as the tuner does."""

    def __init__(self, batch, broken=None):
        super().__init__()
        self.batch, self.broken, self.function, self.failures = batch, broken, None, []

    def on_train_batch_end(self, step, logs=None):
        model = self._model
        if self.function is None:
            traced = trace(model, self.batch)
            compiled = self.broken or lower(traced, models.forget(traced.graph))
            self.function = swap(model, traced, compiled, on_failure=self.failures.append)


def data(model, samples=88):
    return models.batch(model, samples, seed=5)


def fit(callbacks, **options):
    keras.utils.set_random_seed(3)
    model = models.small()
    x, y = data(model)
    options = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, callbacks=callbacks, **options)
    return model, history


def test_fit_has_the_numbers_of_the_plain_fit_odd_last_batch_included():
    """Dropout seeds, batch normalization, metrics, optimizer: all in the state."""
    plain, expected = fit([])
    callback = Swap(tuple(a[:32] for a in data(plain)))
    model, history = fit([callback])
    assert callback.function.steps == 3  # of 2 × (32, 32, 24): the first and the odd ones ran plain
    assert not callback.failures
    for key in expected.history:
        np.testing.assert_allclose(history.history[key], expected.history[key], rtol=1e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_steps_per_execution():
    model = models.small()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=2)
    x, y = models.batch(model, 128)
    callback = Swap((x[:16], y[:16]))
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[callback])
    assert callback.function.steps == 6


def test_restore_is_idempotent_and_nests():
    model = models.small()
    batch = models.batch(model)
    traced = trace(model, batch)
    model.make_train_function()
    original = model.train_function
    swap(model, traced, None)
    swap(model, traced, None)
    assert isinstance(model.train_function, RematTrainFunction)
    assert model.train_function.original is original
    restore(model)
    restore(model)
    assert model.train_function is original


def test_a_failing_guarded_step_goes_on_from_the_same_state():
    """The compiled step consumes its donated state, then fails: the batch is trained by the plain step, and nothing is lost."""

    def out_of_memory(state, batch):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    plain, expected = fit([])
    callback = Swap(tuple(a[:32] for a in data(plain)), broken=out_of_memory)
    model, history = fit([callback])
    assert len(callback.failures) == 1
    assert callback.function.steps == 0
    np.testing.assert_array_equal(history.history["loss"], expected.history["loss"])
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_errors_pass_through_and_restore():
    def broken(state, batch):
        raise ZeroDivisionError

    callback = Swap(tuple(a[:32] for a in data(models.small())), broken=broken)
    with pytest.raises(ZeroDivisionError):
        fit([callback])
    assert callback._model.train_function is callback.function.original


def test_the_original_takes_over_when_its_fit_is_gone():
    model = models.small()
    batch = models.batch(model)
    traced = trace(model, batch)
    function = swap(model, traced, None, is_current=lambda: False)
    logs, _ = model.train_function(state_values(model), iter([batch]))
    assert np.isfinite(float(logs["loss"]))
    assert model.train_function is function.original
