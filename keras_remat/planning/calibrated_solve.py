"""Solving until the device agrees: target, solve, predict, correct the target.

A solver keeps the bytes alive under a target. The device needs more: its allocator rounds and
fragments, and a compiler has an order of its own. What the device needs above the budget is taken
off the target, and the problem is solved again, until the peak fits. Where the target becomes one
that no schedule reaches, one between is tried.

Where compiling tells the peak, that decides. It takes long, so only so many schedules are compiled:
first those that are predicted to fit, then, of all that any target gave, those that are predicted
to need least. A compiler's peak is no monotone function of the bytes alive. The time that compiling
takes is none of the solver's, so that a plan does not depend on how busy the machine is.

:mod:`keras_remat.planning.request` asks :func:`within_budget` and :func:`least_over_budget`. One
file, though a little long: they decide with what targets, and for how long, the one search runs.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import BudgetError, ScheduleNotFoundError
from keras_remat.planning.quick_orders import QUICK, quick_orders
from keras_remat.solvers import check_floor, solve
from keras_remat.solvers.search import nearby

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorrectionOptions:
    """Rules how a target is corrected until the device agrees.

    Args:
        corrections: of a target, at most.
        sure_corrections: of a slow solver's target, so many are made while nothing was found,
            however late it is. A quick solver, which comes first, makes all of them. With ten of
            both, a U-Net of volumes was refused after minutes.
        solve: of the time that is left, what one solve may take.
        least_solve_s: minimum seconds for one solve, past the deadline, too.
        closing_s: seconds of this thread's own work for closing gaps between the values of what one
            solve found, past the deadline, too, while nothing keeps to the budget. One value takes
            0.6 s for a U-Net of 494 ops, and 5 for ResNet50.
        sure_compilations, most_compilations: how many schedules are compiled whatever it takes, and
            how many before the deadline.
        near_miss: a schedule that takes so much more than it may, as a share of that, is not at
            once written in a slower way: one for less is tried first. For half on an H100, a
            U-Net, MobileNetV2 and EfficientNetB0 took 18, 22 and 28 % more, and 1.14, 1.07 and 1.09
            of plain's time in a slower way. They take 1.07, 1.04 and 1.04.
        near_misses: so many schedules wait for that. A GPT-like's third one for half kept to it.
        slower_way_share: what a slower way adds to a step, as a share of it, about: so much may a
            schedule for less add.
        least_step: the least a correction takes off, as a share of what is above the floor.
        worth_another: how much faster, as a share of the step, a schedule over the budget must be
            for another try.
        asked_orders: of the orders that a solver finds, so many of the last are asked for their
            peak.
        quick, slow: of the time for a budget, what the quick solver may take before "auto", and
            what "auto" has at least.
    """

    corrections: int = 10
    sure_corrections: int = 3
    solve: float = 0.7
    least_solve_s: float = 0.5
    closing_s: float = 5.0
    sure_compilations: int = 3
    most_compilations: int = 6
    near_miss: float = 0.3
    near_misses: int = 2
    slower_way_share: float = 0.05
    least_step: float = 0.05
    worth_another: float = 0.02
    asked_orders: int = 8
    quick: float = 0.25
    slow: float = 0.5


OPTIONS = CorrectionOptions()


@dataclass(frozen=True)
class BudgetCandidate:
    """Holds a solution with the peak that the device will show.

    Args:
        solution: the schedule, with its usage.
        usage: predicted seconds of a step, and the most bytes alive.
        peak_bytes: bytes that the device will have in use at the peak.
        is_exact: whether that peak comes from compiling the schedule.
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
        """Returns what would run."""
        return self.solution.schedule

    @property
    def time_s(self) -> float:
        """Returns the predicted seconds of a step."""
        return self.usage.time_s

    @property
    def surplus_bytes(self) -> int:
        """Returns what the device needs above the bytes alive."""
        return self.peak_bytes - self.usage.peak_bytes


