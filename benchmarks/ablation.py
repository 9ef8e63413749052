"""What constants of the search are worth: the same problems with other values of each.

    python benchmarks/ablation.py looks [--output FILE.md]
    python benchmarks/ablation.py native [--output FILE.md]
    python benchmarks/ablation.py late [--output FILE.md]
    python benchmarks/ablation.py gaps [--alive 89,85,81] [--output FILE.md]
    KERAS_BACKEND=torch python benchmarks/ablation.py settings [--output FILE.md]

``looks``: greedy eviction looks up what an eviction costs at the op that makes a value, and then at
so many times as many missing ops, until another one costs less
(:mod:`keras_remat.solvers.search.eviction`). Problems are RematBench's at their lowest budget, and
a U-Net of 256 px in 8 slices at shares of the floor of its whole ops. The table has the steps an op
and what the schedule adds; steps are counted work, the same on every machine.

``native``: a pass of greedy eviction over each of these problems as Python, and as machine code, by
the seconds of both; the orders are the same.

``late``: ``auto`` is asked for half a second, as it is where the time for a plan is over, for
limits at which that U-Net in slices has no schedule. The table has the seconds that it takes with
one look for a first schedule, and with all of them (``late_s`` in :mod:`keras_remat.solvers.auto`).

``gaps``: ops of that U-Net's schedules of so many MiB alive change places until no more than 0.6 of
that floor is in use, by the replay of the allocator
(:mod:`keras_remat.backends.tensorflow.memory.gaps`). The table has the MiB in use at the peak after
one search, a dash where it finds nothing, and the seconds of all searches.

``settings``: on PyTorch a step is recorded anew when a callback has set what it may read in Python
(:mod:`keras_remat.backends.torch.swap`). The table has the seconds of a recording over those of a
step, and so the time of a fit where every tenth step is recorded, over that where none is.

Kernels' scratch, which differs from CPU to CPU, is left out of the U-Net's steps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from rows import HERE, MIB, Report, command_line, head, line_of, machine

from keras_remat.backends.base import load_backend
from keras_remat.core import serialize
from keras_remat.core.deadline import NO_DEADLINE
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import is_sliced
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.planning.slice_candidates import candidates
from keras_remat.planning.slice_costs import costs_of
from keras_remat.solvers import auto, solve
from keras_remat.solvers.engines import native as engine
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.search import anneal, eviction, greedy

#: RematBench's problems, of few and of many ops.
_PROBLEMS = ("unet_b8", "mobilenet_b32", "convnext_tiny_b32", "resnet50_b32", "gpt2_base_b4")
#: Of the floor of the U-Net's whole ops.
_SHARES, _LIMIT_SHARE = (0.7, 0.6, 0.56, 0.53), 0.6
#: Steps an op for the U-Net's schedules.
_PATIENCE = 200
#: Of that floor, where there is no schedule; and the seconds of a late solve.
_LATE_SHARES, _LATE_SOLVE_S = (0.34, 0.3), 0.5
#: Of the passes that are timed.
_POLICY = eviction.Policy(1.0, 0.5)
#: Values of ``LOOKED_AT_AGAIN``; with the last one all is looked at at once.
_TIMES = (2, 6, 20, 10**9)
#: Values of the constants of ``gaps``: as they are, and with one at another value.
_GAPS: dict[str, dict[str, int]] = {
    "as it is": {},
    "30 tries": {"_TRIES": 30},
    "300 tries": {"_TRIES": 300},
    "farthest 2": {"_FARTHEST": 2},
    "farthest 40": {"_FARTHEST": 40},
}


def unet_in_slices() -> tuple[int, Problem]:
    """Returns the floor of the whole U-Net's step, and its step in 8 slices."""
    import slices_case

    backend = load_backend()
    bench = slices_case.Bench({"model": "unet", "size": 256, "steps": 1})
    model = bench.model()
    traced = backend.trace(model, backend.example_batch(model, bench.data(8)))
    whole = without_scratch(Problem(traced.graph, backend.estimated_profile(traced)))
    if traced.slicer is None:
        raise LookupError("the step does not run in slices")
    found = candidates(whole, traced.slicer.rules, int(_LIMIT_SHARE * whole.floor_bytes))
    slicing = next(one for one in found if one.parts == 8)
    sliced = costs_of(traced.slicer.sliced(slicing), whole, backend.estimated_profile)[1]
    return whole.floor_bytes, without_scratch(sliced)


