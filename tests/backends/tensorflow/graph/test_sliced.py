"""Steps in slices compute what whole ones do, and are made of what TensorFlow infers."""

import functools
import sys
import warnings
from dataclasses import replace

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from own_process import ran_alone
from tight_limit import with_margin

import keras_remat
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph.shapes import static_shapes
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import Slicing
from keras_remat.solvers import solve

BACKEND = backend()


def all_that_can(rules, parts):
    """The ids of all ops that can run in so many slices."""
    ops = {i for i, rule in rules.items() if rule.divides and rule.divides % parts == 0}
    while alone := {i for i in ops if not rules[i].partners <= ops}:
        ops -= alone
    return tuple(sorted(ops))


class Bench:
    """A model that can be put back to its first state and trained whole or in slices."""

    def __init__(self, model, batch):
        self.model, self.data = model, BACKEND.example_batch(model, batch)
        self.traced = BACKEND.trace(model, self.data)
        self.rules = self.traced.slicer.rules
        self.variables = keras_models.variables_of(model)
        self.first_state = keras_models.state_of(model)

    def sliced(self, parts, ops=None):
        chosen = all_that_can(self.rules, parts) if ops is None else ops
        return self.traced.slicer.sliced(Slicing(chosen, parts))

    def train(self, traced, steps=1, share=None):
        """State and logs after some steps, in the default order or under a tighter budget."""
        profile = BACKEND.estimated_profile(traced)
        workspace = (0,) * len(traced.graph.ops)  # which would hide what values take
        problem = Problem(traced.graph, replace(profile, op_workspace_bytes=workspace))
        schedule = Schedule.store_all(traced.graph)
        if share is not None:
            floor, peak = problem.floor_bytes, simulate(problem, schedule).peak_bytes
            budget = floor + round(share * (peak - floor))
            schedule = solve(problem.with_budget(budget), solver="greedy_first").schedule
            assert schedule.recomputed
        run = LoweredStep(traced, problem.with_budget(2**40), schedule, 0)
        for variable, value in zip(self.variables, self.first_state, strict=True):
            variable.assign(value)
        logs = [tf.nest.map_structure(np.asarray, run(self.data)) for _ in range(steps)]
        return keras_models.state_of(self.model), logs


@functools.cache
def bench(name):
    """Adam would make a step of a gradient that is rounding alone."""
    options = {"optimizer": "sgd"} if name in WHOLE_AND_SLICED else {}
    return Bench(*keras_models.MODELS[name](**options))


WHOLE_AND_SLICED = ("mlp", "convnet", "transformer", "lstm")


@pytest.mark.parametrize("name", WHOLE_AND_SLICED)
def test_a_step_in_slices_is_the_whole_step_up_to_the_order_of_sums(name):
    """Biases whose gradient is zero but for rounding are compared by what a step changes."""
    b = bench(name)
    state, logs = b.train(b.traced)
    sliced, sliced_logs = b.train(b.sliced(2))
    for ours, theirs in zip(sliced_logs, logs, strict=True):
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-6)
    for ours, theirs, first in zip(sliced, state, b.first_state, strict=True):
        if np.issubdtype(np.asarray(theirs).dtype, np.floating):
            changed = float(np.max(np.abs(theirs - first), initial=0))
            bound = 1e-5 * changed
            bound += 3e-7 * max(1.0, float(np.max(np.abs(theirs), initial=0)))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_in_float64_a_net_that_multiplies_rounding_has_the_whole_batch_s_numbers_in_slices():
    """Inverted residuals at 1 × 1 pixels: in float32 rounding is of the size of an update after
    three steps, whatever rounds. In float64 a wrong gradient would be left."""

    def made(layer, *options, **named):
        return layer(*options, dtype="float64", **named)

    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((16, 16, 3), dtype="float64")
    x = made(layers.Conv2D, 8, 3, strides=2, use_bias=False)(inputs)
    for strides in (2, 2, 1):
        before = x
        for convolved in (
            made(layers.Conv2D, 24, 1, use_bias=False),
            made(layers.DepthwiseConv2D, 3, strides=strides, padding="same", use_bias=False),
        ):
            x = made(layers.BatchNormalization)(convolved(x))
            x = made(layers.ReLU, max_value=6.0)(x)
        x = made(layers.BatchNormalization)(made(layers.Conv2D, 8, 1, use_bias=False)(x))
        x = made(layers.Add)([x, before]) if strides == 1 else x
    x = made(layers.GlobalAveragePooling2D)(x)
    model = keras.Model(inputs, made(layers.Dense, 4, activation="softmax")(x))
    model.compile(keras.optimizers.SGD(0.01), "categorical_crossentropy", jit_compile=False)
    rng = np.random.default_rng(0)
    b = Bench(model, (rng.normal(size=(16, 16, 16, 3)), np.eye(4)[rng.integers(0, 4, 16)]))
    state, logs = b.train(b.traced, steps=3)
    sliced, sliced_logs = b.train(b.sliced(4), steps=3)
    for ours, theirs in zip(sliced_logs, logs, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-7)  # Keras's float32
    kept = 0
    for variable, ours, theirs in zip(b.variables, sliced, state, strict=True):
        if variable.dtype == tf.float64:
            np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)
            kept += 1
    assert kept > 40


