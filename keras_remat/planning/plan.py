"""Holds a plan: a schedule for one graph under one budget, as a record and as a file.

A :class:`Plan` knows its graph by fingerprint. It carries the predicted time and peak and, once it
has run, the measured ones. Plans are made in :mod:`keras_remat.planning.request`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_remat.checks import check_among
from keras_remat.core.graph import Graph
from keras_remat.core.plan_record import FORMAT, VERSION, PlanRecord
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.serialize import Fields, problem_from_dict, read_json, write_json
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import Slicing
from keras_remat.core.validate import check_rules
from keras_remat.core.writing import WRITINGS, Writing
from keras_remat.errors import (
    BudgetError,
    InvalidProblemError,
    InvalidScheduleError,
    PlanMismatchError,
)
from keras_remat.reporting import html as page
from keras_remat.reporting import mpl, pictures
from keras_remat.reporting.layers import By
from keras_remat.reporting.tables import Text, summary_text
from keras_remat.reporting.text import (
    overhead_source,
    plan_text,
    slices_text,
    status_text,
    uncounted_text,
)
from keras_remat.solvers import solve
from keras_remat.units import format_bytes


@dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """Holds a schedule for one graph under one budget.

    Args:
        fingerprint: fingerprint of the graph that the plan applies to.
        budget_bytes: bytes that the device may have in use at the peak.
        solution: the schedule and how it was found.
        store_all: time and peak predicted without recomputation.
        predicted: time and peak predicted for the schedule, allocator overhead included; where the
            schedule was compiled, the compiler's peak.
        measured: time and peak of the swapped step on the device; ``None`` until it has run.
        profile_source: ``"measured"`` or ``"estimated"``: where the op times came from.
        device: e.g. ``"CPU:0"``.
        name: name for people.
        problem: the graph with the costs the plan was made from, so that a saved plan can be shown;
            ``None`` when left out.
        compiled: the peak by the compiler's buffer assignment, and the time of the compiled step in
            proportion to Keras's own compiled step, or else as predicted; ``None`` where no
            compiler was asked.
        card: the card that the plan was made for, by its name in the table of cards; ``None`` for
            the live device.
        slicing: the ops of the traced step that run in slices. ``fingerprint``, ``problem`` and the
            schedule are of the step in slices, ``store_all`` of the traced one.
        writing: how strictly a step compiled by TensorFlow is written for its card, as the compiler
            decided; ``None`` where no compiler was asked. Then TensorFlow writes it strictly, and
            JAX as the device's own compiler decides.
        smallest_bytes: bytes of the smallest array that the device counts; 0 where it counts all.
            Peaks leave out smaller arrays.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; :func:`load_plan` gives back an equal plan."""
        write_json(self.to_dict(), path)

    def check(self, problem: Problem) -> None:
        """Raises unless the plan applies to ``problem``'s graph.

        Raises:
            PlanMismatchError: it was made for another graph.
            InvalidScheduleError: its order is not legal there.
        """
        if self.fingerprint != problem.graph.fingerprint:
            known = None if self.problem is None else self.problem.graph
            difference = "" if known is None else _input_difference(known, problem.graph)
            if self.card is not None:
                difference += (
                    f" It was made for the card {self.card}, and this step runs on "
                    f"{problem.profile.device or 'another device'}."
                )
            raise PlanMismatchError(self.fingerprint, problem.graph.fingerprint, difference.strip())
        check_rules(problem, self.solution.schedule)

    def __str__(self) -> str:
        peak_bytes, source = self.known_peak
        is_measured = source == "measured"
        measured = f"{format_bytes(peak_bytes)} measured" if is_measured else "not measured yet"
        return (
            f"Plan: peak {format_bytes(self.predicted.peak_bytes)} predicted, {measured}, "
            f"budget {format_bytes(self.budget_bytes)} "
            f"(store-all {format_bytes(self.store_all.peak_bytes)}); overhead {self.overhead:.1%} "
            f"by {overhead_source(self)}; "
            f"{len(self.solution.schedule.recomputed)} ops recomputed; "
            f"{status_text(self.solution)}"
            + ("" if self.slicing is None else f"; {slices_text(self.slicing)}")
            + ("" if self.card is None else f"; card {self.card}")
            + (f"; {uncounted}" if (uncounted := uncounted_text(self)) else "")
        )

    def __repr__(self) -> str:
        return f"<{self}>"  # the order alone would be thousands of ids

    # ---------------------------------------------------------------- what a person sees

    def summary(self, by: By | None = None) -> str:
        """Returns what the plan keeps and recomputes, as a table; print it.

        Args:
            by: ``"layer"``, ``"block"`` or ``"op"`` for the table alone; ``None`` for the plan's
                numbers and the table by layer.

        Raises:
            ValueError: another grouping, or a table of a plan that was saved without its problem.
        """
        if by is not None:
            return Text(summary_text(self._shown_problem, self.solution.schedule, by))
        table = "" if self.problem is None else f"\n\n{self.summary('layer')}"
        return Text(plan_text(self) + table)

    def plot(self, kind: str = "memory") -> Any:
        """Returns a matplotlib figure of the plan.

        Args:
            kind: ``"memory"``: bytes over the time of a step; ``"holders"``: the layers that hold
                the peak; ``"schedule"``: which ops run and which values are kept when;
                ``"overhead"``: the overhead against the limit, which solves for a few limits and
                takes seconds.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ValueError: another kind, or a plan that was saved without its problem.
        """
        if kind == "overhead":
            shown = pictures.overhead(self, overheads(self._shown_problem))
        else:
            shown = pictures.plan(self, kind)
        return mpl.figure(shown)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page with the pictures and tables of the plan."""
        Path(path).write_text(page.plan_page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return page.fragment(page.plan_body(self))

    @property
    def _shown_problem(self) -> Problem:
        if self.problem is None:
            raise ValueError(
                "the plan was saved without its problem, so there is no graph to show; "
                "make it again with make_plan, or show it with summary()"
            )
        return self.problem


#: Budgets that :func:`overheads` solves for, as shares of the way from the floor to the store-all
#: peak, and the seconds each solve gets.
_SHARES, _SOLVE_S = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1, 0.05), 1.0


