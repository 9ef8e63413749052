"""Training on several devices, with ``tf.distribute.MirroredStrategy`` and with
``keras.distribution`` on JAX: memory of each, exchanges between them, losses, step time.

    python benchmarks/replicas.py [tensorflow] [planning] [jax] [processes] [--devices 4]
        [--share 0.5] [--output FILE.md]

The devices are made up by the host (logical CPUs; ``--xla_force_host_platform_device_count``), so
memory and the number of exchanges are those of real ones, and times are not. Every row is a process
of its own: a model plain, and with a limit of what is resident plus a share of what the plain step
adds. Rows for TensorFlow: :mod:`mirrored_case`. Rows of several processes on JAX are as many
processes, on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rows import HERE, MIB, Failed, cells_of, command_line, difference, head, line_of, row_of

sys.path.insert(0, str(HERE.parent / "tests"))
from own_process import free_port

ROWS = (("data", "mixer"), ("data", "convnet"), ("model", "mixer"))
#: Models that several processes train together, and how many of them there are.
SHARED, PROCESSES = ("mixer", "convnet"), 2
BATCH, STEPS = 64, 6
#: Models and numbers of replicas under ``MirroredStrategy``.
MIRRORED, REPLICAS = ("convnet", "transformer", "own_train_step", "wide"), (2, 4)
_ON_JAX = {
    "model": "s", "limit_mib": ".1f", "peak_mib": ".1f", "temp_ratio": ".2f",
    "all_reduces_plain": "d", "all_reduces": "d", "reduced_arrays_plain": "d",
    "reduced_arrays": "d", "loss_difference": ".1e", "time_ratio": ".2f",
}  # fmt: skip
#: Column of a table → its format.
COLUMNS = {
    "tensorflow": {
        "replicas": "d", "model": "s", "alone_mib": ".1f", "plain_mib": ".1f",
        "limit_mib": ".1f", "predicted_mib": ".1f", "peak_mib": ".1f", "recomputed": "d",
        "loss_difference": ".1e", "loss_noise": ".1e", "overhead_predicted": ".3f",
        "time_ratio": ".2f", "time_noise": ".2f",
    },
    "planning": {
        "replicas": "d", "ops_planned": "d", "trace_s": ".1f", "solve_s": ".1f", "write_s": ".1f",
    },
    "jax": {"distribution": "s", **_ON_JAX},
    "processes": {"processes": "d", **_ON_JAX},
}  # fmt: skip
HEADINGS = {
    "tensorflow": """## `tf.distribute.MirroredStrategy`

Logical CPUs, 12 samples for each replica in every step, 20 steps. Measured bytes are one replica's
part of the allocator that all share: what is in use, divided by their number. More replicas than
cores do not peak together, so that this is less than one replica takes alone (`alone_mib`, the
bytes alive in its step, or `plain_mib` where that is more; the limit is made of it). The model
*wide* has many weights: plain steps exchange their gradients in one buffer, ours in packs. What
Keras keeps of the models of earlier fits is left out. `loss_difference` is the largest relative
one of all steps to plain Mirrored's, `loss_noise` that of two plain fits; `time_ratio` is the
median step's over the faster plain fit's, `time_noise` that of the slower plain fit.""",
    "planning": """## What planning takes

The transformer of the table above: seconds of processor time to trace all replicas and cut one out,
to solve (`greedy`), and to write the step for all.""",
    "jax": """## `keras.distribution` on JAX

Devices that the host makes up. `temp_ratio` is the compiled step's temporary memory on one device
over plain's. An all-reduce may be of several arrays: XLA puts together what exists at one time, the
gradients of a plain step for instance. `reduced_arrays` counts the arrays.""",
    "processes": """## Several processes on JAX

`DataParallel` over processes on one machine, with the same devices in all. What one process
measured, which is what all did.""",
}
INTRODUCTION = """# Replicas

