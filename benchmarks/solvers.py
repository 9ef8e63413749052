"""Overhead against budget, one line per solver: the plot everyone knows from the Checkmate paper,
and the numbers behind it.

    python benchmarks/solvers.py run --graphs DIR [--solvers auto,dtr] [--budgets 0.9,0.5,floor]
        [--time-limit 30] [--output DIR]
    python benchmarks/solvers.py coarse --graphs DIR [--budgets 0.7,0.5] [--time-limit 60]
    python benchmarks/solvers.py op-level [--models ResNet50,transformer] [--budgets 0.7,0.5]
        [--output DIR]
    python benchmarks/solvers.py layered --output DIR [--ops 100,500,1000] [--seeds 0,1,2]
    python benchmarks/solvers.py moves [--ops 100,250,500,1000] [--moves 1000000]
    python benchmarks/solvers.py export MODEL.keras --batch-size 16 --output PROBLEM.json

``run`` takes every problem file of the folder (or of the environment variable
``KERAS_REMAT_GRAPHS``), every budget as a share of the store-all peak (``floor`` means the floor ×
1.02), and every solver, each in a fresh process, and reports overhead, bound, gap, seconds and the
peak memory of the solver's processes. Schedules are validated on the way out of the solver. Every
row is printed and added to ``solvers.jsonl`` as soon as it is there, and rows that file already has
are not solved again, so that a run can be stopped and continued, and solvers can be run one after
the other; at the end it writes ``solvers.md`` and one ``NAME.svg`` per graph. ``coarse`` states
what coarsening loses: the interval search's overhead on the full graph and through its coarse
problem, with their proved bounds. ``op-level`` traces models of ``benchmarks/models.py`` (with
estimated costs), solves their train steps by ``auto`` and ``dtr`` at the same budgets, and prints
the table (written to ``op_level.md``) and the geometric mean of auto's overhead over dtr's, where
both have one. ``layered`` writes problem files of layered random graphs
(``benchmarks/suite/layered.py``), for ``run``. ``moves`` prints how many moves annealing makes in a
second. ``export`` traces a saved Keras model's train step into a problem file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rows import (
    MIB,
    Failed,
    TimedOut,
    command_line,
    geometric_mean,
    head,
    keep,
    kept,
    line_of,
    printed_by,
    row_of,
)
from suite.layered import layered

from keras_remat import solvers
from keras_remat.backends.base import Backend, load_backend
from keras_remat.core import serialize
from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, MissingPackageError, ScheduleNotFoundError
from keras_remat.solvers.engines import native
from keras_remat.solvers.orders.coarsen import Coarse, small_value_threshold
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.search import anneal, greedy, intervals

#: What makes a row of the table the same row.
KEY = ("graph", "budget", "solver", "time_limit_s", "seed")
BUDGETS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,floor"
FLOOR_FACTOR = 1.02
#: The solvers in the pictures: ours, and one of each kind of the published ones.
SHOWN = ("auto", "dtr", "chain_dp", "chen_greedy")


def budgeted(path: str | Path, budget: str) -> tuple[Problem, Usage]:
    """The problem of a file under a budget, which is a share of the store-all peak or ``floor``,
    and what it takes without one."""
    problem = serialize.load_problem(path)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    if budget == "floor":
        return problem.with_budget(int(problem.floor_bytes * FLOOR_FACTOR)), store_all
    return problem.with_budget(int(float(budget) * store_all.peak_bytes)), store_all


def solve_once(
    path: str, budget: str, solver: str, time_limit_s: float, seed: int
) -> dict[str, Any]:
    """One row of the table, solved in this process."""
    problem, store_all = budgeted(path, budget)
    row: dict[str, Any] = {
        "graph": Path(path).stem,
        "ops": len(problem.graph.ops),
        "budget": budget,
        "budget_bytes": problem.budget_bytes,
        "share": (problem.budget_bytes or 0) / store_all.peak_bytes,
        "solver": solver,
        "time_limit_s": time_limit_s,
        "seed": seed,
    }
    started = time.perf_counter()
    try:
        solution = solvers.solve(problem, solver=solver, time_limit_s=time_limit_s, seed=seed)
    except (InfeasibleBudgetError, ScheduleNotFoundError, MissingPackageError, ValueError) as error:
        row |= {"result": type(error).__name__}
    else:
        assert solution.usage is not None
        lower = solution.lower_bound_s
        row |= {
            "result": solution.status,
            "by": solution.solver,
            "peak_bytes": solution.usage.peak_bytes,
            "overhead": solution.usage.time_s / store_all.time_s - 1,
            "gap": solution.gap,
            "bound": None if lower is None else lower / store_all.time_s - 1,
        }
    own, children = (
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return row | {
        "seconds": time.perf_counter() - started,
        "memory_bytes": own,
        "child_memory_bytes": children,
    }


REFUSES_OVER_OPS = {
    "checkmate_milp": 150,
    "checkmate_milp_cbc": 150,
    "checkmate_lp": 150,
    "lp_rounding": 150,
    "dtr_random": 1000,
}
"""Solvers left out on larger graphs, where their programs of ops × ops variables (or their
thrashing) take the whole limit for nothing."""
KILLED_AFTER = 3.0
"""Time limits after which a solver that does not keep its own is killed; its row says so."""


def run(options: argparse.Namespace) -> None:
    """Solves everything and writes table, rows and plots; rows found in ``solvers.jsonl`` are not
    solved again."""
    folder = options.graphs or os.environ.get("KERAS_REMAT_GRAPHS")
    if folder is None:
        raise SystemExit("give --graphs DIR or set KERAS_REMAT_GRAPHS")
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise SystemExit(f"no problem files (*.json) in {folder}")
    names = options.solvers.split(",") if options.solvers else list(solvers.SOLVERS)
    rows = solve_all(paths, names, options)
    output = Path(options.output)
    lines = [*overview(rows), head(COLUMNS), *map(table_line, rows)]
    (output / "solvers.md").write_text("\n".join(lines) + "\n")
    for name in dict.fromkeys(row["graph"] for row in rows):
        plot([row for row in rows if row["graph"] == name], output / f"{name}.svg")


def solve_all(
    paths: Sequence[Path], names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of every graph, budget and solver, old ones of the output folder first; new ones are
    printed and added to its ``solvers.jsonl``."""
    log = Path(options.output) / "solvers.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = kept(log)
    done = {tuple(row[key] for key in KEY) for row in rows}
    print(head(COLUMNS), flush=True)
    for path in paths:
        for budget in options.budgets.split(","):
            for name in names:
                if (path.stem, budget, name, options.time_limit, options.seed) in done:
                    continue
                rows.append(solve_in_process(path, budget, name, options.time_limit, options.seed))
                keep(rows[-1], log)
                print(table_line(rows[-1]), flush=True)
    return [row for row in rows if row["graph"] in {path.stem for path in paths}]


