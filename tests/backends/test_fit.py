"""``RematAutotune`` inside ``fit``, on the framework that Keras runs on: what it leaves alone, and
that it always gives the train function back."""

import copy
import csv
import functools
import gc
import json
import pickle

import keras
import numpy as np
import pytest
from fit_pairs import ON_TORCH, SAMPLES, assert_given_back, assert_same_state, callback, fit, small
from random_models import follow_advice

import keras_remat
from keras_remat.backends.base import Installed
from keras_remat.reporting.fit_report import LOG_KEYS
from keras_remat.training.decide import Phase


class OwnIsBack(keras.callbacks.Callback):
    """Notes, after the callback before it, whether the train function is one of Keras's."""

    def __init__(self):
        super().__init__()
        self.own = []

    def on_train_batch_begin(self, batch, logs=None):
        self.own.append(not isinstance(self.model.train_function, Installed))


def test_where_plain_fits_its_train_function_is_back_from_the_second_step_on():
    plain, data = small()
    expected = fit(plain, data, epochs=2)
    model, data = small()
    remat, watch = callback(), OwnIsBack()
    history = fit(model, data, remat, watch, epochs=2)
    assert watch.own == [False] + [True] * 5
    assert [(epoch.samples, epoch.steps) for epoch in remat.report.epochs] == [(96, 3)] * 2
    assert remat.plan is None
    assert [event.kind for event in remat.report.events] == ["fits"]
    assert {key: history[key] for key in expected} == expected
    assert_same_state(model, plain, rtol=0, atol=0)
    assert remat.report.baseline_source == "measured"
    assert remat.report.baseline.peak_bytes > 0 or keras.backend.backend() == "tensorflow"


def two_outputs():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(hidden) for name in "ab"])
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], metrics=[["mae"], []])
    x = np.linspace(-1, 1, 6 * 84, dtype="float32").reshape(84, 6)
    return model, (x, (x[:, :1], x[:, 1:2] ** 2))


@functools.cache
def plain_history_of_two_outputs():
    return fit(*two_outputs(), epochs=2)


def assert_history_of_two_outputs_is_the_plain_one(**options):
    """The last batch is smaller: on TensorFlow an output's loss counts once for each batch."""
    expected = plain_history_of_two_outputs()
    history = fit(*two_outputs(), callback(**options), epochs=2)
    assert {"loss", "a_loss", "b_loss", "a_mae"} <= expected.keys()
    for key in expected:
        assert history[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}])
def test_losses_of_every_output_are_the_plain_ones(options):
    assert_history_of_two_outputs_is_the_plain_one(**options)


def test_losses_of_every_output_are_the_plain_ones_under_a_plan(over_any_limit):
    assert_history_of_two_outputs_is_the_plain_one()


class OwnLoss(keras.Model):
    """Takes no notice of the loss that it is compiled with."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred[0] - y[0]))


def test_compiled_loss_that_the_model_does_not_use(over_any_limit):
    """Keras takes it for one that is still to be built, by a call, which has no weights in ``fit``
    on JAX."""
    histories = []
    for callbacks in ((), (callback(),)):
        model, data = two_outputs()
        model = OwnLoss(model.input, model.output)
        model.compile("sgd", ["mse", "mae"])
        histories.append(fit(model, data, *callbacks)["loss"])
    assert histories[1] == pytest.approx(histories[0], rel=1e-5)


@pytest.fixture
def plain_once(monkeypatch):
    """Keras's own step runs once, is found to need more than the limit, and a plan trains on."""
    runs = []

    def is_over(_, shape):
        return shape.phase is Phase.PLAIN and bool(runs or runs.append(True))

    monkeypatch.setattr("keras_remat.training.tools.Tools.is_over", is_over)
    return runs


@functools.cache
def plain_history_of_whole_batches():
    model, (x, targets) = two_outputs()
    return fit(model, (x[:80], [y[:80] for y in targets]), batch_size=16, epochs=2)


