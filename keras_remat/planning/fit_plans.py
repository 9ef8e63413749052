"""The plans a running ``fit`` asks for: a quick one, the best one, and, where neither keeps to the
limit, one that comes closer to it.

Without a framework and without state: the ``fit`` owns the limit, and what runs when is
:mod:`keras_remat.training.step_trainer`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keras_remat.backends.base import Backend
from keras_remat.backends.processes import decided_once
from keras_remat.core.graph import Graph
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import InfeasibleBudgetError, InvalidScheduleError, ScheduleNotFoundError
from keras_remat.planning.beside import PlanProcess, Request
from keras_remat.planning.make_plan import advising, limit_on
from keras_remat.planning.plan import Plan, cache_path, cached_plan
from keras_remat.planning.plan_problem import closest_plan, plan_problem, reused_plan

logger = logging.getLogger(__name__)

#: Seconds a quick plan may take to solve.
_QUICK_SOLVE_S = 4.0


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
    micro_batches: int = 1


def limit_of(backend: Backend, options: TunerOptions) -> Limit:
    """Returns the limit that was asked for, of what the device has now; of several processes that
    train one model, the least that one of them has."""
    device, wanted, margin = backend.device, options.memory_limit, options.margin
    limit = (
        Limit(device.total_bytes(), margin) if wanted is None else limit_on(device, wanted, margin)
    )
    (least_bytes,) = backend.processes.least(limit.total_bytes)
    return limit.lowered(least_bytes)


class StepPlanner:
    """Makes plans under the memory limit of one ``fit``.

    Args:
        limit_of_fit: asked for the limit in force, which the ``fit`` owns and may lower.
    """

    def __init__(self, backend: Backend, options: TunerOptions, limit_of_fit: Callable[[], Limit]):
        self._backend, self._options = backend, options
        self._limit_of_fit = limit_of_fit

    @property
    def limit(self) -> Limit:
        """Returns the limit in force."""
        return self._limit_of_fit()

    @property
    def keeps_plans(self) -> bool:
        """Returns whether plans are kept for other fits."""
        return self._options.cache_dir is not None

    @decided_once
    def predict(self, problem: Problem, schedule: Schedule) -> Usage:
        """Returns the time by the problem's op times, and the allocator's peak."""
        return Usage(
            simulate(problem, schedule).time_s,
            self._backend.memory.peak_bytes(problem, schedule),
        )

    @decided_once
    def quick(self, problem: Problem, batch_size: int, roomy_bytes: int | None = None) -> Plan:
        """Returns a plan to train under while profiling: a quick one, or, where none is found
        quickly, one by the chosen solver in half of its time or all.

        Args:
            roomy_bytes: what a plan should need at most, where one that does is found quickly.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
        """
        if not self._backend.measures_op_times:  # it is the last one, too
            return self.best(problem, batch_size)
        limit_s, usable = self._options.solver_time_limit_s, self.limit.usable_bytes
        quick_s = min(_QUICK_SOLVE_S, limit_s)
        tries = [("greedy_first", quick_s, usable), (self._options.solver, limit_s / 2, usable)]
        if roomy_bytes is not None and roomy_bytes < usable:
            tries.insert(0, ("greedy_first", quick_s, roomy_bytes))
        for solver, time_limit_s, budget in tries:
            try:
                plan = self._solve(problem, batch_size, solver, time_limit_s, budget_bytes=budget)
                return replace(plan, budget_bytes=usable)
            except InfeasibleBudgetError:
                if budget == usable:
                    raise
            except ScheduleNotFoundError as error:
                logger.debug("keras_remat: %s", error)
        return self.best(problem, batch_size)

    @decided_once
    def best(
        self,
        problem: Problem,
        batch_size: int,
        known: Schedule | None = None,
        budget_bytes: int | None = None,
        most_s: float = math.inf,
    ) -> Plan:
        """Returns the chosen solver's plan, or the ``known`` order's where it is as fast.

        Args:
            known: a legal order that may do.
            budget_bytes: what may be used, where that is less than all.
            most_s: seconds that solving may take, where that is less than its time limit.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: no schedule keeps to the limit.
        """
        options = self._options
        limit_s = min(options.solver_time_limit_s, most_s)
        return self._solve(problem, batch_size, options.solver, limit_s, known, budget_bytes)

    def beside(
        self, problem: Problem, budgets_bytes: Sequence[int], known: Schedule, most_s: float
    ) -> PlanProcess:
        """Begins to solve in a process of its own, for the first of some budgets that is met.

        Args:
            known, most_s: as in :meth:`best`.
        """
        options = self._options
        return PlanProcess(
            Request(
                problem=problem,
                budgets_bytes=budgets_bytes,
                memory=self._backend.memory,
                auto_solver=self._backend.auto_solver,
                solver=options.solver,
                time_limit_s=min(options.solver_time_limit_s, most_s),
                seed=options.seed,
                known=known,
            )
        )

    @decided_once
    def nearest(
        self,
        problem: Problem,
        batch_size: int,
        needed_bytes: int,
        over_limit: Collection[Schedule] = (),
    ) -> Plan:
        """Returns a plan within the limit, or, where there is none, the closest one over it.

        That one is worth a measured step, however little it is predicted to save; where the
        allocator decides, whatever is predicted: what a pool adds differs from order to order (a
        plan predicted at 95 MiB measured 74).

        Args:
            needed_bytes: what was needed so far.
            over_limit: orders that measured over the limit.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is no other order, or none that is
                predicted to need less.
        """
        try:
            return self.best(problem, batch_size)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            plan = self.closest(problem, error, over_limit)
            measuring_tells = bool(over_limit) and self._backend.memory.order_matters
            if plan.predicted.peak_bytes >= needed_bytes and not measuring_tells:
                raise error
            return plan

    @decided_once
    def closest(
        self,
        problem: Problem,
        failure: InfeasibleBudgetError | ScheduleNotFoundError,
        over_limit: Collection[Schedule] = (),
    ) -> Plan:
        """Returns the plan that comes closest to the limit: the closest that was found when none
        kept to it, or, where no compiler has told its peak, one by a quick solver.

        Args:
            failure: why there is none that keeps to it.
            over_limit: orders that measured over it, which are left out.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is none at all.
        """
        seen: Plan | None = getattr(failure, "closest", None)
        if seen is not None and not self._backend.memory.order_matters:
            return seen
        plans = [] if seen is None else [seen]
        usable, seed = self.limit.usable_bytes, self._options.seed
        try:
            plans.append(
                closest_plan(problem, usable, self._backend, time_limit_s=_QUICK_SOLVE_S, seed=seed)
            )
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            logger.debug("keras_remat: %s", error)
        others = [plan for plan in plans if plan.solution.schedule not in over_limit]
        if not others:
            raise failure
        return min(others, key=lambda plan: plan.predicted.peak_bytes)

    def _solve(
        self,
        problem: Problem,
        batch_size: int,
        solver: str,
        time_limit_s: float,
        known: Schedule | None = None,
        budget_bytes: int | None = None,
    ) -> Plan:
        limit = self.limit
        with advising(problem, limit, batch_size, self._backend.device):
            return plan_problem(
                problem,
                limit.usable_bytes if budget_bytes is None else budget_bytes,
                self._backend,
                solver=solver,
                time_limit_s=time_limit_s,
                seed=self._options.seed,
                known=known,
            )

    def not_found(self, problem: Problem, peak_bytes: int | None = None) -> ScheduleNotFoundError:
        """Returns the error that every schedule that was tried takes too much; ``peak_bytes`` is
        the least that one took."""
        return ScheduleNotFoundError(
            self.limit.usable_bytes,
            problem.floor_bytes,
            peak_bytes,
            solver=self._options.solver,
            limit_bytes=self.limit.total_bytes,
        )

    @decided_once
    def reused(self, problem: Problem, plan: Plan, graph: Graph) -> Plan | None:
        """Returns the order of ``plan``, made for ``graph``, at another shape of the same step;
        ``None`` where that does not fit or is not legal.

        Constants that are equal at one shape alone are one there, so the ops have to be the same,
        and not what they read.
        """
        memory, order = self._backend.memory, plan.solution.schedule
        ours, theirs = ([(op.name, op.kind) for op in of.ops] for of in (problem.graph, graph))
        if ours != theirs:
            return None
        try:
            check_rules(problem, order)
        except InvalidScheduleError:
            return None
        reused = reused_plan(problem, order, self.limit.usable_bytes, memory)
        if reused is None:
            return None
        told = memory.compiled_peak_bytes(problem, order)
        return reused if told is None or self.limit.fits(told) else None

    @decided_once
    def cached(self, problem: Problem) -> Plan | None:
        """Returns the plan that an earlier ``fit`` measured for this graph and limit, if plans are
        kept.

        Raises:
            InvalidProblemError: the kept file is no plan for this graph.
            OSError: it cannot be read.
        """
        path = self._cache_path(problem.graph)
        return None if path is None else cached_plan(path, problem)

    def _cache_path(self, graph: Graph) -> Path | None:
        """Returns where the plan of a graph is kept; a plan is one device's, under one set of
        versions and options."""
        options, backend = self._options, self._backend
        if options.cache_dir is None:
            return None
        modules = (sys.modules.get(name) for name in ("keras", backend.name, "keras_remat"))
        setting = (
            backend.name,
            backend.compilation,
            backend.device.name,
            *(str(getattr(module, "__version__", "")) for module in modules),
            options.solver,
            f"{options.solver_time_limit_s} s, seed {options.seed}",
        )
        return cache_path(options.cache_dir, graph, self.limit.usable_bytes, setting)

    @decided_once
    def keep(self, plan: Plan, graph: Graph) -> None:
        """Keeps a measured plan that held its limit, where plans are kept.

        Raises:
            OSError: it cannot be written.
        """
        path = self._cache_path(graph)
        held = plan.measured is not None and self.limit.holds(plan.measured.peak_bytes)
        if path is not None and held:
            path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(path)
