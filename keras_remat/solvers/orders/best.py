"""The best schedule and the best bound that a portfolio has seen, and the clock it works against.

Where :class:`keras_remat.solvers.orders.incumbent.Incumbent` serves one solver, this is for many:
it takes any order, legal or not, names whose it was, trims it, and knows when the bound is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InvalidScheduleError, PeakExceededError
from keras_remat.solvers.orders.incumbent import Progress
from keras_remat.solvers.orders.trim import trimmed

PROOF_TOLERANCE = 3e-6
"""Relative; the bounds give away a millionth for their solver's tolerances, so that meeting them
exactly is not possible."""


class Best:
    """Keeps the fastest order and the highest bound.

    Args:
        problem: what is solved.
        time_limit_s: seconds from now after which ``deadline`` is over.
        progress: is called with every better solution and bound.

    Attributes:
        best: the fastest order, ``None`` before there is one.
        best_s: its seconds, infinite before there is one.
        solver: the name of the solver that gave it.
        bound_s: seconds that no schedule beats.
    """

    def __init__(self, problem: Problem, time_limit_s: float, progress: Progress | None):
        self.problem, self.progress = problem, progress
        self.deadline = Deadline(time_limit_s)
        self.best: tuple[int, ...] | None = None
        self.best_s = float("inf")
        self.solver = "auto"
        self.bound_s = problem.store_all_time_s

    @property
    def proved(self) -> bool:
        """Whether nothing is faster than the best order."""
        return self.best is not None and self.best_s <= self.bound_s * (1 + PROOF_TOLERANCE)

    def solution(self) -> Solution:
        """The best order as a solution.

        Raises:
            ValueError: there is none yet.
        """
        if self.best is None:
            raise ValueError("there is no schedule yet")
        schedule = Schedule(self.best)
        status: Literal["optimal", "feasible"] = "optimal" if self.proved else "feasible"
        spent = self.deadline.spent_s()
        return Solution(
            schedule, self.solver, status, spent, self.bound_s, simulate(self.problem, schedule)
        )

    def offer(self, order: Sequence[int], solver: str) -> bool:
        """Keeps ``order`` if it is legal, within the budget and faster than the best; returns
        whether it fits at all."""
        schedule = Schedule(tuple(order))
        try:
            validate(self.problem, schedule)
        except (InvalidScheduleError, PeakExceededError):
            return False
        seconds = simulate(self.problem, schedule).time_s
        if seconds < self.best_s * (1 - PROOF_TOLERANCE):
            self.best, self.best_s, self.solver = schedule.order, seconds, solver
            if self.problem.budget_bytes is not None:
                self.best = trimmed(self.problem, self.best, self.problem.budget_bytes)
                self.best_s = simulate(self.problem, Schedule(self.best)).time_s
            self._report()
        return True

    def report_bound(self, bound_s: float) -> None:
        """Keeps a bound if it is higher than the best one."""
        self.bound_s = max(self.bound_s, bound_s)
        self._report()

    def _report(self) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(self.solution())
