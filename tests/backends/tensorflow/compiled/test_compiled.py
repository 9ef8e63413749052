"""``jit_compile=True``: what XLA compiles of a schedule computes the same and takes less; bytes
from the device's allocator."""

import keras
import keras_models
import numpy as np
import pytest
import tensorflow as tf
from jax_models import mixer, residual
from keras import layers
from random_schedules import forget

from keras_remat.backends import keras_private
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled import CompiledBackend
from keras_remat.backends.tensorflow.compiled import lower as lowering
from keras_remat.backends.tensorflow.compiled.lower import LoweredStep
from keras_remat.backends.tensorflow.compiled.profile import estimated_profile
from keras_remat.backends.tensorflow.compiled.trace import trace
from keras_remat.backends.tensorflow.graph.accumulate import accumulated_train_step
from keras_remat.backends.tensorflow.graph.trace import data_spec
from keras_remat.backends.tensorflow.memory import measure
from keras_remat.backends.tensorflow.profiler.events import allocation_events
from keras_remat.backends.tensorflow.profiler.recorder import Recorder
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.target import live
from keras_remat.core.validate import check_rules
from keras_remat.errors import UnsupportedModelError
from keras_remat.solvers import solve
from keras_remat.units import KIB, MIB


def ready(made):
    """A built model and its batch as tensors."""
    model, data = made
    model.jit_compile = True
    data = tf.nest.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data
    )
    keras_private.build(model, data)
    return model, data


def compiled_plain(model):
    return tf.function(model.train_step, autograph=False, jit_compile=True)


def problem_of(traced):
    return Problem(traced.graph, estimated_profile(traced))


def mixer_like(batch=32, blocks=2):
    keras.utils.set_random_seed(0)
    model = mixer(blocks)
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(batch, 32, 64)).astype("float32"), rng.integers(0, 10, batch))


def encoder(batch=8, tokens=64, dim=64, blocks=4):
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((tokens, dim))
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.MultiHeadAttention(4, dim // 4)(h, h))])
        h = layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(dim)(h))])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    return model, (
        rng.normal(size=(batch, tokens, dim)).astype("float32"),
        rng.integers(0, 10, batch),
    )


# ------------------------------------------------------------------ numbers


def some_slow(names, *slow):
    """The names as parameters, some of them of slow tests: XLA compiles them for long."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


NUMBERS = {
    "mlp": keras_models.mlp,
    "convnet": keras_models.convnet,
    "transformer": keras_models.transformer,
    "vae": keras_models.vae,
    "mixer": mixer_like,
}


@pytest.mark.parametrize("name", some_slow(NUMBERS, "convnet", "transformer", "mixer"))
def test_numbers_are_those_of_the_plain_compiled_step(name):
    """Four steps, everything recomputed: logs, weights, slots, metrics, dropout's seeds and moving
    averages."""

    def train(step, model, data):
        logs = [[float(x) for x in tf.nest.flatten(step(data))] for _ in range(4)]
        return logs, keras_models.state_of(model)

    model, data = ready(NUMBERS[name]())
    expected, plain = train(compiled_plain(model), model, data)
    model, data = ready(NUMBERS[name]())
    traced = trace(model, data)
    schedule = forget(traced.graph)
    check_rules(problem_of(traced), schedule)
    assert schedule.recomputed
    logs, remat = train(LoweredStep(traced, schedule), model, data)
    np.testing.assert_allclose(logs, expected, rtol=1e-5)
    for one, other in zip(remat, plain, strict=True):
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, other)


def test_what_is_written_for_a_gpu_computes_the_same():
    """Barriers, late zeros and guards of kernels: a CPU can run them, too."""
    keras.utils.set_random_seed(0)
    inputs = layers.Input((16, 16, 3))
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, padding="same", activation="relu")(inputs))
    h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x)))
    x = layers.Add()([x, layers.Dropout(0.2)(h)])
    model = keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    model, data = ready(
        (model, (rng.normal(size=(16, 16, 16, 3)).astype("float32"), rng.integers(0, 10, 16)))
    )
    started = [v.numpy() for v in model.variables]
    plain = compiled_plain(model)
    expected = [float(plain(data)["loss"]) for _ in range(3)]
    for variable, value in zip(model.variables, started, strict=True):
        variable.assign(value)
    model.reset_metrics()
    traced = trace(model, data, target=live("gpu", "a GPU"))
    step = LoweredStep(traced, forget(traced.graph))
    kinds = [node.op for node in step.function.graph.as_graph_def().node]
    assert "XlaOptimizationBarrier" in kinds
    assert "XlaSelectAndScatter" in kinds
    assert "MaxPoolGrad" not in kinds
    losses = [float(step(data)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("name", some_slow(["mlp", "convnet"], "convnet"))
def test_a_scaled_loss_is_compiled_and_its_overflow_skips_the_step(name):
    """An optimizer that scales the loss changes its variables in branches."""
    model, data = ready(keras_models.mixed_precision(make=NUMBERS[name]))
    variables, first = keras_models.variables_of(model), keras_models.state_of(model)
    traced = trace(model, data)
    steps = compiled_plain(model), LoweredStep(traced, forget(traced.graph))
    for scale, overflows in ((2.0**15, False), (2.0**40, True)):
        states = []
        for step in steps:
            for variable, value in zip(variables, first, strict=True):
                variable.assign(value)
            model.optimizer.dynamic_scale.assign(scale)
            before = [w.numpy() for w in model.trainable_variables]
            losses = [float(step(data)["loss"]) for _ in range(4)]
            after = [w.numpy() for w in model.trainable_variables]
            assert all(map(np.array_equal, before, after)) is overflows
            states.append((losses, float(model.optimizer.dynamic_scale)))
        (losses, scaled), (remat_losses, remat_scaled) = states
        assert remat_losses == pytest.approx(losses, rel=1e-3)
        assert remat_scaled == scaled == (scale / 2**4 if overflows else scale)


class Looped(layers.Layer):
    """Repeats a function of its input in a loop that nothing is learnt through."""

    def call(self, x):
        start = keras.ops.stop_gradient(x)
        return x + keras.ops.fori_loop(0, 3, lambda _, h: keras.ops.tanh(h) * 1.1, start)


def test_a_loop_without_variables_is_compiled():
    inputs = layers.Input((16,))
    model = keras.Model(inputs, layers.Dense(4)(Looped()(layers.Dense(32)(inputs))))
    model.compile("sgd", "mse", jit_compile=True)
    rng = np.random.default_rng(0)
    model, data = ready((model, (rng.random((8, 16), "float32"), rng.random((8, 4), "float32"))))
    expected = model.test_on_batch(*data)
    traced = trace(model, data)
    assert any(equation.kind == "StatelessWhile" for equation in traced.program.equations)
    logs = LoweredStep(traced, Schedule.store_all(traced.graph))(data)
    assert float(logs["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_nan_gradient_poisons_nothing_it_did_not_poison_before():
    def train(how):
        model, (x, y) = ready(keras_models.mlp(8, width=8, blocks=1))
        data = x, tf.fill(y.shape, np.float32(np.inf))
        step = compiled_plain(model) if how == "plain" else LoweredStep(*how(trace(model, data)))
        step(data)
        return [bool(np.isfinite(v).all()) for v in keras_models.state_of(model)]

    plain = train("plain")
    assert not all(plain)
    assert train(lambda traced: (traced, forget(traced.graph))) == plain


class Scaled(layers.Layer):
    """A layer that holds a tensor, which is no variable."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, x):
        return x * tf.sin(self.held)[:8]


