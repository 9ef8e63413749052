"""``RematAutotune`` inside ``fit``: what it changes, what it leaves alone, and that it always gives
the train function back."""

import csv
import json
import time
import warnings

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests need Keras on TensorFlow", allow_module_level=True)

import keras_models  # noqa: E402
from tight_limit import tight_limit as limit_of  # noqa: E402

import keras_remat  # noqa: E402
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction  # noqa: E402
from keras_remat.reporting.fit_report import LOG_KEYS  # noqa: E402
from keras_remat.units import MIB  # noqa: E402

QUICK = {"solver": "greedy", "profile_steps": 1, "solver_time_limit_s": 5.0, "verbose": 0}
SAMPLES, BATCH = 4096, 1024


def callback(limit="8GiB", **options):
    return keras_remat.RematAutotune(memory_limit=limit, batch_size="keep", **{**QUICK, **options})


def model_and_data(samples=SAMPLES, **options):
    """An MLP whose activations are 2 MiB each for a batch of 1024."""
    return keras_models.mlp(samples, width=512, blocks=4, **options)


def tight_limit(model, data, share=0.55):
    return limit_of(keras_remat.backends.tensorflow.backend(), model, data, BATCH, share)


def small():
    return keras_models.mlp(48, width=8)


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


def test_log_keys_are_there_every_epoch(tight_run):
    _, history, remat, *_ = tight_run
    for key in LOG_KEYS:
        assert len(history[key]) == 3
        assert all(isinstance(number, float) for number in history[key])
    assert history["remat_batch_size"] == [BATCH] * 3
    assert [epoch.samples for epoch in remat.report.epochs] == [SAMPLES] * 3


def test_plan_file_is_used_again_and_refused_by_another_model(tight_run, tmp_path):
    _, _, remat, limit, _ = tight_run
    remat.plan.save(tmp_path / "plan.json")
    assert keras_remat.load_plan(tmp_path / "plan.json") == remat.plan
    model, data = model_and_data()
    again = callback(
        2 * limit, plan=tmp_path / "plan.json"
    )  # a limit that no other data in this process pushes the plan over
    fit(model, data, again, batch_size=BATCH)
    assert again.plan.solution.schedule == remat.plan.solution.schedule
    assert "risk" not in [event.kind for event in again.report.events]
    other, data = small()
    before = other.get_weights()
    with pytest.raises(keras_remat.PlanMismatchError):
        fit(other, data, callback(limit, plan=remat.plan))
    keras_models.assert_same_bits(other.get_weights(), before)
    assert_given_back(other)


def test_limit_below_the_floor_is_refused_before_anything_was_trained():
    model, data = model_and_data(BATCH)
    backend = keras_remat.backends.tensorflow.backend()
    limit = tight_limit(model, data, share=-0.2)
    before = model.get_weights()  # tight_limit() has built the optimizer
    fresh = [v.numpy() for v in model.optimizer.variables]
    with pytest.raises(keras_remat.InfeasibleBudgetError) as caught:
        fit(model, data, callback(limit), batch_size=BATCH)
    keras_models.assert_same_bits(model.get_weights(), before)
    keras_models.assert_same_bits([v.numpy() for v in model.optimizer.variables], fresh)
    error = caught.value
    assert error.op_name in str(error)
    assert error.floor_bytes > error.budget_bytes
    assert "your limit of" in str(error)
    assert "Raise the limit to more than" in str(error)
    assert_given_back(model)
    assert backend.device.in_use_bytes() < 1000 * MIB


# ------------------------------------------------------------------ nothing to do


def test_plain_fits_and_nothing_is_changed():
    plain = fit(*small(), epochs=3)
    model, data = small()
    remat = callback()
    history = fit(model, data, remat, epochs=3)
    assert remat.plan is None
    assert [event.kind for event in remat.report.events] == ["fits"]
    for key, values in plain.items():
        assert history[key] == values
    assert remat.report.baseline_source == "measured"


# ------------------------------------------------------------------ the train function comes back


