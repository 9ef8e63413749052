"""From a model to a plan: trace → profile → solve → validate, under the budget that the device's
*allocator* has to keep.

:func:`plan_problem` turns a traced problem into a plan, :func:`make_plan` a model, without
training.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from keras_remat.backends.base import (
    COMPILATIONS,
    Backend,
    TracedStep,
    load_backends,
    preserved_state,
)
from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.memory import DeviceMemory, MemoryModel
from keras_remat.checks import check_among, check_int, check_name, check_seconds, check_share
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import (
    InfeasibleBudgetError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    limit_for,
    rounded_up,
    without_inner_frames,
)
from keras_remat.planning.plan import Plan
from keras_remat.planning.to_budget import BudgetSearch, Found
from keras_remat.solvers import SOLVERS, check_floor
from keras_remat.units import LEAST_LIMIT, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

#: Seconds for the plan that measuring runs under.
_QUICK_PLAN_S = 10.0
#: Of the time for a plan, what the quick solver may take before "auto", and what "auto" has at
#: least.
_QUICK_SHARE, _SLOW_SHARE = 0.25, 0.5


class PlanningBackend(Protocol):
    """What solving for a plan asks of a backend."""

    @property
    def memory(self) -> MemoryModel:
        """Predicts the peaks that the device will show."""

    @property
    def auto_solver(self) -> str:
        """The solver that ``"auto"`` stands for."""


def plan_problem(
    problem: Problem,
    budget_bytes: int,
    backend: PlanningBackend,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    seed: int = 0,
    known: Schedule | None = None,
) -> Plan:
    """Solves a traced problem so that the *allocator's* peak stays under the budget.

    The allocator rounds and fragments, so a schedule is solved for a little less than the budget
    (:mod:`keras_remat.planning.to_budget`).

    Args:
        budget_bytes: what the device may have in use.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for all solves together; each gets a part of what is left, and a late
            one a tenth of it at least.
        known: a legal order that may keep to the budget and will do where "auto" finds no faster
            one, the one that runs now for instance. Where it does not keep to it, solvers stop at
            the time limit all the same, also with nothing found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
        ValueError, TypeError: a time limit that is not positive and finite.
    """
    check_seconds("time_limit_s", time_limit_s)
    check_floor(problem.with_budget(budget_bytes))
    memory = backend.memory
    # may compile, which is no solver's time; remembered
    memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    deadline_s = time.perf_counter() + time_limit_s
    chosen = backend.auto_solver if solver == "auto" else solver
    if chosen != "auto":
        try:
            search = BudgetSearch(problem, budget_bytes, memory, chosen, seed)
            return _solved(search, budget_bytes, deadline_s)[0]
        except ScheduleNotFoundError as error:  # names the solver that was asked for
            raise error.retold(solver=solver) from error
    # how much the allocator needs above a schedule is told by the known one or by a quick solver;
    # the slow one starts from there
    quick = None if known is None else reused_plan(problem, known, budget_bytes, memory)
    start, patient = budget_bytes, known is None
    if quick is not None:
        alive = simulate(problem, quick.solution.schedule).peak_bytes
        start -= max(0, quick.predicted.peak_bytes - alive)
    else:
        search = BudgetSearch(problem, budget_bytes, memory, "greedy_first", seed)
        quick_deadline_s = time.perf_counter() + _QUICK_SHARE * time_limit_s
        try:
            quick, start = _solved(search, budget_bytes, quick_deadline_s, patient=patient)
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
    deadline_s = max(deadline_s, time.perf_counter() + _SLOW_SHARE * time_limit_s)
    search = BudgetSearch(problem, budget_bytes, memory, solver, seed)
    try:
        plan, _ = _solved(search, start, deadline_s, patient=patient)
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        if quick is None:
            raise
        return quick
    return plan if quick is None or plan.predicted.time_s <= quick.predicted.time_s else quick


def _solved(
    search: BudgetSearch, start: int, deadline_s: float, *, patient: bool = True
) -> tuple[Plan, int]:
    """Returns one solver's plan that keeps to the budget, and the target it was solved for."""
    try:
        found, target = search.run(start, deadline_s, patient=patient)
    except ScheduleNotFoundError as error:
        if search.closest is not None:
            error.closest = _plan_of(search, search.closest)
        raise
    return _plan_of(search, found), target


def closest_plan(
    problem: Problem,
    budget_bytes: int,
    backend: PlanningBackend,
    *,
    time_limit_s: float,
    seed: int,
) -> Plan:
    """Returns a quick solver's plan that comes closest to a budget that none may keep to.

    Raises:
        ScheduleNotFoundError: not even one over the budget was found.
    """
    search = BudgetSearch(problem, budget_bytes, backend.memory, "greedy_first", seed)
    start, deadline_s = max(budget_bytes, problem.floor_bytes), time.perf_counter() + time_limit_s
    try:
        found, _ = search.run(start, deadline_s, patient=False, approach=True)
    except ScheduleNotFoundError:
        if search.closest is None:
            raise
        found = search.closest
    return _plan_of(search, found)