def without_scratch(problem: Problem) -> Problem:
    """Returns a problem whose kernels need no scratch."""
    workspace = (0,) * len(problem.graph.ops)
    return replace(problem, profile=replace(problem.profile, op_workspace_bytes=workspace))


def looked_at() -> Iterator[tuple[str, Problem]]:
    """Yields names, and problems with a budget."""
    suite = HERE / "suite"
    index = json.loads((suite / "index.json").read_text())["problems"]
    for name in _PROBLEMS:
        text = gzip.decompress((suite / "problems" / f"{name}.json.gz").read_bytes())
        problem = serialize.problem_from_dict(json.loads(text))
        yield name, problem.with_budget(index[name]["budgets_bytes"][-1])
    floor, problem = unet_in_slices()
    for share in _SHARES:
        yield f"unet in 8 slices, {share}", problem.with_budget(int(share * floor))


class _Counted(eviction.Eviction):
    """Counts the steps of all passes."""

    steps_of_all = 0

    def run(self, limit: int, *, compiled: bool | None = None) -> tuple[int, ...]:
        try:
            return super().run(limit, compiled=compiled)
        finally:
            _Counted.steps_of_all += self.steps


def looks(report: Report, given: argparse.Namespace) -> None:
    """Reports steps and overheads by how many times as many ops a further look is at."""
    greedy.Eviction = _Counted  # type: ignore[misc]
    names = ["all at once" if times == 10**9 else f"{times} times" for times in _TIMES]
    report.add("", head(["problem", "ops", *names], left=1))
    spent_s = dict.fromkeys(_TIMES, 0.0)
    for name, problem in looked_at():
        cells = []
        for times in _TIMES:
            eviction.LOOKED_AT_AGAIN, _Counted.steps_of_all = times, 0
            began_s = time.process_time()
            orders = greedy.candidates(
                problem, deadline=NO_DEADLINE, max_steps=greedy.steps_limit(10.0)
            )
            found = list(islice(orders, 1 if is_sliced(problem.graph) else None))
            spent_s[times] += time.process_time() - began_s
            steps = _Counted.steps_of_all / len(problem.graph.ops)
            cells.append(f"{steps:.1f}, {added(problem, found)}")
        report.add(line_of([name, len(problem.graph.ops), *cells]))
    report.add(line_of(["seconds of all", "", *(f"{spent_s[times]:.0f}" for times in _TIMES)]))


def added(problem: Problem, found: Sequence[Sequence[int]]) -> str:
    """Returns what the last of some orders adds to the time of a step, as it is written."""
    if not found:
        return "none"
    seconds = simulate(problem, Schedule(tuple(found[-1]))).time_s
    return f"+{seconds / problem.store_all_time_s - 1:.1%}"


def native(report: Report, given: argparse.Namespace) -> None:
    """Reports the seconds of a pass of greedy eviction, as Python and as machine code."""
    if not engine.is_compiled(engine.LONGEST_S):
        raise SystemExit("Numba is not installed, or has no place for its machine code")
    anneal.warm_up()
    report.add("", head(["problem", "ops", "Python, s", "machine code, s", "orders"], left=1))
    for name, problem in looked_at():
        base, spent_s, found = base_orders(problem)[-1], [], []
        for compiled in (False, True):
            run = eviction.Eviction(problem, base, _POLICY, NO_DEADLINE, float("inf"))
            began_s = time.process_time()
            try:
                found.append(run.run(_PATIENCE * len(base), compiled=compiled))
            except eviction.StuckError as error:
                found.append((str(error),))
            spent_s.append(f"{time.process_time() - began_s:.3f}")
        equal = "equal" if found[0] == found[1] else "DIFFERENT"
        report.add(line_of([name, len(problem.graph.ops), *spent_s, equal]))


