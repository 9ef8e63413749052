"""The measured peak decides: plan, compile, look, and plan again for less when the compiler needed more.

A plan's predicted peak is a model of what XLA will do; what it did is known right after compiling, without a run. Over the budget, the
next plan is made for a smaller one. How much smaller comes from the compilations so far: activation bytes (peak − resident) measured
against predicted, in proportion after one of them, on a line through the last two after that.

The solver is an argument: backends do not import solvers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_remat.backends.jax.lower import lower
from keras_remat.backends.jax.measure import CompiledMemory, memory
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.errors import InfeasibleBudgetError, PeakExceededError, ScheduleNotFoundError
from keras_remat.problem import Problem
from keras_remat.profile import Profile
from keras_remat.schedule import Solution
from keras_remat.simulate import simulate

FIRST_RATIO = 1.15
"""Measured over predicted activation bytes before anything was compiled: what XLA:CPU's buffer packing wastes on the mixers,
transformers and convolutional networks of ``benchmarks/compiled_step.py``."""

NEAR_FLOOR = 1.02
"""No plan is asked for closer to the predicted floor than this ratio."""


@dataclass(frozen=True)
class Attempt:
    """One compilation.

    Args:
        planned_bytes: budget the solver was given.
        predicted_bytes: peak of its schedule by the model.
        measured_bytes: peak of the compiled step.
        solve_time_s: seconds in the solver.
        compile_time_s: seconds in lowering and the compiler.
    """

    planned_bytes: int
    predicted_bytes: int
    measured_bytes: int
    solve_time_s: float
    compile_time_s: float


@dataclass(frozen=True)
class CompiledPlan:
    """A compiled schedule that fits.

    Args:
        compiled: ``(state, batch) → (logs, state)`` for the traced shapes, state donated.
        solution: the schedule in it.
        memory: what it allocates.
        attempts: every compilation on the way, this one last.
    """

    compiled: Any
    solution: Solution
    memory: CompiledMemory
    attempts: tuple[Attempt, ...]


def compile_within(
    traced: JaxTracedStep,
    profile: Profile,
    budget_bytes: int,
    solve: Callable[[Problem], Solution],
    *,
    tries: int = 3,
    first_ratio: float = FIRST_RATIO,
) -> CompiledPlan:
    """Returns the first compiled schedule whose measured peak is within the budget.

    Args:
        traced: the step.
        profile: its costs.
        budget_bytes: limit on the measured peak, resident bytes included.
        solve: problem (with a budget) → solution; raises as the solvers do.
        tries: compilations at most.
        first_ratio: measured over predicted activation bytes to start from.

    Raises:
        InfeasibleBudgetError: the budget is below the floor of the graph as :mod:`~keras_remat.backends.jax.fusion` cuts it; a proof as
            far as that model of the compiler is right.
        PeakExceededError: no try came under the budget; carries the smallest measured peak.
        ScheduleNotFoundError: the solver found nothing before anything was compiled.
    """
    problem = Problem(traced.graph, profile, budget_bytes)
    if budget_bytes < problem.floor_bytes:
        name = None if problem.floor_op is None else traced.graph.ops[problem.floor_op].name
        raise InfeasibleBudgetError(budget_bytes, problem.floor_bytes, name)
    resident = profile.resident_bytes
    lowest = min(budget_bytes, resident + int(NEAR_FLOOR * (problem.floor_bytes - resident)))
    planned = max(lowest, resident + int((budget_bytes - resident) / first_ratio))
    attempts: list[Attempt] = []
    while len(attempts) < tries:
        started = time.perf_counter()
        try:
            solution = solve(problem.with_budget(planned))
        except (ScheduleNotFoundError, InfeasibleBudgetError):
            if attempts:
                break
            if planned >= budget_bytes:
                raise
            planned = budget_bytes  # the margin was a guess; the budget was asked for
            continue
        solved = time.perf_counter()
        compiled = lower(traced, solution.schedule)
        used = memory(compiled)
        predicted = simulate(problem, solution.schedule).peak_bytes
        attempts.append(
            Attempt(planned, predicted, used.peak_bytes, solved - started, time.perf_counter() - solved)
        )  # fmt: skip
        if used.peak_bytes <= budget_bytes:
            return CompiledPlan(compiled, solution, used, tuple(attempts))
        del compiled
        smaller = max(lowest, _next_budget(attempts, resident, budget_bytes))
        if smaller >= predicted:
            break
        planned = smaller
    raise PeakExceededError(min(a.measured_bytes for a in attempts), budget_bytes, what="The compiled step")


def _next_budget(attempts: list[Attempt], resident: int, budget_bytes: int) -> int:
    """Returns the planning budget whose plan should measure ``budget_bytes``."""
    target = budget_bytes - resident
    last = attempts[-1]
    predicted, measured = last.predicted_bytes - resident, last.measured_bytes - resident
    guess = target * predicted / measured
    if len(attempts) > 1:
        before = attempts[-2]
        rise = before.measured_bytes - last.measured_bytes
        run = before.predicted_bytes - last.predicted_bytes
        if rise > 0 and run > 0:
            guess = predicted - (measured - target) * run / rise
    return resident + int(min(guess, 0.97 * predicted))
