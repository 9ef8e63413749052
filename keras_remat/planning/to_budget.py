"""Solving until the device's *allocator* agrees.

A solver keeps the bytes alive under a target; the allocator rounds and fragments, and a compiler
has an order of its own, so a schedule's real peak is above that. What it is above the budget is had
by moving ops about (:mod:`keras_remat.planning.defragment`), or taken off the target, and the
problem is solved again, until the peak fits; where the target becomes one that no schedule reaches,
one between is tried.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from keras_remat.backends.base import Backend
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.planning.defragment import WORTH_COMPACTING, compacted
from keras_remat.solvers import solve

#: How often a target is corrected.
_MAX_CORRECTIONS = 10
#: Of the time that is left, what one solve may take.
_SOLVE_SHARE = 0.7
#: The share of the time left that compacting may take, and of all of it at last.
_COMPACTING_SHARE, _LAST_SHARE = 0.1, 0.3
#: Seconds that a solve gets at least, however late it is, and at least this share of what the
#: longest one took that found something. With nothing found, and patience, it goes on for this many
#: times the time limit.
_LEAST_SOLVE_S, _LATE_SHARE, _PATIENCE = 0.5, 0.7, 4
#: The least a correction takes off, as a share of what is above the floor.
_LEAST_STEP = 0.05
#: How much faster, as a share of the step, a schedule over the budget must be for another try.
_WORTH_ANOTHER = 0.02


@dataclass(frozen=True)
class Replayed:
    """A solution and the allocator's peak under it."""

    solution: Solution
    peak_bytes: int

    @property
    def schedule(self) -> Schedule:
        """The solution's."""
        return self.solution.schedule

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        assert self.solution.usage is not None
        return self.solution.usage.time_s


