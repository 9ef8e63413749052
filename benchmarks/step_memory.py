"""Plain against rematerialized training steps on eleven models: allocator peaks, time, and whether
the numbers stay the same.

    python benchmarks/step_memory.py --output table.md --json results.json --check

Each model runs in a process of its own (:mod:`step_case`), one after the other; a model that fails
is a row with its error. Limits are set between what is resident and the plain step's peak, both
measured in the same process: limit = resident + budget · (plain peak − resident), every byte of the
device's allocator counted. The smallest limit is the first that ``fit`` keeps, going up from the
least predicted peak; a limit below 1.1 × the peak measured there is raised to that, and marked ↑.
"plain twice" is the largest relative difference between the losses of two runs of Keras's own step,
the measure for "loss difference", which is ours against plain. A model is trained by ``model.fit``
with :class:`keras_remat.RematAutotune`; peaks are read by a callback beside it. ``--check`` holds
the results against the bounds below and exits with 1 when one fails.

``--backend torch`` measures on PyTorch. Of a CPU the bytes of the last epoch's steps are told
there, by the profiler, and what is resident is so without gradients: plain steps leave them on the
weights, plans do not. Predictions have tighter bounds there. A model is written to the JSON file as
soon as it was measured, and one that the file has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from statistics import median
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
    row_of,
    rows_of_run,
    write_run,
)

MODELS = (
    "VGG16",
    "ResNet50",
    "MobileNetV2",
    "EfficientNetB0",
    "DenseNet121",
    "unet",
    "transformer",
    "bilstm",
    "vae",
    "two_inputs",
    "mixed_float16",
)

#: What ``--check`` demands of every predicted peak, and of their median. PyTorch's bytes of a CPU
#: have no allocator's gaps in them.
PREDICTION = {"tensorflow": (0.10, 0.02), "torch": (0.03, 0.005)}
#: What it demands of losses, relative to plain steps'; of geometric means of times over the CNNs,
#: at 0.5 and without recomputation; of what planning takes in memory.
LOSS = 1e-4
HALF_TIME, STORE_ALL_TIME, PLANNER_BYTES = 1.15, 1.05, 2 * 2**30
#: Model → seconds to the swapped step, at most.
TO_SWAP_S = {"ResNet50": 30.0, "DenseNet121": 60.0}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_line(__doc__)
    add_names(result, "--models", MODELS)
    result.add_argument("--backend", choices=("tensorflow", "torch"), default="tensorflow")
    result.add_argument(
        "--budgets",
        type=_budgets,
        default=("0.7", "0.5", "smallest"),
        metavar="A,B",
        help='fractions, or "smallest"',
    )
    result.add_argument(
        "--steps",
        type=_positive,
        default=20,
        help="compared and timed steps per variant (default 20)",
    )
    result.add_argument(
        "--quick", action="store_true", help="budget 0.5 only, 4 steps, short solves"
    )
    result.add_argument(
        "--batch", type=_positive, metavar="N", help="samples per step; by default each model's"
    )
    result.add_argument("--solver", default="auto")
    result.add_argument("--solver-time-limit", type=float, default=10.0, metavar="S")
    result.add_argument(
        "--margin", type=float, default=0.05, help="of RematAutotune (default 0.05)"
    )
    add_outcome(result, limited="model", tables="table is", numbers=", after every model")
    return result


def _budgets(text: str) -> tuple[str, ...]:
    budgets = tuple(text.split(","))
    for budget in budgets:
        try:
            ok = budget == "smallest" or 0 < float(budget) <= 1
        except ValueError:
            ok = False
        if not ok:
            raise argparse.ArgumentTypeError(
                f'a budget is a fraction up to 1 or "smallest", not {budget!r}'
            )
    return budgets


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def run_case(name: str, options: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Measures one model in a process of its own; a failure comes back as ``{"model",
    "error"}``."""
    started = time.perf_counter()
    try:
        told = json.dumps(options | {"model": name})
        result = row_of("step_case.py", told, timeout_s=timeout_s, KERAS_BACKEND=options["backend"])
    except Failed as error:
        return {"model": name, "error": str(error)}
    return result | {"wall_s": time.perf_counter() - started}


