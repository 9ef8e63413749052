"""What is traced is the step that will run: with its slots, whatever Keras has built so far."""

import dataclasses
import gc
import types
from functools import partial

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from fake_backend import FakeBackend, chain_problem
from fake_fit import Driven

import keras_remat
import keras_remat.backends.tensorflow as tensorflow_backend
from keras_remat.backends.tensorflow.graph import trace as tracing
from keras_remat.core.problem import Problem
from keras_remat.errors import BudgetError
from keras_remat.training.arguments import FitOptions
from keras_remat.training.decide import Phase
from keras_remat.training.requests import PlanRequests
from keras_remat.training.shape_state import Costs, PriorPlans, StepConstraints

WIDTH = 512
#: Of the kernel: what is as small as the bias does not count.
WEIGHTS_BYTES = 4 * WIDTH * WIDTH


def dense():
    return keras.layers.Dense(WIDTH)


def functional():
    model = keras.Sequential([keras.Input((WIDTH,)), dense()])
    model.compile("adam", "mse")
    return model


class Unbuilt(keras.Model):
    """Is built in the first step."""

    def __init__(self):
        super().__init__()
        self.layer = dense()

    def call(self, x):
        return self.layer(x)


class OwnOptimizer(Unbuilt):
    """Builds the slots of an optimizer of its own in the first step."""

    def compile(self, *arguments):
        super().compile(*arguments)
        self.own = keras.optimizers.Adam()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def unbuilt(kind):
    model = kind()
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    "make",
    [functional, lambda: unbuilt(Unbuilt), lambda: unbuilt(OwnOptimizer)],
    ids=["functional", "unbuilt", "own optimizer"],
)
def test_slots_are_in_the_first_prediction(make):
    gc.collect()
    device = tensorflow_backend.backend().device
    before = device.in_use_bytes()
    model, data = make(), np.zeros((8, WIDTH), "float32")
    remat = keras_remat.RematAutotune("8GiB", "keep", verbose=0)
    model.fit(data, data, batch_size=8, verbose=0, callbacks=[remat])
    if device.has_statistics:
        assert remat.problem.profile.resident_bytes - before >= 3 * WEIGHTS_BYTES


def test_an_interrupt_while_tracing_leaves_an_optimizer_that_can_be_used(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    model, data = functional(), np.ones((8, WIDTH), "float32")
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "trace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(data, data, verbose=0, callbacks=[keras_remat.RematAutotune("8GiB", "keep")])
    shapes = {tuple(v.shape) for v in model.optimizer.variables}
    assert shapes == {(), (WIDTH,), (WIDTH, WIDTH)}
    model.fit(data, data, verbose=0)


class Noisy(keras.Model):
    """Draws a number in every step by a kernel that keeps its state, and shows it."""

    def __init__(self):
        super().__init__()
        self.layer = dense()
        self.layer.build((None, WIDTH))

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        noise = tf.random.normal(())
        return super().train_step(data) | {"noise": noise}


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.noise = []

    def on_train_batch_end(self, batch, logs=None):
        self.noise.append(float(logs["noise"]))


def test_random_numbers_do_not_repeat_where_a_swap_would_lose_their_state(monkeypatch):
    monkeypatch.setattr("keras_remat.training.tools.Tools.plain_fits", lambda *_: False)

    def noise(*callbacks):
        keras.utils.set_random_seed(0)
        model, seen = Noisy(), Seen()
        model.compile("sgd", "mse")
        data = np.zeros((64, WIDTH), "float32")
        model.fit(data, data, batch_size=8, verbose=0, callbacks=[*callbacks, seen])
        return seen.noise

    plain = noise()
    remat = keras_remat.RematAutotune("8GiB", "keep", verbose=0)
    with pytest.warns(UserWarning, match="RandomStandardNormal") as warned:
        ours = noise(remat)
    assert sum("RandomStandardNormal" in str(w.message) for w in warned) == 1
    assert ours == plain
    assert len(set(ours)) == len(ours) == 8
    assert remat.report.events[-1].kind == "unmodified"


@pytest.mark.parametrize(
    ("source", "margin", "roomy", "last"),
    [
        ("estimated", 0.0, 953250, (2**20,)),
        ("measured", 0.0, 2**20, (2**20,)),
        ("measured", 0.25, 0.75 * 2**20, (0.75 * 2**20, 2**20)),
        ("estimated", 0.25, 0.75 * 2**20, (0.75 * 2**20, 2**20)),
    ],
)
def test_a_first_plan_leaves_room_until_something_was_measured(source, margin, roomy, last):
    """For a batch that has grown, every plan leaves a margin."""
    problem = chain_problem(64)
    profile = dataclasses.replace(problem.profile, source=source, resident_bytes=0)
    costs = types.SimpleNamespace(problem=dataclasses.replace(problem, profile=profile))
    plans = Driven(FakeBackend(), options=FitOptions(2**20, margin=0.0)).tools.plans
    constraints = StepConstraints(least_margin=margin)
    shape = types.SimpleNamespace(batch_size=64, constraints=constraints)
    first = plans.with_headroom(shape, costs, PriorPlans(), is_final=False)
    assert first.is_quick
    assert first.budgets_bytes[0] == roomy
    assert plans.with_headroom(shape, costs, PriorPlans()).budgets_bytes == last


def test_where_the_order_of_a_search_in_slices_does_not_fit_another_in_these_slices_is_found(
    monkeypatch,
):
    inner = [keras.layers.Reshape((64, 1)), keras.layers.Dense(64), keras.layers.ReLU()]
    model = keras.Sequential([keras.Input((64,)), *inner, keras.layers.Flatten()])
    model.compile("sgd", "mse")
    data = np.ones((64, 64), "float32"), np.ones((64, 4096), "float32")
    backend = tensorflow_backend.backend()
    monkeypatch.setattr(backend, "installed", FakeBackend().installed, raising=False)
    batch = backend.example_batch(model, data)
    traced = backend.trace(model, batch)
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    costs = Costs(traced=traced, problem=problem)
    resident = problem.profile.resident_bytes
    limit = round(resident + 0.7 * (problem.floor_bytes - resident))
    options = FitOptions(limit, margin=0.0, solver="greedy")
    plans = Driven(backend, options=options, model=model).tools.plans
    first, tried = (
        types.SimpleNamespace(batch_size=64, constraints=StepConstraints(allow_over_limit=may))
        for may in (True, False)
    )
    searched, under = plans.in_slices(first, costs, BudgetError("does not fit", "", ""))
    monkeypatch.setattr(PlanRequests, "_reused", lambda *_: None)
    searched = dataclasses.replace(searched, slicing=under.traced.slicing)
    known = PriorPlans(plans=((searched, under.problem.graph, Phase.WARM_UP),))
    found, costs, _ = plans.find(tried, costs, batch, known)
    assert costs.traced.slicing == searched.slicing is not None
    assert found.predicted.peak_bytes <= limit


def test_sizes_that_only_the_step_knows_are_told_once():
    """Two shapes are traced; sizes that a trace tells are not spoken of."""

    def told_of(make):
        model, batch = make(8)
        model.compile("sgd", "mse")
        remat = keras_remat.RematAutotune("8GiB", "keep", solver="greedy", verbose=0)
        model.fit(*batch, batch_size=5, verbose=0, callbacks=[remat])
        return [
            event for event in remat.report.events if "only when the step runs" in event.message
        ]

    assert len(told_of(keras_models.trimmed)) == 1
    assert told_of(partial(keras_models.mlp, width=8, blocks=1)) == []
