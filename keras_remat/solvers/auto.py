"""The default solver: fast heuristics first, then improvement from the best schedule so far, until time is up.

1. No budget, or an order without recomputation that fits (the default one or the memory-aware one): optimal, done.
2. :mod:`keras_remat.solvers.greedy` gives a first schedule, :mod:`keras_remat.solvers.dtr` another
   one where the graph is not large.
3. :mod:`keras_remat.solvers.intervals` searches around it, with more candidates whenever its program was solved; on a coarse problem
   (:mod:`keras_remat.solvers.coarsen`) for graphs of more than ``LARGE_OPS`` ops. Without OR-Tools this step is left out.
4. :mod:`keras_remat.solvers.window_bound` tries to prove the best schedule optimal: with a few cuts before step 3,
   with all of them, on small graphs, last.
5. :mod:`keras_remat.solvers.anneal` works on the order itself.

Where step 2 finds nothing, the steps 3 and 5 start from a schedule for a somewhat larger budget.

Every schedule is checked by :func:`keras_remat.validate.validate` before it counts. ``KeyboardInterrupt`` ends the search and keeps the
best schedule; before there is one it passes through. The bound is that of :mod:`keras_remat.solvers.bound` or
of step 4; both hold for every legal order.

The steps 2, 3 and 5 end by counted work (:mod:`keras_remat.solvers.effort`), and a schedule replaces another only if it is faster by
more than the tolerance of the proofs. So the same seed gives the same schedule, unless the clock ends one of these steps after all:
on a machine that is very busy or very slow. How far the *bound* gets depends on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from keras_remat.errors import InvalidScheduleError, PeakExceededError, ScheduleNotFoundError
from keras_remat.problem import Problem
from keras_remat.schedule import Schedule, Solution
from keras_remat.simulate import simulate
from keras_remat.solvers import anneal, bound, coarsen, cp_sat, dtr, greedy, intervals, window_bound
from keras_remat.solvers.effort import effort_s
from keras_remat.solvers.reorder import memory_aware_order
from keras_remat.validate import validate

LARGE_OPS = 700
"""Graphs with more needed ops are coarsened."""
FEW_CUTS = 3
"""Cuts of the window bound that is tried before the interval search, on every graph that is not coarsened."""
PROOF_TOLERANCE = 3e-6
"""Relative; the bounds give away a millionth for their solver's tolerances, so that meeting them exactly is not possible."""
PROVABLE_OPS = 150
"""Graphs up to this size are worth the integer program of :mod:`keras_remat.solvers.window_bound`."""
GREEDY_SHARE, INTERVALS_SHARE, ANNEAL_SHARE = 0.15, 0.5, 0.2
"""The work of the steps, as shares of the time limit."""
DTR_OPS_PER_S = 3_000
"""Ops that DTR runs per second of the whole time limit; a tenth of the ops it can run in a second."""
NEARLY = (1.02, 1.05, 1.1, 1.2, 1.4)
"""Budgets, in budgets, tried where no schedule within the budget was found."""
LATE_ANNEAL_SHARE = 0.5
"""The work of annealing where there is no schedule yet."""
BOUND_SHARE, LAST_SHARE = 0.3, 0.95
"""The shares of the time limit by which the quick bounds and the last one end."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Returns the best schedule found within the time limit.

    Args:
        problem: with a budget or without.
        time_limit_s: seconds; the search ends earlier when the schedule is proved optimal.
        seed: of every random choice.
        progress: called with every better solution.

    Raises:
        ScheduleNotFoundError: none found within the time.
    """
    search = _Search(problem, time_limit_s, seed, progress)
    try:
        search.run()
    except KeyboardInterrupt:
        if search.best is None:
            raise
    if search.best is None:
        raise ScheduleNotFoundError(problem.budget_bytes or 0, problem.floor_bytes, solver="auto")
    return search.solution()


