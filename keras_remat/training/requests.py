"""Asks for the plans that steps of one ``fit`` run under, and builds those steps.

The first plan is the first of these that exists: a plan that was given, a cached one, the plan of
the search for a larger batch, the order of another shape, one that is solved for, one that runs
some ops in slices, one that trains the batch in micro-batches, and, last, one that misses the limit
by a little.

One file, though a little long: these ways to a plan, in their order.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from keras_remat.backends.base import Backend, RunStep
from keras_remat.backends.processes import decided_once, made_by_all
from keras_remat.core.graph import Graph
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import check_rules
from keras_remat.errors import (
    BudgetError,
    InvalidProblemError,
    InvalidScheduleError,
    PlanMismatchError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    statement_of,
)
from keras_remat.planning.cache import PlanCache
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_by, plan_for
from keras_remat.planning.slicing import in_slices_of, plan_in_slices, told_whole
from keras_remat.training import tell
from keras_remat.training.arguments import FitOptions
from keras_remat.training.costs import StepCosts
from keras_remat.training.decide import MICRO_BATCHES, Phase
from keras_remat.training.fit_state import FitState
from keras_remat.training.shape_state import Costs, PlannedShape, PriorPlans, ShapeState

logger = logging.getLogger(__name__)

#: A limit that is missed by up to this share of it is no reason to end training.
LITTLE_OVER_SHARE = 0.05
#: Kinds of TensorFlow's ops that hold random state in their kernel: a new step starts it anew.
_STATEFUL_RANDOM = frozenset({
    "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson",
    "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform",
    "RandomUniformInt", "TruncatedNormal",
})  # fmt: skip
#: A plan, its costs, and the phase that it begins in.
_FirstPlan = tuple[Plan, Costs, Phase]


class PlanRequests:
    """Asks for the plans of the batch shapes of one ``fit`` and backend."""

    def __init__(self, fit: FitState, backend: Backend, options: FitOptions, costs: StepCosts):
        self._fit, self._backend, self._options, self._costs = fit, backend, options, costs

    # ---------------------------------------------------------------- requests

    def request(self, problem: Problem, batch_size: int, **asked: Any) -> PlanRequest:
        """Returns the request for a plan by the full solver; ``asked`` changes parts of it."""
        options = self._options
        told = {
            "limit": self._fit.limit, "solver": options.solver,
            "seconds": options.solver_time_limit_s, "seed": options.seed,
            "clock_s": self._fit.setup_left_s(problem.store_all_time_s),
        }  # fmt: skip
        return PlanRequest.on(
            self._backend, problem=problem, batch_size=batch_size,
            where=self._backend.processes, **told | asked,
        )  # fmt: skip

    def with_headroom(
        self,
        shape: ShapeState,
        costs: Costs,
        known: PriorPlans,
        running: Schedule | None = None,
        *,
        is_final: bool = True,
        most_s: float = math.inf,
    ) -> PlanRequest:
        """Returns the request for a plan with headroom for longer batches, if one exists.

        The headroom grows with the number of plans that were too short, and while costs are
        estimated. It is at least what the batch's margin leaves free.

        Args:
            running: the schedule that runs now; the plan may keep it.
            is_final: whether to use the full solver instead of the quick one.
            most_s: seconds that the full solver may take.
        """
        problem, seconds = costs.problem, self._options.solver_time_limit_s
        limit = self._fit.limit
        within = limit.with_least_margin(shape.constraints.least_margin)
        is_final = is_final or not self._backend.measures_op_times
        orders = {
            plan.solution.schedule
            for plan, _, phase in known.plans
            if known.is_family and (phase is Phase.VERIFY or not is_final)
        }
        headroom = self._costs.headroom_bytes(problem, len(orders), is_final=is_final)
        return self.request(
            problem, shape.batch_size,
            seconds=min(seconds, most_s) if is_final else seconds,
            is_quick=not is_final, known=running,
            headroom_bytes=max(headroom, limit.usable_bytes - within.usable_bytes),
        )  # fmt: skip

    def not_found(self, problem: Problem, peak_bytes: int | None = None) -> ScheduleNotFoundError:
        """Returns the error that no schedule within the limit was found.

        ``peak_bytes`` is the smallest peak of those that were tried.
        """
        limit = self._fit.limit
        return ScheduleNotFoundError(
            limit.usable_bytes, problem.floor_bytes, peak_bytes,
            solver=self._options.solver, limit_bytes=limit.total_bytes,
        )  # fmt: skip

    # ---------------------------------------------------------------- plans

    @decided_once
    def given(self, costs: Costs) -> Plan | None:
        """Returns the plan that was given with the options, which is for the first shape.

        Raises:
            PlanMismatchError, InvalidScheduleError: the plan is for another step.
        """
        if self._options.plan is not None:
            self._options.plan.check(self.costs_under(self._options.plan, costs).problem)
        return self._options.plan

    def costs_under(self, plan: Plan, costs: Costs) -> Costs:
        """Returns a step's costs under a plan: in the plan's slices, if it has any.

        Raises:
            PlanMismatchError: the slices are another step's.
        """
        estimate = self._backend.estimated_profile
        traced, problem = in_slices_of(plan, costs.traced, costs.problem, estimate)
        return replace(costs, traced=traced, problem=problem)

    def find(self, shape: ShapeState, costs: Costs, batch: Any, known: PriorPlans) -> _FirstPlan:
        """Returns the first plan there is, its costs, and the phase that it begins in.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is none.
        """
        if (cached := self.cached(costs.problem)) is not None:
            self._fit.event(*tell.cached(cached))
            return cached, costs, Phase.VERIFY
        for phase in (Phase.VERIFY, Phase.WARM_UP):
            if (reused := self.reused(costs.problem, known, phase)) is not None:
                return reused, costs, phase
        if (expected := self._expected_in_slices(shape, costs, known)) is not None:
            return expected
        try:
            return self._solved(shape, costs, known)
        except BudgetError as error:
            failure = error
        try:
            return *self.in_slices(shape, costs, failure), Phase.WARM_UP
        except BudgetError as error:
            failure = error
        try:
            return *self.split(shape, costs, batch, failure), Phase.WARM_UP
        except ScheduleNotFoundError as error:
            if not shape.constraints.allow_over_limit:
                raise
            return self._a_little_over(shape, costs, error), costs, Phase.WARM_UP

    def reused(
        self, problem: Problem, known: PriorPlans, phase: Phase, tried: Collection[Schedule] = ()
    ) -> Plan | None:
        """Returns the fastest plan by a known order that fits; ``None`` where none does.

        Args:
            phase: the phase that such a plan has to begin in.
            tried: orders that are known to fail.
        """
        orders = {
            plan.solution.schedule: graph
            for plan, graph, begins in known.plans
            if begins is phase and plan.solution.schedule not in tried
        }
        found = [self._reused(problem, order, graph) for order, graph in orders.items()]
        fitting = [plan for plan in found if plan is not None]
        return min(fitting, key=lambda plan: plan.predicted.time_s, default=None)

    def _expected_in_slices(
        self, shape: ShapeState, costs: Costs, known: PriorPlans
    ) -> _FirstPlan | None:
        """Returns a plan in the slices that were searched for a larger batch, if there are any.

        It is the plan that was searched where that fits, and else one that is solved for.
        """
        expected = [] if known.is_family or not costs.is_whole else known.plans
        for plan, graph, phase in (one for one in expected if one[0].slicing is not None):
            with suppress(PlanMismatchError, BudgetError):
                under = self.costs_under(plan, costs)
                found = self._reused(under.problem, plan.solution.schedule, graph)
                if found is not None:
                    return found, under, phase
                return self._solved(shape, under, known)
        return None

    @decided_once
    def _reused(self, problem: Problem, order: Schedule, graph: Graph) -> Plan | None:
        """Returns the plan by an order that was made for ``graph``, another shape of the same step.

        Returns ``None`` where the order does not fit or is not legal. The ops have to be the same,
        but not the values they read: constants that are equal at one shape alone are one value
        there.
        """
        memory, limit = self._backend.memory, self._fit.limit
        ours, theirs = ([(op.name, op.kind) for op in of.ops] for of in (problem.graph, graph))
        if ours != theirs:
            return None
        try:
            check_rules(problem, order)
        except InvalidScheduleError:
            return None
        reused = plan_by(problem, order, limit.usable_bytes, memory)
        if reused is None:
            return None
        told = memory.compiled_peak_bytes(problem.with_budget(limit.usable_bytes), order)
        return reused if told is None or limit.fits(told) else None

    def _solved(self, shape: ShapeState, costs: Costs, known: PriorPlans) -> _FirstPlan:
        """Solves for a plan: quickly while ops are estimated, in full where they were measured.

        Measurements come from another shape of the same step.
        """
        is_final = any(phase is Phase.VERIFY for _, _, phase in known.plans)
        if known.is_family and known.plans:
            shapes = [leaf[0] for leaf in shape.signature if leaf is not None]
            self._fit.event(*tell.new_shape(shapes))
        text = "solving for the schedule" if is_final else "first plan, from estimated op times"
        with self._fit.progress(text):
            found = plan_for(self.with_headroom(shape, costs, known, is_final=is_final))
        return found, costs, Phase.VERIFY if is_final else Phase.WARM_UP

    def in_slices(
        self,
        shape: ShapeState,
        costs: Costs,
        error: BudgetError,
        below_s: float = math.inf,
        limit: Limit | None = None,
    ) -> tuple[Plan, Costs]:
        """Returns a plan with some ops in slices, or in other slices than now, and its costs.

        A step takes less than ``below_s`` seconds. Raises ``error``, or a more precise one, where
        there is no such plan, and where a batch size is only tried: there is a smaller size to go
        back to. Without ``limit``, the fit's limit holds.
        """
        limit = limit or self._fit.limit
        seen, costs, may_miss = costs, costs.as_whole, shape.constraints.allow_over_limit
        if not costs.is_whole or costs.traced.slicer is None or not may_miss:
            raise error
        is_quick = self._backend.measures_op_times  # else it is the last one, too
        request = self.request(
            costs.problem, shape.batch_size, limit=limit, is_quick=is_quick,
            headroom_bytes=self._costs.headroom_bytes(costs.problem),
        )  # fmt: skip
        # all ways to slice the step share the time of one plan
        request = replace(request, clock_s=min(request.clock_s, request.seconds))
        with self._fit.progress("plan with some ops in slices"):
            traced, problem, found = plan_in_slices(
                costs.traced, request, self._backend.estimated_profile, error,
                lambda asked: self.cached(asked.problem) or plan_for(asked),
                (seen.traced, seen.problem), below_s,
            )  # fmt: skip
        if found.predicted.time_s >= below_s:
            raise error
        if traced.slicing is not None:
            self._fit.event(*tell.in_slices(traced.slicing, limit))
        return found, replace(costs, traced=traced, problem=problem)

    def split(
        self,
        shape: ShapeState,
        costs: Costs,
        batch: Any,
        error: BudgetError,
    ) -> tuple[Plan, Costs]:
        """Returns a plan that trains the batch in micro-batches and sums their gradients.

        There are more micro-batches than in ``costs``, or as many where those are slices. Raises
        ``error`` where splitting is not allowed or does not help.
        """
        most = shape.batch_size if shape.constraints.may_split else 1
        counts = [n for n in MICRO_BATCHES if costs.micro_batches < n <= most]
        if costs.micro_batches > 1 and costs.traced.whole is not None:
            counts.insert(0, costs.micro_batches)  # the number that was asked for
        for count in counts:
            try:
                costs = self._costs.trace(batch, PriorPlans(), count)
            except UnsupportedModelError as reason:
                raise error from reason
            try:
                with self._fit.progress(f"plan for {count} micro-batches"):
                    is_quick = self._backend.measures_op_times  # else it is the last one, too
                    found = plan_for(
                        self.request(costs.problem, shape.batch_size, is_quick=is_quick)
                    )
            except BudgetError as failed:
                logger.debug("keras_remat: %d micro-batches: %s", count, statement_of(failed))
                continue
            self._fit.warn(*tell.in_micro_batches(shape.batch_size, count, self._fit.limit))
            return found, costs
        raise error

    def _a_little_over(self, shape: ShapeState, costs: Costs, error: ScheduleNotFoundError) -> Plan:
        """Returns a plan that misses the limit by a little, or raises ``error``."""
        limit = self._fit.limit
        try:
            with self._fit.progress("plan that comes close to the limit"):
                found = plan_for(self.request(costs.problem, shape.batch_size, failure=error))
        except BudgetError:
            raise error from None
        if limit.holds(found.predicted.peak_bytes):
            return found  # it takes some of the margin, or the quick solver found it after all
        if not limit.holds(int(found.predicted.peak_bytes / (1 + LITTLE_OVER_SHARE))):
            raise error
        self._fit.warn(*tell.a_little_over(found.predicted.peak_bytes, limit))
        return found

    # ---------------------------------------------------------------- plans of other fits

    def cached(self, problem: Problem) -> Plan | None:
        """Returns the plan that an earlier ``fit`` measured for this graph and limit, if kept."""
        try:
            return self._read(problem)
        except (InvalidProblemError, OSError) as error:
            self._fit.event(*tell.cache_is_broken(error))
            return None

    @decided_once
    def _read(self, problem: Problem) -> Plan | None:
        cache = self._cache
        return None if cache is None else cache.read(problem, self._fit.limit.usable_bytes)

    @decided_once
    def keep(self, measured: Plan, graph: Graph) -> None:
        """Keeps a measured plan that held its limit, where plans are kept.

        Raises:
            OSError: it cannot be written.
        """
        cache, usage, limit = self._cache, measured.measured, self._fit.limit
        if cache is not None and usage is not None and limit.holds(usage.peak_bytes):
            cache.keep(measured, graph, limit.usable_bytes)

    @property
    def _cache(self) -> PlanCache | None:
        """Returns the cache of plans: of one device, one set of versions and one of options."""
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
        return PlanCache(Path(options.cache_dir), setting)

    # ---------------------------------------------------------------- steps

    def lowered(self, shape: ShapeState, costs: Costs, plan: Plan, phase: Phase) -> PlannedShape:
        """Builds the step of a plan and returns the shape's record under it.

        Raises:
            UnsupportedModelError: the step would draw its random numbers again.
        """
        plan = told_whole(plan, costs.traced, costs.problem, self._backend.memory)
        run = self._built(costs, plan)
        if phase is Phase.WARM_UP and not self._backend.measures_op_times:
            phase = Phase.VERIFY  # recording steps cannot make a plan better
        return shape.planned(run, costs, plan, phase)

    @made_by_all
    def _built(self, costs: Costs, plan: Plan) -> RunStep:
        kinds = sorted({op.kind for op in costs.problem.graph.ops} & _STATEFUL_RANDOM)
        if kinds:
            raise UnsupportedModelError(
                f"The train step draws random numbers by {', '.join(kinds)} (tf.random.normal, "
                "say), whose state is lost when the step is swapped: it would draw the same "
                "numbers again. Draw them with keras.random and a keras.random.SeedGenerator."
            )
        with self._fit.progress("building the rematerialized step"):
            problem = costs.problem.with_budget(plan.budget_bytes)
            return self._backend.lower(costs.traced, problem, plan.solution.schedule, plan.writing)
