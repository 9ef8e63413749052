"""Computes the costs of a step in slices from those of the whole step and of other slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from keras_remat.backends.base import TracedStep
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing
from keras_remat.core.target import CPU_RATES


def sliced_costs(problem: Problem, sliced: SlicedGraph, expected: Sequence[int]) -> Problem:
    """Returns the costs of a sliced graph, from those of the whole graph.

    A part takes its share of the op's time and workspace. An op that cuts, joins or adds moves its
    bytes at a CPU's rate, because less is known of a GPU's.

    Args:
        expected: bytes of workspace that each op of the sliced graph is expected to ask for. Some
            kernels ask for as much for a part as for the whole.
    """
    profile, graph = problem.profile, sliced.graph
    parts = sliced.slicing.parts
    times, workspaces = [], []
    for op, origin in zip(graph.ops, sliced.origins, strict=True):
        if origin.role == "whole":
            times.append(profile.op_time_s[origin.source])
            workspaces.append(profile.op_workspace_bytes[origin.source])
        elif origin.role == "part":
            times.append(
                max(CPU_RATES.seconds_per_kernel, profile.op_time_s[origin.source] / parts)
            )
            whole = profile.op_workspace_bytes[origin.source]
            workspaces.append(min(whole, max(-(-whole // parts), expected[op.id])))
        else:
            moved_s = _glue_bytes(graph, op.id, origin.role) * CPU_RATES.seconds_per_byte
            times.append(CPU_RATES.seconds_per_kernel + moved_s)
            workspaces.append(0)
    costs = replace(profile, op_time_s=tuple(times), op_workspace_bytes=tuple(workspaces))
    return replace(problem, graph=graph, profile=costs)


def undivided_scratch(
    traced: TracedStep, problem: Problem, estimate: Callable[[TracedStep], Profile]
) -> dict[int, int]:
    """Returns the workspace that parts measured above the estimate, by id of the whole op.

    More parts may not divide these bytes.

    Args:
        traced: a step in slices; for a whole step, the result is empty.
        problem: the costs of ``traced``.
        estimate: returns estimated costs of a step.
    """
    if traced.whole is None or problem.profile.source != "measured":
        return {}
    asked, expected = problem.profile.op_workspace_bytes, estimate(traced).op_workspace_bytes
    found: dict[int, int] = {}
    for op_id, origin in enumerate(traced.whole.sliced.origins):
        if origin.role == "part" and asked[op_id] > expected[op_id]:
            more = asked[op_id] - expected[op_id]
            found[origin.source] = max(found.get(origin.source, 0), more)
    return found


def _glue_bytes(graph: Graph, op_id: int, role: str) -> int:
    """Returns the bytes that an op which cuts, joins or adds reads and writes."""
    op, values = graph.ops[op_id], graph.values
    if role == "start":
        return 0
    if role == "cut":
        return 2 * values[op.outputs[0]].nbytes
    if role == "join":
        return 2 * values[op.inputs[1]].nbytes
    return sum(values[v].nbytes for v in (*op.inputs, *op.outputs))


def costs_of(
    sliced: TracedStep,
    problem: Problem,
    estimate: Callable[[TracedStep], Profile],
    undivided: Mapping[int, int] | None = None,
) -> tuple[TracedStep, Problem]:
    """Returns a sliced step that knows the workspace of its whole ops, and its costs.

    The costs are shares of the whole step's costs where these were measured, else estimates.

    Args:
        undivided: bytes as :func:`undivided_scratch` returns them.
    """
    if sliced.whole is None:
        raise LookupError("the step is not in slices")
    whole = replace(sliced.whole, scratch=problem.profile.op_workspace_bytes)
    expected = estimate(sliced)
    if problem.profile.source == "measured":
        costs = sliced_costs(problem, whole.sliced, expected.op_workspace_bytes)
    else:
        profile = replace(expected, resident_bytes=problem.profile.resident_bytes)
        costs = replace(problem, graph=sliced.graph, profile=profile)
    if undivided:
        asked = list(costs.profile.op_workspace_bytes)
        for op_id, origin in enumerate(whole.sliced.origins):
            if origin.role == "part" and origin.source in undivided:
                least = expected.op_workspace_bytes[op_id] + undivided[origin.source]
                asked[op_id] = max(asked[op_id], least)
        costs = replace(costs, profile=replace(costs.profile, op_workspace_bytes=tuple(asked)))
    return replace(sliced, whole=whole), costs


def ends_bytes(graph: Graph, rules: Mapping[int, SliceRule], slicing: Slicing) -> int:
    """Returns bytes above the resident ones that a step in slices needs in any order.

    They come from ops that read parts of a value that is made whole, and make parts of a value that
    is read whole. When the buffer of the second value is begun, its parts have all been made, or
    the first value is still to be read. No single op shows that: slices of Adam's updates seemed to
    need half of what they do.
    """
    chosen, most_bytes = set(slicing.ops), 0
    for op_id in slicing.ops:
        rule = rules[op_id]
        made = ((v, graph.values[v].producer) for v in rule.sliced)
        cut = [v for v, p in made if p is not None and (p not in chosen or v in rules[p].sums)]
        joined = [
            v
            for v in set(graph.ops[op_id].outputs) - rule.sums
            if any(r not in chosen or v not in rules[r].sliced for r in graph.readers[v])
        ]
        if cut and joined:
            read, whole = (max(graph.values[v].nbytes for v in ends) for ends in (cut, joined))
            most_bytes = max(most_bytes, whole + min(read, whole))
    return most_bytes
