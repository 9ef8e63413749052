"""What ``fit`` does on a busy machine: the largest batch, README's example and the quickstart.

    python benchmarks/busy.py [--tasks max,readme,plain,quickstart] [--busy 0,4] [--times 1]
                              [--allocators oneDNN,BFC] [--limit 200] [--json FILE.jsonl]
                              [--output FILE.md] [--check]

Every row is a process of its own, alone or beside processes that multiply matrices until it is
done. ``max``: MobileNetV2 of 64 pixels trains with ``batch_size="max"`` and no margin. Data are 640
images in batches of 16: an epoch keeps ten updates, so that 64 is the largest batch that is wanted.
``readme`` and ``quickstart`` run what README's first code block and ``examples/quickstart.py`` say;
the row is of their last ``fit``. ``plain`` is README's without the callback: Keras traces a step,
too. oneDNN is what TensorFlow has by default on newer x86-64 processors; BFC is the GPU's allocator
over host memory, with TensorFlow's own kernels.

A row has the batch that training ends with, the peak of the first step and of the highest, the
seconds of the search, of set-up and of the whole first step, and the machine's load average at the
end, in which whatever else runs counts, too. It is in the JSON file as soon as it is done, and is
not measured again.

``--check`` exits with 1 where a step is over the limit, or where the batch beside busy processes is
more than five per cent off the one found alone.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from rows import (
    MIB,
    Failed,
    Report,
    add_names,
    add_outcome,
    cells_of,
    command_line,
    failed,
    head,
    keep,
    kept,
    line_of,
    machine,
    row_of,
)

#: Allocator → what its processes have in their environment.
ALLOCATORS = {
    "oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "1"},
    "BFC": {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"},
}
#: How far batches may be apart, as a share.
_APART = 0.05
_LOADER, _SAMPLES, _EPOCHS, _PIXELS = 16, 640, 3, 64
_BUSY = "import numpy as np; a = np.ones((600, 600))\nwhile True: a @ a"
_COLUMNS = (("load", ".1f"), ("batch", "d"), ("limit_bytes", "MiB"), ("first_peak", "MiB"),
            ("peak", "MiB"), ("over", "d"), ("search_s", ".0f"), ("setup_s", ".0f"),
            ("first_s", ".0f"), ("seconds", ".0f"))  # fmt: skip
_HEAD = ("task", "allocator", "busy processes", "load", "batch", "limit MiB", "first peak",
         "highest peak", "steps over the limit", "search s", "set-up s",
         "first step s", "fit s")  # fmt: skip
_ROOT = Path(__file__).parent.parent


def _max(limit_mib: float) -> None:
    import keras
    import numpy as np

    import keras_remat

    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(
        weights=None, input_shape=(_PIXELS, _PIXELS, 3), classes=10
    )
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    rng, limit = np.random.default_rng(0), int(limit_mib * MIB)
    x = rng.random((_SAMPLES, _PIXELS, _PIXELS, 3), dtype=np.float32)
    y = rng.integers(0, 10, _SAMPLES).astype("int32")
    remat = keras_remat.RematAutotune(limit, "max", margin=0.0, verbose=0)
    model.fit(x, y, batch_size=_LOADER, epochs=_EPOCHS, verbose=0, callbacks=[remat])


def _readme(limit_mib: float, is_plain: bool = False) -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    exec(code.replace("callbacks=[remat]", "callbacks=[]") if is_plain else code, {})


def _plain(limit_mib: float) -> None:
    _readme(limit_mib, is_plain=True)


def _quickstart(limit_mib: float) -> None:
    runpy.run_path(str(_ROOT / "examples" / "quickstart.py"))["main"]([])


#: Task → what runs it, with the limit of the one that asks for it.
TASKS = {"max": _max, "readme": _readme, "plain": _plain, "quickstart": _quickstart}


def _child(task: str, limit_mib: float) -> None:
    import keras
    from watch import StepWatch

    import keras_remat

    keras_remat.enable_cpu_memory_stats()
    fit, fits = keras.Model.fit, []

    def watched(model: keras.Model, *data: Any, callbacks: list[Any], **options: Any) -> Any:
        watch, began = StepWatch(watched_epoch=None, batch_bytes=None), time.perf_counter()
        history = fit(model, *data, **options, callbacks=[*callbacks, watch])
        fits.append((callbacks, watch, time.perf_counter() - began))
        return history

    with mock.patch.object(keras.Model, "fit", watched):
        TASKS[task](limit_mib)
    print(json.dumps(_row(*fits[-1])), flush=True)


def _row(callbacks: list[Any], watch: Any, seconds: float) -> dict[str, Any]:
    peaks = watch.peaks
    row = {
        "first_peak": peaks[0],
        "peak": max(peaks),
        "over": 0,
        "first_s": watch.times_s[0],
        "seconds": seconds,
        "load": os.getloadavg()[0],
    }
    if not callbacks:
        return row
    report = callbacks[0].report
    texts = [event.message for event in report.events]
    searches = [text.split("sizes tried in ")[1] for text in texts if "sizes tried in" in text]
    return row | {
        "batch": report.batch_size,
        "limit_bytes": report.limit_bytes,
        "over": sum(peak > report.limit_bytes for peak in peaks),
        "search_s": float(searches[0].split(" s")[0]) if searches else None,
        "setup_s": report.setup_s,
        "events": texts,
    }


@contextmanager
def beside(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keeps so many processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Returns which bounds rows fail."""
    alone = {_kind(row): row.get("batch", 0) for row in rows if not row["busy"]}
    said = []
    for row in rows:
        name, found = f"{row['task']}, {row['allocator']} beside {row['busy']}", row.get("batch", 0)
        expected = alone.get(_kind(row), found)
        if "error" in row:
            said.append(f"{name}: {row['error']}")
        elif row["over"]:
            said.append(f"{name}: {row['over']} steps over the limit")
        elif abs(found - expected) > _APART * expected:
            said.append(f"{name}: a batch of {found}, and {expected} alone")
    return said


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["task"], row["allocator"]


