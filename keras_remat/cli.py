"""The command line ``keras-remat``: ``solve``, ``plan``, ``max-batch`` and ``show``.

Every subcommand is a pair of small functions: one declares its arguments, the other, which imports what it needs, does the
work, so that ``keras-remat solve`` loads no framework. Results go to stdout, progress and errors to stderr. Exit status: 0 done,
2 wrong use or unreadable file, 3 proved infeasible, 4 none found within the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_remat.errors import InfeasibleBudgetError, InvalidProblemError, MissingPackageError, ScheduleNotFoundError

if TYPE_CHECKING:
    from keras_remat.problem import Problem
    from keras_remat.schedule import Solution

DONE, WRONG_USE, INFEASIBLE, NOT_FOUND = 0, 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; ``sys.argv[1:]`` when missing.

    Returns:
        The exit status. Wrong use ends in ``SystemExit(2)`` from argparse.
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except InfeasibleBudgetError as error:
        return _fail(error, INFEASIBLE)
    except ScheduleNotFoundError as error:
        return _fail(error, NOT_FOUND)
    except (InvalidProblemError, MissingPackageError, OSError, ValueError, TypeError) as error:
        return _fail(error, WRONG_USE)


def _fail(error: Exception, status: int) -> int:
    print(f"keras-remat: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keras-remat", description="Rematerialization plans for Keras models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_solve(commands)
    return parser


def _add_solve(commands: Any) -> None:
    solve = commands.add_parser("solve", help="find the cheapest schedule of a problem file for a budget")
    solve.add_argument("problem", metavar="PROBLEM.json", help="problem file")
    solve.add_argument(
        "--budget", help='peak bytes allowed: "8GiB", "512MiB", a number of bytes, or "50%%" of the store-all peak '
        "(default: the problem file's budget)",
    )  # fmt: skip
    solve.add_argument("--solver", default="auto", help="name of the solver (default: auto)")
    solve.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS", help="seconds to search (default: 30)")
    solve.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")
    solve.add_argument("--output", metavar="SOLUTION.json", help="where to write the solution")
    solve.set_defaults(run=_run_solve)


def _run_solve(options: argparse.Namespace) -> int:
    from keras_remat import serialize, solvers
    from keras_remat.schedule import Schedule
    from keras_remat.simulate import simulate

    problem = serialize.load_problem(options.problem)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    problem = problem.with_budget(_budget_bytes(options.budget, problem.budget_bytes, store_all.peak_bytes))
    with _ProgressLine(problem, options.time_limit) as line:
        solution = solvers.solve(
            problem, solver=options.solver, time_limit_s=options.time_limit, seed=options.seed, progress=line.update
        )
    if options.output is not None:
        serialize.write_json(solution_to_dict(solution), options.output)
    print(_summary(problem, solution, store_all.peak_bytes))
    return DONE


def _budget_bytes(given: str | None, in_file: int | None, store_all_peak_bytes: int) -> int:
    from keras_remat.units import parse_bytes

    if given is None:
        if in_file is None:
            raise ValueError("the problem file has no budget_bytes: give --budget, such as 8GiB or 50%")
        return in_file
    limit = int(given) if given.strip().lstrip("+-").isdigit() else given
    return parse_bytes(limit, total_bytes=store_all_peak_bytes, what="--budget")


def solution_to_dict(solution: Solution) -> dict[str, Any]:
    """The solution as the JSON object of a solution file."""
    if solution.usage is None:
        raise ValueError("the solution was not simulated")
    return {
        "order": list(solution.schedule.order),
        "peak_bytes": solution.usage.peak_bytes,
        "time_s": solution.usage.time_s,
        "lower_bound_s": solution.lower_bound_s,
        "status": solution.status,
        "solver": solution.solver,
    }


def _percent_over(problem: Problem, seconds: float | None) -> str:
    base_s = problem.store_all_time_s
    if seconds is None:
        return "unknown"
    return f"{100 * (seconds / base_s - 1):.2f}%" if base_s > 0 else "0.00%"


def _summary(problem: Problem, solution: Solution, store_all_peak_bytes: int) -> str:
    from keras_remat.units import format_bytes, format_seconds

    usage = solution.usage
    if usage is None or problem.budget_bytes is None:
        raise ValueError("the solution was not simulated under a budget")
    gap = "unknown" if solution.gap is None else f"{100 * solution.gap:.2f}%"
    return "\n".join(
        [
            f"peak      {format_bytes(usage.peak_bytes)} of {format_bytes(problem.budget_bytes)} allowed "
            f"(store-all {format_bytes(store_all_peak_bytes)}, floor {format_bytes(problem.floor_bytes)})",
            f"time      {format_seconds(usage.time_s)}, overhead {_percent_over(problem, usage.time_s)}",
            f"bound     overhead {_percent_over(problem, solution.lower_bound_s)}, gap {gap}",
            f"schedule  {len(solution.schedule)} runs, {sum(solution.schedule.recomputed.values())} of them recomputations",
            f"solver    {solution.solver}, {solution.status}, {format_seconds(solution.solve_time_s)}",
        ]
    )


class _ProgressLine:
    """Best overhead, bound and gap on stderr while a solver runs: a tqdm bar over the time limit where tqdm is installed and stderr is
    a terminal, else a line per improvement."""

    def __init__(self, problem: Problem, time_limit_s: float):
        self.problem, self.time_limit_s = problem, time_limit_s
        self.bar: Any = None

    def __enter__(self) -> _ProgressLine:
        if sys.stderr.isatty():
            import importlib.util

            if importlib.util.find_spec("tqdm") is not None:
                from tqdm import tqdm

                layout = "{desc} [{elapsed} of " + f"{self.time_limit_s:g} s]"
                self.bar = tqdm(total=self.time_limit_s, bar_format=layout, desc="searching", leave=False, file=sys.stderr)
        return self

    def update(self, solution: Solution) -> None:
        """Shows a solution."""
        best_s = None if solution.usage is None else solution.usage.time_s
        text = (
            f"best overhead {_percent_over(self.problem, best_s)}, bound {_percent_over(self.problem, solution.lower_bound_s)}"
        )
        text += "" if solution.gap is None else f", gap {100 * solution.gap:.2f}%"
        if self.bar is not None:
            self.bar.set_description_str(text)
            self.bar.n = min(solution.solve_time_s, self.time_limit_s)
            self.bar.refresh()
        else:
            print(f"{solution.solve_time_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    def __exit__(self, *details: object) -> None:
        if self.bar is not None:
            self.bar.close()
