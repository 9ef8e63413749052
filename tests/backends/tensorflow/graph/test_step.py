"""A traced step tells what Keras's own step needs: its ops as they were traced, and what is in none
of them."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.tensorflow import backend
from keras_remat.backends.tensorflow.graph import kernel_scratch
from keras_remat.backends.tensorflow.graph import step as step_module
from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory
from keras_remat.backends.tensorflow.ordered import scratch
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate


@pytest.fixture(scope="module")
def step():
    """Each gradient of the batch normalizations waits for the one before, by a control edge."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((16, 16, 8))
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    model.compile("adam", "mse")
    one = backend()
    traced = one.trace(model, (tf.zeros((64, 16, 16, 8)), tf.zeros((64, 1))))
    return traced, Problem(traced.graph, one.estimated_profile(traced))


def test_the_plain_step_is_predicted_as_it_was_traced(step):
    traced, problem = step
    as_traced = simulate(problem, Schedule.store_all(traced.graph))
    assert traced.plain_peak_bytes(problem, SimulatedMemory()) == as_traced.peak_bytes


@pytest.mark.parametrize(("least", "surplus"), [(0, 3_000), (2**40, 0), (2**40, 3_000)])
def test_what_no_op_holds_is_added(step, least, surplus):
    traced, problem = replace(step[0]), step[1]
    activations = traced.plain_peak_bytes(problem, SimulatedMemory())
    activations -= problem.profile.resident_bytes
    vars(traced).update(plain_least_bytes=least, plain_surplus_bytes=surplus)  # both are cached
    needed = traced.plain_peak_bytes(problem, SimulatedMemory()) - problem.profile.resident_bytes
    assert needed == max(activations, least) + surplus


class Shift(layers.Layer):
    """Adds constants of 1 MiB and of 1 KiB, the large one in every round of a loop."""

    def call(self, x):
        large, small = np.arange(2**18, dtype="float32"), np.arange(2**8, dtype="float32")
        x = tf.while_loop(lambda k, x: k < 3, lambda k, x: (k + 1, x + large), (0, x))[1]
        return x + keras.ops.mean(tf.tile(large, [2])[: 2**18] + x) + keras.ops.mean(small)


def test_large_constants_are_held_also_those_of_loops_and_steps_share_them():
    """What an op makes of constants alone would be folded: a lowered step is given the first."""
    model = keras.Sequential([layers.Input((2**18,)), Shift(), layers.Dense(1)])
    model.compile("sgd", "mse")
    one = backend()
    traced = one.trace(model, (tf.zeros((2, 2**18)), tf.zeros((2, 1))))
    held_bytes = traced.held_bytes
    assert len(held_bytes) >= 2
    assert set(held_bytes) == {2**20}
    counted = one.estimated_profile(traced, 100).resident_bytes
    assert counted == 100 + sum(held_bytes)
    problem = Problem(traced.graph, one.estimated_profile(traced))
    steps = [one.lower(traced, problem, Schedule.store_all(traced.graph))]
    assert one.estimated_profile(traced, 100).resident_bytes == counted - 2**20
    before = one.device.in_use_bytes()
    steps.append(one.lower(traced, problem, Schedule.store_all(traced.graph)))
    assert one.device.in_use_bytes() < before + 2**20


@pytest.mark.parametrize(
    ("threads", "replicas", "on_gpu", "at_once"),
    [(8, 1, False, 8), (8, 3, False, 2), (2, 4, False, 0), (1, 1, False, 0), (8, 1, True, 0)],
)
def test_keras_own_step_runs_as_many_ops_at_once_as_there_are_threads(
    step, monkeypatch, threads, replicas, on_gpu, at_once
):
    traced, problem = step
    monkeypatch.setattr(step_module, "cores", lambda: threads)
    monkeypatch.setattr(step_module, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 0)
    traced = replace(traced, replicas=traced.replicas * replicas)
    vars(traced)["plain_surplus_bytes"] = 3_000  # it is cached
    memory = ReplayedMemory(smallest_bytes=0)
    peak_bytes = memory.unordered_peak_bytes(problem, at_once, 0, {}) + 3_000 if at_once else 0
    assert traced.plain_unordered_bytes(problem, memory) == peak_bytes


def test_both_gradients_of_a_convolution_gather_at_once(step, monkeypatch):
    """Without oneDNN each asks for a matrix, and both are ready when the image's gradient is."""
    traced, _ = step
    monkeypatch.setattr(scratch, "runs_own_kernels", lambda: True)
    monkeypatch.setattr(kernel_scratch, "_threads", lambda: 2)
    problem = Problem(traced.graph, backend().estimated_profile(traced))
    memory, resident = ReplayedMemory(smallest_bytes=0), problem.profile.resident_bytes
    monkeypatch.setattr(step_module, "threads", lambda: 2)
    in_order = traced.plain_peak_bytes(problem, memory) - resident
    at_once = traced.plain_unordered_bytes(problem, memory) - resident
    workspace = sorted(problem.profile.op_workspace_bytes)
    assert at_once >= in_order + 0.9 * workspace[-2] > in_order
