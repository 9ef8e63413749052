"""Rounds Checkmate's relaxation in two phases: first which values are kept, then which ops run.

Jain et al. 2020, sec. 5 and algorithm 2. Rounding both R and S is never feasible. So only S is
rounded (at a threshold, or at random with S as the probability), and the cheapest R follows from
it: per stage, from its last op backwards, an op runs if an op of this stage needs one of its values
that is not kept (:meth:`keras_remat.solvers.orders.demand.Walk.missing`). A value whose S was
rounded up, although it was neither kept nor computed before, is either computed to be kept, or let
go; both are tried.

Rounding knows nothing of memory, so the paper solves the relaxation for (1 − ε) of the budget with
ε = 0.1. Here ε is searched, every rounding is simulated under the real budget, and recomputations
are taken back where there is room (:mod:`keras_remat.solvers.orders.trim`). The bound is that of
the relaxation under the full budget; :mod:`keras_remat.solvers.papers.checkmate` states its scope.
The solver ``checkmate_lp`` rounds by thresholds alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.solvers.engines.milp import Answer, optimize
from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.papers.checkmate import Program, build
from keras_remat.solvers.papers.checkmate_milp import MAX_VARIABLES, meets_bound, safe_bound_s

THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9, 0.02, 0.98, 0.4, 0.6, 0.2, 0.8)
EPSILONS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
RANDOM_ROUNDINGS = 20  # per ε
NOT_IN_TIME = "the relaxation was not solved in time"


def relaxation(problem: Problem, deadline: Deadline) -> tuple[Program, Answer]:
    """Solves the linear relaxation of Checkmate's program.

    Without within-stage memory rows (see :mod:`keras_remat.solvers.papers.checkmate`) it has a
    quarter of the rows, costs a fiftieth of the time and loses next to nothing. On Checkmate's
    ResNet50 (353 ops) it takes about 20 s.

    Args:
        problem: a problem with a budget.
        deadline: deadline for the solution.

    Raises:
        TimeoutError: the deadline was over before the program was written.
    """
    program = build(problem, (), deadline=deadline)
    return program, optimize(program, deadline.left_s(), relax=True)


def repaired_order(program: Program, kept: dict[int, set[int]], *, recompute: bool) -> list[int]:
    """Returns the cheapest order for a rounded S.

    Args:
        program: the program, for its ops.
        kept: stage → values to keep from the stage before into it.
        recompute: whether a value that is to be kept but is not there is computed, or let go.
    """
    graph = program.problem.graph

    def policy(walk: Walk) -> None:
        for t, op_id in enumerate(program.ops):
            keep = kept.get(t + 1, set())
            if recompute:
                lacking = {graph.values[v].producer for v in keep - walk.alive} - {op_id}
                for producer in sorted(i for i in lacking if i is not None and (t, i) in again):
                    if not walk.alive.issuperset(graph.ops[producer].outputs):
                        walk.demand(producer)
            walk.demand(op_id)
            walk.drop(walk.alive - keep)
        if recompute:
            for v in graph.outputs:
                lost = graph.values[v].producer
                if v not in walk.alive and lost is not None and (len(program.ops), lost) in again:
                    walk.demand(lost)

    again = {(t, program.ops[i]) for t, i in program.run}
    return order_of(program.problem, policy)


def roundings(
    program: Program, x: np.ndarray, rng: np.random.Generator | None
) -> Iterator[list[int]]:
    """Yields orders from a relaxed solution: by thresholds without ``rng``, at random with it."""
    tried: set[frozenset[tuple[int, int]]] = set()
    chances = x[list(program.keep.values())]
    count = len(THRESHOLDS) if rng is None else RANDOM_ROUNDINGS
    for at in range(count):
        chosen = chances >= THRESHOLDS[at] if rng is None else chances > rng.random(len(chances))
        key = frozenset(compress(program.keep, chosen))
        if key in tried:
            continue
        tried.add(key)
        kept: dict[int, set[int]] = {}
        for t, v in key:
            kept.setdefault(t, set()).add(v)
        for recompute in (True, False):
            yield repaired_order(program, kept, recompute=recompute)


def solve(incumbent: Incumbent, seed: int, *, randomized: bool = True) -> None:
    """Rounds the relaxation for every ε.

    Args:
        incumbent, seed: as for every solver.
        randomized: whether to round at random, too, and not only by thresholds.
    """
    problem = incumbent.problem
    if incumbent.offer_store_all() or problem.budget_bytes is None:
        return
    incumbent.keeps_order = True
    if len(problem.graph.needed) ** 2 > MAX_VARIABLES:
        incumbent.reason = NOT_IN_TIME
        return
    budget = problem.budget_bytes
    rng = np.random.default_rng(seed) if randomized else None
    for epsilon in EPSILONS:
        if incumbent.deadline.is_over:
            break
        tighter = problem.with_budget(max(1, int(budget * (1 - epsilon))))
        try:
            program, answer = relaxation(tighter, incumbent.deadline)
        except TimeoutError:
            incumbent.reason = incumbent.reason if epsilon else NOT_IN_TIME
            break
        if epsilon == 0:
            incumbent.bound_s = safe_bound_s(problem, program.seconds(answer.bound))
        if answer.x is None:
            if epsilon == 0:
                incumbent.reason = (
                    "the relaxation has no solution"
                    if answer.status == "infeasible"
                    else NOT_IN_TIME
                )
            break
        for source in (None, rng) if rng is not None else (None,):
            for order in roundings(program, answer.x, source):
                if incumbent.offer(order):
                    incumbent.offer(trimmed(problem, order))
                if incumbent.deadline.is_over:
                    break
        incumbent.optimal = meets_bound(incumbent)
        if incumbent.optimal:
            break
