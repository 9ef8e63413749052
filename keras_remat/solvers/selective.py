"""Selective recomputation: keep what is expensive to compute, compute again what is cheap, once, when it is wanted after a long pause.

Most of a training step's memory is held by values that are read soon after they are computed and then, much later, in the backward phase:
activations. Many of them (normalizations, elementwise functions, concatenations) cost next to nothing to compute again from the
outputs of convolutions and matrix products. Korthikanti et al. 2022 (arXiv 2205.05198, section 5) choose such ops by hand; here each op's
longest pause between two uses is looked at. A *dropped* op runs again, after its dropped parents, just before the use that ends its pause,
and never a third time. What is dropped is what costs the least seconds per byte, or per byte and length of the pause; several
thresholds are tried on each base order, and what the budget has room for is taken back (:mod:`keras_remat.solvers.trim`).

An eviction that looks at one moment only (:mod:`keras_remat.solvers.greedy`) does not see that a value it gives up makes others
expensive; this rule cannot run into that, because what it keeps it keeps for all. It is coarse in exchange: a value is dropped or not,
whatever the budget.

O(ops · log ops) for an order, and one simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_remat.problem import Problem
from keras_remat.schedule import Schedule
from keras_remat.simulate import simulate
from keras_remat.solvers.trim import trimmed

THRESHOLDS = 12
"""How many shares of the droppable bytes are tried."""
LEAST_PAUSE = 0.01
"""A pause shorter than this share of the order is none."""
LEAST_BYTES = 1e-4
"""Ops with outputs below this share of the bytes above the floor are kept."""


def candidates(problem: Problem, orders: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Orders within the budget, each faster than the one before.

    Args:
        problem: with a budget.
        orders: legal base orders without recomputation.
    """
    budget = problem.budget_bytes
    if budget is None:
        raise ValueError("selective recomputation needs a budget")
    best_s = float("inf")
    for base in orders:
        pauses = _Pauses(problem, base)
        for by_length in (False, True):
            ranked = pauses.ranked(by_length)
            total = sum(pauses.nbytes[i] for i in ranked)
            for share in range(1, THRESHOLDS + 1):
                order = pauses.order(_cheapest(ranked, pauses.nbytes, total * share // THRESHOLDS))
                usage = simulate(problem, Schedule(order))
                if usage.peak_bytes > budget:
                    continue
                order = trimmed(problem, order, budget)
                time_s = simulate(problem, Schedule(order)).time_s
                if time_s < best_s:
                    best_s = time_s
                    yield order
                break  # dropping more costs more


def _cheapest(ranked: Sequence[int], nbytes: Sequence[int], target: int) -> set[int]:
    """The first ops of a ranking that have ``target`` bytes together."""
    chosen: set[int] = set()
    total = 0
    for op_id in ranked:
        if total >= target:
            break
        chosen.add(op_id)
        total += nbytes[op_id]
    return chosen


class _Pauses:
    """The longest pause of every op on one base order.

    Args:
        problem: with a budget.
        base: a legal order without recomputation.
    """

    def __init__(self, problem: Problem, base: Sequence[int]):
        graph = problem.graph
        self.ops, self.base, self.time_s = graph.ops, tuple(base), problem.profile.op_time_s
        self.producer = [value.producer for value in graph.values]
        self.nbytes = [sum(graph.values[v].nbytes for v in op.outputs) for op in graph.ops]
        end = len(self.base)
        uses: list[list[int]] = [[] for _ in graph.ops]
        last_run = [end] * len(graph.ops)  # base position before which an op may still run again
        for position in range(end):
            op = self.ops[self.base[position]]
            uses[op.id].append(position)
            for producer in {self.producer[v] for v in op.inputs}:
                if producer is not None and uses[producer][-1] != position:
                    uses[producer].append(position)
            for earlier in op.after:
                last_run[earlier] = min(last_run[earlier], position)
        for value_id in graph.outputs:
            producer = self.producer[value_id]
            if producer is not None and uses[producer]:
                uses[producer].append(end)
        least_bytes = LEAST_BYTES * max(0, (problem.budget_bytes or 0) - problem.profile.resident_bytes)
        self.pause: dict[int, tuple[int, int]] = {}
        for op in graph.ops:
            if not op.recomputable or self.nbytes[op.id] <= least_bytes or len(uses[op.id]) < 2:
                continue
            start, stop = max(zip(uses[op.id], uses[op.id][1:], strict=False), key=lambda pause: pause[1] - pause[0])
            if stop - start > LEAST_PAUSE * end and stop < end and stop <= last_run[op.id]:
                self.pause[op.id] = start, stop
        self._last_run = last_run

    def ranked(self, by_length: bool) -> list[int]:
        """The ops that can be dropped, the cheapest per byte, or per byte and position of the pause, first."""

        def price(op_id: int) -> float:
            start, stop = self.pause[op_id]
            return self.time_s[op_id] / (self.nbytes[op_id] * (stop - start if by_length else 1))

        return sorted(self.pause, key=price)

    def order(self, dropped: set[int]) -> tuple[int, ...]:
        """The base order with every op of ``dropped`` run again when it is wanted after its pause."""
        order: list[int] = []
        again: set[int] = set()
        for position, op_id in enumerate(self.base):
            for missing in self._missing(op_id, position, dropped, again):
                again.add(missing)
                order.append(missing)
            order.append(op_id)
        return tuple(order)

    def _missing(self, op_id: int, position: int, dropped: set[int], again: set[int]) -> list[int]:
        """What must run again before ``op_id`` can run at ``position``, parents first."""
        found: list[int] = []
        seen = {op_id}
        stack = [(op_id, False)]
        while stack:
            current, expanded = stack.pop()
            if expanded:
                found.append(current)
                continue
            if current != op_id:
                stack.append((current, True))
            for value_id in self.ops[current].inputs:
                producer = self.producer[value_id]
                if producer is None or producer in seen or producer not in dropped or producer in again:
                    continue
                # a parent that may not run any more stays alive instead
                if self.pause[producer][0] < position <= self._last_run[producer]:
                    seen.add(producer)
                    stack.append((producer, False))
        return found
