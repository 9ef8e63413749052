"""Runs the command line ``keras-remat``.

Every subcommand is a pair of small functions: one declares its arguments, the other does the work.
The second one imports what it needs, so ``keras-remat solve`` loads no framework. Results go to
stdout, progress and errors to stderr. Exit status: 0 done, 2 wrong use or unreadable file, 3 proved
infeasible, 4 none found within the time, 5 fits with a plan only (``will-it-fit``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_remat import doctor
from keras_remat.cards import command as will_it_fit
from keras_remat.checks import check_name, check_seconds
from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError
from keras_remat.planning import model_argument
from keras_remat.units import check_memory_limit, parse_bytes

DONE, WRONG_USE, INFEASIBLE, NOT_FOUND = 0, 2, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name; ``sys.argv[1:]`` when missing.

    Returns:
        The exit status. Wrong use ends in ``SystemExit(2)`` from argparse.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's notes hide progress
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough; Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except InfeasibleBudgetError as error:
        return _fail(error, INFEASIBLE)
    except ScheduleNotFoundError as error:
        return _fail(error, NOT_FOUND)
    except OverflowError as error:
        return _fail(f"a number is too large to compute with: {error}", WRONG_USE)
    except MemoryError as error:
        told = "free some, or give a smaller --batch-size"
        return _fail(f"this computer has too little memory ({error}): {told}", WRONG_USE)
    except (RematError, ImportError, OSError, ValueError, TypeError) as error:
        return _fail(error, WRONG_USE)


def _fail(error: Exception | str, status: int) -> int:
    print(f"keras-remat: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    version = sys.modules["keras_remat"].__version__  # loaded before any of its modules
    parser = argparse.ArgumentParser(
        prog="keras-remat",
        description="Plans that train Keras models in less memory, by recomputation.",
        epilog="example: keras-remat plan model.keras --batch-size 64 --memory-limit 8GiB",
    )
    parser.add_argument("--version", action="version", version=f"keras-remat {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_solve, _add_plan, _add_max_batch, _add_show, _add_compare):
        add(commands)
    will_it_fit.add_arguments(commands)
    doctor.add_arguments(commands)
    return parser


def _command(commands: Any, name: str, text: str, *examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="examples:\n" + "\n".join(f"  keras-remat {name} {each}" for each in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _seconds(text: str) -> float:
    """Returns a number of seconds from the command line."""
    try:
        seconds = float(text)
        check_seconds("seconds", seconds)
    except ValueError as error:  # argparse shows the text of its own errors alone
        raise argparse.ArgumentTypeError(str(error)) from None
    return seconds


def _common(command: Any, *, solver: bool = True) -> None:
    """Adds arguments that several subcommands have."""
    if solver:
        command.add_argument("--solver", default="auto", help="name of the solver (default: auto)")
        command.add_argument(
            "--time-limit",
            type=_seconds,
            default=30.0,
            metavar="SECONDS",
            help="seconds to search (default: 30)",
        )
    command.add_argument("--seed", type=int, default=0, help="of every random choice (default: 0)")
    _json_argument(command)


def _json_argument(command: Any) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead")


def _check_folder(output: str | None) -> None:
    """Raises ``OSError`` where the output file cannot be made, before the work begins."""
    if output is None:
        return
    path, folder = Path(output), Path(output).resolve().parent
    if path.is_dir():
        raise IsADirectoryError(f"--output {output!r} is a folder: give a file's name")
    is_device = path.exists() and not path.is_file()
    if not is_device and not os.access(folder, os.W_OK):
        raise OSError(f"--output {output!r}: {str(folder)!r} is no folder to write to")


def _print(text: str, document: dict[str, Any], as_json: bool) -> None:
    shown = json.dumps(document, indent=1, allow_nan=False) if as_json else text
    try:
        print(shown)
    except UnicodeEncodeError:  # a terminal or a file of another encoding
        print(shown.encode("ascii", "replace").decode())


# -------------------------------------------------------------------------------- solve


def _add_solve(commands: Any) -> None:
    solve = _command(
        commands,
        "solve",
        "find the cheapest schedule of a problem file for a budget",
        "problem.json --budget 8GiB",
        "problem.json --budget 50% --time-limit 60 --output solution.json",
    )
    solve.add_argument("problem", metavar="PROBLEM.json", help="problem file")
    solve.add_argument(
        "--budget",
        help='peak bytes allowed: "8GiB", "512MiB", a number of bytes, or "50%%" of the store-all '
        "peak (default: the problem file's budget)",
    )
    solve.add_argument("--output", metavar="SOLUTION.json", help="where to write the solution")
    _common(solve)
    solve.set_defaults(run=_run_solve)


def _run_solve(options: argparse.Namespace) -> int:
    from keras_remat import solvers
    from keras_remat.core import serialize
    from keras_remat.core.schedule import Schedule
    from keras_remat.core.simulate import simulate
    from keras_remat.planning.files import solution_to_dict
    from keras_remat.reporting.console import SearchLine
    from keras_remat.reporting.text import solution_text

    check_name("solver", options.solver, solvers.SOLVERS)
    _check_folder(options.output)
    problem = serialize.load_problem(options.problem)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    problem = problem.with_budget(
        _budget_bytes(options.budget, problem.budget_bytes, store_all.peak_bytes)
    )
    with SearchLine(sys.stderr, problem, options.time_limit) as line:
        solution = solvers.solve(
            problem,
            solver=options.solver,
            time_limit_s=options.time_limit,
            seed=options.seed,
            progress=line.update,
        )
    document = solution_to_dict(solution)
    if options.output is not None:
        serialize.write_json(document, options.output)
    _print(solution_text(problem, solution), document, options.json)
    return DONE


def _budget_bytes(given: str | None, in_file: int | None, store_all_peak_bytes: int) -> int:
    if given is None:
        if in_file is None:
            raise ValueError(
                "the problem file has no budget_bytes: give --budget, such as 8GiB or 50%"
            )
        return parse_bytes(in_file, what="budget_bytes")
    return parse_bytes(given, total_bytes=store_all_peak_bytes, what="--budget")


# -------------------------------------------------------------------------------- plan, max-batch


def _planning_arguments(command: Any) -> None:
    model_argument.add_arguments(command)
    command.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help='"8GiB", a number of bytes, or "80%%" of the device (default: all it has, and of a '
        "card what a framework uses)",
    )
    command.add_argument(
        "--card", metavar="NAME", help="for a card that need not be here, such as T4 or H100"
    )
    command.add_argument(
        "--profile",
        choices=("measured", "estimated"),
        help="measured runs a few steps (default, but for a card)",
    )


def _model_and_batch(options: argparse.Namespace, console: Any) -> tuple[Any, Any]:
    check_memory_limit(options.memory_limit)  # before the model is loaded
    given = options.batch_size, options.shape, options.dtype
    with console.task("loading the model"):
        return model_argument.model_and_batch(options.model, *given)


def _add_plan(commands: Any) -> None:
    plan = _command(
        commands,
        "plan",
        "plan a model's train step for a memory limit",
        "model.keras --batch-size 64 --memory-limit 8GiB --output plan.json",
        "my_project.models:build --memory-limit 80% --profile estimated",
        "model.keras --shape tokens=128 --shape mask=128 --memory-limit 8GiB",
    )
    _planning_arguments(plan)
    plan.add_argument("--output", metavar="PLAN.json", help="where to write the plan")
    _common(plan)
    plan.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> int:
    from keras_remat.planning.make_plan import make_plan
    from keras_remat.reporting.console import Console
    from keras_remat.solvers import SOLVERS

    check_name("solver", options.solver, SOLVERS)
    _check_folder(options.output)
    console = Console(sys.stderr)
    model, batch = _model_and_batch(options, console)
    with console.task("planning"):
        plan = make_plan(
            model,
            batch,
            options.memory_limit,
            card=options.card,
            solver=options.solver,
            solver_time_limit_s=options.time_limit,
            profile=options.profile,
            seed=options.seed,
        )
    if options.output is not None:
        plan.save(options.output)
    _print(plan.summary(), plan.to_dict() | {"problem": None}, options.json)
    return DONE


def _add_max_batch(commands: Any) -> None:
    search = _command(
        commands,
        "max-batch",
        "find the largest batch a model can train with under a memory limit",
        "model.keras --memory-limit 8GiB",
        "model.keras --batch-size 8 --memory-limit 8GiB --max-overhead 0.2",
    )
    _planning_arguments(search)
    search.add_argument(
        "--max-overhead",
        type=float,
        metavar="RATIO",
        help="bound on the slowdown per sample (default: one extra forward pass)",
    )
    _common(search, solver=False)
    search.set_defaults(run=_run_max_batch)


def _run_max_batch(options: argparse.Namespace) -> int:
    from keras_remat.batch_size.find import find_max_batch_size
    from keras_remat.reporting.console import Console

    console = Console(sys.stderr)
    model, batch = _model_and_batch(options, console)
    with console.task("searching the largest batch that fits"):
        search = find_max_batch_size(
            model,
            batch,
            options.memory_limit,
            card=options.card,
            max_overhead="forward" if options.max_overhead is None else options.max_overhead,
            profile=options.profile,
            seed=options.seed,
        )
    numbers = (
        *("limit_bytes", "max_batch_size", "fastest_batch_size", "plain_batch_size"),
        *("failed_batch_size", "failed_peak_bytes", "search_time_s", "verification_time_s"),
    )
    _print(str(search), {name: getattr(search, name) for name in numbers}, options.json)
    return NOT_FOUND if search.none_trained else DONE


# -------------------------------------------------------------------------------- show, compare


def _add_show(commands: Any) -> None:
    show = _command(
        commands,
        "show",
        "print what a file of this package holds, or make a page of it",
        "plan.json --by block",
        "report.json --html report.html",
        "solution.json --problem problem.json",
    )
    show.add_argument("file", metavar="PLAN.json|PROBLEM.json|REPORT.json|SOLUTION.json")
    show.add_argument("--html", metavar="FILE", help="write one self-contained page")
    show.add_argument(
        "--by", choices=("layer", "block", "op"), default="layer", help="rows of the table"
    )
    show.add_argument("--problem", metavar="PROBLEM.json", help="what a solution file solves")
    _json_argument(show)
    show.set_defaults(run=_run_show)


def _run_show(options: argparse.Namespace) -> int:
    from keras_remat.planning.files import shown_file

    shown = shown_file(options.file, options.problem)
    if options.html is not None:  # first, since a pipe's reader may not read all that is printed
        Path(options.html).write_text(shown.page(), encoding="utf-8")
    _print(shown.text(options.by), shown.numbers, options.json)
    return DONE


def _add_compare(commands: Any) -> None:
    compare = _command(
        commands,
        "compare",
        "put the numbers of two files side by side",
        "plan_8GiB.json plan_6GiB.json",
        "before/report.json after/report.json",
    )
    compare.add_argument("first", metavar="A.json", help="plan, problem, report or solution file")
    compare.add_argument("second", metavar="B.json", help="another one")
    _json_argument(compare)
    compare.set_defaults(run=_run_compare)


def _run_compare(options: argparse.Namespace) -> int:
    from keras_remat.planning.files import comparison, shown_file

    names = (options.first, options.second)
    first, second = (shown_file(name, None).numbers for name in names)
    _print(comparison(names, (first, second)), {"a": first, "b": second}, options.json)
    return DONE
