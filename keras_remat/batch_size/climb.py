"""Chooses the sizes that run, each with the order that trains it: the driver of the size rule.

``fit`` and ``find_max_batch_size`` both climb: a chosen size runs, in training or beside it, what
it measured is noted, and the next one is chosen (:mod:`keras_remat.batch_size.sizes`). The size
that an order reaches is a prediction, held against the limit less what the last size that ran
measured above its own. Where known orders reach nothing that is worth running, others are solved
for.
"""

from __future__ import annotations

import math
import time

from keras_remat.backends.base import Backend
from keras_remat.batch_size.found import BatchSearch, MaxOverhead
from keras_remat.batch_size.scaling import Scaling
from keras_remat.batch_size.search import SearchWork, SizeSearch
from keras_remat.batch_size.sizes import Facts, Move, next_size, shorter_by, worth_running
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.planning.plan import Plan

#: Sizes that run at most.
MOST_SIZES = 10
#: Orders that are solved for at most before a size runs: the first one tells what share of the
#: budget the allocator wastes.
MOST_SOLVES = 3


class SizeClimb:
    """What is known of the sizes that ran.

    Args:
        search: by prediction.
        at_most: no size above it is chosen; ``None`` where only memory bounds it.
        trained: a size that has trained; 0 for none.
        max_overhead, seed: as in :func:`~keras_remat.batch_size.search.search_batch_size`.
        solver: for the sizes that no known order fits.
        solve_s: seconds for one solve.
        deadline_s: by ``time.perf_counter``; once a size has trained, none is chosen that would end
            after it.
        multiple: every size is a multiple of it, because so many devices divide it. The size rule
            decides on one device's part.

    Attributes:
        trained: the largest size that trained; 0 for none.
        failed: the smallest size that did not, or 0, and its measured peak, or 0 where that is not
            known.
    """

    def __init__(
        self,
        backend: Backend,
        search: BatchSearch,
        *,
        at_most: int | None = None,
        trained: int = 0,
        max_overhead: MaxOverhead = "forward",
        solver: str = "auto",
        solve_s: float = 6.0,
        deadline_s: float = math.inf,
        multiple: int = 1,
        seed: int = 0,
    ):
        self.backend, self.max_overhead = backend, max_overhead
        self.solve_s, self.seed = solve_s, seed
        self._predicted = search.max_batch_size
        self._at_most = self._predicted * 2**10 if at_most is None else at_most
        self._solver, self._deadline_s, self._multiple = solver, deadline_s, multiple
        self._orders = list(dict.fromkeys(search.orders))
        self._newest: tuple[int, Plan, int] | None = None  # size, plan, measured peak
        self._failures = self._ran_out = self._runs = 0  # the first two since a size trained
        self._longest_s = self._chosen_at_s = 0.0
        self.trained = trained
        self.failed: tuple[int, int] = 0, 0

    def choose(self, scaling: Scaling, limit: Limit) -> tuple[int, Plan] | None:
        """Returns the next size and its plan; ``None`` when the largest that trained is the answer.

        Args:
            limit: the one in force: it may be lower than when the last size was chosen.
            scaling: the problem at any size as it would run now.
        """
        self._chosen_at_s = time.perf_counter()
        facts = self._facts(0, 0)
        sizes = worth_running(facts)
        if not sizes:
            return None
        search = SizeSearch(
            lambda size: scaling.at(size * self._multiple),
            self.corrected(limit, scaling),
            self.backend,
            self.max_overhead,
            sizes[-1],
            self.seed,
            SearchWork(deadline_s=self._deadline_s),
        )
        first = sizes[0] if self.trained else sizes[-1]
        self._learn_newest(scaling)
        store_all = Schedule.store_all(scaling.at(self._multiple).graph)
        search.best_of([*reversed(self._orders), store_all], first, downwards=not self.trained)
        solves = 0
        while True:
            move, size = next_size(self._facts(search.largest, solves))
            if move is Move.STOP:
                return None
            if move is Move.RUN:
                plan = search.fastest
                if plan.solution.schedule not in self._orders:
                    self._orders.append(plan.solution.schedule)
                return size * self._multiple, plan
            search.solve_at(size, self._solver, self.solve_s)
            search.seed, solves = search.seed + 1, solves + 1

    def _learn_newest(self, scaling: Scaling) -> None:
        """Adds the order that ran last to the known ones; ``fit`` has made it anew, from measured
        op times."""
        if self._newest is None:
            return
        size, plan, _ = self._newest
        fits_here = plan.problem is not None and plan.problem.graph.has_ops_of(
            scaling.at(size).graph
        )
        if fits_here and plan.solution.schedule not in self._orders:
            self._orders.append(plan.solution.schedule)

    def corrected(self, limit: Limit, scaling: Scaling) -> Limit:
        """Returns what predictions are held against, by what the last size that ran measured.

        How far off a prediction is differs from run to run, with the chunks that the one before
        left free: half of it is taken to be there again, and all of it after the second failure.
        A size that ran out of memory tells no peak. Smaller sizes alone would not do after it,
        because a faster order fills the same bytes: the bytes shrink as the sizes do.
        """
        error = 0
        if self._newest is not None:
            size, plan, peak = self._newest
            problem, predicted = scaling.at(size), plan.predicted.peak_bytes
            if plan.problem is not None and plan.problem.graph.has_ops_of(problem.graph):
                predicted = self.backend.memory.peak_bytes(problem, plan.solution.schedule)
            error = peak - predicted if self._failures > 1 else (peak - predicted) // 2
        if self._ran_out:
            error = max(error, int(shorter_by(self._ran_out) * limit.usable_bytes))
        return limit.reserving(error)

    def _facts(self, reached: int, solves: int) -> Facts:
        (failed, failed_peak), multiple = self.failed, self._multiple
        at_most = self._at_most // multiple
        left_s = self._deadline_s - time.perf_counter() - self._longest_s
        return Facts(
            predicted=self._predicted // multiple,
            at_most=at_most,
            trained=self.trained // multiple,
            failed=failed // multiple or at_most + 1,
            failed_is_measured=failed_peak > 0,
            failures=self._failures,
            reached=reached,
            solves_left=MOST_SOLVES - solves,
            time_to_run=left_s >= 0,
            time_to_solve=left_s >= self.solve_s,
            runs_left=max(0, MOST_SIZES - self._runs),
        )

    def note(self, size: int, plan: Plan | None, peak_bytes: int, *, fits: bool) -> None:
        """Notes how the trial of a size ended.

        Args:
            size: that ran, or could not.
            plan: under which it ran; ``None`` where there was none.
            peak_bytes: measured; 0 where the device ran out of memory.
            fits: whether it trained within the limit.
        """
        self._runs += 1
        self._longest_s = max(self._longest_s, time.perf_counter() - self._chosen_at_s)
        if plan is not None and peak_bytes:
            self._newest = size, plan, peak_bytes
        if fits:
            self.trained, self._failures, self._ran_out = max(size, self.trained), 0, 0
            return
        self._failures += 1
        self._ran_out += plan is not None and not peak_bytes
        if not self.failed[0] or size < self.failed[0]:
            self.failed = size, peak_bytes
