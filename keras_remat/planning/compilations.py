"""Compiles schedules that may keep to a budget, as few as will do: compiling takes long."""

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

    Args:
        sure, most: how many schedules are compiled whatever it takes, and how many before the
            deadline.
        near_miss: a schedule that takes so much more than it may, as a share of that, is not at
            once written in all slower ways: one for less is tried first. For half on an H100, a
            U-Net took 18 % more, and 1.14 of plain's time with values held. It takes 1.06 so.
        near_misses: so many schedules wait for that. A GPT-like's third one for half kept to it.
        hardly_over: the next way is enough for that where the schedule takes so much more in it, at
            most. It was not measured by itself.
        slower_way_share: what a slower way adds to a step, as a share of it, about: so much may a
            schedule for less add.
        cheap_way_share: where the next way adds no more than this, by the compiled modules, nothing
            is tried for less. For half on an H100 it adds nothing to MobileNetV2's step, which
            takes 1.01 of plain's time so, and 1.04 with a schedule for less; it adds 0.04 to a
            U-Net's, which takes 1.08 so, and 1.06 with one for less.
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
    """Holds what was compiled for a budget, and what could be.

    Args:
        budget_bytes: what the device may have in use.
        end_s: by ``time.perf_counter``, to when compiling may put a deadline off.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, memory: MemoryModel, end_s: float = math.inf
    ):
        self._problem, self._budget_bytes, self._memory = problem, budget_bytes, memory
        self._end_s, self._seconds = end_s, 0.0
        self._untried: dict[Schedule, BudgetCandidate] = {}
        self._tried: set[Schedule] = set()
        self._near: list[BudgetCandidate] = []  # what may keep to the budget in another way
        self._kept: BudgetCandidate | None = None  # what does in the next way, and adds to the time

    def offer(self, found: Iterable[BudgetCandidate]) -> None:
        """Keeps what could be compiled later."""
        self._untried.update((one.schedule, one) for one in found)

    def may_fit(self, one: BudgetCandidate) -> bool:
        """Returns whether compiling is worth it. A step that recomputes nothing is compiled
        whatever is predicted, because that is what Keras's own step needs."""
        if one.peak_bytes <= self._budget_bytes:
            return True
        plain = one.schedule == Schedule.store_all(self._problem.graph)
        return plain and not self._memory.order_matters and self.compiled(one).is_exact

    def compiled(self, one: BudgetCandidate) -> BudgetCandidate:
        """Returns the same with the peak that compiling tells, where it does.

        Where schedules are written in several ways, one that misses the budget by little in the
        quickest is written in the next. Where it misses that, too, or the next way adds to the
        step's time, it waits for a schedule for less that may keep to the budget in the quickest
        way. Where that one does not, either, or takes longer than those that wait in a slower way,
        they are taken, or written in slower ways first. They recompute less.
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
        """Returns the first of those that missed the budget by little that keeps to it in another
        way, if any does."""
        if self._kept is not None:
            return self._kept
        asked = (self._asked(one, self._budget_bytes) for one in self._near)
        return next((one for one in asked if one.peak_bytes <= self._budget_bytes), None)

    def _over(self, share: float) -> int:
        """Returns the budget and a share of what it leaves above the resident bytes."""
        room = max(0, self._budget_bytes - self._problem.profile.resident_bytes)
        return self._budget_bytes + int(share * room)

    @property
    def _most_s(self) -> float:
        """Returns how long a schedule may take that is tried for less than those that wait."""
        if self._kept is not None:
            return self._step_s(self._kept)
        return (1 + OPTIONS.slower_way_share) * self._near[0].time_s

    def _step_s(self, one: BudgetCandidate) -> float:
        """Returns the seconds of a step, by what the compiler made of it where that is known."""
        told_s = self._memory.compiled_step_s(self._problem, one.schedule)
        return one.time_s if told_s is None else told_s

    def compiled_least(self) -> BudgetCandidate | None:
        """Returns what is predicted to need least of what was not compiled, with the peak that
        compiling tells; ``None`` where there is nothing left, or compiling tells nothing."""
        if not self._untried:
            return None
        peaks = {order: self._memory.peak_bytes(self._problem, order) for order in self._untried}
        one = self.compiled(self._untried[min(peaks, key=lambda order: peaks[order])])
        return one if one.is_exact else None

    def may_go_on(self, deadline_s: float) -> bool:
        """Returns whether one more schedule may be compiled."""
        in_time = time.perf_counter() < self.put_off(deadline_s)
        return len(self._tried) < (OPTIONS.most if in_time else OPTIONS.sure)

    def are_over(self, deadline_s: float) -> bool:
        """Returns whether compiling told peaks, and no further schedule may be compiled."""
        return bool(self._tried) and not self.may_go_on(deadline_s)

    def put_off(self, deadline_s: float) -> float:
        """Returns a deadline put off by what compiling took, to the end at most."""
        return max(deadline_s, min(deadline_s + self._seconds, self._end_s))

    def _asked(self, one: BudgetCandidate, budget_bytes: int | None) -> BudgetCandidate:
        """Returns the same with the peak that compiling it for a budget tells, where it does; in
        the quickest way without one."""
        within = self._problem.with_budget(budget_bytes)
        began_s = time.perf_counter()
        told = self._memory.compiled_peak_bytes(within, one.schedule)
        self._seconds += time.perf_counter() - began_s
        if told is None:
            return one
        self._tried.add(one.schedule)
        return replace(one, peak_bytes=told, is_exact=True)
