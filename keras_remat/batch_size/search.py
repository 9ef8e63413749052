"""The largest batch that fits, by searching over schedules.

A schedule found at one batch size is an order of the same ops at any other
(:mod:`keras_remat.batch_size.scaling`), and its peak there is known without solving anything. So a
size that fails wastes little, and one that succeeds says more than that it fits:

1. For a *known* order the largest size it fits is found by bisection over its predicted peak
   (:func:`_reach`); without recomputation that is the largest plain batch.
2. Between the largest size reached and the least whose floor is over the budget, the problem is
   solved for a new order at their geometric mean, first with a quick solver, then with a thorough
   one. The size that the new order reaches counts, be it above or below the one it was made for.
   The bracket is closed from above only by a size whose order reaches no further than those before:
   most that are over the budget there are so by what the allocator wastes, and reach further than
   any made for a smaller size.
3. Last come steps from the order that reaches furthest (:meth:`SizeSearch.stretch`): a little above
   its reach, annealing begins with it.

The solver's budget is the allowed one less what the allocator was seen to waste.

Feasibility need not be monotone in the size: a schedule that was found is never given up
because a solver failed at a smaller size, and the thorough solver begins with the whole bracket
again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from statistics import median_low
from typing import Literal, Protocol

from keras_remat.backends.base import Backend
from keras_remat.batch_size.cost_fit import CostFit
from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError
from keras_remat.planning.make_plan import reused_plan
from keras_remat.planning.plan import Plan
from keras_remat.planning.to_budget import new_order
from keras_remat.solvers import check_floor
from keras_remat.units import format_bytes

#: The search stops when a size that fits and one that does not are this share apart.
_RESOLUTION = 0.01
#: The largest size is below this; beyond it nothing is tried.
_LARGEST_SIZE = 2**40
#: An order that reaches this share of the size it was made for has not failed; how much larger the
#: sizes are that get another chance.
_NEAR, _AGAIN = 0.97, 1.1
#: Up to how much above the largest size, as a ratio, the thorough solver begins.
_NOT_FAR = 1.1
#: The first and the longest step up, as shares of the size, of a search around a known order.
_FIRST_STEP, _MOST_STEP = 0.02, 0.3
#: After so many of them without a find it ends; and the shares of the budget that new orders are
#: solved for there.
_MOST_FAILURES, _TARGETS = 16, (0.98, 1.0, 0.96)
#: Of the time limit, what one solve may take.
_SOLVE_SHARE = 0.25
#: Of the time of the thorough solver, what is left for steps from known orders, and what one of
#: them may take.
_STRETCH_SHARE, _STRETCH_SOLVE_SHARE = 0.6, 0.12
#: Problems that are kept for sizes that come up again.
_REMEMBERED = 12
#: How many of the last orders tell what the allocator wastes, and from where on that is more than
#: of most.
_WASTES, _MUCH_WASTE = 5, 1.03
#: The least budget a solver is given, as a share of the real one, for what the allocator wastes.
_LEAST_TARGET = 0.88


class Scaling(Protocol):
    """A train step at any batch size."""

    @property
    def fit(self) -> CostFit | None:
        """Costs as functions of the size; ``None`` where they are in proportion to bytes."""

    def at(self, size: int) -> Problem:
        """The problem at ``size`` samples."""


@dataclass(frozen=True)
class Probe:
    """One batch size that was tried.

    Args:
        batch_size: samples.
        plan: what would run; ``None`` when no schedule was found.
        samples_per_s: predicted; 0 without a plan.
        reason: why not, or ``""``.
    """

    batch_size: int
    plan: Plan | None
    samples_per_s: float
    reason: str = ""

    @classmethod
    def of(cls, batch_size: int, plan: Plan) -> Probe:
        """A size with a plan."""
        return cls(
            batch_size,
            plan,
            batch_size / plan.predicted.time_s if plan.predicted.time_s > 0 else 0.0,
        )


@dataclass(frozen=True)
class BatchSearch:
    """What a search over batch sizes found; all numbers are predicted, unless the plan has measured
    ones.

    Args:
        limit_bytes: the memory limit.
        max_batch_size: the largest batch with a schedule under the limit and the overhead bound.
        fastest_batch_size: the tried batch with the most predicted samples per second.
        plain_batch_size: the largest batch that fits without recomputation.
        probes: every size that was tried, in order.
        search_time_s: seconds the search took.
        verification_time_s: seconds it took to run what the search found; 0 where nothing was run.
        failed_batch_size, failed_peak_bytes: the smallest size that was run and did not fit, and
            its measured peak (``None`` where no plan was found or the device ran out of memory);
            ``None`` when every size that ran fitted, or none was run.
        fit: op times and workspaces as functions of the batch size with their residuals; ``None``
            where only one size was measured, or none, and they are taken in proportion to the
            bytes.
    """

    limit_bytes: int
    max_batch_size: int
    fastest_batch_size: int
    plain_batch_size: int
    probes: tuple[Probe, ...]
    search_time_s: float
    verification_time_s: float = 0.0
    failed_batch_size: int | None = None
    failed_peak_bytes: int | None = None
    fit: CostFit | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of ``max_batch_size``: the one that ran last, where one did, else the
        fastest."""
        plans = [
            p.plan
            for p in self.probes
            if p.plan is not None and p.batch_size == self.max_batch_size
        ]
        ran = [plan for plan in plans if plan.measured is not None]
        return ran[-1] if ran else min(plans, key=lambda plan: plan.predicted.time_s)

    @cached_property
    def step_time_errors(self) -> dict[int, float]:
        """Every size that ran → (predicted − measured) / measured seconds of its step, a ratio.
        None of these sizes was fitted to."""
        ran = {
            p.batch_size: p.plan
            for p in self.probes
            if p.plan is not None and p.plan.measured is not None
        }
        return {
            size: plan.predicted.time_s / plan.measured.time_s - 1
            for size, plan in ran.items()
            if plan.measured is not None and plan.measured.time_s > 0
        }

    def __str__(self) -> str:
        peak = "predicted" if self.plan.measured is None else "measured"
        usage = self.plan.measured or self.plan.predicted
        ran = (
            "" if not self.verification_time_s else f" and run in {self.verification_time_s:.1f} s"
        )
        return (
            f"Largest batch {self.max_batch_size} under {format_bytes(self.limit_bytes)} ({format_bytes(usage.peak_bytes)} {peak}, "
            f"overhead {self.plan.overhead:.1%}); without recomputation {self.plain_batch_size}; most samples per second predicted at "
            f"{self.fastest_batch_size}; {len(self.probes)} sizes tried in {self.search_time_s:.1f} s{ran}; {self._op_times()}"
        )

    def _op_times(self) -> str:
        """Where op times at other sizes come from, and how far off they are."""
        if self.fit is None:
            return "op times in proportion to bytes, from one size"
        sizes = " and ".join(map(str, self.fit.sizes))
        off = "".join(
            f", {error:+.1%} off the measured step at {size}"
            for size, error in self.step_time_errors.items()
        )
        return f"op times fitted to steps of {sizes} samples, residual {self.fit.residual:.1%} of the measured seconds{off}"


