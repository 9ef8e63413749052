"""The default solver where values can be fetched: recompute or fetch, in one plan.

The best schedule without fetches comes first, with the work of the whole time limit, and with a
fetch for every run that takes longer (:mod:`keras_remat.solvers.orders.fetch`): so the result is
never worse than that of recomputation alone. The time it leaves, a tenth at least, goes to greedy
eviction, which decides value by value, to Checkmate's program on small graphs, and to annealing
from the best schedule, which moves and flips fetches. Nothing is proved but that no schedule beats
store-all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers.engines import native
from keras_remat.solvers.orders.fetch import recomputing, with_fetches
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.papers import checkmate_milp
from keras_remat.solvers.search import anneal, greedy

EXACT_SHARE, GREEDY_SHARE, ANNEAL_SHARE = 0.03, 0.02, 0.04
"""Shares of the time limit that follow the search without fetches."""


def solve(incumbent: Incumbent, seed: int, recompute: Callable[..., None]) -> None:
    """Offers the schedules found within the time limit.

    Args:
        incumbent, seed: as of every solver; values can be fetched.
        recompute: the solver that gives the schedule without fetches.
    """
    problem, limit_s = incumbent.problem, incumbent.deadline.seconds
    budget = problem.budget_bytes
    if any(map(incumbent.offer, reversed(base_orders(problem)))) or budget is None:
        return
    with suppress(ScheduleNotFoundError):  # another part may find one
        found = recomputing(recompute, problem, name="auto", time_limit_s=limit_s, seed=seed)
        incumbent.offer(found.schedule.order)
    if len(problem.graph.needed) <= checkmate_milp.EXACT_OPS:
        exact = Incumbent(problem, "checkmate_milp", EXACT_SHARE * limit_s)
        checkmate_milp.solve(exact, seed)
        if exact.order is not None:
            incumbent.offer(exact.order)
    steps = greedy.steps_limit(GREEDY_SHARE * limit_s)
    for order in greedy.candidates(problem, deadline=incumbent.deadline, max_steps=steps):
        incumbent.offer(trimmed(problem, with_fetches(problem, order), budget))
    compiled = native.is_compiled()
    coolings = (anneal.COOL,) if incumbent.order is not None else (anneal.LOOSE, anneal.STIFF)
    moves = anneal.moves_for(problem, ANNEAL_SHARE * limit_s, compiled=compiled) // len(coolings)
    for order in anneal.improve(
        problem,
        incumbent.order,
        deadline=incumbent.deadline,
        moves=moves,
        compiled=compiled,
        seed=seed,
        coolings=coolings,
    ):
        incumbent.offer(trimmed(problem, order, budget))
