"""What twenty fits of one model in a row leave behind, with and without the callback.

    python benchmarks/fits_in_a_row.py [--fits 20] [--ways plain,callback] [--compiled]
                                       [--json FILE.jsonl] [--output FILE.md] [--check]

Runs on the framework of ``KERAS_BACKEND``. Every row is a process of its own, which trains four
dense layers of 512 with GELU, dropout and Adam for two epochs of four batches, with validation, so
many times over. The callback is new for every fit, and its limit leaves 0.7 of what the plain step
adds: each fit trains by a plan. After a fit the callback goes, garbage is collected, and counted
are: what is on the device (TensorFlow's allocator, JAX's live arrays, PyTorch's storages that a
tensor refers to), arrays, graphs that were traced, all objects of Python, and the process's own
bytes, of which what compilers and allocators keep for later is a part. The table has these after
the first fit, the second and the last: a new step is traced by the second, too.

``--check`` exits with 1 where the device holds more after the last fit with the callback than after
the first one, or where a fit had no plan.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from rows import (
    MIB,
    Failed,
    Report,
    add_names,
    cells_of,
    command_line,
    failed,
    head,
    keep,
    line_of,
    machine,
    printed_by,
)

#: Framework → the classes of its arrays, and of the graphs that it traces.
_KINDS = {
    "tensorflow": ("EagerTensor", "FuncGraph"),
    "jax": ("ArrayImpl", "ClosedJaxpr"),
    "torch": ("Tensor", "GraphModule"),
}
_SAMPLES, _BATCH, _WIDTH, _SHARE = 1024, 256, 512, 0.7
_COLUMNS = (("fit", "d"), ("device_bytes", "MiB"), ("arrays", "d"), ("graphs", "d"),
            ("objects", "d"), ("host_bytes", "MiB"), ("planned", "d"))  # fmt: skip
_HEAD = ("framework", "way", "fit", "device MiB", "arrays", "graphs", "objects", "process MiB",
         "fits by a plan")  # fmt: skip


def _device_bytes(framework: str, arrays: list[Any]) -> int:
    from keras_remat.backends.base import load_backend

    if framework != "torch":
        return int(load_backend().device.in_use_bytes())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in arrays}
    return sum(one.nbytes() for one in storages.values())


def _counted(framework: str) -> dict[str, int]:
    gc.collect()
    named: dict[str, list[Any]] = {name: [] for name in _KINDS[framework]}
    objects = gc.get_objects()
    for one in objects:
        for kind in type(one).__mro__:
            if kind.__name__ in named:
                named[kind.__name__].append(one)
                break
    arrays, graphs = named.values()
    if framework == "jax":  # the collector does not see them
        import jax

        arrays = jax.live_arrays()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return {
        "device_bytes": _device_bytes(framework, arrays),
        "arrays": len(arrays),
        "graphs": len(graphs),
        "objects": len(objects),
        "host_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _child(way: str, fits: int, is_compiled: bool) -> None:
    import keras
    import numpy as np

    import keras_remat

    framework = keras.backend.backend()
    if framework == "tensorflow":
        keras_remat.enable_cpu_memory_stats()
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((64,))
    for _ in range(4):
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(_WIDTH, activation="gelu")(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    how = {"jit_compile": is_compiled} if framework == "tensorflow" else {}
    model.compile("adam", "mse", **how)
    rng = np.random.default_rng(0)
    x, y = rng.random((_SAMPLES, 64), "float32"), rng.random((_SAMPLES, 1), "float32")
    options = {"batch_size": _BATCH, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
    batch = x[:_BATCH], y[:_BATCH]
    plan = keras_remat.make_plan(model, batch, "8GiB", profile="estimated", solver="greedy")
    resident = 3 * 4 * model.count_params()  # Adam has two slots for a weight
    limit = int(resident + _SHARE * (plan.store_all.peak_bytes - resident))
    del plan
    planned = 0
    for at in range(1, fits + 1):
        callbacks = []
        if way == "callback":
            callbacks = [keras_remat.RematAutotune(limit, "keep", margin=0.0, verbose=0)]
        model.fit(x, y, callbacks=callbacks, **options)
        planned += bool(callbacks and callbacks[0].plan)
        callbacks.clear()
        print(json.dumps({"fit": at, "planned": planned} | _counted(framework)), flush=True)


def main() -> int:
    """Runs both ways, and returns the exit status."""
    parser = command_line(__doc__)
    parser.add_argument("--fits", type=int, default=20)
    add_names(parser, "--ways", ("plain", "callback"))
    parser.add_argument("--compiled", action="store_true", help="compiles TensorFlow's steps")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound fails")
    arguments = parser.parse_args()
    framework = os.environ.get("KERAS_BACKEND", "tensorflow")
    mode = " compiled" if arguments.compiled and framework == "tensorflow" else ""
    report, short = Report(), []
    report.add(machine(framework), "", head(_HEAD, 2))
    for way in arguments.ways:
        words = ("--child", way, arguments.fits, int(arguments.compiled))
        rows = list(printed_by(Path(__file__).name, *words, KERAS_BACKEND=framework))
        for row in [*rows[:2], rows[-1]]:
            report.add(line_of((f"{framework}{mode}", way, *cells_of(row, _COLUMNS))))
        for row in rows:
            keep({"framework": framework + mode, "way": way} | row, arguments.json)
        more = rows[-1]["device_bytes"] - rows[0]["device_bytes"]
        if way == "callback" and more > 0:
            short.append(f"{way}: {more / MIB:.1f} MiB more than after the first fit")
        if way == "callback" and rows[-1]["planned"] < arguments.fits:
            short.append(f"{way}: {rows[-1]['planned']} of {arguments.fits} fits had a plan")
    report.write(arguments.output)
    return failed(short, arguments.check)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], int(sys.argv[3]), bool(int(sys.argv[4])))
    else:
        try:
            sys.exit(main())
        except Failed as error:
            sys.exit(str(error))
