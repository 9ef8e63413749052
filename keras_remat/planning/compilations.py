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
            once written in a slower way: one for less is tried first. For half on an H100, a
            U-Net, MobileNetV2 and EfficientNetB0 took 18, 22 and 28 % more, and 1.14, 1.07 and 1.09
            of plain's time in a slower way. They take 1.07, 1.04 and 1.04.
        near_misses: so many schedules wait for that. A GPT-like's third one for half kept to it.
        slower_way_share: what a slower way adds to a step, as a share of it, about: so much may a
            schedule for less add.
    """

    sure: int = 3
    most: int = 6
    near_miss: float = 0.3
    near_misses: int = 2
    slower_way_share: float = 0.05


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

        Where schedules are written in several ways, a quick way in which one misses the budget by
        little is not at once given up for a slower one. The first such schedules wait for another
        one, for less, that may keep to it in that way. Where that one does not, either, or takes
        longer than a slower way of theirs would, those that wait are written in slower ways first.
        One of them that keeps to the budget is returned: it recomputes less.
        """
        self._untried.pop(one.schedule, None)
        if self._near and one.time_s > (1 + OPTIONS.slower_way_share) * self._near[0].time_s:
            known = self.kept_near()
            if known is not None:
                return known
        rewrites = self._memory.rewrites
        room = max(0, self._budget_bytes - self._problem.profile.resident_bytes)
        near_bytes = self._budget_bytes + int(rewrites * OPTIONS.near_miss * room)
        known = self._asked(one, near_bytes)
        if not rewrites or not known.is_exact or known.peak_bytes <= self._budget_bytes:
            return known
        if known.peak_bytes <= near_bytes and len(self._near) < OPTIONS.near_misses:
            self._near.append(known)
            return known
        return self.kept_near() or self._asked(known, self._budget_bytes)

    def kept_near(self) -> BudgetCandidate | None:
        """Returns the first of those that missed the budget by little that keeps to it in another
        way, if any does."""
        asked = (self._asked(one, self._budget_bytes) for one in self._near)
        return next((one for one in asked if one.peak_bytes <= self._budget_bytes), None)

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

    def _asked(self, one: BudgetCandidate, budget_bytes: int) -> BudgetCandidate:
        """Returns the same with the peak that compiling it for a budget tells, where it does."""
        within = self._problem.with_budget(budget_bytes)
        began_s = time.perf_counter()
        told = self._memory.compiled_peak_bytes(within, one.schedule)
        self._seconds += time.perf_counter() - began_s
        if told is None:
            return one
        self._tried.add(one.schedule)
        return replace(one, peak_bytes=told, is_exact=True)
