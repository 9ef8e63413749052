"""One row of ``replicas.py`` for ``tf.distribute.MirroredStrategy``, in a process of its own:
``python mirrored_case.py MODEL REPLICAS SHARE`` prints it as JSON, ``python mirrored_case.py
planning REPLICAS SHARE`` what planning the transformer takes.

Plain ``fit``, ``fit`` that is only watched, ``fit`` under the limit, and plain ``fit`` again, each
from the same weights: the two plain ones tell how much losses and times differ by themselves.
Replicas are logical CPUs, which share an allocator and the cores. So memory is what all take
together, divided by their number, and times are those of one machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from statistics import median
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from rows import MIB, difference
from watch import StepWatch, long_fit

import keras_remat
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray
from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.mirrored.backend import MirroredBackend
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers import solve

#: Samples of a batch for every replica, steps of an epoch, and epochs.
SAMPLES, STEPS, EPOCHS = 12, 10, 2


def convnet() -> keras.Model:
    """Convolutions with batch normalization and dropout."""
    inputs = x = keras.Input((48, 48, 3))
    for filters in (16, 16, 32, 32):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.Dropout(0.2)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def transformer() -> keras.Model:
    """Encoder blocks on an embedding, whose gradient is gathered and not reduced."""
    inputs = keras.Input((128,), dtype="int32")
    x = keras.layers.Embedding(500, 64)(inputs)
    for _ in range(3):
        y = keras.layers.LayerNormalization()(x)
        x += keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y)
        y = keras.layers.Dense(256, activation="gelu")(keras.layers.LayerNormalization()(x))
        x += keras.layers.Dropout(0.1)(keras.layers.Dense(64)(y))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


def wide() -> keras.Model:
    """Layers with far more bytes of weights, and of gradients to exchange, than of activations."""
    inputs = x = keras.Input((1536,))
    for _ in range(16):
        x = keras.layers.Dense(1536, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


class Clipped(keras.Model):
    """Has a ``train_step`` of its own: gradients are clipped by their global norm."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains one batch."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_weights), 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss}


def own_train_step() -> keras.Model:
    """The convolutional model with a ``train_step`` of its own."""
    model = convnet()
    return Clipped(model.input, model.output)


def step_s(watch: StepWatch) -> float:
    """The median of the last epoch's steps but the first."""
    return median(watch.times_s[-STEPS + 1 :])


def mirrored(replicas: int) -> tf.distribute.MirroredStrategy:
    """A strategy of so many logical CPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    keras_remat.enable_cpu_memory_stats()
    return tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(replicas)])


def planning(replicas: int, share: float) -> dict[str, Any]:
    """What it takes to trace, plan and write a step for so many replicas, in seconds of processor
    time."""
    strategy = mirrored(replicas)
    with strategy.scope():
        model = transformer()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_weights)
    backend = MirroredBackend(model)
    parts = (tf.zeros((SAMPLES, 128), tf.int32),) * replicas, (tf.zeros(SAMPLES),) * replicas
    started = time.process_time()
    traced = backend.trace(model, tuple(ShardedArray(part, part) for part in parts))
    traced_s = time.process_time()
    problem = Problem(traced.graph, backend.estimated_profile(traced))
    most = simulate(problem, Schedule.store_all(traced.graph)).peak_bytes
    resident = problem.profile.resident_bytes
    problem = problem.with_budget(int(resident + share * (most - resident)))
    schedule = solve(problem, solver="greedy").schedule
    solved_s = time.process_time()
    backend.lower(traced, problem, schedule)
    return {
        "replicas": replicas,
        "ops_planned": len(traced.graph.ops),
        "trace_s": traced_s - started,
        "solve_s": solved_s - traced_s,
        "write_s": time.process_time() - solved_s,
    }


def measured(name: str, replicas: int, share: float) -> dict[str, Any]:
    """One row."""
    strategy = mirrored(replicas)
    batch = SAMPLES * replicas

    def fit(*remat: Any, epochs: int = EPOCHS) -> StepWatch:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = globals()[name]()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss)
        numbers = np.random.default_rng(0)
        shape = (STEPS * batch, *model.input.shape[1:])
        whole = model.input.dtype == "int32"
        x = numbers.integers(0, 500, shape) if whole else numbers.random(shape).astype("float32")
        y, steps = numbers.integers(0, 10, STEPS * batch), StepWatch()
        long_fit(model, x, y, batch_size=batch, epochs=epochs, callbacks=[*remat, steps])
        return steps

    def held_before() -> int:
        """Bytes of what Keras keeps of models that are gone, for each replica."""
        return bytes_in_use() // replicas

    plain, before = fit(), held_before()
    watched = keras_remat.RematAutotune(None, "keep", verbose=0)
    fit(watched, epochs=1)
    problem, plain_bytes = watched.problem, watched.report.epochs[-1].peak_bytes - before
    resident = problem.profile.resident_bytes - before
    alone = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes - before
    alone = max(alone, plain_bytes)  # gradients were in one pack
    limit, before = int(resident + share * (alone - resident)), held_before()
    remat = keras_remat.RematAutotune(limit + before, "keep", margin=0.02, verbose=0)
    ours, again = fit(remat), fit()
    return {
        "replicas": replicas,
        "model": name,
        "alone_mib": alone / MIB,
        "plain_mib": plain_bytes / MIB,
        "limit_mib": limit / MIB,
        "predicted_mib": (remat.plan.predicted.peak_bytes - before) / MIB,
        "peak_mib": (remat.report.epochs[-1].peak_bytes - before) / MIB,
        "recomputed": len(remat.plan.solution.schedule.recomputed),
        "loss_difference": difference(plain.losses, ours.losses),
        "loss_noise": difference(plain.losses, again.losses),
        "overhead_predicted": remat.plan.overhead,
        "time_ratio": step_s(ours) / min(step_s(plain), step_s(again)),
        "time_noise": max(map(step_s, (plain, again))) / min(map(step_s, (plain, again))),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    what, count, part = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    print(json.dumps(planning(count, part) if what == "planning" else measured(what, count, part)))