def op_level(options: argparse.Namespace) -> None:
    """Solves traced train steps by ``auto`` and ``dtr`` and prints how their overheads compare."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / f"{name}.json" for name in options.models.split(",")]
    for path in paths:
        if not path.exists():
            for _ in printed_by("solvers.py", "trace", path.stem, path.resolve()):
                pass  # what it found is in the file
    rows = solve_all(paths, ("auto", "dtr"), options)
    found = {
        (row["graph"], row["budget"], row["solver"]): row["overhead"]
        for row in rows
        if "overhead" in row
    }
    ratios = [
        found[g, b, "auto"] / found[g, b, "dtr"]
        for g, b, name in found
        if name == "auto" and found.get((g, b, "dtr"))
    ]
    lines = [head(COLUMNS), *map(table_line, rows)]
    if ratios:
        mean = geometric_mean([max(ratio, 1e-9) for ratio in ratios])
        lines += [
            "",
            f"Overhead of auto over that of dtr, geometric mean of {len(ratios)} budgets: "
            f"{mean:.3f}",
        ]
        print(*lines[-2:], sep="\n")
    (output / "op_level.md").write_text("\n".join(lines) + "\n")


def trace(name: str, path: str) -> None:
    """Writes the problem file of the train step of a model of ``benchmarks/models.py``."""
    import models

    model, case = models.make(name)
    save_step(load_backend(), model, models.batches(case.steps(1), case.batch_size)[0], name, path)


def save_step(backend: Backend, model: Any, batch: Any, name: str, path: str) -> None:
    """Writes the problem file of a train step, with estimated costs."""
    traced = backend.trace(model, batch)
    problem = Problem(traced.graph, backend.estimated_profile(traced), name=name)
    serialize.save_problem(problem, path)


def solve_in_process(
    path: Path, budget: str, solver: str, time_limit_s: float, seed: int
) -> dict[str, Any]:
    """One row, solved in a process of its own, which is killed when it does not end."""
    row = dict(zip(KEY, (path.stem, budget, solver, time_limit_s, seed), strict=True))
    ops = len(serialize.load_problem(path).graph.ops)
    if ops > REFUSES_OVER_OPS.get(solver, ops):
        return row | {"ops": ops, "result": f"left out over {REFUSES_OVER_OPS[solver]} ops"}
    started, timeout_s = time.perf_counter(), KILLED_AFTER * time_limit_s + 20
    words = (path.resolve(), budget, solver, time_limit_s, seed)
    try:
        return row | row_of("solvers.py", "one", *words, timeout_s=timeout_s)
    except TimedOut:
        return row | {"ops": ops, "result": "killed", "seconds": time.perf_counter() - started}
    except Failed as error:
        raise SystemExit(f"{path}, {budget}, {solver}: {error}") from error


COLUMNS = (
    "graph (ops)", "budget", "solver", "result", "overhead", "bound", "gap", "seconds",
    "solver memory",
)  # fmt: skip


def table_line(row: dict[str, Any]) -> str:
    """A row in Markdown."""
    overhead, bound, gap = (
        "–" if row.get(key) is None else f"{100 * row[key]:.3f} %"
        for key in ("overhead", "bound", "gap")
    )
    seconds = f"{row['seconds']:.1f}" if "seconds" in row else "–"
    memory = "–"
    if "memory_bytes" in row:
        # auto has up to two processes of CP-SAT beside its own; the larger one is known
        memory = f"{(row['memory_bytes'] + 2 * row['child_memory_bytes']) / MIB:.0f} MiB"
    solver = row["solver"]
    if row.get("by", solver) != solver:
        solver += f" ({row['by']})"
    name, result = f"{row['graph']} ({row['ops']})", row["result"]
    return line_of([name, row["budget"], solver, result, overhead, bound, gap, seconds, memory])


def overview(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Per graph a table of overheads, a line per solver, and the proved bound; ∞ is proved
    infeasible, – not found, blank not tried."""
    lines: list[str] = []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        own = {(row["solver"], row["budget"]): row for row in rows if row["graph"] == graph}
        budgets = list(dict.fromkeys(budget for _, budget in own))
        shares = [row["share"] for (_, b), row in own.items() if b == "floor" and "share" in row]
        floor = f"floor × {FLOOR_FACTOR}" + (f" ({shares[0]:.3f})" if shares else "")
        names = [floor if budget == "floor" else budget for budget in budgets]
        lines.append(head([f"{graph}: overhead in % at", *names]))
        for solver in dict.fromkeys(solver for solver, _ in own):
            cells = (overview_cell(own.get((solver, budget), {})) for budget in budgets)
            lines.append(line_of([solver, *cells]))
        bounds = [own.get(("auto", budget), {}).get("bound") for budget in budgets]
        proved = ("" if bound is None else f"{100 * abs(bound):.2f}" for bound in bounds)
        lines += [line_of(["*proved bound*", *proved]), ""]
    return lines