# -------------------------------------------------------------------- what a person reads


def within(row: dict[str, Any]) -> bool:
    """Whether the measured peak keeps the limit."""
    return bool(row["measured_bytes"] <= row["limit_bytes"])


#: Heading of a column → key in a row, and how it is written.
COLUMNS = {
    "model": ("model", ""),
    "budget": ("budget", ""),
    "batch": ("batch", "d"),
    "plain MiB": ("plain_peak_bytes", "MiB"),
    "limit": ("limit_bytes", "MiB"),
    "predicted": ("predicted_bytes", "MiB"),
    "measured": ("measured_bytes", "MiB"),
    "error": ("off", "+.1%"),
    "ok": ("kept", ""),
    "overhead predicted": ("overhead", ".1%"),
    "time / plain": ("time_ratio", ".2f"),
    "store-all / plain": ("store_all_time_ratio", ".2f"),
    "weights equal": ("equal", ""),
    "loss difference": ("loss_difference", ".0e"),
    "plain twice": ("plain_again_difference", ".0e"),
    "to swap s": ("to_swap_s", ".0f"),
    "planner MiB": ("planner_mib", ".0f"),
}


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    return "\n".join([head(COLUMNS, left=2), *(line for r in results for line in lines_of(r))])


def lines_of(result: dict[str, Any]) -> list[str]:
    """The table's lines for one model."""
    name = result["model"]
    if "error" in result:
        return [failure_line(COLUMNS, name, "", result["error"])]
    return [
        failure_line(COLUMNS, name, row["budget"], row["error"])
        if "error" in row
        else _line(result, row)
        for row in result["rows"]
    ]


def _line(result: dict[str, Any], row: dict[str, Any]) -> str:
    said = {None: None, True: "yes", False: "**NO**"}
    parts = row.get("parts", 1)
    told = {
        "budget": row["budget"] + "↑" * row["raised"],
        "off": error_of(row),
        "kept": said[within(row)],
        "equal": said[row.get("equal_weights")] if parts == 1 else f"{parts} slices",
        "planner_mib": result["planner_rss_bytes"] / MIB,
    }
    return line_of(cells_of(result | row | told, COLUMNS.values()))


