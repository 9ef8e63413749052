"""Compiles schedules that may keep to a budget: as few as possible, because each takes long."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.planning.budget_candidate import BudgetCandidate


@dataclass(frozen=True)
class CompilationOptions:
    """Rules how many schedules are compiled, and in which ways they are written.

    Shares of bytes are of the room: the budget less the resident bytes. A tighter schedule is one
    solved for a lower target.

    Args:
        sure: number of schedules that are compiled however late it is.
        most: number of schedules that are compiled at most before the deadline.
        near_miss: share of bytes. A schedule that is over the budget by up to this share waits: a
            tighter schedule is tried before this one is written in all slower ways. Planned for
            half on an H100, a U-Net's schedule was 18 % over, and its step took 1.14 of plain's
            time with values held. With a tighter schedule it takes 1.06.
        near_misses: number of schedules that may wait. For a GPT-like model planned for half, the
            third schedule kept to the budget.
        hardly_over: share of bytes. The first slower way that is over the budget by no more than
            this is the last one written before a tighter schedule is tried. It was not measured by
            itself.
        slower_way_share: share of a step's time that a slower way adds, about. A tighter schedule
            may add as much.
        cheap_way_share: share of the plain step's time. Where the next way adds no more than this,
            by the compiled modules, no tighter schedule is tried. Planned for half on an H100, the
            next way adds nothing to MobileNetV2's step, which then takes 1.01 of plain's time, and
            1.04 with a tighter schedule. It adds 0.04 to a U-Net's step, which then takes 1.08, and
            1.06 with a tighter schedule.
    """

    sure: int = 3
    most: int = 6
    near_miss: float = 0.3
    near_misses: int = 2
    hardly_over: float = 0.05
    slower_way_share: float = 0.05
    cheap_way_share: float = 0.02


OPTIONS = CompilationOptions()


class Compilations:
    """Holds the schedules that were compiled for a budget, and those that could be.

    Args:
        budget_bytes: bytes that the device may have in use.
        end_s: seconds of ``time.perf_counter`` up to which compiling may put a deadline off.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, memory: MemoryModel, end_s: float = math.inf
    ):
        self._problem, self._budget_bytes, self._memory = problem, budget_bytes, memory
        self._end_s, self._seconds = end_s, 0.0
        self._untried: dict[Schedule, BudgetCandidate] = {}
        self._tried: set[Schedule] = set()
        self._near: list[BudgetCandidate] = []  # near misses, which wait; see `near_miss`
        # a near miss that keeps to the budget in the next way, which makes the step slower
        self._kept: BudgetCandidate | None = None

    def offer(self, found: Iterable[BudgetCandidate]) -> None:
        """Keeps candidates that could be compiled later."""
        self._untried.update((one.schedule, one) for one in found)

    def may_fit(self, one: BudgetCandidate) -> bool:
        """Returns whether a candidate is worth compiling.

        A step that recomputes nothing is compiled whatever is predicted, because its peak is what
        Keras's own step needs.
        """
        if one.peak_bytes <= self._budget_bytes:
            return True
        plain = one.schedule == Schedule.store_all(self._problem.graph)
        return plain and not self._memory.order_matters and self.compiled(one).is_exact

    def compiled(self, one: BudgetCandidate) -> BudgetCandidate:
        """Returns a candidate with its compiled peak, where compiling tells one.

        A backend may write a schedule in several ways. A candidate that misses the budget by little
        in the quickest way is written in the next one. If it misses the budget there, too, or the
        next way makes the step slower, it waits: a tighter schedule may keep to the budget in the
        quickest way. If the tighter one does not, or takes longer than the waiting ones do in a
        slower way, a waiting one is returned, written in slower ways where it has to be. The
        waiting ones recompute less.
        """
        self._untried.pop(one.schedule, None)
        if not self._memory.rewrites:
            return self._asked(one, self._budget_bytes)
        waits = next((near for near in self._near if near.schedule == one.schedule), None)
        if waits is not None:
            return waits  # as it is in the quickest way
        if self._near and one.time_s > self._most_s:
            known = self.kept_near()
            if known is not None:
                return known
        near_bytes, quickest = self._over(OPTIONS.near_miss), self._asked(one, None)
        known = self._asked(one, near_bytes)
        if not known.is_exact:
            return known
        if known.peak_bytes <= self._budget_bytes:
            return min(known, self._kept or known, key=self._step_s)
        if known.peak_bytes > near_bytes or len(self._near) >= OPTIONS.near_misses:
            return self.kept_near() or self._asked(known, self._budget_bytes)
        if self._kept is None and known.peak_bytes == quickest.peak_bytes:
            hardly_bytes = min(self._over(OPTIONS.hardly_over), known.peak_bytes - 1)
            again = self._asked(known, hardly_bytes)
            if again.peak_bytes <= self._budget_bytes:
                added_s = self._step_s(again) - again.time_s
                if added_s <= OPTIONS.cheap_way_share * self._problem.store_all_time_s:
                    return again
                self._kept = again
        self._near.append(known)
        return known

    def kept_near(self) -> BudgetCandidate | None:
        """Returns the first near miss that keeps to the budget in a slower way, if any does."""
        if self._kept is not None:
            return self._kept
        asked = (self._asked(one, self._budget_bytes) for one in self._near)
        return next((one for one in asked if one.peak_bytes <= self._budget_bytes), None)

    def _over(self, share: float) -> int:
        """Returns the budget plus a share of its room above the resident bytes."""
        room = max(0, self._budget_bytes - self._problem.profile.resident_bytes)
        return self._budget_bytes + int(share * room)

    @property
    def _most_s(self) -> float:
        """Returns the longest step, in seconds, of a tighter schedule that is worth compiling."""
        if self._kept is not None:
            return self._step_s(self._kept)
        return (1 + OPTIONS.slower_way_share) * self._near[0].time_s

    def _step_s(self, one: BudgetCandidate) -> float:
        """Returns the seconds of a step: of the compiled one if known, else as predicted."""
        told_s = self._memory.compiled_step_s(self._problem, one.schedule)
        return one.time_s if told_s is None else told_s

    def compiled_least(self) -> BudgetCandidate | None:
        """Compiles the untried candidate of the least predicted peak, and returns it.

        Returns ``None`` where no candidate is left, or compiling tells no peak.
        """
        if not self._untried:
            return None
        least = min(self._untried, key=lambda order: self._memory.peak_bytes(self._problem, order))
        one = self.compiled(self._untried[least])
        return one if one.is_exact else None

    def may_go_on(self, deadline_s: float) -> bool:
        """Returns whether one more schedule may be compiled."""
        in_time = time.perf_counter() < self.put_off(deadline_s)
        return len(self._tried) < (OPTIONS.most if in_time else OPTIONS.sure)

    def are_over(self, deadline_s: float) -> bool:
        """Returns whether schedules were compiled, and no further one may be."""
        return bool(self._tried) and not self.may_go_on(deadline_s)

    def put_off(self, deadline_s: float) -> float:
        """Returns a deadline put off by the seconds spent compiling, up to ``end_s``."""
        return max(deadline_s, min(deadline_s + self._seconds, self._end_s))

    def _asked(self, one: BudgetCandidate, budget_bytes: int | None) -> BudgetCandidate:
        """Returns a candidate with its compiled peak, where compiling tells one.

        Args:
            budget_bytes: slower ways are tried while the peak is above it; ``None`` for the
                quickest way.
        """
        within = self._problem.with_budget(budget_bytes)
        began_s = time.perf_counter()
        told = self._memory.compiled_peak_bytes(within, one.schedule)
        self._seconds += time.perf_counter() - began_s
        if told is None:
            return one
        self._tried.add(one.schedule)
        return replace(one, peak_bytes=told, is_exact=True)
