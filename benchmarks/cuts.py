"""What the allocator wastes, with and without cuts: the same orders, predicted and really trained
both ways.

    python benchmarks/cuts.py --models ResNet50,UNet --output table.md

The models are those of :mod:`paper_models`, profiled as :func:`keras_remat.find_max_batch_size`
does. At a batch of twice, and of three times, plain Keras's, the first schedule of a quick solver
for a share of a limit is lowered twice: with the cuts of
:mod:`keras_remat.backends.tensorflow.memory.best_fit`, and without any. *Alive* is what values,
workspaces and resident bytes take at most, *waste* what a measured peak is above that. The limit is
the predicted peak of the plain step at the batch that was profiled; only the share of it that is
asked for matters here.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import paper_models
from max_batch import MODELS, head, one_of
from step_memory import MIB, machine

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.batch_size.find import AsItIsNow, Trainer, measured_scaling
from keras_remat.core.schedule import Usage
from keras_remat.planning.make_plan import traced_model
from keras_remat.planning.plan import Plan
from keras_remat.solvers import solve

#: Batches, in plain Keras's, and the budgets of the solver, in limits.
SIZES, SHARES = (2, 3), (1.0, 0.95, 0.9)
#: Seconds for one solve.
SOLVE_S = 4.0
COLUMNS = (
    "model",
    "batch",
    "alive MiB",
    "predicted",
    "measured",
    "waste",
    "uncut: predicted",
    "measured",
    "waste",
    "cuts",
    "step s",
    "uncut step s",
)
_UNLIMITED_BYTES = 2**50


@dataclass(frozen=True)
class Row:
    """One order, with cuts and without."""

    model: str
    batch: int
    alive_bytes: int
    predicted_bytes: int
    usage: Usage
    uncut_predicted_bytes: int
    uncut_usage: Usage
    cuts: int

    @property
    def waste(self) -> float:
        """Measured above what is alive, a ratio."""
        return self.usage.peak_bytes / self.alive_bytes - 1

    @property
    def uncut_waste(self) -> float:
        """The same without cuts."""
        return self.uncut_usage.peak_bytes / self.alive_bytes - 1

    def __str__(self) -> str:
        peaks = (
            (self.predicted_bytes, self.usage.peak_bytes),
            (self.uncut_predicted_bytes, self.uncut_usage.peak_bytes),
        )
        (predicted, measured), (uncut_predicted, uncut) = (
            [f"{nbytes / MIB:.1f}" for nbytes in pair] for pair in peaks
        )
        cells = (
            self.model,
            self.batch,
            f"{self.alive_bytes / MIB:.1f}",
            predicted,
            measured,
            f"{self.waste:.1%}",
            uncut_predicted,
            uncut,
            f"{self.uncut_waste:.1%}",
            self.cuts,
            f"{self.usage.time_s:.2f}",
            f"{self.uncut_usage.time_s:.2f}",
        )
        return "| " + " | ".join(map(str, cells)) + " |"


def rows_of(name: str) -> list[Row]:
    """Trains one model's orders; a row each."""
    paper, backend = paper_models.PAPER_MODELS[name], load_backend()
    model, batch = paper.build(paper.pixels), paper.batch(paper.plain_batch)
    backend.example_batch(model, batch)  # builds the model
    step = traced_model(backend, model, batch, _UNLIMITED_BYTES, 0.0, "measured", 0)
    limit = backend.predicted_peak_bytes(
        step.problem, keras_remat.Schedule.store_all(step.problem.graph)
    )
    backend.reserve(limit)
    backend.tidy(model)
    scaling = measured_scaling(backend, model, step)
    train = Trainer(backend, model, step.batch, _UNLIMITED_BYTES)
    rows = []
    for size in (times * paper.plain_batch for times in SIZES):
        for share in SHARES:
            problem = AsItIsNow(scaling, backend, step.traced).at(size)
            budget = max(problem.floor_bytes, int(share * limit))
            try:
                solution = solve(
                    problem.with_budget(budget), solver="greedy_first", time_limit_s=SOLVE_S
                )
            except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError):
                continue
            assert solution.usage is not None
            runs = {}
            for backend.may_cut in (False, True):
                problem = AsItIsNow(scaling, backend, step.traced).at(size)
                peak, cuts = backend.replayed(problem, solution.schedule)
                predicted = Usage(solution.usage.time_s, peak)
                plan = Plan(
                    problem.graph.fingerprint,
                    budget,
                    solution,
                    solution.usage,
                    predicted,
                    problem=problem,
                )
                usage = train(size, plan)
                assert usage is not None
                runs[backend.may_cut] = peak, usage
            rows.append(
                Row(
                    name,
                    size,
                    solution.usage.peak_bytes,
                    *runs[True],
                    *runs[False],
                    sum(map(len, cuts.values())),
                )
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark, every model in a process of its own; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=one_of(MODELS),
        default=MODELS,
        metavar="A,B",
        help=f"of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.md",
        help="where the table is written beside standard output",
    )
    arguments = parser.parse_args(argv)
    lines = [f"{machine()}; float32, SGD", "", head(COLUMNS)]
    print("\n".join(lines), flush=True)
    rows: list[Row] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for found in processes.map(rows_of, arguments.models):
            rows += found
            lines += map(str, found)
            print(*found, sep="\n", flush=True)
    if not rows:
        print("No order was found for any model.")
        return 1
    wastes, uncut = [row.waste for row in rows], [row.uncut_waste for row in rows]
    lines += [
        "",
        f"Waste: {mean(wastes):.1%} on average and {max(wastes):.1%} at most with cuts; {mean(uncut):.1%} and {max(uncut):.1%} without",
    ]
    print(lines[-1])
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
