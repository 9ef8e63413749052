"""Programs that follow the advice of a refusal: is the limit that is advised one that does?

    python benchmarks/advice.py [--modes ordered,jax] [--seeds 40] [--seconds 30] [--together]
                                [--check] [--json FILE.jsonl] [--output FILE.md]

Forty random models of dense layers or of convolutions are trained under too small a limit, which is
refused, and then under the limit that the refusal advises. On TensorFlow that is done in order and
compiled, and on JAX. Each model has a process of its own, unless they are trained ``--together``:
then each finds the allocator's pool as those before it left it. A row is in the JSON file as soon
as it is done, and is not measured again.
``--check`` exits with 1 where a model is refused twice, or a step ends over the limit by more than
the input pipeline holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from rows import (
    HERE,
    Failed,
    Report,
    add_names,
    cells_of,
    command_line,
    failed,
    head,
    keep,
    kept,
    line_of,
    machine,
    printed_by,
)

#: Mode → its option ``compilation``, and the backend of Keras.
MODES = {
    "ordered": ("ordered", "tensorflow"),
    "compiled": ("compiled", "tensorflow"),
    "jax": ("auto", "jax"),
}
#: How far a step may end over the limit that was advised, as a share of it.
_MOST_OVER = 0.02
_COLUMNS = (("refused", "MiB"), ("advised", "MiB"), ("refusals", "d"), ("trained", "MiB"),
            ("peak", "MiB"))  # fmt: skip
_HEAD = ("mode", "model", "refused MiB", "advised", "refusals", "trained under", "peak")


def failures(row: dict[str, Any]) -> list[str]:
    """Returns which bounds a row fails."""
    name = f"{row['mode']} {row['seed']}"
    if "error" in row:
        return [f"{name}: {row['error']}"]
    if row["refusals"] > 1 or not row["trained"]:
        return [f"{name}: refused {row['refusals']} times"]
    if row["peak"] > (1 + _MOST_OVER) * row["trained"]:
        return [f"{name}: {row['peak']} bytes under a limit of {row['trained']}"]
    return []


def _child(mode: str, seeds: list[int], seconds: float) -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import keras
    import random_models

    import keras_remat

    if MODES[mode][1] == "tensorflow":
        keras_remat.enable_cpu_memory_stats()
    options: dict[str, Any] = {"compilation": MODES[mode][0], "solver_time_limit_s": seconds}
    for seed in seeds:
        print(json.dumps(random_models.follow_advice(seed, **options)), flush=True)
        keras.utils.clear_session()
        gc.collect()  # the next model has the memory for itself


def _measure(mode: str, seeds: list[int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of a mode, and one that says why where a process ends badly."""
    rows: list[dict[str, Any]] = []
    for part in [seeds] if given.together else [[seed] for seed in seeds]:
        words = ["--child", mode, "--list", ",".join(map(str, part)), "--seconds", given.seconds]
        more = {"KERAS_BACKEND": MODES[mode][1], "JAX_PLATFORMS": "cpu"}
        try:
            for row in printed_by("advice.py", *words, timeout_s=given.timeout, **more):
                rows.append(row | {"mode": mode})
                keep(rows[-1], given.json)
        except Failed as error:
            left = min(set(part) - {row["seed"] for row in rows}, default=part[-1])
            rows.append({"mode": mode, "seed": left, "error": str(error)})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns 1 where ``--check`` finds a bound that fails."""
    parser = command_line(__doc__)
    add_names(parser, "--modes", tuple(MODES))
    parser.add_argument("--seeds", type=int, default=40, help="how many models (default 40)")
    told = "for the solver, in each fit (default 30)"
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help=told)
    told = "all models of a mode in one process"
    parser.add_argument("--together", action="store_true", help=told)
    told = "for one process (default 1800)"
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help=told)
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound fails")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--list", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        _child(given.child, [int(seed) for seed in given.list.split(",")], given.seconds)
        return 0
    rows = {(row["mode"], row["seed"]): row for row in kept(given.json)}
    for mode in given.modes:
        left = [seed for seed in range(given.seeds) if (mode, seed) not in rows]
        for row in _measure(mode, left, given) if left else ():
            rows[mode, row["seed"]] = row
    chosen = [
        row for (mode, seed), row in rows.items() if mode in given.modes and seed < given.seeds
    ]
    report = Report()
    machines = dict.fromkeys(machine(MODES[mode][1]) for mode in given.modes)
    report.add(*machines, "", head(_HEAD, left=1))
    report.add(*(line_of([row["mode"], row["seed"], *cells_of(row, _COLUMNS)]) for row in chosen))
    short = [line for row in chosen for line in failures(row)]
    report.add("", f"{len(chosen) - len(short)} of {len(chosen)} train under what is advised.")
    report.write(given.output)
    return failed(short, given.check)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
