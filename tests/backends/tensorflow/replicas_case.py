"""Steps under ``MirroredStrategy`` on two logical CPUs; prints what came of a case as JSON:
``python replicas_case.py CASE``. A process that waits for ever is ended by its caller."""

import gc
import json
import os
import sys
import warnings
from unittest import mock

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf

import keras_remat
from keras_remat.backends.tensorflow import backend, private
from keras_remat.backends.tensorflow.graph import replicas
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray, divided
from keras_remat.backends.tensorflow.memory.measure import bytes_in_use
from keras_remat.backends.tensorflow.mirrored.backend import MirroredBackend
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import RematError
from keras_remat.solvers.orders.reorder import base_orders

COUNT = 2
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * COUNT
)
keras_remat.enable_cpu_memory_stats()


STRATEGY = tf.distribute.MirroredStrategy([f"CPU:{at}" for at in range(COUNT)])
BATCH = 32


def convnet():
    inputs = x = keras.Input((8, 8, 3))
    for filters in (4, 8):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(synchronized=filters == 8)(x)
        x = keras.layers.Dropout(0.2)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


def mixer():
    """Needs no workspace on any allocator."""
    inputs = x = keras.Input((1024, 16))
    for at in range(4):
        x = keras.layers.BatchNormalization(synchronized=at == 3)(keras.layers.Dense(16)(x))
        x = keras.layers.Dropout(0.2)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x)))


def embedding():
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(50, 16)(inputs))
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def recurrent():
    inputs = keras.Input((12, 8))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.LSTM(16)(inputs)))


class AsksWhichReplica(keras.Model):
    """Trains only half as much on the second replica."""

    def train_step(self, data):
        x, y = data
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = 1.0 if tf.get_static_value(replica) == 0 else 0.5
        return super().train_step((x * share, y))