@pytest.mark.parametrize("before", [16, 32])
def test_losses_of_every_output_are_the_plain_ones_after_a_plain_fit(before, plain_once):
    """On TensorFlow Keras's own step may have been traced, before the callback came, for the size
    of its batches, which it counts, or for any, where it counts once."""
    expected, remat = plain_history_of_whole_batches(), callback()
    model, (x, targets) = two_outputs()
    weights, data = model.get_weights(), (x[:80], [y[:80] for y in targets])
    fit(model, data, batch_size=before)
    model.set_weights(weights)
    history = fit(model, data, remat, batch_size=16, epochs=2)
    assert plain_once
    assert remat.plan is not None
    for key in expected:
        assert history[key] == pytest.approx(expected[key], rel=1e-5), key


def test_losses_of_every_output_add_up_where_batches_are_joined(plain_once):
    """The last ones that are joined are fewer: what counts are samples."""
    model, (x, targets) = two_outputs()
    remat = keras_remat.RematAutotune(
        "8GiB", batch_size=32, solver="greedy", profile_steps=1, verbose=0
    )
    fit(model, (x[:80], [y[:80] for y in targets]), batch_size=16)
    history = fit(model, (x[:80], [y[:80] for y in targets]), remat, batch_size=16)
    assert plain_once
    assert remat.plan is not None
    assert history["loss"] == pytest.approx(np.add(history["a_loss"], history["b_loss"]), rel=1e-5)


def test_joined_batches_leave_nothing_to_a_later_fit():
    """On TensorFlow Keras's own step would weigh the losses of other data as it did joined ones."""
    model, (x, targets) = two_outputs()
    weights = model.get_weights()
    batches = [
        (x[at : at + 16], tuple(y[at : at + 16] for y in targets)) for at in range(0, 84, 16)
    ]
    expected = fit(model, ((batch for batch in batches),), batch_size=None)
    model, _ = two_outputs()
    remat = keras_remat.RematAutotune("8GiB", batch_size=32, profile_steps=1, verbose=0)
    fit(model, (x[:80], [y[:80] for y in targets]), remat, batch_size=16, epochs=2)
    assert remat.report.batch_size == 32
    model.set_weights(weights)
    history = fit(model, ((batch for batch in batches),), batch_size=None)
    for key in expected:
        assert history[key] == pytest.approx(expected[key], rel=1e-5), key


def test_two_steps_tell_what_a_plain_one_takes():
    model, data = small()
    remat = callback()
    fit(model, data, remat, batch_size=SAMPLES // 2)
    assert remat.report.baseline.time_s > 0
    assert remat.report.baseline_source == "measured"


# ------------------------------------------------------------------ the train function comes back


class Breaks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


def test_after_another_callback_broke_the_fit_training_goes_on_plainly(over_any_limit):
    model, data = small()
    remat = callback()
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, remat, Breaks())
    assert int(model.optimizer.iterations) == 2
    fit(model, data)  # without the callback: what was left behind gives way at the first call
    assert_given_back(model)
    assert sum(epoch.steps for epoch in remat.report.epochs) == 0
    assert int(model.optimizer.iterations) == 5
    fit(model, data, remat)
    assert remat.report.epochs[0].steps == 3
    assert_given_back(model)


def test_after_a_compile_logs_a_report_and_the_model_are_written(tmp_path, over_any_limit):
    model, data = small()
    remat = callback(report_path=tmp_path / "report.json")
    fit(model, data, remat)
    assert remat.plan is not None
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = fit(model, data, remat, logger, epochs=2)
    assert len(history["remat_speedup"]) == len(remat.report.epochs) == 2
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert set(LOG_KEYS) <= set(rows[0])
    document = json.loads((tmp_path / "report.json").read_text())
    assert len(document["epochs"]) == 2
    assert document["format"] == "keras_remat.report"


# ------------------------------------------------------------------ copies of the callback

COPIES = (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)))


class CopiesAnother(keras.callbacks.Callback):
    """Copies another callback in the middle of a fit, as tuners may."""

    def __init__(self, other):
        super().__init__()
        self.other, self.copies = other, []

    def on_epoch_end(self, epoch, logs=None):
        self.copies = [make(self.other) for make in COPIES]


