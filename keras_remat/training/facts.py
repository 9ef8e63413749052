"""States the facts that the next move of a batch shape depends on.

This module asks devices and predictions; the table (:mod:`keras_remat.training.decide`) sees only
the answers.
"""

from __future__ import annotations

from keras_remat.training.decide import Facts, Phase, Recorded
from keras_remat.training.shape_state import (
    PlannedShape,
    Recording,
    ShapeState,
    Solving,
)
from keras_remat.training.tools import Tools
from keras_remat.training.undo import Outcome, OutOfMemory

#: Plain steps of at least 0.1 s are compared with larger ones after 8 measurements; in shorter
#: steps, time outside the ops dominates.
_LONG_STEP_S, _COMPARED_STEPS = 0.1, 8
#: Ratio of a plain step's predicted peak to the smallest measured one, up to which it is tried: a
#: step of ConvLSTM layers is predicted at 92 MiB and takes 88, and a plan's may be as far off.
_PLAIN_OFF = 1.25


def facts_of(tools: Tools, shape: ShapeState, outcome: Outcome) -> Facts:
    """Returns all facts that the next move of a shape depends on."""
    out_of_memory = isinstance(outcome, OutOfMemory)
    return Facts(
        phase=shape.phase,
        enough_steps=len(shape.steps) >= _wanted_steps(shape, tools.fit.options.profile_steps),
        over_limit=tools.is_over(shape),
        attempts_left=shape.tries.attempts_left(out_of_memory=out_of_memory),
        may_split=shape.constraints.may_split and shape.tries.splits_left,
        allow_over_limit=shape.constraints.allow_over_limit
        or not tools.backend.device.has_statistics,
        runs_a_plan=isinstance(shape, PlannedShape),
        # a plain step was measured to fit before it is profiled
        plain_fits=shape.tries.profiled or _plain_is_predicted_to_fit(tools, shape),
        plain_ruled_out=shape.tries.plain_ruled_out,
        plain_may_be_smaller=_plain_may_be_smaller(tools, shape),
        wants_profile=shape.constraints.wants_profile
        and shape.recorded is Recorded.NONE
        and not shape.tries.profiled,
        recorded=shape.recorded,
        # on a CPU, solving would share the cores with the steps that are measured
        solves_beside=tools.on_gpu and tools.backend.processes.count == 1,
        solved=isinstance(shape, Solving) and shape.solved,
        out_of_memory=out_of_memory,
    )


def _plain_is_predicted_to_fit(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether Keras's own step fits by the costs that were just recorded."""
    if not isinstance(shape, Recording) or shape.recorded is not Recorded.MEASURED:
        return False
    peak_bytes = tools.costs.plain_bound_bytes(shape.costs)
    return shape.costs.micro_batches == 1 and tools.plain_fits(peak_bytes)


def _plain_may_be_smaller(tools: Tools, shape: ShapeState) -> bool:
    """Returns whether Keras's own step is worth measuring where no plan keeps to the limit.

    It is if its predicted peak is not much above the smallest measured one.
    """
    if not isinstance(shape, PlannedShape) or not tools.is_over(shape):
        return False
    is_measured = shape.tries.plain_tried or any(seen.plan is None for seen in shape.over_limit)
    if not tools.mode.plain_may_run:  # another mode may have measured it
        is_measured |= tools.fit.record.baseline.source == "measured"
    is_whole = shape.costs.micro_batches == tools.mode.micro_batches == 1
    if is_measured or not is_whole or shape.constraints.require_planned:
        return False
    least_bytes = min([shape.peak_bytes, *(seen.peak_bytes for seen in shape.over_limit)])
    return tools.costs.plain_peak_bytes(shape.costs) <= _PLAIN_OFF * least_bytes


def _wanted_steps(shape: ShapeState, profile_steps: int) -> int:
    """Returns how many steps of a phase are measured.

    More plain steps are measured where they are to be compared with the steps of larger batches.
    """
    compared = shape.phase is Phase.PLAIN and shape.constraints.may_split and bool(shape.steps)
    if compared and min(step.time_s for step in shape.steps) >= _LONG_STEP_S:
        return max(profile_steps, _COMPARED_STEPS)
    return profile_steps