def _measure(row: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    words = ["--child", row["task"], "--limit", given.limit]
    try:
        with beside(row["busy"]):
            told = row_of(
                "busy.py", *words, timeout_s=given.timeout, **ALLOCATORS[row["allocator"]]
            )
    except Failed as error:
        return row | {"error": str(error)}
    keep(row | told, given.json)
    return row | told


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 where ``--check`` finds a bound that fails."""
    parser = command_line(__doc__)
    add_names(parser, "--tasks", tuple(TASKS))
    add_names(parser, "--allocators", tuple(ALLOCATORS))
    told = "numbers of busy processes, separated by commas (default 0,4)"
    parser.add_argument("--busy", default="0,4", metavar="N,N", help=told)
    parser.add_argument("--times", type=int, default=1, metavar="N", help="each row (default 1)")
    told = "memory limit of the task max (default 200)"
    parser.add_argument("--limit", type=float, default=200.0, metavar="MIB", help=told)
    parser.add_argument("--child", choices=tuple(TASKS), help=argparse.SUPPRESS)
    add_outcome(parser, limited="fit", tables="table is", numbers=", after every row")
    given = parser.parse_args(argv)
    if given.child:
        _child(given.child, given.limit)
        return 0
    asked = product(given.tasks, given.allocators, map(int, given.busy.split(",")),
                    [given.limit], range(given.times))  # fmt: skip
    names = ("task", "allocator", "busy", "limit", "turn")
    known = {tuple(row[name] for name in names): row for row in kept(given.json)}
    report, rows = Report(), []
    report.add(machine("tensorflow"), "", head(_HEAD, left=2))
    for key in asked:
        row = known.get(key) or _measure(dict(zip(names, key, strict=True)), given)
        rows.append(row)
        report.add(line_of([row["task"], row["allocator"], row["busy"], *cells_of(row, _COLUMNS)]))
    report.write(given.output)
    return failed(failures(rows), given.check)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
