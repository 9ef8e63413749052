"""The plans a running ``fit`` asks for: a quick one, the best one, and, where neither keeps to the
limit, one that comes closer to it.

Without a framework and without state beyond the limit: what runs when is
:mod:`keras_remat.training.step_trainer`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from keras_remat.backends.base import Backend
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.make_plan import (
    describe_limit_error,
    plan_problem,
    reused_plan,
    usable_bytes,
)
from keras_remat.planning.plan import Plan, cache_path, cached_plan
from keras_remat.units import parse_bytes

logger = logging.getLogger(__name__)

#: Seconds a quick plan may take to solve.
_QUICK_SOLVE_S = 4.0
#: Shares of what has to be saved that are tried, most first, when all of it is out of reach.
_PARTIAL_SAVINGS = (0.85, 0.7, 0.5, 0.25)


@dataclass(frozen=True)
class TunerOptions:
    """The arguments of ``RematAutotune`` that decide about steps; see there."""

    memory_limit: int | str | None = None
    solver: str = "auto"
    solver_time_limit_s: float = 30.0
    profile_steps: int = 3
    margin: float = 0.05
    seed: int = 0
    plan: Plan | None = None
    cache_dir: str | os.PathLike[str] | None = None


class StepPlanner:
    """Makes plans under the memory limit of one ``fit``.

    Args:
        backend: whose allocator decides.
        options: solver, times, seed, limit and margin.
    """

    def __init__(self, backend: Backend, options: TunerOptions):
        self._backend, self._options = backend, options
        self._limit_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        """The limit in force: what was asked for, measured at its first use; lowered when the
        device turns out to have less."""
        if self._limit_bytes is None:
            total, limit = self._backend.device_memory_bytes(), self._options.memory_limit
            self._limit_bytes = total if limit is None else parse_bytes(limit, total_bytes=total)
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    @property
    def usable_bytes(self) -> int:
        """The limit less the margin."""
        return usable_bytes(self.limit_bytes, self._options.margin)

    def predict(self, problem: Problem, schedule: Schedule) -> Usage:
        """Time by the problem's op times and the allocator's peak."""
        return Usage(
            simulate(problem, schedule).time_s,
            self._backend.predicted_peak_bytes(problem, schedule),
        )

    def calibrated(
        self, problem: Problem, schedule: Schedule, measured_peak_bytes: int
    ) -> tuple[Problem, int]:
        """``problem`` with its resident bytes corrected by what ``schedule`` measured, and how many
        bytes more a plan had better leave free.

        What a model of the allocator cannot know is the same under every schedule of a step, unless
        the allocator fragments: then about half of what one took above its replay is seen again
        under others. It is predicted, and the other half left free. And that a few steps took less
        than a replay says nothing: the input pipeline holds more at others.
        """
        surplus = measured_peak_bytes - self._backend.predicted_peak_bytes(problem, schedule)
        spare = max(0, surplus) // 2 if self._backend.fragments else 0
        resident = max(
            0, problem.profile.resident_bytes + (spare if self._backend.fragments else surplus)
        )
        return replace(problem, profile=replace(problem.profile, resident_bytes=resident)), spare

    def quick(self, problem: Problem, batch_size: int) -> Plan:
        """A plan to train under while profiling: a quick one, or, where none is found quickly, one
        by the chosen solver in half of its time or all.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
        """
        if not self._backend.measures_op_times:  # it is the last one, too
            return self.best(problem, batch_size)
        limit_s = self._options.solver_time_limit_s
        for solver, time_limit_s in (
            ("greedy_first", min(_QUICK_SOLVE_S, limit_s)),
            (self._options.solver, limit_s / 2),
        ):
            try:
                return self._solve(problem, batch_size, solver, time_limit_s)
            except ScheduleNotFoundError as error:
                logger.debug("keras_remat: %s", error)
        return self.best(problem, batch_size)

    def best(
        self, problem: Problem, batch_size: int, known: Schedule | None = None, spare_bytes: int = 0
    ) -> Plan:
        """The chosen solver's plan, or that of the ``known`` order where it is as fast;
        ``spare_bytes`` of the limit are left free.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
        """
        return self._solve(
            problem,
            batch_size,
            self._options.solver,
            self._options.solver_time_limit_s,
            -spare_bytes,
            known,
        )

    def nearest(
        self,
        problem: Problem,
        batch_size: int,
        saving_bytes: int,
        known: Schedule | None = None,
        spare_bytes: int = 0,
    ) -> Plan:
        """A plan within the limit less ``spare_bytes``, or, where there is none, one over it that
        still saves as much of ``saving_bytes`` as a quick solver can.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: a quarter of it cannot be saved either, or
                nothing has to be saved.
        """
        try:
            return self.best(problem, batch_size, known, spare_bytes)
        except (InfeasibleBudgetError, ScheduleNotFoundError):
            for share in _PARTIAL_SAVINGS if saving_bytes > 0 else ():
                try:
                    return self._solve(
                        problem,
                        batch_size,
                        "greedy_first",
                        _QUICK_SOLVE_S,
                        int((1 - share) * saving_bytes) - spare_bytes,
                    )
                except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                    logger.debug("keras_remat: %s", error)
            raise

    def _solve(
        self,
        problem: Problem,
        batch_size: int,
        solver: str,
        time_limit_s: float,
        more_bytes: int = 0,
        known: Schedule | None = None,
    ) -> Plan:
        try:
            return plan_problem(
                problem, self.usable_bytes + more_bytes, self._backend,
                solver=solver, time_limit_s=time_limit_s, seed=self._options.seed, known=known,
            )  # fmt: skip
        except InfeasibleBudgetError as error:
            advice = describe_limit_error(
                error, self.limit_bytes, batch_size, problem.profile.resident_bytes
            )
            raise InfeasibleBudgetError(
                error.budget_bytes, error.floor_bytes, error.op_name, advice=advice
            ) from error

    def reused(self, problem: Problem, plan: Plan, graph: Graph) -> Plan | None:
        """The order of ``plan``, made for ``graph``, at another batch size of the same step;
        ``None`` where that does not fit or is not legal."""
        if not graph.has_ops_of(problem.graph):
            return None
        reused = reused_plan(problem, plan.solution.schedule, self.usable_bytes, self._backend)
        lowered = (
            None
            if reused is None
            else self._backend.lowered_peak_bytes(problem, plan.solution.schedule)
        )
        return None if lowered is not None and lowered > self.usable_bytes else reused

    def cached(self, problem: Problem) -> Plan | None:
        """The plan that an earlier ``fit`` measured for this graph and limit, if plans are kept.

        Raises:
            InvalidProblemError: the kept file is no plan for this graph.
        """
        return (
            None
            if self._options.cache_dir is None
            else cached_plan(self._options.cache_dir, problem, self.usable_bytes)
        )

    def keep(self, plan: Plan, graph: Graph) -> None:
        """Keeps a measured plan that held its limit, where plans are kept."""
        if (
            self._options.cache_dir is None
            or plan.measured is None
            or plan.measured.peak_bytes > self.limit_bytes
        ):
            return
        path = cache_path(self._options.cache_dir, graph, self.usable_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