def overview_cell(row: dict[str, Any]) -> str:
    """An overhead, bold where proved optimal, or why there is none."""
    if "overhead" in row:
        text = f"{100 * abs(row['overhead']):.2f}"  # never below zero but for the last bit of a sum
        return f"**{text}**" if row["result"] == "optimal" else text
    return {"InfeasibleBudgetError": "∞", "ScheduleNotFoundError": "–"}.get(
        row.get("result", ""), ""
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws overhead against budget: a line for each of :data:`SHOWN`, and the lower bound.

    Budgets where a solver found nothing are missing from its line.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for solver in SHOWN:
        points = sorted(
            (row["share"], 100 * row["overhead"])
            for row in rows
            if row["solver"] == solver and "overhead" in row
        )
        if points:
            width = 2.5 if solver == "auto" else 0.8
            axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=width, label=solver)
    best = {
        row["share"]: 100 * row["bound"]
        for row in rows
        if row["solver"] == "auto" and row.get("bound") is not None
    }
    if best:
        axes.plot(*zip(*sorted(best.items()), strict=True), ":k", label="lower bound")
    axes.set_xlabel("budget / store-all peak")
    axes.set_ylabel("overhead in %")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_title(rows[0]["graph"])
    axes.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def coarse(options: argparse.Namespace) -> None:
    """Prints the interval search's overhead on the whole graph and on its coarse problem, expanded;
    all on the same base order."""
    print(head(["graph (ops)", "budget", "big ops", "whole", "coarse", "loss"]))
    for path in sorted(Path(options.graphs or os.environ["KERAS_REMAT_GRAPHS"]).glob("*.json")):
        for budget in options.budgets.split(","):
            problem, store_all = budgeted(path, budget)
            base = base_orders(problem)[0]
            if simulate(problem, Schedule(base)).peak_bytes <= (problem.budget_bytes or 0):
                continue
            small = Coarse(problem, base, small_value_threshold(problem, base))
            whole, solved = best_by_intervals(problem, base, options.time_limit)
            part, part_solved = best_by_intervals(
                small.problem, tuple(range(len(small.ops))), options.time_limit, small
            )
            cells = [
                "–"
                if best is None
                else f"{100 * (best / store_all.time_s - 1):.3f} %{' (optimal)' if end else ''}"
                for best, end in ((whole, solved), (part, part_solved))
            ]
            loss = (
                "–"
                if whole is None or part is None
                else f"{100 * (part - whole) / store_all.time_s:+.3f} points"
            )
            name = f"{path.stem} ({len(problem.graph.needed)})"
            print(line_of([name, budget, len(small.ops), *cells, loss]), flush=True)


