"""A TensorFlow step on a card that is not there: what XLA:GPU says of it, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import keras
import keras_models
import numpy as np
import pytest
from fake_backend import chain_problem
from keras import layers

import keras_remat
from keras_remat.backends.base import load_backends
from keras_remat.backends.tensorflow import compiled
from keras_remat.backends.tensorflow.compiled import CompiledBackend
from keras_remat.backends.tensorflow.mirrored import backend as mirrored
from keras_remat.backends.xla.card_compiler import CardStep
from keras_remat.backends.xla.compiled_memory import CompiledMemory
from keras_remat.cards.table import card
from keras_remat.core import interpreter
from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.target import live
from keras_remat.core.writing import Writing
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning import make_plan as planning


def convnet():
    """Convolutions, batch normalization and max pooling, with a batch of 16."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((32, 32, 3))
    for filters in (16, 32):
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
            x = layers.ReLU()(x)
        x = layers.MaxPooling2D()(x)
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (np.zeros((16, 32, 32, 3), "float32"), np.zeros(16, "int32"))


def transformer():
    """Two blocks with dropout, with a batch of 8."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((64, 64))
    for _ in range(2):
        h = layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, h]))
        h = layers.Dense(64)(layers.Dense(256, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(h)]))
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (np.zeros((8, 64, 64), "float32"), np.zeros(8, "int32"))


def test_a_live_gpu_s_steps_are_predicted_as_those_for_a_card_are(monkeypatch):
    """Nothing is compiled beforehand there, but the compiler is the same."""
    problem = chain_problem(8)
    order = Schedule((*range(4), 0, *range(4, len(problem.graph.ops))))
    expected = CompiledMemory(lambda *asked: None, on_gpu=True).peak_bytes(problem, order)
    monkeypatch.setattr(compiled, "on_gpu", lambda: True)
    assert CompiledBackend().memory.peak_bytes(problem, order) == expected
    monkeypatch.setattr(compiled, "on_gpu", lambda: False)
    assert CompiledBackend().memory.peak_bytes(problem, order) != expected


@pytest.mark.usefixtures("card_compiler")
def test_a_softmax_is_one_op():
    """Nothing inside of it is a value that a plan could keep; XLA:GPU computes it in one kernel."""
    model, batch = transformer()
    (backend,) = load_backends(model, "compiled", card("H100"))
    ops = backend.trace(model, backend.example_batch(model, batch)).graph.ops
    kinds = [op.kind for op in ops if op.phase == FORWARD and "attention" in op.name]
    assert kinds.count("Softmax") == 2
    assert not {"Max", "Exp", "Sum"}.intersection(kinds)


@pytest.mark.card
@pytest.mark.parametrize("made", [convnet, transformer])
def test_a_plan_takes_what_the_compiler_of_a_card_says(made):
    model, batch = made()
    target = card("H100")
    (backend,) = load_backends(model, "auto", target)
    step = planning.traced_model(backend, model, batch, "1GiB", 0.0, "estimated", 0, target)
    problem, memory = step.problem, backend.memory
    store_all = Schedule.store_all(problem.graph)
    resident = problem.profile.resident_bytes
    plain = memory.peak_bytes(problem, store_all) - resident
    simulated = simulate(problem, store_all).peak_bytes - resident
    lowered = memory.compiled_peak_bytes(problem, store_all) - resident
    assert lowered <= 1.1 * plain
    assert 0.85 * simulated <= lowered <= 1.2 * simulated
    limit = resident + int(0.7 * min(plain, simulated))
    plan = keras_remat.make_plan(model, batch, limit, card="H100", margin=0.0, solver="greedy")
    assert plan.card == "H100"
    assert plan.compiled.peak_bytes <= limit
    assert plan.measured is None
    assert plan.writing is not None
    assert plan.writing is not Writing.STRICT


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        ({}, Writing.LOOSE),
        ({Writing.LOOSE: 2**40}, Writing.PHASED),
        ({Writing.LOOSE: 2**40, Writing.PHASED: 2**40}, Writing.HELD),
        (dict.fromkeys((Writing.LOOSE, Writing.PHASED, Writing.HELD), 2**40), Writing.STRICT),
    ],
)
def test_a_plan_for_a_card_says_in_which_way_it_keeps_to_the_limit(takes, expected, monkeypatch):
    """The first that does, and a step on the live device is written so; a CPU has one way."""
    written = []

    def serialized(function):
        return function

    def compiled_step(module, target):
        return CardStep(temp_size_in_bytes=takes.get(module, 1024))

    def lowered(traced, schedule, times=None, writing=Writing.STRICT):
        written.append(writing)
        return SimpleNamespace(function=writing, traced=traced, schedule=schedule, writing=writing)

    monkeypatch.setattr(compiled, "LoweredStep", lowered)
    monkeypatch.setattr(compiled, "costs", lambda text, rates: SimpleNamespace(time_s=1.0))
    monkeypatch.setattr(compiled.private, "serialized_hlo", serialized)
    monkeypatch.setattr(compiled, "CardCompiler", lambda: SimpleNamespace(compiled=compiled_step))
    model, batch = keras_models.mlp()
    (backend,) = load_backends(model, "compiled", card("H100"))
    traced = backend.trace(model, backend.example_batch(model, batch))
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    schedule = Schedule.store_all(traced.graph)
    limit = problem.profile.resident_bytes + 2048
    assert backend.memory.writing(problem, schedule) is None
    within = problem.with_budget(limit)
    assert backend.memory.compiled_peak_bytes(within, schedule) == limit - 1024
    assert backend.memory.writing(problem, schedule) is written[-1] is expected
    for target, found in (("gpu", expected), ("cpu", Writing.STRICT)):
        step = replace(traced, target=live(target, "a device"))
        assert CompiledBackend().lower(step, problem, schedule, expected).writing is found


def joined():
    """Convolutions with batch normalization and swish whose results are joined, with a batch of
    32."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((32, 32, 8))
    for _ in range(4):
        h = layers.Activation("silu")(layers.BatchNormalization()(x))
        x = layers.Concatenate()([x, layers.Conv2D(8, 3, padding="same", use_bias=False)(h)])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (np.zeros((32, 32, 32, 8), "float32"), np.zeros(32, "int32"))


