"""Recognizes the files of this package, and shows them as text, numbers, or a page.

The command line's ``show`` and ``compare`` take plans, problems, reports and solutions alike. A
solution file names no format; it is recognized by its fields, such as ``"order"``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_remat.core import plan_record, serialize
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import InvalidProblemError
from keras_remat.planning import plan as plans
from keras_remat.planning.plan import Plan
from keras_remat.reporting import fit_report, html, text
from keras_remat.reporting.fit_report import AutotuneReport
from keras_remat.reporting.layers import By
from keras_remat.reporting.tables import table
from keras_remat.units import format_bytes, format_seconds

_SOLUTION = {"order", "peak_bytes", "time_s", "status", "solver"}


@dataclass(frozen=True)
class Shown:
    """Holds the ways to show a file.

    Args:
        text: returns the text to print, with tables by layer, block or op.
        page: returns the HTML page.
        numbers: the numbers that ``compare`` shows.
    """

    text: Callable[[By], str]
    page: Callable[[], str]
    numbers: dict[str, Any]


def _shown_plan(plan: Plan) -> Shown:
    usage, schedule = plan.measured or plan.predicted, plan.solution.schedule
    numbers = {
        "name": plan.name, "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.known_peak[0], "time_s": usage.time_s,
        "plain_peak_bytes": plan.store_all.peak_bytes, "plain_time_s": plan.store_all.time_s,
        "recomputed_ops": len(schedule.recomputed),
        "solver": plan.solution.solver, "status": plan.solution.status,
    }  # fmt: skip

    def told(by: By) -> str:
        return text.plan_text(plan) + ("" if plan.problem is None else f"\n\n{plan.summary(by)}")

    return Shown(told, lambda: html.plan_page(plan), numbers)


def _shown_problem(problem: Problem) -> Shown:
    usage = simulate(problem, Schedule.store_all(problem.graph))
    numbers = {
        "name": problem.name, "budget_bytes": problem.budget_bytes,
        "peak_bytes": usage.peak_bytes, "time_s": usage.time_s,
        "floor_bytes": problem.floor_bytes, "ops": len(problem.graph.ops),
    }  # fmt: skip
    return Shown(lambda by: text.problem_text(problem), lambda: html.problem_page(problem), numbers)


def _shown_report(report: AutotuneReport) -> Shown:
    plan, last = report.plan, report.epochs[-1] if report.epochs else None
    numbers = {
        "limit_bytes": report.limit_bytes, "peak_bytes": report.peak_bytes,
        "plain_peak_bytes": None if report.baseline is None else report.baseline.peak_bytes,
        "batch_size": report.batch_size,
        "samples_per_s": None if last is None else last.samples_per_s,
        "plain_samples_per_s": report.baseline_samples_per_s,
        "set_up_s": report.planning_time_s,
    }  # fmt: skip

    def told(by: By) -> str:
        if not isinstance(plan, Plan) or plan.problem is None:
            return f"{report}".rstrip()
        return f"{report}\n\n{plan.summary(by)}"

    return Shown(told, lambda: html.report_page(report), numbers)


def _shown_solution(solution: Solution, usage: Usage) -> Shown:
    """Returns the ways to show a solution without the problem it solves."""
    order = solution.schedule
    numbers = {
        "peak_bytes": usage.peak_bytes, "time_s": usage.time_s,
        "recomputed_ops": len(order.recomputed),
        "solver": solution.solver, "status": solution.status,
    }  # fmt: skip
    lines = (
        f"peak and time  {format_bytes(usage.peak_bytes)}, {format_seconds(usage.time_s)}",
        f"schedule       {len(order)} runs, {len(order.recomputed)} ops run again",
        f"solver         {text.status_text(solution)}",
        "give --problem PROBLEM.json for tables and pictures",
    )

    def page() -> str:
        raise ValueError("a solution file holds no graph: give --problem PROBLEM.json, too")

    return Shown(lambda by: "\n".join(lines), page, numbers)


def shown_file(path: str | os.PathLike[str], problem_path: str | None) -> Shown:
    """Reads a file of any of the formats.

    Args:
        problem_path: path of the problem that a solution file solves, or ``None``.

    Raises:
        InvalidProblemError: the file has none of the formats, or is malformed.
        InvalidScheduleError: the solution does not solve this problem.
        OSError: the file cannot be read.
    """
    if (solved := _solution(path)) is not None:
        if problem_path is None:
            return _shown_solution(*solved)
        return _shown_plan(_plan_of(serialize.load_problem(problem_path), solved[0]))
    formats = (plan_record.FORMAT, serialize.FORMAT, fit_report.FORMAT)
    found = serialize.read_json(path, formats, 1)["format"]
    if found == plan_record.FORMAT:
        return _shown_plan(plans.load_plan(path))
    if found == serialize.FORMAT:
        return _shown_problem(serialize.load_problem(path))
    return _shown_report(fit_report.load_report(path, plans.plan_from_dict))


def _solution(path: str | os.PathLike[str]) -> tuple[Solution, Usage] | None:
    """Returns the solution in a file that looks like one, and its time and peak."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # read_json raises the right error
    if not isinstance(document, dict) or "format" in document or not set(document) >= _SOLUTION:
        return None
    fields = serialize.Fields(document, os.fspath(path))
    try:
        usage = plans.usage_of(fields)
        return plans.solution_of(fields, 0.0, usage), usage
    except InvalidProblemError:
        raise
    except (ValueError, OverflowError) as error:
        raise InvalidProblemError(f"malformed solution: {error}", source=str(path)) from error


def _plan_of(problem: Problem, solution: Solution) -> Plan:
    """Returns a solution of a problem as a plan."""
    check_rules(problem, solution.schedule)
    usage = simulate(problem, solution.schedule)
    store_all = simulate(problem, Schedule.store_all(problem.graph))
    return Plan(
        problem.graph.fingerprint,
        problem.budget_bytes or usage.peak_bytes,
        replace(solution, usage=usage),
        store_all,
        usage,
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def solution_to_dict(solution: Solution) -> dict[str, Any]:
    """Returns the solution as the JSON object of a solution file."""
    if solution.usage is None:
        raise ValueError("the solution was not simulated")
    return {
        "order": list(solution.schedule.order),
        "peak_bytes": solution.usage.peak_bytes,
        "time_s": solution.usage.time_s,
        "lower_bound_s": solution.lower_bound_s,
        "status": solution.status,
        "solver": solution.solver,
        **({"keeps_order": True} if solution.keeps_order else {}),
    }


def comparison(names: tuple[str, str], numbers: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """Returns a table of the numbers of two files, with the change from first to second."""
    first, second = numbers
    rows = [("", *names, "change")]
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        rows.append((key, _shown(key, a), _shown(key, b), _change(a, b)))
    return "\n".join(table(rows))


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if key.endswith("_s") and "per" not in key else f"{value}"


def _change(a: Any, b: Any) -> str:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != 0
    return f"{100 * (b / a - 1):+.1f} %" if numbers else ""
