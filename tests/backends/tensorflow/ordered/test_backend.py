"""The verbs of the backend that runs steps in order: what a step touches is put back, whoever holds
it, and nothing is made that the step would not make."""

import collections
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_remat
from keras_remat.backends.base import preserved_state
from keras_remat.backends.tensorflow import backend, backends
from keras_remat.backends.tensorflow.memory import variables

Pair = collections.namedtuple("Pair", "one other")


def counter():
    return tf.Variable(0.0, trainable=False)


class Counters(tf.Module):
    """Counters that a module holds."""

    def __init__(self):
        super().__init__()
        self.held = {"of": (counter(),)}


#: What a layer may hold its variables in: what makes it, and how they are found there.
HOLDERS = {
    "attribute": (counter, lambda held: [held]),
    "list": (lambda: [counter(), counter()], list),
    "tuple": (lambda: (counter(), counter()), list),
    "namedtuple": (lambda: Pair(counter(), counter()), list),
    "dictionary": (lambda: {"a": counter(), "b": (counter(),)}, lambda h: [h["a"], h["b"][0]]),
    "ordered dictionary": (
        lambda: collections.OrderedDict(a=counter()),
        lambda held: list(held.values()),
    ),
    "nested": (lambda: [({"a": [counter()]},)], lambda held: [held[0][0]["a"][0]]),
    "module": (Counters, lambda held: list(held.held["of"])),
    "module in an object": (
        lambda: SimpleNamespace(inner=[Counters()]),
        lambda held: list(held.inner[0].held["of"]),
    ),
    "function": (lambda: counter().value, lambda held: [held.__self__]),
    "Keras's": (lambda: (keras.Variable(0.0, trainable=False),), lambda held: [held[0].value]),
}


class Holds(keras.layers.Layer):
    """Counts its calls in variables that it holds in some container."""

    def __init__(self, holder):
        super().__init__()
        make, self.find = HOLDERS[holder]
        self.kind, self.holder = holder, make()

    def call(self, x):
        for variable in self.find(self.holder):
            variable.assign_add(1.0)
        return x


def holding():
    """A model with a layer for each container, and what all have counted."""
    keras.utils.set_random_seed(0)
    holds = [Holds(holder) for holder in HOLDERS]
    layers = [keras.Input((4,)), keras.layers.Dense(8), *holds, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")

    def counted():
        return {one.kind: [float(v) for v in one.find(one.holder)] for one in holds}

    return model, counted


def data(samples=8, width=4):
    x = np.random.default_rng(0).random((samples, width), "float32")
    return x, x[:, :1]


def callback():
    return keras_remat.RematAutotune(
        "8GiB", "keep", solver="greedy", profile_steps=1, solver_time_limit_s=5.0, verbose=0
    )


def bits_of(model, *optimizers):
    """Weights, metrics and optimizers' variables; their number counts, too."""
    held = [model.variables, model.metrics_variables, *(o.variables for o in optimizers)]
    return [[v.numpy().tobytes() for v in variables] for variables in held]


def test_what_the_step_touches_is_put_back_whatever_holds_it():
    """A step that ran out of memory may have moved it, and is run again."""
    model, counted = holding()
    model.train_on_batch(*data())
    ours = backend()
    ours.trace(model, data())
    before, state = counted(), bits_of(model, model.optimizer)
    with preserved_state(ours, model) as put_back:
        for _ in range(2):
            model.train_on_batch(*data())
            assert counted() == {kind: [calls + 1 for calls in of] for kind, of in before.items()}
            put_back()
            assert counted() == before
            assert bits_of(model, model.optimizer) == state


def test_what_is_put_back_is_told_from_what_a_step_updates(monkeypatch):
    """A compiled step donates the memory of what it updates alone."""
    frozen, trained = keras.layers.Dense(8, trainable=False), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), frozen, trained])
    model.compile("sgd", "mse")
    ours, told = backend(), []
    ours.trace(model, ours.example_batch(model, data()))
    monkeypatch.setattr(variables, "snapshot", lambda *given: told.append(given))
    ours.snapshot(model)
    ((put_back, updated),) = told
    assert {id(v.value) for v in model.variables} <= {id(v) for v in put_back}
    assert {id(v.value) for v in trained.variables} <= updated
    assert updated.isdisjoint(id(v.value) for v in frozen.variables)


