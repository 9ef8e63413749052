"""Whether the reported speedup is what a stopwatch shows: plain ``fit`` and ``fit`` with
``RematAutotune``, timed from outside.

    python benchmarks/speedup.py --models unet,transformer --output table.md

``remat_speedup`` in an epoch's logs is samples per second of its steps over those of the plain
step, measured where plain steps ran and predicted where they could not. Each model is asked for
both: with batches as given under a limit that plain steps do not keep (*keep*, predicted), and with
the largest batch under the peak of the plain step (*max*, measured); *fastest* is asked under the
limit of *max*, and has to take no longer than plain. Here plain ``fit`` does run, in the same
process, before and after every round, and all are timed between Keras's own batch hooks.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import models
from rows import Report, command_line, line_of, machine
from watch import StepWatch, long_fit

import keras_remat

#: The limit of *max*, in peaks of the plain step.
PLAIN_LIMIT = 1.15
#: So many epochs of every fit are timed.
TIMED = 3
#: How far a reported speedup may be off, and the least speedup of *fastest*.
LARGEST_ERROR, FASTEST = 0.05, 0.98


def compare(
    name: str, mode: str, budget: float, steps: int, epochs: int, rounds: int
) -> tuple[float, float, float, str]:
    """Returns the reported speedup, the stopwatch's, the seconds of planning in what was timed,
    which only the stopwatch counts, and whether the report's baseline was measured. A round's
    numbers are medians over the last epochs in which nothing was planned, or the last one where
    there is none; the result is the median round's."""
    model, case = models.make(name)
    data = case.steps(steps)

    def fit(*callbacks: keras.callbacks.Callback) -> StepWatch:
        stopwatch = StepWatch()
        watched = [*callbacks, stopwatch]
        long_fit(model, **data, batch_size=case.batch_size, epochs=epochs, callbacks=watched)
        return stopwatch

    # no limit that bites: tells what plain steps take
    watching = keras_remat.RematAutotune(batch_size="keep", verbose=0)
    before = fit(watching)
    peak = watching.report.baseline.peak_bytes
    resident = watching.problem.profile.resident_bytes
    limit = (
        int(resident + budget * (peak - resident)) if mode == "keep" else int(PLAIN_LIMIT * peak)
    )
    reported, timed, planning_s, sources = [], [], 0.0, []
    for _ in range(rounds):
        remat = keras_remat.RematAutotune(
            memory_limit=limit, batch_size=mode, solver_time_limit_s=10.0, verbose=0
        )
        during, after = fit(remat), fit()
        plain_s = median(map(sum, before.epochs_s[-TIMED:] + after.epochs_s[-TIMED:]))
        before = after
        pairs = list(zip(remat.report.epochs, during.epochs_s, strict=True))
        undisturbed = [pair for pair in pairs if pair[0].planning_time_s == 0]
        counted, seconds = zip(*(undisturbed or pairs[-1:])[-TIMED:], strict=True)
        reported.append(median(map(remat.report.speedup, counted)))
        timed.append(plain_s / median(map(sum, seconds)))
        planning_s += sum(epoch.planning_time_s for epoch in counted)
        sources.append(str(remat.report.baseline_source))
    return median(reported), median(timed), planning_s, "/".join(dict.fromkeys(sources))


def main(argv: list[str] | None = None) -> int:
    """Prints a line per model; returns 1 when a report is more than 5 % off, or *fastest* is
    slower than plain by more than 2 %."""
    keras_remat.enable_cpu_memory_stats()
    parser = command_line(__doc__)
    parser.add_argument("--models", default="unet,transformer", metavar="A,B")
    parser.add_argument(
        "--batch-sizes", default="keep,max", metavar="A,B", help="of keep, max, fastest"
    )
    parser.add_argument(
        "--budget", type=float, default=0.6, help="limit of keep, of the plain activation peak"
    )
    parser.add_argument("--steps", type=int, default=10, help="per epoch")
    parser.add_argument(
        "--epochs", type=int, default=8, help="the last three without planning count"
    )
    parser.add_argument("--rounds", type=int, default=1, help="the median one counts")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.md",
        help="where the table is written beside standard output",
    )
    arguments = parser.parse_args(argv)
    misses = False
    report = Report()
    report.add(
        f"{machine()}; {arguments.rounds} rounds of {arguments.epochs} epochs of "
        f"{arguments.steps} loader batches; limits: "
        f"keep {arguments.budget:.0%} of the plain "
        f"activation peak, max {PLAIN_LIMIT:.0%} of the plain peak",
        "",
        "| model | batch size | reported | stopwatch | off | planning s | baseline |",
        "|---|---|---:|---:|---:|---:|---|",
    )
    for name, mode in product(arguments.models.split(","), arguments.batch_sizes.split(",")):
        reported, timed, planning_s, source = compare(
            name, mode, arguments.budget, arguments.steps, arguments.epochs, arguments.rounds
        )
        off = reported / timed - 1
        misses |= abs(off) > LARGEST_ERROR or (mode == "fastest" and timed < FASTEST)
        speedups = f"{reported:.3f}", f"{timed:.3f}", f"{off:+.1%}"
        report.add(line_of([name, mode, *speedups, f"{planning_s:.1f}", source]))
    report.write(arguments.output)
    return int(misses)


if __name__ == "__main__":
    sys.exit(main())
