"""A tighter lower bound, valid for every legal order, for graphs that are nearly a chain: many cuts
in one integer program.

Let j_1, …, j_m be ops each of which depends on the one before (a training step has long such
chains). Their first runs divide any schedule into windows 0 … m; window w begins with the first run
of j_w. Op i cannot run before window d(i), that of the last cut it depends on, and must have run
before the first cut that depends on it, number a(i). With X[i,w] "i runs in window w" and S[v,w]
"value v, computed before, is alive when j_w first runs":

    Σ X[i,w] ≥ 1 over d(i) ≤ w < a(i)        X[j_w,w] = 1
    X[i,w] ≤ S[p,w] + X[k,w]                 p read by i and computed by k (S is 0 before p can
    exist) S[p,w+1] ≤ S[p,w] + X[k,w]
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
from scipy.optimize import Bounds, LinearConstraint, milp

from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.topology import predecessors
from keras_remat.solvers.engines.linear_program import LinearProgram

SAFETY = 1e-6
"""Relative; the solver's tolerance, taken off the bound."""


def longest_chain(problem: Problem) -> list[int]:
    """Needed ops each of which depends on the one before, as many as possible."""
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
    integer: bool = True,
    known_s: float | None = None,
) -> float:
    """Returns seconds that no legal schedule within the budget beats; at least the store-all time,
    and just that where values can be fetched.

    Args:
        problem: with a budget.
        cuts: needed ops, each depending on the one before.
        limit_s: for the solver.
        integer: solve the integer program, not its relaxation.
        known_s: seconds of a schedule within the budget, which lets the solver discard what costs
            more.
    """
    total = problem.store_all_time_s
    if problem.budget_bytes is None or problem.fetches or not cuts:
        return total
    program = _Program(problem, cuts)
    cost, unit = program.cost, max(total, 1e-12)
    if known_s is not None:
        costly = [(at, float(c) / unit) for at, c in enumerate(cost) if c]
        program.at_most(costly, known_s / unit * (1 + SAFETY))
    result = milp(
        cost / unit,
        constraints=LinearConstraint(program.matrix, program.low, program.high),
        integrality=np.full(len(cost), 1 if integer else 0),
        bounds=Bounds(program.floor, program.ceiling),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-7},
    )
    dual = result.mip_dual_bound if integer else (result.fun if result.status == 0 else None)
    return (
        total
        if dual is None or not np.isfinite(dual)
        else max(total, float(dual) * unit * (1 - SAFETY))
    )


class _Program(LinearProgram):
    def __init__(self, problem: Problem, cuts: Sequence[int]):
        super().__init__()
        self.problem, self.graph = problem, problem.graph
        self.last = len(cuts)
        needed = sorted(self.graph.needed)
        position = {op_id: w + 1 for w, op_id in enumerate(cuts)}
        before = {i: predecessors(self.graph, i) for i in needed}
        first = dict.fromkeys(needed, 0)
        for i in needed:
            first[i] = max([position.get(i, 0), *(first[p] for p in before[i])])
        due = dict.fromkeys(needed, self.last + 1)
        for i in reversed(needed):
            for p in before[i]:
                due[p] = min(due[p], position.get(i, due[i]))
        self.runs: dict[tuple[int, int], int] = {}
        for i in needed:
            ends = self.last + 1 if self.graph.ops[i].recomputable else due[i]
            for w in range(first[i], ends):
                self.runs[i, w] = self.variable(
                    problem.profile.op_time_s[i],
                    floor=1.0 if position.get(i) == w and w else 0.0,
                )
            inside = [
                (self.runs[i, w], -1.0) for w in range(first[i], due[i]) if (i, w) in self.runs
            ]
            self.at_most(inside, -1.0)
        self.alive: dict[tuple[int, int], int] = {}
        outputs = set(self.graph.outputs)
        for i in needed:
            for v in self.graph.ops[i].outputs:
                for w in range(first[i] + 1, self.last + 1):
                    read = v in self.graph.ops[cuts[w - 1]].inputs
                    self.alive[v, w] = self.variable(floor=1.0 if read else 0.0)
                    terms = [(self.alive[v, w], 1.0)]
                    terms += [(self.alive[v, w - 1], -1.0)] if (v, w - 1) in self.alive else []
                    terms += [(self.runs[i, w - 1], -1.0)] if (i, w - 1) in self.runs else []
                    self.at_most(terms, 0.0)
                if v in outputs:
                    terms = (
                        [(self.alive[v, self.last], -1.0)] if (v, self.last) in self.alive else []
                    )
                    terms += (
                        [(self.runs[i, self.last], -1.0)] if (i, self.last) in self.runs else []
                    )
                    self.at_most(terms, -1.0)
        for (i, w), run in self.runs.items():
            for v in dict.fromkeys(self.graph.ops[i].inputs):
                producer = self.graph.values[v].producer
                if producer is not None:
                    terms = [(run, 1.0)]
                    terms += [(self.alive[v, w], -1.0)] if (v, w) in self.alive else []
                    terms += [(self.runs[producer, w], -1.0)] if (producer, w) in self.runs else []
                    self.at_most(terms, 0.0)
        for w, cut in enumerate(cuts, start=1):
            self._room(w, cut)

    def _room(self, window: int, cut: int) -> None:
        op = self.graph.ops[cut]
        own = (
            sum(self.graph.values[v].nbytes for v in op.outputs)
            + self.problem.profile.op_workspace_bytes[cut]
        )
        reusable = {
            v
            for v in op.may_reuse
            if self.graph.values[v].producer is not None and v not in self.problem.irreplaceable
        }
        own -= reused_bytes(op, self.graph.values, reusable)
        room = (self.problem.budget_bytes or 0) - self.problem.profile.resident_bytes - own
        scale = max(1, abs(room))
        terms = [
            (column, self.graph.values[v].nbytes / scale)
            for (v, w), column in self.alive.items()
            if w == window
        ]
        self.at_most(terms, room / scale)
