"""Finds a first valid schedule in seconds, for graphs of 15,000 ops: greedy eviction.

It knows the future exactly.

:mod:`keras_remat.solvers.search.eviction` runs a base order under one policy of what to evict. No
single policy wins everywhere, so a few are tried on each base order (the default one, and the
memory-aware one of :mod:`keras_remat.solvers.orders.reorder`), and some under tighter budgets, too.
Recomputations are taken back where there is room (:mod:`keras_remat.solvers.orders.trim`), and the
fastest schedule is returned.

The search for the first schedule ends by counted work and not by the clock: on a very busy or very
slow machine the schedule comes later, but it is the same. The clock ends the search after it.

Known limits: no other decision is revised (:mod:`keras_remat.solvers.search.anneal` does more), and
no bound is proved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from keras_remat.core.deadline import NO_DEADLINE, Deadline, work_budget_s
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import is_sliced
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.search.eviction import Eviction, Policy, StuckError, Tables

POLICIES = (
    Policy(1.0, 1.0),
    Policy(1.0, 0.5),
    Policy(1.0, 0.0),
    Policy(0.5, 1.0),
    Policy(0.5, 0.5),
    Policy(0.0, 1.0),
)

SLICED_POLICIES = POLICIES[1::-1]
"""Policies that are tried first on a graph in slices. On a U-Net of 5,197 ops in 8 slices the other
policies go on without end."""


@dataclass(frozen=True)
class GreedyOptions:
    """Rules which passes are made, and how long each goes on.

    Args:
        steps_per_s: steps per second of a time limit; fewer than a machine makes in a second.
        tighter_shares: budgets that are tried, as shares of the room above the floor. A policy that
            gets stuck under one budget may pass under a tighter one, and trimming uses the room
            that is left. The next budget is tried while no schedule is known, or while the last one
            gave a faster schedule.
        patience: steps per op that a policy gets; the next number is used where nothing was found
            with the one before. A policy that thrashes is seldom worth waiting for.
        first_passes: steps per op for the first schedule, whatever the time limit and the clock
            say. On the problems of RematBench that have a schedule, it takes 1.0 to 1.2.
        sliced_first_passes: the same for a graph in slices. A part of a normalization's input is
            computed again in several rounds over the batch, each time from far behind: on a U-Net
            of 5,197 ops in 8 slices, the first schedule takes 6 at 0.8 of the floor of its whole
            ops, 10 at 0.6, 25 at 0.5, 41 at 0.45 and 79 at 0.4.
        sliced_patience: steps per op that each of :data:`SLICED_POLICIES` gets on each order. At
            0.8 of the floor of MobileNetV2's step, a schedule that adds 0.3 takes 6 to 17, and one
            that adds 0.9 takes 71.
        sliced_last_patience: steps per op that the first of these policies gets on the default
            order, which goes slice by slice, where none has found a schedule. Below 0.5 of that
            U-Net's floor, only that policy on that order finds schedules.
        trim_gain: factor on the best schedule's overhead, up to which a run goes on: trimming may
            still make its schedule the better one.
    """

    steps_per_s: int = 80_000
    tighter_shares: tuple[float, ...] = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)
    patience: tuple[int, ...] = (5, 12, 30)
    first_passes: int = 40
    sliced_first_passes: int = 250
    sliced_patience: int = 30
    sliced_last_patience: int = 130
    trim_gain: float = 1.15


OPTIONS = GreedyOptions()


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers the schedules of all policies on the default and the memory-aware base order.

    Nothing is random here.
    """
    if not incumbent.offer_store_all():
        steps = steps_limit(incumbent.deadline.seconds)
        for order in candidates(incumbent.problem, deadline=incumbent.deadline, max_steps=steps):
            incumbent.offer(order)


def solve_first(incumbent: Incumbent, seed: int) -> None:
    """Offers the first schedule that any policy finds, much earlier than the fastest one.

    The seed chooses the policy that is tried first.
    """
    first = seed % len(POLICIES)
    found = candidates(
        incumbent.problem,
        deadline=incumbent.deadline,
        max_steps=steps_limit(incumbent.deadline.seconds),
        policies=POLICIES[first:] + POLICIES[:first],
    )
    for order in islice(found, 1):
        incumbent.offer(order)


def look(problem: Problem, below_s: float) -> tuple[int, ...] | None:
    """Returns the first order that a few passes find for a graph in slices.

    Returns ``None`` where they find none. No clock ends the passes.

    Args:
        problem: a problem with a budget.
        below_s: seconds; an order that recomputes and is slower will not do.
    """
    orders = base_orders(problem)
    fitting = _fitting(problem, orders)
    if fitting is not None:
        return fitting
    passes = _Passes(problem, NO_DEADLINE, sys.maxsize, 0, below_s)
    return next(_in_slices(problem, passes, orders), None)


