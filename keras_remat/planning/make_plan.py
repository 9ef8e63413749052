"""Makes a plan for a model without training.

The model is traced and profiled, and then :mod:`keras_remat.planning.request` plans for the step.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

from keras_remat.backends.base import (
    COMPILATIONS,
    Backend,
    TracedStep,
    load_backends,
    preserved_state,
)
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.memory import DeviceMemory
from keras_remat.cards import table as cards
from keras_remat.checks import check_among, check_int, check_name, check_seconds, check_share
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.target import Target
from keras_remat.errors import (
    ScheduleNotFoundError,
    UnsupportedModelError,
    without_inner_frames,
)
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest
from keras_remat.planning.slicing import plan_with_slices, told_whole
from keras_remat.solvers import SOLVERS
from keras_remat.units import LEAST_LIMIT, format_bytes, format_unequal_bytes, parse_bytes

logger = logging.getLogger(__name__)

#: Seconds for the plan that measuring runs under.
_QUICK_PLAN_S = 10.0


@without_inner_frames
def make_plan(
    model: Any,
    batch: Any,
    memory_limit: int | str | None = None,
    *,
    card: str | Target | None = None,
    solver: str = "auto",
    solver_time_limit_s: float = 30.0,
    profile: Literal["measured", "estimated"] | None = None,
    margin: float = 0.05,
    seed: int = 0,
    compilation: str = "auto",
) -> Plan:
    """Plans a model's train step without training; the model comes back as it was.

    Args:
        model: a compiled Keras model.
        batch: ``(x, y[, sample_weight])`` as arrays or specs, or an int batch size where inputs and
            targets follow from the model. Arrays get the types that ``fit`` gives them (float64
            becomes float32); specs and TensorFlow's tensors keep theirs, as a data set's do.
        memory_limit: bytes that the device's allocator may have in use: ``8 * 2**30``, ``"8GiB"``
            or ``"80%"`` of the device. ``None`` is all of the device's memory; of a card's, what a
            framework uses by default.
        card: a card to plan for, which need not be there: a name in
            :data:`keras_remat.cards.table.CARDS` such as ``"H100"``, a card of one's own such as
            ``"RTX3060:memory=8GiB"`` (:func:`keras_remat.cards.table.card`), or a target. Nothing
            runs. It needs the extra ``cards``. On TensorFlow the step is the compiled one, as with
            ``jit_compile=True``.
        solver: a name in ``SOLVERS``.
        solver_time_limit_s: seconds for the solver.
        profile: ``"measured"``, the default, runs a few steps (under an estimated plan) on the
            device and puts every variable back; ``"estimated"``, the only one for a card, runs
            nothing.
        margin: share of the limit that is kept free.
        seed: the same model and seed give the same plan, up to measured times.
        compilation: as in ``RematAutotune``; ``"auto"`` plans for the model's own mode.

    Raises:
        InfeasibleBudgetError: the limit is below what one op alone needs.
        ScheduleNotFoundError: no schedule was found under it.
        UnsupportedModelError: the model cannot be rematerialized, or not be compiled for the card.
        MissingPackageError: the packages that compile for a card are not installed.
        ValueError, TypeError: wrong arguments.
    """
    check_name("solver", solver, SOLVERS)
    check_seconds("solver_time_limit_s", solver_time_limit_s)
    backend, step = traced_as_it_trains(
        model, batch, memory_limit, margin, profile, seed, compilation, target_of(card)
    )
    request = PlanRequest.on(
        backend,
        problem=step.problem,
        batch_size=batch_size_of(step.batch),
        limit=step.limit,
        solver=solver,
        seconds=solver_time_limit_s,
        seed=seed,
    )
    traced, problem, plan = plan_with_slices(step.traced, request, backend.estimated_profile)
    return told_whole(replace(plan, card=step.card), traced, problem, backend.memory)


def target_of(card: str | Target | None) -> Target | None:
    """Returns the target that an argument ``card=`` names; ``None`` for the live device.

    Raises:
        ValueError: the table knows no such card.
        TypeError: neither a name nor a target.
    """
    if card is None or isinstance(card, Target):
        return card
    if not isinstance(card, str):
        raise TypeError(f'card must be a name such as "H100", got {type(card).__name__}')
    return cards.card(card)


@dataclass(frozen=True)
class TracedModel:
    """Holds a model's train step with its costs, outside of ``fit``.

    Args:
        limit: memory limit of the step.
        plan: the quick plan that was run to measure the profile; ``None`` where nothing was run.
        card: name of the card to plan for; ``None`` for the live device.
    """

    batch: Any
    traced: TracedStep
    problem: Problem
    limit: Limit
    plan: Plan | None = None
    card: str | None = None


def traced_as_it_trains(
    model: Any,
    batch: Any,
    memory_limit: int | str | None,
    margin: float,
    profile: str | None,
    seed: int,
    compilation: str,
    target: Target | None = None,
) -> tuple[Backend, TracedModel]:
    """Returns a model's step as it will run, compiled or in order, and the backend that runs it.

    Where it may train in either mode, the first that can carry the step is taken, as in ``fit``.

    Args:
        profile: ``None`` means measured on the live device, and estimated for a target.
        target: where the step would run; ``None`` is the live device.

    Raises:
        UnsupportedModelError: no backend can carry the step.
        InfeasibleBudgetError, ScheduleNotFoundError: no quick plan to measure under was found.
        ValueError, TypeError: wrong arguments.
    """
    check_name("compilation", compilation, COMPILATIONS)
    if profile is None:
        profile = "measured" if target is None else "estimated"
    check_among("profile", profile, ("measured", "estimated"))
    if target is not None and profile == "measured":
        raise ValueError(
            'profile="measured" runs steps, and nothing runs where a card is given: leave profile '
            "out, or leave card out on a machine that has the card"
        )
    check_share("margin", margin)
    check_int("seed", seed, least=0)
    if isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"model must be a compiled Keras model, got the path {os.fspath(model)!r}: load it "
            "with keras.saving.load_model first"
        )
    if not getattr(model, "compiled", False):
        raise ValueError("the model is not compiled: call model.compile(optimizer, loss) first")
    *others, last = load_backends(model, compilation, target)
    for backend in others:
        try:
            return backend, traced_model(
                backend, model, batch, memory_limit, margin, profile, seed, target
            )
        except UnsupportedModelError as error:
            logger.info("keras_remat: no %s step: %s", backend.compilation, error)
    return last, traced_model(last, model, batch, memory_limit, margin, profile, seed, target)


def traced_model(
    backend: Backend,
    model: Any,
    batch: Any,
    memory_limit: int | str | None,
    margin: float,
    profile: str,
    seed: int,
    target: Target | None = None,
) -> TracedModel:
    """Traces a model and profiles its step.

    With ``"measured"``, steps run under a quick plan, and every variable is put back.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: no quick plan to measure under was found.
        UnsupportedModelError: the model cannot be rematerialized.
        ValueError, TypeError: wrong arguments.
    """
    remark = backend.check(model)
    if remark and target is not None and not target.is_live:
        warnings.warn(remark, stacklevel=2)
    gc.collect()  # steps that ran before are in reference cycles
    if memory_limit is None and target is not None:
        memory_limit = target.usable_bytes
    runs = profile == "measured" or (target is not None and not target.is_live)
    limit = limit_on(backend.device, memory_limit, margin, runs=runs)
    arrays = backend.example_batch(model, batch)
    traced = backend.trace(model, arrays)
    profile_now = backend.estimated_profile(traced, counted_bytes(backend.device))
    problem = Problem(traced.graph, profile_now, name=model.name)
    quick: Plan | None = None
    if profile == "measured":
        request = PlanRequest.on(
            backend,
            problem=problem,
            batch_size=batch_size_of(arrays),
            limit=limit,
            solver="greedy_first",
            seconds=_QUICK_PLAN_S,
            seed=seed,
        )
        traced, problem, quick = plan_with_slices(traced, request, backend.estimated_profile)
        problem = measured_problem(backend, model, traced, problem, quick, arrays)
    card = None if target is None else target.card
    return TracedModel(arrays, traced, problem, limit, quick, card)


def measured_problem(
    backend: Backend, model: Any, traced: TracedStep, problem: Problem, plan: Plan, batch: Any
) -> Problem:
    """Runs ``plan`` on ``batch``, and returns ``problem`` with the measured profile.

    The model's variables are put back.

    Raises:
        ScheduleNotFoundError: the device ran out of memory.
    """
    schedule, profile, usage = plan.solution.schedule, None, None
    try:
        run = backend.lower(traced, problem.with_budget(plan.budget_bytes), schedule, plan.writing)
        with preserved_state(backend, model) as put_back:
            run(batch)  # a first call autotunes, which says nothing about later ones
            put_back()  # now the variables are where every later step finds them
            _, usage = backend.measure(lambda: run(batch))
            resident = counted_bytes(backend.device)
            recorder = backend.recorder()
            if recorder.start():
                try:
                    for _ in range(3):
                        run(batch)
                finally:  # a profiler session must not outlive a step that raised
                    profile = recorder.stop(run, resident)
    except Exception as error:
        if not backend.is_out_of_memory(error):
            raise
        usage = None
    if usage is None:  # the error is gone, and with it what its frames hold
        raise ScheduleNotFoundError(
            plan.budget_bytes,
            problem.floor_bytes,
            reason=f"a plan for {format_bytes(plan.predicted.peak_bytes)} ran out of memory",
            advice="Lower the memory limit to what the device has, or use a smaller batch.",
        )
    if profile is not None:
        problem = replace(problem, profile=profile)
    if backend.device.has_statistics:
        backend.memory.observe(problem, schedule, usage.peak_bytes)
    return problem


def limit_on(
    device: DeviceMemory, memory_limit: int | str | None, margin: float, *, runs: bool = True
) -> Limit:
    """Returns the limit that was asked for, or the device's memory where that is less.

    It warns where the device has less.

    Args:
        memory_limit: ``None`` is all of the device's memory.
        runs: whether steps run on this device; a prediction may be for another.
    """
    total = device.total_bytes()
    if memory_limit is None:
        return Limit(total, margin)
    limit = Limit(parse_bytes(memory_limit, total_bytes=total, least=LEAST_LIMIT), margin)
    if not runs or limit.total_bytes <= total:
        return limit
    asked, has = format_unequal_bytes(limit.total_bytes, total)
    warnings.warn(
        f"keras_remat: the memory limit is {asked}, and the device has {has}: {has} is taken.",
        stacklevel=2,
    )
    return limit.lowered(total)


def counted_bytes(device: DeviceMemory) -> int | None:
    """Returns the bytes in use now; ``None`` where the allocator keeps no statistics."""
    return device.in_use_bytes() if device.has_statistics else None
