"""Holds a schedule with the peak that the device will show, and closes gaps between its values."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate

#: Seconds of this thread's own work for closing gaps between the values of one solve's schedules.
#: While nothing keeps to the budget, it is spent past the deadline, too. One value takes 0.6 s for
#: a U-Net of 494 ops, and 5 for ResNet50.
_CLOSING_S = 5.0


@dataclass(frozen=True)
class BudgetCandidate:
    """Holds a solution with the peak that the device will show.

    Args:
        solution: the schedule, with its usage.
        usage: predicted seconds of a step, and the most bytes alive.
        peak_bytes: bytes that the device will have in use at the peak.
        is_exact: whether ``peak_bytes`` comes from compiling the schedule.
    """

    solution: Solution
    usage: Usage
    peak_bytes: int
    is_exact: bool = False

    @classmethod
    def of(cls, problem: Problem, solution: Solution, memory: MemoryModel) -> BudgetCandidate:
        """Returns a solution with the peak that the device is predicted to show."""
        usage = solution.usage or simulate(problem, solution.schedule)
        peak_bytes = memory.peak_bytes(problem, solution.schedule)
        return cls(replace(solution, usage=usage), usage, peak_bytes)

    @property
    def schedule(self) -> Schedule:
        """Returns the schedule of the solution."""
        return self.solution.schedule

    @property
    def time_s(self) -> float:
        """Returns the predicted seconds of a step."""
        return self.usage.time_s

    @property
    def surplus_bytes(self) -> int:
        """Returns the bytes that the device needs above the bytes alive."""
        return self.peak_bytes - self.usage.peak_bytes


def closing_deadline_s() -> float:
    """Returns when closing gaps ends, by ``time.thread_time``."""
    return time.thread_time() + _CLOSING_S


def with_fewer_gaps(
    problem: Problem,
    candidate: BudgetCandidate,
    budget_bytes: int,
    memory: MemoryModel,
    deadline_s: float,
) -> list[BudgetCandidate]:
    """Returns a candidate, followed by variants with fewer and fewer gaps between its values.

    The first variant that keeps to the budget is the last.

    Args:
        deadline_s: seconds of ``time.thread_time`` after which no more gaps are closed.
    """
    within, found = problem.with_budget(budget_bytes), [candidate]
    while (last := found[-1]).peak_bytes > budget_bytes:
        order = memory.with_fewer_gaps(within, last.schedule, deadline_s)
        if order is None:
            break
        solution = replace(last.solution, schedule=order, usage=None)
        found.append(BudgetCandidate.of(problem, solution, memory))
    return found


def known_order(
    problem: Problem, schedule: Schedule, budget_bytes: int, memory: MemoryModel
) -> BudgetCandidate | None:
    """Returns a known order as a candidate; ``None`` where it needs more than the budget.

    Where it needs more, gaps between its values are closed first.

    Args:
        schedule: an order of ops with the same ids, inputs and outputs, found for another batch
            size; it is therefore legal here.
    """
    known = BudgetCandidate.of(problem, Solution(schedule, "reused", "feasible", 0.0), memory)
    found = with_fewer_gaps(problem, known, budget_bytes, memory, closing_deadline_s())[-1]
    return found if found.peak_bytes <= budget_bytes else None
