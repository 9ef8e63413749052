"""Traces batch shapes and predicts the costs of their steps, Keras's own step among them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.processes import decided_once, made_by_all
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import UnsupportedModelError
from keras_remat.planning.make_plan import counted_bytes
from keras_remat.planning.slicing import in_micro_batches
from keras_remat.training import tell
from keras_remat.training.fit_state import FitState
from keras_remat.training.record import DeviceFacts
from keras_remat.training.shape_state import Costs, PriorPlans

#: Headroom: a plan is made for ``1.1 ** n`` times the batch's activation bytes, where n is the
#: number of plans for shorter batches, and at least 1 while costs are estimated. First predictions
#: were up to 6 % too low on networks of the zoo (benchmarks/zoo.py).
ROOM = 1.1
#: Activation bytes that a plain step may take, over the predicted ones, where it runs its ops in no
#: order. The highest of 16 steps takes 0.82 to 1.38 times its prediction, on six models and two
#: allocators (benchmarks/results/ablation.md). More room would leave fewer steps plain, and plain
#: steps are the fastest on a CPU.
_PLAIN_ROOM = 1.25
#: Share of a step's bytes: a peak that leaves out fewer may as well be an error of prediction. Of
#: the zoo's predictions, 29 of 30 are within 5 % (benchmarks/results/zoo.md).
_LEAST_UNCOUNTED_SHARE = 0.1


class StepCosts:
    """Traces the steps of one ``fit`` and backend, and predicts their costs."""

    def __init__(self, fit: FitState, backend: Backend):
        self._fit, self._backend = fit, backend
        self._unmeasured: tuple[Costs, int] | None = None
        self._has_told_uncounted = False
        self._put_back_at = -1  # steps that the fit had run by then

    @decided_once
    def predict(self, problem: Problem, schedule: Schedule) -> Usage:
        """Returns the time by the problem's op times, and the allocator's peak."""
        return Usage(
            simulate(problem, schedule).time_s,
            self._backend.memory.peak_bytes(problem, schedule),
        )

    def trace(self, batch: Any, known: PriorPlans, micro_batches: int = 1) -> Costs:
        """Traces the step of a batch; its op times are estimated, or known from elsewhere.

        Raises:
            UnsupportedModelError: the step cannot be carried, or not be split.
        """
        with self._fit.progress("tracing the train step"):
            if not known.is_family:
                gc.collect()  # an earlier fit's reference cycles are not resident
            traced = self._traced(batch, micro_batches)
            for difference in traced.differences:
                self._fit.warn(*tell.differs(difference))
            self._tell_unknown_sizes(traced.graph)
            self._tell_changed_layers()
        in_use = counted_bytes(self._backend.device)
        if in_use is not None:
            (in_use,) = self._backend.processes.most(in_use)
        profile = self._backend.estimated_profile(traced, in_use)
        problem = Problem(traced.graph, profile, name=self._fit.model.name)
        for seen in known.costs[:1] if micro_batches == 1 else ():
            problem = self.as_seen(problem, seen)
        return Costs(traced=traced, problem=problem, micro_batches=micro_batches)

    def as_seen(self, problem: Problem, seen: Problem) -> Problem:
        """Returns a step with what its ops were seen to cost at another size. Their workspace is no
        less than what is expected of them, unless that is a guess: kernels of other sizes may take
        less."""
        profile, expected = problem.profile, problem.profile.op_workspace_bytes
        told = transfer_costs(seen, problem.graph, expected).profile
        held = told.op_workspace_bytes
        if not self._backend.guesses_workspaces:
            held = tuple(map(max, held, expected))
        profile = replace(profile, op_time_s=told.op_time_s, op_workspace_bytes=held)
        return replace(problem, profile=profile)

    @property
    def is_to_be_put_back(self) -> bool:
        """Returns whether the model's variables are put back before a planned step.

        Keras's own step, if it was the last to run, has left them in other chunks of the pool.
        """
        is_due = self._fit.record.device.after_plain and self._put_back_at != self._fit.steps_run
        return is_due and self._backend.memory.restores_after_plain

    def put_back(self, costs: Costs) -> Costs:
        """Puts the model's variables back, and returns a step's costs with the bytes then resident.

        The first planned step finds the variables in this place. Of a model of 4 MiB, 1 MiB more
        was resident.
        """
        if not self.is_to_be_put_back or self._backend.processes.count > 1:
            return costs
        self._backend.snapshot(self._fit.model)()
        self._put_back_at = self._fit.steps_run
        in_use = self._backend.device.in_use_bytes()
        resident = self._backend.estimated_profile(costs.traced, in_use).resident_bytes
        profile = replace(costs.problem.profile, resident_bytes=resident)
        return replace(costs, problem=replace(costs.problem, profile=profile))

    def headroom_bytes(self, problem: Problem, shorter: int = 0, *, is_final: bool = False) -> int:
        """Returns the bytes of the limit that a plan leaves free, if it can.

        They are for longer batches, and for errors of prediction while costs are estimated.

        Args:
            shorter: number of plans for shorter batches.
            is_final: whether the plan is kept for good, even if its costs are estimated.
        """
        is_unmeasured = not is_final and problem.profile.source == "estimated"
        most_bytes = self._fit.limit.usable_bytes - problem.profile.resident_bytes
        return most_bytes - int(most_bytes / ROOM ** max(shorter, is_unmeasured))

    def trace_as_asked(self, batch: Any, known: PriorPlans, micro_batches: int) -> Costs:
        """Traces the step of a batch that is to be trained in micro-batches.

        Where they can, the micro-batches are slices, with the numbers of the whole batch.

        Raises:
            UnsupportedModelError: as :meth:`trace`.
        """
        if micro_batches == 1 or not self._backend.runs_slices:
            return self.trace(batch, known, micro_batches)
        costs, size = self.trace(batch, known), batch_size_of(batch)
        try:
            traced, problem = in_micro_batches(
                costs.traced, costs.problem, size, micro_batches, self._backend.estimated_profile
            )
        except UnsupportedModelError as error:
            self._fit.event(*tell.in_no_slices(size, micro_batches, error))
            return self.trace(batch, known, micro_batches)
        if traced.slicing is not None:
            self._fit.event(*tell.micro_batches_in_slices(micro_batches, traced.slicing))
        return Costs(traced=traced, problem=problem, micro_batches=micro_batches)

    def tell_uncounted(self, problem: Problem, schedule: Schedule, measured_bytes: int) -> None:
        """Warns, once, that a measured peak leaves out much of what the step holds.

        That happens where the device counts no small arrays. The warning comes only where the bytes
        left out are a large share of the limit, too.
        """
        smallest_bytes = self._backend.memory.smallest_bytes
        if not smallest_bytes or self._has_told_uncounted:
            return
        held_bytes = simulate(problem, schedule).peak_bytes
        least_bytes = _LEAST_UNCOUNTED_SHARE * max(held_bytes, self._fit.limit.total_bytes)
        if held_bytes - measured_bytes > least_bytes:
            self._has_told_uncounted = True
            news = tell.small_arrays_are_not_counted(held_bytes, measured_bytes, smallest_bytes)
            self._fit.warn(*news)

    def _tell_changed_layers(self) -> None:
        changed = self._fit.installed.changed_layers()
        if changed:
            self._fit.warn(*tell.changed_layers(changed))

    def _tell_unknown_sizes(self, graph: Graph) -> None:
        unknown = sum(
            value.shape is None and not value.nbytes and "float" in (value.dtype or "")
            for value in graph.values
        )
        news = tell.unknown_sizes(unknown)
        if unknown and not self._fit.was_reported(news.message):
            self._fit.event(*news)

    @made_by_all
    def _traced(self, batch: Any, micro_batches: int) -> TracedStep:
        """Traces the step, and tells a fault of the user's model from a batch that it cannot train.

        An error at the first batch is the model's own and is raised as it is. At micro-batches, at
        a later batch, or where Keras's own step was traced before and may train the batch, it
        becomes an ``UnsupportedModelError``.
        """
        try:
            return self._backend.trace(self._fit.model, batch, micro_batches)
        except UnsupportedModelError:
            raise
        except Exception as error:
            is_first = micro_batches == 1 and self._fit.steps_run == 0
            if is_first and not self._fit.installed.is_traced:
                raise
            size = batch_size_of(batch)
            what = f"a batch of {size} samples in {micro_batches} micro-batches"
            raise UnsupportedModelError(
                f"The model cannot train {what if micro_batches > 1 else f'a batch of {size}'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @decided_once
    def plain_peak_bytes(self, costs: Costs) -> int:
        """Returns the predicted peak of Keras's own step."""
        return self._plain_peak_bytes(costs, 1.0)

    @decided_once
    def plain_bound_bytes(self, costs: Costs, *, is_traced: bool = True) -> int:
        """Returns a bound that the peak of Keras's own step hardly ever exceeds.

        Where the step runs its ops in no order, peaks differ: VGG19's were 399 to 573 MiB in one
        fit. The bound is then the larger of two: the peak as traced with much room, and the peak of
        simulated runs in no order with little room.

        Args:
            is_traced: whether the bytes come from a trace of this shape, and not from other shapes.
        """
        room = _PLAIN_ROOM
        if not self._backend.memory.order_matters:
            room = 1.0 if is_traced else ROOM
        bound = self._plain_peak_bytes(costs, room)
        if not self._fit.limit.fits(bound):
            return bound
        resident, usable = costs.problem.profile.resident_bytes, self._fit.limit.usable_bytes
        problem = costs.problem.with_budget(resident + int((usable - resident) / ROOM))
        unordered = costs.traced.plain_unordered_bytes(problem, self._backend.memory)
        return max(bound, resident + int((unordered - resident) * ROOM))

    def _plain_peak_bytes(self, costs: Costs, room: float) -> int:
        resident = costs.problem.profile.resident_bytes
        surplus, seen = self._plain_bytes(costs) - resident, self._plain_seen[1]
        return resident + round(surplus * seen * room)

    @property
    def _plain_seen(self) -> tuple[int, float]:
        return self._fit.record.device.plain_seen.get(self._backend.compilation, (0, 1.0))

    def _plain_bytes(self, costs: Costs) -> int:
        """Returns the peak of the plain step that the backend predicts.

        Where nothing is measured, the prediction never changes and is remembered: every look at a
        step asks for it, and it took 22 ms for 250 variables.
        """
        if self._unmeasured is not None and self._unmeasured[0] is costs:
            return self._unmeasured[1]
        problem = costs.problem.with_budget(self._fit.limit.usable_bytes)
        nbytes = costs.traced.plain_peak_bytes(problem, self._backend.memory)
        if not self._backend.device.has_statistics:
            self._unmeasured = costs, nbytes
        return nbytes

    def plain_observed(self, costs: Costs, measured_bytes: int) -> DeviceFacts:
        """Returns the device's facts with the largest plain step's excess over prediction.

        A plain step runs its ops in no order, several at once, so it may take more than predicted.
        """
        facts = self._fit.record.device
        resident = costs.problem.profile.resident_bytes
        predicted, measured = self._plain_bytes(costs) - resident, measured_bytes - resident
        if predicted > 0 and predicted >= self._plain_seen[0]:
            seen = predicted, max(1.0, measured / predicted)
            plain_seen = {**facts.plain_seen, self._backend.compilation: seen}
            return replace(facts, plain_seen=plain_seen)
        return facts
