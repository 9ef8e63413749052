"""Faults injected into a running ``fit``: out of memory at every stage, exceptions, Ctrl-C.

Where training goes on, weights, optimizer slots, metrics and the order of the data must be those of
an undisturbed run; where it ends, the state must be that of an undisturbed run up to there, and the
model must have its own train function back.
"""

import gc
from itertools import count

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from tight_limit import tight_bytes

import keras_remat
import keras_remat.backends.tensorflow as tensorflow_backend
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.swap import InstalledTrainFunction
from keras_remat.training.watch import Pace

BATCH, BATCHES, ODD, EPOCHS = 1024, 4, 1000, 2
STEPS = EPOCHS * (BATCHES + 1)


def out_of_memory():
    return tf.errors.ResourceExhaustedError(None, None, "injected")


class Seen(keras.callbacks.Callback):
    """Losses as they are shown, and whatever goes wrong at a batch."""

    def __init__(self, fails_at=None, error=None):
        super().__init__()
        self.losses, self.fails_at, self.error = [], fails_at, error

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        if len(self.losses) == self.fails_at:
            raise self.error


def bytes_in_use():
    gc.collect()
    return tensorflow_backend.backend().device.in_use_bytes()


def model_and_data(blocks=3):
    """An MLP whose activations are 1 MiB each, and an optimizer with a slot for every weight."""
    optimizer = keras.optimizers.SGD(momentum=0.9)
    return keras_models.mlp(BATCHES * BATCH + ODD, 256, blocks, optimizer=optimizer)


def train(room, seen, epochs=EPOCHS, validation=False, batch=BATCH, **model):
    """One ``fit`` of a model made anew with ``room`` bytes above what TensorFlow still holds of
    earlier ones; returns the model, the callback, and what was raised."""
    limit = bytes_in_use() + room
    model, data = model_and_data(**model)
    remat = keras_remat.RematAutotune(
        memory_limit=limit,
        batch_size="keep",
        solver="greedy",
        profile_steps=1,
        solver_time_limit_s=5.0,
        margin=0.0,
        verbose=0,
    )
    try:
        model.fit(
            *data,
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[remat, seen],
            validation_data=tuple(part[:BATCH] for part in data) if validation else None,
        )
    except BaseException as error:
        return model, remat, error
    return model, remat, None


@pytest.fixture(scope="module")
def limits():
    """Room that only rematerialization keeps to, and room that plain steps keep to."""
    before = bytes_in_use()
    model, data = model_and_data()
    tight = tight_bytes(tensorflow_backend.backend(), model, data, BATCH, 0.75)
    return {"tight": int(tight) - before, "plain": 2**33}


@pytest.fixture(scope="module")
def undisturbed(limits):
    """By name of the limit: state, losses and plan of a run in which nothing goes wrong; nothing of
    it stays on the device."""
    runs = {}
    for name, limit in limits.items():
        seen = Seen()
        model, remat, error = train(limit, seen)
        assert error is None
        runs[name] = keras_models.state_of(model), seen.losses, remat.plan
    assert runs["tight"][2].recomputes
    assert runs["plain"][2] is None
    return runs


def inject(monkeypatch, owner, name, call, *, before):
    """The ``call``-th call of a method raises out of memory, before or after it has done its
    work."""
    calls, original = count(1), getattr(owner, name)

    def method(self, batch):
        fails = next(calls) == call
        if fails and before:
            raise out_of_memory()
        result = original(self, batch)
        if fails:
            raise out_of_memory()
        return result

    monkeypatch.setattr(owner, name, method)


#: The first step, the swapped one, and a settled one; the others take longer than they tell.
TELLING = {1, 3, STEPS - 2}


@pytest.fixture
def every_step_guarded(monkeypatch):
    """The copy before a step of milliseconds is never cheap, and final steps are seldom looked at;
    in these tests it counts as such, and every step is looked at."""
    monkeypatch.setattr("keras_remat.training.undo.CHEAP_SHARE", 1e9)
    monkeypatch.setattr(Pace, "is_due", lambda pace: True)


