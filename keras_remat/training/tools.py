"""Holds the tools of one mode, which trace, plan, lower and measure its steps.

The record (:mod:`keras_remat.training.record`) holds only a mode's name, by which its tools are
found. They are dropped with the mode, which frees the steps that were compiled for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from keras_remat.backends.base import Backend
from keras_remat.backends.memory import is_on_host
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Usage
from keras_remat.training.arguments import FitOptions
from keras_remat.training.costs import StepCosts
from keras_remat.training.decide import Phase
from keras_remat.training.fit_state import FitState
from keras_remat.training.record import FitRecord, Mode, StepsRecord
from keras_remat.training.requests import PlanRequests
from keras_remat.training.shape_family import ShapeFamily
from keras_remat.training.shape_state import PlainShape, PriorPlans, ShapeState
from keras_remat.training.undo import StepGuard
from keras_remat.training.watch import Pace

#: Seconds the solver may take for a plan that is on trial.
_TRIAL_SOLVE_S = 8.0


class Tools:
    """Traces, plans, lowers and measures the steps of one mode.

    Attributes:
        costs: traces steps and predicts their costs.
        plans: asks for plans.
        guard: runs steps.
        family: predicts a shape's costs from other shapes.
        pace: says when a look at a final step is due.
        traced_ops: number of ops of the newest shape that was traced; 0 before.
    """

    def __init__(self, fit: FitState, mode: Mode):
        options = _options_of(mode, fit.options)
        self.fit, self.mode = fit, mode
        self.backend: Backend = fit.backends[mode.at]
        self.costs = StepCosts(fit, self.backend)
        self.plans = PlanRequests(fit, self.backend, options, self.costs)
        self.guard = StepGuard(fit.model, self.backend)
        self.family, self.pace = ShapeFamily(), Pace(options.profile_steps)
        self.traced_ops = 0

    @property
    def steps(self) -> StepsRecord:
        """Returns how the mode trains now."""
        return self.fit.record.of(self.mode)

    @property
    def on_gpu(self) -> bool:
        """Returns whether the steps run on another device than the host, which holds the data."""
        return not is_on_host(self.backend.device)

    def plain_fits(self, predicted_bytes: int) -> bool:
        """Returns whether Keras's own step may run, by its predicted bytes."""
        return self.fit.limit.fits(predicted_bytes)

    def is_over(self, shape: ShapeState) -> bool:
        """Returns whether a step of this phase measured over the limit."""
        return self.backend.device.has_statistics and not self.fit.limit.holds(shape.peak_bytes)

    def known(self, shape: ShapeState) -> PriorPlans:
        """Returns the plans and costs that are known of a shape without its trace."""
        steps = self.steps
        if steps.reference is None:
            return steps.expected
        return self.family.known(steps.shapes, shape.signature)

    def most_saved_s(self, problem: Problem, now: Usage) -> float:
        """Returns the most seconds that a faster plan can save; solving for it may take as long.

        There is no bound where the running plan does not fit, the steps that are left are not
        known, or plans are kept for other fits.
        """
        steps, fits = self.fit.most_steps_left, self.fit.limit.fits(now.peak_bytes)
        if steps is None or self.fit.options.cache_dir or not fits:
            return math.inf
        return steps * (now.time_s - problem.store_all_time_s)

    def learnt(self, before: ShapeState, after: ShapeState) -> FitRecord:
        """Returns the record with the baseline and the device's facts that follow from a step.

        ``before`` is the step's shape before the move that followed, ``after`` after it.
        """
        record = self.fit.record
        baseline, device = record.baseline, record.device
        baseline = baseline.after_step(
            before,
            after,
            self.steps.reference or before.signature,
            self.backend.compilation,
            self._plain_peak_bytes,
        )
        if isinstance(before, PlainShape) and before.phase is Phase.PLAIN and before.peak_bytes:
            device = self.costs.plain_observed(before.costs, before.peak_bytes)
        return replace(record, baseline=baseline, device=device)

    def _plain_peak_bytes(self, shape: PlainShape) -> int:
        """Returns the measured peak of plain steps, or the predicted one if peaks are not
        measured."""
        if self.backend.device.has_statistics:
            return shape.peak_bytes
        return self.costs.plain_peak_bytes(shape.costs)


def tools_of(fit: FitState, mode: Mode) -> Tools:
    """Returns the tools of a mode, which are made when they are first asked for."""
    tools: Tools | None = fit.handles.get(mode)
    if tools is None:
        tools = fit.handles[mode] = Tools(fit, mode)
    return tools


def running_tools(fit: FitState) -> Tools:
    """Returns the tools of the mode that is in force, or on trial."""
    return tools_of(fit, fit.record.mode)


def _options_of(mode: Mode, options: FitOptions) -> FitOptions:
    """Returns the options of a mode's plans: a trial is worth little time."""
    if not mode.is_on_trial:
        return options
    return replace(
        options,
        solver="greedy" if options.solver == "auto" else options.solver,
        solver_time_limit_s=min(_TRIAL_SOLVE_S, options.solver_time_limit_s),
    )
