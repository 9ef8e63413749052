"""What a user can do around ``RematAutotune`` inside ``fit``: no sample is lost, and the limit
stays."""

import contextlib
import copy
import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_process import ran_alone

import keras_remat
from keras_remat.backends.tensorflow import backend as tensorflow_backend
from keras_remat.backends.tensorflow.graph import kernel_scratch
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.core.events import EventKind
from keras_remat.errors import InfeasibleBudgetError, UnsupportedModelError
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.learning_rate import LearningRateScaling
from keras_remat.units import MIB

QUICK = {"solver": "greedy", "profile_steps": 1, "solver_time_limit_s": 5.0, "verbose": 0}


class Sum(keras.layers.Layer):
    """Counts, in the forward pass, every sample by its number."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(1000,), initializer="zeros", trainable=False)

    def call(self, numbers, training=False):
        if training:
            at = tf.cast(numbers, tf.int32)
            self.seen.assign(tf.tensor_scatter_nd_add(self.seen, at, tf.ones(tf.shape(at)[:1])))
        return numbers * 0.001


def counting_model(width=8, **options):
    """A model that knows how often each sample was trained."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((1,))
    counted = Sum(name="count")(inputs)
    hidden = keras.layers.Dense(width, activation="relu")(counted)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.25), "loss": "mse", **options})
    return model


def numbered(samples):
    numbers = np.arange(samples, dtype="float32")[:, None]
    return numbers, np.ones((samples, 1), "float32")


def seen(model, samples):
    """How often each of the first samples was trained."""
    return model.get_layer("count").seen.numpy()[:samples].astype(int).tolist()


def autotune(**options):
    return keras_remat.RematAutotune(**{"memory_limit": "1GiB", **QUICK, **options})


def batches_of(samples, size):
    return tf.data.Dataset.from_tensor_slices(numbered(samples)).batch(size)


class Guest(keras.callbacks.Callback):
    """Calls ``train_on_batch`` once, from one of Keras's hooks."""

    def __init__(self, hook, at=2):
        super().__init__()
        self.at, self.calls = at, 0
        setattr(self, hook, self._call)

    def _call(self, at, logs=None):
        if at == self.at:
            self.calls += 1
            self.model.train_on_batch(np.full((3, 1), 999.0), np.ones((3, 1)))


# ------------------------------------------------------------------ no sample is lost


def test_steps_per_epoch_that_do_not_divide_the_data_lose_no_sample():
    """Keras ends two of the four epochs early, without an error that could be seen."""
    plain, ours = counting_model(), counting_model()
    with pytest.warns(UserWarning, match="ran out of data"):
        plain.fit(batches_of(100, 10), steps_per_epoch=7, epochs=4, verbose=0)
    remat = autotune(batch_size=35)
    with pytest.warns(UserWarning, match="ran out of data"):
        ours.fit(batches_of(100, 10), steps_per_epoch=7, epochs=4, verbose=0, callbacks=[remat])
    assert seen(ours, 100) == seen(plain, 100)
    assert sum(epoch.samples for epoch in remat.report.epochs) == 200
    assert all(epoch.samples for epoch in remat.report.epochs)


@pytest.mark.parametrize(
    ("hook", "first"),
    [("on_epoch_begin", True), ("on_train_batch_begin", False), ("on_train_batch_end", True)],
)
def test_callback_that_trains_a_batch_of_its_own_ends_nothing(hook, first):
    model, remat, guest = counting_model(), autotune(batch_size=35), Guest(hook)
    callbacks = [guest, remat] if first else [remat, guest]
    model.fit(*numbered(200), batch_size=10, epochs=4, verbose=0, callbacks=callbacks)
    assert guest.calls
    assert seen(model, 200) == [4] * 200
    assert int(model.get_layer("count").seen[999]) == 3 * guest.calls
    assert remat.report.batch_size == 35
    last = remat.report.epochs[-1]
    assert (last.samples, last.steps) == (
        200 + 3 * (hook != "on_epoch_begin"),
        6 + (hook != "on_epoch_begin"),
    )