class Correction:
    """One solver's way to a schedule whose allocator peak keeps to the budget.

    Args:
        problem: graph and profile; its own budget plays no part.
        budget_bytes: what the device may have in use.
        backend: whose allocator decides.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, backend: Backend, solver: str, seed: int
    ):
        self._problem, self._budget, self._backend, self._solver, self._seed = (
            problem,
            budget_bytes,
            backend,
            solver,
            seed,
        )
        self._chosen: tuple[Replayed, int] | None = (
            None  # the fastest that keeps to the budget, and its target
        )
        self._closest: Replayed | None = None
        self._misses = 0  # of what lowering told

    def run(self, start: int, deadline_s: float, *, patient: bool = True) -> tuple[Replayed, int]:
        """Returns the schedule and the target that it was solved for.

        Args:
            start: the first target, in bytes.
            deadline_s: by ``time.perf_counter``; a late solve gets about what the ones before it
                took all the same.
            patient: whether it goes on after the deadline while nothing was found.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: none was found.
        """
        target, reached, unreachable = start, start, self._problem.floor_bytes
        started = time.perf_counter()
        limit_s = deadline_s - started
        least_s = max(_LEAST_SOLVE_S, limit_s / _MAX_CORRECTIONS)
        late_s = _PATIENCE * limit_s if patient else 0.0
        for _ in range(_MAX_CORRECTIONS):
            left_s = deadline_s - time.perf_counter()
            if target < self._problem.floor_bytes or left_s < (
                -late_s if self._chosen is None else least_s
            ):
                break
            solving = time.perf_counter()
            try:
                solutions = self._solutions(target, max(_SOLVE_SHARE * left_s, least_s))
            except ScheduleNotFoundError:
                if self._chosen is not None:
                    break
                if self._closest is None:
                    raise
                unreachable, target = target, (target + reached) // 2
                continue
            least_s = max(least_s, _LATE_SHARE * (time.perf_counter() - solving))
            compacting_s = _COMPACTING_SHARE * max(least_s, deadline_s - time.perf_counter())
            surplus = self._judge(solutions, target, compacting_s)
            if surplus is None:
                break
            reached = target
            # a few bytes less give the same schedule
            less = max(surplus, int(_LEAST_STEP * (target - unreachable)))
            target = max(target - less, (unreachable + target) // 2)
        if self._chosen is None and self._closest is not None:
            self._closest = self._compacted(
                self._closest, _LAST_SHARE * limit_s
            )  # what no lower target gave
            if self._closest.peak_bytes <= self._budget:
                self._chosen = self._closest, target
        if self._chosen is None:
            over = None if self._closest is None else self._closest.peak_bytes
            raise ScheduleNotFoundError(
                self._budget, self._problem.floor_bytes, over, solver=self._solver
            )
        validate(self._problem.with_budget(self._budget), self._chosen[0].schedule)
        return self._chosen

    def _solutions(self, target: int, time_limit_s: float) -> list[Solution]:
        """All that the solver found on its way, the best last."""
        seen: list[Solution] = []
        final = solve(
            self._problem.with_budget(target),
            solver=self._solver,
            time_limit_s=time_limit_s,
            seed=self._seed,
            progress=seen.append,
        )
        return [*seen, final]

    def _judge(self, solutions: list[Solution], target: int, compacting_s: float) -> int | None:
        """Keeps the best of a solver's solutions; bytes to take off the target for another try, or
        ``None`` where none is worth it."""
        replayed = self._replayed(solutions)
        fastest, fitting = replayed[0], min(replayed, key=lambda r: r.peak_bytes)
        validate(self._problem.with_budget(target), fitting.schedule)
        step = 1
        if fitting.peak_bytes <= self._budget:
            # where lowering tells the peak, that decides; it takes long, so every miss is followed
            # by a longer step
            lowered = (
                self._backend.lowered_peak_bytes(self._problem, fitting.schedule)
                or fitting.peak_bytes
            )
            self._misses += lowered > self._budget
            step = 2 ** max(0, self._misses - 1)
            fitting = replace(fitting, peak_bytes=lowered)
        if fitting.peak_bytes <= self._budget:
            if self._chosen is None or fitting.time_s < self._chosen[0].time_s:
                self._chosen = fitting, target
            if (
                not self._backend.fragments
                or fastest.time_s >= (1 - _WORTH_ANOTHER) * self._chosen[0].time_s
            ):
                return None
            fitting = fastest
        elif self._closest is None or fitting.peak_bytes < self._closest.peak_bytes:
            self._closest = fitting
        smaller = self._compacted(fastest, compacting_s)
        if smaller.peak_bytes <= self._budget and self._backend.fragments:
            self._chosen = smaller, target
            return None
        return step * (fitting.peak_bytes - self._budget)

    def _replayed(self, solutions: list[Solution]) -> list[Replayed]:
        """A solver's solutions with their allocator peaks, the fastest first, up to the first that
        keeps to the budget."""
        replayed: list[Replayed] = []
        for schedule in dict.fromkeys(solution.schedule for solution in reversed(solutions)):
            solution = next(s for s in reversed(solutions) if s.schedule == schedule)
            usage, peak = (
                simulate(self._problem, schedule),
                self._backend.predicted_peak_bytes(self._problem, schedule),
            )
            replayed.append(Replayed(replace(solution, usage=usage), peak))
            if peak <= self._budget:
                break
        return replayed

    def _compacted(self, replayed: Replayed, time_limit_s: float) -> Replayed:
        """What moving ops about makes of it, where the allocator fragments."""
        if not self._backend.fragments or replayed.peak_bytes > WORTH_COMPACTING * self._budget:
            return replayed
        order = compacted(
            self._problem,
            replayed.schedule,
            self._budget,
            self._backend,
            time_limit_s=time_limit_s,
            seed=self._seed,
        )
        usage = simulate(self._problem, order)
        peak = max(usage.peak_bytes, self._backend.predicted_peak_bytes(self._problem, order))
        return Replayed(replace(replayed.solution, schedule=order, usage=usage), peak)
