"""What every path that runs a step must do: in order or compiled, on the framework that Keras runs
on. Several replicas need processes of their own, which their folders start."""

import jax_models
import keras
import numpy as np
import pytest
from keras import layers
from tight_limit import tight_limit

import keras_remat
from keras_remat.backends.base import load_backends
from keras_remat.backends.installed import Installed
from keras_remat.core.events import EventKind
from keras_remat.core.problem import Problem
from keras_remat.planning import advice
from keras_remat.reporting.fit_report import LOG_KEYS

FRAMEWORK = keras.backend.backend()
#: The paths of every framework, as values of ``compilation``.
PATHS = {"tensorflow": ("ordered", "compiled"), "jax": ("compiled",), "torch": ("ordered",)}
every_path = pytest.mark.parametrize("path", PATHS[FRAMEWORK])
#: XLA takes long, and what it compiles from slices is trained in the case below the floor.
first_path = pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[pytest.mark.slow] if at else [])
        for at, p in enumerate(PATHS[FRAMEWORK])
    ],
)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SAMPLES, ROWS = 16, 2048


def head(path):
    """A language model of which all is small but the vocabulary, and a batch of its texts: 16 MiB
    of logits."""
    model, texts = jax_models.head(8192, SAMPLES, dropout=0)
    return compiled(model, path), texts


def images(path, count, metrics=()):
    """A network with batch normalization, pooling and dropout, and its images; XLA compiles
    convolutions for long, and the tests of its folders have them in slices."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((8, 8, 3))
    if path == "compiled":
        x = layers.Dense(64)(layers.Flatten()(x))
    else:
        x = layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    if path != "compiled":
        x = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    model = keras.Model(inputs, layers.Dense(4)(layers.Dropout(0.2)(x)))
    rng = np.random.default_rng(0)
    data = rng.random((count, 8, 8, 3), "float32"), rng.integers(0, 4, count)
    return compiled(model, path, metrics), data


def stack(path, blocks=2):
    """Dense layers whose activations are 2 MiB each, and two batches of samples."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16,))
    for _ in range(blocks):
        x = layers.Dropout(0.1)(layers.Dense(256, activation="tanh")(x))
    model = keras.Model(inputs, layers.Dense(10)(x))
    rng = np.random.default_rng(0)
    data = rng.random((2 * ROWS, 16), "float32"), rng.integers(0, 10, 2 * ROWS)
    return compiled(model, path), data


def compiled(model, path, metrics=(), loss=LOSS):
    how = {"jit_compile": path == "compiled"} if FRAMEWORK == "tensorflow" else {}
    model.compile("sgd", loss, metrics=list(metrics), **how)
    return model


def trained(made, path, batch_size, epochs=2, **options):
    """Logs, state and callback of a ``fit``; without options, of plain ``fit``."""
    model, (x, y) = made
    if FRAMEWORK == "torch":
        import torch

        torch.manual_seed(5)
    callbacks = []
    if options:
        options = {"verbose": 0, "solver": "greedy", "compilation": path, **options}
        callbacks.append(keras_remat.RematAutotune(batch_size="keep", **options))
    fitted = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    logs = {key: values for key, values in fitted.history.items() if key not in LOG_KEYS}
    assert_given_back(model)
    return logs, state_of(model), callbacks


def state_of(model):
    """Weights, seeds, moving averages, and the optimizer's variables."""
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_given_back(model):
    assert model.train_function is not None
    assert not isinstance(model.train_function, Installed)


def assert_same(ours, plain):
    """Logs and state are the same but for the order of sums; counts and seeds are equal."""
    for key, values in plain[0].items():
        assert ours[0][key] == pytest.approx(values, rel=1e-5), key
    for mine, other in zip(ours[1], plain[1], strict=True):
        if np.issubdtype(other.dtype, np.floating):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(mine, other)


def below_the_floor(made, path, share):
    """A limit that leaves ``share`` of what the step's largest op needs beside what is resident."""
    model, batch = made
    on, *_ = load_backends(model, path)
    step = on.trace(model, on.example_batch(model, batch))
    problem = Problem(step.graph, on.estimated_profile(step, on.device.in_use_bytes()))
    resident, floor = problem.profile.resident_bytes, problem.floor_bytes
    return int(resident + share * (floor - resident)), floor


@every_path
def test_fit_trains_below_the_floor_in_slices_and_so_it_does_by_its_plan(path, tmp_path):
    plain = trained(head(path), path, SAMPLES, 8)
    made = head(path)
    limit, floor = below_the_floor(made, path, 0.6)
    how = {"memory_limit": limit, "margin": 0.0, "profile_steps": 1}
    *ours, (callback,) = trained(made, path, SAMPLES, 8, **how)
    assert_same(ours, plain)
    *_, event = [one for one in callback.report.events if one.kind == EventKind.SLICES]
    assert f"in {callback.plan.slicing.parts} slices" in event.message
    assert callback.plan.measured.peak_bytes <= limit < floor
    assert EventKind.MICRO_BATCHES not in {one.kind for one in callback.report.events}
    callback.plan.save(tmp_path / "plan.json")
    known = keras_remat.load_plan(tmp_path / "plan.json")
    *_, (again,) = trained(
        head(path), path, SAMPLES, 1, memory_limit=2 * limit, margin=0.0, plan=known
    )
    assert again.plan.solution.schedule == callback.plan.solution.schedule
    assert again.plan.slicing == callback.plan.slicing


