"""Returns the costs of the reference shape's step, at its own and at other batch sizes.

A search for a batch size (:mod:`keras_remat.training.sizes`) asks for it. Costs come from the
traced step: measured op times where there are any, else estimates that are scaled to measured
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from keras_remat.batch_size.scaling import BatchScaling, batch_scaling
from keras_remat.batch_size.step_scaling import (
    Scaling,
    SlicedScaling,
    scalings_below,
    sliced_scaling,
)
from keras_remat.core.limit import Limit
from keras_remat.core.profile import Profile
from keras_remat.training import effects
from keras_remat.training.fit_state import FitState
from keras_remat.training.record import FitRecord
from keras_remat.training.shape_state import Costs, TracedShape
from keras_remat.training.tools import running_tools


def with_reference_traced(fit: FitState, record: FitRecord, batch: Any) -> FitRecord:
    """Returns the record where the reference shape's step is traced.

    Args:
        batch: a batch of the reference shape; traced where the shape was known to fit without a
            trace.

    Raises:
        LookupError: there is no reference shape.
        UnsupportedModelError: nothing can be planned for it.
    """
    tools, shape = running_tools(fit), record.running.reference_shape
    if shape is None:
        raise LookupError("no batch was trained")
    if isinstance(shape, TracedShape):
        return record
    with fit.planning():
        costs = effects.costs_of(tools, shape, batch)
    tools.family.learn(shape.signature, costs)
    return record.with_shape(record.mode, shape.traced(costs))


def reference_costs(fit: FitState, record: FitRecord) -> tuple[Costs, dict[int, Profile]]:
    """Returns the reference shape's traced step with its costs, and profiles by batch size.

    The profiles are those of its ops that were measured at other batch sizes.

    After plain steps, estimated op times are scaled to the measured step.

    Raises:
        LookupError: no step was traced.
    """
    steps, baseline = record.running, record.baseline.usage
    if steps.reference is None or steps.costs is None:
        raise LookupError("no step was traced")
    problem = steps.costs.problem
    if problem.profile.source == "estimated" and baseline and problem.store_all_time_s > 0:
        ratio = baseline.time_s / problem.store_all_time_s
        op_time_s = tuple(time_s * ratio for time_s in problem.profile.op_time_s)
        problem = replace(problem, profile=replace(problem.profile, op_time_s=op_time_s))
    family = running_tools(fit).family
    profiles = family.profiles_by_size(steps.shapes, steps.reference, problem.graph)
    return replace(steps.costs, problem=problem), profiles


def scaling_of(fit: FitState, record: FitRecord, batch: Any) -> Scaling:
    """Returns the costs of the reference shape's step at other batch sizes.

    They are those of the slices that the step runs in, if it has any.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    backend, (costs, measured) = running_tools(fit).backend, reference_costs(fit, record)
    sliced = sliced_scaling(backend, fit.model, costs.traced, costs.problem, batch)
    if sliced is not None:
        return sliced
    return batch_scaling(backend, fit.model, costs.problem, batch, measured, costs.traced)


def scalings_in_slices(
    record: FitRecord, scaling: Scaling, wanted: int, limit: Limit
) -> Iterator[SlicedScaling]:
    """Yields the costs of the reference shape's step with some ops in slices, where it runs whole.

    Args:
        scaling: the step's costs with whole ops; for a step in slices, nothing is yielded.
        wanted: the batch size that is to be reached.
        limit: the limit that the step has to keep to.
    """
    size, costs = record.running.batch_size, record.running.costs
    if costs is not None and isinstance(scaling, BatchScaling):
        yield from scalings_below(scaling, costs.traced, size, wanted, limit)


def estimated_step_s(fit: FitState, record: FitRecord) -> float:
    """Returns the estimated seconds of the reference shape's plain step, without a measurement.

    Returns 0 where the step was not traced.
    """
    costs, backend = record.running.costs, running_tools(fit).backend
    return 0.0 if costs is None else sum(backend.estimated_profile(costs.traced, 0).op_time_s)
