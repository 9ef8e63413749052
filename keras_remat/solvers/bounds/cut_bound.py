"""A lower bound on the time of every legal schedule, whatever its order: what must be recomputed
after a cut.

Take an op j that every schedule runs. Just after its first run, all its ancestors have run and none
of its descendants has. Let v be a value computed by an ancestor and read by a descendant (or a
graph output). It is alive at that moment, or its producer runs again later; and if it runs again,
the same holds for each value it reads that an ancestor computes. With S[v] "alive when j runs
first" and R[i] "op i runs again after that", for the ancestors i of j:

    S[v] + R[i] ≥ 1        v computed by i, read by a descendant of j or a graph output
    R[i] ≤ S[p] + R[k]     p read by i and computed by an ancestor k
    Σ bytes·S + bytes of j's outputs not taken over + workspace ≤ budget − resident
    S[v] = 1               for what j reads, and for what cannot be computed again

and Σ time·R is less than or equal to what any schedule spends on recomputation. The bound is the
largest over some cuts of the linear relaxation, solved by HiGHS; rounding plays no part, and
nothing is assumed about the order, so that it is a true bound. It sees only one moment at a time:
the recomputations that different cuts enforce are not added up.
"""

from __future__ import annotations

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.core.topology import ancestors_of, descendants_of
from keras_remat.solvers.engines.linear_program import LinearProgram
from keras_remat.solvers.engines.milp import optimize

CUTS = 6
SAMPLE = 40
"""Ops among which the cuts are chosen."""
SAFETY = 1e-6
"""Relative; the solver's tolerance, taken off the bound."""


def lower_bound_s(problem: Problem, *, deadline: Deadline) -> float:
    """Returns seconds that no legal schedule within the budget beats; at least the store-all time,
    and just that where values can be fetched.

    Args:
        problem: with a budget or without.
        deadline: no cut is tried after it.
    """
    total = problem.store_all_time_s
    if problem.budget_bytes is None or problem.fetches:
        return total
    best = total
    for op_id in promising_cuts(problem):
        if deadline.is_over:
            break
        best = max(
            best,
            total + cut_bound_s(problem, op_id, limit_s=max(0.1, deadline.left_s())) * (1 - SAFETY),
        )
    return best


def promising_cuts(problem: Problem) -> list[int]:
    """Ops at whose first run most bytes must be alive or recomputed, most first."""
    order = Schedule.store_all(problem.graph).order
    live = live_bytes(problem, Schedule(order))
    over = np.flatnonzero(live > (problem.budget_bytes or 0))
    if not len(over):
        return []
    sample = over[np.linspace(0, len(over) - 1, min(len(over), SAMPLE)).astype(int)]
    picked = dict.fromkeys([int(np.argmax(live)), *(int(at) for at in sample)])
    crossing = {order[at]: crossing_bytes(problem, order[at]) for at in picked}
    return sorted(crossing, key=lambda op_id: (-crossing[op_id], op_id))[:CUTS]


def crossing_bytes(problem: Problem, cut: int) -> int:
    """Bytes of what ancestors of ``cut`` compute and it or its descendants read, and of its
    outputs."""
    graph = problem.graph
    later = descendants_of(graph, cut) | {cut}
    total = sum(graph.values[v].nbytes for v in graph.ops[cut].outputs)
    for op_id in ancestors_of(graph, cut):
        for value_id in graph.ops[op_id].outputs:
            if not later.isdisjoint(graph.readers[value_id]):
                total += graph.values[value_id].nbytes
    return total


def cut_bound_s(problem: Problem, cut: int, *, limit_s: float = 10.0) -> float:
    """Seconds of recomputation that the cut at the first run of op ``cut`` enforces; 0 when the
    solver has no answer in time."""
    graph, profile = problem.graph, problem.profile
    ancestors = sorted(ancestors_of(graph, cut))
    if not ancestors:
        return 0.0
    op, outputs = graph.ops[cut], set(graph.outputs)
    readers = descendants_of(graph, cut) & graph.needed
    unit = max(problem.store_all_time_s, 1e-12)
    program = LinearProgram()
    op_column = {
        op_id: program.variable(
            profile.op_time_s[op_id] / unit, ceiling=float(graph.ops[op_id].recomputable)
        )
        for op_id in ancestors
    }
    value_column = {
        value_id: program.variable(floor=float(value_id in op.inputs))
        for op_id in ancestors
        for value_id in graph.ops[op_id].outputs
    }
    for value_id, column in value_column.items():
        if value_id in outputs or not readers.isdisjoint(graph.readers[value_id]):
            program.at_most([(column, -1.0), (op_column[graph.maker(value_id)], -1.0)], -1.0)
    for op_id, column in op_column.items():
        for value_id in dict.fromkeys(graph.ops[op_id].inputs):
            producer = graph.values[value_id].producer
            if producer in op_column:
                program.at_most(
                    [(column, 1.0), (value_column[value_id], -1.0), (op_column[producer], -1.0)],
                    0.0,
                )
    own = sum(graph.values[v].nbytes for v in op.outputs) + profile.op_workspace_bytes[cut]
    own -= reused_bytes(op, graph.values, value_column.keys() - problem.irreplaceable)
    room = (problem.budget_bytes or 0) - profile.resident_bytes - own
    scale = max(1, room)
    program.at_most(
        ((c, graph.values[v].nbytes / scale) for v, c in value_column.items()), room / scale
    )
    return optimize(program, limit_s, relax=True).bound * unit
