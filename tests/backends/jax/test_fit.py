"""``RematAutotune`` inside ``fit`` on JAX: what it changes, what it leaves alone, and that it
always gives the train function back."""

import warnings

import jax
import jax_models as models
import keras
import numpy as np
import pytest
from fit_pairs import BATCH, assert_given_back, assert_same_state, fit, small
from tight_limit import tight_limit as limit_of
from tight_limit import with_margin

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.backends.jax.device import Device
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.watch import Pace
from keras_remat.units import MIB


def callback(limit="8GiB", batch_size="keep", **options):
    options = {
        "solver": "greedy",
        "profile_steps": 1,
        "solver_time_limit_s": 5.0,
        "verbose": 0,
        **options,
    }
    return keras_remat.RematAutotune(limit, batch_size, **options)


def large():
    keras.utils.set_random_seed(0)
    model = models.mixer(optimizer="adam")
    return model, models.batch(model, 3 * BATCH)


def tight_limit(model, data, share):
    return limit_of(load_backend(), model, data, BATCH, share)


# ------------------------------------------------------------------ training under a limit


class Settled(keras.callbacks.Callback):
    """Notes, from the third epoch on, whether a step walks over the state or waits for anything;
    no look at the steps is due then. What an epoch's end asks for comes once, and is left out."""

    async_safe = True

    def __init__(self, monkeypatch):
        super().__init__()
        self.monkeypatch, self.asked, self.of_steps = monkeypatch, [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.of_steps = len(self.asked)

    def on_epoch_end(self, epoch, logs=None):
        del self.asked[self.of_steps :]

    def on_epoch_begin(self, epoch, logs=None):
        if epoch != 2:
            return
        patch, in_use, ready = self.monkeypatch.setattr, Device.in_use_bytes, jax.block_until_ready
        patch(Pace, "is_due", lambda pace: False)
        patch(Device, "in_use_bytes", lambda own: self.asked.append("bytes") or in_use(own))
        patch(jax, "block_until_ready", lambda given: self.asked.append("wait") or ready(given))


@pytest.fixture(scope="module")
def tight_run():
    plain, data = large()
    expected = fit(plain, data, epochs=4)
    model, data = large()
    limit = tight_limit(model, data, 0.5)
    remat = callback(limit)
    with pytest.MonkeyPatch.context() as monkeypatch:
        settled = Settled(monkeypatch)
        history = fit(model, data, remat, settled, epochs=4)
    return expected, history, remat, limit, plain, model, settled.asked


def test_numbers_are_those_of_the_plain_fit(tight_run):
    expected, history, _, _, plain, model, _ = tight_run
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    assert_same_state(model, plain, rtol=1e-3, atol=2e-5)


def test_recomputes_keeps_to_the_limit_and_says_how_it_knows(tight_run):
    _, history, remat, limit, _, model, _ = tight_run
    assert remat.plan.recomputes
    assert remat.plan.profile_source == "estimated"
    assert remat.plan.measured.peak_bytes <= limit < remat.plan.store_all.peak_bytes
    assert remat.plan.predicted.peak_bytes == pytest.approx(
        remat.plan.measured.peak_bytes, rel=0.05
    )
    kinds = [event.kind for event in remat.report.events]
    assert [kind for kind in kinds if kind != "enough"] == ["risk", "measured"]  # on any machine
    assert remat.report.baseline_source == "predicted"
    assert [epoch.samples for epoch in remat.report.epochs] == [3 * BATCH] * 4
    assert all(len(history[key]) == 4 for key in LOG_KEYS)
    assert_given_back(model)


def test_a_settled_step_walks_over_no_state_and_waits_for_nothing(tight_run):
    """JAX's steps are enqueued ahead, as in plain fit."""
    assert tight_run[-1] == []


# ------------------------------------------------------------------ a step that is traced once


def test_after_fit_a_model_compiled_anew_is_trained_with_its_new_loss():
    """The callback, which knows the step, is still there."""
    losses = []
    for remat in ([], [callback()]):
        model, data = small()
        fit(model, data, *remat)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"))
        losses.append(fit(model, data)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_compiled_anew_between_epochs_gets_its_metrics(over_any_limit):
    """Keras makes them in the next step, which then returns more variables than it was given."""

    class CompilesAnew(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                models.compiled(self.model)
                self.model.optimizer.build(self.model.trainable_variables)
                self.model.make_train_function()

    plain, data = small()
    expected = fit(plain, data, CompilesAnew(), epochs=2)
    model, data = small()
    remat = callback()
    history = fit(model, data, remat, CompilesAnew(), epochs=2)
    assert remat.plan is not None
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    assert_same_state(model, plain, rtol=1e-4, atol=1e-5)
    assert_given_back(model)


def test_keras_s_own_step_is_traced_once():
    """JAX compiles once what it traces once."""
    traces = []
    for remat in ([], [callback()]):
        model, data = small()
        calls = []

        def activation(x, calls=calls):
            calls.append(x)
            return x

        model.layers[-1].activation = activation
        fit(model, data, *remat, epochs=2)
        traces.append(len(calls))
    assert traces[0] == traces[1]


# ------------------------------------------------------------------ the batch size


def test_batches_are_joined_and_every_sample_is_trained(monkeypatch):
    model, data = small()
    remat = callback("4GiB", 3 * BATCH, learning_rate_scaling="linear")
    rate = float(model.optimizer.learning_rate)
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    fit(model, data, remat, watch, epochs=3, batch_size=8)
    assert remat.report.max_batch_size == remat.report.batch_size == 3 * BATCH
    assert [epoch.samples for epoch in remat.report.epochs] == [3 * BATCH] * 3
    assert remat.report.epochs[-1].steps == 1
    assert rates == pytest.approx([rate] * 3)  # it is scaled while a step runs
    assert float(model.optimizer.learning_rate) == pytest.approx(rate)


def test_a_model_s_own_bytes_are_not_taken_for_those_of_the_batch_that_waits():
    """The weights are inputs of the traced step here, and twenty times a batch."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = np.ones((12 * BATCH, 256), "float32"), np.ones((12 * BATCH, 1), "float32")
    remat = callback(with_margin(Device().in_use_bytes() + 2 * MIB), 2 * BATCH)
    fit(model, data, remat)
    assert remat.report.batch_size == 2 * BATCH
    assert remat.report.epochs[0].samples == 12 * BATCH


def test_an_int_splits_loader_batches():
    model, data = small()
    remat = callback("4GiB", 8)
    fit(model, data, remat, epochs=2)
    assert remat.report.epochs[-1].steps == 12
    assert remat.report.batch_size == 8


def test_rest_of_an_epoch_of_unknown_length_is_in_the_state():
    """The last samples are trained when the iterator ends; Keras must get the state that came of
    it."""

    def batches(x, y):
        for at in range(0, len(x), 8):
            yield x[at : at + 8], y[at : at + 8]

    model, data = small()
    remat = callback("4GiB", 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(batches(*data), verbose=0, callbacks=[remat])
    assert remat.report.epochs[0].samples == 3 * BATCH
    assert int(model.optimizer.iterations) == remat.report.epochs[0].steps
    assert np.isfinite(model.get_weights()[0]).all()


# ------------------------------------------------------------------ the train function comes back


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("RESOURCE_EXHAUSTED: injected", keras_remat.RematError),
        ("INTERNAL: injected", jax.errors.JaxRuntimeError),
    ],
)
def test_a_first_run_that_fails_leaves_the_state_as_it_was(
    message, error, over_any_limit, monkeypatch
):
    """The compiled step consumes its donated state, then fails."""

    def broken(state, batch):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise jax.errors.JaxRuntimeError(message)

    model, data = small()
    before = [v.numpy() for v in model.variables]
    run = Device.run
    monkeypatch.setattr(
        Device,
        "run",
        lambda self, model, step, batch, used, **how: run(self, model, broken, batch, used, **how),
    )
    remat = callback()
    with pytest.raises(error):
        fit(model, data, remat)
    assert load_backend().is_out_of_memory(jax.errors.JaxRuntimeError(message)) == (
        error is keras_remat.RematError
    )
    assert ("out-of-memory" in [event.kind for event in remat.report.events]) == (
        error is keras_remat.RematError
    )
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(model.optimizer.iterations) == 0
    assert_given_back(model)
    monkeypatch.undo()
    fit(model, data)


# ------------------------------------------------------------------ structures and own steps


def test_inputs_and_outputs_in_dictionaries(over_any_limit):
    def train(*callbacks):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
        h = keras.layers.Dropout(0.2)(
            keras.layers.Concatenate()([keras.layers.Dense(8, activation="tanh")(a), b])
        )
        model = keras.Model(
            {"a": a, "b": b},
            {"p": keras.layers.Dense(1, name="p")(h), "q": keras.layers.Dense(3, name="q")(h)},
        )
        model.compile("sgd", loss={"p": "mse", "q": "mse"}, loss_weights={"p": 0.3, "q": 1.0})
        rng = np.random.default_rng(0)
        x = {"a": rng.random((64, 6), "float32"), "b": rng.random((64, 4), "float32")}
        y = {"p": rng.random((64, 1), "float32"), "q": rng.random((64, 3), "float32")}
        return model.fit(
            x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks)
        ).history

    expected, remat = train(), callback()
    history = train(remat)
    assert remat.plan is not None
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-4), key


class OwnStep(keras.Model):
    """A ``train_step`` of its own, in Keras's stateless form."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable, non_trainable):
            y_pred, updated = self.stateless_call(trainable, non_trainable, x, training=True)
            return keras.ops.mean(keras.ops.square(y_pred - y)), updated

        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"own": loss}, (trainable, non_trainable, optimizer, metrics)


def test_own_train_step_is_traced(over_any_limit):
    def train(*callbacks):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((16,))
        h = keras.layers.Dropout(0.3)(keras.layers.Dense(32, activation="relu")(inputs))
        model = OwnStep(inputs, keras.layers.Dense(1)(h))
        model.compile("adam")
        rng = np.random.default_rng(0)
        return fit(
            model,
            (rng.random((96, 16), "float32"), rng.random((96, 1), "float32")),
            *callbacks,
            epochs=2,
        )

    expected, remat = train(), callback()
    history = train(remat)
    assert remat.plan is not None
    assert history["own"] == pytest.approx(expected["own"], rel=1e-5)


# ------------------------------------------------------------------ compile options and devices


def one_layer(**options):
    """What runs eagerly compiles op by op."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}])
def test_uncompiled_models_get_one_warning_and_train(options):
    model, remat = one_layer(**options), callback()
    data = models.batch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(model, data, remat, epochs=2)
    ours = [str(w.message) for w in caught if "keras_remat" in str(w.message)]
    assert len(ours) == 1
    assert "jit_compile" in ours[0]
    assert np.isfinite(history["loss"]).all()
    assert set(LOG_KEYS) <= set(history)
    assert [event.kind for event in remat.report.events] == ["unmodified"]


def test_a_nan_that_jax_looks_for_is_an_error_and_trains_nothing(over_any_limit):
    model, (x, y) = small()
    x[0] = np.nan
    before = model.get_weights()
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match="nan"):
            fit(model, (x, y), callback())
    finally:
        jax.config.update("jax_debug_nans", False)
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    assert_given_back(model)


def test_eager_execution_asked_for_in_mid_fit_is_obeyed_and_told(over_any_limit):
    class RunsEagerly(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                jax.config.update("jax_disable_jit", True)

    model, remat = one_layer(), callback()
    data = models.batch(model)
    try:
        with pytest.warns(UserWarning, match="run eagerly from here on"):
            fit(model, data, remat, RunsEagerly(), epochs=2)
    finally:
        jax.config.update("jax_disable_jit", False)
    assert remat.report.events[-1].kind == "unmodified"
    assert_given_back(model)


def test_an_order_is_refused_with_the_reason():
    model, data = small()
    with pytest.warns(UserWarning, match="unmodified.*every step is compiled"):
        history = fit(model, data, callback(compilation="ordered"))
    assert np.isfinite(history["loss"]).all()
    model, data = small()
    remat = callback(compilation="compiled")
    fit(model, data, remat)
    assert [event.kind for event in remat.report.events] == ["fits"]


# ------------------------------------------------------------------ without training


def test_the_largest_batch_is_larger_with_recomputation():
    model, data = large()
    batch = tuple(part[:BATCH] for part in data)
    limit = tight_limit(model, data, 1.5)
    search = keras_remat.find_max_batch_size(
        model, batch, limit, profile="estimated", time_limit_s=2.0
    )
    assert BATCH < search.plain_batch_size < search.max_batch_size


def test_where_xla_compiles_no_plan_fit_goes_on_unmodified(monkeypatch):
    """A defect of the compiler is no reason to end what trains without a plan."""
    model, data = small()
    expected = fit(model, data)["loss"]

    def lower(*given, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: a defect\nand where it is")

    model, data = small()
    remat = callback(tight_limit(model, data, 0.6))
    monkeypatch.setattr("keras_remat.backends.jax.lower.lower", lower)
    with pytest.warns(UserWarning, match="unmodified.*does not compile .*INTERNAL: a defect"):
        assert fit(model, data, remat)["loss"] == expected
    assert remat.plan is None
    assert_given_back(model)