@pytest.mark.parametrize(
    ("name", "parts"),
    [("convnet", 2), ("transformer", 4), ("two_by_two", 2), ("mixed_precision", 4)],
)
def test_shapes_and_types_are_those_that_tensorflow_infers(name, parts):
    b = bench(name)
    step, compared = b.sliced(parts), 0
    document = tf.compat.v1.GraphDef(versions=step.versions, library=step.library)
    inferred = static_shapes(step.nodes, document, step.replicas[0].captures, step.inputs)
    for op in step.graph.ops:
        for value in (step.graph.values[v] for v in op.outputs):
            if value.shape is None or "/slice_" not in value.name:
                continue
            node, index = value.name.split("/slice_")[0].rsplit(":", 1)
            part = value.name.split("/slice_")[1]
            key = f"{node}/slice_{part}:{index}"
            if inferred.get(key, (None,))[0] is not None:
                assert inferred[key][0] == value.shape == step.tensor_shapes[key]
                assert inferred[key][1].name == value.dtype
                compared += 1
    assert compared


def test_parts_of_half_a_batch_are_what_a_trace_of_half_the_batch_makes():
    b = bench("convnet")
    half = BACKEND.trace(b.model, BACKEND.resized_spec(b.data, 4))
    step, compared = b.sliced(2), 0
    at_half = {value.name: value for value in half.graph.values}
    whole = {value.name: value for value in b.traced.graph.values}
    for value in step.graph.values:
        name, _, part = value.name.partition("/slice_")
        if part != "0" or name not in at_half or at_half[name].shape == whole[name].shape:
            continue
        assert value.shape == at_half[name].shape
        assert value.nbytes == at_half[name].nbytes
        compared += 1
    assert compared > 40


