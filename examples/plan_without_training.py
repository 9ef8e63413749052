"""Plan a model's training step without training it, save the plan, and train under it later.

    python examples/plan_without_training.py [plan.json]

``profile="estimated"`` runs nothing at all; ``"measured"``, the default, runs a few steps and puts
every variable back.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import keras_remat

BATCH_SIZE, PIXELS = 16, 64


def build() -> keras.Model:
    """A small residual network."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((PIXELS, PIXELS, 3))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    for _ in range(6):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(y)))
        x = x + layers.Conv2D(32, 3, padding="same")(y)
    model = keras.Model(
        inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    return model


def main(path: str = "plan.json") -> int:
    """Plans, saves, loads and trains."""
    keras_remat.enable_cpu_memory_stats()
    model = build()
    generator = np.random.default_rng(0)
    x = generator.random((4 * BATCH_SIZE, PIXELS, PIXELS, 3), dtype=np.float32)
    y = generator.integers(0, 10, (len(x),))
    batch = x[:BATCH_SIZE], y[:BATCH_SIZE]  # dtypes count: a plan is for one train step
    unlimited = keras_remat.make_plan(model, batch, "1TiB", profile="estimated")
    limit = unlimited.store_all.peak_bytes * 6 // 10
    plan = keras_remat.make_plan(model, batch, limit, solver_time_limit_s=10)
    plan.save(path)
    print(plan.summary("block"), flush=True)

    callback = keras_remat.RematAutotune(memory_limit=limit, batch_size="keep", plan=path)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=3, verbose=0, callbacks=[callback])
    print(callback.report)
    assert callback.report.limit_kept
    assert callback.plan.recomputes
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
