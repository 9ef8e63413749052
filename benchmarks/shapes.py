"""Batches of many sequence lengths in one ``fit``: how few plans they need, and what that costs.

    python benchmarks/shapes.py --lengths 32:512:32 --share 0.5 --output table.md

A transformer trains batches of varying length in random order, first by plain ``fit`` and then,
from equal weights, under a limit: a share of plain's highest peak. An order that fits a length is
used for it, and nothing is solved then. To tell what that costs, every length that was trained
under a plan is trained once more by a ``fit`` of its own, which plans for it alone.

Exit status 1: a step was over the limit, a loss differs, more than four orders were needed, or
something was planned after the first epoch.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from rows import Report, command_line, largest, machine
from watch import StepWatch, long_fit

import keras_remat
from keras_remat.training.shape_state import PlannedShape

BATCH, VOCABULARY, CLASSES = 16, 1000, 4
#: Seconds for the solver, and the most that a loss may differ.
SOLVE_S, TOLERANCE = 10.0, 1e-4


def transformer(blocks: int = 2, width: int = 64, heads: int = 4) -> keras.Model:
    """Returns a compiled encoder of any length, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
    for _ in range(blocks):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
        hidden = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(tokens, keras.layers.Dense(CLASSES)(pooled))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data_of(lengths: list[int]) -> tf.data.Dataset:
    """Returns a data set with a batch of each of the lengths, in order."""
    rng = np.random.default_rng(0)
    batches = [
        (
            rng.integers(0, VOCABULARY, (BATCH, length)).astype("int32"),
            rng.integers(0, CLASSES, BATCH).astype("int32"),
        )
        for length in lengths
    ]
    signature = (tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None,), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


@dataclass
class Fit:
    """What one ``fit`` showed."""

    watch: StepWatch
    lengths: list[int]  # of an epoch's batches
    planning_s: list[float] = field(default_factory=list)  # per epoch
    orders: dict[int, Any] = field(default_factory=dict)  # length → what runs
    events: list[Any] = field(default_factory=list)

    def by_length(self, values: list[Any]) -> dict[int, list[Any]]:
        """Returns length → those of a value per step that its steps have."""
        found: dict[int, list[Any]] = {length: [] for length in self.lengths}
        for length, value in zip(cycle(self.lengths), values, strict=False):
            found[length].append(value)
        return found


def fit(lengths: list[int], epochs: int, limit_bytes: int | None) -> Fit:
    """Trains a new model, plainly where there is no limit."""
    watch = StepWatch()
    callbacks: list[keras.callbacks.Callback] = [watch]
    orders: dict[int, Any] = {}
    remat = None
    if limit_bytes is not None:
        remat = keras_remat.RematAutotune(
            limit_bytes, "keep", solver_time_limit_s=SOLVE_S, verbose=0
        )

        def look(epoch: int, logs: Any) -> None:
            for signature, shape in remat._session._fit.record.running.shapes.items():
                if isinstance(shape, PlannedShape):
                    orders[signature[0][0][1]] = shape.schedule

        callbacks = [remat, watch, keras.callbacks.LambdaCallback(on_epoch_end=look)]
    long_fit(transformer(), data_of(lengths), epochs=epochs, callbacks=callbacks)
    if remat is None:
        return Fit(watch, lengths)
    planning_s = [epoch.planning_time_s for epoch in remat.report.epochs]
    return Fit(watch, lengths, planning_s, orders, remat.report.events)


def compare(lengths: list[int], epochs: int, share: float) -> tuple[list[str], bool]:
    """Returns the table's lines, and whether all is as it should be."""
    plain = fit(lengths, epochs, None)
    limit = int(share * max(plain.watch.peaks))
    family = fit(lengths, epochs, limit)
    off = largest(abs(a - b) for a, b in zip(plain.watch.losses, family.watch.losses, strict=True))
    orders = list(dict.fromkeys(family.orders.values()))
    planned = ", ".join(f"{seconds:.1f}" for seconds in family.planning_s)
    lines = [
        f"Limit {limit / 2**20:.0f} MiB ({share:.0%} of plain's highest peak); orders used: "
        f"{len(orders)}; seconds planned per epoch: {planned}; losses differ by at most {off:.1g}.",
        "",
        "| length | order | peak / limit | plain's peak / limit | step s | plain's | own plan's |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    fits = True
    for length in sorted(set(lengths)):
        order, own = family.orders.get(length), "-"
        if order is not None:
            alone = fit([length] * 6, 3, limit)
            own = f"{median(alone.watch.times_s[-6:]):.3f}"
        name = "plain" if order is None else f"order {orders.index(order) + 1}"
        peaks = [max(one.by_length(one.watch.peaks)[length]) / limit for one in (family, plain)]
        fits &= peaks[0] <= 1
        times = [median(one.by_length(one.watch.times_s)[length][-6:]) for one in (family, plain)]
        lines.append(
            f"| {length} | {name} | {peaks[0]:.2f} | {peaks[1]:.2f} | {times[0]:.3f} | "
            f"{times[1]:.3f} | {own} |"
        )
    late_s = sum(family.planning_s[1:])
    return lines, fits and len(orders) <= 4 and late_s < 1 and off < TOLERANCE


def main(argv: list[str] | None = None) -> int:
    """Prints the table; the exit status is in the module's docstring."""
    keras_remat.enable_cpu_memory_stats()
    parser = command_line(__doc__)
    parser.add_argument("--lengths", default="32:512:32", metavar="FROM:TO:STEP")
    parser.add_argument("--each", type=int, default=5, help="batches of a length in an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="the limit, of plain's peak")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    arguments = parser.parse_args(argv)
    first, last, step = map(int, arguments.lengths.split(":"))
    lengths = [*range(first, last + 1, step)] * arguments.each
    random.Random(0).shuffle(lengths)
    rows, is_good = compare(lengths, arguments.epochs, arguments.share)
    what = f"batches of {BATCH}, {arguments.epochs} epochs of {len(lengths)} in random order"
    report = Report()
    report.add("# shapes.py", "", f"{machine()}; {what}", "", *rows)
    report.write(arguments.output)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
