"""Runs a base order op by op and evicts values when an allocation does not fit: one pass of
:mod:`keras_remat.solvers.search.greedy`.

As an online rematerializer such as DTR (Kirisame et al. 2021, arXiv 2006.09616) would: an evicted
value is computed again when an op asks for it, parents first. What DTR has to guess is known here:
when each value is read next (Belady's rule), whether an op may still run again (``after``,
``recomputable``), and which evicted ops are waiting for a value. The value with the least

    (seconds to compute it and its missing ancestors again) ** a / (bytes · (distance to its next
    need) ** b)

goes first. What a value costs is looked up only as far as it takes to see that another goes before
it: near the floor a look would be at hundreds of ops, for a few ops that run. An input of the
running op that is read again later can go too where its buffer is taken over. Evicting late costs
nothing: the derived lifetime of an evicted value ends at its last read, not at the moment of the
decision.

DTR's own walk (:mod:`keras_remat.solvers.papers.dtr`) is another one on purpose: it locks inputs
before they are there, takes the first that is missing, and may go over its budget. Why
there are three walks is said in :mod:`keras_remat.solvers.orders.demand`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Op, reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.slices import is_sliced
from keras_remat.core.topology import last_runs

OPS_PER_STEP = 10
"""Running an op is a step, and so is looking at this many missing ones to see what a value costs,
or at this many values to see which of them cost something else now."""
LOOKED_AT_AGAIN = 6
"""What a value costs is first looked up at the op that computes it, and then at so many times as
many missing ones as before, until another value is known to cost less (``benchmarks/ablation.py``
says what that is worth)."""
KEPT_SHARE = 1 / 256
"""Share of the budget for small values that are never dropped. What is computed from them (a mean,
spread out to the size of an activation) can then be computed again when the large values they come
from are gone and variables have been updated. Most small values of a step in slices are sums over
parts of the batch: those of a U-Net took the share, statistics of some layers were dropped, and
less than 81 MiB had no schedule, where 60 have one."""


@dataclass(frozen=True)
class Policy:
    """Exponents of the eviction score: ``cost`` of the recomputation seconds, ``distance`` of the
    distance to the next need."""

    cost: float
    distance: float


class StuckError(Exception):
    """Says that the policy cannot go on within its limits."""


class Eviction:
    """Holds the state of one pass over the base order, a legal order without recomputation of at
    least the needed ops.

    :meth:`run` raises :class:`StuckError` when nothing can be evicted and the next op does not fit,
    when the recomputations explode, when a schedule faster than ``worse_than_s`` is out of reach,
    or at ``deadline``.
    """

    def __init__(
        self,
        problem: Problem,
        base: Sequence[int],
        policy: Policy,
        deadline: Deadline,
        worse_than_s: float,
    ):
        graph = problem.graph
        if problem.budget_bytes is None:
            raise ValueError("greedy eviction needs a budget")
        self.problem, self.graph, self.policy, self.deadline = problem, graph, policy, deadline
        self.ops, self.base, self.budget = graph.ops, base, problem.budget_bytes
        self.op_time_s = problem.profile.op_time_s
        self.nbytes = [value.nbytes for value in graph.values]
        self.producer = [-1 if v.producer is None else v.producer for v in graph.values]
        # Of every op the inputs that an op computes; step inputs are always there.
        self.inputs = [
            [v for v in dict.fromkeys(op.inputs) if self.producer[v] >= 0] for op in self.ops
        ]
        count, end = len(graph.values), len(base)
        # Where each value is read in the base order, the next time at the end of the list.
        self.reads: list[list[int]] = [[] for _ in range(count)]
        for value_id in graph.outputs:
            self.reads[value_id].append(end)
        for position in range(end - 1, -1, -1):
            for value_id in self.inputs[base[position]]:
                self.reads[value_id].append(position)
        self.last_run = last_runs(problem, base)
        self.alive = [producer < 0 for producer in self.producer]
        # left for recomputations
        self.spare_s = worse_than_s - sum(problem.profile.op_time_s[i] for i in base)
        self.ran = [False] * len(self.ops)
        self.born = list(self.alive)  # computed at least once
        self.held = problem.profile.resident_bytes
        self.order: list[int] = []
        self.steps = 0
        self.locks = [0] * count
        # An op is pending when one of its outputs was evicted and will be asked for again; its
        # inputs know it.
        self.pending_readers: list[dict[int, None]] = [{} for _ in range(count)]
        self.earliest, self.latest = [end] * len(self.ops), [-1] * len(self.ops)
        self.pending = [False] * len(self.ops)
        # Scores are kept in arrays over the values that can be evicted at all.
        self.size = np.maximum(np.array(self.nbytes, dtype=np.float64), 1e-9)
        self.kept = _small_values(problem)
        self.open = np.zeros(count, dtype=bool)  # alive and evictable
        self.cost, self.need = np.zeros(count), np.zeros(count)
        self.looked_at = [0.0] * count  # missing ops that the cost is of; infinite: of all
        self.stale: dict[int, None] = {}
        self.changed: dict[int, None] = {}  # what came or went since values were appraised
        self.now = 0
        self.tick_s = max(sum(problem.profile.op_time_s[i] for i in base) / max(1, end), 1e-12)

    def run(self, limit: int) -> tuple[int, ...]:
        for position, op_id in enumerate(self.base):
            self.now = position
            self._materialize(op_id, limit)
            for value_id in self.inputs[op_id]:
                self.reads[value_id].pop()
                self.stale[value_id] = None
            self._execute(op_id)
        self.now = len(self.base)
        for value_id in self.graph.outputs:
            if not self.alive[value_id]:
                producer = self.producer[value_id]
                self._materialize(producer, limit)
                self._execute(producer)
            self._lock(value_id)
        return tuple(self.order)

    def _materialize(self, target: int, limit: int) -> None:
        """Computes the missing inputs of ``target``; on return all of them are alive and locked
        until it has run.

        Of several missing inputs the one with the most to compute comes first, as in Sethi and
        Ullman's order for expressions. What was computed for an op stays locked until the op runs;
        an input that was there anyway may have to go and come again.
        """
        stack: list[tuple[int, set[int]]] = [(target, set())]
        while stack:
            op_id, locked = stack[-1]
            missing = sorted(v for v in self.inputs[op_id] if not self.alive[v])
            if missing:
                if self.steps > limit:
                    raise StuckError("the recomputations exploded")
                producers = list(dict.fromkeys(self.producer[v] for v in missing))
                if any(self.last_run[producer] < self.now for producer in producers):
                    raise StuckError("a value cannot be computed again")
                if len(producers) > 1:
                    producers.sort(key=self._bytes_to_compute, reverse=True)
                stack.append((producers[0], set()))
                continue
            for value_id in self.inputs[op_id]:
                if value_id not in locked:
                    self._lock(value_id)
            stack.pop()
            if stack:
                self._execute(op_id)
                reader, kept = stack[-1]
                for value_id in self.ops[op_id].outputs:
                    if value_id in self.inputs[reader] and value_id not in kept:
                        self._lock(value_id)
                        kept.add(value_id)

    def _bytes_to_compute(self, op_id: int) -> int:
        """Returns the bytes of all that has to be computed until ``op_id`` has run."""
        missing = self._missing(op_id)
        return sum(self.nbytes[v] for i in missing for v in self.ops[i].outputs)

    def _lock(self, value_id: int) -> None:
        self.locks[value_id] += 1
        self.open[value_id] = False

    def _unlock(self, value_id: int) -> None:
        self.locks[value_id] -= 1
        if not self.locks[value_id]:
            self.stale[value_id] = None

    def _wanted(self, value_id: int) -> bool:
        return bool(self.reads[value_id] or self.pending_readers[value_id])

    def _execute(self, op_id: int) -> None:
        """Runs ``op_id``, whose inputs are alive and locked once for it."""
        op = self.ops[op_id]
        self._settle(op_id)
        new = [v for v in op.outputs if not self.alive[v]]
        there = [v for v in op.outputs if self.alive[v]]
        for value_id in there:
            self._lock(value_id)
        self._make_room(op, new)
        self._settle(op_id)  # an eviction just now may have counted on running it again
        for value_id in there:
            self._unlock(value_id)
        self.order.append(op_id)
        self.steps += 1
        if self.ran[op_id]:
            self.spare_s -= self.op_time_s[op_id]
            if self.spare_s <= 0:
                raise StuckError("a faster schedule is known")
        self.ran[op_id] = True
        for value_id in new:
            self.alive[value_id] = self.born[value_id] = True
            self.held += self.nbytes[value_id]
            self.changed[value_id] = self.stale[value_id] = None
        for value_id in self.inputs[op_id]:
            self._unlock(value_id)
        for v in (*self.inputs[op_id], *op.outputs):
            if self.alive[v] and not (self.locks[v] or self.kept[v] or self._wanted(v)):
                self._drop(v)

    def _settle(self, op_id: int) -> None:
        """Notes that ``op_id`` runs now, and is pending no more."""
        if self.pending[op_id]:
            self.pending[op_id] = False
            self.earliest[op_id], self.latest[op_id] = len(self.base), -1
            for value_id in self.inputs[op_id]:
                self.pending_readers[value_id].pop(op_id, None)

    def _drop(self, value_id: int) -> None:
        self.alive[value_id] = False
        self.open[value_id] = False
        self.held -= self.nbytes[value_id]
        self.changed[value_id] = None

    def _mark_children(self) -> None:
        """Has the values appraised again that are computed from what came or went, directly or
        through missing ones: what their recomputation takes has changed."""
        stack, seen = list(self.changed), set(self.changed)
        while stack:
            for child in self.graph.children[stack.pop()]:
                if child not in seen:
                    seen.add(child)
                    if self.alive[child]:
                        self.stale[child] = None
                    elif self.born[child]:
                        stack.append(child)
        self.steps += len(seen) // OPS_PER_STEP
        self.changed.clear()

    def _needed(self, op: Op, new: list[int]) -> int:
        """Returns bytes to allocate before ``op`` can run and compute ``new``."""
        needed = sum(self.nbytes[v] for v in new) + self.problem.profile.op_workspace_bytes[op.id]
        if self._takes_over(op, new):
            needed -= reused_bytes(op, self.graph.values, self._dying(op))
        return needed

    def _takes_over(self, op: Op, new: list[int]) -> bool:
        """Returns whether buffers can be taken over: not by outputs that are there already."""
        return bool(op.may_reuse) and not any(self.nbytes[v] for v in op.outputs if v not in new)

    def _dying(self, op: Op) -> set[int]:
        """Returns the inputs whose buffers ``op`` takes over where they are of the right size."""
        return {
            v
            for v in op.may_reuse
            if self.locks[v] == 1 and self.alive[v] and not self.kept[v] and not self._wanted(v)
        }

    def _given_up(self, op: Op, new: list[int]) -> list[int]:
        """Returns inputs that are read again later, whose buffers ``op`` takes over if they are
        computed again for that."""
        if not self._takes_over(op, new):
            return []
        dying = self._dying(op)
        known = reused_bytes(op, self.graph.values, dying)
        return [
            v
            for v in op.may_reuse
            if v not in dying
            and self.locks[v] == 1
            and self._is_evictable(v)
            and reused_bytes(op, self.graph.values, dying | {v}) == known + self.nbytes[v]
        ]

    def _make_room(self, op: Op, new: list[int]) -> None:
        # An eviction can make an input of the op wanted again, whose buffer can then not be taken
        # over: ask every time.
        while self.held + (needed := self._needed(op, new)) > self.budget:
            stuck = StuckError(f"{self.held + needed} bytes needed")
            if self.deadline.is_over:
                raise stuck
            self._refresh()
            given_up = self._given_up(op, new)
            for value_id in given_up:
                self._appraise(value_id)
            ids = np.concatenate([np.flatnonzero(self.open), np.array(given_up, dtype=np.int64)])
            if not (len(ids) and self._evict_best(ids)):
                raise stuck

    def _evict_best(self, ids: npt.NDArray[np.int64]) -> bool:
        """Evicts the value with the least score that can go; returns whether one could."""
        distance = np.maximum(self.need[ids] - self.now, 0.5)
        gain = self.size[ids] * distance**self.policy.distance
        score = self.cost[ids] ** self.policy.cost / gain
        while score[at := int(np.argmin(score))] < math.inf:
            value_id = int(ids[at])
            if self.looked_at[value_id] < math.inf:
                self._look_further(value_id)
                score[at] = self.cost[value_id] ** self.policy.cost / gain[at]
            elif self._evict(value_id):
                return True
            else:
                self.open[value_id] = False  # until what it is computed from comes or goes
                score[at] = math.inf
        return False

    def _is_evictable(self, value_id: int) -> bool:
        producer = self.producer[value_id]
        return (
            producer >= 0
            and self.alive[value_id]
            and not self.kept[value_id]
            and self.last_run[producer] >= self.now
        )

    def _refresh(self) -> None:
        self._mark_children()
        for value_id in self.stale:
            self.open[value_id] = usable = not self.locks[value_id] and self._is_evictable(value_id)
            if usable:
                self._appraise(value_id)
        self.stale.clear()

    def _appraise(self, value_id: int) -> None:
        """Notes what the eviction of a value would cost at the least, and when it will be needed
        again."""
        self.looked_at[value_id] = 1
        self.cost[value_id] = self.op_time_s[self.producer[value_id]] + 0.01 * self.tick_s
        pending = (self.earliest[reader] for reader in self.pending_readers[value_id])
        self.need[value_id] = min([*self.reads[value_id][-1:], *pending], default=len(self.base))

    def _look_further(self, value_id: int) -> None:
        """Looks at more of the ops that the eviction of a value would have run again."""
        most = LOOKED_AT_AGAIN * self.looked_at[value_id]
        missing = self._missing(self.producer[value_id], most)
        self.looked_at[value_id] = math.inf if len(missing) < most else most
        self.cost[value_id] = sum(self.op_time_s[i] for i in missing) + 0.01 * self.tick_s

    def _missing(self, op_id: int, limit: float = math.inf) -> list[int]:
        """Returns ``op_id`` and the ops that must run before it could run now, at most ``limit`` of
        them."""
        found, stack = {op_id: None}, [op_id]
        while stack and len(found) < limit:
            for value_id in self.inputs[stack.pop()]:
                producer = self.producer[value_id]
                if not self.alive[value_id] and producer not in found:
                    found[producer] = None
                    stack.append(producer)
        self.steps += len(found) // OPS_PER_STEP
        return list(found)

    def _evict(self, value_id: int) -> bool:
        """Evicts a value if it can be computed again whenever it will be asked for."""
        producer = self.producer[value_id]
        readers = self.pending_readers[value_id]
        base_need = self.reads[value_id][-1:]
        latest = max(base_need + [self.latest[r] for r in readers])
        earliest = min(base_need + [self.earliest[r] for r in readers])
        closure = self._missing(producer)
        if any(self.last_run[op_id] < latest for op_id in closure):
            return False
        self._drop(value_id)
        for op_id in closure:
            self.pending[op_id] = True
            self.latest[op_id] = max(self.latest[op_id], latest)
            self.earliest[op_id] = min(self.earliest[op_id], earliest)
            for parent in self.inputs[op_id]:
                self.pending_readers[parent][op_id] = None
                self.stale[parent] = None
        return True


def _small_values(problem: Problem) -> list[bool]:
    """Returns which values are kept for good: the smallest ones, as many as hold :data:`KEPT_SHARE`
    of the budget together. Of a step in slices, those from which only as small ones are computed
    are not: these are."""
    graph, in_slices = problem.graph, is_sliced(problem.graph)
    kept, left = [False] * len(graph.values), int(KEPT_SHARE * (problem.budget_bytes or 0))
    for value in sorted(graph.values, key=lambda value: value.nbytes):
        made = [graph.values[child].nbytes for child in graph.children[value.id]]
        is_a_part = in_slices and bool(made) and max(made) <= value.nbytes
        if value.producer is not None and not is_a_part:
            left -= value.nbytes
            kept[value.id] = left >= 0
    return kept