def best_by_intervals(
    problem: Problem, base: Sequence[int], time_limit_s: float, through: Coarse | None = None
) -> tuple[float | None, bool]:
    """Seconds of the interval search's best schedule, expanded if coarse, and whether its program
    was solved."""
    full = problem if through is None else through.full
    deadline = Deadline(time_limit_s)
    known = list(greedy.candidates(problem, deadline=Deadline(time_limit_s / 4), orders=[base]))
    solved = False

    def search() -> Iterator[tuple[int, ...]]:
        nonlocal solved
        depths = intervals.DEPTHS[:1]
        solved = yield from intervals.improve(
            problem, base, known, deadline=deadline, work=float("inf"), depths=depths
        )

    usages = [
        simulate(full, Schedule(order if through is None else through.expand(order)))
        for order in (*known, *search())
    ]
    fitting = [usage.time_s for usage in usages if usage.peak_bytes <= (full.budget_bytes or 0)]
    return min(fitting, default=None), solved


def moves(options: argparse.Namespace) -> None:
    """Prints how many moves of annealing are made in a second, once compiled."""
    if not native.is_compiled(native.LONGEST_S):
        raise SystemExit("Numba is not installed, or has no place for its machine code")
    print(head(["graph", "ops", "moves", "CPU seconds", "moves/s"]))
    for ops in map(int, options.ops.split(",")):
        problem = layered(ops, 0)
        peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
        problem = problem.with_budget(int(0.7 * peak))
        search = partial(
            anneal.improve, problem, None, deadline=NO_DEADLINE, compiled=True,
            coolings=(anneal.LOOSE,),
        )  # fmt: skip
        for _ in search(moves=anneal.CHUNK_MOVES):
            pass  # loads the machine code
        started = time.process_time()
        for _ in search(moves=options.moves):
            pass
        spent = time.process_time() - started
        rate = f"{options.moves / spent:,.0f}"
        print(line_of([problem.name, ops, options.moves, f"{spent:.2f}", rate]))


def write_layered(options: argparse.Namespace) -> None:
    """Writes problem files of layered random graphs, for ``run``."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for ops in map(int, options.ops.split(",")):
        for seed in map(int, options.seeds.split(",")):
            problem = layered(ops, seed)
            serialize.save_problem(problem, folder / f"{problem.name}.json")


def export(options: argparse.Namespace) -> None:
    """Writes the problem file of a saved Keras model's train step."""
    import keras

    model, backend = keras.saving.load_model(options.model), load_backend()
    batch = backend.example_batch(model, options.batch_size)
    save_step(backend, model, batch, Path(options.model).stem, options.output)


def main() -> None:
    """The command line of the module docstring."""
    parser = command_line(__doc__)
    commands = parser.add_subparsers(required=True)

    def command(
        name: str, start: Callable[[argparse.Namespace], None], **defaults: Any
    ) -> argparse.ArgumentParser:
        """Adds a command with options of these defaults."""
        added = commands.add_parser(name)
        for option, default in defaults.items():
            kind = type(default)
            added.add_argument(f"--{option.replace('_', '-')}", type=kind, default=default)
        added.set_defaults(run=start)
        return added

    solving = {"graphs": "", "budgets": BUDGETS, "time_limit": 30.0, "seed": 0}
    bench = command("run", run, **solving, output="solver_benchmark")
    bench.add_argument("--solvers", help="comma-separated; all of them when missing")
    command("coarse", coarse, graphs="", budgets="0.7,0.5,0.4", time_limit=60.0)
    names = "ResNet50,DenseNet121,transformer"
    tried = {"models": names, "budgets": "0.7,0.5,0.35", "time_limit": 30.0, "seed": 0}
    command("op-level", op_level, **tried, output="op_level_benchmark")
    command("moves", moves, ops="100,250,500,1000", moves=1_000_000)
    making = command("layered", write_layered, ops="100,500,1000", seeds="0,1,2")
    making.add_argument("--output", required=True)
    exporting = command("export", export)
    exporting.add_argument("model")
    exporting.add_argument("--batch-size", type=int, required=True)
    exporting.add_argument("--output", required=True)
    tracing = command("trace", lambda o: trace(o.name, o.path))
    tracing.add_argument("name")
    tracing.add_argument("path")
    one = command(
        "one",
        lambda o: print(json.dumps(solve_once(o.path, o.budget, o.solver, o.time_limit, o.seed))),
    )
    for name in ("path", "budget", "solver"):
        one.add_argument(name)
    one.add_argument("time_limit", type=float)
    one.add_argument("seed", type=int)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
