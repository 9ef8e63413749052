"""Checks whether a schedule obeys the rules and fits the budget: the oracle of the tests.

It executes the schedule with a table of buffers. On purpose, it differs from
:mod:`keras_remat.core.simulate` and shares no code with it: the tests compare the two independent
answers on random problems.
"""

from __future__ import annotations

from keras_remat.core.graph import is_int
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import InvalidScheduleError, PeakExceededError


def validate(problem: Problem, schedule: Schedule) -> None:
    """Returns nothing for a legal schedule within the problem's budget, and raises otherwise.

    Raises:
        InvalidScheduleError: one of S1 to S4 is broken, or an op id is unknown.
        PeakExceededError: the peak is over ``problem.budget_bytes``.
    """
    check_rules(problem, schedule)
    if problem.budget_bytes is not None:
        peak = executed_peak_bytes(problem, schedule)
        if peak > problem.budget_bytes:
            raise PeakExceededError(peak, problem.budget_bytes)


def check_rules(problem: Problem, schedule: Schedule) -> None:
    """Raises :class:`InvalidScheduleError` unless the schedule obeys S1 to S4.

    The budget plays no part.
    """
    graph, seen = problem.graph, _check_runs(problem, schedule)
    missing = graph.needed - seen
    if missing:
        op_id = min(missing)
        raise InvalidScheduleError(
            "S2",
            f"{len(missing)} needed ops never run, the first is op {op_id} "
            f"({graph.ops[op_id].name!r})",
            op_id=op_id,
        )
    successors: dict[int, list[int]] = {}
    for op in graph.ops:
        for earlier in op.after:
            successors.setdefault(earlier, []).append(op.id)
    started: set[int] = set()
    for position, op_id in enumerate(schedule.order):
        for later in successors.get(op_id, ()):
            if later in started:
                raise InvalidScheduleError(
                    "S4",
                    f"op {op_id} ({graph.ops[op_id].name!r}) runs at position {position}, "
                    f"after op {later} that must follow it",
                    position=position,
                    op_id=op_id,
                )
        started.add(op_id)


def _check_runs(problem: Problem, schedule: Schedule) -> set[int]:
    """Returns the ops that run.

    Raises:
        InvalidScheduleError: a run breaks S1 or S3, or has an unknown id (S2).
    """
    graph = problem.graph
    seen: set[int] = set()
    for position, op_id in enumerate(schedule.order):
        if not is_int(op_id) or not 0 <= op_id < len(graph.ops):
            raise InvalidScheduleError(
                "S2", f"unknown op id {op_id!r} at position {position}", position=position
            )
        op = graph.ops[op_id]
        for value_id in op.inputs:
            producer = graph.values[value_id].producer
            if producer is not None and producer not in seen:
                raise InvalidScheduleError(
                    "S1",
                    f"op {op_id} ({op.name!r}) at position {position} reads value {value_id} "
                    f"before op {producer} ran",
                    position=position,
                    op_id=op_id,
                )
        if op_id in seen and not op.recomputable:
            raise InvalidScheduleError(
                "S3",
                f"op {op_id} ({op.name!r}) is not recomputable but runs again at position "
                f"{position}",
                position=position,
                op_id=op_id,
            )
        seen.add(op_id)
    return seen


def executed_peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """Runs the order with a table of buffers, and returns its peak, resident bytes included."""
    graph, order = problem.graph, schedule.order

    # Walking backwards: is a value read again before the next time it is computed?
    wanted: set[int] = set(graph.outputs)
    wanted_after: list[set[int]] = [set()] * len(order)
    for position in range(len(order) - 1, -1, -1):
        op = graph.ops[order[position]]
        touched = set(op.inputs) | set(op.outputs)
        wanted_after[position] = touched & wanted
        wanted -= set(op.outputs)
        wanted |= set(op.inputs)

    buffers: dict[int, int] = {}
    held = peak = problem.profile.resident_bytes
    for position, op_id in enumerate(order):
        op = graph.ops[op_id]
        releasable = [
            v for v in dict.fromkeys(op.inputs)
            if graph.values[v].producer is not None and v not in wanted_after[position]
        ]  # fmt: skip
        takeover = [v for v in releasable if v in op.may_reuse]
        for value_id in op.outputs:
            # the instance before this one is not read again and must not exist any more
            held -= buffers.pop(value_id, 0)
            size = graph.values[value_id].nbytes
            donor = next((v for v in takeover if buffers[v] == size), None)
            if donor is not None:
                takeover.remove(donor)
                releasable.remove(donor)
                del buffers[donor]
                held -= size
            buffers[value_id] = size
            held += size
        peak = max(peak, held + problem.profile.op_workspace_bytes[op_id])
        for value_id in releasable:
            held -= buffers.pop(value_id)
        for value_id in op.outputs:
            if value_id not in wanted_after[position]:
                held -= buffers.pop(value_id)
    return peak