def measured_rows(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every row that was measured, with the result it belongs to."""
    return [
        (result, row)
        for result in results
        if "error" not in result
        for row in result["rows"]
        if "error" not in row
    ]


def time_ratios(results: list[dict[str, Any]], budget: str) -> list[float]:
    """Swapped over plain step time of the CNNs at a budget; a plain step that was left alone counts
    as 1."""
    return [
        row.get("time_ratio", 1.0)
        for result, row in measured_rows(results)
        if result["is_cnn"] and row["budget"] == budget
    ]


def store_all_ratios(results: list[dict[str, Any]]) -> list[float]:
    """Swapped over plain step time of the CNNs without recomputation."""
    return [r["store_all_time_ratio"] for r in results if r.get("is_cnn") and "error" not in r]


def prediction_errors(results: list[dict[str, Any]]) -> list[float]:
    """How far every predicted peak is from the measured one, a ratio."""
    return [abs(error_of(row)) for _, row in measured_rows(results)]


def summary(results: list[dict[str, Any]], budgets: tuple[str, ...]) -> str:
    """Means over the CNNs and the median prediction error."""
    lines = [
        f"Geometric mean over the CNNs, step time over plain, at {budget}: "
        f"{geometric_mean(time_ratios(results, budget)):.3f}"
        for budget in budgets
    ]
    mean = geometric_mean(store_all_ratios(results))
    lines.append(f"Geometric mean over the CNNs, store-all swapped over plain: {mean:.3f}")
    if errors := prediction_errors(results):
        lines.append(
            f"Predicted against measured peak: median error {median(errors):.1%}, largest "
            f"{max(errors):.1%}"
        )
    return "\n\n".join(lines)


def failed_bounds(results: list[dict[str, Any]], backend: str = "tensorflow") -> list[str]:
    """Returns what falls short on a backend, one sentence each; empty when everything holds."""
    prediction, median_prediction = PREDICTION[backend]
    failures = [f"{r['model']}: {r['error']}" for r in results if "error" in r]
    for result in results:
        for row in result.get("rows", ()):
            if "error" in row:
                failures.append(f"{result['model']} at {row['budget']}: {row['error']}")
    for result, row in measured_rows(results):
        case = f"{result['model']} at {row['budget']}"
        if not within(row) and row["budget"] != "smallest":
            failures.append(
                f"{case}: measured {row['measured_bytes']} bytes, over the limit of "
                f"{row['limit_bytes']}"
            )
        if abs(error_of(row)) > prediction:
            failures.append(
                f"{case}: predicted peak is {error_of(row):+.1%} off, more than {prediction:.0%}"
            )
        if row.get("equal_weights") is False:
            failures.append(f"{case}: weights differ from those without recomputation")
        if row.get("loss_difference", 0.0) > LOSS:
            failures.append(
                f"{case}: loss differs by {row['loss_difference']:.1e} from plain, more than "
                f"{LOSS:.0e}"
            )
        if (row.get("to_swap_s") or 0.0) > TO_SWAP_S.get(result["model"], math.inf):
            failures.append(
                f"{case}: {row['to_swap_s']:.0f} s to the swapped step, more than "
                f"{TO_SWAP_S[result['model']]:.0f}"
            )
        if result["planner_rss_bytes"] > PLANNER_BYTES:
            failures.append(
                f"{case}: the planner took {result['planner_rss_bytes']} bytes, more than "
                f"{PLANNER_BYTES}"
            )
    failures += [
        f"CNNs {what}: {geometric_mean(ratios):.3f} of the plain time, more than {bound}"
        for ratios, bound, what in (
            (time_ratios(results, "0.5"), HALF_TIME, "at 0.5"),
            (store_all_ratios(results), STORE_ALL_TIME, "store-all"),
        )
        if geometric_mean(ratios) > bound
    ]
    errors = prediction_errors(results)
    if errors and median(errors) > median_prediction:
        failures.append(
            f"median prediction error {median(errors):.1%}, more than {median_prediction:.1%}"
        )
    return failures


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    arguments = parser().parse_args(argv)
    budgets, steps, solve_s = arguments.budgets, arguments.steps, arguments.solver_time_limit
    if arguments.quick:
        budgets, steps, solve_s = ("0.5",), 4, min(3.0, solve_s)
    options = {
        "backend": arguments.backend,
        "batch": arguments.batch,
        "budgets": budgets,
        "steps": steps,
        "solver": arguments.solver,
        "margin": arguments.margin,
        "solver_time_limit_s": solve_s,
        "seed": arguments.seed,
        "probe_time_limit_s": 2.0 if arguments.quick else 4.0,
    }
    solved = f"solver {arguments.solver}, {solve_s:g} s"
    header = f"{machine(arguments.backend)}; {solved}; {steps} steps; margin {arguments.margin:.0%}"
    print(header, head(COLUMNS, left=2), sep="\n", flush=True)
    known = rows_of_run(arguments.json, options)
    found = {result["model"]: result for result in known if "error" not in result}
    for name in arguments.models:
        if name not in found:
            found[name] = run_case(name, options, arguments.timeout)
        results = list(found.values())
        print(*lines_of(found[name]), sep="\n", flush=True)
        write_run(arguments.json, header, options, results)
    document = f"{header}\n\n{table(results)}\n\n{summary(results, budgets)}\n"
    print(f"\n{summary(results, budgets)}")
    if arguments.output:
        arguments.output.write_text(document, encoding="utf-8")
    return failed(failed_bounds(results, arguments.backend), arguments.check)


if __name__ == "__main__":
    sys.exit(main())
