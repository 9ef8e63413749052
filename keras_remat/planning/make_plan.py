"""From a model to a plan: trace → profile → solve → validate, under the budget that the device's
*allocator* has to keep.

:func:`plan_problem` turns a traced problem into a plan, :func:`make_plan` a model, without
training.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from keras_remat.backends.base import Backend, TracedStep, load_backend, preserved_state
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Solution, Usage
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.defragment import compacted
from keras_remat.planning.plan import Plan
from keras_remat.planning.to_budget import Correction
from keras_remat.solvers import check_floor, solve
from keras_remat.solvers.search import nearby
from keras_remat.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

#: Seconds for the plan that measuring runs under.
_QUICK_PLAN_S = 10.0
#: Of the time for a plan, what the quick solver may take before "auto", and what "auto" has at
#: least.
_QUICK_SHARE, _SLOW_SHARE = 0.25, 0.5
#: How many of the orders that a solver finds are replayed, the last ones.
_REPLAYED = 8
#: Seconds for moving the ops of a new order about: it helps soon or not at all.
_COMPACTING_S = 1.0
#: Of the time for a new order, what its one solve may take; and up to which peak, in budgets, the
#: rest of it is worth spending.
_SOLVE_SHARE, _LITTLE_OVER = 0.7, 1.1


def plan_problem(
    problem: Problem,
    budget_bytes: int,
    backend: Backend,
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
        problem: graph and profile; its own budget plays no part.
        budget_bytes: what the device may have in use.
        backend: whose allocator decides.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for all solves together; each gets a part of what is left, and a late
            one a tenth of it at least.
        known: a legal order that may keep to the budget and will do where "auto" finds no faster
            one, the one that runs now for instance. Where it does not keep to it, solvers stop at
            the time limit all the same, also with nothing found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
        ValueError: a time limit that is not positive.
    """
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}")
    check_floor(problem.with_budget(budget_bytes))
    backend.predicted_peak_bytes(
        problem, Schedule.store_all(problem.graph)
    )  # may compile, which is no solver's time; remembered
    deadline_s = time.perf_counter() + time_limit_s
    solver = backend.auto_solver if solver == "auto" else solver
    if solver != "auto":
        return _corrected(problem, budget_bytes, backend, budget_bytes, solver, deadline_s, seed)[0]
    # how much the allocator needs above a schedule is told by the known one or by a quick solver;
    # the slow one starts from there
    quick = None if known is None else reused_plan(problem, known, budget_bytes, backend)
    start = budget_bytes
    if quick is not None:
        start -= max(
            0, quick.predicted.peak_bytes - simulate(problem, quick.solution.schedule).peak_bytes
        )
    else:
        try:
            quick_deadline_s = time.perf_counter() + _QUICK_SHARE * time_limit_s
            quick, start = _corrected(
                problem,
                budget_bytes,
                backend,
                budget_bytes,
                "greedy_first",
                quick_deadline_s,
                seed,
                patient=known is None,
            )
        except ScheduleNotFoundError as error:
            logger.debug("keras_remat: %s", error)
    deadline_s = max(deadline_s, time.perf_counter() + _SLOW_SHARE * time_limit_s)
    try:
        plan, _ = _corrected(
            problem, budget_bytes, backend, start, solver, deadline_s, seed, patient=known is None
        )
    except ScheduleNotFoundError:
        if quick is None:
            raise
        return quick
    return plan if quick is None or plan.predicted.time_s <= quick.predicted.time_s else quick


def _corrected(
    problem: Problem,
    budget_bytes: int,
    backend: Backend,
    start: int,
    solver: str,
    deadline_s: float,
    seed: int,
    *,
    patient: bool = True,
) -> tuple[Plan, int]:
    """One solver's plan that keeps to the budget, and the target that it was solved for; arguments
    as in :class:`.to_budget.Correction`."""
    store_all = Schedule.store_all(problem.graph)
    baseline = Usage(
        simulate(problem, store_all).time_s, backend.predicted_peak_bytes(problem, store_all)
    )
    found, target = Correction(problem, budget_bytes, backend, solver, seed).run(
        start, deadline_s, patient=patient
    )
    return _plan_of(problem, budget_bytes, found.solution, baseline, found.peak_bytes), target