class Breaks(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_after_another_callback_broke_the_fit_training_goes_on_plainly(error):
    model, data = small()
    remat = callback()
    with pytest.raises(type(error)):
        fit(model, data, remat, Breaks(error))
    fit(model, data)  # without the callback: what was left behind gives way at the first call
    assert_given_back(model)
    steps = sum(epoch.steps for epoch in remat.report.epochs)
    assert steps == 0
    fit(model, data, remat)
    assert remat.report.epochs[0].steps == 3
    assert_given_back(model)


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


def test_compile_between_two_fits_and_saving_after(tmp_path):
    model, data = small()
    remat = callback()
    fit(model, data, remat)
    model.compile("sgd", "mae")
    history = fit(model, data, remat, epochs=2)
    assert len(history["remat_speedup"]) == len(remat.report.epochs) == 2
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(data[0], verbose=0), model.predict(data[0], verbose=0)
    )


def test_second_fit_with_another_limit_plans_anew():
    model, data = model_and_data(BATCH)
    first = callback(tight_limit(model, data))
    fit(model, data, first, batch_size=BATCH)
    assert first.plan is not None
    second = callback()
    fit(model, data, second, batch_size=BATCH)
    assert second.plan is None


# ------------------------------------------------------------------ every way to give data


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, at):
        return self.x[16 * at : 16 * at + 16], self.y[16 * at : 16 * at + 16]


def forever(x, y):
    while True:
        for at in range(3):
            yield x[16 * at : 16 * at + 16], y[16 * at : 16 * at + 16]


DATA = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": 16, "shuffle": False},
    "odd last batch": lambda x, y: {"x": x[:41], "y": y[:41], "batch_size": 16, "shuffle": False},
    "tf.data": lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(16)},
    "repeated tf.data": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat(),
        "steps_per_epoch": 2,
    },
    "PyDataset": lambda x, y: {"x": Batches(x, y), "shuffle": False},
    "generator": lambda x, y: {"x": forever(x, y), "steps_per_epoch": 3},
    "class weights": lambda x, y: {
        "x": x,
        "y": (y > 0.5).astype(int),
        "batch_size": 16,
        "class_weight": {0: 1.0, 1: 3.0},
        "shuffle": False,
    },
    "sample weights": lambda x, y: {
        "x": x,
        "y": y,
        "sample_weight": y[:, 0],
        "batch_size": 16,
        "shuffle": False,
    },
    "validation": lambda x, y: {
        "x": x,
        "y": y,
        "batch_size": 16,
        "validation_data": (x, y),
        "shuffle": False,
    },
}


@pytest.mark.parametrize("form", DATA)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_data_in_every_form_trains_as_without_the_callback(form, steps_per_execution, monkeypatch):
    """Every batch goes through the rematerialized step: the plain peak is taken as over any limit,
    the plan's as under it."""

    def history(*callbacks):
        model, (x, y) = small()
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
        result = model.fit(
            **DATA[form](x, y), epochs=2, verbose=0, callbacks=list(callbacks)
        ).history
        assert_given_back(model)
        return result

    plain = history()
    remat = callback()
    monkeypatch.setattr(
        "keras_remat.training.step_trainer.StepTrainer.usable_bytes",
        property(_never_enough_for_plain),
    )
    ours = history(remat)
    assert remat.plan is not None
    for key, values in plain.items():
        assert ours[key] == pytest.approx(values, rel=1e-4), key


def _never_enough_for_plain(tuner):
    """What the plain step is compared with, which takes 0 bytes of the pool if nothing was trained
    before; plans are made for the limit."""
    return -1


def test_own_train_step_is_traced(monkeypatch):
    plain = fit(*keras_models.vae(48), epochs=2)
    monkeypatch.setattr(
        "keras_remat.training.step_trainer.StepTrainer.usable_bytes",
        property(_never_enough_for_plain),
    )
    remat = callback()
    history = fit(*keras_models.vae(48), remat, epochs=2)
    assert remat.plan is not None
    assert history["total"] == pytest.approx(plain["total"], rel=1e-4)


# ------------------------------------------------------------------ compile options


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