def test_a_callback_is_copied_before_in_and_after_a_fit_and_used_again(over_any_limit):
    """A copy knows the arguments and what the last fit came to, and belongs to no fit."""
    remat = callback()
    before, in_fit = [make(remat) for make in COPIES], CopiesAnother(remat)
    model, data = small()
    expected = fit(model, data, remat, in_fit, epochs=2)
    assert remat.plan is not None
    given = callback(plan=remat.plan)
    for copies in (before, in_fit.copies, [make(remat) for make in COPIES]):
        for one in copies[1:]:
            assert one.report is not remat.report
        assert all(one._session is None and one._model is None for one in copies)
    order = remat.plan.solution.schedule
    for one in (*(make(remat) for make in COPIES), *in_fit.copies):
        assert one.plan.solution.schedule == order
        assert one.problem.graph == remat.problem.graph
    after = pickle.loads(pickle.dumps(remat))
    assert [str(event) for event in after.report.events] == list(map(str, remat.report.events))
    for one in (before[1], in_fit.copies[2], copy.copy(given)):
        model, data = small()
        history = fit(model, data, one, epochs=2)
        assert history["loss"] == expected["loss"]
        assert one.plan.solution.schedule == order
        assert_given_back(model)


# ------------------------------------------------------------------ nothing to do


def unknown_length():
    """A model and data whose length nobody knows; the last batch is smaller."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    x = np.linspace(-1, 1, 3 * 40, dtype="float32").reshape(40, 3)

    def batches():
        for _ in range(3):  # Keras takes a generator for one epoch
            for at in range(0, 40, 16):
                yield x[at : at + 16], x[at : at + 16, :1] ** 2

    return model, batches


def test_data_of_unknown_length_trains_as_plain_fit_does_and_counts_as_it_does():
    plain, batches = unknown_length()
    expected = plain.fit(batches(), verbose=0).history
    model, batches = unknown_length()
    remat = callback()
    history = model.fit(batches(), verbose=0, callbacks=[remat]).history
    assert {key: history[key] for key in expected} == expected
    assert_same_state(model, plain, rtol=0, atol=0)  # the optimizer's count of updates, too
    assert [(epoch.samples, epoch.steps) for epoch in remat.report.epochs] == [(120, 9)]


def test_callback_does_not_make_keras_wait_for_every_step():
    """Another callback's hook at the end of a batch would; ours may run in a thread."""
    assert callback().async_safe
    with_ours, without = keras.callbacks.CallbackList([callback()]), keras.callbacks.CallbackList()
    assert with_ours._async_train == without._async_train


def test_no_epoch_is_no_table(capsys):
    model, data = small()
    remat = keras_remat.RematAutotune("8GiB", "keep", verbose=1)
    fit(model, data, remat, epochs=0)
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------ own train functions


class TwoForOne(keras.Model):
    """Trains every batch twice, by a train function of its own."""

    def make_train_function(self, force=False):
        super().make_train_function(force)
        own = self.train_function

        def twice_on_jax(state, iterator):
            batch = next(iterator)
            _, state = own(state, iter([batch]))
            return own(state, iter([batch]))

        def twice(iterator):
            batch = next(iter(iterator))
            one = (lambda: [batch]) if ON_TORCH else lambda: iter([batch])
            own(one())
            return own(one())

        self.train_function = twice_on_jax if keras.backend.backend() == "jax" else twice


