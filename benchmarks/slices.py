"""Steps in slices: how large a batch trains with its own numbers, and how far below the floor.

    python benchmarks/slices.py --json rows.jsonl --output slices.md [--only batch:unet,floor:head]

``batch`` parts: the largest batch that trains in what plain ``fit`` takes for a batch of 8, with
the numbers of the whole batch. Beside it train plain ``fit`` of the same batch, which takes what it
wants, and gradient accumulation of batches of 8, which Keras's optimizers have; the table says how
far the losses of both are from plain's. ``floor`` parts: the least of some shares of a step's floor
(what its largest op needs, whatever the order) under which it trains in slices, and why it does not
under the next one. In both, plain ``fit`` of the same batch in reverse order says how far the
losses of two orders of summation are apart. ``card`` parts: a step on JAX that is planned and
compiled for an H100 at a share of its plain bytes; it does not run. ``bound`` parts: what any
slices of a larger batch add to its time at the least, by estimated times of ops, in what plain
``fit`` takes for a batch of 8. They are solved for, and nothing of them runs.

Every part is a process of its own, and its row is in the JSON file as soon as it is done; rows that
the file has are not measured again. Parts that run are measured with TensorFlow's oneDNN, without
it, or both (``--onednn``): its kernels need other scratch than TensorFlow's own. ``--small`` takes
small images and few steps. ``--check`` exits with 1 where a bound fails: losses as plain's, limits
kept, the shares that are aimed at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import (
    MIB,
    Failed,
    Report,
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

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

#: Losses of a step in slices and of plain ``fit`` differ by no more than this, or than so many
#: times what those of plain ``fit`` of the same batch in reverse order do.
_MOST_DIFFERENCE, _MOST_TIMES = 1e-3, 2.0
#: Shares of the floor that are tried, the largest first.
_SHARES = "0.8,0.6,0.5,0.4,0.3,0.2"


@dataclass(frozen=True)
class Part:
    """One row.

    Args:
        size, small: of the model: pixels, words or a length, and what ``--small`` takes.
        batch_size: of a floor's step.
        aim: the share of the floor that is aimed at, or the batch; 0 for none.
    """

    size: int
    small: int
    batch_size: int = 0
    aim: float = 0.0


PARTS = {
    "batch:resnet50": Part(96, 32, aim=64 * 8),
    "batch:unet": Part(128, 32),
    "floor:head": Part(256_000, 8192, 64, 0.2),
    "floor:contrastive": Part(96, 32, 64),
    "floor:vgg16": Part(256, 64, 8, 0.5),
    "floor:vgg16_pooled": Part(256, 64, 8, 0.5),
    "floor:unet": Part(256, 64, 8, 0.5),
    "floor:mobilenet": Part(128, 64, 16, 0.8),
    "floor:convlstm": Part(64, 32, 16, 0.4),
    "floor:gru": Part(256, 64, 32, 0.4),
    "card:head": Part(256_000, 32_768, 640, 0.2),
    "bound:resnet50": Part(96, 32),
    "bound:unet": Part(128, 32),
}

_BATCH_COLUMNS = (
    ("small_peak", "MiB"), ("batch_size", "d"), ("parts", "d"), ("peak", "MiB"),
    ("plain_peak", "MiB"), ("overhead", ".0%"), ("samples_per_s", ".1f"),
    ("plain_samples_per_s", ".1f"), ("accumulated_samples_per_s", ".1f"),
    ("difference", ".1e"), ("reversed_difference", ".1e"), ("accumulated_difference", ".1e"),
    ("onednn", "s"), ("date", "s"),
)  # fmt: skip
_BATCH_HEAD = (
    "model", "size", "plain 8: MiB", "batch", "slices", "MiB", "plain MiB", "added by plan",
    "samples/s", "plain", "accumulated", "loss off plain's", "plain's, reversed", "accumulated",
    "oneDNN", "date",
)  # fmt: skip
_FLOOR_COLUMNS = (
    ("batch_size", "d"), ("floor", "MiB"), ("resident", "MiB"), ("share", ".2f"), ("peak", "MiB"),
    ("parts", "d"), ("plain_peak", "MiB"), ("overhead", ".0%"), ("difference", ".1e"),
    ("reversed_difference", ".1e"), ("onednn", "s"), ("date", "s"),
)  # fmt: skip
_FLOOR_HEAD = (
    "model", "size", "batch", "floor MiB", "resident MiB", "share of floor", "MiB", "slices",
    "plain MiB", "added by plan", "loss off plain's", "plain's, reversed", "oneDNN", "date",
)  # fmt: skip
_CARD_COLUMNS = (
    ("batch_size", "d"), ("plain_peak", "MiB"), ("share", ".2f"), ("peak", "MiB"), ("parts", "d"),
    ("overhead", ".0%"), ("planned_s", ".0f"), ("date", "s"),
)  # fmt: skip
_CARD_HEAD = (
    "model", "size", "batch", "plain MiB", "share of plain", "MiB", "slices", "added by plan",
    "seconds to plan", "date",
)  # fmt: skip
_BOUND_COLUMNS = (
    ("small_peak", "MiB"), ("batch_size", "d"), ("resident", "MiB"), ("least_added", ".0%"),
    ("cuts", "d"), ("onednn", "s"), ("date", "s"),
)  # fmt: skip
_BOUND_HEAD = (
    "model", "size", "plain 8: MiB", "batch", "resident MiB", "added at the least", "cuts",
    "oneDNN", "date",
)  # fmt: skip
_TABLES = {
    "batch": (_BATCH_COLUMNS, _BATCH_HEAD),
    "floor": (_FLOOR_COLUMNS, _FLOOR_HEAD),
    "card": (_CARD_COLUMNS, _CARD_HEAD),
    "bound": (_BOUND_COLUMNS, _BOUND_HEAD),
}


def options_of(name: str, part: Part, given: argparse.Namespace) -> dict[str, Any]:
    """Returns what a part's process is asked for."""
    kind, _, model = name.partition(":")
    return {
        "part": kind, "model": model, "size": part.small if given.small else part.size,
        "aim": part.aim,
        "steps": given.steps, "solve_s": given.solve_s, "batch_size": part.batch_size,
        "first": given.first, "most": given.most,
        "shares": [float(share) for share in given.shares.split(",")],
    }  # fmt: skip


