"""Overhead against budget, one line per solver: the plot everyone knows from the Checkmate paper, and the numbers behind it.

    python benchmarks/solvers.py run --graphs DIR [--solvers auto,dtr] [--budgets 0.9,0.5,floor] [--time-limit 30] [--output DIR]
    python benchmarks/solvers.py export MODEL.keras --batch-size 16 --output PROBLEM.json

``run`` takes every problem file of the folder (or of the environment variable ``KERAS_REMAT_GRAPHS``), every budget as a share of the
store-all peak (``floor`` means the floor × 1.02), and every solver, each in a fresh process, and reports overhead, bound, gap, seconds
and the peak memory of the solver's processes. Schedules are validated on the way out of the solver. It writes ``solvers.md``,
``solvers.json`` and one ``NAME.png`` per graph. ``export`` traces a Keras model's train step into a problem file with estimated costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_remat import serialize, solvers
from keras_remat.errors import InfeasibleBudgetError, MissingPackageError, ScheduleNotFoundError
from keras_remat.schedule import Schedule
from keras_remat.simulate import simulate

BUDGETS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,floor"
FLOOR_FACTOR = 1.02


def budget_bytes(budget: str, peak_bytes: int, floor_bytes: int) -> int:
    """Bytes of a budget given as a share of the store-all peak or as ``floor``."""
    return int(floor_bytes * FLOOR_FACTOR) if budget == "floor" else int(float(budget) * peak_bytes)


def solve_once(path: str, budget: str, solver: str, time_limit_s: float, seed: int) -> dict[str, Any]:
    """One row of the table, solved in this process."""
    problem = serialize.load_problem(path)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    problem = problem.with_budget(budget_bytes(budget, store_all.peak_bytes, problem.floor_bytes))
    row: dict[str, Any] = {
        "graph": Path(path).stem, "ops": len(problem.graph.ops), "budget": budget, "budget_bytes": problem.budget_bytes,
        "share": (problem.budget_bytes or 0) / store_all.peak_bytes, "solver": solver,
    }  # fmt: skip
    started = time.perf_counter()
    try:
        solution = solvers.solve(problem, solver=solver, time_limit_s=time_limit_s, seed=seed)
    except (InfeasibleBudgetError, ScheduleNotFoundError, MissingPackageError, ValueError) as error:
        row |= {"result": type(error).__name__}
    else:
        assert solution.usage is not None
        lower = solution.lower_bound_s
        row |= {
            "result": solution.status, "by": solution.solver, "peak_bytes": solution.usage.peak_bytes,
            "overhead": solution.usage.time_s / store_all.time_s - 1, "gap": solution.gap,
            "bound": None if lower is None else lower / store_all.time_s - 1,
        }  # fmt: skip
    own, children = (resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return row | {"seconds": time.perf_counter() - started, "memory_bytes": own, "child_memory_bytes": children}


def run(options: argparse.Namespace) -> None:
    """Solves everything and writes table, rows and plots."""
    folder = options.graphs or os.environ.get("KERAS_REMAT_GRAPHS")
    if folder is None:
        raise SystemExit("give --graphs DIR or set KERAS_REMAT_GRAPHS")
    paths = sorted(Path(folder).glob("*.json"))
    names = options.solvers.split(",") if options.solvers else list(solvers.SOLVERS)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    for path in paths:
        for budget in options.budgets.split(","):
            for name in names:
                arguments = [str(path), budget, name, str(options.time_limit), str(options.seed)]
                command = [sys.executable, __file__, "one", *arguments]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(table_line(rows[-1]), flush=True)
    (output / "solvers.json").write_text(json.dumps(rows, indent=1) + "\n")
    (output / "solvers.md").write_text("\n".join([*TABLE_HEAD, *map(table_line, rows)]) + "\n")
    for name in dict.fromkeys(row["graph"] for row in rows):
        plot([row for row in rows if row["graph"] == name], output / f"{name}.png")


TABLE_HEAD = (
    "| graph (ops) | budget | solver | result | overhead | bound | gap | seconds | solver memory |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table_line(row: dict[str, Any]) -> str:
    """A row in Markdown."""
    overhead, bound, gap = ("–" if row.get(key) is None else f"{100 * row[key]:.3f} %" for key in ("overhead", "bound", "gap"))
    memory = max(row["memory_bytes"], row["child_memory_bytes"]) / 2**20
    return (
        f"| {row['graph']} ({row['ops']}) | {row['budget']} | {row.get('by', row['solver'])} | {row['result']} | {overhead} | {bound} "
        f"| {gap} | {row['seconds']:.1f} | {memory:.0f} MiB |"
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Overhead against budget, one line per solver; budgets where a solver found nothing are missing from its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for solver in dict.fromkeys(row["solver"] for row in rows):
        points = sorted((row["share"], 100 * row["overhead"]) for row in rows if row["solver"] == solver and "overhead" in row)
        if points:
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=solver)
    best = {row["share"]: 100 * row["bound"] for row in rows if row["solver"] == "auto" and row.get("bound") is not None}
    if best:
        axes.plot(sorted(best), [best[x] for x in sorted(best)], linestyle=":", color="black", label="lower bound")
    axes.set_xlabel("budget / store-all peak")
    axes.set_ylabel("overhead in %")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_title(rows[0]["graph"])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def export(options: argparse.Namespace) -> None:
    """Writes the problem file of a saved Keras model's train step."""
    import keras

    from keras_remat.backends.base import load_backend
    from keras_remat.problem import Problem

    model = keras.saving.load_model(options.model)
    backend = load_backend()
    traced = backend.trace(model, backend.example_batch(model, options.batch_size))
    serialize.save_problem(
        Problem(traced.graph, backend.estimated_profile(traced), name=Path(options.model).stem), options.output
    )


def main() -> None:
    """The command line of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    bench = commands.add_parser("run")
    bench.add_argument("--graphs")
    bench.add_argument("--solvers", help="comma-separated; all of them when missing")
    bench.add_argument("--budgets", default=BUDGETS)
    bench.add_argument("--time-limit", type=float, default=30.0)
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--output", default="solver_benchmark")
    bench.set_defaults(run=run)
    exporting = commands.add_parser("export")
    exporting.add_argument("model")
    exporting.add_argument("--batch-size", type=int, required=True)
    exporting.add_argument("--output", required=True)
    exporting.set_defaults(run=export)
    one = commands.add_parser("one")
    for name, kind in (("path", str), ("budget", str), ("solver", str), ("time_limit", float), ("seed", int)):
        one.add_argument(name, type=kind)
    one.set_defaults(run=lambda o: print(json.dumps(solve_once(o.path, o.budget, o.solver, o.time_limit, o.seed))))
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
