"""Planning a Keras model without training it."""

import types

import numpy as np
import pytest
from fake_backend import chain_problem

from keras_remat.core.limit import Limit
from keras_remat.errors import (
    InfeasibleBudgetError,
    UnsupportedModelError,
)
from keras_remat.planning.make_plan import limit_on, make_plan

PROBLEM = chain_problem(64)


ROOMY = {"memory_limit": "8GiB", "solver": "greedy", "solver_time_limit_s": 5.0}


def planning_limit(model, batch, share):
    """A limit that leaves ``share`` of what the plain step takes above the resident bytes."""
    store_all = make_plan(model, batch, profile="estimated", margin=0.0, **ROOMY)
    resident = store_all.problem.profile.resident_bytes
    return int(resident + (store_all.store_all.peak_bytes - resident) * share)


def test_planning_leaves_the_model_as_it_was(models):
    model, batch = models.mlp(8, width=8, blocks=1)
    # optimizer slots, metrics and seeds are no longer at their start
    model.fit(*batch, batch_size=8, verbose=0)
    before = models.state_of(model)
    for profile in ("measured", "estimated"):
        plan = make_plan(model, batch, profile=profile, **ROOMY)
        models.assert_same_bits(models.state_of(model), before)
        assert plan.profile_source == plan.problem.profile.source == profile
        assert plan.measured is None
        assert plan.device == "CPU:0" or plan.device.startswith("GPU")
        assert plan.predicted.peak_bytes <= plan.budget_bytes == int(8 * 2**30 * 0.95)
        assert not plan.recomputes


def test_unbuilt_optimizer_is_built_and_at_its_start(models):
    model, batch = models.mlp(8, width=8, blocks=1)
    weights = model.get_weights()
    make_plan(model, batch, **ROOMY)
    models.assert_same_bits(model.get_weights(), weights)
    assert int(model.optimizer.iterations.numpy()) == 0
    assert all(
        float(abs(v.numpy()).max()) == 0.0
        for v in model.optimizer.variables
        if "momentum" in v.path or "velocity" in v.path
    )


def moving():
    """A model whose step moves what no layer, optimizer or metric holds: Keras's own generator of
    seeds, a variable of the loss, and one of the whole program."""
    import keras
    import tensorflow as tf

    of_program = tf.Variable(0.0)

    class Noise(keras.layers.Layer):
        def call(self, x):
            of_program.assign_add(1.0)
            return x + 0.1 * keras.random.normal(keras.ops.shape(x))

    class Counted(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.calls = keras.Variable(0.0)

        def call(self, y, predicted):
            self.calls.assign_add(1.0)
            return keras.ops.mean((y - predicted) ** 2, -1)

    keras.utils.set_random_seed(0)
    loss = Counted()
    inputs, hidden, out = keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)
    model = keras.Sequential([inputs, hidden, Noise(), out])
    model.compile("sgd", loss)
    return model, lambda: (float(of_program), float(loss.calls))


def regression(samples=8):
    x = np.linspace(-1, 1, 4 * samples, dtype="float32").reshape(samples, 4)
    return x, x[:, :1]


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_planning_moves_nothing_that_the_model_does_not_hold(models, jit_compile):
    from keras_remat.backends.base import load_backend
    from keras_remat.batch_size.find import find_max_batch_size

    batch = regression()
    model, _ = moving()
    expected = model.fit(*batch, epochs=2, verbose=0, shuffle=False).history
    model, moved = moving()
    model.jit_compile = jit_compile
    make_plan(model, batch, **ROOMY)
    assert moved() == (0.0, 0.0)
    if not jit_compile:
        limit = load_backend().device.in_use_bytes() + 2**20
        find_max_batch_size(model, batch, limit, margin=0.0, time_limit_s=0.5)
        assert moved() == (0.0, 0.0)
    model.jit_compile = False
    assert model.fit(*batch, epochs=2, verbose=0, shuffle=False).history == expected
    assert moved() == (2.0, 2.0)


def without_call():
    """Two networks with a ``train_step`` and no ``call``, not built, as keras.io writes them."""
    import keras
    import tensorflow as tf

    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = keras.layers.Dense(3), keras.layers.Dense(4)
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x - self.decoder(self.encoder(x))) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    keras.utils.set_random_seed(0)
    model = Autoencoder()
    model.compile("sgd")
    return model


@pytest.fixture(scope="module")
def trained_without_call(models):
    """The losses and the model of two epochs."""
    model = without_call()
    return model.fit(regression()[0], batch_size=8, epochs=2, verbose=0).history["loss"], model


