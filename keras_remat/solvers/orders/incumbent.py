"""The best schedule a solver has seen so far, and the clock it works against.

A solver offers every order it makes; simulation alone decides whether it fits and what it costs.
What leaves :meth:`Incumbent.solution` has passed :func:`keras_remat.core.validate.validate`, so no
solver can return a schedule over the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import ScheduleNotFoundError

Progress = Callable[[Solution], None]
"""Is called with every better solution."""


class Incumbent:
    """Keeps the fastest order within the budget; of two equally fast ones the one with the smaller
    peak, then the first.

    Args:
        problem: what is solved.
        solver: public name of the solver, for the solution and for error messages.
        time_limit_s: seconds from now after which :attr:`deadline` is over.
        progress: is called with every better solution.
    """

    def __init__(
        self,
        problem: Problem,
        solver: str,
        time_limit_s: float,
        progress: Progress | None = None,
    ):
        self.problem = problem
        self.solver = solver
        self.deadline = Deadline(time_limit_s)
        self.progress = progress
        self.order: tuple[int, ...] | None = None
        self.usage: Usage | None = None
        self.least_peak_bytes: int | None = None

    def fits(self, usage: Usage) -> bool:
        """Whether a usage is within the budget."""
        return self.problem.budget_bytes is None or usage.peak_bytes <= self.problem.budget_bytes

    def offer(self, order: Sequence[int]) -> Usage:
        """Simulates a legal order, keeps it if it fits and is better, and returns what it takes."""
        schedule = Schedule(tuple(order))
        usage = simulate(self.problem, schedule)
        if self.least_peak_bytes is None or usage.peak_bytes < self.least_peak_bytes:
            self.least_peak_bytes = usage.peak_bytes
        if self.fits(usage) and (
            self.usage is None
            or (usage.time_s, usage.peak_bytes) < (self.usage.time_s, self.usage.peak_bytes)
        ):
            self.order, self.usage = schedule.order, usage
            if self.progress is not None:
                self.progress(self.solution())
        return usage

    def offer_store_all(self) -> bool:
        """Offers the schedule without recomputation; true when it fits, and then nothing is
        faster."""
        return self.fits(self.offer(Schedule.store_all(self.problem.graph).order))

    def solution(
        self,
        lower_bound_s: float | None = None,
        *,
        optimal: bool = False,
        reason: str = "",
        keeps_order: bool = False,
    ) -> Solution:
        """The best schedule seen.

        Args:
            lower_bound_s: a bound the solver proved; running every needed op once is a bound in any
                case.
            optimal: the solver proved that nothing is faster.
            reason: why none was found, for the error message.
            keeps_order: the proof is of schedules alone whose first runs are in the graph's order.

        Raises:
            ScheduleNotFoundError: no offered order fits the budget.
        """
        if self.order is None or self.usage is None:
            name = f"{self.solver} ({reason})" if reason else self.solver
            raise ScheduleNotFoundError(
                self.problem.budget_bytes or 0,
                self.problem.floor_bytes,
                self.least_peak_bytes,
                solver=name,
            )
        schedule = Schedule(self.order)
        validate(self.problem, schedule)
        bound = max(self.problem.store_all_time_s, lower_bound_s or 0.0)
        bound = min(
            bound, self.usage.time_s
        )  # sums of floats in another order may differ in the last digit
        is_plain = len(self.order) == len(self.problem.graph.needed)
        optimal = optimal or is_plain
        status: Literal["optimal", "feasible"] = "optimal" if optimal else "feasible"
        keeps_order = keeps_order and not is_plain and bound > self.problem.store_all_time_s
        spent_s = self.deadline.spent_s()
        return Solution(schedule, self.solver, status, spent_s, bound, self.usage, keeps_order)
