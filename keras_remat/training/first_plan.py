"""Traces batch shapes, and finds the plan that the first step of one runs under.

The first plan is the first of a list that there is: one that was given, one that was cached, the
one of the search for a larger batch, the order of another shape, one that is solved for, one that
trains the batch in micro-batches, and, last, one that misses the limit by a little.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.base import Backend, RunStep, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.processes import decided_once, made_by_all
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.core.events import EventKind
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    ScheduleNotFoundError,
    UnsupportedModelError,
)
from keras_remat.planning.beside import PlanProcess
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
#: How much larger than a batch is what its plan is made for, as a ratio of activation bytes: to the
#: power of how many plans there are for shorter ones, and once before anything was measured. First
#: predictions were up to 6 % too low on networks of the zoo (benchmarks/zoo.py).
_ROOM = 1.1
#: How much more activation bytes than predicted plain steps may take that run their ops in no
#: order. The highest of 16 takes 0.98 to 1.45 times as much, on four models and two allocators
#: (benchmarks/allocators.py): more room would leave fewer steps plain, the fastest ones on a CPU.
_PLAIN_ROOM = 1.25
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
        plans: plans for other shapes of the same step; each with the graph it was made for and the
            phase that it begins in.
        costs: the step's costs at some shape; empty where nothing is known.
        is_family: whether the plans are of shapes that came before, and more may come.
    """

    plans: tuple[tuple[Plan, Graph, Phase], ...] = ()
    costs: tuple[Problem, ...] = ()
    is_family: bool = False