def overheads(problem: Problem) -> list[tuple[int, float]]:
    """Returns (budget in bytes, overhead ratio) for budgets that a quick solver meets.

    Args:
        problem: the step; its own budget plays no part. Nine budgets between the floor and the peak
            without recomputation are solved for, in at most one second each.
    """
    floor = problem.floor_bytes
    room = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes - floor
    points = []
    for budget in dict.fromkeys(max(1, floor + round(share * room)) for share in _SHARES):
        try:
            found = solve(problem.with_budget(budget), solver="greedy", time_limit_s=_SOLVE_S)
        except BudgetError:
            break  # tighter ones take longer, and this is a picture
        base_s = problem.store_all_time_s
        time_s = simulate(problem, found.schedule).time_s
        points.append((budget, time_s / base_s - 1 if base_s > 0 else 0.0))
    return points


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file.

    Raises:
        InvalidProblemError: the file is malformed; the message names the file and the field.
        OSError: the file cannot be read.
    """
    return plan_from_dict(read_json(path, FORMAT, VERSION), os.fspath(path))


def plan_from_dict(document: object, source: str | None = None) -> Plan:
    """Returns the plan that a JSON object describes.

    Args:
        source: the file it came from, for error messages.

    Raises:
        InvalidProblemError: a field is missing, has the wrong type or an impossible value, or the
            order is not legal for the plan's own problem.
    """
    top = Fields(document, source)
    problem = top.get("problem", (dict, type(None)), None)
    raw = Fields(top.get("solution", dict), source, "solution")
    budget = top.positive("budget_bytes")
    try:
        plan = Plan(
            top.get("fingerprint", str),
            budget,
            solution_of(
                raw, float(raw.get("solve_time_s", (int, float))), _optional_usage(raw, "usage")
            ),
            _usage(top, "store_all"),
            _usage(top, "predicted"),
            _optional_usage(top, "measured"),
            top.get("profile_source", str),
            top.get("device", str),
            top.get("name", str),
            None if problem is None else problem_from_dict(problem, source=source),
            _optional_usage(top, "compiled"),
            top.get("card", (str, type(None)), None),
            _optional_slicing(top),
            top.get("smallest_bytes", int, 0),
            _optional_writing(top),
        )
        if plan.problem is not None:
            check_rules(plan.problem, plan.solution.schedule)
    except InvalidProblemError:
        raise
    except InvalidScheduleError as error:
        raise InvalidProblemError(str(error), source=source, field="solution.order") from error
    except (ValueError, OverflowError) as error:  # OverflowError: an int too large for a float
        raise InvalidProblemError(f"malformed plan: {error}", source=source) from error
    return plan


def _optional_writing(top: Fields) -> Writing | None:
    value = top.get("writing", (str, type(None)), None)
    check_among("writing", value, (None, *WRITINGS))
    return None if value is None else Writing(value)


def _input_difference(planned: Graph, step: Graph) -> str:
    """Returns a sentence on the step inputs (weights, slots, the batch) that differ."""
    ours, theirs = (
        Counter(f"{v.dtype} {v.shape}" for v in graph.values if v.producer is None)
        for graph in (planned, step)
    )
    if ours == theirs:
        return ""
    lacks, has = ", ".join(ours - theirs) or "nothing", ", ".join(theirs - ours) or "nothing"
    is_less = ours.total() < theirs.total()
    weights = ", with its sample weights, which class_weight makes, too" if is_less else ""
    return (
        f"The plan's step reads {lacks} where this one reads {has}: give make_plan a batch of the "
        f"shapes and dtypes that fit trains{weights}."
    )


def solution_of(raw: Fields, solve_time_s: float, usage: Usage | None) -> Solution:
    """Returns the solution that a file's object describes."""
    bound = raw.get("lower_bound_s", (int, float, type(None)), None)
    return Solution(
        Schedule(raw.ids("order")),
        raw.get("solver", str),
        raw.get("status", str),
        solve_time_s,
        None if bound is None else float(bound),
        usage,
        raw.get("keeps_order", bool, False),
    )


def usage_of(raw: Fields) -> Usage:
    """Returns the time and the peak in a file's object."""
    usage = Usage(float(raw.get("time_s", (int, float))), raw.get("peak_bytes", int))
    if usage.time_s < 0 or usage.peak_bytes < 0:
        key = "time_s" if usage.time_s < 0 else "peak_bytes"
        raise raw.wrong(raw.path(key), "must not be negative", raw.document[key])
    return usage


def _usage(fields: Fields, key: str) -> Usage:
    return usage_of(Fields(fields.get(key, dict), fields.source, fields.path(key)))


def _optional_slicing(top: Fields) -> Slicing | None:
    raw = top.get("slices", (dict, type(None)), None)
    if raw is None:
        return None
    fields = Fields(raw, top.source, "slices")
    return Slicing(fields.ids("ops"), fields.positive("parts"))


def _optional_usage(fields: Fields, key: str) -> Usage | None:
    return None if fields.get(key, (dict, type(None)), None) is None else _usage(fields, key)
