"""A lowered schedule computes what the step computes, bit for bit, in any legal order, and takes
the memory it says."""

import functools
import gc
import random

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from random_schedules import random_schedule
from tensorflow.python.eager import backprop, context
from tensorflow.python.ops import gen_math_ops

from keras_remat.backends.base import preserved_state
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.memory.best_fit import ONEDNN_SMALL_BYTES
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.solvers import solve
from keras_remat.units import MIB

BACKEND = backend()
STEPS = 3


class Bench:
    """A model that can be put back to its first state and trained under any schedule."""

    def __init__(self, make):
        self.model, batch = make()
        self.data = BACKEND.example_batch(self.model, batch)
        self.traced = BACKEND.trace(self.model, self.data)
        self.problem = Problem(self.traced.graph, BACKEND.estimated_profile(self.traced))
        self.variables = keras_models.variables_of(self.model)
        self.first_state = keras_models.state_of(self.model)
        self.store_all = Schedule.store_all(self.traced.graph)

    def train(self, schedule, steps=STEPS, smallest_bytes=0):
        """State and logs after ``steps`` steps from the first state."""
        check_rules(self.problem, schedule)
        run = LoweredStep(self.traced, self.problem, schedule, smallest_bytes)
        return self.train_with(run, steps)

    def train_with(self, run, steps=STEPS):
        for variable, value in zip(self.variables, self.first_state, strict=True):
            variable.assign(value)
        logs = [{k: float(v) for k, v in run(self.data).items()} for _ in range(steps)]
        return keras_models.state_of(self.model), logs

    @functools.cached_property
    def reference(self):
        return self.train(self.store_all)


@functools.cache
def bench(name):
    return Bench((keras_models.MODELS | {"residual network": residual_network})[name])