class FollowsTheFirst(keras.Model):
    """Keeps a number of the first replica's samples."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = self.add_weight(
            shape=(), trainable=False, aggregation="only_first_replica", name="seen"
        )

    def train_step(self, data):
        self.seen.assign(keras.ops.mean(data[0]))
        return super().train_step(data)


def wide():
    """Has more bytes of weights than of activations."""
    inputs = x = keras.Input((384,))
    for _ in range(8):
        x = keras.layers.Dense(384, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def of_kind(kind):
    inputs = keras.Input((8,))
    return kind(inputs, keras.layers.Dense(4)(inputs))


MODELS = {
    "convnet": convnet,
    "mixer": mixer,
    "embedding": embedding,
    "recurrent": recurrent,
    "wide": wide,
    "asks": lambda: of_kind(AsksWhichReplica),
    "follows": lambda: of_kind(FollowsTheFirst),
}


def compiled(name, **options):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = MODELS[name]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = "adam" if name in ("mixer", "wide") else "sgd"
        model.compile(optimizer, loss, **options)
    return model


def data_for(model, samples):
    numbers = np.random.default_rng(0)
    shape = (samples, *model.input.shape[1:])
    whole = model.input.dtype == "int32"
    x = numbers.integers(0, 50, shape) if whole else numbers.random(shape).astype("float32")
    return x, numbers.integers(0, 4, samples)


def trained(name, samples, callback, batch_size=BATCH):
    model, losses = compiled(name), []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(
            *data_for(model, samples),
            batch_size=batch_size,
            shuffle=False,
            verbose=0,
            epochs=2,
            callbacks=[noted] if callback is None else [callback, noted],
        )
    parts = [STRATEGY.experimental_local_results(w.value) for w in model.trainable_weights]
    return {
        "losses": losses,
        "weights_differ": any((a.numpy() != b.numpy()).any() for a, b in parts),
        "said": [str(w.message) for w in said if "keras_remat" in str(w.message)],
    }


def fit(batch_size="keep", samples=6 * BATCH + 9):
    """Plain and rematerialized steps of a model, the last batch of an epoch uneven."""
    plain = trained("mixer", samples, None)
    watched = keras_remat.RematAutotune(None, "keep", verbose=0)
    trained("mixer", samples, watched)
    problem = watched.problem
    resident = problem.profile.resident_bytes
    # of one replica alone: those that share an allocator and two cores do not peak together
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    limit = int(resident + 0.6 * (peak - resident))
    remat = keras_remat.RematAutotune(limit, batch_size, margin=0.05, solver="greedy", verbose=0)
    came = trained("mixer", samples, remat)
    return {
        "plain": plain,
        "remat": came,
        "limit": limit,
        "plain_peak": peak,
        "peak": remat.plan.measured.peak_bytes,
        "predicted": remat.plan.predicted.peak_bytes,
        "recomputes": remat.plan.recomputes,
        "batch": remat.report.batch_size,
        "events": [f"{e.kind}: {e.message}" for e in remat.report.events],
    }


def larger():
    """Batches that are joined, and plain ones of the same samples: what the weights are after.
    Batches grow at another step from run to run; too few samples for one at the end are one step.
    """
    samples, size = 16 * BATCH + 10, 2 * BATCH
    remat = keras_remat.RematAutotune("1GiB", size, solver="greedy", verbose=0)
    model, plain = compiled("mixer"), compiled("mixer")
    x, y = data_for(model, samples)
    options = {"shuffle": False, "verbose": 0}
    model.fit(x, y, batch_size=BATCH, callbacks=[remat], **options)
    counted = next(metric for metric in model.metrics if metric.name == "loss").count
    change = next(event for event in remat.report.events if event.kind == "batch")
    first = change.step * BATCH
    for begin, end, of in ((0, first, BATCH), (first, samples, size)):
        plain.fit(x[begin:end], y[begin:end], batch_size=of, **options)
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    return {
        "batch": remat.report.batch_size,
        "samples": int(keras.ops.convert_to_numpy(counted)),
        "expected_samples": samples,
        "steps": remat.report.epochs[0].steps,
        "expected_steps": change.step + -(-(samples - first) // size),
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs),
    }


def plain_steps(name):
    """The losses of steps from the second on."""
    model = compiled(name)
    x, y = data_for(model, BATCH)
    fits = (model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0) for _ in range(3))
    return [fitted.history["loss"][0] for fitted in fits][1:]


def steps(name):
    """Lowered steps, from the second on."""
    model = compiled(name)
    x, y = data_for(model, BATCH)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    backend = MirroredBackend(model)
    batch = tuple(divided(STRATEGY, array) for array in (x, y))
    traced = backend.trace(model, batch)
    problem = Problem(traced.graph, backend.estimated_profile(traced)).with_budget(2**40)
    step = backend.lower(traced, problem, Schedule.store_all(traced.graph))
    order = base_orders(problem)[0]
    losses = []
    for _ in range(2):
        model.reset_metrics()
        losses.append(float(step(batch)["loss"]))
    return {
        "ours": losses,
        "collectives": [op.kind for op in traced.graph.ops if op.kind.startswith("Collective")],
        "recomputable": [
            op.recomputable for op in traced.graph.ops if op.kind.startswith("Collective")
        ],
        "devices": [replica.device for replica in traced.replicas],
        "peak": simulate(problem, Schedule(order)).peak_bytes - problem.profile.resident_bytes,
        "plain_least": traced.plain_least_bytes,
    }


def packs():
    """The same with all gradients in one pack, and in packs of a layer or two."""
    one = steps("wide")
    with mock.patch.object(replicas, "PACK_BYTES", 600_000):
        several = steps("wide")
    weights = 4 * compiled("wide").count_params()
    return {"plain": plain_steps("wide"), "one": one, "several": several, "bytes": weights}


def refusals():
    """What is said of steps that cannot be cut out."""
    said = {}
    for name in ("asks", "follows"):
        model = compiled(name)
        x, y = data_for(model, BATCH)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        try:
            replicas.trace(model, tuple(divided(STRATEGY, array) for array in (x, y)))
        except RematError as error:
            said[name] = f"{type(error).__name__}: {error}"
    model = compiled("embedding")
    x, y = data_for(model, BATCH)
    uneven = ShardedArray(None, (tf.constant(x[:20]), tf.constant(x[20:])))
    try:
        replicas.trace(model, (uneven, uneven))
    except RematError as error:
        said["uneven"] = f"{type(error).__name__}: {error}"
    return said


def models():
    """What is said of models that cannot be scheduled."""
    said, compiled_by_xla = {}, compiled("embedding", jit_compile=True)
    plain_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain_model.compile("sgd", "mse")
    for name, refused in (("xla", compiled_by_xla), ("outside", plain_model)):
        backend = MirroredBackend(compiled_by_xla)
        try:
            backend.check(refused)
        except RematError as error:
            said[name] = str(error)
    return said


def undone():
    """State before a step and after its copies were put back, on both devices."""
    model = compiled("convnet")
    data = data_for(model, BATCH)
    model.fit(*data, batch_size=BATCH, verbose=0)
    put_back = MirroredBackend(model).snapshot(model)
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]

    def state():
        return [
            [part.numpy().tobytes() for part in STRATEGY.experimental_local_results(v.value)]
            for v in every
        ]

    before = state()
    model.fit(*data, batch_size=BATCH, verbose=0)
    changed = state() != before
    put_back()
    return {"changed": changed, "restored": state() == before, "parts": len(before[0])}


def resident():
    """What is resident on a replica once a step is traced, and after steps."""
    model = compiled("wide")
    x, y = data_for(model, BATCH)
    model.evaluate(x, y, batch_size=BATCH, verbose=0)  # makes the metrics
    backend = MirroredBackend(model)
    gc.collect()
    before = backend.device.in_use_bytes()
    with STRATEGY.scope():
        model.optimizer.build(model.trainable_variables)
    backend.trace(model, tuple(divided(STRATEGY, array) for array in (x, y)))
    traced = backend.device.in_use_bytes() - before
    model.fit(x, y, batch_size=BATCH, verbose=0)
    gc.collect()
    trained = backend.device.in_use_bytes() - before
    return {"traced": traced, "trained": trained}


def memory():
    """What is said to be in use on one replica, and of the allocator that both share."""
    held = tf.ones((1 << 20,), tf.float32)
    device = MirroredBackend(compiled("embedding")).device
    total, of_one = bytes_in_use(), device.in_use_bytes()
    return {"allocator": total, "replica": of_one, "held": int(held.shape[0])}


def without_strategy():
    """What a model of one device is traced to beside another device, and both devices' limits."""
    keras.utils.set_random_seed(0)
    model = MODELS["embedding"]()
    model.compile("sgd", "mse")
    traced = backend().trace(model, backend().example_batch(model, BATCH))
    limits = [private.device_memory_limit_bytes(f"CPU:{at}") for at in range(COUNT)]
    return {"ops": len(traced.graph.ops), "limits": limits}


CASES = {
    "fit": fit,
    "larger": larger,
    "embedding": lambda: steps("embedding") | {"plain": plain_steps("embedding")},
    "recurrent": lambda: steps("recurrent") | {"plain": plain_steps("recurrent")},
    "refusals": refusals,
    "models": models,
    "packs": packs,
    "resident": resident,
    "undone": undone,
    "memory": memory,
    "without_strategy": without_strategy,
}

if __name__ == "__main__":
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