@pytest.mark.parametrize("profile", ["measured", "estimated"])
def test_a_model_without_call_is_planned_and_trains_by_its_plan(
    models, trained_without_call, profile
):
    import keras_remat

    (expected, plain), (x, _), model = trained_without_call, regression(), without_call()
    plan = make_plan(model, x, profile=profile, **ROOMY)
    assert len(model.weights) == len(plain.weights)
    assert len(model.optimizer.variables) == len(plain.optimizer.variables)
    remat = keras_remat.RematAutotune("8GiB", "keep", plan=plan, verbose=0)
    history = model.fit(x, batch_size=8, epochs=2, verbose=0, callbacks=[remat]).history
    assert history["loss"] == expected
    models.assert_same_bits(models.state_of(model), models.state_of(plain))


def test_a_batch_is_searched_for_a_model_without_call(models, trained_without_call):
    import keras_remat

    (_, plain), (x, _), model = trained_without_call, regression(), without_call()
    found = keras_remat.find_max_batch_size(
        model, x[:8], "1GiB", profile="estimated", time_limit_s=0.5
    )
    assert found.max_batch_size > 8
    model.fit(x, batch_size=8, epochs=2, verbose=0)
    models.assert_same_bits(models.state_of(model), models.state_of(plain))


def test_int_specs_and_arrays_give_the_same_graph(models):
    import keras

    model, (x, y) = models.mlp(8, width=8, blocks=1, optimizer="sgd")
    specs = (keras.KerasTensor(x.shape, "float32"), keras.KerasTensor(y.shape, "float32"))
    fingerprints = {
        make_plan(model, batch, profile="estimated", **ROOMY).fingerprint
        for batch in (8, specs, (x, y))
    }
    assert len(fingerprints) == 1
    assert make_plan(model, 9, profile="estimated", **ROOMY).fingerprint not in fingerprints


def test_plan_under_a_tight_limit_recomputes_and_is_legal(models):
    model, batch = models.mlp(512, width=512, blocks=3, optimizer="sgd")
    limit = planning_limit(model, batch, 0.7)
    plan = make_plan(model, batch, limit, solver="greedy", profile="estimated", margin=0.0)
    assert plan.recomputes
    assert plan.predicted.peak_bytes <= limit < plan.store_all.peak_bytes
    plan.check(plan.problem)


def test_limit_below_the_floor_is_proved_infeasible(models):
    model, batch = models.mlp(512, width=512, blocks=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        make_plan(model, batch, "1KiB", profile="estimated", margin=0.0)
    assert caught.value.floor_bytes > caught.value.budget_bytes == 1024


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"memory_limit": "8Gb"}, ValueError, "GiB"),
        ({"memory_limit": 0}, ValueError, "positive"),
        ({"memory_limit": 8}, ValueError, 'did you mean "8GiB"'),
        ({"model": "model.keras"}, TypeError, "keras.saving.load_model"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit"),
        ({"profile": "guessed"}, ValueError, "estimated"),
        ({"solver": "magic"}, ValueError, "greedy"),
        ({"solver_time_limit_s": 0}, ValueError, "time_limit_s"),
        ({"solver_time_limit_s": float("inf")}, ValueError, "time_limit_s"),
        ({"solver_time_limit_s": None}, TypeError, "solver_time_limit_s"),
        ({"margin": 1.5}, ValueError, "margin"),
        ({"margin": "x"}, TypeError, "margin"),
        ({"seed": None}, TypeError, "seed"),
        ({"seed": -1}, ValueError, "seed"),
        ({"batch": 0}, ValueError, "positive"),
        ({"batch": "8"}, TypeError, "batch"),
        ({"batch": None}, TypeError, "batch"),
    ],
)
def test_wrong_arguments_say_what_is_accepted(models, arguments, error, says):
    model, batch = models.mlp(4, width=4, blocks=1)
    with pytest.raises(error, match=says):
        make_plan(
            **{
                "model": model, "batch": batch, "memory_limit": "8GiB", "profile": "estimated",
                **arguments,
            }
        )  # fmt: skip


def test_models_that_cannot_be_planned_say_why(models):
    import keras

    model, batch = models.mlp(4, width=4, blocks=1)
    model.run_eagerly = True
    with pytest.raises(UnsupportedModelError, match="eagerly"):
        make_plan(model, batch, "8GiB")
    uncompiled = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(1)])
    for given in (8, batch):
        with pytest.raises(ValueError, match="compile"):
            make_plan(uncompiled, given, "8GiB")


def test_a_limit_above_what_the_device_has_is_lowered_to_that():
    device = types.SimpleNamespace(total_bytes=lambda: 2**20)
    with pytest.warns(UserWarning, match="the memory limit is 2 MiB, and the device has 1 MiB"):
        assert limit_on(device, "2MiB", 0.25) == Limit(2**20, 0.25)
    another = limit_on(device, "2MiB", 0.0, runs=False)
    assert another == Limit(2**21), "a prediction may be for another device"
    assert limit_on(device, "50%", 0.0) == Limit(2**19)