@pytest.mark.usefixtures("every_step_guarded")
@pytest.mark.parametrize(
    ("call", "when"),
    [
        pytest.param(
            call,
            when,
            id=f"step {call}, {when}",
            marks=() if when == "after" and call in TELLING else pytest.mark.slow,
        )
        for call in range(1, STEPS + 1)
        for when in ("before", "after")
    ],
)
def test_rematerialized_step_that_runs_out_of_memory(limits, undisturbed, monkeypatch, call, when):
    inject(monkeypatch, LoweredStep, "__call__", call, before=when == "before")
    seen = Seen()
    model, remat, error = train(limits["tight"], seen)
    assert error is None
    expected, losses, _ = undisturbed["tight"]
    assert seen.losses == losses
    keras_models.assert_same_bits(keras_models.state_of(model), expected)
    assert [event.kind for event in remat.report.events].count("out-of-memory") == 1
    assert sum(epoch.samples for epoch in remat.report.epochs) == EPOCHS * (BATCHES * BATCH + ODD)


@pytest.mark.usefixtures("every_step_guarded")
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_first_plain_step_that_runs_out_of_memory(limits, undisturbed, monkeypatch, when):
    """Later ones are Keras's own, and its error is the user's."""
    inject(monkeypatch, InstalledTrainFunction, "run_plain", 1, before=when == "before")
    seen = Seen()
    model, remat, error = train(limits["plain"], seen)
    assert error is None
    expected, losses, _ = undisturbed["plain"]
    assert seen.losses == pytest.approx(losses, rel=1e-5)
    for mine, theirs in zip(keras_models.state_of(model), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert "out-of-memory" in [event.kind for event in remat.report.events]
    assert sum(epoch.samples for epoch in remat.report.epochs) == EPOCHS * (BATCHES * BATCH + ODD)


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (ValueError("a user's callback"), 1),
        pytest.param(KeyboardInterrupt(), 3, marks=pytest.mark.slow),
        (KeyboardInterrupt(), BATCHES + 3),
    ],
    ids=["exception, step 1", "Ctrl-C, step 3", "Ctrl-C, a settled step"],
)
def test_fit_that_another_callback_ends(limits, undisturbed, error, step):
    seen = Seen(step, error)
    model, _, raised = train(limits["tight"], seen)
    assert raised is error
    assert seen.losses == undisturbed["tight"][1][:step]
    assert int(model.optimizer.iterations) == step
    history = model.fit(*keras_models.mlp(BATCH)[1], batch_size=BATCH, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_settled_step_whose_copy_is_dear_raises_what_the_framework_raises(limits, monkeypatch):
    monkeypatch.setattr("keras_remat.training.undo.CHEAP_SHARE", 0.0)
    inject(monkeypatch, LoweredStep, "__call__", STEPS - 2, before=True)
    model, _, raised = train(limits["tight"], Seen())
    assert isinstance(raised, tf.errors.ResourceExhaustedError)
    assert int(model.optimizer.iterations) == STEPS - 3
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_interrupt_inside_a_step(limits, monkeypatch):
    calls, original = count(1), LoweredStep.__call__

    def method(self, batch):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(LoweredStep, "__call__", method)
    model, _, raised = train(limits["tight"], Seen())
    assert isinstance(raised, KeyboardInterrupt)
    assert int(model.optimizer.iterations) == 5
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_out_of_memory_in_validation_is_the_users_to_see(limits, undisturbed, monkeypatch):
    def test_step(self, data):
        raise out_of_memory()

    monkeypatch.setattr(keras.Model, "test_step", test_step)
    seen = Seen()
    model, _, raised = train(limits["tight"], seen, validation=True)
    assert isinstance(raised, tf.errors.ResourceExhaustedError)
    assert seen.losses == undisturbed["tight"][1][: BATCHES + 1]
    assert int(model.optimizer.iterations) == BATCHES + 1
    monkeypatch.undo()
    model.fit(*keras_models.mlp(BATCH)[1], batch_size=BATCH, verbose=0)
    assert not isinstance(model.train_function, InstalledTrainFunction)


def test_memory_that_never_suffices_ends_with_the_frameworks_error_as_a_note(limits, monkeypatch):
    """Every number of micro-batches is tried, and traced: there are few of four samples."""

    def method(self, batch):
        raise out_of_memory()

    monkeypatch.setattr(InstalledTrainFunction, "run_plain", method)
    monkeypatch.setattr(LoweredStep, "__call__", method)
    model, _, raised = train(limits["plain"], Seen(), batch=4, blocks=1)
    assert isinstance(raised, keras_remat.RematError)
    assert any("ResourceExhaustedError" in note for note in raised.__notes__)
    assert int(model.optimizer.iterations) == 0
    assert not isinstance(model.train_function, InstalledTrainFunction)
