"""Less fragmentation: the same ops in nearly the same order, so that the allocator wastes less.

A best-fit allocator hands out chunks that are up to twice the request, and which ones depends on
the order of allocations. Between the values alive and the allocator's peak lie 5 to 30 %, and
moving an op by a few places, at no cost in time, can be worth most of it. This is a local search
over such moves by simulated annealing on the replayed peak, on a coarse problem
(:mod:`keras_remat.solvers.orders.coarsen`) that holds only what the allocator sees.

Known limits: no op is recomputed more or less; a round replays the whole order, so long orders get
few rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from keras_remat.backends.base import Backend
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.solvers.orders.coarsen import Coarse
from keras_remat.units import KIB

#: Up to which peak, in budgets, an order is worth compacting.
WORTH_COMPACTING = 1.2
#: Values below this do not come from the pool that fragments, or hardly matter there.
_SMALL_BYTES = 256 * KIB
#: Rounds per second of the time for it; fewer than there are in a second, so that the same seed
#: gives the same order.
_POSITIONS_PER_S = 300_000
_DISTANCES = (1, 2, 4, 8, 16, 40)
#: How much worse a move may be at the beginning, as a share of the peak.
_TEMPERATURE = 0.01


def compacted(
    problem: Problem,
    schedule: Schedule,
    budget_bytes: int,
    backend: Backend,
    *,
    time_limit_s: float,
    seed: int = 0,
) -> Schedule:
    """Returns an order of the same op runs with the least allocator peak that was found, at once
    when it keeps to the budget.

    Args:
        problem: the graph and its costs.
        schedule: a legal order.
        budget_bytes: what the device may have in use.
        backend: whose allocator decides.
        time_limit_s: seconds.
        seed: of the moves.
    """
    deadline_s = time.perf_counter() + time_limit_s
    coarse = Coarse(problem, tuple(dict.fromkeys(schedule.order)), _SMALL_BYTES)
    now = coarse.project(schedule.order)
    if len(now) < 2:
        return schedule
    moves = _Moves(coarse.problem.graph, random.Random(seed))
    peak = backend.predicted_peak_bytes(coarse.problem, Schedule(now))
    # what the coarse problem leaves out is taken to stay
    budget = budget_bytes + peak - backend.predicted_peak_bytes(problem, schedule)
    best, least = now, peak
    rounds = max(1, int(_POSITIONS_PER_S * time_limit_s / len(now)))
    for at in range(rounds):
        if time.perf_counter() > deadline_s:
            break
        other = moves.moved(now)
        if other is None:
            continue
        found = backend.predicted_peak_bytes(coarse.problem, Schedule(other))
        temperature = _TEMPERATURE * least * (1 - at / rounds)
        if found <= peak or moves.random.random() < math.exp((peak - found) / (temperature + 1)):
            now, peak = other, found
        if found < least:
            best, least = other, found
            if least <= budget:
                full = Schedule(coarse.expand(best))
                if backend.predicted_peak_bytes(problem, full) <= budget_bytes:
                    return full
    full = Schedule(coarse.expand(best))
    return min((schedule, full), key=lambda order: backend.predicted_peak_bytes(problem, order))


class _Moves:
    """Random changes of an order that keep it legal and every reader with the instance it reads, or
    a newer one."""

    def __init__(self, graph: Graph, source: random.Random):
        self.random = source
        self._reads = [frozenset(op.inputs) for op in graph.ops]
        self._writes = [frozenset(op.outputs) for op in graph.ops]
        self._after = [frozenset(op.after) for op in graph.ops]

    def moved(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """The order after one to four moves; ``None`` where none was possible."""
        result = list(order)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self._move(
                result,
                self.random.randrange(len(result)),
                self.random.choice(_DISTANCES),
                self.random.random() < 0.5,
            )
        return None if result == list(order) else tuple(result)

    def _move(self, order: list[int], start: int, distance: int, later: bool) -> None:
        """Moves the op at ``start`` as far as ``distance`` in one direction, in place."""
        op_id, step = order[start], 1 if later else -1
        end = start
        for _ in range(distance):
            if not 0 <= end + step < len(order):
                break
            first, second = (op_id, order[end + step]) if later else (order[end + step], op_id)
            if (
                first == second
                or self._reads[second] & self._writes[first]
                or first in self._after[second]
            ):
                break
            end += step
        if end != start:
            del order[start]
            order.insert(end, op_id)
