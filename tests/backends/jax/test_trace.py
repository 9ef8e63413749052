from collections import namedtuple

import jax
import jax_models as models
import keras
import numpy as np
import pytest

from keras_remat.backends.jax import measure
from keras_remat.backends.jax.flatten import nbytes
from keras_remat.backends.jax.private import state_specs
from keras_remat.backends.jax.trace import trace
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def traced():
    model = models.mixer()
    return trace(model, models.batch(model))


def test_specs_trace_to_the_same_graph_as_arrays(traced):
    model = models.mixer()
    specs = (jax.ShapeDtypeStruct((32, 32, 64), "float32"), jax.ShapeDtypeStruct((32,), "int32"))
    assert trace(model, specs).graph.fingerprint == traced.graph.fingerprint


def test_tracing_leaves_the_model_alone():
    model = models.mixer()
    before = [np.array(w) for w in model.get_weights()]
    trace(model, models.batch(model))
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_phases(traced):
    by_phase = {
        phase: [op for op in traced.graph.ops if op.phase == phase]
        for phase in (FORWARD, BACKWARD, UPDATE)
    }
    assert sum(op.kind == "dot_general" for op in by_phase[FORWARD]) == 5
    assert sum(op.kind == "dot_general" for op in by_phase[BACKWARD]) == 10  # two per layer
    assert len(by_phase[UPDATE]) >= len(state_specs(models.mixer())[0])
    assert not any(op.kind == "dot_general" for op in by_phase[UPDATE])


def test_updates_follow_their_gradient_and_writes_follow_the_readers(traced):
    graph = traced.graph
    last_backward = max(op.id for op in graph.ops if op.phase == BACKWARD)
    assert any(
        op.phase == UPDATE and op.id < last_backward // 2 + last_backward // 4 for op in graph.ops
    )
    written = [op for op in graph.ops if op.after]
    assert written
    for op in written:
        assert not op.recomputable
        assert all(graph.values[v].nbytes == 0 for v in op.outputs)


def test_bytes_are_those_of_the_arrays(traced):
    model = models.mixer()
    x, y = models.batch(model)
    specs = jax.tree.leaves(state_specs_built(model, (x, y)))
    given = sum(nbytes(s) for s in specs) + x.nbytes + y.nbytes
    inputs = [v for v in traced.graph.values if v.producer is None]
    assert sum(v.nbytes for v in inputs[: traced.program.n_inputs]) == given


def state_specs_built(model, batch):
    trace(model, batch)
    return state_specs(model)


def test_elementwise_chains_are_one_op(traced):
    largest = max(len(equations) for equations in traced.handles.values())
    assert largest > 5
    assert len(traced.graph.ops) < len(traced.program.equations) / 2


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}])
def test_uncompiled_steps_are_refused(options):
    model = models.mixer(1)
    model.compile("sgd", "mse", **options)
    with pytest.raises(UnsupportedModelError, match="compil"):
        trace(model, models.batch(model))


def test_a_layer_for_which_keras_compiles_no_step_is_named():
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.RandomRotation(0.1)])
    model.compile("sgd", "mse")
    assert not model.jit_compile
    with pytest.raises(UnsupportedModelError, match="RandomRotation in it: apply"):
        trace(model, (np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8, 3))))


def test_variables_bound_to_another_device_are_refused(monkeypatch):
    model = models.small()
    batch = models.batch(model)
    another = namedtuple("Device", "platform id device_kind")("another", 1, "cpu")
    monkeypatch.setattr(measure, "first_device", lambda: another)
    trace(model, batch)  # what is bound to none goes where the step is
    variable = model.trainable_variables[0]
    variable._value = jax.device_put(variable.value, jax.devices()[0])
    with pytest.raises(UnsupportedModelError, match=r"bound to .*another"):
        trace(model, batch)


def test_a_model_without_compile_is_refused():
    with pytest.raises(UnsupportedModelError, match="compile"):
        trace(
            keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)]),
            (np.zeros((2, 4)), np.zeros((2, 2))),
        )