def of_its_own(how):
    """A model whose train function is its own, and data."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs))
    model = (TwoForOne if how == "overridden" else keras.Model)(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    if how == "by hand":
        model.make_train_function()
        kerass = model.train_function
        model.train_function = lambda *given: kerass(*given)
    x = np.linspace(-1, 1, 3 * SAMPLES, dtype="float32").reshape(SAMPLES, 3)
    return model, (x, x[:, :1] ** 2)


@pytest.mark.parametrize(
    ("how", "named", "limit"),
    [
        ("overridden", "TwoForOne.make_train_function", 100_000),
        ("by hand", "set by hand", "8GiB"),
    ],
)
def test_an_own_train_function_runs_as_it_is_and_is_named(how, named, limit):
    plain, data = of_its_own(how)
    expected = fit(plain, data, epochs=2)
    model, data = of_its_own(how)
    remat, own = keras_remat.RematAutotune(limit, "keep", verbose=0), model.train_function
    with pytest.warns(UserWarning, match=named):
        history = fit(model, data, remat, epochs=2)
    assert {key: history[key] for key in expected} == expected
    assert_same_state(model, plain, rtol=0, atol=0)
    assert own is None or model.train_function is own
    assert [event.kind for event in remat.report.events] == ["unmodified"]


def test_a_train_function_that_is_set_by_hand_in_mid_fit_runs_as_it_is():
    class Sets(keras.callbacks.Callback):
        calls = 0

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.make_train_function(force=True)
                kerass = self.model.train_function

                def own(*given):
                    Sets.calls += 1
                    return kerass(*given)

                self.model.train_function = self.own = own

    model, data = small()
    sets = Sets()
    with pytest.warns(UserWarning, match="set by hand"):
        fit(model, data, callback(), sets, epochs=3)
    assert Sets.calls == 6
    assert model.train_function is sets.own


# ------------------------------------------------------------------ own loops


class TrainsInALoop(keras.Model):
    """Has a ``fit`` of its own, which calls ``train_on_batch``."""

    def fit(self, x, y, batch_size, epochs, callbacks, **_options):
        given = keras.callbacks.CallbackList(
            callbacks, add_history=True, model=self, epochs=epochs, steps=None
        )
        given.on_train_begin()
        for epoch in range(epochs):
            given.on_epoch_begin(epoch)
            for step, at in enumerate(range(0, len(x), batch_size)):
                batch = x[at : at + batch_size], y[at : at + batch_size]
                given.on_train_batch_begin(step)
                logs = self.train_on_batch(*batch, return_dict=True)
                given.on_train_batch_end(step, logs)
            given.on_epoch_end(epoch, logs)
        given.on_train_end()
        return self.history


def in_a_loop():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "tanh")(inputs))
    model = TrainsInALoop(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.linspace(-1, 1, 3 * 75, dtype="float32").reshape(75, 3)
    return model, (x, x[:, :1] ** 2)


class CompilesAnew(keras.callbacks.Callback):
    """Compiles the model in the middle of training; it then has no train function."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.compile(keras.optimizers.SGD(0.05), "mae")


def assert_a_loop_trains_as_plainly(*others):
    plain, data = in_a_loop()
    expected = fit(plain, data, *others, epochs=2)
    model, data = in_a_loop()
    remat = callback()
    history = fit(model, data, remat, *others, epochs=2)
    assert history["loss"] == expected["loss"]
    assert_same_state(model, plain, rtol=0, atol=0)
    assert [(epoch.samples, epoch.steps) for epoch in remat.report.epochs] == [(75, 3)] * 2
    return remat


@pytest.mark.parametrize("resets", [True, False])
def test_a_loop_of_the_model_s_own_with_nothing_to_do_is_counted_to_the_sample(monkeypatch, resets):
    """``train_on_batch`` resets Keras's metrics, in newer versions, and the last batch is
    smaller."""
    if not resets:
        monkeypatch.setattr(TrainsInALoop, "reset_metrics", lambda self: None)
    assert assert_a_loop_trains_as_plainly().plan is None


def test_a_loop_of_the_model_s_own_trains_as_plainly_under_a_plan(over_any_limit):
    """The plan of the model that was compiled before would train the loss of before."""
    assert assert_a_loop_trains_as_plainly(CompilesAnew()).plan is not None


def test_a_model_that_a_loop_compiles_anew_trains_as_plainly():
    assert assert_a_loop_trains_as_plainly(CompilesAnew()).plan is None


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(40) if n != 1)]
)
def test_a_program_that_follows_the_advice_of_a_refusal_trains(seed):
    gc.collect()  # the bytes of the tests before
    compilation = "ordered" if keras.backend.backend() == "tensorflow" else "auto"
    row = follow_advice(seed, compilation=compilation, solver_time_limit_s=3.0)
    assert row["refusals"] == 1, row["message"]
    assert row["trained"] == row["advised"] > row["refused"]
    # 0 or predicted where nothing counts; what other tests of this process hold comes and goes
    if keras.backend.backend() != "torch":  # a plain step is told as larger there, by its gradients
        assert row["peak"] <= 1.02 * row["trained"]
