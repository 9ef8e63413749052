"""``RematAutotune`` inside ``fit``: what it changes, what it leaves alone, and that it always gives
the train function back."""

import time
import warnings

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from fake_backend import FakeBackend
from fake_fit import fitted
from tight_limit import tight_limit as limit_of

import keras_remat
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.grouping import HeldBatches
from keras_remat.training.tools import Tools

QUICK = {"solver": "greedy", "profile_steps": 1, "solver_time_limit_s": 5.0, "verbose": 0}
SAMPLES, BATCH = 4096, 1024


def callback(limit="8GiB", **options):
    return keras_remat.RematAutotune(memory_limit=limit, batch_size="keep", **{**QUICK, **options})


def model_and_data(samples=SAMPLES):
    """An MLP whose activations are 1 MiB each for a batch of 1024."""
    return keras_models.mlp(samples, width=256, blocks=4, optimizer="sgd")


def tight_limit(model, data):
    return limit_of(keras_remat.backends.tensorflow.backend(), model, data, BATCH, 0.55)


def small(samples=48):
    return keras_models.mlp(samples, width=8, blocks=1, dropout=0, optimizer="sgd")


def fit(model, data, *callbacks, **options):
    options = {"batch_size": 16, "verbose": 0, "shuffle": False, **options}
    return model.fit(*data, callbacks=list(callbacks), **options).history


def assert_given_back(model):
    assert model.train_function is not None
    assert not isinstance(model.train_function, InstalledTrainFunction)


# ------------------------------------------------------------------ training under a limit


@pytest.fixture(scope="module")
def tight_run():
    """Three epochs plain, and three under a limit, of the same model."""
    plain = fit(*model_and_data(), batch_size=BATCH, epochs=3)
    model, data = model_and_data()
    limit = tight_limit(model, data)
    remat = callback(limit)
    history = fit(model, data, remat, batch_size=BATCH, epochs=3)
    return plain, history, remat, limit, model


def test_losses_are_those_of_the_plain_fit(tight_run):
    plain, history, *_ = tight_run
    for key, values in plain.items():
        assert history[key] == pytest.approx(values, rel=1e-4)


def test_recomputes_and_keeps_to_the_limit(tight_run):
    _, _, remat, limit, model = tight_run
    assert remat.plan.recomputes
    assert remat.plan.measured.peak_bytes <= limit
    assert max(epoch.peak_bytes for epoch in remat.report.epochs[1:]) <= limit
    kinds = [event.kind for event in remat.report.events]
    assert kinds[0] == "risk"
    assert "measured" in kinds
    assert "fits" not in kinds
    assert remat.report.baseline_source == "predicted"
    assert_given_back(model)


def test_on_a_gpu_training_goes_on_while_a_process_solves(monkeypatch):
    """The solver has five seconds; the steps take milliseconds."""
    monkeypatch.setattr(Tools, "on_gpu", property(lambda tools: True))
    model, data = model_and_data(BATCH)
    limit = tight_limit(model, data)
    remat, last = callback(limit), []

    def batches():
        while not last:
            yield data

    def ended(batch, logs):
        if remat.plan is not None and remat.plan.measured is not None:
            last.append(batch)

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=ended)
    loss = model.fit(batches(), verbose=0, callbacks=[remat, ends]).history["loss"]
    events = remat.report.events
    beside = next(event.step for event in events if event.kind == "beside")
    assert beside < next(event.step for event in events if event.kind == "measured")
    assert remat.plan.profile_source == "measured"
    assert remat.plan.measured.peak_bytes <= limit
    assert_given_back(model)

    plain, _ = model_and_data(BATCH)
    steps = remat.report.epochs[0].steps
    assert steps > last[0]
    assert plain.fit((data for _ in range(steps)), steps_per_epoch=steps, verbose=0).history[
        "loss"
    ] == pytest.approx(loss, rel=1e-4)


