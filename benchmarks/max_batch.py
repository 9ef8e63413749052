"""The largest batch under a fixed memory limit: plain Keras, Chen's segment checkpoints, and the
search over schedules.

    python benchmarks/max_batch.py --output table.md --json results.json --check

The models are those of the Checkmate paper's section 6.4 (:mod:`paper_models`, which states
resolutions and departures). Plain Keras and every solver run in processes of their own
(:mod:`max_batch_case`), so that none finds what another left in the allocator's pool. The limit is
the allocator's measured peak of plain Keras at a batch of about ten, unless ``--limit`` gives one;
every byte of the device's allocator counts. At most one extra forward pass of overhead per sample
is allowed, by measured op times. ``auto`` is :func:`keras_remat.find_max_batch_size`, whose answer
is the column *searched*; what it has learned of kernels predicts the sizes that train here. Chen's
schedules go through the same search and verification. ``fit`` is a running ``fit`` with
``RematAutotune``: the size is the one it settles on, the measured peak the highest of all its
steps. Every batch in the table was trained, on data of its own: from the size the search said,
sizes go down while the measured peak is over the limit, then up by 3 % until it is; a size that
measures over it is planned again, twice at most. With ``--pool`` the limit is hard: TensorFlow's
BFC allocator has one region of so many MiB, as a GPU's has, and a size fails by running out of
memory. Rows are printed, and written to the JSON file, as they come; models that the JSON file has
already are not run again, so that a run can be stopped and continued.

``--backend torch`` trains on PyTorch, where the profiler tells what a CPU's steps take; Keras's own
step is the plain one. It has no pools.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from rows import (
    MIB,
    Failed,
    add_names,
    add_outcome,
    cells_of,
    command_line,
    error_of,
    failed,
    failure_line,
    geometric_mean,
    head,
    line_of,
    machine,
    printed_by,
    rows_of_run,
    write_run,
)

MODELS = ("VGG19", "MobileNet", "UNet", "ResNet50", "FCN8", "SegNet")
SOLVERS = ("chen_sqrt_n", "chen_greedy", "fit", "auto")
#: What ``--check`` demands of ``fit`` and ``auto`` over plain Keras: on one model at least, and as
#: geometric mean; and of every prediction.
BEST_RATIO, MEAN_RATIO, PREDICTION = 7.0, 5.0, 0.05
#: Seconds that the whole search of ResNet50 may take.
SEARCH_S = 60.0
#: The size that the search said may be off the largest that trains by this factor.
SEARCHED = 1.03
#: The peak of a step that ran out of memory, as :mod:`max_batch_case` tells it.
OUT_OF_MEMORY = 2**60


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_line(__doc__)
    add_names(result, "--models", MODELS)
    add_names(result, "--solvers", SOLVERS)
    result.add_argument("--backend", choices=("tensorflow", "torch"), default="tensorflow")
    result.add_argument(
        "--limit",
        type=float,
        metavar="MIB",
        help="memory limit; by default what plain Keras needs at the model's batch",
    )
    result.add_argument(
        "--plain-batch",
        type=int,
        metavar="N",
        help="plain Keras's batch whose peak is the limit; by default the model's, of about ten",
    )
    result.add_argument(
        "--pool",
        type=int,
        metavar="MIB",
        help="instead of a limit: a pool of BFC's in one region that ends there, as on a GPU",
    )
    result.add_argument(
        "--steps",
        type=int,
        default=2,
        help="timed steps per batch of a schedule, after a first one (default 2)",
    )
    result.add_argument(
        "--margin",
        type=float,
        default=0.0,
        help="share of the limit that the search leaves free (default 0)",
    )
    result.add_argument(
        "--search-time",
        type=float,
        default=60.0,
        metavar="S",
        help="time_limit_s of auto (default 60)",
    )
    result.add_argument(
        "--chen-time",
        type=float,
        default=20.0,
        metavar="S",
        help="for one of Chen's solvers (default 20)",
    )
    add_outcome(result, limited="process", tables="tables are", numbers=", after every row")
    return result


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a child is told beside its model."""
    limit = arguments.pool or arguments.limit
    return {
        "backend": arguments.backend,
        "limit_bytes": None if limit is None else int(limit * MIB),
        "pool": arguments.pool,
        "plain_batch": arguments.plain_batch,
        "steps": arguments.steps,
        "solvers": arguments.solvers,
        "margin": arguments.margin,
        "search_s": arguments.search_time,
        "chen_s": arguments.chen_time,
        "seed": arguments.seed,
    }