def forward_overhead(problem: Problem) -> float:
    """One extra forward pass over the time of a step, a ratio: the overhead the Checkmate paper
    allows (section 6.4)."""
    times = problem.profile.op_time_s
    forward = sum(times[op.id] for op in problem.graph.ops if op.phase == FORWARD)
    return forward / problem.store_all_time_s if problem.store_all_time_s > 0 else 0.0


def is_allowed(
    problem: Problem, plan: Plan, max_overhead: float | Literal["forward"] | None
) -> bool:
    """Whether a plan's overhead keeps to the bound; ``"forward"`` is one extra forward pass,
    ``None`` no bound."""
    return is_overhead_allowed(problem, plan.predicted.time_s, max_overhead)


def is_overhead_allowed(
    problem: Problem, time_s: float, max_overhead: float | Literal["forward"] | None
) -> bool:
    """Whether a step of ``time_s`` seconds keeps to the bound, see :func:`is_allowed`."""
    if max_overhead is None or problem.store_all_time_s <= 0:
        return True
    return time_s / problem.store_all_time_s - 1 <= _bound(problem, max_overhead)


def _bound(problem: Problem, max_overhead: float | Literal["forward"]) -> float:
    return forward_overhead(problem) if max_overhead == "forward" else max_overhead


def search_batch_size(
    scaling: Scaling,
    start: int,
    limit_bytes: int,
    budget_bytes: int,
    backend: Backend,
    *,
    max_overhead: float | Literal["forward"] | None = "forward",
    at_most: int | None = None,
    solver: str = "greedy",
    time_limit_s: float = 60.0,
    late_solver: str | None = None,
    late_time_limit_s: float = 60.0,
    afterwards_s: Callable[[Plan], float] | None = None,
    seed: int = 0,
    progress: Callable[[Probe], None] | None = None,
) -> BatchSearch:
    """Searches the largest batch for which some schedule fits.

    Args:
        scaling: the problem at any size.
        start: where the search begins.
        limit_bytes, budget_bytes: the limit, and what of it may be used.
        backend: whose allocator decides.
        max_overhead: bound on (time − store-all time) / store-all time; ``"forward"`` is one extra
            forward pass; ``None`` is no bound.
        at_most: no size above this is tried.
        solver: a quick one, asked at many sizes.
        time_limit_s: after this no new size is tried; no solve gets more than a quarter of it.
        late_solver: a thorough one, asked at sizes above the largest that ``solver`` reached;
            ``None`` for none.
        late_time_limit_s: seconds for that and for steps from known orders, beside what is left of
            the others; no solve gets more than a quarter of it.
        afterwards_s: seconds that have to be left of the late time when a plan is the result;
            ``None`` for none.
        seed: for the solvers.
        progress: called with every probe.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
    """
    search = SizeSearch(
        scaling,
        budget_bytes,
        backend,
        max_overhead,
        _LARGEST_SIZE if at_most is None else at_most,
        seed,
        progress,
    )
    search.begin(min(start, search.at_most), solver, _SOLVE_SHARE * time_limit_s)
    quick_deadline_s = search.started + time_limit_s
    search.climb(
        solver, _SOLVE_SHARE * time_limit_s, quick_deadline_s, try_again=late_solver is None
    )
    if late_solver is not None:
        search.afterwards_s = afterwards_s
        search.climb_and_stretch(
            late_solver, late_time_limit_s + max(0.0, quick_deadline_s - time.perf_counter())
        )
    return replace(search.result(limit_bytes), fit=scaling.fit)


