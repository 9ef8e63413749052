"""The command line ``keras-remat``: ``solve``, ``plan``, ``max-batch`` and ``show``.

Every subcommand is a pair of small functions: one declares its arguments, the other, which imports
what it needs, does the work, so that ``keras-remat solve`` loads no framework. Results go to
stdout, progress and errors to stderr. Exit status: 0 done, 2 wrong use or unreadable file, 3 proved
infeasible, 4 none found within the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError

if TYPE_CHECKING:
    from keras_remat.core.problem import Problem
    from keras_remat.core.schedule import Solution

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
    except (RematError, OSError, ValueError, TypeError) as error:
        return _fail(error, WRONG_USE)


def _fail(error: Exception, status: int) -> int:
    print(f"keras-remat: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-remat", description="Rematerialization plans for Keras models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_solve, _add_plan, _add_max_batch, _add_show):
        add(commands)
    return parser


def _add_solve(commands: Any) -> None:
    solve = commands.add_parser(
        "solve", help="find the cheapest schedule of a problem file for a budget"
    )
    solve.add_argument("problem", metavar="PROBLEM.json", help="problem file")
    solve.add_argument(
        "--budget",
        help='peak bytes allowed: "8GiB", "512MiB", a number of bytes, or "50%%" of the store-all peak '
        "(default: the problem file's budget)",
    )
    solve.add_argument("--solver", default="auto", help="name of the solver (default: auto)")
    solve.add_argument(
        "--time-limit",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="seconds to search (default: 30)",
    )
    solve.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")
    solve.add_argument("--output", metavar="SOLUTION.json", help="where to write the solution")
    solve.set_defaults(run=_run_solve)


def _run_solve(options: argparse.Namespace) -> int:
    from keras_remat import solvers
    from keras_remat.core import serialize
    from keras_remat.core.schedule import Schedule
    from keras_remat.core.simulate import simulate

    problem = serialize.load_problem(options.problem)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    problem = problem.with_budget(
        _budget_bytes(options.budget, problem.budget_bytes, store_all.peak_bytes)
    )
    with _ProgressLine(problem, options.time_limit) as line:
        solution = solvers.solve(
            problem,
            solver=options.solver,
            time_limit_s=options.time_limit,
            seed=options.seed,
            progress=line.update,
        )
    if options.output is not None:
        serialize.write_json(solution_to_dict(solution), options.output)
    print(_summary(problem, solution, store_all.peak_bytes))
    return DONE


def _model_arguments(command: Any) -> None:
    command.add_argument(
        "model", metavar="MODEL.keras", help="a compiled model saved by model.save"
    )
    command.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="samples of the batch that is traced (default: 32)",
    )
    command.add_argument(
        "--memory-limit",
        required=True,
        metavar="LIMIT",
        help='"8GiB", a number of bytes, or "80%%" of the device',
    )
    command.add_argument(
        "--profile",
        choices=("measured", "estimated"),
        default="measured",
        help="measured runs a few steps (default)",
    )
    command.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")


def _loaded_model(path: str) -> Any:
    import keras

    from keras_remat.backends.statistics import enable_cpu_memory_stats

    enable_cpu_memory_stats()
    return keras.saving.load_model(path)


def _limit(text: str) -> int | str:
    return int(text) if text.strip().lstrip("+-").isdigit() else text


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="plan a saved model's train step for a memory limit")
    _model_arguments(plan)
    plan.add_argument("--solver", default="auto", help="name of the solver (default: auto)")
    plan.add_argument(
        "--time-limit",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="seconds to search (default: 30)",
    )
    plan.add_argument("--output", metavar="PLAN.json", help="where to write the plan")
    plan.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> int:
    from keras_remat.planning.make_plan import make_plan
    from keras_remat.units import check_memory_limit

    limit = _limit(options.memory_limit)
    check_memory_limit(limit)
    plan = make_plan(
        _loaded_model(options.model),
        options.batch_size,
        limit,
        solver=options.solver,
        solver_time_limit_s=options.time_limit,
        profile=options.profile,
        seed=options.seed,
    )
    if options.output is not None:
        plan.save(options.output)
    print(plan)
    return DONE


def _add_max_batch(commands: Any) -> None:
    search = commands.add_parser(
        "max-batch", help="find the largest batch a saved model can train with under a memory limit"
    )
    _model_arguments(search)
    search.add_argument(
        "--max-overhead",
        type=float,
        metavar="RATIO",
        help="bound on the slowdown per sample (default: one extra forward pass)",
    )
    search.set_defaults(run=_run_max_batch)


def _run_max_batch(options: argparse.Namespace) -> int:
    from keras_remat.batch_size.find import find_max_batch_size
    from keras_remat.units import check_memory_limit

    limit = _limit(options.memory_limit)
    check_memory_limit(limit)
    search = find_max_batch_size(
        _loaded_model(options.model),
        options.batch_size,
        limit,
        max_overhead="forward" if options.max_overhead is None else options.max_overhead,
        profile=options.profile,
        seed=options.seed,
    )
    print(search)
    return DONE


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="print what a plan or a problem file holds")
    show.add_argument("file", metavar="PLAN.json|PROBLEM.json")
    show.add_argument(
        "--html", metavar="FILE", help="write a page with the memory curve (problem files)"
    )
    show.set_defaults(run=_run_show)


def _run_show(options: argparse.Namespace) -> int:
    from pathlib import Path

    from keras_remat.core import serialize
    from keras_remat.core.schedule import Schedule
    from keras_remat.planning.plan import FORMAT, load_plan
    from keras_remat.reporting import text as show

    document = serialize.read_json(options.file, (serialize.FORMAT, FORMAT), 1)
    schedules = {}
    if document["format"] == FORMAT:
        plan = load_plan(options.file)
        problem = plan.problem
        schedules["plan"] = plan.solution.schedule
        print(
            show.plan_text(
                plan.solution,
                budget_bytes=plan.budget_bytes,
                store_all=plan.store_all,
                predicted=plan.predicted,
                measured=plan.measured,
                problem=problem,
            )
        )
        if problem is not None:
            problem = problem.with_budget(plan.budget_bytes)
    else:
        problem = serialize.load_problem(options.file)
        print(show.problem_text(problem))
    if options.html is not None:
        if problem is None:
            raise ValueError("the plan was saved without its problem, so there is no graph to draw")
        schedules = {"store-all": Schedule.store_all(problem.graph), **schedules}
        Path(options.html).write_text(
            show.schedule_html(problem, schedules, title=problem.name or options.file),
            encoding="utf-8",
        )
    return DONE


def _budget_bytes(given: str | None, in_file: int | None, store_all_peak_bytes: int) -> int:
    from keras_remat.units import parse_bytes

    if given is None:
        if in_file is None:
            raise ValueError(
                "the problem file has no budget_bytes: give --budget, such as 8GiB or 50%"
            )
        return in_file
    return parse_bytes(_limit(given), total_bytes=store_all_peak_bytes, what="--budget")


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
    """Best overhead, bound and gap on stderr while a solver runs: a tqdm bar over the time limit
    where tqdm is installed and stderr is a terminal, else a line per improvement."""

    def __init__(self, problem: Problem, time_limit_s: float):
        self.problem, self.time_limit_s = problem, time_limit_s
        self.bar: Any = None

    def __enter__(self) -> _ProgressLine:
        if sys.stderr.isatty():
            import importlib.util

            if importlib.util.find_spec("tqdm") is not None:
                from tqdm import tqdm

                layout = "{desc} [{elapsed} of " + f"{self.time_limit_s:g} s]"
                self.bar = tqdm(
                    total=self.time_limit_s,
                    bar_format=layout,
                    desc="searching",
                    leave=False,
                    file=sys.stderr,
                )
        return self

    def update(self, solution: Solution) -> None:
        """Shows a solution."""
        best_s = None if solution.usage is None else solution.usage.time_s
        text = f"best overhead {_percent_over(self.problem, best_s)}, bound {_percent_over(self.problem, solution.lower_bound_s)}"
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
