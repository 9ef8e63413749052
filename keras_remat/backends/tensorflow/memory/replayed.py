"""Predicts a schedule's peak by replaying its allocations (:mod:`.replay`)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_remat.backends.memory import SimulatedMemory
from keras_remat.backends.tensorflow.memory.gaps import closer
from keras_remat.backends.tensorflow.memory.pool import Pool, recorded_pool
from keras_remat.backends.tensorflow.memory.replay import Replay, Uses, replayed_peak_bytes
from keras_remat.backends.tensorflow.memory.unordered import unordered_peak_bytes
from keras_remat.backends.tensorflow.profiler.events import Allocations
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import is_sliced

#: How many problems' replays are remembered: a search goes back and forth between a few sizes.
_REMEMBERED = 4


class ReplayedMemory(SimulatedMemory):
    """Predicts a schedule's peak by replaying its allocations.

    Args:
        smallest_bytes: bytes of the smallest request that counts.
        region_bytes: bytes of the allocator's only region; 0 where it adds regions.
        on_gpu: whether the allocator is a GPU's. On a CPU Keras's own step leaves variables
            anywhere in the pool, in chunks of up to twice their size (VGG19's 180 MiB became 237),
            until they are put back (:mod:`keras_remat.backends.tensorflow.memory.variables`);
            planned steps leave them where they are.
        see: looks for the free chunks (:func:`.look.seen_allocations`); ``None`` for no look.
    """

    order_matters = True

    def __init__(
        self,
        *,
        smallest_bytes: int,
        region_bytes: int = 0,
        on_gpu: bool = False,
        see: Callable[[Sequence[int], int], Allocations] | None = None,
    ):
        super().__init__()
        self.restores_after_plain, self._on_gpu = not on_gpu, on_gpu
        self._see = see
        self.smallest_bytes, self._region_bytes = smallest_bytes, region_bytes
        self._pool: Pool | None = None
        self._is_recorded = False  # whether the pool comes from recorded steps, not from a look
        self._uses: deque[Uses] = deque(maxlen=_REMEMBERED)  # of the last problems

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for another process: without the remembered replays and the device."""
        return self.__dict__ | {"_uses": deque(maxlen=_REMEMBERED), "_see": None}

    def uncalibrated_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the replayed peak, resident bytes included."""
        uses = self._uses_of(problem)
        if schedule not in uses.peaks_bytes:
            uses.peaks_bytes[schedule] = replayed_peak_bytes(
                uses, schedule, self._region_bytes, self._pool
            )
        return uses.peaks_bytes[schedule]

    def with_fewer_gaps(
        self, problem: Problem, schedule: Schedule, deadline_s: float
    ) -> Schedule | None:
        """Returns an order with fewer gaps for a step in slices (:mod:`.gaps`); ``None`` where none
        is found. The search is limited by a count of tries: a deadline does not stop it once it has
        begun."""
        budget = problem.budget_bytes
        if budget is None or not is_sliced(problem.graph) or time.thread_time() >= deadline_s:
            return None
        if simulate(problem, schedule).peak_bytes > budget:
            return None
        uses, peak = self._uses_of(problem), self.peak_bytes(problem, schedule)
        limit = budget - (peak - self.uncalibrated_bytes(problem, schedule))
        found = closer(uses, lambda: Replay(uses, self._region_bytes, self._pool), schedule, limit)
        return found if found and self.peak_bytes(problem, found) < peak else None

    def plain_step_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the peak in an unknown pool, since Keras's own step leaves variables anywhere.
        See :class:`~keras_remat.backends.memory.MemoryModel`."""
        if self._pool is None:
            return self.peak_bytes(problem, schedule)
        return replayed_peak_bytes(self._uses_of(problem), schedule, self._region_bytes)

    def unordered_peak_bytes(
        self,
        problem: Problem,
        at_once: int,
        spare_bytes: int,
        ahead_bytes: Mapping[int, int],
    ) -> int:
        """Returns the highest peak of simulated runs in an unknown pool (:mod:`.unordered`); see
        :class:`~keras_remat.backends.memory.MemoryModel`."""
        fitting = 0 if problem.budget_bytes is None else problem.budget_bytes - spare_bytes
        return unordered_peak_bytes(self._uses_of(problem), at_once, ahead_bytes, fitting)

    def find_pool(self, memory: Allocations, problem: Problem) -> None:
        """Assumes that later steps start from the pool just recorded, and resets the calibration.

        A recording that shows less of the same regions is ignored. A step's batch is in use until
        the step ends. On a CPU the batch may have been allocated before the recording began: then
        it lies outside the recorded chunks, and the next batch takes its place. On a GPU it is
        copied to the device during the step.

        Args:
            memory: allocations and deallocations of the recorded steps.
            problem: the problem of the recorded step.
        """
        pool, before = recorded_pool(memory, self._region_bytes), self._pool
        if pool is None or (before and self._is_recorded and before.shows_more_than(pool)):
            return
        self._is_recorded = True
        self._start_from(pool, problem)

    def look(self, problem: Problem, held_bytes: Sequence[int], most_bytes: int) -> None:
        """Looks at the pool, unless steps have been recorded."""
        if self._see is None or self._is_recorded:
            return
        pool = recorded_pool(self._see(held_bytes, most_bytes), self._region_bytes)
        if pool is not None:
            self._start_from(pool, problem)

    def _start_from(self, pool: Pool, problem: Problem) -> None:
        if not self._on_gpu:
            seen = Counter(extent.requested_bytes for extent in pool.extents)
            elsewhere = self._uses_of(problem).batch - seen
            pool = pool._replace(batch_bytes=tuple(elsewhere.elements()))
        self._pool = pool
        self._uses.clear()
        self.forget()

    def _uses_of(self, problem: Problem) -> Uses:
        """Returns the uses of a problem; they do not depend on its budget."""
        for uses in self._uses:
            if uses.problem.graph is problem.graph and uses.problem.profile is problem.profile:
                return uses
        self._uses.append(Uses(problem, self.smallest_bytes))
        return self._uses[-1]
