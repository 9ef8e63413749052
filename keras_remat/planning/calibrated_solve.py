"""Solving until the device agrees: target, solve, predict, correct the target.

A solver keeps the bytes alive under a target. The device needs more: its allocator rounds and
fragments, and a compiler has an order of its own. What the device needs above the budget is taken
off the target, and the problem is solved again, until the peak fits. Where the target becomes one
that no schedule reaches, one between is tried.

Where compiling tells the peak, that decides. It takes long, so only so many schedules are compiled:
first those that are predicted to fit, then, of all that any target gave, those that are predicted
to come nearest. A compiler's peak is no monotone function of the bytes alive.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.search import nearby

#: How often a target is corrected.
_CORRECTIONS = 10
#: Of the time that is left, what one solve may take.
_SOLVE_SHARE = 0.7
#: Minimum seconds for one solve, past the deadline, too.
_LEAST_SOLVE_S = 0.5
#: How many schedules are compiled whatever it takes, and how many before the deadline.
_SURE_COMPILATIONS, _MOST_COMPILATIONS = 3, 6
#: The least a correction takes off, as a share of what is above the floor.
_LEAST_STEP = 0.05
#: How much faster, as a share of the step, a schedule over the budget must be for another try.
_WORTH_ANOTHER = 0.02
#: How many of the orders that a solver finds are asked for their peak, the last ones.
_ASKED_ORDERS = 8


@dataclass(frozen=True)
class BudgetCandidate:
    """A solution with its time and the peak that the device will show.

    Args:
        solution: the schedule, with its usage.
        time_s: predicted seconds of a step.
        peak_bytes: what the device will have in use.
        is_exact: whether compiling has told the peak.
    """

    solution: Solution
    time_s: float
    peak_bytes: int
    is_exact: bool = False

    @property
    def schedule(self) -> Schedule:
        """The solution's."""
        return self.solution.schedule