def test_a_model_with_variables_in_any_container_trains_as_plainly(over_any_limit):
    def trained(*callbacks):
        model, counted = holding()
        options = {"batch_size": 8, "epochs": 2, "verbose": 0}
        history = model.fit(*data(32), callbacks=list(callbacks), **options).history
        return history["loss"], counted(), bits_of(model, model.optimizer)

    assert trained(callback()) == trained()


def test_the_states_of_stateful_layers_are_put_back():
    inputs = keras.Input(batch_shape=(2, 3, 4))
    recurrent = keras.layers.LSTM(5, stateful=True)
    model = keras.Sequential([inputs, recurrent, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = np.ones((2, 3, 4), "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(*batch)
    ours = backend()
    ours.trace(model, batch)
    before = [state.numpy() for state in recurrent.states]
    with preserved_state(ours, model):
        model.train_on_batch(*batch)
        assert not np.array_equal(recurrent.states[0].numpy(), before[0])
    for state, old in zip(recurrent.states, before, strict=True):
        np.testing.assert_array_equal(state.numpy(), old)


class Draws(keras.layers.Layer):
    """Draws from a generator of TensorFlow's own, which uses its variable by the handle."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.normal(tf.shape(x))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_state_of_random_generators_is_put_back(jit_compile):
    draws = Draws()
    model = keras.Sequential([keras.Input((4,)), draws, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    model.train_on_batch(*data())
    ours, *_ = backends(model, "ordered")
    ours.trace(model, data())
    before = draws.generator.state.numpy()
    with preserved_state(ours, model):
        model.train_on_batch(*data())
        assert draws.generator.state.numpy().tolist() != before.tolist()
    assert draws.generator.state.numpy().tolist() == before.tolist()


# ------------------------------------------------------------------ what a step makes


class Momentum(keras.Model):
    """An encoder that is trained, and one that follows it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.follower = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
            for _ in range(2)
        )

    def call(self, x):
        return self.encoder(x), self.follower(x)

    def train_step(self, batch):
        x, _ = batch
        with tf.GradientTape() as tape:
            ours, theirs = self(x)
            loss = tf.reduce_mean((ours - tf.stop_gradient(theirs)) ** 2)
        trained = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        for mine, followed in zip(self.follower.weights, self.encoder.weights, strict=True):
            mine.assign(0.9 * mine + 0.1 * followed)
        return {"loss": loss}


class Half(keras.Sequential):
    """Updates the variables of its last layer alone, by choice."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        trained = self.layers[-1].trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


def half():
    return Half([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])


def whole():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])


def momentum():
    model = Momentum()
    model(data()[0])
    return model


def step_of_an_instance():
    model = whole()
    model.train_step = lambda batch: Half.train_step(model, batch)
    return model


@pytest.mark.parametrize(
    ("make", "optimizer", "is_tight"),
    [
        (momentum, "adam", False),
        (half, "adagrad", True),
        (step_of_an_instance, "adam", False),
        (whole, "scaled", False),
    ],
)
def test_the_optimizer_has_the_slots_that_the_step_asks_for(make, optimizer, is_tight, request):
    if is_tight:
        request.getfixturevalue("over_any_limit")

    def trained(*callbacks):
        keras.utils.set_random_seed(0)
        model = make()
        is_scaled = optimizer == "scaled"
        inner = keras.optimizers.get("adam" if is_scaled else optimizer)
        model.compile(keras.optimizers.LossScaleOptimizer(inner) if is_scaled else inner, "mse")
        options = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(*data(32), callbacks=list(callbacks), **options).history
        slots = [re.sub(r"_\d+", "", variable.path) for variable in model.optimizer.variables]
        slots.append(type(model.optimizer._trainable_variables).__name__)
        return history["loss"], slots, bits_of(model, model.optimizer)

    losses, slots, bits = trained(callback())
    plain_losses, plain_slots, plain_bits = trained()
    assert slots == plain_slots
    assert losses == plain_losses
    assert bits == plain_bits


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_plan_makes_the_slots_that_the_step_asks_for(jit_compile):
    keras.utils.set_random_seed(0)
    model = half()
    model.compile("adam", "mse", jit_compile=jit_compile)
    keras_remat.make_plan(model, data(), "8GiB", solver="greedy")
    assert len(model.optimizer.variables) == 2 + 2 * 2
    assert [float(np.abs(v.numpy()).max()) for v in model.optimizer.variables[2:]] == [0.0] * 4
    assert int(model.optimizer.iterations) == 0
