"""What a file of this package is, and what is shown of it: text, numbers, or a page.

The command line's ``show`` and ``compare`` take plans, problems, reports and solutions alike. A
solution file has no format of its own in it; it is known by its ``"order"``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_remat.core import serialize
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
class ShownPlan:
    """A plan file."""

    plan: Plan

    def text(self, by: By) -> str:
        """What is printed."""
        table = "" if self.plan.problem is None else f"\n\n{self.plan.summary(by)}"
        return text.plan_text(self.plan) + table

    def page(self) -> str:
        """The page."""
        return html.plan_page(self.plan)

    def numbers(self) -> dict[str, Any]:
        """What is compared."""
        usage = self.plan.measured or self.plan.predicted
        return {
            "name": self.plan.name, "budget_bytes": self.plan.budget_bytes,
            "peak_bytes": usage.peak_bytes, "time_s": usage.time_s,
            "plain_peak_bytes": self.plan.store_all.peak_bytes,
            "plain_time_s": self.plan.store_all.time_s,
            "recomputed_ops": len(self.plan.solution.schedule.recomputed),
            "solver": self.plan.solution.solver, "status": self.plan.solution.status,
        }  # fmt: skip


@dataclass(frozen=True)
class ShownProblem:
    """A problem file."""

    problem: Problem

    def text(self, by: By) -> str:
        """What is printed."""
        return text.problem_text(self.problem)

    def page(self) -> str:
        """The page."""
        return html.problem_page(self.problem)

    def numbers(self) -> dict[str, Any]:
        """What is compared."""
        usage = simulate(self.problem, Schedule.store_all(self.problem.graph))
        return {
            "name": self.problem.name, "budget_bytes": self.problem.budget_bytes,
            "peak_bytes": usage.peak_bytes, "time_s": usage.time_s,
            "floor_bytes": self.problem.floor_bytes, "ops": len(self.problem.graph.ops),
        }  # fmt: skip


@dataclass(frozen=True)
class ShownReport:
    """A report file."""

    report: AutotuneReport

    def text(self, by: By) -> str:
        """What is printed."""
        plan = self.report.plan
        table = "" if not isinstance(plan, Plan) or plan.problem is None else plan.summary(by)
        return f"{self.report}\n\n{table}".rstrip()

    def page(self) -> str:
        """The page."""
        return html.report_page(self.report)

    def numbers(self) -> dict[str, Any]:
        """What is compared."""
        report = self.report
        last = report.epochs[-1] if report.epochs else None
        return {
            "limit_bytes": report.limit_bytes, "peak_bytes": report.peak_bytes,
            "plain_peak_bytes": None if report.baseline is None else report.baseline.peak_bytes,
            "batch_size": report.batch_size,
            "samples_per_s": None if last is None else last.samples_per_s,
            "plain_samples_per_s": report.baseline_samples_per_s,
            "set_up_s": report.planning_time_s,
        }  # fmt: skip


@dataclass(frozen=True)
class ShownSolution:
    """A solution file, without the problem it solves."""

    solution: Solution

    def text(self, by: By) -> str:
        """What is printed."""
        usage = self.solution.usage
        peak = "" if usage is None else f"{format_bytes(usage.peak_bytes)}, "
        time = "" if usage is None else format_seconds(usage.time_s)
        order = self.solution.schedule
        return "\n".join(
            [
                f"peak and time  {peak}{time}",
                f"schedule       {len(order)} runs, {len(order.recomputed)} ops run again",
                f"solver         {text.status_text(self.solution)}",
                "give --problem PROBLEM.json for tables and pictures",
            ]
        )

    def page(self) -> str:
        """Raises: a page shows the graph, which is in the problem file."""
        raise ValueError("a solution file holds no graph: give --problem PROBLEM.json, too")

    def numbers(self) -> dict[str, Any]:
        """What is compared."""
        usage = self.solution.usage
        return {
            "peak_bytes": None if usage is None else usage.peak_bytes,
            "time_s": None if usage is None else usage.time_s,
            "recomputed_ops": len(self.solution.schedule.recomputed),
            "solver": self.solution.solver, "status": self.solution.status,
        }  # fmt: skip


Shown = ShownPlan | ShownProblem | ShownReport | ShownSolution


def shown_file(path: str | os.PathLike[str], problem_path: str | None) -> Shown:
    """Reads a file of any of the formats.

    Args:
        path: of the file.
        problem_path: of the problem that a solution file solves, or ``None``.

    Raises:
        InvalidProblemError: it is none of them, or malformed.
        InvalidScheduleError: the solution is none of this problem.
        OSError: it cannot be read.
    """
    if (solution := _solution(path)) is not None:
        if problem_path is None:
            return ShownSolution(solution)
        return ShownPlan(_plan_of(serialize.load_problem(problem_path), solution))
    formats = (plans.FORMAT, serialize.FORMAT, fit_report.FORMAT)
    found = serialize.read_json(path, formats, 1)["format"]
    if found == plans.FORMAT:
        return ShownPlan(plans.load_plan(path))
    if found == serialize.FORMAT:
        return ShownProblem(serialize.load_problem(path))
    return ShownReport(fit_report.load_report(path, _read_plan))


def _read_plan(document: object, source: str) -> Plan:
    return plans.plan_from_dict(document, source=source)


def _solution(path: str | os.PathLike[str]) -> Solution | None:
    """The solution in a file that looks like one."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # read_json says what is wrong with it
    if not isinstance(document, dict) or "format" in document or not set(document) >= _SOLUTION:
        return None
    fields = serialize.Fields(document, os.fspath(path))
    bound = fields.get("lower_bound_s", (int, float, type(None)), None)
    try:
        return Solution(
            Schedule(fields.ids("order")),
            fields.get("solver", str),
            fields.get("status", str),
            0.0,
            None if bound is None else float(bound),
            Usage(float(fields.get("time_s", (int, float))), fields.get("peak_bytes", int)),
            fields.get("keeps_order", bool, False),
        )
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidProblemError):
            raise
        raise InvalidProblemError(f"malformed solution: {error}", source=str(path)) from error


def _plan_of(problem: Problem, solution: Solution) -> Plan:
    """A solution with its problem, as a plan for the peak it has."""
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
    """Returns a table of what two files have, and how the second one differs."""
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