class BudgetSearch:
    """Searches a schedule whose peak on the device keeps to a budget, with one solver.

    Args:
        budget_bytes: what the device may have in use.

    Attributes:
        closest: of all that was found, what needs least; ``None`` before anything was found.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, memory: MemoryModel, solver: str, seed: int
    ):
        self.problem, self.budget_bytes, self.memory = problem, budget_bytes, memory
        self._solver, self._seed = solver, seed
        self._chosen: tuple[BudgetCandidate, int] | None = (
            None  # the fastest that fits, and its target
        )
        self._misses = 0  # compilations that told more than the budget
        self._untried: dict[Schedule, BudgetCandidate] = {}  # that could be compiled
        self._tried: set[Schedule] = set()  # that were
        self.closest: BudgetCandidate | None = None

    def run(
        self, start: int, deadline_s: float, *, patient: bool = True, approach: bool = False
    ) -> tuple[BudgetCandidate, int]:
        """Returns the fastest schedule that fits, and the target that it was solved for.

        Args:
            start: the first target, in bytes.
            deadline_s: by ``time.perf_counter``; a late solve gets half a second all the same.
            patient: whether all corrections are made while nothing was found, however late it is:
                the clock ends improvement, and not the first answer.
            approach: whether targets over the budget are tried where no lower one is reached, so
                that :attr:`closest` says how near one comes.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: none was found.
        """
        floor = self.problem.floor_bytes
        store_all = Schedule.store_all(self.problem.graph)
        most = simulate(self.problem, store_all).peak_bytes if approach else start
        target, reached, unreachable = start, max(start, most), floor
        for turn in range(_CORRECTIONS):
            left_s = deadline_s - time.perf_counter()
            is_late = left_s < _LEAST_SOLVE_S if self._chosen else left_s < 0 and not patient
            if target < floor or (turn and is_late):
                break
            if self._tried and not self._may_compile(deadline_s):
                break
            try:
                found = self.solve_at(target, max(_SOLVE_SHARE * left_s, _LEAST_SOLVE_S))
            except (InfeasibleBudgetError, ScheduleNotFoundError):
                # what is proved is proved of this target, and a higher one is within the budget
                if self._chosen is not None:
                    break
                if self.closest is None and not approach:
                    raise
                unreachable, target = target, (target + reached) // 2
                continue
            surplus = self._surplus(found, target)
            if surplus is None:
                break
            reached = target
            # a few bytes less give the same schedule
            less = max(surplus, int(_LEAST_STEP * (target - unreachable)))
            target = max(target - less, (unreachable + target) // 2)
        self._compile_nearest(deadline_s)
        if self._chosen is None:
            over = None if self.closest is None else self.closest.peak_bytes
            raise ScheduleNotFoundError(self.budget_bytes, floor, over, solver=self._solver)
        return self._chosen

    def solve_at(
        self,
        target: int,
        time_limit_s: float,
        near: Schedule | None = None,
        patience: float = 1.0,
    ) -> list[BudgetCandidate]:
        """Returns what one solve found on its way, the fastest first.

        Args:
            near: a known order to begin with instead of solving anew
            (:mod:`keras_remat.solvers.search.nearby`).
            patience: as of :func:`keras_remat.solvers.solve`.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
        """
        problem = self.problem.with_budget(target)
        seen: list[Solution] = []
        if near is None:
            final = solve(
                problem, solver=self._solver, time_limit_s=time_limit_s, seed=self._seed,
                progress=seen.append, patience=patience,
            )  # fmt: skip
            seen.append(final)
        else:
            orders = nearby.schedules(
                problem, near, time_limit_s=time_limit_s, seed=self._seed, patience=patience
            )
            seen.extend(
                Solution(order, "nearby", "feasible", 0.0)
                for order in islice(orders, _ASKED_ORDERS)
            )
            if not seen:
                raise ScheduleNotFoundError(target, problem.floor_bytes, solver="nearby")
        newest = {solution.schedule: solution for solution in seen}
        found = [self._found(solution) for solution in list(newest.values())[-_ASKED_ORDERS:]]
        return sorted(found, key=lambda one: one.time_s)

    def _found(self, solution: Solution) -> BudgetCandidate:
        usage = simulate(self.problem, solution.schedule)
        peak = self.memory.peak_bytes(self.problem, solution.schedule)
        return BudgetCandidate(replace(solution, usage=usage), usage.time_s, peak)

    def _surplus(self, found: list[BudgetCandidate], target: int) -> int | None:
        """Keeps the best of what was found; returns the bytes to take off the target for another
        try, or ``None`` where none is worth it."""
        fastest = found[0]
        self._untried.update((one.schedule, one) for one in found)
        fitting = next((one for one in found if self._may_fit(one)), None)
        step = 1
        if fitting is not None:
            fitting = self._compiled(fitting)
            self._misses += fitting.peak_bytes > self.budget_bytes
            step = 2 ** max(0, self._misses - 1)  # every miss is followed by a longer one
        nearest = fitting or min(found, key=lambda one: one.peak_bytes)
        self._keep_if_closest(nearest)
        if fitting is None or fitting.peak_bytes > self.budget_bytes:
            alive = simulate(self.problem, nearest.schedule).peak_bytes
            unused = 0 if self.memory.order_matters else max(0, target - alive)
            return unused + step * (nearest.peak_bytes - self.budget_bytes)
        if self._chosen is None or fitting.time_s < self._chosen[0].time_s:
            self._chosen = fitting, target
        gain = 1 - fastest.time_s / self._chosen[0].time_s if self._chosen[0].time_s > 0 else 0.0
        if not self.memory.order_matters or gain <= _WORTH_ANOTHER:
            return None
        return fastest.peak_bytes - self.budget_bytes

    def _keep_if_closest(self, one: BudgetCandidate) -> None:
        """Keeps what needs least; a peak that is only predicted gives way to one that is known."""
        rank = (one.is_exact, -one.peak_bytes)
        if self.closest is None or rank > (self.closest.is_exact, -self.closest.peak_bytes):
            self.closest = one

    # ---------------------------------------------------------------- compiling

    def _may_fit(self, one: BudgetCandidate) -> bool:
        """Whether compiling is worth it. A step that recomputes nothing is compiled whatever is
        predicted, because that is what Keras's own step needs."""
        if one.peak_bytes <= self.budget_bytes:
            return True
        plain = one.schedule == Schedule.store_all(self.problem.graph)
        return plain and not self.memory.order_matters and self._compiled(one).is_exact

    def _compiled(self, one: BudgetCandidate) -> BudgetCandidate:
        """Returns the same with the peak that compiling tells, where it does."""
        self._untried.pop(one.schedule, None)
        told = self.memory.compiled_peak_bytes(self.problem, one.schedule)
        if told is None:
            return one
        self._tried.add(one.schedule)
        return replace(one, peak_bytes=told, is_exact=True)

    def _compile_nearest(self, deadline_s: float) -> None:
        """Compiles what is predicted to come nearest to the budget of all that was found, until one
        keeps to it."""
        while self._chosen is None and self._untried and self._may_compile(deadline_s):
            predicted = {
                order: self.memory.peak_bytes(self.problem, order) for order in self._untried
            }
            one = self._compiled(self._untried[min(predicted, key=lambda at: predicted[at])])
            if not one.is_exact:
                return
            self._keep_if_closest(one)
            if one.peak_bytes <= self.budget_bytes:
                self._chosen = one, simulate(self.problem, one.schedule).peak_bytes

    def _may_compile(self, deadline_s: float) -> bool:
        in_time = time.perf_counter() < deadline_s
        return len(self._tried) < (_MOST_COMPILATIONS if in_time else _SURE_COMPILATIONS)


def new_order(
    problem: Problem,
    budget_bytes: int,
    target_share: float,
    memory: MemoryModel,
    *,
    solver: str,
    time_limit_s: float,
    near: Schedule | None = None,
    seed: int = 0,
    patience: float = 1.0,
) -> tuple[Schedule, float]:
    """Returns the order of one solve that needs least, and how much the device adds to it.

    The order need not fit, so the time is bounded also where none does.

    Args:
        target_share: the solver's budget as a share of ``budget_bytes``.
        patience: as of :func:`keras_remat.solvers.solve`.

    Returns:
        The order, and its peak over the bytes alive, a ratio.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
    """
    target = min(budget_bytes, max(problem.floor_bytes, int(target_share * budget_bytes)))
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed)
    found = search.solve_at(target, time_limit_s, near, patience)
    least = min(found, key=lambda one: one.peak_bytes)
    return least.schedule, least.peak_bytes / max(1, simulate(problem, least.schedule).peak_bytes)
