"""Computes a tighter lower bound for graphs that are nearly a chain: many cuts in one program.

It is an integer program, and valid for every legal order.

Let j_1, …, j_m be ops each of which depends on the one before (a training step has long such
chains). Their first runs divide any schedule into windows 0 … m; window w begins with the first run
of j_w. Op i cannot run before window d(i), that of the last cut it depends on, and must have run
before the first cut that depends on it, number a(i). With X[i,w] "i runs in window w" and S[v,w]
"value v, computed before, is alive when j_w first runs":

    Σ X[i,w] ≥ 1 over d(i) ≤ w < a(i)
    X[j_w,w] = 1
    X[i,w] ≤ S[p,w] + X[k,w]                 p read by i and computed by k
    S[p,w+1] ≤ S[p,w] + X[k,w]               S is 0 before p can exist
    S[p,w] = 1                               p read by j_w
    S[v,m] + X[k,m] ≥ 1                      v a graph output
    Σ bytes·S[·,w] + bytes of j_w's outputs not taken over + workspace ≤ budget − resident

and Σ time·X is at most the time of the schedule. This is Checkmate's program (arXiv 1910.02653)
with memory checked at the cuts only and with no order imposed. Memory between cuts is ignored, so
that it stays a relaxation. HiGHS's dual bound is a bound whenever it stops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.topology import predecessors
from keras_remat.solvers.engines.linear_program import LinearProgram, Term
from keras_remat.solvers.engines.milp import optimize

SAFETY = 1e-6
"""Relative; the solver's tolerance, taken off the bound."""


def longest_chain(problem: Problem) -> list[int]:
    """Returns needed ops each of which depends on the one before, as many as possible."""
    graph = problem.graph
    length: dict[int, int] = {}
    previous: dict[int, int] = {}
    for op_id in sorted(graph.needed):
        before = predecessors(graph, op_id)
        best = max(sorted(before), key=lambda i: length[i], default=None)
        length[op_id] = 1 if best is None else length[best] + 1
        if best is not None:
            previous[op_id] = best
    at = max(sorted(length), key=lambda i: length[i], default=None)
    chain: list[int] = []
    while at is not None:
        chain.append(at)
        at = previous.get(at)
    return chain[::-1]


def lower_bound_s(
    problem: Problem,
    cuts: Sequence[int],
    *,
    limit_s: float,
    known_s: float = float("inf"),
    relax: bool = False,
) -> float:
    """Returns seconds that no legal schedule within the budget beats; at least the store-all time.

    Args:
        problem: a problem with a budget.
        cuts: needed ops, each depending on the one before.
        limit_s: seconds for the solver.
        known_s: seconds of a schedule within the budget, which lets the solver discard slower ones.
        relax: whether to solve the linear relaxation; stopped early, it gives no bound.
    """
    total = problem.store_all_time_s
    if problem.budget_bytes is None or not cuts:
        return total
    unit = max(total, 1e-12)
    program = _program(problem, cuts, unit)
    if known_s < float("inf"):
        costly = [(at, cost) for at, cost in enumerate(program.cost) if cost]
        program.at_most(costly, known_s / unit * (1 + SAFETY))
    bound = optimize(program, limit_s, relax=relax, gap=1e-7).bound * unit * (1 - SAFETY)
    return max(total, bound) if np.isfinite(bound) else total


def _program(problem: Problem, cuts: Sequence[int], unit_s: float) -> LinearProgram:
    """Returns the program of the module docstring, with times in units."""
    program, graph, profile = LinearProgram(), problem.graph, problem.profile
    last, needed, outputs = len(cuts), sorted(graph.needed), set(graph.outputs)
    position = {op_id: w + 1 for w, op_id in enumerate(cuts)}
    before = {i: predecessors(graph, i) for i in needed}
    first, due = dict.fromkeys(needed, 0), dict.fromkeys(needed, last + 1)
    for i in needed:
        first[i] = max([position.get(i, 0), *(first[p] for p in before[i])])
    for i in reversed(needed):
        for p in before[i]:
            due[p] = min(due[p], position.get(i, due[i]))
    runs: dict[tuple[int, int], int] = {}
    alive: dict[tuple[int, int], int] = {}

    def minus(producer: int, value_id: int, window: int) -> list[Term]:
        """Returns −(S[v, w] + X[k, w]), without the terms that are no variables."""
        columns = (alive.get((value_id, window)), runs.get((producer, window)))
        return [(column, -1.0) for column in columns if column is not None]

    for i in needed:
        ends = last + 1 if graph.ops[i].recomputable else due[i]
        for w in range(first[i], ends):
            runs[i, w] = program.variable(
                profile.op_time_s[i] / unit_s, floor=float(position.get(i) == w), integral=True
            )
        program.at_most(((runs[i, w], -1.0) for w in range(first[i], min(due[i], ends))), -1.0)
    for i in needed:
        for v in graph.ops[i].outputs:
            for w in range(first[i] + 1, last + 1):
                read = v in graph.ops[cuts[w - 1]].inputs
                alive[v, w] = program.variable(floor=float(read), integral=True)
                program.at_most([(alive[v, w], 1.0), *minus(i, v, w - 1)], 0.0)
            if v in outputs:
                program.at_most(minus(i, v, last), -1.0)
    for (i, w), run in runs.items():
        for v in dict.fromkeys(graph.ops[i].inputs):
            producer = graph.values[v].producer
            if producer is not None:
                program.at_most([(run, 1.0), *minus(producer, v, w)], 0.0)
    for w, cut in enumerate(cuts, start=1):
        op = graph.ops[cut]
        own = sum(graph.values[v].nbytes for v in op.outputs) + profile.op_workspace_bytes[cut]
        reusable = {v for v in op.may_reuse if graph.values[v].producer is not None}
        own -= reused_bytes(op, graph.values, reusable - problem.irreplaceable)
        room = (problem.budget_bytes or 0) - profile.resident_bytes - own
        scale = max(1, abs(room))
        held = [(c, graph.values[v].nbytes / scale) for (v, at), c in alive.items() if at == w]
        program.at_most(held, room / scale)
    return program
