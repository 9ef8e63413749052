"""What each step of ``auto`` is worth: the time of a step's schedule without it, against with all.

    python benchmarks/arms.py [--problems A,B] [--places 3,6] [--graphs DIR] [--budgets 0.7,0.5]
        [--arms A,B] [--time-limit 10] [--log FILE.jsonl]

Problems are RematBench's (``benchmarks/suite``), by name and by the place of a budget, and the
problem files of a folder, by the share of the store-all peak. A problem is solved with all steps,
and once more without each step that it would take. The clock of the solvers counts the seconds of
this process's own work, so that what else the machine does changes little; the process of CP-SAT
ends by its counted work.

Rows are printed as they come, and added to the log, from which a run goes on where it was. The
table has, for every arm, the mean and the largest loss of the schedule's time where both found
one, in percent of the time of a step, and how many schedules are lost with it. A loss below zero is
a gain: what another step finds first depends on what came before it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rows import HERE, command_line, head, keep, kept, line_of

from keras_remat import solvers
from keras_remat.core import deadline, serialize
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError, unknown_name
from keras_remat.solvers import auto
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.search import anneal

#: RematBench's problems that are looked at: one batch size of most networks.
PROBLEMS = (
    "unet_b32,mobilenet_b32,convnext_tiny_b64,resnet50_b32,mobilenet_v2_b64,efficientnet_b0_b32,"
    "gan_b64,mobilenet_v3_large_b32,inception_v3_b64,densenet121_b32,bert_base_b8,vit_base_b32,"
    "vgg16_b64,vgg19_b32"
)
ALL = "all steps"
#: Seconds in which one program of CP-SAT is solved on any machine.
LONG_S = 300.0


def _option(**changed: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(auto, "OPTIONS", replace(auto.OPTIONS, **changed))


def _method(name: str, does: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: mock.patch.object(auto._Search, name, does)


def _turn(*left_out: anneal.Cooling, from_best: bool = False) -> Callable[[], Any]:
    """Returns what leaves out one of the searches that take turns."""
    own = auto._Search._anneal

    def others(self: Any, coolings: Any, share: float, seed: int, **way: bool) -> None:
        if (coolings, way.get("from_best", False)) != (left_out, from_best):
            own(self, coolings, share, seed, **way)

    return _method("_anneal", others)


#: Arm → what leaves it out; the first ones are only there for graphs that are not made coarse.
SMALL: dict[str, Callable[[], Any]] = {
    "dtr": _option(dtr_scores=()),
    "backward": _method("_backward", lambda self, share: []),
    "window bound": _method("_window_bound", lambda self, cuts, deadline: None),
    "intervals": _method("_intervals", lambda self, known: None),
}
ARMS = SMALL | {
    "first annealing": _option(first_anneal=0.0),
    "turns of annealing from the best": _turn(anneal.COOL, from_best=True),
    "turns of loose annealing": _turn(anneal.LOOSE, anneal.COOL),
    "turns of stiff annealing": _turn(anneal.STIFF, anneal.COOL),
}


@contextmanager
def counting_own_work() -> Iterator[None]:
    """Has time limits count the seconds of this process's work."""
    start = cp_sat.Worker.start

    def started(worker: cp_sat.Worker, program: cp_sat.Program, **options: Any) -> None:
        start(worker, program, **{**options, "time_limit_s": LONG_S})

    clock = SimpleNamespace(perf_counter=time.process_time)
    with (
        mock.patch.object(deadline, "time", clock),
        mock.patch.object(cp_sat.Worker, "start", started),
    ):
        yield


def problems(options: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """Yields the problems with names, those of one budget after those of another."""
    index = json.loads((HERE / "suite" / "index.json").read_text())["problems"]
    for place in filter(None, options.places.split(",")):
        for name in filter(None, options.problems.split(",")):
            if name not in index:
                raise SystemExit(unknown_name("problem", name, index))
            with gzip.open(HERE / "suite" / "problems" / f"{name}.json.gz", "rt") as file:
                problem = serialize.problem_from_dict(json.load(file))
            budget = index[name]["budgets_bytes"][int(place)]
            yield f"{name}/{place}", problem.with_budget(budget)
    for share in filter(None, options.budgets.split(",")):
        for path in sorted(Path(options.graphs).glob("*.json")) if options.graphs else ():
            problem = serialize.load_problem(path)
            peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
            yield f"{path.stem}/{share}", problem.with_budget(int(float(share) * peak))


def solved(name: str, problem: Problem, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one solve."""
    row: dict[str, Any] = {"problem": name, "arm": arm, "time_limit_s": options.time_limit}
    try:
        with counting_own_work(), nullcontext() if arm == ALL else ARMS[arm]():
            found = solvers.solve(problem, time_limit_s=options.time_limit)
    except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
        return row | {"result": type(error).__name__, "overhead": None}
    assert found.usage is not None
    overhead = found.usage.time_s / problem.store_all_time_s - 1
    return row | {
        "result": found.status, "by": found.solver, "overhead": overhead,
        "solve_s": round(found.solve_time_s, 1),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table."""
    whole = {row["problem"]: row["overhead"] for row in rows if row["arm"] == ALL}
    yield head(("without", "problems", "mean loss %", "largest %", "not found"), left=1)
    for arm in ARMS:
        pairs = [
            (row["overhead"], whole[row["problem"]])
            for row in rows
            if row["arm"] == arm and whole.get(row["problem"]) is not None
        ]
        losses = [100 * (less - all_) / (1 + all_) for less, all_ in pairs if less is not None]
        if losses:
            lost = len(pairs) - len(losses)
            numbers = f"{mean(losses):.3f}", f"{max(losses):.3f}", lost
            yield line_of((arm, len(pairs), *numbers))


def main() -> None:
    """Solves what the log does not have, and prints the table."""
    parser = command_line(__doc__)
    parser.add_argument("--problems", default=PROBLEMS, metavar="A,B")
    parser.add_argument("--places", default="3,6", help="of budgets, 0 (roomy) to 7")
    parser.add_argument("--graphs", metavar="DIR", help="folder of more problem files")
    parser.add_argument("--budgets", default="0.7,0.5", help="for these, of the store-all peak")
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--log", type=Path, metavar="FILE.jsonl")
    options = parser.parse_args()
    rows = kept(options.log)
    done = {(row["problem"], row["arm"], row["time_limit_s"]) for row in rows}
    for name, problem in problems(options):
        large = len(problem.graph.needed) > auto.OPTIONS.large_ops
        for arm in (ALL, *options.arms.split(",")):
            if (large and arm in SMALL) or (name, arm, options.time_limit) in done:
                continue
            rows.append(solved(name, problem, arm, options))
            keep(rows[-1], options.log)
            print(json.dumps(rows[-1]), flush=True)
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