def late(report: Report, given: argparse.Namespace) -> None:
    """Reports the seconds of a short solve that finds nothing, with one look and with all."""
    engine.is_compiled(engine.LONGEST_S)
    kept, (floor, problem) = auto.OPTIONS, unet_in_slices()
    report.add("", head(["limit", "one look, s", "all looks, s"], left=1))
    for share in _LATE_SHARES:
        within, spent_s = problem.with_budget(int(share * floor)), []
        for late_s in (kept.late_s, 0.0):
            auto.OPTIONS = replace(kept, late_s=late_s)
            began_s = time.process_time()
            found = None
            with suppress(ScheduleNotFoundError):
                found = solve(within, solver="auto", time_limit_s=_LATE_SOLVE_S)
            seconds = time.process_time() - began_s
            spent_s.append(f"{seconds:.1f}{'' if found is None else ', found'}")
        report.add(line_of([f"{share} of the floor", *spent_s]))
    auto.OPTIONS = kept


def gaps(report: Report, given: argparse.Namespace) -> None:
    """Reports the bytes in use after a search for fewer gaps, by its constants."""
    from keras_remat.backends.tensorflow.memory import best_fit
    from keras_remat.backends.tensorflow.memory import gaps as search
    from keras_remat.backends.tensorflow.memory.replayed import ReplayedMemory

    floor, problem = unet_in_slices()
    memory = ReplayedMemory(smallest_bytes=best_fit.ONEDNN_SMALL_BYTES)
    within = problem.with_budget(int(_LIMIT_SHARE * floor))
    limit = within.budget_bytes or 0
    found = []
    for mib in given.alive.split(","):
        tighter = problem.with_budget(int(float(mib) * MIB))
        base = base_orders(tighter)[-1]
        policy = greedy.SLICED_POLICIES[0]
        run = eviction.Eviction(tighter, base, policy, NO_DEADLINE, float("inf"))
        order = trimmed(tighter, run.run(_PATIENCE * len(base)))
        found.append(Schedule(order))
    before = [f"{memory.peak_bytes(problem, one) / MIB:.1f}" for one in found]
    names = [f"{mib} MiB alive" for mib in given.alive.split(",")]
    report.add("", f"The limit is {limit / MIB:.1f} MiB.", "")
    report.add(head(["", *names, "seconds"], left=1), line_of(["no search", *before, "–"]))
    kept = {name: getattr(search, name) for row in _GAPS.values() for name in row}
    for name, values in _GAPS.items():
        for constant, value in (kept | values).items():
            setattr(search, constant, value)
        cells, began_s = [], time.process_time()
        for one in found:
            fewer = memory.with_fewer_gaps(within, one, float("inf"))
            peak = None if fewer is None else memory.peak_bytes(problem, fewer)
            cells.append("–" if peak is None else f"{peak / MIB:.1f}")
        report.add(line_of([name, *cells, f"{time.process_time() - began_s:.0f}"]))


def settings(report: Report, given: argparse.Namespace) -> None:
    """Reports what it takes to record a step anew on PyTorch."""
    import models

    backend = load_backend()
    report.add("", head(["model", "ops", "recording / step", "every tenth recorded"], left=1))
    for name in given.models.split(","):
        model, case = models.make(name)
        data = case.steps(1)
        batch = backend.example_batch(model, models.batches(data, case.batch_size)[0])
        step = partial(model.train_on_batch, **data)
        step()  # builds what is built late
        recording_s, ops = min(timed(partial(backend.trace, model, batch)) for _ in range(2))
        step_s, _ = min(timed(step) for _ in range(5))
        share = recording_s / step_s
        report.add(line_of([name, ops, f"{share:.1f}", f"{1 + share / 10:.2f}"]))


def timed(run: Callable[[], Any]) -> tuple[float, int]:
    """Returns the seconds of a run, and the ops of the step that it returns, if it is one."""
    began_s = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began_s
    return seconds, len(result.graph.ops) if hasattr(result, "graph") else 0


def main(argv: list[str] | None = None) -> int:
    """Prints the tables of one part."""
    parser = command_line(__doc__)
    parts = {"looks": looks, "native": native, "late": late, "gaps": gaps, "settings": settings}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--alive", default="89,85,81", metavar="A,B", help="MiB, of gaps")
    parser.add_argument("--models", default="unet,transformer,two_inputs", help="of settings")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    given = parser.parse_args(argv)
    report = Report()
    report.add(machine(os.environ.get("KERAS_BACKEND", "tensorflow")))
    parts[given.part](report, given)
    report.write(given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
