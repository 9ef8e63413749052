"""Traces batch shapes, and finds the plan that the first step of one runs under.

The first plan is the first of a list that there is: one that was given, one that was cached, the
one of the search for a larger batch, the order of a larger batch, a quick one from estimated op
times, one that trains the batch in micro-batches, and, last, one that misses the limit by a little.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.base import Backend
from keras_remat.core.events import EventKind
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.fit_plans import StepPlanner
from keras_remat.planning.make_plan import counted_bytes
from keras_remat.planning.plan import Plan
from keras_remat.training.fit_state import FitState
from keras_remat.training.phases import MICRO_BATCHES, Phase
from keras_remat.training.shape_state import Costs, PlannedShape, ShapeState
from keras_remat.units import format_bytes

logger = logging.getLogger(__name__)

#: What is raised where no plan is found.
NOT_FOUND = (InfeasibleBudgetError, ScheduleNotFoundError)

#: A limit that is missed by up to this share of it is no reason to end training.
LITTLE_OVER_SHARE = 0.05
#: Kinds of TensorFlow's ops whose random state is in their kernel: built anew, they begin anew.
_STATEFUL_RANDOM = frozenset(
    {
        "Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson",
        "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform",
        "RandomUniformInt", "TruncatedNormal",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known before a shape is planned.

    Args:
        plans: plans for other batch sizes of the same step, the likeliest first; each with the
            graph it was made for and the phase that it begins in.
        costs: costs at its size, or at a larger one; empty where nothing is known.
    """

    plans: tuple[tuple[Plan, Graph, Phase], ...] = ()
    costs: tuple[Problem, ...] = ()