def _plan_of(search: BudgetSearch, found: Found) -> Plan:
    return plan_of(search.problem, search.budget_bytes, search.memory, found)


def plan_of(problem: Problem, budget_bytes: int, memory: MemoryModel, found: Found) -> Plan:
    """Returns a schedule that was found as a plan."""
    store_all = Schedule.store_all(problem.graph)
    plain_bytes = memory.peak_bytes(problem, store_all)
    return Plan(
        problem.graph.fingerprint,
        budget_bytes,
        found.solution,
        Usage(simulate(problem, store_all).time_s, plain_bytes),
        Usage(found.time_s, found.peak_bytes),
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def reused_plan(
    problem: Problem, schedule: Schedule, budget_bytes: int, memory: MemoryModel
) -> Plan | None:
    """Returns a plan for a known order; ``None`` where it needs more than the budget.

    Args:
        schedule: an order of ops with the same ids, inputs and outputs, found for another batch
            size; it is therefore legal here.
    """
    usage, peak = simulate(problem, schedule), memory.peak_bytes(problem, schedule)
    if peak > budget_bytes:
        return None
    solution = Solution(schedule, "reused", "feasible", 0.0, None, usage)
    return plan_of(problem, budget_bytes, memory, Found(solution, usage.time_s, peak))


@without_inner_frames
def make_plan(
    model: Any,
    batch: Any,
    memory_limit: int | str,
    *,
    solver: str = "auto",
    solver_time_limit_s: float = 30.0,
    profile: Literal["measured", "estimated"] = "measured",
    margin: float = 0.05,
    seed: int = 0,
    compilation: str = "auto",
) -> Plan:
    """Plans a model's train step without training; the model comes back as it was.

    Args:
        model: a compiled Keras model.
        batch: ``(x, y[, sample_weight])`` as arrays or specs, or an int batch size where inputs and
            targets follow from the model.
        memory_limit: every byte the device's allocator may have in use: ``8 * 2**30``, ``"8GiB"``
            or ``"80%"`` of the device.
        solver: a name in ``SOLVERS``.
        solver_time_limit_s: seconds for the solver.
        profile: ``"measured"`` runs a few steps (under an estimated plan) on the device and puts
            every variable back; ``"estimated"`` runs nothing.
        margin: share of the limit that is kept free.
        seed: the same model and seed give the same plan, up to measured times.
        compilation: as in ``RematAutotune``; ``"auto"`` plans for the way the model trains.

    Raises:
        InfeasibleBudgetError: the limit is below what one op alone needs.
        ScheduleNotFoundError: no schedule was found under it.
        UnsupportedModelError: the model cannot be rematerialized.
        ValueError, TypeError: wrong arguments.
    """
    check_name("solver", solver, SOLVERS)
    check_seconds("solver_time_limit_s", solver_time_limit_s)
    backend, step = traced_as_it_trains(
        model, batch, memory_limit, margin, profile, seed, compilation
    )
    with advising(step.problem, step.limit_bytes, batch_size_of(step.batch), backend.device):
        return plan_problem(
            step.problem,
            step.budget_bytes,
            backend,
            solver=solver,
            time_limit_s=solver_time_limit_s,
            seed=seed,
        )


@dataclass(frozen=True)
class TracedModel:
    """A model's train step with its costs, outside of ``fit``.

    Args:
        limit_bytes, budget_bytes: the memory limit, and what of it may be used.
        plan: the quick plan that was run to measure the profile; ``None`` where nothing was run.
    """

    batch: Any
    traced: TracedStep
    problem: Problem
    limit_bytes: int
    budget_bytes: int
    plan: Plan | None = None


def traced_as_it_trains(
    model: Any,
    batch: Any,
    memory_limit: int | str,
    margin: float,
    profile: str,
    seed: int,
    compilation: str,
) -> tuple[Backend, TracedModel]:
    """Returns a model's step as it will run, compiled or in order, and the backend that runs it.

    Where a model may train either way, the first that can carry the step is taken, as in ``fit``.

    Raises:
        UnsupportedModelError: no backend can carry the step.
        InfeasibleBudgetError, ScheduleNotFoundError: no quick plan to measure under.
        ValueError, TypeError: wrong arguments.
    """
    check_name("compilation", compilation, COMPILATIONS)
    check_among("profile", profile, ("measured", "estimated"))
    check_share("margin", margin)
    check_int("seed", seed, least=0)
    if isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"model must be a compiled Keras model, got the path {os.fspath(model)!r}: load it "
            "with keras.saving.load_model first"
        )
    if not getattr(model, "compiled", False):
        raise ValueError("the model is not compiled: call model.compile(optimizer, loss) first")
    *others, last = load_backends(model, compilation)
    for backend in others:
        try:
            return backend, traced_model(backend, model, batch, memory_limit, margin, profile, seed)
        except UnsupportedModelError as error:
            logger.info("keras_remat: no %s step: %s", backend.compilation, error)
    return last, traced_model(last, model, batch, memory_limit, margin, profile, seed)


