"""What a user is shown of a ``fit`` with ``RematAutotune``, micro-batches by number, and unusual
fits: batches whose size nobody knows, a fit in a fit, an interrupt."""

import contextlib
import copy
import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_backend import FakeBackend
from fake_fit import fitted
from own_process import ran_alone
from session_fits import autotune, counting_model, numbered, seen

from keras_remat.backends.tensorflow import backend as tensorflow_backend
from keras_remat.backends.tensorflow.graph import kernel_scratch
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.errors import InfeasibleBudgetError
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.learning_rate import LearningRateScaling
from keras_remat.units import MIB

# ------------------------------------------------------------------ what is shown


def test_batch_size_that_is_shown_was_trained():
    model, remat = counting_model(), autotune()

    def batches():
        yield from zip(np.split(numbered(100)[0], 10), np.split(numbered(100)[1], 10), strict=True)

    data = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec((10, 1)), tf.TensorSpec((10, 1)))
    )
    history = model.fit(data, epochs=3, verbose=0, callbacks=[remat]).history
    assert seen(model, 100) == [3] * 100
    assert max(history["remat_batch_size"]) <= 100
    assert remat.report.batch_size <= 100


def test_nothing_changed_is_no_speedup():
    model, remat = counting_model(), autotune(batch_size="keep")
    history = model.fit(
        *numbered(200), batch_size=10, epochs=3, verbose=0, callbacks=[remat]
    ).history
    assert history["remat_speedup"] == [1.0] * 3


@pytest.mark.parametrize("before", [True, False])
def test_logger_listed_before_the_callback_is_warned_of(before, tmp_path, recwarn):
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    remat = autotune(batch_size="keep")
    callbacks = [logger, remat] if before else [remat, logger]
    counting_model().fit(*numbered(40), batch_size=10, epochs=2, verbose=0, callbacks=callbacks)
    ours = [str(one.message) for one in recwarn if "keras_remat" in str(one.message)]
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert len(rows) == 2
    if before:
        assert len(ours) == 1
        assert "list RematAutotune before CSVLogger" in ours[0]
    else:
        assert ours == []
        assert set(LOG_KEYS) <= set(header.split(","))


def test_two_callbacks_in_one_fit_are_refused_before_anything_is_changed():
    model = counting_model()
    with pytest.raises(ValueError, match="two RematAutotune"):
        model.fit(*numbered(40), verbose=0, callbacks=[autotune(), autotune()])
    assert seen(model, 40) == [0] * 40
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_evaluate_and_predict_change_nothing():
    model, remat = counting_model(), autotune(batch_size=20)
    x, y = numbered(40)
    model.evaluate(x, y, verbose=0, callbacks=[remat])
    model.predict(x, verbose=0, callbacks=[remat])
    assert remat.report.events == []
    model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[remat])
    before = len(remat.report.events), seen(model, 40)
    model.evaluate(x, y, verbose=0, callbacks=[remat])
    model.predict(x, verbose=0, callbacks=[remat])
    assert (len(remat.report.events), seen(model, 40)) == before


def test_callback_is_copied_before_and_after_a_fit():
    model, remat = counting_model(), autotune(batch_size="keep")
    assert copy.deepcopy(remat).report.epochs == []
    model.fit(*numbered(40), batch_size=10, epochs=2, verbose=0, callbacks=[remat])
    assert len(remat.report.epochs) == 2
    assert copy.deepcopy(remat.report) == remat.report


