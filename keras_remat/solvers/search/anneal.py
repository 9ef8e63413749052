"""Simulated annealing on the order itself: runs are added, taken away and moved, first runs
included.

After FastSA (Ito et al., NeurIPS 2023), which anneals over orders in which an op may occur several
times and evaluates a change in logarithmic time. Here a change is applied to a
:class:`~keras_remat.solvers.orders.timeline.Timeline`, which updates the live bytes along the
lifetimes that change, and is taken back when it is refused. The energy is

    time + λ · Σ over cells of the bytes above the budget

with λ so that being over everywhere by the whole budget costs ``PENALTY`` store-all times. Moves
are aimed: a run is added just before the next read of a value that is alive over a random one of
the fullest cells, which is what evicting that value means; runs that are taken away are
recomputations; a run is moved within the cells its producers and readers leave it. A round has a
fixed number of steps and cools from the time of a typical op to a hundredth of it, so that what a
round returns depends on the seed alone.

Known limits: cascades (a chain recomputed because its inputs are gone) are found one run at a time,
through states over the budget.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers.orders.effort import effort_s
from keras_remat.solvers.orders.reorder import memory_aware_order
from keras_remat.solvers.orders.timeline import Timeline
from keras_remat.solvers.search import greedy

ROUND_STEPS = 4000
PENALTY = 400.0
STEP_S, STEP_S_PER_OP = 4e-5, 1.4e-7
"""Seconds of a step that work limits are computed with; more than it takes."""


def solve(problem: Problem, *, time_limit_s: float = 30.0, seed: int = 0) -> Solution:
    """Returns the best schedule that annealing reaches from the greedy one, or from store-all where
    there is none.

    Raises:
        ScheduleNotFoundError: none within the budget was found in time.
    """
    started = time.perf_counter()
    best: tuple[int, ...] | None = None
    deadline_s = started + time_limit_s
    for schedule in greedy.candidates(
        problem, deadline_s=deadline_s, max_steps=greedy.steps_limit(time_limit_s / 3)
    ):
        best = schedule.order
    rounds = rounds_limit(problem, time_limit_s * 2 / 3)
    for order in improve(problem, best, deadline_s=deadline_s, seed=seed, max_rounds=rounds):
        best = order
    if best is None:
        raise ScheduleNotFoundError(problem.budget_bytes or 0, problem.floor_bytes, solver="anneal")
    usage = simulate(problem, Schedule(best))
    optimal = usage.time_s <= problem.store_all_time_s
    spent = time.perf_counter() - started
    return Solution(
        Schedule(best),
        "anneal",
        "optimal" if optimal else "feasible",
        spent,
        problem.store_all_time_s,
        usage,
    )


def rounds_limit(problem: Problem, time_limit_s: float) -> int:
    """Rounds within a time limit, at least one; steps take time with the length of the order."""
    step_s = STEP_S + STEP_S_PER_OP * len(problem.graph.needed)
    return max(1, int(effort_s(time_limit_s) / (ROUND_STEPS * step_s)))


def improve(
    problem: Problem,
    start: Sequence[int] | None,
    *,
    deadline_s: float,
    seed: int = 0,
    max_rounds: int | None = None,
) -> Iterator[tuple[int, ...]]:
    """Yields legal orders within the budget, each faster than ``start`` and than the one before.

    Args:
        problem: with a budget.
        start: a legal order; one over the budget is where the search for one within it begins. The
            memory-aware store-all order when missing.
        deadline_s: ``time.perf_counter()`` time to end at.
        seed: of every choice.
        max_rounds: end after this many rounds; until the deadline when missing.
    """
    if problem.budget_bytes is None:
        return
    rng = random.Random(seed)
    best = (
        tuple(start)
        if start is not None
        else memory_aware_order(problem, sorted(problem.graph.needed))
    )
    usage = simulate(problem, Schedule(best))
    best_s = usage.time_s if usage.peak_bytes <= problem.budget_bytes else float("inf")
    if start is None and best_s < float("inf"):
        yield best
    rounds = 0
    while time.perf_counter() < deadline_s and (max_rounds is None or rounds < max_rounds):
        if best_s <= problem.store_all_time_s:
            return
        walk = _Walk(problem, best, rng, heat=(1.0, 0.3, 0.1, 0.03)[rounds % 4])
        for order in walk.run(best_s, deadline_s):
            best = order
            best_s = simulate(problem, Schedule(order)).time_s
            yield order
        if best_s == float("inf"):
            best = walk.line.order()  # not within the budget yet: go on from there
        rounds += 1


class _Walk:
    """One round."""

    def __init__(self, problem: Problem, order: Sequence[int], rng: random.Random, heat: float):
        self.problem, self.rng = problem, rng
        self.line = Timeline(problem, order)
        self.budget = problem.budget_bytes or 0
        graph = problem.graph
        times = sorted(problem.profile.op_time_s[i] for i in graph.needed)
        self.heat = (
            max(times[len(times) // 2], problem.store_all_time_s / len(times) / 10, 1e-12) * heat
        )
        self.weight = (
            PENALTY * max(problem.store_all_time_s, 1e-12) / (self.budget * (self.line.end + 1))
        )
        self.big = [
            v.id
            for v in graph.values
            if v.producer in graph.needed and v.nbytes > 0 and graph.ops[v.producer].recomputable
        ]
        self.movable = sorted(graph.needed)
        self.recomputed: list[int] = []

    def excess(self) -> float:
        over = self.line.live - self.budget
        return float(over[over > 0].sum())

    def run(self, best_s: float, deadline_s: float) -> Iterator[tuple[int, ...]]:
        line, rng = self.line, self.rng
        excess = self.excess()
        energy = line.time_s + self.weight * excess
        for step in range(ROUND_STEPS):
            if step % 64 == 0 and time.perf_counter() > deadline_s:
                return
            undo = self._change()
            if not undo:
                continue
            new_excess = self.excess()
            new_energy = line.time_s + self.weight * new_excess
            temperature = self.heat * 0.01 ** (step / ROUND_STEPS)
            if new_energy <= energy or rng.random() < math.exp((energy - new_energy) / temperature):
                energy = new_energy
                if new_excess == 0 and line.time_s < best_s * (1 - 1e-9):
                    best_s = line.time_s
                    yield line.order()
            else:
                self._undo(undo)

    def _undo(self, changes: list[tuple[int, int]]) -> None:
        """Takes changes back, last one first; (op, cell) was inserted, (op, ~cell) removed."""
        for op_id, cell in reversed(changes):
            done = self.line.remove(cell) if cell >= 0 else self.line.insert(op_id, ~cell)
            assert done

    def _change(self) -> list[tuple[int, int]]:
        """Applies a random change and returns its steps; empty when it was not possible."""
        kind = self.rng.random()
        if kind < 0.35:
            return self._drop()
        if kind < 0.7:
            return self._add()
        return self._move()

    def _drop(self) -> list[tuple[int, int]]:
        line = self.line
        op_id = self._random_recomputed()
        if op_id is None:
            return []
        cell = self.rng.choice(line.runs[op_id])
        return [(op_id, ~cell)] if line.remove(cell) else []

    def _random_recomputed(self) -> int | None:
        again = [op_id for op_id in self.movable if len(self.line.runs[op_id]) > 1]
        return self.rng.choice(again) if again else None

    def _add(self) -> list[tuple[int, int]]:
        """Evicts a value across one of the fullest cells: its producer runs again just before its
        next read."""
        line, rng = self.line, self.rng
        if not self.big:
            return []
        full = int(np.argmax(line.live)) if rng.random() < 0.5 else rng.randrange(line.end)
        for _ in range(20):
            value_id = rng.choice(self.big)
            instance = line.instance(value_id, full)
            if instance is None or instance[1] <= full:
                continue
            reads = line.reads[value_id]
            read = reads[bisect_right(reads, full)]
            op_id = line.producer[value_id]
            assert op_id is not None
            cell = self._empty_before(read, instance[0])
            if cell is not None and line.insert(op_id, cell):
                return [(op_id, cell)]
        return []

    def _empty_before(self, cell: int, after: int) -> int | None:
        """The last empty cell before ``cell``, not far away."""
        for at in range(cell - 1, max(after, cell - 40), -1):
            if self.line.op_at[at] < 0:
                return at
        return None

    def _move(self) -> list[tuple[int, int]]:
        """Moves a run to another cell, most often nearby."""
        line, rng = self.line, self.rng
        op_id = rng.choice(self.movable)
        if rng.random() < 0.5:
            op_id = self._random_recomputed() or op_id
        cell = rng.choice(line.runs[op_id])
        reach = rng.choice((8, 40, 200, line.end))
        target = rng.randint(max(0, cell - reach), min(line.end - 1, cell + reach))
        if not line.insert(op_id, target):
            return []
        if line.remove(cell):
            return [(op_id, target), (op_id, ~cell)]
        line.remove(target)
        return []
