"""Chooses the sizes that run, each with the order that trains it: the driver of the size rule.

One rule serves ``fit`` and ``find_max_batch_size`` (:mod:`keras_remat.batch_size.sizes`): a chosen
size runs, in training or beside it, its measurements are noted, and the next size is chosen. The
size that an order reaches is a prediction. Predicted peaks have to fit the limit less the bytes by
which the last size that ran exceeded its own prediction. Where known orders reach no size that is
worth running, new orders are solved for.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, Self

from keras_remat.backends.base import Backend
from keras_remat.batch_size.found import BatchSearch, MaxOverhead
from keras_remat.batch_size.search import SizeSearch
from keras_remat.batch_size.search_work import SearchWork
from keras_remat.batch_size.sizes import SizeFacts, SizeMove, next_size, shorter_by, worth_running
from keras_remat.batch_size.step_scaling import Scaling
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.planning.plan import Plan

#: Number of sizes that run at most.
MOST_SIZES = 10
#: Number of orders that are solved for at most before a size runs: the first one shows what share
#: of the budget the allocator wastes.
MOST_SOLVES = 3


@dataclass(frozen=True, kw_only=True)
class SizeChooser:
    """Records the sizes that ran, and chooses the next one.

    Args:
        predicted: the largest size by prediction.
        orders: known orders; those that reach furthest come last.
        at_most: largest size that may be chosen.
        first_margin, next_margin: margins that the first size and each later one keep at least:
            where a size runs in training, a step over the limit counts. Nothing was measured before
            the first.
        max_overhead, seed: as in :func:`~keras_remat.batch_size.search.search_batch_size`.
        solver: name of the solver for sizes that no known order fits.
        solve_s: seconds of work for one solve, counted as in a search.
        work_s: seconds of work left for all solves; infinite where something else bounds them.
        deadline_s: seconds of ``time.perf_counter``. Once a size has trained, no size is chosen
            that would end after it.
        multiple: number of devices that divide a batch; every size is a multiple of it. The size
            rule decides on one device's part.
        trained: the largest size that trained; 0 for none.
        failed: the smallest size that did not train, or 0, and its measured peak, or 0 where that
            is not known.
        newest: size, plan and measured peak of the last size that ran.
        failures, ran_out: number of sizes that did not fit since one trained, and how many of these
            ran out of memory.
        runs: number of sizes that ran, or could not.
        chosen_at_s: seconds of ``time.perf_counter`` at which the newest size was chosen.
        longest_s: the most seconds from the choice of a size until it had run.
        ended_by_clock: whether only the deadline kept another size from being tried.
    """

    backend: Backend
    predicted: int
    orders: tuple[Schedule, ...]
    at_most: int
    first_margin: float = 0.0
    next_margin: float = 0.0
    max_overhead: MaxOverhead = "forward"
    solver: str = "auto"
    solve_s: float = 2.0
    work_s: float = math.inf
    deadline_s: float = math.inf
    multiple: int = 1
    seed: int = 0
    trained: int = 0
    failed: tuple[int, int] = (0, 0)
    newest: tuple[int, Plan, int] | None = None
    failures: int = 0
    ran_out: int = 0
    runs: int = 0
    chosen_at_s: float = 0.0
    longest_s: float = 0.0
    ended_by_clock: bool = False

    @classmethod
    def after(
        cls, backend: Backend, search: BatchSearch, *, at_most: int | None = None, **known: Any
    ) -> Self:
        """Returns a chooser that starts from the result of a search by prediction.

        Args:
            at_most: largest size that may be chosen; ``None`` where only memory bounds it.
        """
        predicted, orders = search.max_batch_size, tuple(dict.fromkeys(search.orders))
        most = predicted * 2**10 if at_most is None else at_most
        return cls(backend=backend, predicted=predicted, orders=orders, at_most=most, **known)

    def choose(self, scaling: Scaling, limit: Limit) -> tuple[Self, tuple[int, Plan] | None]:
        """Returns the updated chooser, and the next size with its plan.

        The second is ``None`` when the largest size that trained is the answer.

        Args:
            limit: memory limit in force; it may be lower than when the last size was chosen.
            scaling: the problem at any size as it would run now.
        """
        orders = self._orders_with_newest(scaling)
        chooser = replace(self, orders=orders, chosen_at_s=time.perf_counter())
        sizes = worth_running(chooser._facts(0, 0))
        if not sizes:
            return chooser, None
        search = SizeSearch(
            lambda size: scaling.at(size * self.multiple),
            self.corrected(limit, scaling),
            self.backend,
            self.max_overhead,
            sizes[-1],
            self.seed,
            SearchWork(self.work_s, self.deadline_s, of_solves=True),
        )
        # an order that recomputes too much at few samples may be allowed at the size it was found
        # for
        is_first = not (self.trained and self.runs)
        predicted = min(self.predicted // self.multiple, sizes[-1])
        first = max(sizes[0], predicted) if is_first else sizes[0]
        store_all = Schedule.store_all(scaling.at(self.multiple).graph)
        search.best_of([*reversed(orders), store_all], first, downwards=is_first)
        solves = 0
        while True:
            facts = chooser._facts(search.largest, solves)
            move, size = next_size(facts)
            if move is SizeMove.STOP:
                in_time, _ = next_size(replace(facts, time_to_run=True, time_to_solve=True))
                return replace(chooser, ended_by_clock=in_time is not SizeMove.STOP), None
            if move is SizeMove.RUN:
                plan = search.fastest
                known = dict.fromkeys((*orders, plan.solution.schedule))
                return replace(chooser, orders=tuple(known)), (size * self.multiple, plan)
            search.solve_at(size, self.solver, self.solve_s)
            chooser = replace(chooser, work_s=search.work.left_s())
            search.seed, solves = search.seed + 1, solves + 1

    def _orders_with_newest(self, scaling: Scaling) -> tuple[Schedule, ...]:
        """Returns the known orders and the one that ran last.

        ``fit`` has made that one anew, from measured op times.
        """
        if self.newest is None:
            return self.orders
        size, plan, _ = self.newest
        graph = None if plan.problem is None else plan.problem.graph
        if graph is None or not graph.has_ops_of(scaling.at(size).graph):
            return self.orders
        return tuple(dict.fromkeys((*self.orders, plan.solution.schedule)))

    def corrected(self, limit: Limit, scaling: Scaling) -> Limit:
        """Returns the limit for predictions, corrected by the error of the last size that ran.

        The error of a prediction differs from run to run, with the chunks that the run before left
        free. So half of the error is taken to come again, and all of it after the second failure.
        Where that leaves nothing, the error is taken to grow with the size.
        A size that ran out of memory has no measured peak. After it, smaller sizes alone would not
        help, because a faster order fills the same bytes: so the bytes shrink as the sizes do.
        """
        error = 0
        limit = limit.with_least_margin(self.next_margin if self.runs else self.first_margin)
        if self.newest is not None:
            size, plan, peak = self.newest
            problem, predicted = scaling.at(size), plan.predicted.peak_bytes
            if plan.problem is not None and plan.problem.graph.has_ops_of(problem.graph):
                predicted = self.backend.memory.peak_bytes(problem, plan.solution.schedule)
            error = peak - predicted if self.failures > 1 else (peak - predicted) // 2
            if error >= limit.usable_bytes:
                error = int(limit.usable_bytes * (1 - predicted / peak))
        if self.ran_out:
            error = max(error, int(shorter_by(self.ran_out) * limit.usable_bytes))
        return limit.reserving(error)

    def _facts(self, reached: int, solves: int) -> SizeFacts:
        (failed, failed_peak), multiple = self.failed, self.multiple
        at_most = self.at_most // multiple
        left_s = self.deadline_s - time.perf_counter() - self.longest_s
        is_work_left = not self.trained or self.work_s > 0
        return SizeFacts(
            predicted=self.predicted // multiple,
            at_most=at_most,
            trained=self.trained // multiple,
            failed=failed // multiple or at_most + 1,
            failed_is_measured=failed_peak > 0,
            failures=self.failures,
            reached=reached,
            solves_left=MOST_SOLVES - solves if is_work_left else 0,
            time_to_run=left_s >= 0,
            time_to_solve=left_s >= self.solve_s,
            runs_left=max(0, MOST_SIZES - self.runs),
        )

    def after_trial(self, size: int, plan: Plan | None, peak_bytes: int, *, fits: bool) -> Self:
        """Returns the chooser after the trial of a size.

        Args:
            size: the size that ran, or could not.
            plan: the plan it ran under; ``None`` where there was none.
            peak_bytes: measured peak; 0 where the device ran out of memory.
            fits: whether the size trained within the limit.
        """
        chooser = replace(
            self,
            runs=self.runs + 1,
            longest_s=max(self.longest_s, time.perf_counter() - self.chosen_at_s),
            newest=(size, plan, peak_bytes) if plan is not None and peak_bytes else self.newest,
        )
        if fits:
            return replace(chooser, trained=max(size, self.trained), failures=0, ran_out=0)
        is_smallest = not self.failed[0] or size < self.failed[0]
        return replace(
            chooser,
            failures=self.failures + 1,
            ran_out=self.ran_out + (plan is not None and not peak_bytes),
            failed=(size, peak_bytes) if is_smallest else self.failed,
        )