def test_micro_batches_by_number_train_as_the_whole_batch():
    """The last batch has fewer samples than pieces."""
    x, y = numbered(43)
    x = x % 1.7
    remat = autotune(batch_size="keep", micro_batches=4)
    histories, weights = [], []
    for callbacks in ([], [remat]):
        keras.utils.set_random_seed(0)
        inputs = keras.layers.Input((1,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        history = model.fit(
            x, y, sample_weight=1.0 + x[:, 0], batch_size=10, epochs=3, shuffle=False, verbose=0,
            callbacks=callbacks,
        ).history  # fmt: skip
        histories.append({key: history[key] for key in ("loss", "mae")})
        weights.append(model.get_weights())
    assert [epoch.samples for epoch in remat.report.epochs] == [43] * 3
    assert remat.plan is not None
    for key, values in histories[0].items():
        assert histories[1][key] == pytest.approx(values, rel=1e-4)
    for whole, split in zip(*weights, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-3, atol=1e-5)


class Decay(keras.layers.Layer):
    """Adds a mean over the batch to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def weighted_regression(samples):
    """A model with an added loss, and weighted samples of which no two are alike."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.layers.Input((16,))
    for _ in range(4):
        x = Decay()(keras.layers.Dense(256, activation="tanh")(x))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_regularizer="l2")(x))
    model.compile(
        keras.optimizers.SGD(0.02), "mse", metrics=["mae"], weighted_metrics=["mse"],
        jit_compile=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    data = {
        "x": rng.random((samples, 16), "float32"),
        "y": rng.random((samples, 1), "float32"),
        "sample_weight": rng.random(samples, "float32"),
    }
    return model, data


@pytest.mark.slow
def test_pieces_and_recomputation_chosen_by_time_train_as_the_whole_batch():
    """Every number of pieces that is tried trains batches; so does the odd last one.

    Which numbers are tried, and which stays, depends on the device.
    """
    options = {"batch_size": 1024, "epochs": 11, "shuffle": False, "verbose": 0}
    samples = 5 * 1024 + 300
    device = tensorflow_backend().device
    gc.collect()
    before = device.in_use_bytes()  # of other tests
    model, data = weighted_regression(samples)
    watching = autotune(memory_limit=None, batch_size="keep")
    expected = model.fit(**data, **options, callbacks=[watching]).history
    whole = model.get_weights()
    plain, resident = watching.report.baseline.peak_bytes, watching.problem.profile.resident_bytes

    del model
    gc.collect()
    left = device.in_use_bytes() - before  # Keras and TensorFlow hold on to some of it
    model, data = weighted_regression(samples)
    limit = left + plain - 3 * (plain - resident) // 10
    remat = autotune(memory_limit=limit, micro_batches="auto", margin=0.0)
    history = model.fit(**data, **options, callbacks=[remat]).history
    told = [event.message for event in remat.report.events if event.kind == "micro-batches"]
    assert any("in 2 micro-batches" in message for message in told)
    assert not any(event.kind in ("batch", "search") for event in remat.report.events)
    assert [(epoch.samples, epoch.steps) for epoch in remat.report.epochs] == [(samples, 6)] * 11
    assert min(epoch.peak_bytes for epoch in remat.report.epochs[-3:]) <= limit
    for key, values in expected.items():
        if not key.startswith("remat_"):
            assert history[key] == pytest.approx(values, rel=1e-4), key
    for theirs, mine in zip(whole, model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------ unusual fits


@pytest.mark.parametrize("batch_size", ["keep", 40, 4])
def test_batches_whose_size_nobody_knows_train_unmodified(batch_size):
    """The step makes its samples itself; the data only count."""

    class Sampling(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(tf.ones((16, 1))) ** 2)
            (kernel, bias) = self.trainable_variables
            gradient = tape.gradient(loss, kernel)
            self.optimizer.apply_gradients([(gradient, kernel), (tf.zeros_like(bias), bias)])
            return {"loss": loss}

    losses = []
    for remat in (None, autotune(batch_size=batch_size)):
        keras.utils.set_random_seed(0)
        model = Sampling([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        how = {"epochs": 2, "verbose": 0, "callbacks": [remat] if remat else []}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "keras_remat: training goes on unmodified")
            losses.append(model.fit(tf.data.Dataset.range(20), **how).history["loss"])
    assert losses[0] == losses[1]


def test_a_batch_that_cannot_be_split_trains_as_it_came():
    """An array that is no sample's rides along; by chance it has as many rows as a batch."""

    def data():
        for size in (8, 8, 8, 5):
            yield (
                {"a": np.ones((size, 3), "float32"), "k": np.ones((8, 2), "float32")},
                np.ones((size, 1), "float32"),
            )

    class Riding(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs["a"]) + 0 * keras.ops.sum(inputs["k"])

    model, remat = Riding(), autotune(batch_size=4)
    model.compile("sgd", "mse")
    model.fit(data(), verbose=0, callbacks=[remat])
    assert sum(epoch.samples for epoch in remat.report.epochs) == 29


def test_a_vector_of_a_metric_stays_one_where_an_epoch_is_stopped():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 11

    x, y = np.ones((200, 4), "float32"), np.eye(3, dtype="float32")[np.arange(200) % 3]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    callbacks = [autotune(batch_size=35), Stop()]
    history = model.fit(x, y, batch_size=10, verbose=0, callbacks=callbacks).history
    assert np.shape(history["f1"]) == (1, 3)


def test_a_fit_inside_of_a_callback_trains_as_without_ours():
    class Inner(keras.callbacks.Callback):
        trained = 0

        def on_train_batch_end(self, batch, logs=None):
            if batch == 12 and not self.trained:
                numbers = np.arange(500, 540, dtype="float32")[:, None]
                self.trained = -1
                self.model.fit(numbers, numbers * 0, batch_size=10, epochs=2, verbose=0)
                self.trained = int(self.model.get_layer("count").seen.numpy()[500:540].sum())

    model, inner, remat = counting_model(), Inner(), autotune(batch_size=35)
    model.fit(*numbered(200), batch_size=10, epochs=2, verbose=0, callbacks=[remat, inner])
    assert inner.trained == 80
    assert seen(model, 200) == [2] * 200


def test_a_fit_that_begins_late_knows_the_steps_that_are_left():
    class See(keras.callbacks.Callback):
        left = None

        def on_train_batch_begin(self, batch, logs=None):
            if self.left is None:
                self.left = remat._session._fit.most_steps_left

    model, remat, see = counting_model(), autotune(batch_size="keep"), See()
    how = {"initial_epoch": 99, "epochs": 100, "verbose": 0, "callbacks": [remat, see]}
    model.fit(*numbered(120), batch_size=10, **how)
    assert see.left == 12


def test_why_no_larger_batch_was_searched_is_said_where_the_first_batch_was_odd():
    told = pytest.warns(UserWarning, match="the first one had 5 samples")
    with fitted(FakeBackend(), memory_limit="1GiB", batch_size=40) as (model, remat), told:
        model.fit([5, *[10] * 40], 1, remat)


def test_the_users_own_batches_keep_the_users_learning_rate(monkeypatch):
    """They differ in size, and none is joined."""
    factors, during = [], LearningRateScaling.during

    def seen_factor(scaling, factor):
        factors.append(factor)
        return during(scaling, factor)

    def data():
        for size in (4, 16, 16, 8):
            yield np.ones((size, 1), "float32"), np.ones((size, 1), "float32")

    monkeypatch.setattr(LearningRateScaling, "during", seen_factor)
    remat = autotune(batch_size="keep", learning_rate_scaling="linear")
    counting_model().fit(data(), verbose=0, callbacks=[remat])
    assert set(factors) == {1.0}


def test_an_interrupt_while_steps_are_recorded_leaves_no_profiler_behind(monkeypatch, tmp_path):
    start = Recorder.start

    def interrupted(recorder):
        start(recorder)
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        counting_model().fit(
            *numbered(900), batch_size=10, epochs=3, verbose=0, callbacks=[autotune(batch_size=40)]
        )
    tf.profiler.experimental.start(str(tmp_path))
    tf.profiler.experimental.stop(save=False)


def test_a_report_that_cannot_be_written_costs_no_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path, told in ((tmp_path / "new" / "report.json", False), (file / "report.json", True)):
        how = {"memory_limit": "1GiB", "batch_size": "keep", "report_path": path}
        with warnings.catch_warnings(record=True) as caught, fitted(FakeBackend(), **how) as fit:
            warnings.simplefilter("always")
            model, remat = fit
            model.fit([16] * 2, 1, remat)
        assert path.exists() is not told
        assert told == any("the report is not saved" in str(one.message) for one in caught)


def _no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))


def _full_disk(monkeypatch, tmp_path):
    stop = tf.profiler.experimental.stop

    def stopped(save=True):
        stop(save=False)
        if save:
            raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(tf.profiler.experimental, "stop", stopped)


@pytest.mark.usefixtures("over_any_limit")
@pytest.mark.parametrize("is_so", [_no_folder, _full_disk])
def test_where_no_temporary_file_can_be_written_training_goes_on(is_so, monkeypatch, tmp_path):
    model, remat = counting_model(), autotune(batch_size="keep")
    is_so(monkeypatch, tmp_path)
    model.fit(*numbered(60), batch_size=10, verbose=0, callbacks=[remat])
    assert seen(model, 60) == [1] * 60
    assert remat.plan is not None
    assert any("the plan stays with estimated op times" in e.message for e in remat.report.events)


def test_a_callback_that_was_refused_holds_no_data_of_its_fit():
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((4096, 256), "float32"), np.ones((4096, 1), "float32")

    def refused():
        remat = autotune(memory_limit="64KiB", batch_size="keep", margin=0.0)
        with contextlib.suppress(InfeasibleBudgetError):
            model.fit(*data, batch_size=1024, verbose=0, callbacks=[remat])
            pytest.fail("it was not refused")
        gc.collect()
        return remat, tensorflow_backend().device.in_use_bytes()

    _, before = refused()
    kept, after = refused()
    assert after - before < data[0].nbytes / 8  # a batch is a quarter
    assert kept.plan is None


class Data(np.ndarray):
    """Can be referred to weakly."""


HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_epoch_end")


@pytest.mark.parametrize(
    ("hook", "is_planned"), [(HOOKS[0], False), *((hook, True) for hook in HOOKS)]
)
def test_a_fit_that_another_callback_ended_leaves_no_data_behind(hook, is_planned, request):
    if is_planned:
        request.getfixturevalue("over_any_limit")
    numbers, targets = numbered(60)
    data, remat = numbers.view(Data), autotune(batch_size="keep")
    alive, calls = weakref.ref(data), []

    def ends(at, logs=None):
        calls.append(at)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        other = keras.callbacks.LambdaCallback(**{hook: ends})
        counting_model().fit(data, targets, 10, epochs=5, verbose=0, callbacks=[remat, other])
    assert len(calls) == 4
    del data
    gc.collect()
    assert alive() is None
    assert (remat.plan is not None) == is_planned


@pytest.mark.slow
def test_of_a_step_of_loops_that_no_plan_brings_under_the_limit_the_smallest_stays(monkeypatch):
    """What kernels ask for that no shape tells is known when they have run; slices do not divide
    it. Without oneDNN, gradients of convolutions are such where nobody knows their rule. On a
    backend without a framework, tests of the driver ask for the same."""
    name = "test_of_a_step_of_loops_that_no_plan_brings_under_the_limit_the_smallest_stays"
    if ran_alone(__file__, name, TF_ENABLE_ONEDNN_OPTS="0"):
        return
    monkeypatch.setattr(kernel_scratch, "_patches_bytes", lambda *_: 0)
    keras.utils.set_random_seed(0)
    inputs = x = keras.layers.Input((6, 32, 32, 3))
    for sequences in (True, False):
        x = keras.layers.ConvLSTM2D(12, 3, padding="same", return_sequences=sequences)(x)
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    data = np.ones((48, 6, 32, 32, 3), "float32"), np.ones((48, 1), "float32")
    gc.collect()
    limit = tensorflow_backend().device.in_use_bytes() + 32 * MIB  # predicted: 31
    remat = autotune(memory_limit=limit, batch_size="keep", margin=0.0)
    with pytest.warns(UserWarning, match="no schedule that takes less was found"):
        model.fit(*data, batch_size=4, shuffle=False, verbose=0, callbacks=[remat])
    plain_bytes = remat.report.baseline.peak_bytes
    assert remat.plan is None or limit < remat.plan.measured.peak_bytes < plain_bytes
    assert not isinstance(model.train_function, InstalledTrainFunction)
