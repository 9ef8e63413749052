"""Leaves fewer gaps in the pool by exchanging neighbouring ops that do not need each other.

The allocator counts whole chunks, and hands out a free chunk whole if it is less than twice the
request (:mod:`.best_fit`). The values of a step in slices have few sizes: 1, 2, 4 and 8 MiB in a
U-Net. Between live values, chunks of 5, 6 and 7 MiB are left for requests of 4: at the peak of a
step with 80 MiB alive, 93 are in use. Which chunks exist follows from the order of allocations and
deallocations. So this module picks an op that got too large a chunk while the bytes in use were
above the limit, and moves it past some neighbours. It keeps the move unless more bytes are above
the limit than before. ``benchmarks/results/ablation.md`` has the effect.

Ops that change places do not read each other's results, nor compute the same value, so every order
is legal and computes the same bits. The number of tries is fixed, so that the same problem gives
the same order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf

from keras_remat.backends.tensorflow.memory.best_fit import rounded
from keras_remat.backends.tensorflow.memory.replay import Replay, Run, Uses
from keras_remat.core.graph import Graph
from keras_remat.core.schedule import Schedule

#: Number of tries. Each draws an op and, if the op can move, replays the step.
_TRIES = 100
#: How many other ops an op is moved past, at most.
_FARTHEST = 8


def closer(
    uses: Uses, replay: Callable[[], Replay], schedule: Schedule, limit_bytes: int
) -> Schedule | None:
    """Returns an order of the same runs with fewer bytes in use above a limit, summed over the
    runs; ``None`` where none is found.

    Args:
        uses: what the ops do with the pool.
        replay: returns a new replay, from the pool before the first step.
        schedule: the order to start from.
        limit_bytes: bytes that should not be exceeded.
    """
    graph, rng = uses.problem.graph, random.Random(0)
    order, runs, found = list(schedule.order), uses.stretch(schedule.order), None
    most = _excess_bytes(replay(), runs, limit_bytes)
    blame = _blame(replay(), runs, limit_bytes)
    for _ in range(_TRIES):
        if not blame:
            break
        moved = _moved(graph, order, blame, rng)
        if moved is None:
            continue
        first, stretch = moved
        there = slice(first, first + len(stretch))
        deaths = Counter(v for run in runs[there] for v in run.dying)
        other = [*runs[: there.start], *uses.stretch(stretch, first, deaths), *runs[there.stop :]]
        excess = _excess_bytes(replay(), other, limit_bytes, most)
        if excess <= most:
            order[there], runs = stretch, other
            blame = _blame(replay(), runs, limit_bytes)
            if excess < most:
                found, most = Schedule(tuple(order)), excess
    return found


def _excess_bytes(replay: Replay, runs: Sequence[Run], limit_bytes: int, most: float = inf) -> int:
    """Returns the bytes in use above a limit, summed over the runs of a step. Stops as soon as the
    sum is more than ``most``."""
    total = 0
    for _ in replay.step(runs):
        total += max(0, replay.in_use_bytes - limit_bytes)
        if total > most:
            break
    return total


def _blame(replay: Replay, runs: Sequence[Run], limit_bytes: int) -> Counter[int]:
    """Returns position → unused bytes in the chunks requested there, summed over the runs with more
    bytes in use than the limit."""
    blame, asked = Counter[int](), dict[int, tuple[int, int]]()  # value → position, bytes
    for run, chunks in replay.step(runs):
        for v, nbytes, donor in run.writes:
            asked[v] = (run.position, rounded(nbytes)) if donor is None else asked[donor]
        if replay.in_use_bytes > limit_bytes:
            for v, chunk in chunks.items():
                position, nbytes = asked[v]
                if chunk is not None and chunk.size > nbytes:
                    blame[position] += chunk.size - nbytes
    return blame


def _moved(
    graph: Graph,
    order: Sequence[int],
    blame: Counter[int],
    rng: random.Random,
) -> tuple[int, list[int]] | None:
    """Draws an op that is to blame and moves it. Returns the position of the first op of the
    changed stretch, and the stretch; ``None`` where the op cannot move."""
    start = at = rng.choices(list(blame), list(blame.values()))[0]
    way, most = rng.choice((-1, 1)), rng.randint(1, _FARTHEST)
    while abs(at - start) < most and 0 <= at + way < len(order):
        pair = order[start], order[at + way]
        if not _may_swap(graph, *(pair if way > 0 else pair[::-1])):
            break
        at += way
    if at > start:
        return start, [*order[start + 1 : at + 1], order[start]]
    if at < start:
        return at, [order[start], *order[at:start]]
    return None


def _may_swap(graph: Graph, first: int, second: int) -> bool:
    """Returns whether an op may run before the one right before it."""
    one, other = graph.ops[first], graph.ops[second]
    made, then = set(one.outputs), set(other.outputs)
    is_apart = made.isdisjoint((*other.inputs, *other.outputs)) and then.isdisjoint(one.inputs)
    return first != second and is_apart and first not in other.after and second not in one.after