@first_path
def test_micro_batches_are_slices_with_the_numbers_of_the_whole_batch(path, recwarn):
    """Four do not divide ten samples, and five do; the last two are two slices, where nothing is
    compiled for long."""
    count, slices = (32, (5, 2)) if path == "ordered" else (30, (5,))
    plain = trained(images(path, count, ["accuracy"]), path, 10)
    made = images(path, count, ["accuracy"])
    *ours, (callback,) = trained(made, path, 10, micro_batches=4)
    assert_same(ours, plain)
    assert callback.plan.slicing.parts == 5
    told = [one.message for one in callback.report.events if one.kind == EventKind.SLICES]
    assert all(f"in {n} slices" in message for message, n in zip(told, slices, strict=True))
    assert EventKind.MICRO_BATCHES not in {one.kind for one in callback.report.events}
    assert not [one for one in recwarn if "keras_remat" in str(one.message)]


def test_micro_batches_that_cannot_be_slices_are_trained_apart_and_say_so():
    """A prime number of samples; one sample is trained as it is."""
    path = PATHS[FRAMEWORK][0]
    with pytest.warns(UserWarning, match="see one micro-batch"):
        *_, (callback,) = trained(images(path, 7), path, 7, 1, micro_batches=3)
    assert callback.plan.slicing is None
    told = [event.message for event in callback.report.events]
    (why,) = [message for message in told if "No number from 2 to 6 divides" in message]
    assert "7 samples are trained in 3 micro-batches" in why
    *_, (callback,) = trained(images(path, 1), path, 1, 1, micro_batches=3)
    assert callback.plan is None or callback.plan.slicing is None


def limit_for(model, data, path, share):
    return tight_limit(load_backends(model, path)[0], model, data, ROWS, share)


def assert_refused(error, match, made, path, **options):
    """A ``fit`` ends before anything was trained, and the model is as it was."""
    model, _ = made
    before = state_of(model)
    with pytest.raises(error, match=match) as caught:
        trained(made, path, ROWS, 1, **options)
    for mine, other in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert_given_back(model)
    return caught.value


@every_path
def test_a_limit_below_what_stays_is_refused_before_anything_was_trained(path, monkeypatch):
    """The advice tries the plain step's limit alone: a compiler takes long for each of more."""
    monkeypatch.setattr(advice, "_OPTIONS", advice.AdviceOptions((1.0,), 0, 0))
    made = stack(path)
    limit = int(0.3 * limit_for(*made, path, 0.0))
    error = assert_refused(
        keras_remat.InfeasibleBudgetError, "limit of", made, path, memory_limit=limit
    )
    assert error.op_name in str(error)
    assert error.floor_bytes > error.budget_bytes
    assert "are in use: by weights, slots and data" in str(error)


@every_path
def test_a_plan_leaves_the_model_alone_and_its_file_is_for_models_like_it(
    path, tmp_path, monkeypatch
):
    if FRAMEWORK == "tensorflow":  # a chunk of up to twice a buffer, by what other tests left free
        device = "keras_remat.backends.tensorflow.memory.measure.TensorFlowDevice"
        monkeypatch.setattr(f"{device}.chunk_bytes", lambda self, nbytes: nbytes)
    model, data = made = stack(path)
    limit = limit_for(*made, path, 0.6)
    before, batch = state_of(model), tuple(part[:ROWS] for part in data)
    how = {"solver": "greedy", "profile": "estimated", "compilation": path}
    plan = keras_remat.make_plan(model, batch, limit, **how)
    for mine, other in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert plan.recomputes
    assert plan.predicted.peak_bytes <= 0.95 * limit < plan.store_all.peak_bytes
    plan.save(tmp_path / "plan.json")
    assert keras_remat.load_plan(tmp_path / "plan.json") == plan
    given = {"memory_limit": 2 * limit, "plan": tmp_path / "plan.json"}
    *_, (callback,) = trained(made, path, ROWS, 1, **given)
    assert callback.plan.solution.schedule == plan.solution.schedule
    assert "risk" not in [event.kind for event in callback.report.events]
    other = stack(path, blocks=1)
    load_backends(other[0], path)[0].trace(other[0], batch)  # builds what the step needs
    assert_refused(keras_remat.PlanMismatchError, "another model", other, path, **given)


@every_path
@pytest.mark.parametrize("samples", [2 * SAMPLES, SAMPLES + 1])
def test_a_plan_of_a_step_with_two_losses_is_for_fit(path, samples):
    """Keras counts both losses by samples where its own step knows how many there are."""
    inputs = keras.Input((8,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(3)(inputs)])
    compiled(model, path, loss=["mse", "mse"])
    x, *y = (np.ones((samples, size), "float32") for size in (8, 2, 3))
    batch = x[:SAMPLES], [part[:SAMPLES] for part in y]
    how = {"solver": "greedy", "profile": "estimated", "compilation": path}
    plan = keras_remat.make_plan(model, batch, "8GiB", **how)
    given = {"memory_limit": "8GiB", "plan": plan}
    *_, (callback,) = trained((model, (x, y)), path, SAMPLES, 1, **given)
    assert callback.plan.solution.schedule == plan.solution.schedule