def _plan_of(
    problem: Problem, budget_bytes: int, solution: Solution, store_all: Usage, peak_bytes: int
) -> Plan:
    assert solution.usage is not None
    return Plan(
        problem.graph.fingerprint,
        budget_bytes,
        solution,
        store_all,
        Usage(solution.usage.time_s, peak_bytes),
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def reused_plan(
    problem: Problem, schedule: Schedule, budget_bytes: int, backend: Backend
) -> Plan | None:
    """A plan that runs a known order of the same ops, found for another batch size; ``None`` where
    it needs more than the budget.

    Args:
        problem: graph and profile at the size that is wanted.
        schedule: an order of ops with the same ids, inputs and outputs, which is therefore legal
            here.
        budget_bytes, backend: as in :func:`plan_problem`.
    """
    usage = simulate(problem, schedule)
    if usage.peak_bytes > budget_bytes:
        return None
    peak = backend.predicted_peak_bytes(problem, schedule)
    if peak > budget_bytes:
        return None
    store_all = Schedule.store_all(problem.graph)
    baseline = Usage(
        simulate(problem, store_all).time_s, backend.predicted_peak_bytes(problem, store_all)
    )
    return Plan(
        problem.graph.fingerprint,
        budget_bytes,
        Solution(schedule, "reused", "feasible", 0.0, None, usage),
        baseline,
        Usage(usage.time_s, peak),
        profile_source=problem.profile.source,
        device=problem.profile.device,
        name=problem.name,
        problem=problem,
    )


def new_order(
    problem: Problem,
    budget_bytes: int,
    target_share: float,
    backend: Backend,
    *,
    solver: str,
    time_limit_s: float,
    start: Schedule | None = None,
    seed: int = 0,
) -> tuple[Schedule, float]:
    """One solve and at most one compaction: an order that need not fit, in a time that is bounded
    also where none does.

    Of all that the solver finds on its way, it is the order that the allocator needs least for.

    Args:
        problem: graph and profile; its own budget plays no part.
        budget_bytes: what the device may have in use; the order is compacted where it is a little
            over it.
        target_share: the solver's budget as a share of ``budget_bytes``.
        backend: whose allocator decides.
        solver, seed: as in :func:`keras_remat.solvers.solve`.
        time_limit_s: seconds for both.
        start: a known order to begin with (:mod:`keras_remat.solvers.search.nearby`) instead of
            solving anew.

    Returns:
        The order, and the allocator's peak over the bytes alive, a ratio of at least 1 or so.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: as the solver does.
    """
    check_floor(problem.with_budget(budget_bytes))
    deadline_s = time.perf_counter() + time_limit_s
    solver = backend.auto_solver if solver == "auto" else solver
    target = problem.with_budget(
        min(budget_bytes, max(problem.floor_bytes, int(target_share * budget_bytes)))
    )
    solve_s = _SOLVE_SHARE * time_limit_s
    seen: list[Schedule] = []
    if start is None:
        final = solve(
            target,
            solver=solver,
            time_limit_s=solve_s,
            seed=seed,
            progress=lambda found: seen.append(found.schedule),
        )
        seen.append(final.schedule)
    else:
        seen.extend(
            islice(nearby.schedules(target, start, time_limit_s=solve_s, seed=seed), _REPLAYED)
        )
        if not seen:
            raise ScheduleNotFoundError(
                target.budget_bytes or 0, problem.floor_bytes, solver="nearby"
            )
    order = min(
        list(dict.fromkeys(seen))[-_REPLAYED:],
        key=lambda order: backend.predicted_peak_bytes(problem, order),
    )
    peak = backend.predicted_peak_bytes(problem, order)
    left_s = deadline_s - time.perf_counter()
    if backend.fragments and left_s > 0 and budget_bytes < peak <= _LITTLE_OVER * budget_bytes:
        order = compacted(
            problem,
            order,
            budget_bytes,
            backend,
            time_limit_s=min(left_s, _COMPACTING_S),
            seed=seed,
        )
        peak = backend.predicted_peak_bytes(problem, order)
    return order, peak / max(1, simulate(problem, order).peak_bytes)


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

    Raises:
        InfeasibleBudgetError: the limit is below what one op alone needs.
        ScheduleNotFoundError: no schedule was found under it.
        UnsupportedModelError: the model cannot be rematerialized.
        ValueError, TypeError: wrong arguments.
    """
    backend = load_backend()
    step = traced_model(backend, model, batch, memory_limit, margin, profile, seed)
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
        batch: what was traced, as the framework's arrays.
        traced: the step.
        problem: its graph and profile.
        limit_bytes, budget_bytes: the memory limit, and what of it may be used.
        plan: the quick plan that was run to measure the profile; ``None`` where nothing was run.
    """

    batch: Any
    traced: TracedStep
    problem: Problem
    limit_bytes: int
    budget_bytes: int
    plan: Plan | None = None


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

    Args:
        backend: of the framework Keras runs on.
        model, batch, memory_limit, margin, profile, seed: as in :func:`make_plan`.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: no quick plan to measure under.
        UnsupportedModelError: the model cannot be rematerialized.
        ValueError, TypeError: wrong arguments.
    """
    if profile not in ("measured", "estimated"):
        raise ValueError(f'profile must be "measured" or "estimated", got {profile!r}')
    backend.check(model)
    gc.collect()  # steps that ran before are in reference cycles
    limit = parse_bytes(memory_limit, total_bytes=backend.device_memory_bytes())
    budget = usable_bytes(limit, margin)
    arrays = backend.example_batch(model, batch)
    traced = backend.trace(model, arrays)
    problem = problem_now(
        backend, traced, backend.estimated_profile(traced, backend.bytes_in_use()), model.name
    )
    plan: Plan | None = None
    if profile == "measured":
        plan = plan_problem(
            problem, budget, backend, solver="greedy_first", time_limit_s=_QUICK_PLAN_S, seed=seed
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
    with preserved_state(backend, model):
        run(batch)
        resident = backend.bytes_in_use()
        recorder = backend.recorder()
        if not recorder.start():
            return problem
        try:
            for _ in range(3):
                run(batch)
        finally:  # a profiler session must not outlive a step that raised
            profile = recorder.stop(run, resident)
    return problem if profile is None else problem_now(backend, traced, profile, problem.name)


def problem_now(backend: Backend, traced: TracedStep, profile: Profile, name: str) -> Problem:
    """The problem of a step whose batch is there, with the allocator as it is."""
    gc.collect()  # what is in reference cycles would be free by the time a plan runs
    problem = Problem(traced.graph, profile, name=name)
    return backend.with_pool(traced, problem, backend.bytes_in_use() - traced.graph.input_bytes)


def usable_bytes(limit_bytes: int, margin: float) -> int:
    """The limit less the share ``margin`` that is kept free of it.

    Raises:
        ValueError: ``margin`` is not at least 0 and below 1.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin must be at least 0 and below 1, got {margin!r}")
    return max(1, int(limit_bytes * (1 - margin)))


def describe_limit_error(
    error: InfeasibleBudgetError | ScheduleNotFoundError,
    limit_bytes: int,
    batch_size: int,
    resident_bytes: int,
) -> str:
    """What limit or batch would do, for a limit no schedule meets. Bytes above the resident ones
    grow with the batch."""
    need = (
        error.floor_bytes
        if isinstance(error, InfeasibleBudgetError)
        else error.best_peak_bytes or error.floor_bytes
    )
    room, demand = limit_bytes - resident_bytes, need - resident_bytes
    if room <= 0:
        return f"The weights, slots and data alone take {format_bytes(resident_bytes)} of {format_bytes(limit_bytes)}."
    batch = max(1, int(batch_size * room / demand)) if demand > 0 else batch_size
    return f"A limit of {format_bytes(need)}, or a batch of about {batch} instead of {batch_size}, would do."