class Watched(keras.Model):
    """Returns what the forward phase makes and the gradients of its inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = self(x, training=True)
            loss = self.compute_loss(x, y, out)
        weights = self.trainable_weights
        of_input, *gradients = tape.gradient(loss, [x, *weights])
        return {"out": out, "of_input": of_input, "loss": loss} | {
            f"weight_{at}": gradient for at, gradient in enumerate(gradients)
        }


def watched():
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    inputs = x = keras.Input((24, 24, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(8, 3, activation="gelu")(x))
    x = keras.layers.UpSampling2D()(keras.layers.Dropout(0.2)(x))
    x = keras.layers.Conv2D(6, 3, strides=2)(keras.layers.ZeroPadding2D(1)(x))
    x = keras.layers.LayerNormalization()(keras.layers.AveragePooling2D(2)(x))
    x = keras.layers.Dense(32, activation="softmax")(keras.layers.Flatten()(x))
    model = Watched(inputs, keras.layers.Dense(5)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (rng.random((16, 24, 24, 3), "float32"), rng.integers(0, 5, 16))


@functools.cache
def watched_bench():
    return Bench(*watched())


@pytest.mark.parametrize(("parts", "share"), [(2, None), (4, None), (4, 0.3)])
def test_forward_values_and_gradients_are_the_same_but_for_rounding(parts, share):
    """No sum of a forward value or an input's gradient is in another order; yet kernels of products
    choose their blocks by the number of rows, and may round the last bit otherwise. Those of a
    kernel's gradient are added in parts; with oneDNN they differ by up to 4e-6 of the largest."""
    b = watched_bench()
    _, (whole,) = b.train(b.traced)
    chosen = all_that_can(b.rules, parts)
    _, (sliced,) = b.train(b.sliced(parts, chosen), share=share)
    for name in ("out", "of_input"):
        largest = np.abs(whole[name]).max()
        np.testing.assert_allclose(sliced[name], whole[name], rtol=0, atol=1e-6 * largest)
    assert sliced["loss"] == pytest.approx(float(whole["loss"]), rel=1e-6)
    for name in whole:
        if name.startswith("weight"):
            largest = np.abs(whole[name]).max()
            np.testing.assert_allclose(sliced[name], whole[name], rtol=0, atol=6e-6 * largest)
    kinds = {b.traced.graph.ops[i].kind for i in chosen}
    wanted = {"Conv2DBackpropFilter", "Conv2DBackpropInput", "MaxPoolGrad", "AvgPoolGrad"}
    assert wanted <= kinds
    if share is None:
        assert sum(op.kind == "SumSlices" for op in b.sliced(parts).graph.ops) >= 8


@pytest.mark.parametrize(
    ("draw", "shape", "dtype", "parts"),
    [
        ("uniform", (8, 4), "float32", 8),
        ("uniform", (8, 5), "float32", 2),
        ("uniform", (4096, 33), "float16", 4),
        ("normal", (4096, 33), "float32", 4),
        ("normal", (8, 6), "bfloat16", 4),
    ],
)
def test_parts_of_a_random_op_are_parts_of_what_it_draws(draw, shape, dtype, parts):
    """Four numbers are drawn at once: a sample of five is no whole number of draws."""

    class Draws(keras.Model):
        def train_step(self, data):
            noise = getattr(tf.random, f"stateless_{draw}")(shape, data[0], dtype=dtype)
            return {"noise": tf.where(noise < 0.5, noise, -noise)}

    model = Draws()
    model.compile("sgd")
    b = Bench(model, (np.array([3, 4]), np.zeros((2, 1), "float32")))
    kind = f"StatelessRandom{draw.title()}V2"
    (drawn,) = [op.id for op in b.traced.graph.ops if op.kind == kind]
    assert b.rules[drawn].divides % parts == 0
    whole, sliced = (b.train(step)[1][0]["noise"] for step in (b.traced, b.sliced(parts)))
    np.testing.assert_array_equal(sliced, whole)
    kinds = [op.kind for op in b.sliced(parts).graph.ops]
    assert kinds.count(kind) == parts


class Prints(keras.layers.Layer):
    def call(self, x):
        tf.print("of the whole batch", tf.shape(x)[0], output_stream=sys.stderr)
        return x


