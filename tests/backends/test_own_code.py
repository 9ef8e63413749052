"""``RematAutotune`` beside a user's own code, on the framework that Keras runs on: layers in every
container that Keras tracks, what a model overrides around its step, what planning finds moved, and
an optimizer of a part. All is compared with plain ``fit``."""

import collections
import functools
import random
from collections.abc import Mapping, ValuesView

import keras
import numpy as np
import pytest
from fit_pairs import callback

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.backends.keras_private import replaced_machinery

BACKEND = keras.backend.backend()
SAMPLES, BATCH = 48, 16
#: XLA may add up in another order.
TOLERANCE = 1e-5 if BACKEND == "jax" else 0.0
Pair = collections.namedtuple("Pair", "one other")


def data():
    x = np.linspace(-1, 1, 6 * SAMPLES, dtype="float32").reshape(SAMPLES, 6)
    return x, x[:, :1] ** 2


def fitted(make, *callbacks, **options):
    """Trains a new model; returns it and its losses."""
    keras.utils.set_random_seed(0)
    model = make()
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(*data(), callbacks=list(callbacks), **options).history
    return model, history["loss"]


def assert_trains_as_plainly(make, remat, *others):
    """Losses, weights, moving averages, seeds and the optimizer's variables, their number, too."""
    (plain, losses), (model, ours) = fitted(make, *others), fitted(make, remat, *others)
    np.testing.assert_allclose(ours, losses, rtol=TOLERANCE)
    held = [(*one.variables, *one.optimizer.variables) for one in (model, plain)]
    for one, other in zip(*held, strict=True):
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=one.path
        )
    return model


# ------------------------------------------------------------------ containers


def by_name(things):
    return dict(zip("ab", things, strict=True))


def in_sets(things):
    """The order in one set is not known, and a variable cannot be in any."""
    is_layers = isinstance(things[0], keras.Layer)
    return ({things[0]}, {things[1]}) if is_layers else tuple(things)


#: What makes a container of two things.
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "named tuple": lambda things: Pair(*things),
    "dictionary": by_name,
    "ordered dictionary": lambda things: collections.OrderedDict(by_name(things)),
    "set": in_sets,
    "nested": lambda things: [{"a": (things[0],)}, [Pair(things[1], ())]],
}


def things_in(held):
    if isinstance(held, Mapping):
        held = held.values()
    if isinstance(held, (list, tuple, set, frozenset, ValuesView)):
        return [thing for inner in held for thing in things_in(inner)]
    return [held]


class HoldsInAll(keras.Model):
    """Has two layers and two variables in a container of every kind."""

    def __init__(self):
        super().__init__()
        dense = functools.partial(keras.layers.Dense, 6, use_bias=False)
        for at, make in enumerate(CONTAINERS.values()):
            setattr(self, f"layers_{at}", make([dense() for _ in range(2)]))
            scales = [self.add_weight(initializer="ones", name=f"{at}{name}") for name in "ab"]
            setattr(self, f"scales_{at}", make(scales))
        self.head = keras.layers.Dense(1)

    def call(self, x):
        for at in range(len(CONTAINERS)):
            for layer in things_in(getattr(self, f"layers_{at}")):
                x = keras.ops.tanh(layer(x))
            for scale in things_in(getattr(self, f"scales_{at}")):
                x = scale * x
        return self.head(x)


def holds_in_all():
    model = HoldsInAll()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")  # a slot for each variable
    return model


def test_layers_and_variables_in_every_container_train_as_plainly(over_any_limit):
    remat = callback()
    model = assert_trains_as_plainly(holds_in_all, remat)
    assert remat.plan is not None
    assert len(model.trainable_variables) == len(CONTAINERS) * (2 + 2) + 2


class BuiltInName(keras.Model):
    """Counts as built by Keras's ``build``, which makes no weights of its layers."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))


@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
def test_layers_that_build_left_without_weights_get_them_in_the_first_step(over_any_limit):
    def built_in_name():
        model = BuiltInName()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.build((None, 6))
        assert model.built
        assert not model.weights
        return model

    remat = callback()
    assert_trains_as_plainly(built_in_name, remat)
    assert remat.plan is not None


# ------------------------------------------------------------------ what a model overrides


class ComputesLoss(keras.Model):
    """Adds to its loss."""

    def compute_loss(self, *arguments, **named):
        return super().compute_loss(*arguments, **named) + 0.01 * keras.ops.mean(
            keras.ops.square(self.trainable_variables[0])
        )


class ComputesUpdates(keras.Model):
    """Triples its loss, where JAX computes it."""

    def compute_loss_and_updates(self, *arguments, **named):
        loss, others = super().compute_loss_and_updates(*arguments, **named)
        return 3.0 * loss, others


class TrainsTwice(keras.Model):
    """Trains the last batch of every epoch once more, by a ``train_on_batch`` of its own."""

    def train_on_batch(self, *arguments, **named):
        super().train_on_batch(*arguments, **named)
        return super().train_on_batch(*arguments, **named)


class LastOnceMore(keras.callbacks.Callback):
    """Calls the model's ``train_on_batch`` in the middle of a fit."""

    def on_epoch_end(self, epoch, logs=None):
        x, y = data()
        self.model.train_on_batch(x[-BATCH:], y[-BATCH:])


