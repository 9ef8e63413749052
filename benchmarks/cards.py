"""What compiled train steps of Keras on JAX need on cards that need not be there.

Every number is a compiler's: a step is compiled for the card by XLA:GPU, without a driver, and
``memory_analysis()`` says what it would allocate. Nothing runs, so neither times nor the scratch
memory that cuDNN's and cuBLAS's kernels choose are in it.

A cell is ``simulated → compiled``, in MiB above what is resident: what the solver planned for, and
what XLA:GPU allocates for the schedule. Shares are of the simulated store-all.

    pip install 'keras-remat[cards]'
    python benchmarks/cards.py --cards H100 T4 --models unet --shares 0.5 0.25
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}

import keras
import numpy as np
from keras import layers

import keras_remat
from keras_remat.backends.jax import lower as lowering
from keras_remat.backends.jax.measure import memory
from keras_remat.backends.jax.profile import estimated_profile
from keras_remat.backends.jax.trace import trace
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import RematError
from keras_remat.units import MIB

SHARES = (0.7, 0.5, 0.35, 0.25)
SOLVER_S = 60.0
PIXELS = 96


def transformer():
    """Six blocks of 128 features, with dropout in both branches."""
    inputs = keras.Input((256,))
    x = layers.Embedding(1000, 128)(inputs)
    for _ in range(6):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32, dropout=0.1)(h, h)
        h = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(128)(layers.Dropout(0.1)(h))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def unet():
    """Three levels of two convolutions with batch normalization, and skip connections."""

    def convolutions(x, filters):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same")(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    inputs = x = keras.Input((PIXELS, PIXELS, 3))
    kept = []
    for filters in (32, 64, 128):
        x = convolutions(x, filters)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolutions(x, 256)
    for filters in (128, 64, 32):
        x = convolutions(layers.Concatenate()([layers.UpSampling2D()(x), kept.pop()]), filters)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def application(name):
    """One of Keras's own image models, with ten classes."""

    def build():
        make = getattr(keras.applications, name)
        return make(weights=None, classes=10, input_shape=(PIXELS, PIXELS, 3))

    return build


#: Builder and batch size.
MODELS = {
    "transformer": (transformer, 32),
    "mobilenet": (application("MobileNetV2"), 32),
    "unet": (unet, 8),
    "resnet50": (application("ResNet50"), 16),
}


def cell(simulated, compiled):
    """``simulated → compiled`` in MiB, and by how much the second is off."""
    off = compiled / simulated - 1
    return f"{simulated / MIB:.1f} → {compiled / MIB:.1f} ({off:+.0%})"


def row(name, card_name, shares, policy):
    """Compiles one model for one card, and returns its cells."""
    build, batch_size = MODELS[name]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = build()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    whole = model.input_shape[1:]
    x = np.zeros((batch_size, *whole), "int32" if len(whole) == 1 else "float32")
    traced = trace(model, (x, np.zeros(batch_size, "int32")), target=card(card_name))
    problem = Problem(traced.graph, estimated_profile(traced))
    resident = problem.profile.resident_bytes

    def simulated(schedule):
        return simulate(problem, schedule).peak_bytes - resident

    def compiled(schedule):
        return memory(lowering.lower(traced, schedule)).added_bytes

    store_all = Schedule.store_all(traced.graph)
    most = simulated(store_all)
    plain = memory(lowering.lower_plain(traced)).added_bytes
    cells = [f"{name} b{batch_size}", card_name, f"{plain / MIB:.1f}"]
    cells.append(cell(most, compiled(store_all)))
    for share in shares:
        budget = resident + int(share * most)
        try:
            solution = keras_remat.solve(
                problem.with_budget(budget), solver="greedy", time_limit_s=SOLVER_S
            )
        except RematError as error:
            cells.append(type(error).__name__)
            continue
        cells.append(cell(simulated(solution.schedule), compiled(solution.schedule)))
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--cards", nargs="+", default=["H100"])
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--policy", default="float32")
    args = parser.parse_args()
    heads = ["model", "card", "plain", "store-all", *map(str, args.shares)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for name in args.models:
        for card_name in args.cards:
            started = time.perf_counter()
            print(f"| {' | '.join(row(name, card_name, args.shares, args.policy))} |", flush=True)
            print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