class BudgetSearch:
    """Searches a schedule whose peak on the device keeps to a budget, with one solver.

    Args:
        budget_bytes: what the device may have in use.
        end_s: by ``time.perf_counter``, to when compiling may put a deadline off.

    Attributes:
        least: of all that was found, what needs least; ``None`` before anything was found.
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
        self._solver, self._seed, self._end_s = solver, seed, end_s
        self._compiling_s = 0.0
        # the fastest that fits, and its target
        self._chosen: tuple[BudgetCandidate, int] | None = None
        self._misses = 0  # compilations that told more than the budget
        self._untried: dict[Schedule, BudgetCandidate] = {}  # that could be compiled
        self._tried: set[Schedule] = set()  # that were
        self._near: list[BudgetCandidate] = []  # what may keep to the budget in another way
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
            deadline_s: by ``time.perf_counter``, put off by compiling; a late solve gets 0.5 s.
            sure: so many solves are made while nothing was found, however late it is, and one at
                least: the clock ends improvement, and not the first answer.
            approach: whether targets over the budget are tried where no lower one is reached, so
                that :attr:`least` says how near one comes.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: none was found; the second one has the
                :attr:`least`.
        """
        floor = self.problem.floor_bytes
        store_all = Schedule.store_all(self.problem.graph)
        most = simulate(self.problem, store_all).peak_bytes if approach else start
        target, reached, unreachable = start, max(start, most), floor
        hardly = int(OPTIONS.least_step * (start - floor))  # hardly less, in bytes
        for turn in range(OPTIONS.corrections):
            no_compiling_left = bool(self._tried) and not self._may_compile(deadline_s)
            if target < floor or self._is_late(turn, sure, deadline_s) or no_compiling_left:
                break
            try:
                found = self._solved_at(target, deadline_s)
            except BudgetError:
                # what is proved is proved of this target, and a higher one is within the budget
                if self._chosen is not None:
                    break
                if self.least is None and not approach:
                    raise
                if reached - target <= hardly:
                    break  # what lies between is hardly more
                unreachable, target = target, (target + reached) // 2
                continue
            surplus = self._surplus(found, target)
            if surplus is None:
                break
            # a few bytes less give the same schedule
            less = max(surplus, int(OPTIONS.least_step * (target - unreachable)))
            reached, target = target, max(target - less, (unreachable + target) // 2)
            if surplus > reached - unreachable and reached - target <= hardly:
                break  # no correction that is left makes up for the surplus
        above = range(reached + hardly, start, hardly) if hardly else ()
        for more, near in enumerate(islice(above, OPTIONS.corrections - turn - 1), turn + 1):
            if not self._hardly_missed(hardly) or self._is_late(more, sure, deadline_s):
                break
            with suppress(BudgetError):
                self._surplus(self._solved_at(near, deadline_s), near)
        self._compile_least(deadline_s)
        if self._chosen is None:
            raise self._not_found()
        return self._chosen

    def _hardly_missed(self, nbytes: int) -> bool:
        """Returns whether nothing was found, but an order that needs hardly more than it may, so
        that one for a neighbouring target may do: the gaps between values differ by more than that
        from one order to the next. Half of the floor of VGG16's convolutions was missed by 1.1 MiB
        at 211 MiB alive, and kept at 213."""
        if self._chosen is not None or self.least is None or not self.memory.order_matters:
            return False
        return self.least.peak_bytes - self.budget_bytes <= nbytes

    def _is_late(self, turn: int, sure: int, deadline_s: float) -> bool:
        """Returns whether no further solve is begun; the first one always is."""
        least_s = OPTIONS.least_solve_s if self._chosen else 0.0
        late = self.put_off(deadline_s) - time.perf_counter() < least_s
        return turn > 0 and late and not (turn < sure and self._chosen is None)

    def _solved_at(self, target: int, deadline_s: float) -> list[BudgetCandidate]:
        """Returns what one solve found, and, while nothing keeps to the budget, what is over it
        also with fewer gaps."""
        left_s = self.put_off(deadline_s) - time.perf_counter()
        found = self.solve_at(target, max(OPTIONS.solve * left_s, OPTIONS.least_solve_s))
        return found if self._chosen is not None else self._with_fewer_gaps(found)

    def _not_found(self) -> ScheduleNotFoundError:
        """Returns the error that nothing keeps to the budget, with what needs least."""
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
        """Returns what one solve found on its way, the fastest first.

        Args:
            near: a known order to begin with instead of solving anew
                (:mod:`keras_remat.solvers.search.nearby`).
            patience: as of :func:`keras_remat.solvers.solve`.

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
        """Returns what was found, the fastest first, and those over the budget also with fewer gaps
        between their values, until one keeps to it."""
        problem, budget_bytes, memory = self.problem, self.budget_bytes, self.memory
        deadline_s, seen, rest = _closing_deadline_s(), list[BudgetCandidate](), iter(found)
        for one in rest:
            seen += with_fewer_gaps(problem, one, budget_bytes, memory, deadline_s)
            if seen[-1].peak_bytes <= budget_bytes:
                break
        return sorted([*seen, *rest], key=lambda one: one.time_s)

    def _solved(self, problem: Problem, time_limit_s: float, patience: float) -> list[Solution]:
        """Returns what the solver finds on its way; what the quick one found is remembered."""
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
            )  # fmt: skip
        except ScheduleNotFoundError:
            if known is not None:
                known.keep(problem, self._seed, time_limit_s, [])
            raise
        if known is not None:
            known.keep(problem, self._seed, time_limit_s, seen)
        return seen

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
        """Keeps what needs least; a peak that is only predicted gives way to one that is known."""
        rank = (one.is_exact, -one.peak_bytes)
        if self.least is None or rank > (self.least.is_exact, -self.least.peak_bytes):
            self.least = one

    # ---------------------------------------------------------------- compiling

    def _may_fit(self, one: BudgetCandidate) -> bool:
        """Returns whether compiling is worth it. A step that recomputes nothing is compiled
        whatever is predicted, because that is what Keras's own step needs."""
        if one.peak_bytes <= self.budget_bytes:
            return True
        plain = one.schedule == Schedule.store_all(self.problem.graph)
        return plain and not self.memory.order_matters and self._compiled(one).is_exact

    def _compiled(self, one: BudgetCandidate) -> BudgetCandidate:
        """Returns the same with the peak that compiling tells, where it does.

        Where schedules are written in several ways, a quick way in which one misses the budget by
        little is not at once given up for a slower one. The first such schedules wait for another
        one, for less, that may keep to it in that way. Where that one does not, either, or takes
        longer than a slower way of theirs would, those that wait are written in slower ways first.
        One of them that keeps to the budget is returned: it recomputes less.
        """
        self._untried.pop(one.schedule, None)
        if self._near and one.time_s > (1 + OPTIONS.slower_way_share) * self._near[0].time_s:
            known = self._kept_near()
            if known is not None:
                return known
        rewrites = self.memory.rewrites
        room = max(0, self.budget_bytes - self.problem.profile.resident_bytes)
        near_bytes = self.budget_bytes + int(rewrites * OPTIONS.near_miss * room)
        known = self._asked(one, near_bytes)
        if not rewrites or not known.is_exact or known.peak_bytes <= self.budget_bytes:
            return known
        if known.peak_bytes <= near_bytes and len(self._near) < OPTIONS.near_misses:
            self._near.append(known)
            return known
        return self._kept_near() or self._asked(known, self.budget_bytes)

    def _kept_near(self) -> BudgetCandidate | None:
        """Returns the first of those that missed the budget by little that keeps to it in another
        way, if any does."""
        asked = (self._asked(one, self.budget_bytes) for one in self._near)
        return next((one for one in asked if one.peak_bytes <= self.budget_bytes), None)

    def _asked(self, one: BudgetCandidate, budget_bytes: int) -> BudgetCandidate:
        """Returns the same with the peak that compiling it for a budget tells, where it does."""
        within = self.problem.with_budget(budget_bytes)
        began_s = time.perf_counter()
        told = self.memory.compiled_peak_bytes(within, one.schedule)
        self._compiling_s += time.perf_counter() - began_s
        if told is None:
            return one
        self._tried.add(one.schedule)
        return replace(one, peak_bytes=told, is_exact=True)

    def _choose_if_it_fits(self, one: BudgetCandidate) -> None:
        """Chooses what was compiled, where it keeps to the budget."""
        self._keep_if_least(one)
        if one.peak_bytes <= self.budget_bytes:
            self._chosen = one, one.usage.peak_bytes

    def _compile_least(self, deadline_s: float) -> None:
        """Compiles what missed the budget by little in another way, and then what is predicted to
        need least of all that was found, until one keeps to the budget."""
        kept = self._kept_near() if self._chosen is None else None
        if kept is not None:
            self._choose_if_it_fits(kept)
        while self._chosen is None and self._untried and self._may_compile(deadline_s):
            predicted = {
                order: self.memory.peak_bytes(self.problem, order) for order in self._untried
            }
            one = self._compiled(self._untried[min(predicted, key=lambda at: predicted[at])])
            if not one.is_exact:
                return
            self._choose_if_it_fits(one)

    def _may_compile(self, deadline_s: float) -> bool:
        in_time = time.perf_counter() < self.put_off(deadline_s)
        most = OPTIONS.most_compilations if in_time else OPTIONS.sure_compilations
        return len(self._tried) < most

    def put_off(self, deadline_s: float) -> float:
        """Returns a deadline put off by what compiling took, to the end at most."""
        return max(deadline_s, min(deadline_s + self._compiling_s, self._end_s))


def new_order(
    problem: Problem,
    budget_bytes: int,
    target_share: float,
    memory: MemoryModel,
    *,
    solver: str,
    time_limit_s: float,
    near: Schedule | None,
    seed: int,
    patience: float,
) -> tuple[Schedule, float, int]:
    """Returns the order of one solve that needs least, and how much the device adds to it.

    The order need not fit, so the time is bounded also where none does.

    Args:
        target_share: the solver's budget as a share of ``budget_bytes``.
        patience: as of :func:`keras_remat.solvers.solve`.

    Returns:
        The order, its peak over the bytes alive, a ratio, and how many peaks were predicted.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
    """
    target = min(budget_bytes, max(problem.floor_bytes, int(target_share * budget_bytes)))
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed)
    found = search.solve_at(target, time_limit_s, near, patience)
    least = min(found, key=lambda one: one.peak_bytes)
    return least.schedule, least.peak_bytes / max(1, least.usage.peak_bytes), len(found)