def only_batches_of(size):
    """A model whose layers take no other batch."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    shaped = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (size, 3, 2)), output_shape=(3, 2))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(shaped(inputs))))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": "keep", "micro_batches": 2}])
def test_a_model_that_takes_no_other_batch_keeps_its_batches(options):
    x, y = np.linspace(0, 1, 240, dtype="float32").reshape(40, 6), np.ones((40, 1), "float32")
    how = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": 2}
    plain, model, remat = only_batches_of(8), only_batches_of(8), autotune(**options)
    expected = plain.fit(x, y, **how).history["loss"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keras_remat: training goes on unmodified")
        history = model.fit(x, y, **how, callbacks=[remat]).history["loss"]
    assert history == pytest.approx(expected, rel=1e-5)
    told = " ".join(event.message for event in remat.report.events)
    assert "The model takes no batch of 3" in told or "in 2 slices" in told


def test_a_callback_gets_what_keras_raises_for_a_batch_that_the_model_does_not_take():
    class Wrong(keras.callbacks.Callback):
        said = ""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                try:
                    self.model.train_on_batch(np.ones((3, 6), "float32"), np.ones((3, 1)))
                except Exception as error:
                    self.said = str(error)

    x, y, wrong = np.ones((40, 6), "float32"), np.ones((40, 1), "float32"), Wrong()
    model, remat = only_batches_of(8), autotune(batch_size="keep")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[remat, wrong])
    assert "reshape" in wrong.said.lower()
    assert remat.report.epochs[0].steps == 5


def test_a_batch_of_a_callback_may_name_the_inputs_that_fit_is_given_in_order(monkeypatch):
    """The arrays have the same shapes in both, and another order."""
    x, y = np.linspace(0, 1, 240, dtype="float32").reshape(40, 6), np.ones((40, 1), "float32")

    class Named(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch in (1, 3):
                self.model.train_on_batch({"a": x[:8], "b": -x[:8]}, y[:8], sample_weight=y[:8, 0])

    def trained(*callbacks):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        joined = keras.layers.Concatenate()([keras.layers.Dense(4, activation="tanh")(b), a])
        model = keras.Model([b, a], keras.layers.Dense(1)(joined))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit([-x, x], y, batch_size=8, sample_weight=y[:, 0], shuffle=False, verbose=0,
                  callbacks=[*callbacks, Named()])  # fmt: skip
        return model.get_weights()

    plain = trained()
    monkeypatch.setattr("keras_remat.training.tools.Tools.plain_fits", lambda *_: False)
    for mine, theirs in zip(trained(autotune(batch_size="keep")), plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_size", ["keep", 35])
def test_a_fit_after_one_that_another_callback_ended_loses_no_sample(batch_size):
    """That one ended between the announcement of a batch and its step."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 12:
                raise RuntimeError("not today")

    model, remat = counting_model(), autotune(batch_size=batch_size)
    with pytest.raises(RuntimeError, match="not today"):
        model.fit(*numbered(200), batch_size=10, verbose=0, callbacks=[remat, Fails()])
    before = np.array(seen(model, 300))
    assert 80 <= before.sum() <= 120
    x, y = numbered(300)
    model.fit(x[200:], y[200:], batch_size=10, verbose=0)
    assert (np.array(seen(model, 300)) - before).tolist() == [0] * 200 + [1] * 100
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_training_that_is_stopped_trains_what_was_held_back():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 11

    model, remat = counting_model(), autotune(batch_size=35)
    model.fit(*numbered(200), batch_size=10, shuffle=False, verbose=0, callbacks=[remat, Stop()])
    assert seen(model, 200) == [1] * 120 + [0] * 80
    assert model.history.history["loss"] == [
        pytest.approx(float(model.get_metrics_result()["loss"]))
    ]


