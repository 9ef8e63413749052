"""How far compiled train steps on JAX are from the same steps in float64: whether a difference
between two of them is more than rounding.

Three steps of SGD from the same weights on the same batch, in a process each: in float64; Keras's
own compiled step (``plain``); ``jax.checkpoint`` around every block (``nothing_saveable``); this
package with every value kept (``kept``) and at half of plain's temporary memory (``half``).

``update`` is the distance of the first step's weight updates from float64's, relative, in the
2-norm over all weights; a loss's is relative too. The last column is the first step's updates
against plain's.

A ReLU's gradient jumps where its input changes sign, which rounding does to inputs near zero. With
``--smooth`` every ReLU is a softplus.

    python benchmarks/compiled_step_rounding.py --models resnet mobilenet
    python benchmarks/compiled_step_rounding.py --models resnet mobilenet --smooth
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import compiled_step
import numpy as np
from rows import printed_by

CASES = ("plain", "nothing_saveable", "kept", "half")
STEPS = 3


def trained(name, case, weights, smooth):
    """Trains a few steps from the weights of a file, which the first case writes; returns losses,
    and updates of the first step."""
    import jax
    import keras

    from keras_remat.backends.jax import backend
    from keras_remat.backends.jax.lower import lower, lower_plain
    from keras_remat.backends.jax.measure import added_bytes
    from keras_remat.backends.jax.private import state_values
    from keras_remat.core.problem import Problem
    from keras_remat.core.schedule import Schedule
    from keras_remat.planning.calibrated_solve import within_budget

    if case == "float64":
        jax.config.update("jax_enable_x64", True)
        keras.config.set_floatx("float64")
    if smooth:
        keras.layers.ReLU = lambda *_: keras.layers.Activation("softplus")
    model, batch = compiled_step.build(name, case, 1)
    if case == "plain":
        np.savez(weights, *model.get_weights())
    with np.load(weights) as stored:
        model.set_weights([stored[key] for key in stored.files])
    if case == "float64":
        batch = batch[0].astype("float64"), batch[1]
    device = backend()
    batch = device.example_batch(model, batch)
    traced = device.trace(model, batch)
    problem = Problem(traced.graph, device.estimated_profile(traced))
    if case == "kept":
        step = lower(traced, Schedule.store_all(problem.graph))
    elif case == "half":
        plain = lower_plain(traced)
        sizes = plain.memory_analysis()
        peak = sizes.argument_size_in_bytes + added_bytes(plain)
        limit = peak - sizes.temp_size_in_bytes // 2
        solver = device.auto_solver
        found = within_budget(problem, limit, device.memory, solver=solver, time_limit_s=10.0)
        step = lower(traced, found.schedule)
    else:
        step = lower_plain(traced)
    state = jax.tree.map(jax.numpy.copy, state_values(model))
    losses, updates = [], np.zeros(0)
    for number in range(STEPS):
        before = [np.asarray(v, "float64") for v in state[0]]
        logs, state = step(state, batch)
        losses.append(float(logs["loss"]))
        if number == 0:
            after = [np.asarray(v, "float64") for v in state[0]]
            updates = np.concatenate([(b - a).ravel() for a, b in zip(before, after, strict=True)])
    return np.array(losses), updates


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["resnet", "mobilenet"], choices=compiled_step.MODELS
    )
    parser.add_argument("--smooth", action="store_true", help="softplus for ReLU")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        case, folder = arguments.run
        losses, updates = trained(
            arguments.models[0], case, Path(folder, "weights.npz"), arguments.smooth
        )
        np.savez(Path(folder, case), losses=losses, updates=updates)
        return
    losses = "".join(f"{f'loss {i + 1}':>10}" for i in range(STEPS))
    print(f"{'model':12} {'case':18} {losses} {'update':>10} {'to plain':>10}")
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for case in ("plain", "float64", *CASES[1:]):
                words = ["--models", name, "--run", case, folder]
                words += ["--smooth"] if arguments.smooth else []
                for _ in printed_by("compiled_step_rounding.py", *words):
                    pass  # what it found is in the folder
                with np.load(Path(folder, f"{case}.npz")) as stored:
                    found[case] = stored["losses"], stored["updates"]
        true, update = found["float64"]
        for case in CASES:
            off = abs(found[case][0] - true) / abs(true)
            away = [
                np.linalg.norm(found[case][1] - u) / np.linalg.norm(u)
                for u in (update, found["plain"][1])
            ]
            print(
                f"{name:12} {case:18} {''.join(f'{x:10.1e}' for x in off)} {away[0]:10.1e} "
                f"{away[1]:10.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
