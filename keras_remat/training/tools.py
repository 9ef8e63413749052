"""Holds what a framework must hold of one mode: what traces, plans, lowers and measures its steps.

The record (:mod:`keras_remat.training.record`) names a mode, and the tools hang on that name. They
go with the mode: what was compiled for one that trains no more is freed.
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
        costs: tells what steps cost.
        plans: asks for plans.
        guard: runs steps.
        family: tells of a shape what others have shown.
        pace: of looks at final steps.
        traced_ops: how many ops the newest shape that was traced has; 0 before.
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
        """Returns whether Keras's own step may run, which is predicted to need so many bytes."""
        return self.fit.limit.fits(predicted_bytes)

    def is_over(self, shape: ShapeState) -> bool:
        """Returns whether a step of this phase measured over the limit."""
        return self.backend.device.has_statistics and not self.fit.limit.holds(shape.peak_bytes)

    def known(self, shape: ShapeState) -> PriorPlans:
        """Returns what is known of a shape without its trace."""
        steps = self.steps
        if steps.reference is None:
            return steps.expected
        return self.family.known(steps.shapes, shape.signature)

    def most_saved_s(self, problem: Problem, now: Usage) -> float:
        """Returns the seconds that a faster plan can save: solving for it may take as long. There
        is no bound where the one that runs does not fit, the steps that are left are not known, or
        a plan is kept for other fits."""
        steps, fits = self.fit.most_steps_left, self.fit.limit.fits(now.peak_bytes)
        if steps is None or self.plans.keeps_plans or not fits:
            return math.inf
        return steps * (now.time_s - problem.store_all_time_s)

    def learnt(self, before: ShapeState, after: ShapeState) -> FitRecord:
        """Returns what is known by what a step took, before and after the move that followed."""
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
        """Returns what plain steps measured; where they cannot, what is predicted."""
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