def test_limit_stays_after_a_train_function_was_made_anew():
    class Remake(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.make_train_function(force=True)

    model, remat = counting_model(), autotune(batch_size=35)
    model.fit(*numbered(200), batch_size=10, epochs=4, verbose=0, callbacks=[remat, Remake()])
    assert [epoch.samples for epoch in remat.report.epochs] == [200] * 4
    assert seen(model, 200) == [4] * 200
    assert not isinstance(model.train_function, InstalledTrainFunction)


# ------------------------------------------------------------------ custom loops


def test_custom_loop_trains_every_batch_at_once():
    model, remat = counting_model(), autotune()
    x, y = numbered(60)
    callbacks = keras.callbacks.CallbackList([remat], model=model, epochs=2, steps=6)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for at in range(6):
            callbacks.on_train_batch_begin(at)
            model.train_on_batch(x[10 * at : 10 * at + 10], y[10 * at : 10 * at + 10])
            callbacks.on_train_batch_end(at)
        callbacks.on_epoch_end(epoch, {})
    callbacks.on_train_end()
    assert seen(model, 60) == [2] * 60
    assert [epoch.samples for epoch in remat.report.epochs] == [60, 60]
    assert [epoch.batch_size for epoch in remat.report.epochs] == [10, 10]
    assert not isinstance(model.train_function, InstalledTrainFunction)


# ------------------------------------------------------------------ batches that cannot be joined


def texts_of(lengths, batch=4):
    """A model of averaged words, and a data set with one batch of every length."""
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((None,), dtype="int32")
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(words))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    batches = ((np.full((batch, n), n % 20), np.full((batch, 1), n / 10.0)) for n in lengths)
    shapes = (tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 1), tf.float32))
    data = list(batches)
    return model, tf.data.Dataset.from_generator(lambda: iter(data), output_signature=shapes)


@pytest.mark.parametrize("wanted", ["max", "fastest", 6])
def test_a_longest_batch_that_was_never_traced_can_be_what_is_searched_from(wanted):
    """By two shorter ones it is known to fit."""
    lengths = (3, 5, 3, 9, 2, 9, 3)
    plain, data = texts_of(lengths)
    expected = plain.fit(data, epochs=4, verbose=0, shuffle=False).history["loss"]
    model, data = texts_of(lengths)
    remat = autotune(batch_size=wanted)
    history = model.fit(data, epochs=4, verbose=0, shuffle=False, callbacks=[remat]).history
    assert history["loss"] == pytest.approx(expected, rel=1e-4)
    assert [epoch.samples for epoch in remat.report.epochs] == [28] * 4
    assert EventKind.SEARCH in [event.kind for event in remat.report.events]


def test_a_larger_batch_is_searched_from_a_batch_of_the_shape_that_was_traced(monkeypatch):
    """What another length takes at twice the samples says nothing of it."""
    asked = []

    def scaling(backend, model, problem, batch, measured, traced):
        inputs = [v.shape for v in problem.graph.values if v.producer is None and v.shape]
        asked.append((tuple(batch[0].shape), {shape for shape in inputs if shape[0] == 4}))
        raise UnsupportedModelError("enough is known")

    monkeypatch.setattr("keras_remat.training.size_costs.batch_scaling", scaling)
    model, data = texts_of((9, 3, 9, 3, 3, 9, 3, 9, 3))
    model.fit(data, epochs=6, verbose=0, callbacks=[autotune(batch_size="fastest")])
    assert asked == [((4, 9), {(4, 9), (4, 1)})]


def test_batches_of_varying_length_are_no_larger_batch():
    def batches():
        for at in range(24):
            length = 4 + at % 3 * (at > 10)
            yield np.ones((8, length, 2), "float32"), np.ones((8, 1), "float32")

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((None, 2)),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    signature = (tf.TensorSpec((8, None, 2)), tf.TensorSpec((8, 1)))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    remat = autotune(batch_size=24)
    model.fit(data, epochs=2, verbose=0, callbacks=[remat])
    assert [epoch.samples for epoch in remat.report.epochs] == [192, 192]
    assert any("No larger batch" in event.message for event in remat.report.events)
    assert remat.report.batch_size == 8


