"""Searches the largest batch that fits, by searching over schedules.

A schedule found at one batch size is an order of the same ops at any other
(:mod:`keras_remat.batch_size.scaling`), and its peak there can be predicted without a solve. An
order *reaches* the largest size at which it fits. So a solve that fails at a size wastes little,
and an order that succeeds may reach larger sizes, too:

1. For a *known* order, the size it reaches is found along the line of its predicted peaks
   (:meth:`SizeSearch.largest_fitting`). For the order without recomputation, that is the largest
   plain batch.
2. The problem is solved for a new order at the geometric mean of two sizes: the largest size
   reached, and the least size whose floor is over the budget. A quick solver comes first, then a
   thorough one. What counts is the size that the new order reaches, be it above or below the size
   it was made for. The bracket is closed from above only by a size whose order reaches no further
   than those before: most orders that are over the budget there are so because of the allocator's
   waste, and reach further than any order made for a smaller size.
3. Then come steps from the order that reaches furthest (:meth:`SizeSearch.improve_from_best`):
   annealing begins with it, at a size a little above its reach.
4. Last, the gaps that this order leaves in memory are closed, where the device is a compiler's heap
   (:meth:`SizeSearch.close_gaps`).

The solver's budget is the allowed one less the allocator's waste seen so far.

The result must not depend on how fast or how busy the machine is. So a number of quick first
solves, each of few passes over the ops, is sure: they are made whatever the clock shows. The time
limit bounds the rest of the search. A third of it is counted work, solves and predictions
(:mod:`keras_remat.batch_size.search_work`), by rates that an idle machine exceeds. The work ends
the search; the clock does so only where a machine is more than three times slower than the rates.

Feasibility need not be monotone in the size. So a schedule is never given up because a solver
failed at a smaller size, and the thorough solver begins with the whole bracket again.

One file, though long: every method reads or moves the ends of one bracket.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from statistics import median_low

from keras_remat.backends.base import Backend
from keras_remat.batch_size.found import (
    BatchSearch,
    MaxOverhead,
    SizeTrial,
    is_allowed,
    overhead_bound,
)
from keras_remat.batch_size.search_work import OPTIONS, SearchWork
from keras_remat.batch_size.step_scaling import Scaling
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import seconds, simulate
from keras_remat.errors import BudgetError, RematError, ScheduleNotFoundError
from keras_remat.planning.calibrated_solve import new_order
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import plan_by
from keras_remat.solvers import check_floor
from keras_remat.solvers.engines import native
from keras_remat.units import format_bytes


def search_batch_size(
    scaling: Scaling,
    start: int,
    limit: Limit,
    backend: Backend,
    *,
    max_overhead: MaxOverhead = "forward",
    at_most: int | None = None,
    solver: str = "greedy",
    time_limit_s: float = 60.0,
    late_time_limit_s: float = 0.0,
    multiple: int = 1,
    seed: int = 0,
    known: tuple[int, Schedule] | None = None,
) -> BatchSearch:
    """Searches the largest batch for which some schedule fits.

    Args:
        start: batch size at which the search begins.
        limit: memory limit, whose margin is kept free.
        max_overhead: bound on (time − store-all time) / store-all time; ``"forward"`` is one extra
            forward pass; ``None`` is no bound.
        at_most: largest size that is tried; at least ``multiple`` is.
        solver: a quick solver, used at many sizes.
        time_limit_s: seconds for trying sizes after the first, sure solves; a third of it is
            counted work, and no solve gets more than a quarter of that.
        late_time_limit_s: seconds for the thorough solver ``"auto"``, used above the size that
            ``solver`` reached, and for steps from known orders, on top of the time left; 0 for
            neither.
        multiple: number of devices or slices that divide a batch; every size is a multiple of it.
        known: size, divided by ``multiple``, and order that an earlier search ended with.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
    """
    quick_s = time_limit_s / OPTIONS.patience
    clock_s = max(OPTIONS.least_clock_s, time_limit_s + late_time_limit_s)
    quick_deadline_s = time.perf_counter() + clock_s
    if late_time_limit_s:
        native.begin()
    search = SizeSearch(
        lambda size: scaling.at(size * multiple),
        limit,
        backend,
        max_overhead,
        max(1, (OPTIONS.largest_size if at_most is None else at_most) // multiple),
        seed,
        SearchWork(quick_s, quick_deadline_s, sure_solves=OPTIONS.sure_solves),
    )
    solve_s = OPTIONS.solve * quick_s
    search.begin(min(max(1, start // multiple), search.at_most), solver, solve_s, known)
    search.bisect(solver, solve_s, try_again=not late_time_limit_s)
    if late_time_limit_s:
        search.go_on(late_time_limit_s, quick_deadline_s)
    search.close_gaps(OPTIONS.closing * clock_s)
    return replace(search.result(), fit=scaling.fit, time_limit_s=clock_s).times(multiple)


class SizeSearch:
    """Holds the state of one search: the largest size reached, and the plans.

    Attributes:
        largest: the largest size reached, 0 for none.
        plain: the largest size without recomputation.
        probes: the trials of sizes, in order.
    """

    def __init__(
        self,
        problem_at: Callable[[int], Problem],
        limit: Limit,
        backend: Backend,
        max_overhead: MaxOverhead,
        at_most: int,
        seed: int,
        work: SearchWork,
    ):
        self.work = work
        self.limit, self.backend, self.max_overhead = limit, backend, max_overhead
        self._problem_at = lru_cache(OPTIONS.remembered_problems)(problem_at)
        self.at_most, self.seed = at_most, seed
        self.started = time.perf_counter()
        self.largest = self.plain = 0
        self.probes: list[SizeTrial] = []
        self.failure: RematError | None = None  # the newest
        # share of the budget that solvers get: the rest is the allocator's waste
        self.target_share = 1.0
        # peaks of the last orders over their bytes alive; 1 before any was found
        self.fragmentation_ratios = deque([1.0], OPTIONS.remembered_ratios)
        self.fragmentation_ratio = 1.0

    def begin(
        self, size: int, solver: str, solve_s: float, known: tuple[int, Schedule] | None = None
    ) -> None:
        """Finds a first size that fits: at ``size`` or below, or one that a known order reaches.

        Args:
            known: as in :func:`search_batch_size`.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        """
        self.plain = self.largest_fitting(Schedule.store_all(self._problem_at(size).graph), size)
        if known is not None:
            self.largest_fitting(known[1], known[0], self.largest + 1)
        while not self.largest and not self.solve_at(size, solver, solve_s):
            if size == 1 and self.failure is not None:
                raise self.failure
            size //= 2

    def bisect(
        self,
        solver: str,
        solve_s: float,
        below: float = math.inf,
        *,
        keep_s: float = 0.0,
        try_again: bool = True,
    ) -> None:
        """Solves at sizes between the largest reached and the least that is out of reach.

        Out of reach is a size whose floor is over the budget, or at which this solver failed. A
        failure may come from the allocator's waste, or from the seed: sizes a little above the
        largest get another chance as long as that helps.

        Args:
            solver, solve_s: name of the solver, and seconds for one solve at most.
            below: sizes from here on are not tried at first.
            keep_s: seconds of work to keep for later steps of the search.
            try_again: whether sizes get another chance.
        """
        fails, again = int(min(self._ceiling, max(self.largest + OPTIONS.window, below))), True
        while again:
            begun = self.largest
            while fails - self.largest > max(
                1, int(self.largest * OPTIONS.resolution)
            ) and self._may_go_on(solver, keep_s):
                mean = (self.largest * fails) ** 0.5
                least = max(self.largest + 1, math.ceil(OPTIONS.reached * mean))
                size = _round(least, max(least, min(fails - 1, int(mean / OPTIONS.reached))))
                if fails > self.at_most and self.at_most <= 2 * self.largest:
                    size = self.at_most
                before = self.largest
                self.solve_at(size, solver, solve_s)
                wastes = self.fragmentation_ratio > OPTIONS.high_ratio
                if self.largest < size and wastes:  # with another order, it may waste less
                    self.target_share = OPTIONS.targets[0]
                    self.solve_at(size, "greedy_first", solve_s)
                if self.largest == before:
                    fails = size
            fails = min(self.at_most + 1, int(self.largest * OPTIONS.retried) + 1)
            self.seed += 1
            grows = begun < self.largest < self.at_most
            again = try_again and grows and self._may_go_on(solver, keep_s)

    def improve_from_best(self, solve_s: float) -> None:
        """Solves for sizes a little above the largest, by smaller steps after failures.

        In turn, a solve begins with the order that reaches furthest, or anew with another share of
        the budget, by a quick or a thorough solver.
        """
        step, failures, most = OPTIONS.first_step, 0, self._ceiling - 1
        for turn in count():
            is_over = self.largest >= most or failures >= OPTIONS.most_failed_steps
            if is_over or (left_s := self.work.left_s()) <= 0:
                return
            before = self.largest
            size = min(most, max(before + 1, int(before * (1 + step))))
            allowed_s = min(solve_s, left_s)
            self.seed += 1
            if turn % 2:
                self.target_share = OPTIONS.targets[turn // 2 % len(OPTIONS.targets)]
                self.solve_at(size, "auto" if turn % 4 == 3 else "greedy_first", allowed_s)
            else:
                # in turn: the allocator wastes about as much as with the best order, or nothing
                best = self.fastest
                assert best.problem is not None
                alive = simulate(best.problem, best.solution.schedule).peak_bytes
                used = alive / best.predicted.peak_bytes
                self.target_share = max(OPTIONS.least_target, min(1.0, used)) if turn % 4 else 1.0
                self.solve_at(size, "nearby", allowed_s, start=best.solution.schedule)
            if self.largest > before:
                step, failures = min(2 * step, OPTIONS.longest_step), 0
            else:
                step, failures = (
                    step / 2 if step > OPTIONS.resolution else OPTIONS.first_step,
                    failures + 1,
                )

    def go_on(self, late_s: float, quick_s: float) -> None:
        """Searches on with a thorough solver: tries new orders first, then improves the best one.

        The time that the first sizes took on a busy machine is not taken off its time.

        Args:
            late_s: seconds for the thorough solver, on top of the time left.
            quick_s: end of the quick solver's time, in seconds of ``time.perf_counter``.
        """
        later_s = time.perf_counter() + max(OPTIONS.least_clock_s, late_s)
        deadline_s = max(quick_s, later_s)
        native.is_compiled(max(OPTIONS.least_compiling_s, OPTIONS.compiling * late_s))  # waits
        improving_s = late_s / OPTIONS.patience + max(0.0, self.work.left_s())
        ended_by_clock, self.work = self.work.ended_by_clock, SearchWork(improving_s, deadline_s)
        self.work.ended_by_clock = ended_by_clock
        self.bisect(
            "auto",
            OPTIONS.solve * improving_s,
            OPTIONS.retried * self.largest,
            keep_s=OPTIONS.improve * self.work.left_s(),
        )
        self.improve_from_best(OPTIONS.step * improving_s)

    def close_gaps(self, seconds: float) -> None:
        """Closes gaps between the values of the best order, as long as it then reaches further.

        Args:
            seconds: seconds of this thread's own work, which other processes do not use up.
        """
        deadline_s, order = time.thread_time() + seconds, self.fastest.solution.schedule
        while self.largest < self.at_most:
            size = min(self.at_most, self.largest + max(1, int(self.largest * OPTIONS.resolution)))
            if self._peak_bytes(order, size) is None:
                return
            problem = self._problem_at(size).with_budget(self.limit.usable_bytes)
            closer = self.backend.memory.with_fewer_gaps(problem, order, deadline_s)
            if closer is None:
                return
            order = closer
            self.largest_fitting(order, size, self.largest + 1)

    def _may_go_on(self, solver: str, keep_s: float) -> bool:
        """Returns whether more than ``keep_s`` of work is left, or the next solve is sure."""
        return self.work.is_sure(solver) or self.work.left_s() > keep_s

    @cached_property
    def _ceiling(self) -> int:
        """Returns the least size found whose floor is over the budget.

        Where there is none, returns a size above ``at_most``.
        """

        def is_possible(size: int) -> bool:
            return self.limit.fits(self._problem_at(size).floor_bytes)

        fits, fails = self.largest, 2 * self.largest
        while fits < self.at_most and is_possible(min(fails, self.at_most)):
            fits, fails = min(fails, self.at_most), 2 * fails
        while fits < self.at_most and fails - fits > max(1, int(fits * OPTIONS.resolution)):
            middle = min(self.at_most, (fits + fails) // 2)
            fits, fails = (middle, fails) if is_possible(middle) else (fits, middle)
        return self.at_most + 1 if fits == self.at_most else fails

    def solve_at(
        self, size: int, solver: str, solve_s: float, start: Schedule | None = None
    ) -> bool:
        """Solves at a size, and returns whether the largest size has grown.

        Args:
            start: order to begin with; ``None`` to solve anew.
        """
        problem, before = self._problem_at(size), self.largest
        if solver == "auto":
            solver = self.backend.auto_solver
        try:
            check_floor(problem.with_budget(self.limit.usable_bytes))
            solve_s, patience = self.work.take(problem, solver, solve_s)
            order, ratio, predicted = new_order(
                problem,
                self.limit.usable_bytes,
                self.target_share,
                self.backend.memory,
                solver=solver,
                time_limit_s=solve_s,
                near=start,
                seed=self.seed,
                patience=patience,
            )
        except BudgetError as error:
            self.failure = error
            self.target_share = (1 + self.target_share) / 2
            self.fragmentation_ratio = 1.0
            self.probes.append(SizeTrial(size, None, str(error)))
            return False
        replays = self.backend.memory.order_matters
        self.work.predict(problem, replays=replays, count=predicted)
        self.fragmentation_ratio = ratio
        self.fragmentation_ratios.append(ratio)
        usual = median_low(self.fragmentation_ratios)  # most orders waste little, a few waste much
        self.target_share = max(OPTIONS.least_target, min(1.0, 1 / usual))
        self.largest_fitting(order, size, self.largest + 1)
        if self.largest < size:
            reason = self._reason(problem, order)
            self.failure = ScheduleNotFoundError(
                self.limit.usable_bytes, problem.floor_bytes, solver=solver, reason=reason
            )
            self.probes.append(SizeTrial(size, None, reason))
        return self.largest > before

    def _reason(self, problem: Problem, order: Schedule) -> str:
        """Returns the reason why an order does not fit at a size."""
        usage = simulate(problem, order)
        peak = max(usage.peak_bytes, self.backend.memory.peak_bytes(problem, order))
        if not self.limit.fits(peak):
            return f"{format_bytes(peak)} is over {format_bytes(self.limit.usable_bytes)}"
        overhead = usage.time_s / problem.store_all_time_s - 1
        bound = overhead_bound(problem, self.max_overhead)
        return f"overhead {overhead:.1%} is over the bound of {bound:.1%} (max_overhead)"

    def largest_fitting(self, order: Schedule, size: int, least: int = 1) -> int:
        """Returns the largest size found at which an order fits; 0 where there is none.

        The search ends early where that size is below ``least``. A peak follows the size nearly
        along a line, so the next size is the one at which the line through two known peaks meets
        the budget. Where that does not close the bracket, it is halved.

        The order's plan at that size is among the probes afterwards.
        """
        fits, fails, at = 0, self.at_most + 1, size
        known: dict[int, int] = {}
        for _ in range(OPTIONS.most_predictions):
            peak = self._peak_bytes(order, at)
            fits, fails = (fits, at) if peak is None or not self.limit.fits(peak) else (at, fails)
            if fails <= least or fails - fits <= max(1, int(fits * OPTIONS.resolution)):
                break
            if peak is None:  # it recomputes too much, and hardly less at the sizes in between
                at = max(fits, least)
            else:
                known[at] = peak
                at = self._next_size(known, max(fits, least - 1), fails)
        if not fits:
            return 0
        problem, usable = self._problem_at(fits), self.limit.usable_bytes
        plan = plan_by(problem, order, usable, self.backend.memory)
        if plan is not None:
            self.probes.append(SizeTrial(fits, plan))
            self.largest = max(self.largest, fits)
        return fits

    def best_of(self, orders: Iterable[Schedule], first: int, *, downwards: bool = False) -> None:
        """Finds the largest size that one of ``orders`` reaches.

        Args:
            orders: known orders; those that reach furthest come first, if that is known.
            first: the least size wanted.
            downwards: whether smaller sizes will do where ``first`` is out of reach.
        """
        for order in orders:
            size = self.largest or first
            if (downwards and not self.largest) or self.fits(order, size):
                self.largest_fitting(order, size)

    @property
    def fastest(self) -> Plan:
        """Returns the fastest plan for the largest size reached."""
        plans = [p.plan for p in self.probes if p.plan is not None and p.batch_size == self.largest]
        return min(plans, key=lambda plan: plan.predicted.time_s)

    def _next_size(self, known: dict[int, int], above: int, below: int) -> int:
        """Returns a size between two others at which an order's peak is about the budget.

        Args:
            known: size → peak of the order in bytes, at least one.
            above: a size at which the order is known, or wanted, to fit.
            below: a size at which it does not fit; above ``at_most`` where none is known.
        """
        at, *others = sorted(known, key=lambda size: abs(known[size] - self.limit.usable_bytes))
        if others:
            by_sample = (known[at] - known[others[0]]) / (at - others[0])
        else:
            by_sample = (known[at] - self._problem_at(at).profile.resident_bytes) / at
        room = self.limit.usable_bytes - known[at]
        aim = at + room / by_sample if by_sample > 0 else math.inf
        step = max(1, int(above * OPTIONS.resolution))
        if below > self.at_most:
            most = min(OPTIONS.furthest * max(above, at), self.at_most)
        elif len(known) % OPTIONS.halved_every:
            most = max(above + 1, below - step)
        else:
            quarter = (below - above) // 4
            return _round(max(above + 1, above + quarter), max(above + 1, below - 1 - quarter))
        size = int(min(max(aim, above + step), most))
        return (
            size
            if size == self.at_most
            else _round(max(above + 1, int(size * OPTIONS.rounded)), size)
        )

    def fits(self, order: Schedule, size: int) -> bool:
        """Returns whether a known order keeps to the budget and the overhead bound at a size."""
        peak = self._peak_bytes(order, size)
        return peak is not None and self.limit.fits(peak)

    def _peak_bytes(self, order: Schedule, size: int) -> int | None:
        """Returns the predicted peak of a known order at a size.

        Returns ``None`` where its overhead is over the bound.
        """
        problem, memory = self._problem_at(size), self.backend.memory
        if not is_allowed(problem, seconds(problem, order), self.max_overhead):
            return None
        self.work.predict(problem, replays=memory.order_matters)
        return memory.peak_bytes(problem, order)

    def result(self) -> BatchSearch:
        """Returns the result of the search."""
        return BatchSearch(
            self.limit.total_bytes,
            self.largest,
            self.plain,
            tuple(self.probes),
            time.perf_counter() - self.started,
            ended_by_clock=self.work.ended_by_clock,
        )


def _round(low: int, high: int) -> int:
    """Returns the roundest number from ``low`` to ``high``: by the highest power of two.

    Allocators and kernels like round sizes.
    """
    power = 1
    while high // (2 * power) * 2 * power >= low:
        power *= 2
    return high // power * power
