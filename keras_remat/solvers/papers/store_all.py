"""No recomputation: every needed op once, in the default order. The baseline every overhead is a
ratio to."""

from __future__ import annotations

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.solvers.orders.incumbent import Incumbent, Progress


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """Returns the store-all schedule; optimal in time whenever it fits.

    Raises:
        ScheduleNotFoundError: it does not fit the budget.
    """
    incumbent = Incumbent(problem, "store_all", time_limit_s, progress)
    incumbent.offer_store_all()
    return incumbent.solution()
