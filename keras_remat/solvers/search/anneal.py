"""Anneals the order itself: runs are added, taken away and moved, first runs included.

After FastSA (Imanishi, Xu, Takagi, Wang, Castillo, NeurIPS 2023), which anneals over orders in
which an op may occur several times. :mod:`keras_remat.solvers.engines.moves` makes the moves, about
a million a second. The energy is

    time + λ · Σ over cells of the bytes above the budget

While a round cools (:class:`Cooling`), λ grows: at first the order passes through states far over
the budget, at the end none is worth it. A round begins with the best order so far, or, where there
is none, with the last order of the round before. The result depends on the seed alone.

Until the kernel is compiled (:mod:`keras_remat.solvers.engines.native`) it runs as Python, with the
same moves for the same seed, but fewer of them in a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keras_remat.core.deadline import NO_DEADLINE, Deadline, work_budget_s
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers.engines import native
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.reorder import base_orders
from keras_remat.solvers.orders.timeline import Timeline, order_of
from keras_remat.solvers.search import eviction, greedy

REPAIR_CHUNKS = 12
"""Number of times that λ doubles at the end of a round that would end over the budget."""
CHUNK_MOVES = 2_000
"""Number of moves at one temperature."""
MOVE_S, MOVE_S_PER_OP = 1.2e-6, 1.6e-9
"""Seconds of a move, from which work limits are computed; more than it takes."""
SLOWNESS = 60
"""Factor on these seconds for a move in Python."""
WAIT_SHARE = 0.1
"""Share of the time limit to wait for the machine code."""


@dataclass(frozen=True)
class Cooling:
    """Says how temperature and λ change during a round, by a constant factor per move.

    Args:
        heats: the first and the last temperature, in times of a typical op.
        penalties: the first and the last λ, as the number of store-all times that it costs to be
            over the budget by the whole budget everywhere.
        spread_chunks: number of chunks after which runs are spaced evenly again. Where cells are
            crowded, no runs are added.
    """

    heats: tuple[float, float]
    penalties: tuple[float, float]
    spread_chunks: int = 1

    def at(self, share: float) -> tuple[float, float]:
        """Returns temperature and λ after a share of the round."""
        heat, penalty = (
            first * (last / first) ** share for first, last in (self.heats, self.penalties)
        )
        return heat, penalty


LOOSE = Cooling((1.0, 0.02), (1.0, 2000.0), spread_chunks=25)
"""Begins where memory counts little, which finds another order: on a layered graph of 250 ops at
0.7 of its peak a million moves end at 0.6 to 1.3 % overhead, and at 2.7 to 2.8 % with a first λ of
25 or more. Crowded cells keep the hot part from useless runs: of five seeds four end below 0.9 %;
spaced after every chunk two, and without any spacing two end over the budget."""
STIFF = Cooling((3.0, 0.1), (100.0, 1000.0))
"""Begins hot where memory counts much, for budgets that need as many recomputations as there are
ops: on a training graph of 24 ops, half the peak, it fits the budget in four of five rounds, and
LOOSE in none."""
COOL = Cooling((0.1, 0.02), (80.0, 2000.0))
"""The end of LOOSE; improves an order without losing it."""


def solve(incumbent: Incumbent, seed: int) -> None:
    """Offers the schedules that annealing reaches.

    It begins with the greedy schedule, or with store-all where there is none.
    """
    if incumbent.offer_store_all():
        return
    native.begin()
    problem, deadline = incumbent.problem, incumbent.deadline
    steps = greedy.steps_limit(deadline.seconds / 6)
    for order in greedy.candidates(problem, deadline=deadline, max_steps=steps):
        incumbent.offer(order)
    compiled = is_compiled(deadline)
    coolings = (LOOSE, STIFF, COOL) * 2
    moves = moves_for(problem, deadline.seconds * 2 / 3, compiled=compiled) // len(coolings)
    for order in improve(
        problem,
        incumbent.order,
        deadline=deadline,
        moves=moves,
        compiled=compiled,
        seed=seed,
        coolings=coolings,
    ):
        incumbent.offer(order)


def is_compiled(deadline: Deadline) -> bool:
    """Returns whether the moves are machine code; waits a share of the deadline's time for it."""
    return native.is_compiled(WAIT_SHARE * deadline.seconds * deadline.patience)