class SizeSearch:
    """The state of one search: the largest size reached, and with which plans.

    Args:
        scaling: ``scaling.at(size)`` is the problem at a size.
        budget_bytes, backend, max_overhead, at_most, seed, progress: as in
            :func:`search_batch_size`.

    Attributes:
        good: the largest size reached, 0 for none.
        plain: the largest size without recomputation.
        probes: what was tried, in order.
    """

    def __init__(
        self,
        scaling: Scaling,
        budget_bytes: int,
        backend: Backend,
        max_overhead: float | Literal["forward"] | None,
        at_most: int,
        seed: int,
        progress: Callable[[Probe], None] | None = None,
    ):
        self.budget, self.backend, self.max_overhead = budget_bytes, backend, max_overhead
        self._problem_at = lru_cache(_REMEMBERED)(scaling.at)
        self.at_most, self.seed, self.progress = at_most, seed, progress
        self.started = time.perf_counter()
        self.good = self.plain = 0
        self.probes: list[Probe] = []
        self.failure: RematError | None = None
        self.afterwards_s: Callable[[Plan], float] | None = (
            None  # that have to be left, by the plan that is the result
        )
        self.target_share = (
            1.0  # of the budget, that solvers get: the rest is what the allocator wastes
        )
        self.wastes = deque(
            [1.0], _WASTES
        )  # what it needed for the last orders, over the bytes alive
        self.waste = 1.0  # the last one, 1 where no order was found

    def begin(self, size: int, solver: str, solve_s: float) -> None:
        """Finds a first size that fits, at ``size`` or below.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        """
        self.plain = self.reach(Schedule.store_all(self._problem_at(size).graph), size)
        while not self.good and not self.attempt(size, solver, solve_s):
            if size == 1:
                raise self.failure or ScheduleNotFoundError(
                    self.budget, self._problem_at(1).floor_bytes, solver="batch search"
                )
            size //= 2

    def begin_with(self, size: int, plan: Plan) -> None:
        """Takes a plan that is known to fit at ``size`` for what was reached."""
        self.good = size
        self._tell(Probe.of(size, plan))

    def climb(
        self,
        solver: str,
        solve_s: float,
        deadline_s: float,
        below: float = math.inf,
        *,
        try_again: bool = True,
    ) -> None:
        """Solves between the largest size reached and the least that no schedule fits, or this
        solver failed at.

        A failure may be the allocator's waste, or the seed: sizes a little above the largest get
        another chance as long as that helps.

        Args:
            solver, solve_s: who is asked, and for how long at most.
            deadline_s: by ``time.perf_counter``.
            below: sizes from here on are not tried at first.
            try_again: whether they get it.
        """
        fails, again = int(min(self._ceiling, max(self.good + 2, below))), True
        while again:
            begun = self.good
            while (
                fails - self.good > max(1, int(self.good * _RESOLUTION))
                and self._left_s(deadline_s) > 0
            ):
                mean = (self.good * fails) ** 0.5
                least = max(self.good + 1, math.ceil(_NEAR * mean))
                size = _round(least, max(least, min(fails - 1, int(mean / _NEAR))))
                if fails > self.at_most and self.at_most <= 2 * self.good:
                    size = self.at_most
                before = self.good
                self.attempt(size, solver, solve_s)
                if (
                    self.good < size and self.waste > _MUCH_WASTE
                ):  # with another order the allocator may not
                    self.target_share = _TARGETS[0]
                    self.attempt(size, "greedy_first", solve_s)
                if self.good == before:
                    fails = size
            fails = min(self.at_most + 1, int(self.good * _AGAIN) + 1)
            self.seed += 1
            again = try_again and begun < self.good < self.at_most and self._left_s(deadline_s) > 0

    def stretch(self, solver: str, solve_s: float, deadline_s: float) -> None:
        """Solves for sizes a little above the largest: by smaller steps after failures, by larger
        ones otherwise.

        It begins with the order that reaches furthest, or anew with another share of the budget,
        with a quick solver or with ``solver``, in turn.
        """
        step, failures, most = _FIRST_STEP, 0, self._ceiling - 1
        for turn in count():
            if self.good >= most or failures >= _MOST_FAILURES or self._left_s(deadline_s) <= 0:
                return
            before, size = self.good, min(most, max(self.good + 1, int(self.good * (1 + step))))
            allowed_s = min(solve_s, self._left_s(deadline_s))
            self.seed += 1
            if turn % 2:
                self.target_share = _TARGETS[turn // 2 % len(_TARGETS)]
                self.attempt(size, solver if turn % 4 == 3 else "greedy_first", allowed_s)
            else:  # the allocator will waste about as much as with the order to begin with, or nothing
                best = self.fastest
                assert best.problem is not None
                used = (
                    simulate(best.problem, best.solution.schedule).peak_bytes
                    / best.predicted.peak_bytes
                )
                self.target_share = max(_LEAST_TARGET, min(1.0, used)) if turn % 4 else 1.0
                self.attempt(size, "nearby", allowed_s, start=best.solution.schedule)
            if self.good > before:
                step, failures = min(2 * step, _MOST_STEP), 0
            else:
                step, failures = step / 2 if step > _RESOLUTION else _FIRST_STEP, failures + 1

    def climb_and_stretch(self, solver: str, time_limit_s: float) -> None:
        """Both, in a time together: new orders first, then steps from the best of them."""
        deadline_s = time.perf_counter() + time_limit_s
        left_s = self._left_s(deadline_s)
        self.climb(
            solver,
            _SOLVE_SHARE * time_limit_s,
            deadline_s - _STRETCH_SHARE * left_s,
            _NOT_FAR * self.good,
        )
        self.stretch(solver, _STRETCH_SOLVE_SHARE * time_limit_s, deadline_s)

    def _left_s(self, deadline_s: float) -> float:
        """Seconds for solving until a deadline."""
        afterwards_s = (
            self.afterwards_s(self.fastest) if self.afterwards_s is not None and self.good else 0.0
        )
        return deadline_s - time.perf_counter() - afterwards_s

    @cached_property
    def _ceiling(self) -> int:
        """The least size found whose floor is over the budget; above ``at_most`` where that is
        none."""
        fits, fails = self.good, 2 * self.good
        while (
            fits < self.at_most
            and self._problem_at(min(fails, self.at_most)).floor_bytes <= self.budget
        ):
            fits, fails = min(fails, self.at_most), 2 * fails
        while fits < self.at_most and fails - fits > max(1, int(fits * _RESOLUTION)):
            middle = min(self.at_most, (fits + fails) // 2)
            fits, fails = (
                (middle, fails)
                if self._problem_at(middle).floor_bytes <= self.budget
                else (fits, middle)
            )
        return self.at_most + 1 if fits == self.at_most else fails

    def attempt(
        self, size: int, solver: str, solve_s: float, start: Schedule | None = None
    ) -> bool:
        """Solves at ``size``, from ``start`` where one is given; whether any size was reached that
        is larger than those before."""
        problem, before = self._problem_at(size), self.good
        if solver == "auto":
            solver = self.backend.auto_solver
        try:
            check_floor(problem.with_budget(self.budget))
            order, waste = new_order(
                problem,
                self.budget,
                self.target_share,
                self.backend.memory,
                solver=solver,
                time_limit_s=solve_s,
                near=start,
                seed=self.seed,
            )
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self.failure = error
            self.target_share = (1 + self.target_share) / 2
            self.waste = 1.0
            self._tell(Probe(size, None, 0.0, str(error)))
            return False
        self.waste = waste
        self.wastes.append(waste)  # most orders waste little, and now and then one much
        self.target_share = max(_LEAST_TARGET, min(1.0, 1 / median_low(self.wastes)))
        self.reach(order, size, self.good + 1)
        if self.good < size:
            self._tell(Probe(size, None, 0.0, self._reason(problem, order)))
        return self.good > before

    def _reason(self, problem: Problem, order: Schedule) -> str:
        """Why an order does not do at a size."""
        usage = simulate(problem, order)
        peak = max(usage.peak_bytes, self.backend.memory.peak_bytes(problem, order))
        if peak > self.budget:
            return f"{format_bytes(peak)} is over {format_bytes(self.budget)}"
        overhead = usage.time_s / problem.store_all_time_s - 1
        assert self.max_overhead is not None
        return (
            f"overhead {overhead:.1%} is over the bound of {_bound(problem, self.max_overhead):.1%}"
        )

    def reach(self, order: Schedule, size: int, least: int = 1) -> int:
        """The largest size found at which an order fits: by steps up or down from ``size``, then
        bisection; 0 where that is below ``least``.

        Its plan there is among the probes afterwards.
        """
        fits, fails = (size, self.at_most + 1) if self.fits(order, size) else (0, size)
        if not fits and 1 < least < size:
            if not self.fits(order, least):
                return 0
            fits = least
        step, up = 1, fits == size
        while up and fits < self.at_most and fails > self.at_most:  # in longer and longer steps
            other = min(self.at_most, _round(fits + step, fits + 2 * step))
            fits, fails, step = (
                (other, fails, 2 * step) if self.fits(order, other) else (fits, other, step)
            )
        while fits == 0 and fails > least:  # down, to the nearest that fits
            other = max(least, fails - step)
            fits, fails, step = (
                (other, fails, step) if self.fits(order, other) else (0, other, 2 * step)
            )
        while fits and fails - fits > max(1, int(fits * _RESOLUTION)) and fails <= self.at_most:
            quarter = (fails - fits) // 4
            middle = _round(max(fits + 1, fits + quarter), min(fails - 1, fails - quarter))
            fits, fails = (middle, fails) if self.fits(order, middle) else (fits, middle)
        plan = (
            reused_plan(self._problem_at(fits), order, self.budget, self.backend.memory)
            if fits
            else None
        )
        if plan is not None:
            self._tell(Probe.of(fits, plan))
            self.good = max(self.good, fits)
        return fits

    def best_of(self, orders: Iterable[Schedule], first: int, *, downwards: bool = False) -> None:
        """Finds the largest size that one of ``orders`` reaches.

        Args:
            orders: known ones; those that reach furthest first, if that is known.
            first: the least size wanted.
            downwards: whether sizes below it will do where it is out of reach.
        """
        for order in orders:
            size = max(first, self.good)
            if (downwards and not self.good) or self.fits(order, size):
                self.reach(order, size)

    @property
    def fastest(self) -> Plan:
        """The fastest plan for the largest size reached."""
        plans = [p.plan for p in self.probes if p.plan is not None and p.batch_size == self.good]
        return min(plans, key=lambda plan: plan.predicted.time_s)

    def fits(self, order: Schedule, size: int) -> bool:
        """Whether a known order keeps to the budget and to the bound of the overhead at a size."""
        problem = self._problem_at(size)
        if not is_overhead_allowed(problem, simulate(problem, order).time_s, self.max_overhead):
            return False
        return self.backend.memory.peak_bytes(problem, order) <= self.budget

    def _tell(self, probe: Probe) -> None:
        self.probes.append(probe)
        if self.progress is not None:
            self.progress(probe)

    def result(self, limit_bytes: int) -> BatchSearch:
        """What was found."""
        found = [p for p in self.probes if p.plan is not None]
        return BatchSearch(
            limit_bytes,
            self.good,
            max(found, key=lambda p: p.samples_per_s).batch_size,
            self.plain,
            tuple(self.probes),
            time.perf_counter() - self.started,
        )


def _round(low: int, high: int) -> int:
    """The number from ``low`` to ``high`` that is a multiple of the highest power of two:
    allocators and kernels like round sizes."""
    power = 1
    while high // (2 * power) * 2 * power >= low:
        power *= 2
    return high // power * power