def test_log_keys_are_there_every_epoch(tight_run):
    _, history, remat, *_ = tight_run
    for key in LOG_KEYS:
        assert len(history[key]) == 3
        assert all(isinstance(number, float) for number in history[key])
    assert history["remat_batch_size"] == [BATCH] * 3
    assert [epoch.samples for epoch in remat.report.epochs] == [SAMPLES] * 3


# ------------------------------------------------------------------ the train function comes back


def test_exception_inside_a_step_gives_the_train_function_back():
    model, (x, y) = small()

    def batches():
        yield x[:16], y[:16]
        raise OSError("the disk is gone")

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(tf.TensorSpec((16, 16), tf.float32), tf.TensorSpec((16, 1), tf.float32)),
    )
    with pytest.raises((OSError, tf.errors.OpError)):
        model.fit(data, callbacks=[callback()], verbose=0)
    fit(model, (x, y))
    assert_given_back(model)


def test_second_fit_with_another_limit_plans_anew(tight_run):
    *_, first, _, model = tight_run
    assert first.plan is not None
    second = callback()
    fit(model, model_and_data(BATCH)[1], second, batch_size=BATCH)
    assert second.plan is None


# ------------------------------------------------------------------ own steps, compile options


def test_own_train_step_is_traced(over_any_limit):
    plain = fit(*keras_models.vae(48, "sgd"))
    remat = callback()
    history = fit(*keras_models.vae(48, "sgd"), remat)
    assert remat.plan is not None
    assert history["total"] == pytest.approx(plain["total"], rel=1e-4)


def test_eager_models_get_one_warning_and_train():
    model, data = small()
    model.compile("sgd", "mse", run_eagerly=True)
    remat = callback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(model, data, remat, epochs=2)
    ours = [str(w.message) for w in caught if "keras_remat" in str(w.message)]
    assert len(ours) == 1
    assert "run_eagerly" in ours[0]
    assert history["loss"][1] < history["loss"][0]
    assert set(LOG_KEYS) <= set(history)
    assert [event.kind for event in remat.report.events] == ["unmodified"]


def test_models_that_cannot_be_traced_get_one_warning_and_train():
    model, (x, y) = small()
    sparse = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(16)
        .map(lambda a, b: (tf.sparse.from_dense(a), b))
    )

    class Densify(keras.layers.Layer):
        def call(self, a):
            return tf.ensure_shape(
                tf.sparse.to_dense(a) if isinstance(a, tf.SparseTensor) else a, (None, 16)
            )

    inputs = keras.layers.Input((16,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(Densify()(inputs)))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="unmodified.*dense"):
        history = model.fit(sparse, callbacks=[callback()], verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert_given_back(model)


def test_jit_compile_trains_in_order_when_asked_with_one_line(caplog, over_any_limit):
    model, data = small()
    model.compile("adam", "mse", jit_compile=True)
    remat = callback(compilation="ordered")
    history = fit(model, data, remat)
    assert np.isfinite(history["loss"]).all()
    assert next(event.kind for event in remat.report.events) == "remark"
    assert sum("jit_compile" in record.message for record in caplog.records) == 1


def test_uncompiled_model_fails_as_keras_does():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[callback()], verbose=0)


# ------------------------------------------------------------------ other callbacks


def test_the_users_profiler_session_is_left_alone(tmp_path, over_any_limit):
    model, data = small()
    remat = callback()
    tf.profiler.experimental.start(str(tmp_path))
    try:
        fit(model, data, remat, epochs=2)
    finally:
        tf.profiler.experimental.stop()
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert "profile" in [event.kind for event in remat.report.events]
    assert remat.plan.profile_source == "estimated"


