"""Scores any program that reads a problem file and writes a solution file.

    python benchmarks/suite/score.py RESULTS.json -- COMMAND {problem} {solution} {seconds}

The command runs once for every budget of every problem, with the three words replaced: the problem
file (plain JSON, with ``budget_bytes``), the solution file it has to write (``{"order": [op ids]}``
is enough), and the seconds it has. It gets two cores and is killed when its seconds and a grace for
starting are over; the file it has written by then counts. The package's own::

    python benchmarks/suite/score.py auto.json -- \\
        keras-remat solve {problem} --time-limit 28 --output {solution}

A result is ``best / yours``: the seconds of the best schedule that anybody has found
(``best.json``) over the program's, as :mod:`check` counts them; 0 where it has found none that is
legal and within the budget. The score is the sum over all budgets for which a schedule is known.
Results are written after every run, and those that are there already are not run again, so that a
long evaluation can be interrupted. ``--only`` and ``--budgets`` take a part of the suite.
``--record NAME`` puts what is better into ``best.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import check  # noqa: E402  beside this file, whether or not it runs from its folder

SECONDS, GRACE_S, CORES = 30.0, 5.0, 2


def run(command: list[str], problem: Path, solution: Path, seconds: float) -> None:
    """Runs a program on a problem, on two cores, and ends it when its time is over."""
    words = {"{problem}": str(problem), "{solution}": str(solution), "{seconds}": f"{seconds:g}"}
    cores = sorted(os.sched_getaffinity(0))[:CORES] if hasattr(os, "sched_getaffinity") else []
    process = subprocess.Popen(
        [words.get(word, word) for word in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def time_of(problem: dict[str, Any], solution: Path) -> float | None:
    """Returns the seconds of a solution; ``None`` where there is none that counts."""
    try:
        order = check.read(solution)["order"]
        seconds, peak = check.evaluate(problem, order)
    except (OSError, ValueError, KeyError, TypeError, check.RuleBrokenError):
        return None
    return seconds if peak <= problem["budget_bytes"] else None


def bound_of(solution: Path) -> float | None:
    """Returns the lower bound that a solution claims; believed, not checked."""
    try:
        bound = check.read(solution)["lower_bound_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return bound if isinstance(bound, float) and math.isfinite(bound) else None


def instances(suite: Path, only: str, budgets: list[int]) -> list[tuple[str, int]]:
    """Returns names of problems with the places of their budgets, the roomiest first."""
    index = json.loads((suite / "index.json").read_text())["problems"]
    return [
        (name, at)
        for name, entry in index.items()
        if only in name
        for at in range(len(entry["budgets_bytes"]))
        if not budgets or at in budgets
    ]


def solved(suite: Path, name: str, at: int, command: list[str], seconds: float) -> dict[str, Any]:
    """Runs the program on one budget of one problem and returns the result."""
    entry = json.loads((suite / "index.json").read_text())["problems"][name]
    problem = check.read(suite / "problems" / f"{name}.json.gz")
    problem["budget_bytes"] = entry["budgets_bytes"][at]
    with tempfile.TemporaryDirectory() as folder:
        file, solution = Path(folder) / "problem.json", Path(folder) / "solution.json"
        file.write_text(json.dumps(problem))
        run(command, file, solution, seconds)
        return {"time_s": time_of(problem, solution), "bound_s": bound_of(solution)}


def score_of(results: dict[str, Any], best: dict[str, Any]) -> tuple[float, int]:
    """Returns the score and the number of budgets that it is summed over."""
    total, count = 0.0, 0
    for key, result in results.items():
        known = [t for t in (best.get(key, {}).get("time_s"), result["time_s"]) if t is not None]
        if known:
            count += 1
            total += min(known) / result["time_s"] if result["time_s"] else 0.0
    return total, count


def recorded(best: dict[str, Any], results: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the table of best schedules with what a program did better put in."""
    table = dict(best)
    for key, result in results.items():
        entry = table.get(key, {"time_s": None, "found_by": None, "bound_s": None})
        if result["time_s"] is not None and (
            entry["time_s"] is None or result["time_s"] < entry["time_s"] * (1 - 1e-9)
        ):
            entry = {**entry, "time_s": result["time_s"], "found_by": name}
        if result["bound_s"] is not None and result["bound_s"] > (entry["bound_s"] or 0.0):
            entry = {**entry, "bound_s": result["bound_s"]}
        table[key] = entry
    return table


def main(arguments: list[str]) -> int:
    """Scores the program named on the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s RESULTS.json [options] -- COMMAND {problem} {solution} {seconds}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="results of the program, read and written")
    parser.add_argument("--suite", type=Path, default=HERE, help="folder with index.json")
    parser.add_argument("--only", default="", help="problems with this in their names")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="places, from 0")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--record", metavar="NAME", help="whom best.json is to name")
    at_command = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at_command])
    command = arguments[at_command + 1 :]
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    best_file = options.suite / "best.json"
    best = json.loads(best_file.read_text()) if best_file.exists() else {}
    for name, at in instances(options.suite, options.only, options.budgets):
        key = f"{name}/{at}"
        if key in results or not command:
            continue
        results[key] = solved(options.suite, name, at, command, options.seconds)
        print(key, results[key], flush=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    if options.record:
        best = recorded(best, results, options.record)
        best_file.write_text(json.dumps(best, indent=1) + "\n")
    total, count = score_of(results, best)
    print(f"score {total:.4f} of {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