def steps_limit(time_limit_s: float) -> int:
    """Returns how many steps all policies together have within a time limit."""
    return int(OPTIONS.steps_per_s * work_budget_s(time_limit_s))


def sure_steps(problem: Problem) -> int:
    """Returns how many steps the first schedule gets, whatever the time limit and the clock say."""
    passes = OPTIONS.sliced_first_passes if is_sliced(problem.graph) else OPTIONS.first_passes
    return passes * len(problem.graph.needed)


def candidates(
    problem: Problem,
    *,
    deadline: Deadline,
    max_steps: int = sys.maxsize,
    orders: Sequence[Sequence[int]] | None = None,
    policies: Sequence[Policy] = POLICIES,
    anyway: bool = True,
) -> Iterator[tuple[int, ...]]:
    """Yields legal orders within the budget, each faster than the one before.

    Args:
        problem: a problem with a budget.
        deadline: no policy runs past it once there is a schedule.
        max_steps: number of steps of all policies together (:func:`steps_limit`).
        orders: base orders; the memory-aware one and the default one when missing.
        policies: policies to try on each order, in this order.
        anyway: whether the first schedule gets at least :func:`sure_steps`, which no clock ends.
    """
    if orders is None:
        orders = base_orders(problem)
    fitting = _fitting(problem, orders)
    if fitting is not None:
        yield fitting
        return
    passes = _Passes(problem, deadline, max_steps, sure_steps(problem) if anyway else 0)
    if is_sliced(problem.graph):
        yield from _in_slices(problem, passes, orders)
        if passes.best_s == float("inf"):
            steps = OPTIONS.sliced_last_patience * len(orders[-1])
            found = passes.faster(problem, orders[-1], SLICED_POLICIES[0], steps)
            if found is not None:
                yield found
    budget = problem.budget_bytes or 0  # without one, the first order fits
    room = max(0, budget - problem.floor_bytes)
    for patience in OPTIONS.patience:
        for share in OPTIONS.tighter_shares:
            tighter = problem.with_budget(budget - int((1 - share) * room))
            before_s = passes.best_s
            for order, policy in product(orders, policies):
                if passes.is_over:
                    return
                found = passes.faster(tighter, order, policy, patience * len(order) + 1000)
                if found is not None:
                    yield found
            if passes.best_s < float("inf") and passes.best_s == before_s:
                return
        if passes.best_s < float("inf"):
            return


def _fitting(problem: Problem, orders: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Returns the first of some orders that keeps to the budget as it is, if any does."""
    budget = problem.budget_bytes
    for order in map(tuple, orders):
        if budget is None or simulate(problem, Schedule(order)).peak_bytes <= budget:
            return order
    return None


def _in_slices(
    problem: Problem, passes: _Passes, orders: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Yields the orders that a few passes find on a graph in slices.

    These passes come before other policies and budgets.

    Args:
        orders: base orders; the last one goes slice by slice.
    """
    each = dict.fromkeys(tuple(order) for order in reversed(orders))
    for order, policy in product(each, SLICED_POLICIES):
        if passes.is_over:
            return
        found = passes.faster(problem, order, policy, OPTIONS.sliced_patience * len(order))
        if found is not None:
            yield found


class _Passes:
    """Runs policies, and counts their steps.

    Args:
        left: number of steps that all of them may make together.
        sure: number of steps for the first schedule that no clock ends.
        best_s: seconds; a schedule has to be faster.

    Attributes:
        best_s: seconds of the fastest schedule so far.
    """

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline,
        left: int,
        sure: int,
        best_s: float = float("inf"),
    ):
        self._problem, self._deadline = problem, deadline
        self._left, self._sure, self.best_s = left, sure, best_s
        self._tables = Tables(problem.graph)

    @property
    def _clock(self) -> Deadline:
        return NO_DEADLINE if self._sure > 0 else self._deadline

    @property
    def is_over(self) -> bool:
        """Returns whether no policy may run any more."""
        return max(self._left, self._sure) <= 0 or self._clock.is_over

    def faster(
        self, tighter: Problem, order: Sequence[int], policy: Policy, most_steps: int
    ) -> tuple[int, ...] | None:
        """Returns a policy's schedule within the budget, if it is faster than those before.

        Args:
            tighter: the problem with the same or a lower budget.
        """
        known_s = self._problem.store_all_time_s
        most_s = known_s + OPTIONS.trim_gain * (self.best_s - known_s)
        run = Eviction(tighter, order, policy, self._clock, most_s, self._tables)
        try:
            found = run.run(min(max(self._left, self._sure), most_steps))
        except StuckError:
            return None
        finally:
            self._left, self._sure = self._left - run.steps, self._sure - run.steps
        self._sure = 0
        found = trimmed(self._problem, found)
        seconds = simulate(self._problem, Schedule(found)).time_s
        if seconds >= self.best_s:
            return None
        self.best_s = seconds
        return found