@pytest.mark.parametrize("size", [8, 1000])
def test_a_tensor_that_a_layer_holds_is_read(size):
    """A small one is a constant of the step, a large one is captured."""
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(1)(Scaled(tf.range(float(size)))(inputs)))
    model.compile("sgd", "mse")
    model, data = ready((model, (np.ones((4, 8), "float32"), np.ones((4, 1), "float32"))))
    before = model.get_weights()
    logs = LoweredStep(traced := trace(model, data), Schedule.store_all(traced.graph))(data)
    after = model.get_weights()
    model.set_weights(before)
    assert float(logs["loss"]) == pytest.approx(float(compiled_plain(model)(data)["loss"]))
    for one, other in zip(after, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# ------------------------------------------------------------------ memory

MEMORY = {
    "mlp": lambda: keras_models.mlp(2048, 256, 8),
    "mixer": lambda: mixer_like(128, blocks=4),
    "encoder": encoder,
    "convnet": lambda: keras_models.convnet(16, 32, 16, blocks=2),
}


def temporary_bytes(step, data):
    """What a step asks for at once, which is XLA's buffer; the chunk it gets depends on what other
    tests left of the pool."""
    step(data)
    recorder = Recorder()
    assert recorder.start()
    step(data)
    events = allocation_events(recorder.stop().planes)
    return max(
        int(said.get("requested_bytes", 0))
        for _, name, said in events
        if name == "MemoryAllocation"
    )


def planned(traced, share):
    problem = problem_of(traced)
    resident = problem.profile.resident_bytes
    most = simulate(problem, Schedule.store_all(traced.graph)).peak_bytes - resident
    return solve(
        problem.with_budget(int(resident + share * most)), solver="greedy", time_limit_s=5.0
    ).schedule


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_half_the_memory_of_the_plain_compiled_step(name):
    """XLA's convolutions on a CPU keep inputs in layouts of their own, which no schedule sees."""
    share = 0.7 if name == "convnet" else 0.6
    model, data = ready(MEMORY[name]())
    plain = temporary_bytes(compiled_plain(model), data)
    traced = trace(model, data)
    step = LoweredStep(traced, planned(traced, 0.45))
    taken = temporary_bytes(step, data)
    assert taken <= share * plain
    assert_told(private.compiled_bytes(step.function), taken)
    assert_told(private.compiled_bytes(traced.function), plain)


def assert_told(told, taken):
    """What XLA tells of a step are all its buffers: the large one, the step's scalars and what
    they are returned in."""
    assert taken <= told <= taken + 16 * KIB


def test_a_plain_step_that_keras_does_not_compile_is_bounded_by_all_that_it_makes():
    model, data = ready(keras_models.mlp(2048, 256))
    compiled = trace(model, data)
    model.jit_compile = False
    traced, memory = trace(model, data), CompiledMemory(lambda problem, schedule: None)
    problem = problem_of(traced)
    told = traced.plain_peak_bytes(problem, memory)
    assert told > compiled.plain_peak_bytes(problem, memory)
    step = tf.function(model.train_step, autograph=False)
    step(data)
    before = measure.bytes_in_use()
    _, usage = measure.measure(lambda: step(data))
    assert usage.peak_bytes - before <= told - problem.profile.resident_bytes


def test_the_compiler_is_asked_of_the_plain_step_where_its_answer_decides(monkeypatch):
    """Not where what is alive at once does not fit, nor where all that it makes does."""
    asked = []

    def told(function):
        asked.append(function)
        return 5 * MIB

    monkeypatch.setattr(private, "compiled_bytes", told)
    model, data = ready(keras_models.mlp(2048, 256))
    traced = (backend := CompiledBackend()).trace(model, data)
    problem, store_all = problem_of(traced), Schedule.store_all(traced.graph)
    alive, resident = simulate(problem, store_all).peak_bytes, problem.profile.resident_bytes
    for budget in (alive - 1, resident + traced.made_bytes):
        backend.memory.peak_bytes(problem.with_budget(budget), store_all)
    assert not asked
    peak = backend.memory.peak_bytes(problem.with_budget(alive), store_all)
    assert asked == [traced.function]
    assert resident + 5 * MIB <= peak < resident + 10 * MIB  # in a chunk


@pytest.mark.slow
def test_it_is_the_guards_that_save_it(monkeypatch):
    model, data = ready(keras_models.mlp(2048, 256, 8, dropout=0))
    traced = trace(model, data)
    schedule = planned(traced, 0.45)
    most = temporary_bytes(LoweredStep(traced, Schedule.store_all(traced.graph)), data)
    assert temporary_bytes(LoweredStep(traced, schedule), data) <= 0.6 * most
    monkeypatch.setattr(lowering._Writer, "guard", lambda self, value, condition: value)
    assert temporary_bytes(LoweredStep(traced, schedule), data) > 0.8 * most


# ------------------------------------------------------------------ what the graph says


@pytest.mark.slow
def test_sums_that_run_again_exist(monkeypatch):
    """XLA would compute them again in each reader, and keep all that they are made of; what is
    written for it is the same on JAX, whose test is quicker."""
    model = residual()
    rng = np.random.default_rng(0)
    model, data = ready(
        (
            model,
            (
                rng.normal(size=(16, *model.input_shape[1:])).astype("float32"),
                rng.integers(0, 10, 16),
            ),
        )
    )
    traced = trace(model, data)
    schedule = planned(traced, 0.3)
    pinned = temporary_bytes(LoweredStep(traced, schedule), data)
    monkeypatch.setattr("keras_remat.backends.xla.protect.Run._pin", lambda *_: None)
    without = temporary_bytes(LoweredStep(traced, schedule), data)
    assert pinned <= 0.9 * without


def test_elementwise_chains_do_not_exist_and_state_is_tied_to_its_buffer():
    model, data = ready(keras_models.mlp(256, 64))
    graph = trace(model, data).graph
    assert len(graph.ops) < 0.6 * sum(len(h) for h in trace(model, data).handles.values())
    assert {op.phase for op in graph.ops} == {"forward", "backward", "update"}
    updates = [op for op in graph.ops if not op.recomputable]
    assert updates, "weights are written in place"
    assert all(graph.values[v].nbytes == 0 for op in updates for v in op.outputs)


def test_the_same_step_at_another_batch_size_has_the_same_ops():
    model, data = ready(keras_models.mlp(64))
    traced = trace(model, data)
    wider = trace(
        model, tuple(tf.TensorSpec((256, *x.shape[1:]), x.dtype) for x in data), like=traced
    )
    assert traced.graph.has_ops_of(wider.graph)


def test_what_cannot_be_made_stateless_is_refused_by_name():
    model, data = ready(keras_models.lstm())
    with pytest.raises(UnsupportedModelError, match="While"):
        trace(model, data)


# ------------------------------------------------------------------ micro-batches


@pytest.mark.slow
def test_a_piece_waits_for_the_one_before():
    """The same numbers, and the memory of one piece, which XLA does not give where the pieces may
    run side by side."""

    def stepped(separated):
        model, data = ready(keras_models.convnet(16, 32))
        step = accumulated_train_step(model, 4, data_spec(data), separated)
        step = tf.function(step, autograph=False, jit_compile=True)
        return temporary_bytes(step, data), [v.numpy() for v in model.trainable_variables]

    (waits, mine), (side_by_side, theirs) = stepped(True), stepped(False)
    assert waits <= 0.6 * side_by_side
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
