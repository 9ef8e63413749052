"""Keeps the best schedule of a solver so far, its claims about it, and its deadline.

A solver is a function ``solve(incumbent, seed)`` that offers every order it makes. Simulation alone
decides whether an order fits, and its time. :func:`keras_remat.solvers.solve` checks whether it is
legal, for every solution that is reported or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InvalidScheduleError, PeakExceededError, ScheduleNotFoundError

Progress = Callable[[Solution], None]
"""A function that is called with every better solution."""


class Incumbent:
    """Keeps the fastest order within the budget.

    Of two equally fast orders, the one with the smaller peak is kept, then the first.

    Args:
        problem: the problem to solve.
        solver: public name of the solver, for the solution and for error messages.
        time_limit_s: seconds from now after which :attr:`deadline` is over.
        progress: is called with every better solution.
        patience: patience of the deadline.

    Attributes:
        order, usage: the best order with its time and peak, ``None`` before there is one.
        bound_s: seconds that no schedule beats; the solver may raise it.
        tolerance: relative error by which the best order may miss ``bound_s`` and still meet it.
        optimal: whether the solver proved in another way that nothing is faster.
        keeps_order: whether proofs hold only for schedules whose first runs are in the graph's
            order.
        reason: why there is no order, for the error message.
    """

    def __init__(
        self,
        problem: Problem,
        solver: str,
        time_limit_s: float,
        progress: Progress | None = None,
        patience: float = 1.0,
    ):
        self.problem = problem
        self.solver = solver
        self.deadline = Deadline(time_limit_s, patience=patience)
        self.progress = progress
        self.order: tuple[int, ...] | None = None
        self.usage: Usage | None = None
        self.least_peak_bytes: int | None = None
        self.bound_s, self.tolerance = problem.store_all_time_s, 0.0
        self.optimal = self.keeps_order = False
        self.reason = ""

    @property
    def best_s(self) -> float:
        """Returns seconds of the best order, infinite before there is one."""
        return float("inf") if self.usage is None else self.usage.time_s

    @property
    def proved(self) -> bool:
        """Returns whether nothing is faster than the best order."""
        return self.optimal or self.best_s <= self.bound_s * (1 + self.tolerance)

    def offer(self, order: Sequence[int]) -> bool:
        """Simulates a legal order, and keeps it if it fits and is better.

        Returns whether it fits.
        """
        schedule = Schedule(tuple(order))
        usage = simulate(self.problem, schedule)
        if self.least_peak_bytes is None or usage.peak_bytes < self.least_peak_bytes:
            self.least_peak_bytes = usage.peak_bytes
        budget = self.problem.budget_bytes
        fits = budget is None or usage.peak_bytes <= budget
        if fits and (
            self.usage is None
            or (usage.time_s, usage.peak_bytes) < (self.usage.time_s, self.usage.peak_bytes)
        ):
            self.order, self.usage = schedule.order, usage
            self.report()
        return fits

    def offer_store_all(self) -> bool:
        """Offers the schedule without recomputation; returns whether it fits.

        If it does, nothing is faster.
        """
        return self.offer(Schedule.store_all(self.problem.graph).order)

    def report(self) -> None:
        """Calls ``progress`` with the best solution, if there is one."""
        if self.progress is not None and self.order is not None:
            self.progress(self.solution())

    def solution(self) -> Solution:
        """Returns the best schedule seen, with the solver's claims.

        Raises:
            ScheduleNotFoundError: no offered order fits the budget.
        """
        if self.order is None or self.usage is None:
            name = f"{self.solver} ({self.reason})" if self.reason else self.solver
            raise ScheduleNotFoundError(
                self.problem.budget_bytes or 0,
                self.problem.floor_bytes,
                self.least_peak_bytes,
                solver=name,
            )
        schedule = Schedule(self.order)
        # sums of floats in another order may differ in the last digit
        bound = min(self.bound_s, self.usage.time_s)
        is_plain = len(self.order) == len(self.problem.graph.needed)
        proved = self.proved or is_plain
        status: Literal["optimal", "feasible"] = "optimal" if proved else "feasible"
        keeps_order = self.keeps_order and not is_plain and bound > self.problem.store_all_time_s
        spent_s = self.deadline.spent_s()
        return Solution(schedule, self.solver, status, spent_s, bound, self.usage, keeps_order)


def run(
    search: Callable[..., None],
    problem: Problem,
    *,
    name: str,
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    patience: float = 1.0,
    **options: Any,
) -> Solution:
    """Runs a solver with an incumbent, a seed and its options; returns its solution.

    Raises:
        ScheduleNotFoundError: the solver found no schedule within the budget.
    """
    incumbent = Incumbent(problem, name, time_limit_s, progress, patience)
    search(incumbent, seed, **options)
    return incumbent.solution()


def seconds_of(problem: Problem, order: Sequence[int]) -> float:
    """Returns seconds of an order, infinite when it is not legal or not within the budget."""
    schedule = Schedule(tuple(order))
    try:
        validate(problem, schedule)
    except (InvalidScheduleError, PeakExceededError):
        return float("inf")
    return simulate(problem, schedule).time_s


def store_all(incumbent: Incumbent, seed: int) -> None:
    """Offers the schedule without recomputation, with which overheads are compared."""
    incumbent.offer_store_all()