class FirstPlans:
    """Traces steps and finds first plans for the batch shapes of one ``fit``.

    Args:
        fit: what all steps share.
        backend: of the framework Keras runs on.
        planner: makes plans under the limit.
        given: a plan to begin with.
    """

    def __init__(self, fit: FitState, backend: Backend, planner: StepPlanner, given: Plan | None):
        self._fit, self._backend, self._planner, self._given = fit, backend, planner, given

    # ---------------------------------------------------------------- costs

    def trace(self, batch: Any, known: Known, micro_batches: int = 1) -> Costs:
        """Traces the step of a batch; its op times are estimated, or known from elsewhere.

        Raises:
            UnsupportedModelError: the step cannot be carried, or not be split.
        """
        with self._fit.progress("tracing the train step"):
            gc.collect()  # what an earlier fit left in reference cycles is not resident
            _build_optimizer(self._fit.model)
            traced = self._backend.trace(self._fit.model, batch, micro_batches)
        in_use = counted_bytes(self._backend.device)
        profile = self._backend.estimated_profile(traced, in_use)
        for costs in known.costs if micro_batches == 1 else ():
            if costs.graph.has_ops_of(traced.graph):
                profile = replace(
                    profile,
                    op_time_s=costs.profile.op_time_s,
                    op_workspace_bytes=costs.profile.op_workspace_bytes,
                )
                break
        problem = Problem(traced.graph, profile, name=self._fit.model.name)
        return Costs(traced=traced, problem=problem, micro_batches=micro_batches)

    def plain_peak_bytes(self, costs: Costs) -> int:
        """Returns what Keras's own step is predicted to need."""
        peak = self._backend.memory.peak_bytes(costs.problem, costs.store_all)
        return peak + costs.traced.plain_surplus_bytes

    # ---------------------------------------------------------------- plans

    def given(self, costs: Costs) -> Plan | None:
        """Returns the plan that was given, for the first shape that asks.

        Raises:
            PlanMismatchError, InvalidScheduleError: it is for another step.
        """
        plan, self._given = self._given, None
        if plan is not None:
            plan.check(costs.problem)
        return plan

    def find(
        self, shape: ShapeState, costs: Costs, batch: Any, known: Known, *, may_miss: bool = True
    ) -> tuple[Plan, Costs, Phase]:
        """Returns the first plan there is, what it costs, and the phase that it begins in.

        Args:
            shape, costs, batch, known: what is planned for.
            may_miss: whether a plan that misses the limit by a little is better than none.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is none.
        """
        cached = self._cached(costs.problem)
        if cached is not None:
            self._fit.event(
                EventKind.CACHE, f"A plan for this graph and limit was cached. {cached}"
            )
            return cached, costs, Phase.VERIFY
        for other, graph, phase in known.plans:
            reused = self._planner.reused(costs.problem, other, graph)
            if reused is not None:
                return reused, costs, phase
        try:
            with self._fit.progress("first plan, from estimated op times"):
                return self._planner.quick(costs.problem, shape.batch_size), costs, Phase.WARM_UP
        except NOT_FOUND as error:
            failure = error
        try:
            plan, costs = self.split(shape, costs.micro_batches, batch, failure)
        except ScheduleNotFoundError as error:
            if not may_miss:
                raise
            plan = self._a_little_over(shape, costs, error)
        return plan, costs, Phase.WARM_UP

    def _cached(self, problem: Problem) -> Plan | None:
        try:
            return self._planner.cached(problem)
        except (InvalidProblemError, OSError) as error:
            message = f"A cached plan cannot be used and is made again: {error}"
            self._fit.event(EventKind.CACHE, message)
            return None

    def split(
        self,
        shape: ShapeState,
        micro_batches: int,
        batch: Any,
        error: InfeasibleBudgetError | ScheduleNotFoundError,
    ) -> tuple[Plan, Costs]:
        """Returns a plan that trains the batch in more pieces than ``micro_batches`` and sums their
        gradients; raises ``error`` where that is not allowed or does not help."""
        most = shape.batch_size if shape.may_split else 1
        for count in (n for n in MICRO_BATCHES if micro_batches < n <= most):
            try:
                costs = self.trace(batch, Known(), count)
            except UnsupportedModelError as reason:
                raise error from reason
            try:
                with self._fit.progress(f"plan for {count} micro-batches"):
                    plan = self._planner.quick(costs.problem, shape.batch_size)
            except NOT_FOUND as failed:
                logger.debug("keras_remat: %d micro-batches: %s", count, failed)
                continue
            message = (
                f"No schedule trains {shape.batch_size} samples at once within "
                f"{format_bytes(self._planner.limit_bytes)}: each step trains them in {count} "
                "micro-batches and adds up their gradients. Batch normalization sees one "
                "micro-batch at a time."
            )
            self._fit.warn(EventKind.MICRO_BATCHES, message)
            return plan, costs
        raise error

    def _a_little_over(self, shape: ShapeState, costs: Costs, error: ScheduleNotFoundError) -> Plan:
        """Returns a plan that misses the limit by a little, where ``error`` says that none was
        found which does not; else raises it."""
        limit = self._planner.limit_bytes
        plan: Plan | None = error.closest
        if plan is None:
            try:
                with self._fit.progress("plan that comes close to the limit"):
                    plan = self._planner.closest(costs.problem)
            except NOT_FOUND:
                raise error from None
        if plan.predicted.peak_bytes <= limit:
            return plan  # it takes some of the margin, or the quick solver found it after all
        if plan.predicted.peak_bytes > (1 + LITTLE_OVER_SHARE) * limit:
            raise error
        message = (
            f"No schedule was found under {format_bytes(self._planner.usable_bytes)}; training "
            f"goes on with one that is predicted to need {format_bytes(plan.predicted.peak_bytes)} "
            f"(the limit is {format_bytes(limit)})."
        )
        self._fit.warn(EventKind.OVER_LIMIT, message)
        return plan

    def lowered(self, shape: ShapeState, costs: Costs, plan: Plan, phase: Phase) -> PlannedShape:
        """Returns the shape's record under a plan, whose step is built.

        Raises:
            UnsupportedModelError: its random numbers would be drawn again.
        """
        _refuse_stateful_random(costs)
        with self._fit.progress("building the rematerialized step"):
            problem = costs.problem.with_budget(plan.budget_bytes)
            run = self._backend.lower(costs.traced, problem, plan.solution.schedule)
        if phase is Phase.WARM_UP and not self._backend.measures_op_times:
            phase = Phase.VERIFY  # recording steps cannot make a plan better
        return shape.planned(run, costs, plan, phase)


def _build_optimizer(model: Any) -> None:
    """Makes the optimizer's slots, which Keras would do inside the first step on TensorFlow."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and model.built:
        optimizer.build(model.trainable_variables)


def _refuse_stateful_random(costs: Costs) -> None:
    kinds = sorted({op.kind for op in costs.problem.graph.ops} & _STATEFUL_RANDOM)
    if kinds:
        raise UnsupportedModelError(
            f"The train step draws random numbers by {', '.join(kinds)} (tf.random.normal, say), "
            "whose state is lost when the step is swapped: it would draw the same numbers again. "
            "Draw them with keras.random and a keras.random.SeedGenerator."
        )
