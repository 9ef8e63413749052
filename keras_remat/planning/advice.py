"""Advises a larger limit that has a plan, or a smaller batch, where no plan is found.

A limit that equals the need of one op, or the peak of the best schedule over the budget, may not
work: solvers keep to targets below the limit, and the allocator's waste differs from order to
order. So limits are tried until a plan is found for one. That takes as long as a few quick plans,
and most errors are caught and never shown. So the limits are tried when the error's message is
asked for (:mod:`keras_remat.errors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from keras_remat.backends.memory import DeviceMemory, MemoryModel
from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import UPDATE
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import BudgetError, InfeasibleBudgetError, limit_for, rounded_up
from keras_remat.planning.calibrated_solve import within_budget
from keras_remat.units import format_bytes


@dataclass(frozen=True)
class AdviceOptions:
    """Rules which limits are tried, and for how long.

    Args:
        shares: the limits that may be tried, as shares of the way from the least need to the plain
            step's peak; the tightest first.
        begin: index in ``shares`` of the limit that is tried first. Where it has a plan, tighter
            ones are tried until one has none; else larger ones, until one has a plan. A loose limit
            is planned for at once, and the tightest may take half a minute until it fails: of a
            U-Net in slices that needs 92 MiB, 1,017 were advised where the tightest was tried
            first.
        bisections: number of limits that are tried between the last one without a plan and the
            smallest one with a plan.
        most_s: seconds after which only the largest limit is tried, and only if none had a plan.
        plan_s: seconds that one plan may take once an order was found.
        spare: share of the limit that an advised plan leaves free.
        most_spare: largest share of the limit that it leaves free for one more batch, too: the
            input pipeline holds a batch more or less from one fit to the next.
    """

    shares: tuple[float, ...] = (0.0, 0.03, 0.1, 0.25, 0.5, 1.0)
    begin: int = 3
    bisections: int = 3
    most_s: float = 10.0
    plan_s: float = 2.0
    spare: float = 0.01
    most_spare: float = 0.05


_OPTIONS = AdviceOptions()


class Adviser(Protocol):
    """Lists the properties of a backend, or of a request, that advice needs."""

    @property
    def memory(self) -> MemoryModel:
        """Predicts the peaks that the device will show."""

    @property
    def device(self) -> DeviceMemory | None:
        """Advises how an op could need less; without a device, errors stay as they are."""


@contextmanager
def advising(
    problem: Problem, limit: Limit, batch_size: int, adviser: Adviser, *, seed: int = 0
) -> Iterator[None]:
    """Makes errors raised inside name the user's limit, and a limit or batch that would do.

    Args:
        problem: the step that is planned for.
        limit: the user's limit; the budget is a part of it.
        batch_size: number of samples of the step.
        adviser: predicts peaks, and advises how an op could need less.
        seed: seed of the solver.
    """
    try:
        yield
    except BudgetError as error:
        if adviser.device is None:
            raise
        failure = error

        def advice() -> str:
            return _advice(failure, problem, limit.total_bytes, batch_size, adviser, seed)

        raise error.with_context(limit_bytes=limit.total_bytes, advice=advice) from error.__cause__


def _advice(
    error: BudgetError,
    problem: Problem,
    limit_bytes: int,
    batch_size: int,
    adviser: Adviser,
    seed: int,
) -> str:
    """Returns the advice: a limit or a batch that would do; empty where no tried limit does.

    It takes the bytes above the resident ones to grow with the batch, and the margin to stay the
    same share of the limit.
    """
    resident_bytes, budget_bytes = problem.profile.resident_bytes, error.budget_bytes
    is_proved = isinstance(error, InfeasibleBudgetError)
    op = None if not is_proved or problem.floor_op is None else problem.graph.ops[problem.floor_op]
    known = error.floor_bytes if isinstance(error, InfeasibleBudgetError) else error.best_peak_bytes
    enough = tried_budget(problem, max(known or 0, budget_bytes + 1), adviser.memory, seed)
    if enough is None:
        return ""
    does = f"A limit of {rounded_up(limit_for(enough, budget_bytes, limit_bytes))}"
    room, demand = budget_bytes - resident_bytes, (known or enough) - resident_bytes
    if room <= 0 or demand <= 0:
        held = f"{format_bytes(resident_bytes)} of {format_bytes(limit_bytes)}"
        advice = (  # TensorFlow keeps the variables of a model that was trained and is gone
            f"Before a step {held} are in use: by weights, slots and data, and by what else this "
            f"process has trained. {does} does: a plan was found for it."
        )
    elif op is not None and op.phase == UPDATE:  # no smaller batch needs less
        advice = f"{does} does, for which a plan was found."
    else:
        batch = min(batch_size - 1, int(batch_size * room / demand))
        smaller = f", or perhaps a batch of {batch} instead of {batch_size}" if batch >= 1 else ""
        advice = f"{does} does, for which a plan was found{smaller}."
    more = "More solver time may do, too."
    if is_proved:
        more = "" if op is None or adviser.device is None else adviser.device.floor_advice(op)
    return f"{advice} {more}".rstrip()


def tried_budget(
    problem: Problem, least_bytes: int, memory: MemoryModel, seed: int = 0
) -> int | None:
    """Returns about the least budget that has a plan; ``None`` where none was found.

    Args:
        problem: the step that is planned for, without a budget.
        least_bytes: bytes; no plan is expected to need less.
        memory: predicts peaks.
        seed: seed of the solver.
    """
    clock = Deadline(_OPTIONS.most_s)
    store_all = Schedule.store_all(problem.graph)
    # a compiler may need more for the plain step than is predicted
    compiled = memory.compiled_peak_bytes(problem, store_all) or 0
    plain = max(memory.peak_bytes(problem, store_all), compiled)
    most_bytes = max(plain + plain // 8, least_bytes + least_bytes // 4)

    def has_plan(budget_bytes: int) -> bool:
        batch_bytes = min(problem.graph.input_bytes, int(_OPTIONS.most_spare * budget_bytes))
        spare = int(_OPTIONS.spare * budget_bytes) + batch_bytes
        # a compiler's peak may not grow with the budget: both must have a plan, the budget less
        # the spare bytes and all of it
        return all(
            _is_planned(problem, budget_bytes, spare_bytes, memory.afresh(), seed)
            for spare_bytes in ((spare,) if memory.order_matters else (spare, 0))
        )

    room = most_bytes - least_bytes
    budgets = [least_bytes + int(share * room) for share in _OPTIONS.shares]
    at, fails, enough = _OPTIONS.begin, None, None
    while at in range(len(budgets)) and (fails is None or enough is None):
        if clock.is_over:
            if enough is not None:
                break
            at = len(budgets) - 1
        if has_plan(budgets[at]):
            enough, at = budgets[at], at - 1
        else:
            fails, at = budgets[at], at + 1
    if enough is None:
        return None
    too_little = least_bytes if fails is None else fails
    for _ in range(_OPTIONS.bisections):
        middle = (too_little + enough) // 2
        if middle <= too_little or clock.is_over:
            break
        if has_plan(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def _is_planned(
    problem: Problem, budget_bytes: int, spare_bytes: int, memory: MemoryModel, seed: int
) -> bool:
    """Returns whether a quick solver finds a plan that leaves ``spare_bytes`` free."""
    resident_bytes = problem.profile.resident_bytes + spare_bytes
    fuller = replace(problem, profile=replace(problem.profile, resident_bytes=resident_bytes))
    try:
        within_budget(
            fuller, budget_bytes, memory, solver="greedy_first",
            time_limit_s=_OPTIONS.plan_s, seed=seed,
        )  # fmt: skip
    except BudgetError:
        return False
    return True