def within_budget(
    problem: Problem,
    budget_bytes: int,
    memory: MemoryModel,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    clock_s: float = math.inf,
    seed: int = 0,
    known: Schedule | None = None,
) -> BudgetCandidate:
    """Returns the fastest schedule found that the *allocator* keeps to a budget.

    Args:
        budget_bytes: what the device may have in use.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for all solves together; each gets a part of what is left. Compiling
            comes on top.
        clock_s: seconds, compiling included, after which nothing improves what was found.
        known: a legal order that may keep to the budget and will do where "auto" finds no faster
            one, the one that runs now for instance. Where it does not keep to it, solvers stop at
            the time limit all the same, also with nothing found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: none was found; the second one has the
            candidate that needs least.
    """
    within = problem.with_budget(budget_bytes)
    check_floor(within)
    # may compile, which is no solver's time; remembered
    memory.peak_bytes(within, Schedule.store_all(problem.graph))
    most_s, began_s = min(time_limit_s, clock_s), time.perf_counter()
    deadline_s, end_s = began_s + most_s, began_s + clock_s
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed, end_s)
    if solver != "auto":
        return search.run(budget_bytes, deadline_s)[0]
    # what the allocator needs above a schedule is told by the known one or by a quick solver; the
    # slow one starts from there
    start, is_patient = budget_bytes, known is None
    quick = None if known is None else known_order(problem, known, budget_bytes, memory)
    if quick is not None:
        start -= max(0, quick.surplus_bytes)
    else:
        quick_search = BudgetSearch(problem, budget_bytes, memory, QUICK, seed, end_s)
        sure = OPTIONS.corrections if is_patient else 1
        try:
            quick_deadline_s = time.perf_counter() + OPTIONS.quick * most_s
            quick, start = quick_search.run(budget_bytes, quick_deadline_s, sure=sure)
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
        deadline_s = quick_search.put_off(deadline_s)
    deadline_s = max(deadline_s, time.perf_counter() + OPTIONS.slow * most_s)
    try:
        sure = OPTIONS.sure_corrections if is_patient else 1
        slow, _ = search.run(start, deadline_s, sure=sure)
    except BudgetError:
        if quick is None:
            raise
        return quick
    return slow if quick is None or slow.time_s <= quick.time_s else quick


