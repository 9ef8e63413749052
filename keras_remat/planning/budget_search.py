"""Searches a schedule whose peak on the device fits a budget, by solving for corrected targets.

A solver keeps the bytes alive under a target. The device needs more: its allocator rounds and
fragments, and a compiler has an order of its own. The bytes by which the device exceeds the budget
are taken off the target, and the problem is solved again, until the peak fits. Where no schedule
reaches the new target, one between the two is tried.

Where compiling tells the peak, the compiled peak decides. Compiling takes long, so only a few
schedules are compiled (:mod:`keras_remat.planning.compilations`): first those that are predicted to
fit; then, among the schedules of all targets, those of the least predicted peak. A compiler's peak
is no monotone function of the bytes alive. Compiling does not count as solver time, so that a plan
does not depend on how busy the machine is.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import BudgetError, ScheduleNotFoundError
from keras_remat.planning.budget_candidate import (
    BudgetCandidate,
    closing_deadline_s,
    with_fewer_gaps,
)
from keras_remat.planning.compilations import Compilations
from keras_remat.planning.quick_orders import QUICK, quick_orders
from keras_remat.solvers import solve
from keras_remat.solvers.search import nearby


@dataclass(frozen=True)
class CorrectionOptions:
    """Rules how a target is corrected until the peak on the device fits the budget.

    Args:
        corrections: number of solves for one budget at most, each for a corrected target.
        sure_corrections: number of solves that a slow solver makes however late it is, while
            nothing was found. A quick solver, which comes first, makes all ``corrections``. With
            ten for both, a U-Net of volumes was refused after minutes.
        solve: share of the time left that one solve may take.
        least_solve_s: minimum seconds for one solve, past the deadline, too.
        least_step: least share of the target above the floor that one correction takes off.
        worth_another: share of a step's time by which a schedule over the budget must be faster to
            be worth another solve.
        asked_orders: number of orders, the last that a solver finds, whose peak is predicted.
        quick: share of the time for a budget that the quick solver may take before "auto".
        slow: share of the time for a budget that "auto" gets at least.
    """

    corrections: int = 10
    sure_corrections: int = 3
    solve: float = 0.7
    least_solve_s: float = 0.5
    least_step: float = 0.05
    worth_another: float = 0.02
    asked_orders: int = 8
    quick: float = 0.25
    slow: float = 0.5


OPTIONS = CorrectionOptions()


class BudgetSearch:
    """Searches a schedule whose peak on the device keeps to a budget, with one solver.

    Args:
        budget_bytes: bytes that the device may have in use.
        end_s: seconds of ``time.perf_counter`` up to which compiling may put a deadline off.

    Attributes:
        least: the candidate of the least peak so far; ``None`` before anything was found.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        memory: MemoryModel,
        solver: str,
        seed: int,
        end_s: float = math.inf,
    ):
        self.problem, self.budget_bytes, self.memory = problem, budget_bytes, memory
        self._solver, self._seed = solver, seed
        self._compilations = Compilations(problem, budget_bytes, memory, end_s)
        # the fastest candidate that fits, and the target it was solved for
        self._chosen: tuple[BudgetCandidate, int] | None = None
        self._misses = 0  # compilations with a peak over the budget
        self.least: BudgetCandidate | None = None

    def run(
        self,
        start: int,
        deadline_s: float,
        *,
        sure: int = OPTIONS.corrections,
        approach: bool = False,
    ) -> tuple[BudgetCandidate, int]:
        """Returns the fastest schedule that fits, and the target that it was solved for.

        Args:
            start: the first target, in bytes.
            deadline_s: seconds of ``time.perf_counter``, put off by compiling; a late solve gets
                0.5 s.
            sure: number of solves that are made however late it is, while nothing was found; the
                first solve always is. The clock ends improvement, not the search for a first
                answer.
            approach: whether targets over the budget are tried where no lower one is reached, so
                that :attr:`least` shows how near the search came.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule was found; the second one has
                the :attr:`least`.
        """
        floor = self.problem.floor_bytes
        store_all = Schedule.store_all(self.problem.graph)
        most = simulate(self.problem, store_all).peak_bytes if approach else start
        target, reached, unreachable = start, max(start, most), floor
        hardly_bytes = int(OPTIONS.least_step * (start - floor))
        for turn in range(OPTIONS.corrections):
            is_over = self._compilations.are_over(deadline_s)
            if target < floor or is_over or self._is_late(turn, sure, deadline_s):
                break
            try:
                found = self._solved_at(target, deadline_s)
            except BudgetError:
                # the error is about this target alone: a higher one may still fit the budget
                if self._chosen is not None:
                    break
                if self.least is None and not approach:
                    raise
                if reached - target <= hardly_bytes:
                    break  # a target between them is hardly higher
                unreachable, target = target, (target + reached) // 2
                continue
            surplus = self._surplus(found, target)
            if surplus is None:
                break
            # a few bytes less give the same schedule
            less = max(surplus, int(OPTIONS.least_step * (target - unreachable)))
            reached, target = target, max(target - less, (unreachable + target) // 2)
            if surplus > reached - unreachable and reached - target <= hardly_bytes:
                break  # no target in between can make up for the surplus
        above = range(reached + hardly_bytes, start, max(1, hardly_bytes))
        self._try_neighbours(above, turn + 1, deadline_s, sure)
        self._compile_least(deadline_s)
        if self._chosen is None:
            raise self._not_found()
        return self._chosen

    def _try_neighbours(self, targets: range, turn: int, deadline_s: float, sure: int) -> None:
        """Solves for a few more targets where the best order is hardly over the budget.

        The gaps between values differ by more than that from one order to the next. Half of the
        floor of VGG16's convolutions was missed by 1.1 MiB at 211 MiB alive, and kept at 213.
        """
        least = self.least
        if self._chosen is not None or least is None or not self.memory.order_matters:
            return
        if least.peak_bytes - self.budget_bytes > targets.step:
            return
        for at, target in enumerate(targets[: OPTIONS.corrections - turn], turn):
            if self._chosen is not None or self._is_late(at, sure, deadline_s):
                return
            with suppress(BudgetError):
                self._surplus(self._solved_at(target, deadline_s), target)

    def _is_late(self, turn: int, sure: int, deadline_s: float) -> bool:
        """Returns whether it is too late for another solve; for the first one, it never is."""
        least_s = OPTIONS.least_solve_s if self._chosen else 0.0
        late = self._left_s(deadline_s) < least_s
        return turn > 0 and late and not (turn < sure and self._chosen is None)

    def _solved_at(self, target: int, deadline_s: float) -> list[BudgetCandidate]:
        """Returns the candidates of one solve.

        While nothing keeps to the budget, those over it are added again with fewer gaps.
        """
        part_s = OPTIONS.solve * self._left_s(deadline_s)
        found = self.solve_at(target, max(part_s, OPTIONS.least_solve_s))
        return found if self._chosen is not None else self._with_fewer_gaps(found)

    def _not_found(self) -> ScheduleNotFoundError:
        """Returns the error that no schedule fits, with the candidate of the least peak."""
        least, floor = self.least, self.problem.floor_bytes
        least_bytes = None if least is None else least.peak_bytes
        return ScheduleNotFoundError(
            self.budget_bytes, floor, least_bytes, solver=self._solver, least_over_limit=least
        )

    def solve_at(
        self,
        target: int,
        time_limit_s: float,
        near: Schedule | None = None,
        patience: float = 1.0,
    ) -> list[BudgetCandidate]:
        """Solves once, and returns the candidates found on the way, the fastest first.

        Args:
            near: a known order to begin with instead of solving anew
                (:mod:`keras_remat.solvers.search.nearby`).
            patience: as in :func:`keras_remat.solvers.solve`.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
        """
        problem = self.problem.with_budget(target)
        if near is None:
            seen = self._solved(problem, time_limit_s, patience)
        else:
            orders = nearby.schedules(
                problem, near, time_limit_s=time_limit_s, seed=self._seed, patience=patience
            )
            first = islice(orders, OPTIONS.asked_orders)
            seen = [Solution(order, "nearby", "feasible", 0.0) for order in first]
            if not seen:
                raise ScheduleNotFoundError(target, problem.floor_bytes, solver="nearby")
        newest = {solution.schedule: solution for solution in seen}
        asked = list(newest.values())[-OPTIONS.asked_orders :]
        found = [BudgetCandidate.of(self.problem, solution, self.memory) for solution in asked]
        return sorted(found, key=lambda one: one.time_s)

    def _with_fewer_gaps(self, found: list[BudgetCandidate]) -> list[BudgetCandidate]:
        """Returns candidates, the fastest first, with variants that have fewer gaps.

        In that order, each candidate over the budget gets variants with fewer gaps between its
        values, until one keeps to the budget.
        """
        problem, budget_bytes, memory = self.problem, self.budget_bytes, self.memory
        deadline_s, seen, rest = closing_deadline_s(), list[BudgetCandidate](), iter(found)
        for one in rest:
            seen += with_fewer_gaps(problem, one, budget_bytes, memory, deadline_s)
            if seen[-1].peak_bytes <= budget_bytes:
                break
        return sorted([*seen, *rest], key=lambda one: one.time_s)

    def _solved(self, problem: Problem, time_limit_s: float, patience: float) -> list[Solution]:
        """Returns the solutions that the solver finds on its way.

        Answers of the quick solver are remembered.
        """
        seen: list[Solution] = []
        known = quick_orders(self.memory) if self._solver == QUICK else None
        found = None if known is None else known.of(problem, self._seed, time_limit_s)
        if found is not None:
            if not found:
                target = problem.budget_bytes or 0
                raise ScheduleNotFoundError(target, problem.floor_bytes, solver=QUICK)
            return found
        try:
            solve(
                problem, solver=self._solver, time_limit_s=time_limit_s, seed=self._seed,
                progress=seen.append, patience=patience,
                keep_on_interrupt=False,  # Ctrl-C is to end a fit
            )  # fmt: skip
        except ScheduleNotFoundError:
            if known is not None:
                known.keep(problem, self._seed, time_limit_s, [])
            raise
        if known is not None:
            known.keep(problem, self._seed, time_limit_s, seen)
        return seen

    def _surplus(self, found: list[BudgetCandidate], target: int) -> int | None:
        """Keeps the best candidate, and returns the bytes to take off the target.

        Returns ``None`` where another solve is not worth it.
        """
        fastest = found[0]
        self._compilations.offer(found)
        fitting = next(filter(self._compilations.may_fit, found), None)
        step = 1
        if fitting is not None:
            fitting = self._compilations.compiled(fitting)
            self._misses += fitting.peak_bytes > self.budget_bytes
            step = 2 ** max(0, self._misses - 1)  # every miss is followed by a longer one
        least = fitting or min(found, key=lambda one: one.peak_bytes)
        self._keep_if_least(least)
        if fitting is None or fitting.peak_bytes > self.budget_bytes:
            unused = 0 if self.memory.order_matters else max(0, target - least.usage.peak_bytes)
            return unused + step * (least.peak_bytes - self.budget_bytes)
        if self._chosen is None or fitting.time_s < self._chosen[0].time_s:
            self._chosen = fitting, target
        gain = 1 - fastest.time_s / self._chosen[0].time_s if self._chosen[0].time_s > 0 else 0.0
        if not self.memory.order_matters or gain <= OPTIONS.worth_another:
            return None
        return fastest.peak_bytes - self.budget_bytes

    def _keep_if_least(self, one: BudgetCandidate) -> None:
        """Keeps the candidate of the least peak; a compiled peak replaces a predicted one."""
        rank = (one.is_exact, -one.peak_bytes)
        if self.least is None or rank > (self.least.is_exact, -self.least.peak_bytes):
            self.least = one

    def _compile_least(self, deadline_s: float) -> None:
        """Compiles more candidates, until one keeps to the budget or no more may be compiled.

        Near misses come first, in slower ways; then candidates by the least predicted peak.
        """
        one = None if self._chosen else self._compilations.kept_near()
        if one is not None:
            self._choose_if_it_fits(one)
        while self._chosen is None and self._compilations.may_go_on(deadline_s):
            one = self._compilations.compiled_least()
            if one is None:
                return
            self._choose_if_it_fits(one)

    def _choose_if_it_fits(self, one: BudgetCandidate) -> None:
        """Chooses a compiled candidate, where it keeps to the budget."""
        self._keep_if_least(one)
        if one.peak_bytes <= self.budget_bytes:
            self._chosen = one, one.usage.peak_bytes

    def put_off(self, deadline_s: float) -> float:
        """Returns a deadline put off by the seconds spent compiling."""
        return self._compilations.put_off(deadline_s)

    def _left_s(self, deadline_s: float) -> float:
        return self.put_off(deadline_s) - time.perf_counter()
