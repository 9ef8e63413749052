"""The contract that gets installed: a schedule for one graph under one budget, as a record, a file,
and an entry of a cache.

A :class:`Plan` tells its graph by fingerprint, and carries what it was predicted to take and, once
it has run, what it took. Plans are made in :mod:`keras_remat.planning.make_plan`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.serialize import problem_from_dict, problem_to_dict, read_json, write_json
from keras_remat.core.validate import check_rules
from keras_remat.errors import InvalidProblemError, PlanMismatchError, RematError
from keras_remat.units import format_bytes, format_seconds

FORMAT, VERSION = "keras_remat.plan", 1


@dataclass(frozen=True)
class Plan:
    """A schedule for one graph under one budget.

    Args:
        fingerprint: of the graph it applies to.
        budget_bytes: what the device may have in use at the peak.
        solution: the schedule and how it was found.
        store_all: time and peak predicted without recomputation.
        predicted: time and peak predicted for the schedule, allocator overhead included.
        measured: time and peak of the swapped step on the device; ``None`` until it has run.
        profile_source: ``"measured"`` or ``"estimated"``: where the op times came from.
        device: e.g. ``"CPU:0"``.
        name: for people.
        problem: the graph with the costs the plan was made from, so that a saved plan can be shown;
            ``None`` when left out.
    """

    fingerprint: str
    budget_bytes: int
    solution: Solution
    store_all: Usage
    predicted: Usage
    measured: Usage | None = None
    profile_source: Literal["measured", "estimated"] = "measured"
    device: str = ""
    name: str = ""
    problem: Problem | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.profile_source not in ("measured", "estimated"):
            raise ValueError(
                f'profile_source must be "measured" or "estimated", got {self.profile_source!r}'
            )

    @property
    def overhead(self) -> float:
        """(predicted time − store-all time) / store-all time, a ratio."""
        return (
            (self.predicted.time_s - self.store_all.time_s) / self.store_all.time_s
            if self.store_all.time_s > 0
            else 0.0
        )

    @property
    def recomputes(self) -> bool:
        """Whether any op runs more than once."""
        return bool(self.solution.schedule.recomputed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; :func:`load_plan` gives back an equal plan."""
        write_json(plan_to_dict(self), path)

    def check(self, problem: Problem) -> None:
        """Raises unless the plan applies to ``problem``'s graph.

        Raises:
            PlanMismatchError: it was made for another graph.
            InvalidScheduleError: its order is not legal there.
        """
        if self.fingerprint != problem.graph.fingerprint:
            raise PlanMismatchError(self.fingerprint, problem.graph.fingerprint)
        check_rules(problem, self.solution.schedule)

    def __str__(self) -> str:
        measured = (
            "not measured yet"
            if self.measured is None
            else f"{format_bytes(self.measured.peak_bytes)} measured"
        )
        return (
            f"Plan: peak {format_bytes(self.predicted.peak_bytes)} predicted, {measured}, budget {format_bytes(self.budget_bytes)} "
            f"(store-all {format_bytes(self.store_all.peak_bytes)}); overhead {self.overhead:.1%} by {self.profile_source} op times; "
            f"{len(self.solution.schedule.recomputed)} ops recomputed; {self.solution.solver}, {self.solution.status}, "
            f"{format_seconds(self.solution.solve_time_s)}"
        )


def _usage_to_dict(usage: Usage | None) -> dict[str, Any] | None:
    return None if usage is None else {"time_s": usage.time_s, "peak_bytes": usage.peak_bytes}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as the JSON object of a plan file."""
    solution = plan.solution
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "budget_bytes": plan.budget_bytes,
        "profile_source": plan.profile_source,
        "device": plan.device,
        "store_all": _usage_to_dict(plan.store_all),
        "predicted": _usage_to_dict(plan.predicted),
        "measured": _usage_to_dict(plan.measured),
        "solution": {
            "solver": solution.solver,
            "status": solution.status,
            "solve_time_s": solution.solve_time_s,
            "lower_bound_s": solution.lower_bound_s,
            "usage": _usage_to_dict(solution.usage),
            "order": list(solution.schedule.order),
        },
        "problem": None if plan.problem is None else problem_to_dict(plan.problem),
    }


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file.

    Raises:
        InvalidProblemError: malformed; the message names the file and the field.
        OSError: the file cannot be read.
    """
    document = read_json(path, FORMAT, VERSION)

    def usage(raw: dict[str, Any] | None) -> Usage | None:
        return None if raw is None else Usage(float(raw["time_s"]), int(raw["peak_bytes"]))

    def required(raw: dict[str, Any]) -> Usage:
        return Usage(float(raw["time_s"]), int(raw["peak_bytes"]))

    def text(key: str) -> str:
        if not isinstance(document[key], str):
            raise TypeError(f"{key} must be a string, got {document[key]!r}")
        return str(document[key])

    try:
        raw = document["solution"]
        lower_bound, problem = raw["lower_bound_s"], document.get("problem")
        solution = Solution(
            Schedule(tuple(raw["order"])), raw["solver"], raw["status"], float(raw["solve_time_s"]),
            None if lower_bound is None else float(lower_bound), usage(raw["usage"]),
        )  # fmt: skip
        return Plan(
            text("fingerprint"),
            int(document["budget_bytes"]),
            solution,
            required(document["store_all"]),
            required(document["predicted"]),
            usage(document["measured"]),
            document["profile_source"],
            text("device"),
            text("name"),
            None if problem is None else problem_from_dict(problem, source=os.fspath(path)),
        )
    except (
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # OverflowError: an infinite number of bytes
        raise InvalidProblemError(f"malformed plan: {error!r}", source=os.fspath(path)) from error


def cache_path(cache_dir: str | os.PathLike[str], graph: Graph, budget_bytes: int) -> Path:
    """Where a cache keeps the plan of a graph under a budget."""
    return Path(cache_dir) / f"{graph.fingerprint[:32]}_{budget_bytes}.plan.json"


def cached_plan(
    cache_dir: str | os.PathLike[str], problem: Problem, budget_bytes: int
) -> Plan | None:
    """The measured plan a cache holds for this graph and budget, or ``None``.

    Raises:
        InvalidProblemError: the cached file is no plan for this graph.
    """
    path = cache_path(cache_dir, problem.graph, budget_bytes)
    if not path.exists():
        return None
    plan = load_plan(path)
    try:
        plan.check(problem)
    except RematError as error:
        raise InvalidProblemError(str(error), source=os.fspath(path)) from error
    return plan