def least_over_budget(
    problem: Problem, budget_bytes: int, memory: MemoryModel, *, time_limit_s: float, seed: int = 0
) -> BudgetCandidate:
    """Returns what needs least of all that a quick solver finds for a budget that none may keep to.

    Raises:
        ScheduleNotFoundError: not even one over the budget was found.
    """
    search = BudgetSearch(problem, budget_bytes, memory, QUICK, seed)
    start, deadline_s = max(budget_bytes, problem.floor_bytes), time.perf_counter() + time_limit_s
    try:
        return search.run(start, deadline_s, sure=1, approach=True)[0]
    except ScheduleNotFoundError:
        if search.least is None:
            raise
        return search.least


def _closing_deadline_s() -> float:
    """Returns when closing gaps ends, by ``time.thread_time``."""
    return time.thread_time() + OPTIONS.closing_s


def with_fewer_gaps(
    problem: Problem,
    candidate: BudgetCandidate,
    budget_bytes: int,
    memory: MemoryModel,
    deadline_s: float,
) -> list[BudgetCandidate]:
    """Returns a candidate, and, while that is over the budget, the same with fewer gaps between its
    values, and with fewer still.

    Args:
        deadline_s: by ``time.thread_time``: no more gaps are closed after it.
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
    """Returns a known order as a candidate, with fewer gaps between its values where it needs more
    than the budget; ``None`` where that needs more, too.

    Args:
        schedule: an order of ops with the same ids, inputs and outputs, found for another batch
            size; it is therefore legal here.
    """
    known = BudgetCandidate.of(problem, Solution(schedule, "reused", "feasible", 0.0), memory)
    found = with_fewer_gaps(problem, known, budget_bytes, memory, _closing_deadline_s())[-1]
    return found if found.peak_bytes <= budget_bytes else None