def rows_of(name: str, options: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The rows of one model, as its processes write them; one that fails adds a row with its error,
    and plain's is the last then."""
    plain: dict[str, Any] | None = None
    for row in _child(name, options | {"solvers": ()}, timeout_s):
        yield row
        plain = None if "error" in row else row
    for solver in options["solvers"] if plain is not None else ():
        last = solver == options["solvers"][-1]
        yield from _child(
            name, options | {"solvers": (solver,), "plain": plain, "predictions": last}, timeout_s
        )


def _child(name: str, options: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The rows of one process."""
    pool = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(options.get("pool")),
    }
    variables: dict[str, str] = pool if options.get("pool") else {}
    told = json.dumps(options | {"model": name})
    try:
        variables |= {"KERAS_BACKEND": options["backend"]}
        yield from printed_by("max_batch_case.py", told, timeout_s=timeout_s, **variables)
    except Failed as error:
        yield {"model": name, "row": "batch", "solver": "", "error": str(error)}


# -------------------------------------------------------------------- what a person reads

#: Heading of a column → key in a row, and how it is written.
COLUMNS = {
    "model": ("model", ""),
    "solver": ("solver", ""),
    "pixels": ("pixels", "d"),
    "limit MiB": ("limit_bytes", "MiB"),
    "batch": ("batch", "d"),
    "over plain": ("ratio", ".2f"),
    "searched": ("searched", "d"),
    "predicted": ("predicted_bytes", "MiB"),
    "measured": ("measured_bytes", "MiB"),
    "error": ("off", "+.1%"),
    "overhead predicted": ("overhead", ".1%"),
    "time per sample / plain": ("time_ratio", ".2f"),
    "search s": ("search_s", ".0f"),
    "fails at": ("failed_batch", "d"),
    "with MiB": ("failed_bytes", "MiB"),
}
PREDICTION_COLUMNS = {
    "model": ("model", ""),
    "profiled batch": ("profiled", "d"),
    "batch": ("batch", "d"),
    "predicted MiB": ("predicted_bytes", "MiB"),
    "measured MiB": ("measured_bytes", "MiB"),
    "error": ("off", "+.1%"),
}


def line(row: dict[str, Any]) -> str:
    """One row of either table."""
    if "error" in row:
        return failure_line(COLUMNS, row["model"], row["solver"], row["error"])
    told = {key: "out of memory" if n == OUT_OF_MEMORY else n for key, n in row.items()}
    if row.get("ended_by_clock"):
        told["search_s"] = f"{row['search_s']:.0f}, ended by the clock"
    columns = PREDICTION_COLUMNS if row["row"] == "prediction" else COLUMNS
    return line_of(cells_of(told | {"off": error_of(row)}, columns.values()))


def ratios(rows: list[dict[str, Any]], solver: str) -> dict[str, float]:
    """Model → measured batch over plain Keras's."""
    return {
        r["model"]: r["ratio"]
        for r in rows
        if r["row"] == "batch" and r["solver"] == solver and "error" not in r
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric means per solver and the prediction errors."""
    lines = []
    for solver in SOLVERS:
        found = ratios(rows, solver)
        if found:
            best = max(found, key=lambda name: found[name])
            lines.append(
                f"{solver}: geometric mean {geometric_mean(list(found.values())):.2f} × plain "
                f"over {len(found)} models, "
                f"at most {found[best]:.2f} ({best})"
            )
    errors = [abs(error_of(r)) for r in rows if r["row"] == "prediction"]
    if errors:
        lines.append(
            "Predicted against measured peak at batches not profiled: largest error "
            f"{max(errors):.1%}"
        )
    return "\n\n".join(lines)


def failed_bounds(rows: list[dict[str, Any]]) -> list[str]:
    """What falls short, one sentence each; empty when everything holds."""
    failures = [f"{r['model']} {r['solver']}: {r['error']}" for r in rows if "error" in r]
    for r in rows:
        case = f"{r['model']} {r.get('solver')}"
        if r["row"] == "prediction" and abs(error_of(r)) > PREDICTION:
            failures.append(
                f"{r['model']} at {r['batch']}: predicted peak is {error_of(r):+.1%} off, more "
                f"than {PREDICTION:.0%}"
            )
        if r["row"] != "batch" or "error" in r:
            continue
        if r["measured_bytes"] > r["limit_bytes"]:
            failures.append(
                f"{case}: measured {r['measured_bytes']} bytes, limit {r['limit_bytes']}"
            )
        if r["overhead"] > r.get("allowed_overhead", math.inf):
            failures.append(
                f"{case}: overhead {r['overhead']:.1%}, one forward pass is "
                f"{r['allowed_overhead']:.1%}"
            )
        if not r["batch"] / SEARCHED <= r.get("searched", r["batch"]) <= r["batch"] * SEARCHED:
            failures.append(f"{case}: the search said {r['searched']}, {r['batch']} is what trains")
        if r["model"] == "ResNet50" and r["solver"] == "auto" and r["search_s"] > SEARCH_S:
            failures.append(
                f"{case}: the search took {r['search_s']:.0f} s, more than {SEARCH_S:.0f}"
            )
        if r["failed_bytes"] is not None and r["failed_bytes"] <= r["limit_bytes"]:
            failures.append(f"{case}: batch {r['failed_batch']} trains too")
    searched = {
        r["model"]: r["searched"] for r in rows if r.get("solver") == "auto" and "searched" in r
    }
    for r in rows:
        least = searched.get(r["model"], 0) / SEARCHED
        if r.get("solver") == "fit" and r.get("batch", least) < least:
            failures.append(
                f"{r['model']}: fit trains {r['batch']}, the search said {searched[r['model']]}"
            )
    for solver in ("fit", "auto"):
        found = list(ratios(rows, solver).values())
        if max(found, default=0.0) < BEST_RATIO:
            best = max(found, default=0.0)
            failures.append(f"{solver}: the best ratio is {best:.2f}, less than {BEST_RATIO:g}")
        if not found or geometric_mean(found) < MEAN_RATIO:
            failures.append(
                f"{solver}: the geometric mean is {geometric_mean(found):.2f}, less than "
                f"{MEAN_RATIO:g}"
            )
    return failures


def document(header: str, rows: list[dict[str, Any]]) -> str:
    """Everything in Markdown."""
    tables = [
        "\n".join([head(columns), *(line(r) for r in rows if r["row"] == kind)])
        for kind, columns in (("batch", COLUMNS), ("prediction", PREDICTION_COLUMNS))
    ]
    return "\n\n".join([header, *tables, summary(rows)]) + "\n"


def finished_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier run without those of the models that it did not finish."""
    unfinished = {row["model"] for row in rows if "error" in row and not row["solver"]}
    finished = {row["model"] for row in rows if row["row"] == "prediction"} - unfinished
    return [row for row in rows if row["model"] in finished]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    arguments = parser().parse_args(argv)
    if arguments.pool and arguments.backend != "tensorflow":
        parser().error("--pool is a pool of TensorFlow's allocator: it needs --backend tensorflow")
    options = options_of(arguments)
    search = f"margin {arguments.margin:.0%}; search {arguments.search_time:g} s"
    header = f"{machine(arguments.backend)}; float32, SGD; {search}"
    print(f"{header}\n\n{head(COLUMNS)}", flush=True)
    rows = finished_rows(rows_of_run(arguments.json, options))
    for row in rows:
        print(line(row), flush=True)
    for name in arguments.models:
        if any(row["model"] == name for row in rows):
            continue
        for row in rows_of(name, options, arguments.timeout):
            rows.append(row)
            print(line(row), flush=True)
            write_run(arguments.json, header, options, rows)
    print(f"\n{summary(rows)}")
    if arguments.output:
        arguments.output.write_text(document(header, rows), encoding="utf-8")
    return failed(failed_bounds(rows), arguments.check)


if __name__ == "__main__":
    sys.exit(main())
