"""Large-neighbourhood search over the interval program: a few hundred decisions are free at a time,
all others stay as they are.

The program of :mod:`keras_remat.solvers.search.intervals` over a whole op-level graph has ten
thousand variables and millions of entries. With most recomputations fixed, most values are retained
or gone for certain, and what is left is solved to its optimum in a tenth of a second. A
*neighbourhood* is a set of candidates (slot, op): those of a stretch of slots, those of two
stretches (so that memory can move from one to the other), or those of a stretch of ops. Two
disjoint ones are solved at a time, each in its own process; what both find is put together where
that fits, else the better one counts. Neighbourhoods grow while they are solved, and shrink when
they are not.

Shaw 1998 has the method; CP-SAT's own large-neighbourhood search knows nothing of slots and needs
many threads. Everything is decided by the seed and by CP-SAT's counted work.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.orders.incumbent import seconds_of
from keras_remat.solvers.search import intervals
from keras_remat.solvers.search.interval_program import Model, Pair, recomputations


@dataclass(frozen=True)
class NeighbourhoodOptions:
    """Rules the size of neighbourhoods, and when the search ends.

    Args:
        first_size, first_share: the first ones have the larger of a number of candidates and a
            share of all.
        least_size: of any.
        growth, shrinkage: factors of the size after one that was solved, and one that was not.
        work_per_solve: units of CP-SAT's deterministic time for one neighbourhood.
        build_work_per_op: what writing and sending its program counts as per op, in these units.
        nothing_new: rounds without improvement after which the search ends.
    """

    first_size: int = 160
    first_share: float = 0.1
    least_size: int = 20
    growth: float = 1.2
    shrinkage: float = 0.7
    work_per_solve: float = 0.04
    build_work_per_op: float = 8e-6
    nothing_new: int = 60


OPTIONS = NeighbourhoodOptions()


def improve(
    problem: Problem,
    start: Sequence[int],
    *,
    deadline: Deadline,
    work: float,
    depth: int,
    seed: int = 0,
) -> Iterator[tuple[int, ...]]:
    """Yields legal orders within the budget with the first runs of ``start``, each faster than the
    one before.

    Args:
        problem: with a budget.
        start: a legal order; one over the budget is a start too, though a worse one, and so is one
            whose recomputations before a first run must not be in the order of the first runs.
        deadline: to end at.
        work: deterministic limit (:func:`keras_remat.solvers.search.intervals.work_limit`) for each
            of the two processes.
        depth: of the candidates, as for :func:`keras_remat.solvers.search.intervals.improve`.
        seed: of every choice.

    Raises:
        MissingPackageError: OR-Tools is not installed.
        CpSatProcessError: a process ended without an answer.
    """
    base = tuple(dict.fromkeys(start))
    chosen = set(recomputations(start, base))
    pairs = sorted(intervals.candidates(problem, base, depth) | chosen)
    if not pairs or deadline.left_s() <= intervals.MINIMUM_S:
        return
    rng = random.Random(seed)
    best_s, known_s = seconds_of(problem, order_of(base, chosen)), seconds_of(problem, tuple(start))
    size, done, idle = max(OPTIONS.first_size, OPTIONS.first_share * len(pairs)), 0.0, 0
    half = cp_sat.MEMORY_LIMIT_BYTES // 2
    with cp_sat.Worker(half) as first, cp_sat.Worker(half) as second:
        workers = first, second
        while (
            done < work and idle < OPTIONS.nothing_new and deadline.left_s() > intervals.MINIMUM_S
        ):
            windows, left = list[set[Pair]](), pairs
            for _ in workers:
                windows.append(neighbourhood(left, int(size), rng))
                left = [pair for pair in left if pair not in windows[-1]]
            left_s = deadline.left_s()
            options, spent, solved = _solved(problem, base, chosen, windows, workers, left_s, seed)
            done += spent + OPTIONS.build_work_per_op * len(base)
            size *= OPTIONS.growth if solved else OPTIONS.shrinkage
            size = max(OPTIONS.least_size, min(len(pairs), size))
            seconds, at = min(
                (seconds_of(problem, order_of(base, option)), at)
                for at, option in enumerate(options)
            )
            idle += 1
            if seconds < best_s * (1 - 1e-9):
                best_s, chosen, idle = seconds, options[at], 0
                if best_s < known_s * (1 - 1e-9):
                    yield order_of(base, chosen)


def _solved(
    problem: Problem,
    base: Sequence[int],
    chosen: set[Pair],
    windows: Sequence[set[Pair]],
    workers: Sequence[cp_sat.Worker],
    time_limit_s: float,
    seed: int,
) -> tuple[list[set[Pair]], float, bool]:
    """Solves one neighbourhood in each process.

    Args:
        chosen: what is chosen now.
        windows: the neighbourhoods; no two share a candidate.

    Returns:
        What is chosen with what all of them found, and with what each found; the most work that one
        of them took; and whether all were solved.
    """
    models: list[Model] = []
    for worker, window in zip(workers, windows, strict=True):
        model = Model(problem, base, window, order_of(base, chosen), chosen - window)
        worker.start(
            model.program,
            time_limit_s=time_limit_s,
            work_limit=OPTIONS.work_per_solve,
            seed=seed,
        )
        models.append(model)
    spent, solved, options = 0.0, True, [chosen]
    for worker, model, window in zip(workers, models, windows, strict=True):
        answer = chosen & window
        for incumbent in worker.answers():
            if incumbent.ones is not None:
                answer = model.chosen(incumbent.ones)
            if incumbent.status:
                solved &= incumbent.status in ("OPTIMAL", "INFEASIBLE")
                spent = max(spent, incumbent.work or 0.0)
        options[0] = (options[0] - window) | answer
        options.append((chosen - window) | answer)
    return options, spent, solved


def order_of(base: Sequence[int], chosen: Collection[Pair]) -> tuple[int, ...]:
    """Returns the order of ``base`` with recomputations put in: those of a slot before its op, in
    base order."""
    place = {op_id: at for at, op_id in enumerate(base)}
    again: dict[int, list[int]] = {}
    for slot, at in sorted((slot, place[op_id]) for slot, op_id in chosen):
        again.setdefault(slot, []).append(base[at])
    order: list[int] = []
    for at in range(len(base) + 1):
        order += again.get(at, ())
        order += base[at : at + 1]
    return tuple(order)


def neighbourhood(pairs: Sequence[Pair], size: int, rng: random.Random) -> set[Pair]:
    """Returns ``size`` of the candidates: a stretch of slots, two shorter ones, or a stretch of
    ops, each a third of the time."""
    kind = rng.randrange(3)
    if kind == 2:
        pairs = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    stretches = 2 if kind == 1 else 1
    length = max(1, size // stretches)
    found: set[Pair] = set()
    for _ in range(stretches):
        start = rng.randrange(max(1, len(pairs) - length + 1))
        found.update(pairs[start : start + length])
    return found
