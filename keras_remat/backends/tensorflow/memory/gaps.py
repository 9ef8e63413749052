"""Fewer gaps in the pool: ops of an order that do not need one another change places.

The allocator counts whole chunks, and hands out a free one whole that is less than twice the
request (:mod:`.best_fit`). Values of a step in slices are of few sizes, 1, 2, 4 and 8 MiB of a
U-Net's, and between those that live, chunks of 5, 6 and 7 are left for requests of 4: at the peak
of a step of 80 MiB alive, 93 are in use. Which chunks there are follows from the order of what is
asked for and given back. So an op that got too large a chunk, while too much was in use, is moved
past some neighbours; what leaves less above the limit, or as much, is kept. What that is worth is
in ``benchmarks/results/ablation.md``.

Ops that change places do not read one another's results, nor compute the same value, so every order
is legal, and computes the same bits. Tries are counted, so that the same problem gives the same
order.
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

#: Tries, of which each draws an op, and replays the step where that one can move.
_TRIES = 100
#: Past how many others an op is moved at most.
_FARTHEST = 8


def closer(
    uses: Uses, replay: Callable[[], Replay], schedule: Schedule, limit_bytes: int
) -> Schedule | None:
    """Returns an order of the same runs that has less in use above a limit, summed over the runs;
    ``None`` where none is found.

    Args:
        uses: what the ops do with the pool.
        replay: returns a replay from the pool that the first step finds.
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
    """Returns what a step has in use above a limit, summed over its runs; or a part of that, which
    is more than ``most``."""
    total = 0
    for _ in replay.step(runs):
        total += max(0, replay.in_use_bytes - limit_bytes)
        if total > most:
            break
    return total


def _blame(replay: Replay, runs: Sequence[Run], limit_bytes: int) -> Counter[int]:
    """Returns position → the bytes that were in use in vain in the chunks that were asked for
    there, summed over the runs at which too much was in use."""
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
    """Returns a stretch of an order in which an op has moved that is to blame, and the position of
    its first op; ``None`` where the op that was drawn cannot move."""
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