def moves_for(problem: Problem, time_limit_s: float, *, compiled: bool) -> int:
    """Returns how many moves fit into a time limit; in longer orders, moves take longer.

    Args:
        problem: the problem whose orders are searched.
        time_limit_s: seconds.
        compiled: whether the moves are machine code.
    """
    move_s = (MOVE_S + MOVE_S_PER_OP * len(problem.graph.needed)) * (1 if compiled else SLOWNESS)
    return int(work_budget_s(time_limit_s) / move_s)


def improve(
    problem: Problem,
    start: Sequence[int] | None,
    *,
    deadline: Deadline,
    moves: int,
    compiled: bool,
    coolings: Iterable[Cooling],
    seed: int = 0,
) -> Iterator[tuple[int, ...]]:
    """Yields legal orders within the budget, each faster than ``start`` and than the one before.

    Args:
        problem: a problem with a budget.
        start: a legal order to begin with, within the budget or over it; ``None`` for the
            memory-aware order.
        deadline: deadline at which the search ends.
        moves: number of moves of every round.
        compiled: whether the moves are machine code; they are the same.
        coolings: one for each round.
        seed: seed of every choice.
    """
    if problem.budget_bytes is None or not problem.graph.needed:
        return
    rng = np.random.default_rng(seed)
    best = base_orders(problem)[0] if start is None else tuple(start)
    usage = simulate(problem, Schedule(best))
    best_s = usage.time_s if usage.peak_bytes <= problem.budget_bytes else float("inf")
    if start is None and best_s < float("inf"):
        yield best
    for cooling in coolings:
        if deadline.is_over or best_s <= problem.store_all_time_s:
            return
        line = Timeline(problem, best, compiled=compiled)
        order = _round(line, cooling, moves, best_s, deadline, rng)
        if order:
            best, best_s = order, simulate(problem, Schedule(order)).time_s
            yield order
        elif best_s == float("inf"):
            best = line.order()  # not within the budget yet: go on from there


def _round(
    line: Timeline,
    cooling: Cooling,
    moves: int,
    best_s: float,
    deadline: Deadline,
    rng: np.random.Generator,
) -> tuple[int, ...]:
    """Returns the fastest order of one round, empty if none is faster than ``best_s``."""
    problem = line.problem
    times = sorted(problem.profile.op_time_s[i] for i in problem.graph.needed)
    typical_s = max(times[len(times) // 2], problem.store_all_time_s / len(times) / 10, 1e-12)
    unit_s = max(problem.store_all_time_s, 1e-12) / max(1, problem.room_bytes or 1)
    fastest: tuple[int, ...] = ()
    chunks = max(1, moves // CHUNK_MOVES)
    for chunk in range(chunks + REPAIR_CHUNKS):
        if deadline.is_over or (chunk >= chunks and not line.excess):
            break
        if chunk % cooling.spread_chunks == 0 or chunk >= chunks:
            line.spread()
        heat, penalty = cooling.at(min(1.0, chunk / chunks))
        penalty *= 2.0 ** max(0, chunk - chunks)
        draws = rng.random(CHUNK_MOVES * line.kernel.DRAWS)
        exponentials = rng.exponential(size=CHUNK_MOVES)
        if not line.compiled:
            draws, exponentials = draws.tolist(), exponentials.tolist()
        found_s = line.kernel.walk(
            *line.state,
            draws,
            exponentials,
            heat * typical_s,
            penalty * unit_s / (line.end + 1),
            best_s,
            line.buffer,
        )
        if found_s < best_s:
            best_s, fastest = found_s, order_of(line.buffer)
    return fastest


def warm_up() -> None:
    """Compiles the moves, and greedy's decisions, by one short search of each.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: there is no folder for its machine code.
    """
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=7)
    eviction.warm_up(problem)
    for _ in improve(
        problem, None, deadline=NO_DEADLINE, moves=1, compiled=True, coolings=(LOOSE,)
    ):
        pass
