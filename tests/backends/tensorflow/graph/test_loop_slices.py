"""Loops in slices: wholes that run on a part of the batch, or not at all."""

import functools
import gc
from dataclasses import replace

import keras
import keras_models
import numpy as np
import pytest
from keras import layers, ops

from keras_remat.backends.tensorflow import backend, private
from keras_remat.backends.tensorflow.graph import kernel_scratch
from keras_remat.backends.tensorflow.ordered import backend as ordered_backend
from keras_remat.backends.tensorflow.ordered.lower import LoweredStep
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.core.graph import BACKWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.slices import Slicing
from keras_remat.errors import InvalidProblemError

BACKEND = backend()
RNG = np.random.default_rng(0)
LOOP = "StatelessWhile"


class MixedCell(layers.Layer):
    """Subtracts the mean over the batch in every round."""

    state_size = output_size = 4

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x, states):
        h = ops.tanh(ops.matmul(x, self.kernel) + states[0])
        h = h - ops.mean(h, axis=0, keepdims=True)
        return h, [h]


def masked(samples=8):
    """Two loops of masked words, the second of which returns its last state alone."""
    inputs = x = keras.Input((6,), dtype="int32")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(20, 5, mask_zero=True)(x))
    model = keras.Model(inputs, layers.Dense(1)(layers.GRU(8)(x)))
    return model, (RNG.integers(0, 20, (samples, 6)).astype("int32"), RNG.random((samples, 1)))


def films(samples=8):
    inputs = keras.Input((4, 8, 8, 1))
    model = keras.Model(
        inputs, layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(inputs)
    )
    return model, tuple(RNG.random((samples, 4, 8, 8, n), "float32") for n in (1, 4))


def series(samples=8):
    inputs = keras.Input((6, 5))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(8)(inputs)))
    return model, (RNG.random((samples, 6, 5), "float32"), RNG.random((samples, 1)))


def mixed(samples=8):
    inputs = keras.Input((6, 5))
    model = keras.Model(inputs, layers.Dense(1)(layers.RNN(MixedCell())(inputs)))
    return model, series(samples)[1]


@functools.cache
def traced(build, samples=8):
    keras.utils.set_random_seed(0)
    model, batch = build(samples)
    model.compile("sgd", "mse")
    data = BACKEND.example_batch(model, batch)
    return model, data, BACKEND.trace(model, data)


def together(rules, parts):
    """The ids of all ops that run in so many slices."""
    ops_ = {i for i, rule in rules.items() if rule.divides and rule.divides % parts == 0}
    while alone := {i for i in ops_ if not rules[i].partners <= ops_}:
        ops_ -= alone
    return tuple(sorted(ops_))


def trained(model, data, step):
    """The weights after two steps from the first ones, and what a step needs beside them."""
    problem = Problem(step.graph, BACKEND.estimated_profile(step))
    run = LoweredStep(step, problem.with_budget(2**40), Schedule.store_all(step.graph))
    first = keras_models.state_of(model)
    for _ in range(2):
        run(data)
    after = [np.array(value) for value in keras_models.state_of(model)]
    for variable, value in zip(keras_models.variables_of(model), first, strict=True):
        variable.assign(value)
    return after, problem.floor_bytes - problem.profile.resident_bytes


@pytest.mark.parametrize("build", [masked, films])
def test_loops_in_slices_train_what_whole_ones_do(build, monkeypatch):
    monkeypatch.setattr(kernel_scratch, "_patches_bytes", lambda *_: 0)  # which are no slices'
    monkeypatch.setattr(ordered_backend, "smallest_counted_bytes", lambda _: 0)  # as oneDNN's is
    model, data, step = traced(build)
    loops = [op for op in step.graph.ops if op.kind == LOOP]
    rules = step.slicer.rules
    assert {op.id for op in loops} <= rules.keys()
    sliced = step.slicer.sliced(Slicing(together(rules, 2), 2))
    assert sum(op.kind == LOOP for op in sliced.graph.ops) == 2 * len(loops)
    (whole, floor), (ours, below) = (trained(model, data, one) for one in (step, sliced))
    if BACKEND.device.allocator != "onednn" or build is films:  # it counts no less than 256 KiB
        assert below < 0.8 * floor
    for mine, other in zip(ours, whole, strict=True):
        largest = np.max(np.abs(other), initial=1e-3)
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-6 * largest)


def test_what_kernels_in_a_loop_ask_for_is_known_and_no_less_for_a_part(monkeypatch):
    monkeypatch.setattr(private, "onednn_is_on", lambda: False)
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    model, _, step = traced.__wrapped__(films)  # whose patches are counted
    sliced = step.slicer.sliced(Slicing(together(step.slicer.rules, 4), 4))
    # 30 MiB hold 2909 images of 4 * (64 * 36 + 64 * 4 + 36 * 4) bytes
    least = 4 * 2909 * 64 * 36
    for of in (step, sliced):
        asked = [
            scratch
            for op, scratch in zip(
                of.graph.ops, BACKEND.estimated_profile(of).op_workspace_bytes, strict=True
            )
            if op.kind == LOOP and op.phase == BACKWARD
        ]
        assert asked
        assert all(least <= scratch < 1.01 * least for scratch in asked)
    del model
    gc.collect()
    with pytest.raises(InvalidProblemError, match="model of the step no longer exists"):
        step.slicer.at_size(3)


def test_a_loop_that_mixes_samples_stays_whole_and_so_does_one_that_cannot_be_traced():
    _, _, step = traced(mixed)
    kinds = {step.graph.ops[i].kind for i in step.slicer.rules}
    assert "MatMul" in kinds
    assert LOOP not in kinds
    _, _, step = traced(series)
    assert LOOP not in {step.graph.ops[i].kind for i in replace(step.slicer, at_size=None).rules}


def test_a_part_that_is_traced_to_other_ops_is_refused():
    """With one sample, a loop begins with other ops in some versions of Keras. Here they are those
    of another model."""
    _, _, step = traced(series)
    other = traced(mixed, 1)[2]
    at_size = step.slicer.at_size
    slicer = replace(step.slicer, at_size=lambda size: at_size(size) if size > 1 else other)
    chosen = together(slicer.rules, 8)
    assert LOOP in {step.graph.ops[i].kind for i in chosen}
    with pytest.raises(InvalidProblemError, match="is another op for one of 8 parts"):
        slicer.sliced(Slicing(chosen, 8))