class FirstPlans:
    """Traces steps and finds first plans for the batch shapes of one ``fit``."""

    def __init__(self, fit: FitState, backend: Backend, planner: StepPlanner, given: Plan | None):
        self._fit, self._backend, self._planner, self._given = fit, backend, planner, given

    # ---------------------------------------------------------------- costs

    def trace(self, batch: Any, known: Known, micro_batches: int = 1) -> Costs:
        """Traces the step of a batch; its op times are estimated, or known from elsewhere.

        Raises:
            UnsupportedModelError: the step cannot be carried, or not be split.
        """
        with self._fit.progress("tracing the train step"):
            if not known.is_family:
                gc.collect()  # what an earlier fit left in reference cycles is not resident
            traced = self._traced(batch, micro_batches)
            for difference in traced.differences:
                self._fit.warn(EventKind.MICRO_BATCHES, difference)
            self._tell_unknown_sizes(traced.graph)
            self._tell_changed_layers()
        in_use = counted_bytes(self._backend.device)
        if in_use is not None:
            (in_use,) = self._backend.processes.most(in_use)
        profile = self._backend.estimated_profile(traced, in_use)
        for costs in known.costs[:1] if micro_batches == 1 else ():
            seen = transfer_costs(costs, traced.graph).profile
            profile = replace(
                profile, op_time_s=seen.op_time_s, op_workspace_bytes=seen.op_workspace_bytes
            )
        problem = Problem(traced.graph, profile, name=self._fit.model.name)
        return Costs(traced=traced, problem=problem, micro_batches=micro_batches)

    def _tell_changed_layers(self) -> None:
        changed = self._fit.installed.changed_layers()
        if changed:
            self._fit.warn(
                EventKind.REMARK,
                f"trainable of {', '.join(changed[:3])}{' and others' * (len(changed) > 3)} has "
                "changed since the train function was first traced. Plain fit goes on with what it "
                "was then; a step that is traced now takes what it is now. Call compile() after "
                "such a change.",
            )

    def _tell_unknown_sizes(self, graph: Graph) -> None:
        unknown = sum(
            value.shape is None and not value.nbytes and "float" in (value.dtype or "")
            for value in graph.values
        )
        message = (
            f"The sizes of {unknown} arrays are known only when the step runs: plans count them as "
            "nothing, and may need more than is predicted. A larger margin leaves room for them."
        )
        if unknown and not self._fit.is_told(message):
            self._fit.event(EventKind.REMARK, message)

    @made_by_all
    def _traced(self, batch: Any, micro_batches: int) -> TracedStep:
        """Traces the step; what the layers of a user's model raise for the first batch that they
        get is the model's own fault, and for pieces or another size it is not."""
        try:
            return self._backend.trace(self._fit.model, batch, micro_batches)
        except UnsupportedModelError:
            raise
        except Exception as error:
            if micro_batches == 1 and self._fit.steps_run == 0:
                raise
            size = batch_size_of(batch)
            what = f"a batch of {size} samples in {micro_batches} pieces"
            raise UnsupportedModelError(
                f"The model cannot train {what if micro_batches > 1 else f'a batch of {size}'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @decided_once
    def plain_peak_bytes(self, costs: Costs) -> int:
        """Returns what Keras's own step is predicted to need."""
        return self._plain_peak_bytes(costs, 1.0)

    @decided_once
    def plain_bound_bytes(self, costs: Costs, *, is_traced: bool = True) -> int:
        """Returns what the peak of Keras's own step will hardly ever be over.

        Where it runs its ops in no order, peaks differ: VGG19's were 399 to 573 MiB in one fit.

        Args:
            is_traced: whether its bytes are those of a trace, and not told from other shapes.
        """
        if self._backend.memory.order_matters:
            return self._plain_peak_bytes(costs, _PLAIN_ROOM)
        return self._plain_peak_bytes(costs, 1.0 if is_traced else _ROOM)

    def _plain_peak_bytes(self, costs: Costs, room: float) -> int:
        resident = costs.problem.profile.resident_bytes
        surplus, seen = self._plain_bytes(costs) - resident, self._plain_seen[1]
        return resident + round(surplus * seen * room)

    @property
    def _plain_seen(self) -> tuple[int, float]:
        return self._fit.facts.plain_seen.get(self._backend.compilation, (0, 1.0))

    def _plain_bytes(self, costs: Costs) -> int:
        return costs.traced.plain_peak_bytes(costs.problem, self._backend.memory)

    def observe_plain(self, costs: Costs, measured_bytes: int) -> None:
        """Learns how much more than predicted Keras's own step takes, from the largest that ran: it
        runs its ops in no order, several at once."""
        resident = costs.problem.profile.resident_bytes
        predicted, measured = self._plain_bytes(costs) - resident, measured_bytes - resident
        if predicted > 0 and predicted >= self._plain_seen[0]:
            seen = predicted, max(1.0, measured / predicted)
            self._fit.facts.plain_seen[self._backend.compilation] = seen

    # ---------------------------------------------------------------- plans

    @decided_once
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
        self, shape: ShapeState, costs: Costs, batch: Any, known: Known
    ) -> tuple[Plan, Costs, Phase]:
        """Returns the first plan there is, what it costs, and the phase that it begins in.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is none.
        """
        cached = self._cached(costs.problem)
        if cached is not None:
            self._fit.event(
                EventKind.CACHE, f"A plan for this graph and limit was cached. {cached}"
            )
            return cached, costs, Phase.VERIFY
        for phase in (Phase.VERIFY, Phase.WARM_UP):
            reused = self.reused(costs.problem, known, phase)
            if reused is not None:
                return reused, costs, phase
        try:
            return self._solved(shape, costs, known)
        except NOT_FOUND as error:
            failure = error
        try:
            plan, costs = self.split(shape, costs.micro_batches, batch, failure)
        except ScheduleNotFoundError as error:
            if not shape.terms.may_miss:
                raise
            plan = self._a_little_over(shape, costs, error)
        return plan, costs, Phase.WARM_UP

    def reused(
        self, problem: Problem, known: Known, phase: Phase, tried: Collection[Schedule] = ()
    ) -> Plan | None:
        """Returns the fastest plan by a known order that fits; ``None`` where none does.

        Args:
            phase: that they have to begin in.
            tried: orders that are known not to do.
        """
        orders = {
            plan.solution.schedule: (plan, graph)
            for plan, graph, begins in known.plans
            if begins is phase and plan.solution.schedule not in tried
        }
        found = [self._planner.reused(problem, plan, graph) for plan, graph in orders.values()]
        fitting = [plan for plan in found if plan is not None]
        return min(fitting, key=lambda plan: plan.predicted.time_s, default=None)

    def _solved(self, shape: ShapeState, costs: Costs, known: Known) -> tuple[Plan, Costs, Phase]:
        """Returns a plan that is solved for: quickly, until the step's ops are measured, or for
        good where they were at another shape."""
        is_final = any(phase is Phase.VERIFY for _, _, phase in known.plans)
        if known.is_family and known.plans:
            arrays = ", ".join(str(leaf[0]) for leaf in shape.signature if leaf is not None)
            message = f"No known order fits a batch of {arrays}: it is planned for."
            self._fit.event(EventKind.SHAPE, message)
        text = "solving for the schedule" if is_final else "first plan, from estimated op times"
        with self._fit.progress(text):
            plan = self.roomy(shape, costs, known, None, is_final=is_final)
        return plan, costs, Phase.VERIFY if is_final else Phase.WARM_UP

    def roomy(
        self,
        shape: ShapeState,
        costs: Costs,
        known: Known,
        running: Schedule | None,
        *,
        is_final: bool = True,
        most_s: float = math.inf,
    ) -> Plan:
        """Returns a plan that leaves room for longer batches, the more the more came, and for what
        was not measured yet; or, where there is none, one that does not.

        Args:
            running: the order that runs now, which may do.
            is_final: whether it is made in earnest, or quickly.
            most_s: seconds that a plan in earnest may take.
        """
        problem, size = costs.problem, shape.batch_size
        is_final = is_final or not self._backend.measures_op_times
        budgets = self._budgets_bytes(problem, known, is_final=is_final)
        if not is_final:
            return self._planner.quick(problem, size, budgets[0])
        try:
            return self._planner.best(problem, size, running, budgets[0], most_s)
        except NOT_FOUND:
            if len(budgets) == 1:
                raise
            return self._planner.best(problem, size, running, budgets[1], most_s)

    def roomy_beside(
        self, problem: Problem, known: Known, running: Schedule, most_s: float
    ) -> PlanProcess:
        """Begins to solve for what :meth:`roomy` returns, in a process of its own."""
        budgets = self._budgets_bytes(problem, known, is_final=True)
        return self._planner.beside(problem, budgets, running, most_s)

    def _budgets_bytes(self, problem: Problem, known: Known, *, is_final: bool) -> tuple[int, ...]:
        """Returns what a plan may need: with room left, where that can be, or not."""
        orders = {
            plan.solution.schedule
            for plan, _, phase in known.plans
            if known.is_family and (phase is Phase.VERIFY or not is_final)
        }
        resident, usable = problem.profile.resident_bytes, self._planner.limit.usable_bytes
        is_unmeasured = not is_final and problem.profile.source == "estimated"
        roomy = resident + int((usable - resident) / _ROOM ** max(len(orders), is_unmeasured))
        return (usable,) if roomy == usable else (roomy, usable)

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
        most = shape.batch_size if shape.terms.may_split else 1
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
                f"{format_bytes(self._fit.limit.total_bytes)}: each step trains them in {count} "
                "micro-batches and adds up their gradients."
            )
            self._fit.warn(EventKind.MICRO_BATCHES, message)
            return plan, costs
        raise error

    def _a_little_over(self, shape: ShapeState, costs: Costs, error: ScheduleNotFoundError) -> Plan:
        """Returns a plan that misses the limit by a little, where ``error`` says that none was
        found which does not; else raises it."""
        limit = self._fit.limit
        try:
            with self._fit.progress("plan that comes close to the limit"):
                plan = self._planner.closest(costs.problem, error)
        except NOT_FOUND:
            raise error from None
        if limit.holds(plan.predicted.peak_bytes):
            return plan  # it takes some of the margin, or the quick solver found it after all
        if not limit.holds(int(plan.predicted.peak_bytes / (1 + LITTLE_OVER_SHARE))):
            raise error
        message = (
            f"No schedule was found under {format_bytes(limit.usable_bytes)}; training "
            f"goes on with one that is predicted to need {format_bytes(plan.predicted.peak_bytes)} "
            f"(the limit is {format_bytes(limit.total_bytes)})."
        )
        self._fit.warn(EventKind.OVER_LIMIT, message)
        return plan

    def lowered(self, shape: ShapeState, costs: Costs, plan: Plan, phase: Phase) -> PlannedShape:
        """Returns the shape's record under a plan, whose step is built.

        Raises:
            UnsupportedModelError: its random numbers would be drawn again.
        """
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
            return self._backend.lower(costs.traced, problem, plan.solution.schedule)
