"""No recomputation: every needed op once, in the default order. The baseline every overhead is a
ratio to."""

from __future__ import annotations

import time

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError


def solve(problem: Problem, *, time_limit_s: float = 30.0, seed: int = 0) -> Solution:
    """Returns the store-all schedule; optimal in time whenever it fits.

    Raises:
        ScheduleNotFoundError: it does not fit the budget.
    """
    started = time.perf_counter()
    schedule = Schedule.store_all(problem.graph)
    usage = simulate(problem, schedule)
    if problem.budget_bytes is not None and usage.peak_bytes > problem.budget_bytes:
        raise ScheduleNotFoundError(
            problem.budget_bytes, problem.floor_bytes, usage.peak_bytes, solver="store_all"
        )
    return Solution(
        schedule,
        "store_all",
        "optimal",
        time.perf_counter() - started,
        problem.store_all_time_s,
        usage,
    )