def test_sigmoids_and_what_is_joined_do_not_exist_on_a_card(monkeypatch):
    """As on JAX: each reader computes them again. The sigmoid of a gradient exists nowhere: its
    readers run as one."""
    monkeypatch.setattr(compiled, "CardCompiler", lambda: None)
    model, batch = joined()
    made = {}
    for target in (None, card("H100")):
        (backend,) = load_backends(model, "compiled", target)
        ops = backend.trace(model, batch).graph.ops
        made[target] = sum(op.kind in ("Sigmoid", "ConcatV2") for op in ops)
    assert made == {None: 4, card("H100"): 0}


@pytest.mark.card
def test_sigmoids_and_what_is_joined_are_not_kept():
    """Written in a way that keeps the phases apart; loosely, the step takes 27 % more."""
    model, batch = joined()
    target = card("H100")
    (backend,) = load_backends(model, "auto", target)
    step = planning.traced_model(backend, model, batch, "1GiB", 0.0, "estimated", 0, target)
    problem, store_all = step.problem, Schedule.store_all(step.problem.graph)
    resident = problem.profile.resident_bytes
    simulated = simulate(problem, store_all).peak_bytes - resident
    within = problem.with_budget(resident + int(1.1 * simulated))
    lowered = backend.memory.compiled_peak_bytes(within, store_all) - resident
    assert 0.8 * simulated <= lowered <= 1.1 * simulated


@pytest.fixture
def simulated_compiler(monkeypatch):
    """Stands in for the compiler of cards: what is simulated."""
    monkeypatch.setattr(compiled, "CardCompiler", lambda: None)

    def compile_bytes(self, problem, schedule):
        if problem.graph.fingerprint not in self._traced_here:
            return None
        order = schedule or Schedule.store_all(problem.graph)
        return simulate(problem, order).peak_bytes - problem.profile.resident_bytes

    monkeypatch.setattr(CompiledBackend, "_compile_bytes", compile_bytes)


def test_nothing_runs_and_the_card_is_named(simulated_compiler, monkeypatch):
    monkeypatch.setattr(CompiledBackend, "lower", None)
    monkeypatch.setattr(CompiledBackend, "snapshot", None)
    model, batch = keras_models.mlp()
    before = [v.numpy() for v in model.variables]
    plain = keras_remat.make_plan(model, batch, "1GiB", card="t4", solver="greedy")
    limit = int(0.9 * plain.store_all.peak_bytes)
    plan = keras_remat.make_plan(model, batch, limit, card="t4", margin=0.0, solver="greedy")
    assert plan.card == "T4"
    assert plan.profile_source == "estimated"
    assert plan.predicted.peak_bytes <= limit
    found = keras_remat.find_max_batch_size(
        model, batch, limit, card="T4", margin=0.0, time_limit_s=2.0
    )
    assert found.max_batch_size >= len(batch[0])
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_an_order_and_several_devices_are_refused(simulated_compiler, monkeypatch):
    model, batch = transformer()
    with pytest.raises(UnsupportedModelError, match='compilation="ordered" needs the device'):
        keras_remat.make_plan(model, batch, "8MiB", card="T4", compilation="ordered")
    monkeypatch.setattr(mirrored, "trains_on_several_devices", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="is one device"):
        keras_remat.make_plan(model, batch, "8MiB", card="T4")


@pytest.mark.usefixtures("card_compiler")
def test_a_process_that_dies_is_told(monkeypatch):
    start, code = (
        interpreter.start,
        "import sys; print('no compiler', file=sys.stderr); sys.exit(3)",
    )
    monkeypatch.setattr(
        interpreter, "start", lambda *words, **options: start("-c", code, **options)
    )
    model, batch = keras_models.mlp()
    with pytest.raises(UnsupportedModelError, match=r"ended with 3[\s\S]*no compiler"):
        keras_remat.make_plan(model, batch, "8MiB", card="T4")