def is_of_run(row: dict[str, Any], given: argparse.Namespace) -> bool:
    """Returns whether a kept row was asked for as this run would ask for it."""
    part, _, _ = row["name"].partition("@")
    return part in PARTS and row.get("options") == options_of(part, PARTS[part], given)


def failures(name: str, part: Part, row: dict[str, Any]) -> list[str]:
    """Returns which bounds a row fails."""
    if "error" in row:
        return [f"{name}: {row['error']}"]
    found = []
    rounding = _MOST_TIMES * row.get("reversed_difference", 0.0)
    if row.get("difference", 0.0) > max(_MOST_DIFFERENCE, rounding):
        found.append(f"{name}: losses are {row['difference']:.1e} off plain's")
    if not name.startswith("batch:") and part.aim and row.get("share", 1.0) > part.aim:
        of = "the floor" if name.startswith("floor:") else "plain's bytes"
        found.append(f"{name}: {row.get('share', 1.0)} of {of}, aimed at {part.aim}")
    if name.startswith("batch:") and row.get("batch_size", 0) < part.aim:
        found.append(f"{name}: a batch of {row.get('batch_size', 0)}, aimed at {part.aim:.0f}")
    if name.startswith("batch:") and not row.get("kept", True):
        found.append(f"{name}: {row['peak'] / MIB:.1f} MiB, over {row['small_peak'] / MIB:.1f}")
    return found


def table(kind: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the lines of a kind's table."""
    columns, names = _TABLES[kind]
    lines = [
        line_of([row["model"], row["size"], *cells_of(row | one, columns)])
        for name, row in rows.items()
        for one in row.get("sizes", [{}])
        if name.startswith(f"{kind}:") and "error" not in row
    ]
    refused = [
        f"{row['model']}, oneDNN {row.get('onednn', '–')}: refused at {row['refused']}."
        for name, row in rows.items()
        if name.startswith(f"{kind}:") and "refused" in row
    ]
    return ["", head(names, left=1), *lines, *(["", *refused] if refused else [])] if lines else []


def settings(name: str, given: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields what a part's rows are kept under, and the environment that each is measured in."""
    if name.startswith("card:"):
        yield name, {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        return
    for onednn in given.onednn.split(","):
        yield f"{name}@{onednn}", {"TF_ENABLE_ONEDNN_OPTS": onednn}


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; returns 1 where ``--check`` finds a bound that fails."""
    parser = command_line(__doc__)
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--first", type=int, default=16, help="the first batch that is tried")
    parser.add_argument("--most", type=int, default=1024, help="the largest batch that is tried")
    parser.add_argument("--shares", default=_SHARES, metavar="A,B", help="of the floor")
    parser.add_argument("--onednn", default="0,1", metavar="A,B", help="of 0, 1; default 0,1")
    parser.add_argument("--solve-s", type=float, default=10.0, metavar="S")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="for one part")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound fails")
    given = parser.parse_args(argv)
    chosen = given.only.split(",") if given.only else list(PARTS)
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    rows = {row["name"]: row for row in kept(given.json) if is_of_run(row, given)}
    short = []
    for name in chosen:
        options = options_of(name, PARTS[name], given)
        for key, environment in settings(name, given):
            if key not in rows:
                try:
                    row = row_of(
                        "slices_case.py", json.dumps(options), timeout_s=given.timeout,
                        **environment,
                    )  # fmt: skip
                except Failed as error:
                    row = options | {"error": str(error)}
                date = time.strftime("%Y-%m-%d")
                rows[key] = row | {"name": key, "options": options, "date": date}
                keep(rows[key], given.json)
            short += failures(key, PARTS[name], rows[key])
    report = Report()
    tables = [line for kind in _TABLES for line in table(kind, rows)]
    report.add(f"{machine()}; {given.steps} steps", *tables)
    report.write(given.output)
    return failed(short, given.check)


if __name__ == "__main__":
    sys.exit(main())
