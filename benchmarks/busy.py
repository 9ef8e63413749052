"""The largest batch that ``fit`` finds, alone and beside processes that keep the machine busy.

    python benchmarks/busy.py [--busy 0,4] [--allocators oneDNN,BFC] [--limit 200]
                              [--json FILE.jsonl] [--output FILE.md] [--check]

MobileNetV2 of 64 pixels trains with ``batch_size="max"`` and no margin, in a process of its own for
each allocator and number of busy processes, which multiply matrices until it is done. oneDNN is
what TensorFlow has by default on newer x86-64 processors; BFC is the GPU's allocator over host
memory, with TensorFlow's own kernels. Data are 640 images in batches of 16: an epoch keeps ten
updates, so that 64 is the largest batch that is wanted. A row has the batch that training ends
with, the highest peak of all steps, the seconds of the search, and the machine's load average at
the end, in which whatever else runs counts, too. It is in the JSON file as soon
as it is done, and is not measured again. ``--check`` exits with 1 where a step is over the limit,
or the batch beside busy processes is more than five per cent off the one found alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
_COLUMNS = (("load", ".1f"), ("batch", "d"), ("peak", "MiB"), ("over", "d"), ("search_s", ".0f"),
            ("setup_s", ".0f"), ("seconds", ".0f"))  # fmt: skip
_HEAD = ("allocator", "busy processes", "load", "batch", "highest peak MiB", "steps over the limit",
         "search s", "set-up s", "fit s")  # fmt: skip


def _child(limit_mib: float) -> None:
    import time

    import keras
    import numpy as np
    from watch import StepWatch

    import keras_remat

    keras_remat.enable_cpu_memory_stats()
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(
        weights=None, input_shape=(_PIXELS, _PIXELS, 3), classes=10
    )
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    rng, limit = np.random.default_rng(0), int(limit_mib * MIB)
    x = rng.random((_SAMPLES, _PIXELS, _PIXELS, 3), dtype=np.float32)
    y = rng.integers(0, 10, _SAMPLES).astype("int32")
    remat = keras_remat.RematAutotune(limit, "max", margin=0.0, verbose=0)
    watch, began = StepWatch(watched_epoch=None, batch_bytes=None), time.perf_counter()
    model.fit(x, y, batch_size=_LOADER, epochs=_EPOCHS, verbose=0, callbacks=[remat, watch])
    report = remat.report
    search = [event.message for event in report.events if "sizes tried in" in event.message]
    row = {
        "batch": report.batch_size,
        "peak": max(watch.peaks),
        "over": sum(peak > limit for peak in watch.peaks),
        "search_s": float(search[0].split("sizes tried in ")[1].split(" s")[0]),
        "setup_s": report.setup_s,
        "seconds": time.perf_counter() - began,
        "load": os.getloadavg()[0],
        "events": [event.message for event in report.events],
    }
    print(json.dumps(row), flush=True)


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
    alone = {row["allocator"]: row.get("batch", 0) for row in rows if not row["busy"]}
    said = []
    for row in rows:
        name, found = f"{row['allocator']} beside {row['busy']}", row.get("batch", 0)
        expected = alone.get(row["allocator"], found)
        if "error" in row:
            said.append(f"{name}: {row['error']}")
        elif row["over"]:
            said.append(f"{name}: {row['over']} steps over the limit")
        elif abs(found - expected) > _APART * expected:
            said.append(f"{name}: a batch of {found}, and {expected} alone")
    return said


def _measure(allocator: str, busy: int, given: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"allocator": allocator, "busy": busy, "limit": given.limit}
    words = ["--child", "--limit", given.limit]
    try:
        with beside(busy):
            row |= row_of("busy.py", *words, timeout_s=given.timeout, **ALLOCATORS[allocator])
    except Failed as error:
        return row | {"error": str(error)}
    keep(row, given.json)
    return row


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 where ``--check`` finds a bound that fails."""
    parser = command_line(__doc__)
    add_names(parser, "--allocators", tuple(ALLOCATORS))
    told = "numbers of busy processes, separated by commas (default 0,4)"
    parser.add_argument("--busy", default="0,4", metavar="N,N", help=told)
    told = "memory limit (default 200)"
    parser.add_argument("--limit", type=float, default=200.0, metavar="MIB", help=told)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_outcome(parser, limited="fit", tables="table is", numbers=", after every row")
    given = parser.parse_args(argv)
    if given.child:
        _child(given.limit)
        return 0
    known = {(row["allocator"], row["busy"], row["limit"]): row for row in kept(given.json)}
    report, rows = Report(), []
    report.add(machine("tensorflow"), "", head(_HEAD, left=1))
    for allocator in given.allocators:
        for busy in map(int, given.busy.split(",")):
            row = known.get((allocator, busy, given.limit)) or _measure(allocator, busy, given)
            rows.append(row)
            report.add(line_of([allocator, busy, *cells_of(row, _COLUMNS)]))
    report.write(given.output)
    return failed(failures(rows), given.check)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