def test_tensorboard_profiles_while_the_callback_works(tmp_path, over_any_limit):
    model, data = small()
    fit(
        model,
        data,
        callback(),
        keras.callbacks.TensorBoard(tmp_path, profile_batch=(2, 4)),
        epochs=2,
    )
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert list(tmp_path.rglob("events*"))


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory_limit": "lots"}, ValueError, "GiB"),
        ({"verbose": "loud"}, ValueError, "verbose"),
        ({"verbose": 3}, ValueError, "verbose"),
        ({"report_path": 5}, TypeError, "report_path"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(options, error, says):
    with pytest.raises(error, match=says):
        keras_remat.RematAutotune(**options)


def test_malformed_plan_file_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"format": "keras_remat.plan", "version": 1}')
    with pytest.raises(keras_remat.InvalidProblemError, match=r"plan\.json"):
        callback(plan=path)


def test_putting_batches_together_counts_as_training(monkeypatch):
    """A stopwatch around the epoch would count it; ``remat_samples_per_s`` and ``remat_speedup`` do
    too."""
    real = HeldBatches.taking

    def take(self, samples):
        time.perf_counter.now_s += 10.0
        return real(self, samples)

    monkeypatch.setattr(HeldBatches, "taking", take)
    with fitted(FakeBackend(), memory_limit="1GiB", batch_size=48) as (model, remat):
        model.fit([16] * 3, 6, remat)
    last = remat.report.epochs[-1]
    assert last.batch_size == 48
    assert last.step_time_s >= 10.0 * last.steps
    assert last.samples_per_s <= last.samples / (10.0 * last.steps)


class Freezes(keras.callbacks.Callback):
    """Freezes a layer in mid-fit, without ``compile``."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            self.model.layers[1].trainable = False


@pytest.mark.usefixtures("over_any_limit")
@pytest.mark.parametrize("in_fit", [pytest.param("first", marks=pytest.mark.slow), "second"])
def test_a_layer_frozen_without_compile_is_told_where_a_step_is_traced_after_it(in_fit):
    """The last batch is smaller, and so is traced later than the first."""
    model, data = small(40)
    if in_fit == "first":
        with pytest.warns(UserWarning, match=f"trainable of {model.layers[1].path} has changed"):
            fit(model, data, callback(), Freezes())
        return
    fit(model, data, callback())
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="Call compile"):
        fit(model, data, callback())


def test_a_layer_that_the_optimizer_does_not_know_is_trained_by_the_trace_of_before():
    """As in plain ``fit``: a new trace would ask the optimizer to update what it was not built
    for."""
    losses = []
    for callbacks in ([], [callback("8GiB")]):
        model, data = small()
        model.layers[1].trainable = False
        fit(model, data)
        model.layers[1].trainable = True
        losses.append(fit(model, data, *callbacks)["loss"])
    assert losses[0] == losses[1]
    told = [e.message for e in callbacks[0].report.events if e.kind == "unmodified"]
    assert len(told) == 1
    assert "Unknown variable" in told[0]


def test_eager_execution_asked_for_in_mid_fit_is_obeyed_and_told(over_any_limit):
    class RunsEagerly(keras.callbacks.Callback):
        calls = 0

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                tf.config.run_functions_eagerly(True)

    model, data = small()
    own, eager = model.call, []

    def call(*args, **options):
        eager.append(tf.executing_eagerly())
        return own(*args, **options)

    model.call = call
    try:
        with pytest.warns(UserWarning, match="run eagerly from here on"):
            fit(model, data, callback(), RunsEagerly(), epochs=2)
    finally:
        tf.config.run_functions_eagerly(False)
    assert eager[-4:] == [False] + [True] * 3
    assert_given_back(model)


def test_unknown_length_under_a_plan_is_told(over_any_limit):
    model, data = small()
    batches = tf.data.Dataset.from_tensor_slices(data).batch(16).filter(lambda x, y: True)
    remat = callback()
    model.fit(batches, epochs=2, verbose=0, callbacks=[remat])
    told = [event.message for event in remat.report.events]
    assert sum("Nobody knows the length of the data" in message for message in told) == 1