def traced_model(
    backend: Backend,
    model: Any,
    batch: Any,
    memory_limit: int | str,
    margin: float,
    profile: str,
    seed: int,
) -> TracedModel:
    """Traces a model and gives it a profile; with ``"measured"`` steps run under a quick plan, and
    every variable is put back.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: no quick plan to measure under.
        UnsupportedModelError: the model cannot be rematerialized.
        ValueError, TypeError: wrong arguments.
    """
    backend.check(model)
    gc.collect()  # steps that ran before are in reference cycles
    total = backend.device.total_bytes()
    limit = parse_bytes(memory_limit, total_bytes=total, least=LEAST_LIMIT)
    budget = usable_bytes(limit, margin)
    arrays = backend.example_batch(model, batch)
    traced = backend.trace(model, arrays)
    profile_now = backend.estimated_profile(traced, counted_bytes(backend.device))
    problem = Problem(traced.graph, profile_now, name=model.name)
    plan: Plan | None = None
    if profile == "measured":
        with advising(problem, limit, batch_size_of(arrays), backend.device):
            plan = plan_problem(
                problem,
                budget,
                backend,
                solver="greedy_first",
                time_limit_s=_QUICK_PLAN_S,
                seed=seed,
            )
        problem = measured_problem(backend, model, traced, problem, plan, arrays)
    return TracedModel(arrays, traced, problem, limit, budget, plan)


def measured_problem(
    backend: Backend, model: Any, traced: TracedStep, problem: Problem, plan: Plan, batch: Any
) -> Problem:
    """``problem`` with a profile measured by running ``plan`` on ``batch``; the model's variables
    are put back."""
    schedule = plan.solution.schedule
    run = backend.lower(traced, problem.with_budget(plan.budget_bytes), schedule)
    with preserved_state(backend, model) as put_back:
        run(batch)  # a first call autotunes, which says nothing about later ones
        put_back()  # what is measured then finds the variables where every later step will
        _, usage = backend.measure(lambda: run(batch))
        resident = counted_bytes(backend.device)
        recorder = backend.recorder()
        profile: Profile | None = None
        if recorder.start():
            try:
                for _ in range(3):
                    run(batch)
            finally:  # a profiler session must not outlive a step that raised
                profile = recorder.stop(run, resident)
    if profile is not None:
        problem = replace(problem, profile=profile)
    if backend.device.has_statistics:
        backend.memory.observe(problem, schedule, usage.peak_bytes)
    return problem


def counted_bytes(device: DeviceMemory) -> int | None:
    """Returns the bytes in use now; ``None`` where the allocator keeps no statistics."""
    return device.in_use_bytes() if device.has_statistics else None


def usable_bytes(limit_bytes: int, margin: float) -> int:
    """Returns the limit less the share ``margin`` that is kept free of it."""
    return max(1, int(limit_bytes * (1 - margin)))


@contextmanager
def advising(
    problem: Problem, limit_bytes: int, batch_size: int, device: DeviceMemory
) -> Iterator[None]:
    """Errors inside speak of the user's limit, and say what limit or batch would do.

    Args:
        limit_bytes: the limit that its budget is a part of.
        device: says what would lower an op's need.
    """
    try:
        yield
    except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
        advice = _advice(error, problem, limit_bytes, batch_size, device)
        raise error.retold(limit_bytes=limit_bytes, advice=advice) from error.__cause__


def _advice(
    error: InfeasibleBudgetError | ScheduleNotFoundError,
    problem: Problem,
    limit_bytes: int,
    batch_size: int,
    device: DeviceMemory,
) -> str:
    """What limit or batch would do; empty where nothing is known.

    Bytes above the resident ones grow with the batch; the margin stays the share that it is.
    """
    resident_bytes = problem.profile.resident_bytes
    if isinstance(error, InfeasibleBudgetError):
        need: int | None = error.floor_bytes
        floor_op = None if problem.floor_op is None else problem.graph.ops[problem.floor_op]
        more = "" if floor_op is None else device.floor_advice(floor_op)
    else:
        need, more = error.best_peak_bytes, "More solver time may do, too."
    if need is None:
        return ""
    room, demand = error.budget_bytes - resident_bytes, need - resident_bytes
    least = rounded_up(limit_for(need, error.budget_bytes, limit_bytes))
    if room <= 0 or demand <= 0:
        advice = (
            f"The weights, slots and data alone take {format_bytes(resident_bytes)} of "
            f"{format_bytes(limit_bytes)}. Raise the limit to more than {least}."
        )
    else:
        batch = min(batch_size - 1, int(batch_size * room / demand))
        smaller = f", or a batch of about {batch} instead of {batch_size}" if batch >= 1 else ""
        advice = f"A limit of about {least}{smaller} would do."
    return f"{advice} {more}".rstrip()
