"""Random fits of Keras's features, each trained plainly and with ``RematAutotune``.

    python benchmarks/random_fits.py [--backends tensorflow,jax,torch] [--first 0] [--fits 300]
                                     [--json FILE.jsonl] [--output FILE.md] [--check]

A seed draws a tiny model, its data, its optimizer, its callbacks and the callback's options
(``tests/random_fits.py``). Seeds take turns on the backends, TensorFlow and JAX unless others are
asked for; those of one backend train in one process. A line says of every fit whether it is
``equal`` to the plain one, has the ``same samples`` in the same order where batches were enlarged,
is ``refused`` with a reason, or is ``DIFFERENT``.
``plain fails`` where Keras's own fit ends with an error. A row is in the JSON file as soon as it is
done, and is not trained again; what was different is.
``--check`` exits with 1 where a fit is different.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rows import (
    HERE,
    Failed,
    Report,
    add_names,
    command_line,
    failed,
    keep,
    kept,
    machine,
    printed_by,
)

BACKENDS = ("tensorflow", "jax", "torch")
DIFFERENT = "DIFFERENT"
#: Variables of a child's environment. Unoptimized code compiles faster.
_VARIABLES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
#: Of a message, the characters that are kept.
_LONGEST_MESSAGE = 600


def _outcome(seed: int, path: Path) -> tuple[str, str]:
    """Trains a case; returns what came of it, and why."""
    from random_fit_checks import PlainFitFails, check

    from keras_remat.core.events import EventKind

    try:
        case, report = check(seed, path)
    except PlainFitFails as error:
        return "plain fails", str(error)
    except Exception as error:  # whatever the fit of a case raises is what is looked for
        return DIFFERENT, f"{type(error).__name__}: {error}"
    if case.is_refused:
        told = [event.message for event in report.events if event.kind == EventKind.UNMODIFIED]
        return "refused", told[0]
    return ("equal" if case.mode == "keep" else "same samples"), ""


def _child(seeds: list[int]) -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import keras

    for seed in seeds:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            outcome, why = _outcome(seed, Path(folder))
        row = {"seed": seed, "outcome": outcome, "why": " ".join(why.split())[:_LONGEST_MESSAGE]}
        print(json.dumps(row | {"seconds": time.perf_counter() - started}), flush=True)
        keras.utils.clear_session()
        gc.collect()


def _rows(backend: str, seeds: list[int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains seeds on a backend; a process that ends badly is different at the seed it was at."""
    rows: list[dict[str, Any]] = []
    while left := seeds[len(rows) :]:
        words = ["--child", ",".join(map(str, left))]
        try:
            for row in printed_by("random_fits.py", *words, KERAS_BACKEND=backend, **_VARIABLES):
                rows.append(_told(row | {"backend": backend}, given))
        except Failed as error:
            row = {"seed": seeds[len(rows)], "outcome": DIFFERENT, "why": str(error), "seconds": 0}
            rows.append(_told(row | {"backend": backend}, given))
    return rows


def _told(row: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    print(line(row), flush=True)
    keep(row, given.json)
    return row


def line(row: dict[str, Any]) -> str:
    """Returns what is said of one fit."""
    why = f": {row['why']}" if row["why"] else ""
    return f"{row['backend']} {row['seed']}: {row['outcome']}{why} ({row['seconds']:.0f} s)"


def main(argv: list[str] | None = None) -> int:
    """Prints the lines; returns 1 where ``--check`` finds a fit that is different."""
    parser = command_line(__doc__)
    add_names(parser, "--backends", BACKENDS)
    parser.set_defaults(backends=BACKENDS[:2])
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--fits", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a fit differs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        _child([int(seed) for seed in given.child.split(",")])
        return 0
    asked = range(given.first, given.first + given.fits)
    backend_of = {seed: given.backends[seed % len(given.backends)] for seed in asked}
    rows = {
        row["seed"]: row
        for row in kept(given.json)
        if row["outcome"] != DIFFERENT and row["backend"] == backend_of.get(row["seed"])
    }
    for backend in given.backends:
        left = [seed for seed in asked if backend_of[seed] == backend and seed not in rows]
        rows |= {row["seed"]: row for row in _rows(backend, left, given)}
    chosen = [row for _, row in sorted(rows.items()) if row["backend"] in given.backends]
    report = Report()
    report.add(*(machine(backend) for backend in given.backends), "")
    for backend in given.backends:
        told = Counter(row["outcome"] for row in chosen if row["backend"] == backend)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(told.items()))
        report.add(f"{backend}: {counts or 'none'}")
    reasons = Counter((row["backend"], row["why"]) for row in chosen if row["outcome"] == "refused")
    report.add("", *(f"- {count} on {backend}: {why}" for (backend, why), count in reasons.items()))
    report.write(given.output)
    return failed([line(row) for row in chosen if row["outcome"] == DIFFERENT], given.check)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