class _Search:
    """The best schedule and the best bound so far."""

    def __init__(self, problem: Problem, time_limit_s: float, seed: int, progress: Callable[[Solution], None] | None):
        self.problem, self.seed, self.progress = problem, seed, progress
        self.started = time.perf_counter()
        self.limit_s = time_limit_s
        self.best: tuple[int, ...] | None = None
        self.best_s = float("inf")
        self.solver = "auto"
        self.bound_s = problem.store_all_time_s

    def at(self, share: float) -> float:
        """The ``perf_counter`` time at which this share of the limit is spent."""
        return self.started + share * self.limit_s

    @property
    def proved(self) -> bool:
        return self.best is not None and self.best_s <= self.bound_s * (1 + PROOF_TOLERANCE)

    def solution(self) -> Solution:
        if self.best is None:
            raise ValueError("there is no schedule yet")
        schedule = Schedule(self.best)
        status: Literal["optimal", "feasible"] = "optimal" if self.proved else "feasible"
        spent = time.perf_counter() - self.started
        return Solution(schedule, self.solver, status, spent, self.bound_s, simulate(self.problem, schedule))

    def offer(self, order: Sequence[int], solver: str) -> bool:
        """Keeps ``order`` if it is legal, within the budget and faster than the best; returns whether it fits at all."""
        schedule = Schedule(tuple(order))
        try:
            validate(self.problem, schedule)
        except (InvalidScheduleError, PeakExceededError):
            return False
        seconds = simulate(self.problem, schedule).time_s
        if seconds < self.best_s * (1 - PROOF_TOLERANCE):
            self.best, self.best_s, self.solver = schedule.order, seconds, solver
            self._report()
        return True

    def _report(self) -> None:
        if self.progress is not None and self.best is not None:
            self.progress(self.solution())

    def run(self) -> None:
        known = []
        steps = greedy.steps_limit(GREEDY_SHARE * self.limit_s)
        for schedule in greedy.candidates(self.problem, deadline_s=self.at(LAST_SHARE), max_steps=steps):
            if self.offer(schedule.order, "greedy"):
                known.append(schedule.order)
        if self.proved:
            return
        if len(self.problem.graph.needed) <= LARGE_OPS:
            try:
                other = dtr.solve(
                    self.problem,
                    time_limit_s=max(0.1, self.at(BOUND_SHARE) - time.perf_counter()),
                    seed=self.seed,
                    max_ops_run=int(DTR_OPS_PER_S * effort_s(self.limit_s)),
                ).schedule.order
            except ScheduleNotFoundError:
                pass  # one heuristic less to start from
            else:
                if self.offer(other, "dtr"):
                    known.append(other)
        self.bound_s = max(self.bound_s, bound.lower_bound_s(self.problem, deadline_s=self.at(BOUND_SHARE)))
        self._report()
        if len(self.problem.graph.needed) <= LARGE_OPS:
            chain = window_bound.longest_chain(self.problem)
            widest = sorted(chain, key=lambda op_id: -bound.crossing_bytes(self.problem, op_id))[:FEW_CUTS]
            self._window_bound(sorted(widest), self.at(BOUND_SHARE))
        if self.proved:
            return
        near = self._nearly() if self.best is None else None
        if cp_sat.available():
            self._intervals(known, near)
        if not self.proved:
            share = ANNEAL_SHARE if self.best is not None else LATE_ANNEAL_SHARE
            rounds = anneal.rounds_limit(self.problem, share * self.limit_s)
            start = near if self.best is None else self.best
            for order in anneal.improve(self.problem, start, deadline_s=self.at(LAST_SHARE), seed=self.seed, max_rounds=rounds):
                self.offer(order, "anneal")
        if not self.proved and len(self.problem.graph.needed) <= PROVABLE_OPS:
            self._window_bound(window_bound.longest_chain(self.problem), self.at(LAST_SHARE))

    def _window_bound(self, cuts: Sequence[int], deadline_s: float) -> None:
        limit_s = deadline_s - time.perf_counter()
        if limit_s > 0:
            self.bound_s = max(
                self.bound_s,
                window_bound.lower_bound_s(self.problem, cuts, limit_s=limit_s, known_s=self.best_s if self.best else None),
            )
            self._report()

    def _nearly(self) -> tuple[int, ...]:
        """An order to start from where none fits yet: greedy's for the least larger budget at which it finds one."""
        steps = greedy.steps_limit(GREEDY_SHARE * self.limit_s / len(NEARLY))
        for factor in NEARLY:
            larger = self.problem.with_budget(int((self.problem.budget_bytes or 0) * factor))
            for schedule in greedy.candidates(larger, deadline_s=self.at(BOUND_SHARE), max_steps=steps):
                return schedule.order
        return memory_aware_order(self.problem, sorted(self.problem.graph.needed))

    def _intervals(self, known: list[tuple[int, ...]], near: tuple[int, ...] | None) -> None:
        """Interval search on the order of first runs of the best schedule, coarsened where that order is long.

        Args:
            known: schedules to start from and to take candidates from.
            near: one over the budget that takes their place while there is none.
        """
        problem = self.problem
        if near is not None:
            known = [near]
        base = first_runs(near or self.best or tuple(sorted(problem.graph.needed)))
        known = [order for order in known if first_runs(order) == base]
        expand: Callable[[Sequence[int]], tuple[int, ...]] = tuple
        depths: tuple[int, ...] = intervals.DEPTHS
        work = intervals.work_limit(INTERVALS_SHARE * self.limit_s)
        if len(base) > LARGE_OPS:
            coarse = coarsen.Coarse(problem, base, coarsen.small_value_threshold(problem, base))
            problem, expand, depths = coarse.problem, coarse.expand, intervals.LARGE_DEPTHS
            known = [coarse.project(order) for order in known]
            base = tuple(range(len(coarse.ops)))
            steps = greedy.steps_limit(GREEDY_SHARE * self.limit_s)
            for schedule in greedy.candidates(problem, deadline_s=self.at(LAST_SHARE), max_steps=steps, orders=[base]):
                known.append(schedule.order)
                self.offer(expand(schedule.order), "greedy")
        for depth in depths:
            budget = problem.budget_bytes or 0
            if budget < problem.floor_bytes:
                return
            orders = intervals.improve(
                problem, base, known, depth=depth, deadline_s=self.at(LAST_SHARE), work=work, seed=self.seed
            )
            excess = 0
            found: list[tuple[int, ...]] = []
            solved = True
            try:
                while True:
                    found.append(next(orders))
                    full = expand(found[-1])
                    if not self.offer(full, "intervals"):  # small values lived longer than was set aside for them
                        excess = simulate(self.problem, Schedule(full)).peak_bytes - (self.problem.budget_bytes or 0)
                    if self.proved:
                        return
            except StopIteration as end:
                solved = end.value.solved
                work -= end.value.work
            finally:
                orders.close()
            known += found[-3:]
            if self.proved or not solved:
                return
            if excess > 0:
                problem = problem.with_budget(budget - excess)


def first_runs(order: Sequence[int]) -> tuple[int, ...]:
    """The ops of an order in the order in which they run first."""
    return tuple(dict.fromkeys(order))