def test_jit_compile_trains_in_order_when_asked_with_one_line(caplog, monkeypatch):
    monkeypatch.setattr(
        "keras_remat.training.step_trainer.StepTrainer.usable_bytes",
        property(_never_enough_for_plain),
    )
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


def test_csv_logger_and_tensorboard_keep_the_columns(tmp_path):
    model, data = small()
    csv_path, board = tmp_path / "log.csv", tmp_path / "board"
    logger = keras.callbacks.CSVLogger(csv_path)
    tensorboard = keras.callbacks.TensorBoard(board, profile_batch=0)
    fit(model, data, callback(report_path=tmp_path / "report.json"), logger, tensorboard, epochs=2)
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert set(LOG_KEYS) <= set(rows[0])
    assert list(board.rglob("events*"))
    document = json.loads((tmp_path / "report.json").read_text())
    assert len(document["epochs"]) == 2
    assert document["format"] == "keras_remat.report"


def test_the_users_profiler_session_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "keras_remat.training.step_trainer.StepTrainer.usable_bytes",
        property(_never_enough_for_plain),
    )
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


def test_tensorboard_profiles_while_the_callback_works(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "keras_remat.training.step_trainer.StepTrainer.usable_bytes",
        property(_never_enough_for_plain),
    )
    model, data = small()
    fit(
        model,
        data,
        callback(),
        keras.callbacks.TensorBoard(tmp_path, profile_batch=(2, 4)),
        epochs=2,
    )
    assert list(tmp_path.rglob("*.xplane.pb"))


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": "lots"}, ValueError, "GiB"),
        ({"memory_limit": -1}, ValueError, "positive"),
        ({"memory_limit": 0}, ValueError, "positive"),
        ({"memory_limit": float("nan")}, ValueError, "finite"),
        ({"memory_limit": "120%"}, ValueError, "100%"),
        ({"memory_limit": "0%"}, ValueError, "0%"),
        ({"memory_limit": True}, TypeError, "GiB"),
        ({"memory_limit": 1.5}, TypeError, "float"),
        ({"memory_limit": [1]}, TypeError, "list"),
        ({"batch_size": 0}, ValueError, "at least 1"),
        ({"batch_size": -3}, ValueError, "at least 1"),
        ({"batch_size": "huge"}, ValueError, "keep"),
        ({"batch_size": True}, TypeError, "int"),
        ({"batch_size": 2.0}, TypeError, "int"),
        ({"margin": 1}, ValueError, "margin"),
        ({"margin": -0.1}, ValueError, "margin"),
        ({"margin": float("nan")}, ValueError, "margin"),
        ({"margin": "5%"}, TypeError, "margin"),
        ({"solver": "magic"}, ValueError, "greedy"),
        ({"solver_time_limit_s": 0}, ValueError, "solver_time_limit_s"),
        ({"profile_steps": 0}, ValueError, "profile_steps"),
        ({"profile_steps": 1.5}, TypeError, "profile_steps"),
        ({"seed": -1}, ValueError, "seed"),
        ({"learning_rate_scaling": "cubic"}, ValueError, "sqrt"),
        ({"verbose": "loud"}, ValueError, "verbose"),
        ({"verbose": 3}, ValueError, "verbose"),
        ({"plan": "nowhere.json"}, OSError, "nowhere"),
        ({"plan": 7}, TypeError, "plan"),
        ({"solver": ["greedy"]}, TypeError, "solver"),
        ({"batch_size": None}, TypeError, "batch_size"),
        ({"cache_dir": 5}, TypeError, "cache_dir"),
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
    from keras_remat.training.grouping import BatchGrouper

    real, taken = BatchGrouper.take, []

    def take(self, samples):
        taken.append(samples)
        time.sleep(0.2)
        return real(self, samples)

    monkeypatch.setattr(BatchGrouper, "take", take)
    model, data = small()
    remat = keras_remat.RematAutotune(batch_size=48, **QUICK)
    fit(model, data, remat, epochs=6)
    assert taken
    last = remat.report.epochs[-1]
    assert last.step_time_s >= 0.2 * last.steps
    assert last.samples_per_s <= last.samples / (0.2 * last.steps)