@pytest.mark.parametrize("name", keras_models.MODELS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_legal_order_gives_the_same_bits(name, seed):
    """The order of ops is random, and so is what is computed again: dropout masks, reads of
    variables, losses, sums."""
    b = bench(name)
    schedule = random_schedule(random.Random(seed), b.traced.graph, recompute=0.002)
    assert schedule.recomputed
    state, logs = b.train(schedule)
    keras_models.assert_same_bits(state, b.reference[0])
    assert logs == b.reference[1]


@pytest.mark.parametrize("name", ["mlp", "lstm", "gan"])
def test_data_dependencies_alone_are_enough_for_the_same_bits(name):
    """Nothing is large enough to wait for memory; only S4 keeps reads and writes of variables
    apart."""
    b = bench(name)
    schedule = random_schedule(random.Random(11), b.traced.graph, recompute=0.003)
    for _ in range(3):
        keras_models.assert_same_bits(b.train(schedule, smallest_bytes=2**40)[0], b.reference[0])


BITS_OF_PLAIN_FIT = ("residual network", "convnet", "mixed_precision")


@pytest.mark.parametrize("name", [n for n in keras_models.MODELS if n not in BITS_OF_PLAIN_FIT])
def test_store_all_agrees_with_the_plain_step(name):
    b = bench(name)
    plain = tf.function(b.model.train_step, autograph=False)
    _, logs = b.train_with(lambda data: plain(data))
    for ours, theirs in zip(b.reference[1], logs, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4)


def residual_network():
    """Convolutions with biases, batch normalization and residual connections: what Grappler and
    oneDNN fuse and add up anew."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((24, 24, 3))
    for filters in (8, 16):
        y = keras.layers.BatchNormalization()(keras.layers.Conv2D(filters, 3, padding="same")(x))
        y = keras.layers.BatchNormalization()(
            keras.layers.Conv2D(filters, 3, padding="same")(keras.layers.ReLU()(y))
        )
        x = (
            x
            if x.shape[-1] == filters
            else keras.layers.BatchNormalization()(keras.layers.Conv2D(filters, 1)(x))
        )
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    generator = np.random.default_rng(0)
    return model, (
        generator.random((8, 24, 24, 3), dtype=np.float32),
        generator.random((8, 5), dtype=np.float32),
    )


@pytest.mark.parametrize("name", BITS_OF_PLAIN_FIT)
def test_store_all_is_plain_fit_bit_for_bit(name):
    """The traced graph is the one that plain ``fit`` runs: as many terms in the same order, the
    same kernels fused."""
    b = bench(name)
    b.model.make_train_function()
    plain, logs = b.train_with(lambda data: b.model.train_function(iter([data])), steps=6)
    ours, our_logs = b.train(b.store_all, steps=6)
    keras_models.assert_same_bits(ours, plain)
    assert our_logs == logs


class GradientPenalty(keras.Model):
    """Penalizes the gradient by its inputs, through batch normalization."""

    def __init__(self):
        super().__init__()
        layers = [keras.layers.Input((16, 16, 3))]
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(8, 3, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("tanh"),
            ]
        layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
        self.score = keras.Sequential(layers)

    def call(self, x, training=False):
        return self.score(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = self(x, training=True)
            slopes = tf.reduce_sum(inner.gradient(scores, x) ** 2, axis=(1, 2, 3))
            penalty = tf.reduce_mean((tf.sqrt(slopes + 1e-12) - 1.0) ** 2)
            loss = self.compute_loss(y=y, y_pred=scores) + 10.0 * penalty
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "penalty": penalty}


def gradient_penalty():
    keras.utils.set_random_seed(0)
    model = GradientPenalty()
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    generator = np.random.default_rng(0)
    shapes = (8, 16, 16, 3), (8, 1)
    return model, tuple(generator.random(shape, dtype=np.float32) for shape in shapes)


class SmallSums:
    """Stands in for TensorFlow's module of ops: no sum of gradients has more than three terms."""

    def __getattr__(self, name):
        return getattr(gen_math_ops, name)

    def add_n(self, terms, name=None):
        while len(terms) > 3:
            terms = [gen_math_ops.add_n(terms[:3]), *terms[3:]]
        return gen_math_ops.add_n(terms, name=name)


@pytest.mark.parametrize("sums", ["as they are", "small"])
def test_a_gradient_penalty_differs_from_plain_by_its_sums_of_four_terms_alone(sums, monkeypatch):
    """``AddN`` begins such a sum with whichever term's memory is free (docs/limits.md)."""
    if sums == "small":
        monkeypatch.setattr(backprop, "gen_math_ops", SmallSums())
    b = Bench(gradient_penalty)
    b.model.make_train_function()
    plain, logs = b.train_with(lambda data: b.model.train_function(iter([data])), steps=10)
    ours, our_logs = b.train(b.store_all, steps=10)
    schedule = random_schedule(random.Random(1), b.traced.graph, recompute=0.01)
    assert schedule.recomputed
    again, logs_again = b.train(schedule, steps=10)
    keras_models.assert_same_bits(again, ours)
    assert logs_again == our_logs
    if sums == "small":
        keras_models.assert_same_bits(ours, plain)
        assert our_logs == logs
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_every_variable_is_accessed_in_one_order():
    """In the written graph a path joins every write of a variable with every other access; else the
    executor may run both at once."""
    b = bench("gan")
    for seed in range(3):
        schedule = random_schedule(random.Random(seed), b.traced.graph, recompute=0.003)
        graph = LoweredStep(b.traced, b.problem, schedule, 2**40)._function.graph
        ancestors, accesses = {}, {}
        for op in graph.get_operations():
            direct = [*(t.op for t in op.inputs), *op.control_inputs]
            ancestors[op] = set(direct).union(*(ancestors[d] for d in direct))
            for tensor in op.inputs:
                if tensor.dtype == tf.resource:
                    accesses.setdefault(tensor.name, []).append(op)
        writes = 0
        for ops in accesses.values():
            for write in (op for op in ops if op.type not in kinds.VARIABLE_READS):
                writes += 1
                assert all(
                    o in ancestors[write] or write in ancestors[o] for o in ops if o is not write
                ), write.name
        assert writes > 10


def test_without_a_budget_and_recomputation_nothing_waits_for_memory():
    """Such a step has the parallelism of the plain one; any other runs what touches the pool in its
    order."""
    b = bench("mlp")
    again = Schedule((*b.store_all.order[:1], *b.store_all.order))

    def controls(problem, schedule):
        graph = LoweredStep(b.traced, problem, schedule, 0)._function.graph
        return sum(len(op.control_inputs) for op in graph.get_operations())

    free, budget = controls(b.problem, b.store_all), b.problem.with_budget(2**40)
    assert controls(budget, b.store_all) > free
    assert controls(b.problem, again) > free
    keras_models.assert_same_bits(
        b.train_with(LoweredStep(b.traced, budget, b.store_all))[0], b.reference[0]
    )


def test_no_option_leaks():
    b = bench("mlp")
    before = tf.config.optimizer.get_experimental_options(), context.context().function_call_options
    b.train(b.store_all, 1)
    assert (
        tf.config.optimizer.get_experimental_options(),
        context.context().function_call_options,
    ) == before
    with pytest.raises(tf.errors.InvalidArgumentError):
        LoweredStep(b.traced, b.problem, b.store_all)((tf.ones((3, 3)), tf.ones((3, 1))))
    assert context.context().function_call_options is before[1]


def test_logs_keep_their_structure():
    b = bench("two_by_two")
    expected = {"loss", "p_loss", "q_loss", "p_mae"}
    assert set(b.reference[1][0]) == expected


@pytest.fixture(scope="module")
def wide():
    return Bench(lambda: keras_models.wide_mlp(blocks=4, optimizer="sgd", metrics=[]))


def measured_peak(b, schedule):
    run = LoweredStep(b.traced, b.problem.with_budget(2**40), schedule, ONEDNN_SMALL_BYTES)
    b.train_with(run, 1)
    return max(BACKEND.measure(lambda: run(b.data))[1].peak_bytes for _ in range(2))


def test_recomputing_lowers_the_measured_peak_by_what_is_predicted(wide):
    wide.train(wide.store_all, 1)
    wide.problem = Problem(
        wide.traced.graph, BACKEND.estimated_profile(wide.traced, BACKEND.device.in_use_bytes())
    )
    peak = simulate(wide.problem, wide.store_all).peak_bytes
    resident = wide.problem.profile.resident_bytes
    budget = resident + (peak - resident) // 2
    schedule = solve(wide.problem.with_budget(budget), solver="greedy_first").schedule
    assert schedule.recomputed
    whole, least = measured_peak(wide, wide.store_all), measured_peak(wide, schedule)
    predicted = BACKEND.memory.peak_bytes(wide.problem, wide.store_all) - BACKEND.memory.peak_bytes(
        wide.problem, schedule
    )
    assert predicted > 20 * MIB
    assert whole - least == pytest.approx(predicted, rel=0.25)
    assert least <= 1.1 * budget
    again, plain = (wide.train(order, 1)[0] for order in (schedule, wide.store_all))
    keras_models.assert_same_bits(again, plain)


def test_every_step_takes_the_same_peak_and_about_the_predicted_one():
    """What touches the pool runs in one order, so steps settle to one peak.

    Where the allocator counts small requests, too, those run as they come.
    """
    b = Bench(lambda: keras_models.wide_mlp(width=48))
    run = LoweredStep(b.traced, b.problem.with_budget(2**40), b.store_all, ONEDNN_SMALL_BYTES)
    b.train_with(run, 2)
    in_use = BACKEND.device.in_use_bytes()
    problem = Problem(b.traced.graph, BACKEND.estimated_profile(b.traced, in_use))
    peaks = {BACKEND.measure(lambda: run(b.data))[1].peak_bytes for _ in range(5)}
    assert max(peaks) - min(peaks) <= (0 if BACKEND.device.allocator == "onednn" else 2**17)
    predicted = BACKEND.memory.peak_bytes(problem, b.store_all)
    assert peaks.pop() == pytest.approx(predicted, rel=0.1)


def test_large_ops_of_constants_run_in_every_step_and_leave_nothing_behind():
    """A loss per pixel has a gradient that begins with a constant, repeated: TensorFlow would fold
    it when the step first runs, and keep it."""
    b = Bench(keras_models.segmenter)
    large = [
        op.name
        for op in b.traced.graph.ops
        if op.kind == "Tile" and b.traced.graph.values[op.outputs[0]].nbytes >= ONEDNN_SMALL_BYTES
    ]
    assert large
    run = LoweredStep(b.traced, b.problem.with_budget(2**40), b.store_all, ONEDNN_SMALL_BYTES)
    before = BACKEND.device.in_use_bytes()
    with preserved_state(BACKEND, b.model):
        run(b.data)
        gc.collect()
        assert BACKEND.device.in_use_bytes() < before + ONEDNN_SMALL_BYTES