`benchmarks/replicas.py`. The limit leaves {share:.0%} of what the plain step adds to the resident
bytes. All devices share the cores of one CPU: times say little."""


def measured(kind: str, name: str, share: float, rank: int = 0, port: int = 0) -> dict[str, Any]:
    """One row, in this process, or in one of several that meet at a port."""
    import jax
    import jax_models
    import keras
    from compiled_steps import CompiledSteps

    import keras_remat
    from keras_remat.backends.jax import device

    steps = CompiledSteps()
    processes = PROCESSES if kind == "processes" else 1
    if processes > 1:
        keras.distribution.initialize(",".join([f"localhost:{port}"] * processes), processes, rank)
    if kind != "model":
        distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    else:
        mesh = keras.distribution.DeviceMesh((2, jax.device_count() // 2), ["batch", "model"])
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*dense.*kernel"], layouts[".*dense.*bias"] = (None, "model"), ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)

    def fit(remat: Any) -> dict[str, Any]:
        steps.newest = None
        keras.utils.set_random_seed(0)
        model = getattr(jax_models, name)(blocks=4)
        data = [array[rank::processes] for array in jax_models.batch(model, STEPS * BATCH)]
        history = model.fit(
            *data, batch_size=BATCH // processes, shuffle=False, verbose=0, epochs=2,
            callbacks=[remat],
        )  # fmt: skip
        last = remat.report.epochs[-1]
        return {
            "losses": history.history["loss"],
            "temp": steps.temp_bytes,
            "all_reduces": len(steps.reduced_arrays),
            "reduced_arrays": sum(steps.reduced_arrays),
            "peak": last.peak_bytes,
            "step_s": last.step_time_s / last.steps,
        }

    plain = fit(keras_remat.RematAutotune(None, "keep", verbose=0))
    resident = device.Device().in_use_bytes()
    limit = int(resident + share * (plain["peak"] - resident))
    ours = fit(keras_remat.RematAutotune(limit, "keep", margin=0.0, verbose=0))
    return {
        **({"processes": processes} if processes > 1 else {"distribution": kind}),
        "model": name,
        "limit_mib": limit / MIB,
        "peak_mib": ours["peak"] / MIB,
        "temp_ratio": ours["temp"] / plain["temp"],
        "all_reduces_plain": plain["all_reduces"],
        "all_reduces": ours["all_reduces"],
        "reduced_arrays_plain": plain["reduced_arrays"],
        "reduced_arrays": ours["reduced_arrays"],
        "loss_difference": difference(plain["losses"], ours["losses"]),
        "time_ratio": ours["step_s"] / plain["step_s"],
    }


def rows_of(framework: str, devices: int, share: float) -> Iterator[dict[str, Any]]:
    """Every row of a framework, each measured in a process of its own."""
    of_one = devices // PROCESSES if framework == "processes" else devices
    flags = f"--xla_force_host_platform_device_count={of_one}"
    variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    own = ["replicas.py", "--share", share, "--row"]
    cases: dict[str, list[tuple[dict[str, Any], list[Any]]]] = {
        "tensorflow": [
            ({"replicas": count, "model": name}, ["mirrored_case.py", name, count, share])
            for count in REPLICAS
            for name in MIRRORED
        ],
        "planning": [
            ({"replicas": count}, ["mirrored_case.py", "planning", count, share])
            for count in (1, 2, 4, 8)
        ],
        "jax": [({"distribution": kind, "model": name}, [*own, kind, name]) for kind, name in ROWS],
        "processes": [
            ({"processes": PROCESSES, "model": name}, [*own, framework, name]) for name in SHARED
        ],
    }
    measure = partial(row_of, **variables) if framework in ("jax", "processes") else row_of
    for row, command in cases[framework]:
        port = free_port()
        count = PROCESSES if framework == "processes" else 1
        ranks = [["--rank", rank, "--port", port] for rank in range(count)] if count > 1 else [[]]
        try:
            with ThreadPoolExecutor(count) as pool:
                started = [pool.submit(measure, *command, *rank) for rank in ranks]
                first, *_ = [each.result() for each in started]
                yield first
        except Failed as error:
            yield row | {"error": str(error)}


def table(framework: str, rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a framework in Markdown."""
    columns = COLUMNS[framework]
    lines = [head(columns)]
    for row in rows:
        lines.append(line_of(cells_of(row, columns.items())) + row.get("error", ""))
    return "\n".join(lines)


def main() -> int:
    """Every row, each in a process of its own; the status is 1 where one failed."""
    parser = command_line(__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="tensorflow|planning|jax|processes")
    parser.add_argument("--devices", type=int, default=4, help="of JAX")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(*arguments.row, arguments.share, arguments.rank, arguments.port)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {}
    for framework in arguments.frameworks or COLUMNS:
        for row in rows_of(framework, arguments.devices, arguments.share):
            found.setdefault(framework, []).append(row)
            print(row, flush=True)
            if arguments.output:
                parts = [f"{INTRODUCTION.format(share=arguments.share)}"]
                parts += [
                    f"{HEADINGS[name]}\n\n{table(name, rows)}" for name, rows in found.items()
                ]
                arguments.output.write_text("\n\n".join(parts) + "\n")
    return int(any("error" in row for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
