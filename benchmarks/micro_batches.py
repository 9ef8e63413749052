"""How fast a batch trains under a limit below the plain step's peak: whole and recomputed, in
pieces without recomputation, and as ``micro_batches="auto"`` chooses.

    python benchmarks/micro_batches.py --models unet,transformer,MobileNetV2 --output table.md

Limits are shares of the plain step's peak. *Recomputation* trains the whole batch under a schedule,
*pieces* in the least number of pieces that keeps the limit without recomputation. Every way first
trains a ``fit`` of its own, in which it plans and settles; then the settled plans train in turn, a
short ``fit`` after the other, several rounds, because machines slow down and speed up meanwhile.
The time of a way is the median of its rounds' median steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import models
from rows import Report, command_line, head, line_of, machine
from watch import StepWatch, long_fit

import keras_remat
from keras_remat.units import MIB

#: Numbers of pieces that are tried until one needs no recomputation.
PIECES = (2, 4, 8, 16)
#: Steps at the beginning of a short fit that are not timed.
_UNTIMED = 6


@dataclass
class Way:
    """One way to train, and what it took.

    Args:
        pieces: of a batch.
        plan: settled.
        steps_s, peaks: the median step and the largest peak of every round.
    """

    pieces: int
    plan: keras_remat.Plan
    steps_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


class Bench:
    """Trains one model under limits.

    Args:
        name: of a case of :mod:`models`.
        options: of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace):
        self.model, self.case = models.make(name)
        self.options, self.data = options, self.case.steps(options.steps)
        watching = self._fit(2, memory_limit=None)[0]
        self.plain_bytes = watching.report.baseline.peak_bytes

    def _fit(self, epochs: int, **remat: Any) -> tuple[keras_remat.RematAutotune, StepWatch]:
        gc.collect()
        callback = keras_remat.RematAutotune(
            **{"batch_size": "keep", "solver_time_limit_s": 10.0, "verbose": 0, **remat}
        )
        stopwatch = StepWatch()
        long_fit(
            self.model, **self.data, batch_size=self.case.batch_size, epochs=epochs,
            callbacks=[callback, stopwatch],
        )  # fmt: skip
        return callback, stopwatch

    def settled(self, limit: int, micro_batches: int | str | None) -> Way | None:
        """Returns a way with its plan; ``None`` where none keeps to the limit."""
        epochs = self.options.epochs if micro_batches == "auto" else 3
        try:
            remat, _ = self._fit(epochs, memory_limit=limit, micro_batches=micro_batches)
        except keras_remat.RematError as error:
            print(f"  {micro_batches}: {error}", file=sys.stderr)
            return None
        if remat.plan is None or (remat.plan.measured and remat.plan.measured.peak_bytes > limit):
            return None
        pieces = micro_batches if isinstance(micro_batches, int) else 1
        for event in remat.report.events:
            print(f"  {event.step} {event.kind} {event.message}", file=sys.stderr)
            told = re.search(
                r"goes on \w+( in (\d+) micro-batches)?|(\w+) one stays", event.message
            )
            if event.kind == "micro-batches" and told and "goes on" in told[0]:
                pieces = int(told[2] or 1)
        return Way(pieces, remat.plan)

    def in_pieces(self, limit: int) -> Way | None:
        """Returns the least number of pieces that needs no recomputation."""
        for count in (n for n in PIECES if n <= self.case.batch_size):
            way = self.settled(limit, count)
            if way is not None and not way.plan.solution.schedule.recomputed:
                return way
        return None

    def time(self, limit: int, way: Way) -> None:
        """Trains one more round."""
        remat, stopwatch = self._fit(2, memory_limit=limit, micro_batches=way.pieces, plan=way.plan)
        steps = stopwatch.times_s[_UNTIMED:]
        way.steps_s.append(median(steps))
        way.peaks.append(remat.report.epochs[-1].peak_bytes)

    def compare(self, share: float) -> tuple[str, float]:
        """Returns the table's line, and auto's samples per second over the better of the others."""
        limit = int(share * self.plain_bytes)
        ways = {
            "recomputation": self.settled(limit, None),
            "pieces": self.in_pieces(limit),
            "auto": self.settled(limit, "auto"),
        }
        for _ in range(self.options.rounds):
            for way in ways.values():
                if way is not None:
                    self.time(limit, way)
        rates = {
            name: self.case.batch_size / median(way.steps_s)
            for name, way in ways.items()
            if way is not None
        }
        others = [rate for name, rate in rates.items() if name != "auto"]
        ratio = rates.get("auto", 0.0) / max(others) if others else 1.0
        cells = [self.case.name, f"{share:.0%}", f"{limit / MIB:.1f}"]
        for name, way in ways.items():
            cells += (
                ("–", "–", "–")
                if way is None
                else (f"{rates[name]:.1f}", f"{max(way.peaks) / MIB:.1f}", str(way.pieces))
            )
        return line_of([*cells, f"{ratio:.2f}"]), ratio


def main(argv: list[str] | None = None) -> int:
    """Prints a line per model and limit; returns 1 where auto is more than 5 % slower than the
    better of the others."""
    keras_remat.enable_cpu_memory_stats()
    parser = command_line(__doc__)
    parser.add_argument("--models", default="unet,transformer,MobileNetV2", metavar="A,B")
    parser.add_argument("--budgets", default="0.5,0.3", metavar="A,B", help="of the plain peak")
    parser.add_argument("--steps", type=int, default=10, help="per epoch")
    parser.add_argument("--epochs", type=int, default=12, help="of the fit that chooses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    options = parser.parse_args(argv)
    ways = ("recomputation", "pieces", "auto")
    columns = [cell for name in ways for cell in (f"{name}: samples/s", "MiB", "pieces")]
    report = Report()
    report.add(
        f"{machine()}; {options.rounds} rounds of two epochs of {options.steps} steps in turn",
        "",
        head(["model", "of plain", "limit MiB", *columns, "auto / better"], left=1),
    )
    worst = 1.0
    for name, share in product(options.models.split(","), options.budgets.split(",")):
        line, ratio = Bench(name, options).compare(float(share))
        report.add(line)
        worst = min(worst, ratio)
    report.write(options.output)
    return int(worst < 0.95)


if __name__ == "__main__":
    sys.exit(main())