def of_kind(kind):
    def make():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "tanh")(inputs))
        model = kind(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model

    return make


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (ComputesLoss, []),
        pytest.param(
            ComputesUpdates, [],
            marks=pytest.mark.skipif(BACKEND != "jax", reason="JAX's trainer alone has it"),
        ),
        (TrainsTwice, [LastOnceMore()]),
    ],
)  # fmt: skip
def test_what_a_model_overrides_around_its_step_runs_as_it_is(kind, others, over_any_limit):
    remat = callback()
    model = assert_trains_as_plainly(of_kind(kind), remat, *others)
    assert remat.plan is not None
    assert int(model.optimizer.iterations) == 2 * (SAMPLES // BATCH + 2 * len(others))


@pytest.mark.parametrize("name", ["make_train_function", "_make_function"])
def test_what_stands_between_a_batch_and_the_step_is_named(name):
    class Own(keras.Model):
        pass

    model = Own()
    assert replaced_machinery(model, None) is None
    setattr(model, name, print)
    assert replaced_machinery(model, None) == name
    setattr(Own, name, print)
    assert replaced_machinery(type("Heir", (Own,), {})(), None) == f"Own.{name}"


class RunsEagerly(keras.callbacks.Callback):
    """Asks for eager execution in mid-fit, as Keras allows it."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.run_eagerly = True
            self.model.make_train_function(force=True)


@pytest.mark.skipif(BACKEND == "torch", reason="there all steps run eagerly, and are recorded")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_is_asked_to_run_eagerly_in_mid_fit_does(over_any_limit):
    remat = callback()
    assert_trains_as_plainly(of_kind(keras.Model), remat, RunsEagerly())
    assert [event.kind for event in remat.report.events][-1] == "unmodified"


# ------------------------------------------------------------------ what planning leaves


class Noise(keras.layers.Layer):
    """Draws by a generator that it does not hold: Keras's own, which JAX refuses to trace."""

    def __init__(self):
        super().__init__()
        seed = keras.random.SeedGenerator(1) if BACKEND == "jax" else None
        self.draw = lambda shape: keras.random.normal(shape, seed=seed)

    def call(self, x):
        return x + 0.1 * self.draw(keras.ops.shape(x))


class Counted(keras.losses.Loss):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, y, predicted):
        self.calls.assign(self.calls + 1.0)
        return keras.ops.mean((y - predicted) ** 2, -1)


def drawing():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Noise()(keras.layers.Dense(8)(inputs))))
    model.compile("adam", Counted())
    return model


def planned_before():
    model, batch = drawing(), tuple(part[:BATCH] for part in data())
    keras_remat.make_plan(model, batch, "8GiB", solver="greedy")
    limit = load_backend().device.in_use_bytes() + 2**20
    keras_remat.find_max_batch_size(model, batch, limit, margin=0.0, time_limit_s=2.0)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fit_after_a_plan_and_a_search_is_the_plain_one():
    """No layer, optimizer or metric holds what the step moves."""
    plain, expected = fitted(drawing)
    model, losses = fitted(planned_before)
    assert losses == expected
    assert float(model.loss.calls) == float(plain.loss.calls)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras refuses to trace it there")
@pytest.mark.parametrize("is_tight", [False, True])
def test_a_layer_that_draws_by_keras_s_own_generator_trains_as_plainly(is_tight, request):
    """The first step that anybody traces makes the generator."""
    if is_tight:
        request.getfixturevalue("over_any_limit")
    remat = callback()
    assert_trains_as_plainly(drawing, remat)
    assert (remat.plan is not None) == is_tight


def test_a_fit_draws_no_seed_that_plain_fit_does_not_draw():
    """Keras draws the seeds of layers, and of its own generator, from Python's."""

    def next_seed(*callbacks):
        fitted(of_kind(keras.Model), *callbacks, epochs=1)
        return random.random()

    expected = next_seed()
    assert next_seed() == next_seed(callback()) == expected


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_a_plan_fits_the_arrays_it_was_made_of(dtype):
    """Keras casts them in ``fit``."""
    x = np.arange(32).reshape(8, 4).astype(dtype)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = x, x[:, :1]
    plan = keras_remat.make_plan(model, batch, "8GiB", profile="estimated", solver="greedy")
    remat = callback(plan=plan)
    model.fit(*batch, batch_size=8, verbose=0, callbacks=[remat])
    assert remat.plan is not None


# ------------------------------------------------------------------ an optimizer of a part


class LastLayerAlone(keras.Model):
    """Updates its last layer by choice, with a step of its own."""

    def train_step(self, batch):
        x, y = batch
        chosen = self.layers[-1].trainable_variables
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, chosen)
        else:
            self.zero_grad()
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
            loss.backward()
            gradients = [variable.value.grad for variable in chosen]
        self.optimizer.apply(gradients, chosen)
        return {"loss": loss.detach() if BACKEND == "torch" else loss}


@pytest.mark.skipif(BACKEND == "jax", reason="there Keras builds the optimizer for all")
@pytest.mark.parametrize("is_tight", [False, True])
def test_an_optimizer_of_a_part_has_the_slots_of_that_part(is_tight, request):
    if is_tight:
        request.getfixturevalue("over_any_limit")
    remat = callback()
    model = assert_trains_as_plainly(of_kind(LastLayerAlone), remat)
    assert (remat.plan is not None) == is_tight
    slots = 4 if BACKEND == "torch" else 2  # on PyTorch Keras makes them for all
    assert len(model.optimizer.variables) == 2 + slots
