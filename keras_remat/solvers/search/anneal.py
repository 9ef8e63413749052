"""Simulated annealing on the order itself: runs are added, taken away and moved, first runs
included.

After FastSA (Imanishi, Xu, Takagi, Wang, Castillo, NeurIPS 2023), which anneals over orders in
which an op may occur several times. :mod:`keras_remat.solvers.engines.moves` makes the moves, about
a million a second. The energy is

    time + λ · Σ over cells of the bytes above the budget

While a round cools, λ grows as the temperature falls: at first the order of the ops passes through
states far over the budget, at the end none is worth it. (With a constant λ, rounds of any length
end in worse orders on layered graphs.) All rounds end alike; the hot ones, which begin higher up,
find another order, the cool ones improve the order they begin with. A round begins with the best
order so far, or where there is none, with what the one before ended with. What it returns depends
on the seed alone.

Until the kernel is compiled (:mod:`keras_remat.solvers.engines.native`) it runs as Python, with the
same moves for the same seed, and a round has fewer of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers.engines import native
from keras_remat.solvers.orders.effort import effort_s
from keras_remat.solvers.orders.reorder import memory_aware_order
from keras_remat.solvers.orders.timeline import Timeline, order_of
from keras_remat.solvers.search import greedy

HEATS = (1.0, 0.1)
"""Temperatures that rounds begin with, in times of a typical op, in turn."""
LAST_HEAT = 0.02
"""The temperature that rounds end with."""
PENALTY = 2000.0
"""Store-all times that being over by the whole budget everywhere costs at the end of a round."""
PENALTY_POWER = 2.0
"""λ falls with this power of the temperature: it is 1 at the temperature 1."""
REPAIR_CHUNKS = 12
"""How often λ doubles at the end of a round that would end over the budget."""
CHUNK_MOVES = 2_000
"""Moves at one temperature."""
MOVE_S, MOVE_S_PER_OP = 1.2e-6, 1.6e-9
"""Seconds of a move that work limits are computed with; more than it takes."""
SLOWNESS = 60
"""The same, in Python."""
WAIT_SHARE = 0.1
"""Share of the time limit that the machine code is waited for."""


@dataclass(frozen=True)
class Effort:
    """How much work a search is: so many rounds of so many moves.

    Args:
        rounds: at least one; ``None`` for as many as the deadline allows.
        moves: of every round.
    """

    rounds: int | None
    moves: int


def solve(problem: Problem, *, time_limit_s: float = 30.0, seed: int = 0) -> Solution:
    """Returns the best schedule that annealing reaches from the greedy one, or from store-all where
    there is none.

    Raises:
        ScheduleNotFoundError: none within the budget was found in time.
    """
    started = time.perf_counter()
    native.begin()
    best: tuple[int, ...] | None = None
    deadline_s = started + time_limit_s
    for schedule in greedy.candidates(
        problem, deadline_s=deadline_s, max_steps=greedy.steps_limit(time_limit_s / 6)
    ):
        best = schedule.order
    compiled = native.is_compiled(WAIT_SHARE * time_limit_s)
    effort = effort_for(problem, time_limit_s * 2 / 3, compiled=compiled)
    for order in improve(
        problem, best, deadline_s=deadline_s, seed=seed, effort=effort, compiled=compiled
    ):
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


def effort_for(
    problem: Problem, time_limit_s: float, *, compiled: bool, rounds: int = len(HEATS)
) -> Effort:
    """Returns the work that fits into a time limit; moves take time with the length of the order.

    Args:
        problem: what is searched.
        time_limit_s: seconds.
        compiled: whether the moves are.
        rounds: into which the moves are divided.
    """
    move_s = (MOVE_S + MOVE_S_PER_OP * len(problem.graph.needed)) * (1 if compiled else SLOWNESS)
    return Effort(rounds, max(CHUNK_MOVES, int(effort_s(time_limit_s) / move_s / rounds)))


def improve(
    problem: Problem,
    start: Sequence[int] | None,
    *,
    deadline_s: float,
    effort: Effort,
    compiled: bool,
    seed: int = 0,
    heats: Sequence[float] = HEATS,
) -> Iterator[tuple[int, ...]]:
    """Yields legal orders within the budget, each faster than ``start`` and than the one before.

    Args:
        problem: with a budget.
        start: a legal order; one over the budget is where the search for one within it begins. The
            memory-aware store-all order when missing.
        deadline_s: ``time.perf_counter()`` time to end at.
        effort: the work to do until then.
        compiled: whether the moves are machine code; they are the same.
        seed: of every choice.
        heats: of the rounds, in turn.
    """
    if problem.budget_bytes is None:
        return
    rng = np.random.default_rng(seed)
    best = (
        tuple(start)
        if start is not None
        else memory_aware_order(problem, sorted(problem.graph.needed))
    )
    usage = simulate(problem, Schedule(best))
    best_s = usage.time_s if usage.peak_bytes <= problem.budget_bytes else float("inf")
    if start is None and best_s < float("inf"):
        yield best
    done = 0
    while time.perf_counter() < deadline_s and (effort.rounds is None or done < effort.rounds):
        if best_s <= problem.store_all_time_s:
            return
        line = Timeline(problem, best, compiled=compiled)
        heat = heats[done % len(heats)]
        for order in _round(line, heat, effort.moves, best_s, deadline_s, rng):
            best, best_s = order, simulate(problem, Schedule(order)).time_s
            yield order
        if best_s == float("inf"):
            best = line.order()  # not within the budget yet: go on from there
        done += 1


def _round(
    line: Timeline,
    heat: float,
    moves: int,
    best_s: float,
    deadline_s: float,
    rng: np.random.Generator,
) -> Iterator[tuple[int, ...]]:
    """Yields the orders of one round that are faster than ``best_s``."""
    problem = line.problem
    times = sorted(problem.profile.op_time_s[i] for i in problem.graph.needed)
    typical_s = max(times[len(times) // 2], problem.store_all_time_s / len(times) / 10, 1e-12)
    full = (problem.budget_bytes or 0) * (line.end + 1)
    last_weight = PENALTY * max(problem.store_all_time_s, 1e-12) / full
    fastest_at = np.full(line.end, -1) if line.compiled else [-1] * line.end
    chunks = max(1, moves // CHUNK_MOVES)
    for chunk in range(chunks + REPAIR_CHUNKS):
        if time.perf_counter() > deadline_s or (chunk >= chunks and not line.excess):
            return
        now = heat * (LAST_HEAT / heat) ** min(1.0, chunk / chunks)
        weight = last_weight * (LAST_HEAT / now) ** PENALTY_POWER * 2.0 ** max(0, chunk - chunks)
        draws = rng.random(CHUNK_MOVES * line.kernel.DRAWS)
        exponentials = rng.exponential(size=CHUNK_MOVES)
        if not line.compiled:
            draws, exponentials = draws.tolist(), exponentials.tolist()
        found_s = line.kernel.walk(
            *line.state,
            draws,
            exponentials,
            now * typical_s,
            weight,
            best_s,
            fastest_at,
        )
        if found_s < best_s:
            best_s = found_s
            yield order_of(fastest_at)
