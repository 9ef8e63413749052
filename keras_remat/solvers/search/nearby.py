"""Finds schedules near a known one that is a little over the budget: a warm start.

A schedule for one batch size nearly fits the next. Annealing
(:mod:`keras_remat.solvers.search.anneal`) that begins with it finds a schedule in seconds. A solver
that begins with nothing takes much longer, or finds none; but annealing does not get far from where
it begins. Large graphs are coarsened (:mod:`keras_remat.solvers.orders.coarsen`) along the known
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers.orders import coarsen
from keras_remat.solvers.search import anneal

ROUNDS = 4
"""Number of rounds into which the work of a time limit is divided, at most."""


def schedules(
    problem: Problem,
    start: Schedule,
    *,
    time_limit_s: float,
    seed: int = 0,
    patience: float = 1.0,
) -> Iterator[Schedule]:
    """Yields legal schedules within the budget, each faster than the one before.

    Args:
        problem: a problem with a budget.
        start: a legal order; every needed op runs in it.
        time_limit_s: seconds.
        seed: seed of every choice.
        patience: as in :func:`keras_remat.solvers.solve`.
    """
    deadline = Deadline(time_limit_s, patience=patience)
    budget = problem.budget_bytes or 0
    base = tuple(dict.fromkeys(start.order))
    coarse = coarsen.Coarse(problem, base, coarsen.small_value_threshold(problem, base))
    known = coarse.project(start.order)
    compiled = anneal.is_compiled(deadline)
    moves = anneal.moves_for(coarse.problem, time_limit_s, compiled=compiled)
    # the work ends the search: with too few moves for one round and its repairs, there is no round
    rounds = min(ROUNDS, moves // (anneal.CHUNK_MOVES * (1 + anneal.REPAIR_CHUNKS)))
    for order in anneal.improve(
        coarse.problem,
        known,
        deadline=deadline,
        moves=moves // max(1, rounds),
        compiled=compiled,
        seed=seed,
        coolings=repeat(anneal.COOL, rounds),
    ):
        schedule = Schedule(coarse.expand(order))
        if simulate(problem, schedule).peak_bytes <= budget:
            yield schedule
