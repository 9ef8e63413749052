"""Compiled train steps of Keras on JAX or TensorFlow, side by side: peak bytes, step time, compile
time.

Cases, each in a process of its own, same model, weights, seeds and batches:

* ``plain``: Keras's own compiled step;
* on TensorFlow, ``recompute_grad``: every block of the model under ``tf.recompute_grad``;
* on JAX, ``RematScope``: the model built under ``keras.RematScope(mode="full")``;
* ``dots_saveable``, ``nothing_saveable``: every block of the model under ``jax.checkpoint`` with
  that policy;
* ``ours@X``: this package with the measured peak of X as budget, for each of the above that saves
  anything, and at half of plain's temporary memory;
* ``ours@min``: this package at the smallest peak it can plan.

``temp`` is the compiled step's temporary memory, ``peak`` adds arguments and outputs (JAX:
``memory_analysis``; TensorFlow: the device allocator's peak, see ``compiled_step_tensorflow.py``);
``time`` is the median wall time of a step, ``cpu`` the least processor time of one (steadier on a
busy machine; on a GPU it means little); the ratio behind ``compile s`` (tracing, planning,
compiling) is one of processor times too. ``loss`` is the largest relative difference to plain's
losses over the first steps.

    KERAS_BACKEND=jax python benchmarks/compiled_step.py --models mixer transformer
    KERAS_BACKEND=tensorflow python benchmarks/compiled_step.py
    KERAS_BACKEND=jax python benchmarks/compiled_step.py --scale 16          # 16 times the batch:
    for a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from rows import MIB, Failed, difference, row_of

ON_TENSORFLOW = os.environ.setdefault("KERAS_BACKEND", "jax") == "tensorflow"

PEERS = (
    ("recompute_grad",) if ON_TENSORFLOW else ("RematScope", "dots_saveable", "nothing_saveable")
)
MODELS = ("mixer", "transformer", "mobilenet", "resnet")
LOSS_STEPS = 3
PLANS_FOR_LEAST = 8


def blocks_of(name):
    """Returns input shape, batch size, and a list of block builders ``x → y`` of a model."""
    from keras import layers

    def mixer_block(x):
        tokens, dim = x.shape[1:]
        h = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        h = layers.Dropout(0.1)(layers.Dense(2 * tokens, activation="gelu")(h))
        x = layers.Add()([x, layers.Permute((2, 1))(layers.Dense(tokens)(h))])
        h = layers.Dropout(0.1)(
            layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        )
        return layers.Add()([x, layers.Dense(dim)(h)])

    def transformer_block(x):
        dim = x.shape[-1]
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.MultiHeadAttention(4, dim // 4)(h, h))])
        h = layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        return layers.Add()([x, layers.Dropout(0.1)(layers.Dense(dim)(h))])

    def conv(x, filters, kernel, stride=1, activation=None):
        x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        return activation(x) if activation else x

    def inverted_residual(filters, stride=1):
        def build(x):
            h = conv(x, 6 * x.shape[-1], 1, activation=layers.ReLU(6.0))
            h = layers.DepthwiseConv2D(3, stride, padding="same", use_bias=False)(h)
            h = conv(layers.ReLU(6.0)(layers.BatchNormalization()(h)), filters, 1)
            return layers.Add()([x, h]) if h.shape == x.shape else h

        return build

    def bottleneck(filters, stride=1):
        def build(x):
            h = conv(x, filters, 1, stride, layers.ReLU())
            h = conv(conv(h, filters, 3, activation=layers.ReLU()), 4 * filters, 1)
            shortcut = x if h.shape == x.shape else conv(x, 4 * filters, 1, stride)
            return layers.ReLU()(layers.Add()([h, shortcut]))

        return build

    def stem(filters, stride=1):
        return lambda x: conv(x, filters, 3, stride, layers.ReLU())

    if name == "mixer":
        return (64, 128), 64, [mixer_block] * 6
    if name == "transformer":
        return (128, 128), 16, [transformer_block] * 6
    if name == "mobilenet":
        widths = [(16, 1), (16, 1), (24, 2), (24, 1), (24, 1), (32, 2), (32, 1), (32, 1)]
        return (32, 32, 3), 16, [stem(16), *(inverted_residual(f, s) for f, s in widths)]
    widths = [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1)]
    return (32, 32, 3), 16, [stem(32), *(bottleneck(f, s) for f, s in widths)]


def build(name, case, scale):
    """Returns the compiled model of a case and one batch."""
    import contextlib

    import keras
    import numpy as np

    class Checkpointed(keras.layers.Layer):
        """A block under ``jax.checkpoint``; its seeds and moving averages go in and out as
        values."""

        def __init__(self, block, policy):
            super().__init__()
            self.block, self.policy = block, policy

        def call(self, x, training=None):
            import jax

            def run(trainable, other, x):
                return self.block.stateless_call(trainable, other, x, training=training)

            trainable = [v.value for v in self.block.trainable_variables]
            other = [v.value for v in self.block.non_trainable_variables]
            y, updated = jax.checkpoint(run, policy=self.policy)(trainable, other, x)
            for variable, value in zip(self.block.non_trainable_variables, updated, strict=True):
                variable.assign(value)
            return y

    keras.utils.set_random_seed(0)
    shape, batch, blocks = blocks_of(name)
    batch *= scale
    policy = None
    if case.endswith("_saveable"):
        import jax

        policy = getattr(jax.checkpoint_policies, case)
    with keras.RematScope(mode="full") if case == "RematScope" else contextlib.nullcontext():
        x = inputs = keras.Input(shape)
        for make in blocks:
            block_input = keras.Input(x.shape[1:])
            block = keras.Model(block_input, make(block_input))
            if case == "recompute_grad":
                from compiled_step_tensorflow import Recomputed

                x = Recomputed(block)(x)
            else:
                x = Checkpointed(block, policy)(x) if policy else block(x)
        pool = (
            keras.layers.GlobalAveragePooling1D()
            if len(shape) == 2
            else keras.layers.GlobalAveragePooling2D()
        )
        model = keras.Model(inputs, keras.layers.Dense(10)(pool(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), loss)
    rng = np.random.default_rng(0)
    return model, (
        rng.normal(size=(batch, *shape)).astype("float32"),
        rng.integers(0, 10, batch).astype("int32"),
    )


def compile_ours(model, batch, budget, smallest):
    """Returns the compiled step for a budget, or for the smallest peak that can be planned, and its
    numbers."""
    from keras_remat.backends.jax import backend
    from keras_remat.core.limit import Limit
    from keras_remat.core.problem import Problem
    from keras_remat.errors import RematError
    from keras_remat.planning.request import PlanRequest, plan_for

    device, compilations = backend(), []
    batch = device.example_batch(model, batch)
    traced = device.trace(model, batch)
    problem = Problem(traced.graph, device.estimated_profile(traced))
    compiled_peak_bytes = device.memory.compiled_peak_bytes

    def noted(problem, schedule):
        compilations.append(compiled_peak_bytes(problem, schedule))
        return compilations[-1]

    device.memory.compiled_peak_bytes = noted

    def plan(limit):
        asked = {"problem": problem, "batch_size": len(batch[0]), "limit": Limit(limit)}
        return plan_for(PlanRequest.on(device, **asked, seconds=10.0))

    best = plan(budget) if not smallest else None
    resident = problem.profile.resident_bytes
    for _ in range(PLANS_FOR_LEAST if smallest else 0):
        try:
            best = plan(budget)
            budget = best.predicted.peak_bytes
        except RematError:  # a little less may be met all the same: what XLA makes of a plan jumps
            if best is None:
                budget = resident + int(1.2 * (budget - resident))
                continue
        budget = resident + int(0.85 * (budget - resident))
    if best is None:
        raise SystemExit("no plan near the floor")
    run = device.lower(traced, problem, best.solution.schedule)
    return run.compiled, {
        "tries": len(compilations),
        "recomputed": sum(best.solution.schedule.recomputed.values()),
    }


def run_case(name, case, scale, budget, steps):
    """Compiles and times one case in this process; returns a dictionary of numbers."""
    if ON_TENSORFLOW:
        import compiled_step_tensorflow

        model, batch = build(name, case, scale)
        return compiled_step_tensorflow.run_case(model, batch, case, budget, steps, LOSS_STEPS)
    import jax

    from keras_remat.backends.jax.lower import lower_plain
    from keras_remat.backends.jax.measure import added_bytes, device_statistic
    from keras_remat.backends.jax.private import state_values
    from keras_remat.backends.jax.trace import trace

    model, batch = build(name, case, scale)
    started, started_cpu, result = time.perf_counter(), time.process_time(), {}
    if case.startswith("ours"):
        compiled, result = compile_ours(model, batch, budget, case == "ours@min")
    else:
        compiled = lower_plain(trace(model, batch))
    result["compile_s"] = time.perf_counter() - started
    result["compile_cpu_s"] = time.process_time() - started_cpu
    sizes = compiled.memory_analysis()
    state = jax.tree.map(jax.numpy.copy, state_values(model))
    losses, wall, cpu = [], [], []
    batch = jax.device_put(batch)
    for _ in range(steps):
        t, c = time.perf_counter(), time.process_time()
        logs, state = compiled(state, batch)
        jax.block_until_ready((logs, state))
        wall.append(time.perf_counter() - t)
        cpu.append(time.process_time() - c)
        losses.append(float(logs["loss"]))
    return {
        **result,
        "temp": sizes.temp_size_in_bytes,
        "peak": sizes.argument_size_in_bytes + added_bytes(compiled),
        "time_s": statistics.median(wall[1:]),
        "cpu_s": min(cpu[1:]),
        "losses": losses[:LOSS_STEPS],
        "device_peak": device_statistic("peak_bytes_in_use"),
        "device": jax.devices()[0].device_kind,
    }


def in_process(name, case, scale, steps, budget=0):
    """Runs one case in a process of its own; returns its numbers, or ``{"error": …}``."""
    words = ("--run", case, "--models", name, "--scale", scale, "--steps", steps)
    try:
        return row_of("compiled_step.py", *words, "--budget", budget)
    except Failed as error:
        return {"error": str(error)[:150]}


def print_row(name, case, numbers, plain):
    """Prints one line of the table."""
    if "error" in numbers:
        print(f"{name:12} {case:22} {numbers['error']}", flush=True)
        return
    loss = difference(plain["losses"], numbers["losses"])
    print(
        f"{name:12} {case:22} {numbers['temp'] / MIB:9.1f} "
        f"{numbers['temp'] / plain['temp']:6.2f} {numbers['peak'] / MIB:9.1f} "
        f"{numbers['time_s'] * 1e3:9.1f} {numbers['time_s'] / plain['time_s']:6.2f} "
        f"{numbers['cpu_s'] / plain['cpu_s']:6.2f} "
        f"{numbers['compile_s']:8.1f} {numbers['compile_cpu_s'] / plain['compile_cpu_s']:6.2f} "
        f"{loss:8.1e}"
        + (
            f"   {numbers['tries']} compilations, {numbers['recomputed']} recomputed"
            if "tries" in numbers
            else ""
        ),
        flush=True,
    )


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--scale", type=int, default=1, help="times the batch")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        told = arguments.scale, arguments.budget, arguments.steps
        print(json.dumps(run_case(arguments.models[0], arguments.run, *told)))
        return
    print(
        f"{'model':12} {'case':22} {'temp MiB':>9} {'ratio':>6} {'peak MiB':>9} {'step ms':>9} "
        f"{'ratio':>6} {'cpu':>6} "
        f"{'compile s':>8} {'ratio':>5} {'loss':>8}",
        flush=True,
    )
    everything = {}
    for name in arguments.models:
        cases = everything[name] = {}

        def measure(case, budget=0, name=name, cases=cases):
            cases[case] = in_process(name, case, arguments.scale, arguments.steps, budget)
            print_row(name, case, cases[case], cases["plain"])

        measure("plain")
        plain = cases["plain"]
        if "error" in plain:
            continue
        for peer in arguments.peers:
            measure(peer)
        resident = (
            0 if ON_TENSORFLOW else plain["peak"] - plain["temp"]
        )  # a budget on TensorFlow is of temporary bytes
        measure("ours@half", resident + plain["temp"] // 2)
        for peer in arguments.peers:
            if "error" not in cases[peer] and cases[peer]["temp"] < 0.95 * plain["temp"]:
                measure(f"ours@{peer}", cases[peer]["temp" if ON_TENSORFLOW else "peak"])
        measure("ours@min", resident + plain["temp"] // 2)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