@pytest.mark.parametrize("how", ["stateful", "reshape"])
def test_model_of_a_fixed_batch_size_is_no_larger_batch(how):
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input(batch_shape=(8, 3, 2))
    fixed = {
        "stateful": lambda t: keras.layers.SimpleRNN(4, stateful=True)(t),
        "reshape": keras.layers.Lambda(lambda t: tf.reshape(t, (8, 6))),
    }
    model = keras.Model(inputs, keras.layers.Dense(1)(fixed[how](inputs)))
    model.compile("sgd", "mse")
    x, y = np.ones((80, 3, 2), "float32"), np.ones((80, 1), "float32")
    remat = autotune(batch_size=24)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[remat])
    assert [epoch.samples for epoch in remat.report.epochs] == [80] * 3
    assert any("No larger batch" in event.message for event in remat.report.events)
    assert remat.report.batch_size == 8


# ------------------------------------------------------------------ the learning rate


class Rates(keras.callbacks.Callback):
    """What the user sees, and what the steps used."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def test_learning_rate_follows_the_size_really_trained_and_the_users_scheduler(monkeypatch):
    model = counting_model(run_eagerly=False)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / 2**epoch)
    shown = Rates()
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(logs["learning_rate"]))

    remat, factors = autotune(batch_size=40, learning_rate_scaling="linear"), []
    during = LearningRateScaling.during
    monkeypatch.setattr(
        LearningRateScaling,
        "during",
        lambda self, factor: factors.append(factor) or during(self, factor),
    )
    callbacks = [schedule, remat, shown, Watch()]
    model.fit(*numbered(100), batch_size=10, epochs=3, verbose=0, callbacks=callbacks)
    assert rates == [0.25, 0.125, 0.0625]
    assert set(shown.seen) == {0.25, 0.125, 0.0625}
    assert factors[-3:] == [4.0, 4.0, 2.0]
    assert float(model.optimizer.learning_rate) == 0.0625


def test_learning_rate_is_the_users_right_after_an_interrupt():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 15:
                raise KeyboardInterrupt

    model = counting_model()
    remat = autotune(batch_size=40, learning_rate_scaling="linear")
    with pytest.raises(KeyboardInterrupt):
        model.fit(*numbered(200), batch_size=10, verbose=0, callbacks=[remat, Interrupt()])
    assert remat.report.batch_size == 40
    assert float(model.optimizer.learning_rate) == 0.25
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(*numbered(20), batch_size=10, verbose=0, callbacks=[remat])
    assert float(model.optimizer.learning_rate) == 0.5


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


@pytest.mark.parametrize("samples", [40, 43])
def test_micro_batches_by_number_train_as_the_whole_batch(samples):
    x, y = numbered(samples)
    x = x % 1.7
    histories, weights = [], []
    for pieces in (None, 4):
        keras.utils.set_random_seed(0)
        inputs = keras.layers.Input((1,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("adam", "mse", metrics=["mae"])
        remat = autotune(batch_size="keep", micro_batches=pieces)
        history = model.fit(
            x, y, sample_weight=1.0 + x[:, 0], batch_size=10, epochs=3, shuffle=False, verbose=0,
            callbacks=[remat],
        ).history  # fmt: skip
        histories.append({key: history[key] for key in ("loss", "mae")})
        weights.append(model.get_weights())
        assert [epoch.samples for epoch in remat.report.epochs] == [samples] * 3
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
    def data():
        for size in (5, *[10] * 40):
            yield np.ones((size, 1), "float32"), np.ones((size, 1), "float32")

    remat = autotune(batch_size=40)
    with pytest.warns(UserWarning, match="the first one had 5 samples"):
        counting_model().fit(data(), verbose=0, callbacks=[remat])


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            remat = autotune(batch_size="keep", report_path=path)
            counting_model().fit(*numbered(20), verbose=0, callbacks=[remat])
        assert path.exists() is not told
        assert told == any("the report is not saved" in str(one.message) for one in caught)


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
