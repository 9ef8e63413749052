"""What a user can do around ``RematAutotune`` inside ``fit``: no sample is lost, and the limit
stays."""

import warnings
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_backend import FakeBackend
from fake_fit import SIZE, TIGHT, fitted
from session_fits import autotune, batches_of, counting_model, numbered, seen

from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.core.events import EventKind
from keras_remat.errors import UnsupportedModelError
from keras_remat.training.learning_rate import LearningRateScaling


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


def test_callbacks_that_train_a_batch_of_their_own_end_nothing():
    """Before the first epoch and a later one, between the announcement of a batch and its step, and
    after a step."""
    model, remat = counting_model(), autotune(batch_size=35)
    hooks = ("on_epoch_begin", "on_train_batch_end", "on_train_batch_begin")
    before, after, announced = guests = [Guest(hook) for hook in hooks]
    callbacks = [Guest("on_epoch_begin", at=0), before, after, remat, announced]
    model.fit(*numbered(200), batch_size=10, epochs=3, verbose=0, callbacks=callbacks)
    assert [guest.calls for guest in guests] == [1, 3, 3]
    assert seen(model, 200) == [3] * 200
    assert int(model.get_layer("count").seen[999]) == 3 * 8
    assert remat.report.batch_size == 35
    assert [epoch.samples for epoch in remat.report.epochs] == [206, 206, 206]
    assert remat.report.epochs[-1].steps == 6 + 2


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
            if epoch == 1:
                self.model.make_train_function(force=True)

    model, remat = counting_model(), autotune(batch_size=40)
    model.fit(*numbered(200), batch_size=10, epochs=2, verbose=0, callbacks=[remat, Remake()])
    assert [epoch.samples for epoch in remat.report.epochs] == [200] * 2
    assert seen(model, 200) == [2] * 200
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


@pytest.mark.parametrize("wanted", [pytest.param("fastest", marks=pytest.mark.slow), 6])
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


# ------------------------------------------------------------------ what is said


def test_once_training_goes_on_unmodified_no_plan_is_said_to_keep_the_limit():
    """Keras's own step takes more than the limit then, and nobody watches it."""

    class CannotTraceAll(FakeBackend):
        def trace(self, model, batch, micro_batches=1):
            if len(batch[0]) == 37:
                raise UnsupportedModelError("No 37 samples.")
            return super().trace(model, batch, micro_batches)

    how = {"memory_limit": TIGHT, "margin": 0.0, "batch_size": "keep", "profile_steps": 1}
    told = pytest.warns(UserWarning, match="goes on unmodified. No 37 samples")
    with fitted(CannotTraceAll(), **how) as (model, remat), told:
        model.fit([SIZE] * 6 + [37], 2, remat)
    assert remat.report.epochs[0].steps == 6
    assert (remat.plan, remat.report.limit_kept) == (None, None)
    assert "from step 6 on, training went on unmodified" in remat.report.verdict()


def test_a_report_after_an_interrupt_tells_the_plan_that_ran():
    how = {"memory_limit": TIGHT, "margin": 0.0, "batch_size": "keep", "profile_steps": 1}
    with fitted(FakeBackend(), **how) as (model, remat):
        remat.on_epoch_begin = Mock(side_effect=[None, None, KeyboardInterrupt])
        with pytest.raises(KeyboardInterrupt):
            model.fit([SIZE] * 8, 3, remat)
    assert remat.plan is not None
    assert remat.report.plan == remat.plan