def test_an_effect_between_ops_in_slices_comes_once_a_step_and_of_the_whole_batch(capfd):
    inputs = keras.Input((8,))
    hidden = Prints()(keras.layers.Dense(16, activation="gelu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse", jit_compile=False)
    b = Bench(model, (np.ones((32, 8), "float32"), np.ones((32, 1), "float32")))
    whole, _ = b.train(b.traced)
    assert capfd.readouterr().err.count("of the whole batch 32\n") == 1
    sliced, _ = b.train(b.sliced(4), steps=1)
    assert capfd.readouterr().err.count("of the whole batch 32\n") == 1
    for ours, theirs in zip(sliced, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_fingerprint_is_the_same_for_two_traces_of_one_model():
    expected = bench("mlp").sliced(2).graph.fingerprint
    again = Bench(*keras_models.mlp(optimizer="sgd"))
    assert again.sliced(2).graph.fingerprint == expected


def language_model(tokens=1024, vocabulary=2048, width=32):
    """Logits and their gradient, 8 MiB each or more, are what a step needs."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    x = keras.layers.Dropout(0.1)(keras.layers.LayerNormalization()(x))
    outputs = keras.layers.Dense(vocabulary)(x)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    texts = np.random.default_rng(0).integers(0, vocabulary, (2, tokens // 8, 32))
    return model, texts.astype("int32")


def below_the_floor(model, batch, share):
    """A limit that leaves ``share`` of what the step's largest op needs beside what is resident."""
    data = BACKEND.example_batch(model, batch)
    traced = BACKEND.trace(model, data)
    profile = BACKEND.estimated_profile(traced, BACKEND.device.in_use_bytes())
    resident = profile.resident_bytes
    floor = Problem(traced.graph, profile).floor_bytes
    return with_margin(resident + share * (floor - resident)), with_margin(floor)


@pytest.mark.slow
def test_a_batch_that_trains_in_slices_is_enlarged():
    """In a process of its own: in a pool that others have used, an array may get twice the bytes
    that it asks for, and then a larger batch is over the limit and given up."""
    if ran_alone(__file__, "test_a_batch_that_trains_in_slices_is_enlarged"):
        return
    model, (x, y) = language_model(tokens=4096, vocabulary=8192)
    limit, floor = below_the_floor(model, (x[:16], y[:16]), 0.8)
    callback = keras_remat.RematAutotune(
        limit, "max", solver_time_limit_s=4, compilation="ordered", verbose=0, profile_steps=1
    )
    with warnings.catch_warnings(record=True, action="always", category=UserWarning) as told:
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[callback])
    report = callback.report
    events = "\n".join(map(str, report.events))
    assert limit < floor
    assert any("given batches of 16" in str(warning.message) for warning in told), events
    assert report.batch_size == report.max_batch_size > 16, events
    assert callback.plan.slicing is not None, events
    assert callback.plan.measured.peak_bytes <= limit, events


@pytest.mark.slow
def test_the_fastest_batch_may_be_one_in_slices():
    """Which size is the fastest is decided the same whether steps are in slices, and tested on a
    backend without a framework."""
    if ran_alone(__file__, "test_the_fastest_batch_may_be_one_in_slices"):
        return
    model, (x, y) = language_model(tokens=2048, vocabulary=8192)
    limit, _ = below_the_floor(model, (x[:16], y[:16]), 0.7)
    callback = keras_remat.RematAutotune(
        limit, "fastest", solver_time_limit_s=2, compilation="ordered", verbose=0, profile_steps=1
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=[callback])
    (told,) = [e.message for e in callback.report.events if "Samples per second" in e.message]
    assert " at 16" in told
    assert told.count(" at ") > 1  # and at a larger size
    assert callback.plan.slicing is not None


def test_a_saved_plan_in_slices_trains_the_model_again(tmp_path):
    model, (x, y) = language_model(vocabulary=8192)
    limit, _ = below_the_floor(model, (x[:32], y[:32]), 0.5)
    plan = keras_remat.make_plan(
        model, (x[:32], y[:32]), limit, profile="estimated", compilation="ordered", solver="greedy",
    )  # fmt: skip
    assert plan.slicing is not None
    assert plan.store_all.peak_bytes > plan.predicted.peak_bytes
    plan.save(tmp_path / "plan.json")
    loaded = keras_remat.load_plan(tmp_path / "plan.json")
    callback = keras_remat.RematAutotune(
        limit, "keep", plan=loaded, compilation="ordered", verbose=0
    )
    model.fit(x[:64], y[:64], batch_size=32, verbose=0, callbacks=[callback])
    assert callback.plan.slicing == plan.slicing
    assert callback.plan.solution.schedule == plan.solution.schedule
