"""Makes a memory-aware order without recomputation.

In it, ops that free memory run as soon as they can, and ops that take memory as late as they can.

Frameworks list ops in the order in which they were traced: all weight gradients stay alive until
the optimizer runs at the end of the step, although an update may run as soon as its gradient is
there and the last reader of its variable has run. No rematerialization paper uses that freedom. It
lowers the bytes alive at no cost in time, at the peak or below it: while all weight gradients wait
for the end, no recomputation reaches a budget of half the peak.

It is list scheduling over the default order, in two passes. Forwards: before the next op of the
default order runs, ops that are ready are moved ahead of it if less memory is alive after them,
alone or followed by their own descendants. Looking at descendants also moves an optimizer with
slots (several ops per weight, which first take memory), and not only plain SGD. An op that waits
only for a few small values that are not computed yet (the learning rate, read once per weight)
takes their producers along. In such a run of ops, it takes large ones along, too (the momentum
times its decay), which must pay for themselves before the run ends. An op that makes little of much
(a weight gradient, a mean) runs at once: the sooner it has read an activation, the longer that can
be gone.

Backwards: an op that takes more than it frees (a gradient spread out to the size of an activation)
runs as late as it can. At the peak of a step with recomputation a handful of activations are alive;
their number depends on such ops.

Known limits: the forward and backward ops keep their relative order unless they shrink memory; the
order is a heuristic.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.core.topology import predecessors

CLUSTER_OPS = 48
"""Number of ops that are moved ahead as one run, at most."""
PULLED_OPS = 8
"""Number of ops that are run early because another op waits for their outputs, at most."""
SMALL_SHARE = 1 / 8
"""Outputs are small below this share of the largest input: of the op that waits for them, or of
their own op."""
Orders = tuple[tuple[int, ...], ...]
_ORDERS: WeakKeyDictionary[Graph, Orders] = WeakKeyDictionary()
"""The orders to choose from, the default one first, whatever the budget. They are remembered: one
``fit`` asks for them again and again, and they take half of the time of a first greedy schedule."""


def base_orders(problem: Problem) -> Orders:
    """Returns the memory-aware order of the needed ops, and the default one if that is another.

    The first one is no further over the budget than the default order. Without a budget, and where
    both fit, its peak is not above that of the default order.
    """
    graph = problem.graph
    if (orders := _ORDERS.get(graph)) is None:
        hoisted = tuple(_Hoist(graph).run())
        default = tuple(sorted(graph.needed))
        _ORDERS[graph] = orders = default, _postponed(graph, hoisted), hoisted
    least = min(orders, key=lambda order: _over_budget(problem, order))
    return tuple(dict.fromkeys((least, orders[0])))


def _over_budget(problem: Problem, order: Sequence[int]) -> tuple[float, int]:
    """Returns bytes over the budget times seconds, summed over the order, and the peak.

    It sums over seconds and not over positions: many quick ops (updates) that run where much is
    alive do not keep it alive for long.
    """
    live = live_bytes(problem, Schedule(tuple(order)))
    budget = live.max(initial=0) if problem.budget_bytes is None else problem.budget_bytes
    times = [problem.profile.op_time_s[op_id] for op_id in order]
    return float(np.maximum(live - budget, 0) @ np.asarray(times, dtype=np.float64)), int(
        live.max(initial=0)
    )


def _postponed(graph: Graph, base: Sequence[int]) -> tuple[int, ...]:
    """Returns a legal order, changed so that ops which take more than they free run late.

    The order recomputes nothing. It is walked from its end: an op whose followers have all been
    placed comes right before them, unless the inputs that it reads last hold more bytes than its
    outputs.
    """
    before: dict[int, list[int]] = {}
    waiting = dict.fromkeys(base, 0)  # ops that must run after it and have no place yet
    for op_id in base:
        producers = (graph.values[v].producer for v in graph.ops[op_id].inputs)
        before[op_id] = [
            p
            for p in dict.fromkeys((*producers, *graph.ops[op_id].after))
            if p is not None and p in graph.needed
        ]
        for earlier in before[op_id]:
            waiting[earlier] += 1
    alive = set(graph.outputs)

    def growth(op_id: int) -> int:
        op = graph.ops[op_id]
        freed = {v for v in op.inputs if v not in alive and graph.values[v].producer is not None}
        return sum(graph.values[v].nbytes for v in op.outputs) - sum(
            graph.values[v].nbytes for v in freed
        )

    backwards: dict[int, None] = {}
    for last in reversed(base):
        stack = [last]
        while stack:
            op_id = stack.pop()
            if op_id in backwards:
                continue
            backwards[op_id] = None
            alive.update(graph.ops[op_id].inputs)
            for earlier in before[op_id]:
                waiting[earlier] -= 1
            ready = [earlier for earlier in reversed(before[op_id]) if not waiting[earlier]]
            stack += sorted((earlier for earlier in ready if growth(earlier) >= 0), key=growth)
    return tuple(reversed(backwards))


class _Fresh:
    """Holds the ops that have to be examined, because they may be moved ahead.

    There is one list for each of the three kinds of :meth:`_Hoist._next_run`, in the order in which
    the ops first came.
    """

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.heaps: dict[int, list[tuple[int, int]]] = {kind: [] for kind in (0, 1, CLUSTER_OPS)}
        self.readers: dict[int, set[int]] = defaultdict(set)

    def push(self, op_id: int) -> None:
        """Has an op examined."""
        self.place.setdefault(op_id, len(self.place))
        for kind in self.heaps:
            self._push(op_id, kind)

    def _push(self, op_id: int, kind: int) -> None:
        heapq.heappush(self.heaps[kind], (self.place[op_id], op_id))

    def pop(self, kind: int) -> int | None:
        """Returns the next op to examine for a kind; ``None`` where all were examined."""
        heap = self.heaps[kind]
        if not heap:
            return None
        first = heapq.heappop(heap)
        while heap and heap[0] == first:
            heapq.heappop(heap)
        return first[1]

    def watch(self, op_id: int, read: Collection[int]) -> None:
        """Has an op that leads no run examined again once a state that was read changes.

        Args:
            read: the states that the examination read: an op's, or, written as ~v, the reads to
                come of value v.
        """
        for key in read:
            self.readers[key].add(op_id)

    def changed(self, key: int) -> None:
        """Has the ops examined again that watch a state."""
        for op_id in self.readers.pop(key, ()):
            self._push(op_id, CLUSTER_OPS)


class _Hoist:
    """Moves ops of the default order ahead: the first pass of the module docstring."""

    def __init__(self, graph: Graph):
        self.ops, self.base = graph.ops, sorted(graph.needed)
        self.needed = graph.needed
        self.nbytes = [value.nbytes for value in graph.values]
        self.readers = graph.readers
        self.producer = [value.producer for value in graph.values]
        # reads that are still to come; the end of the step reads the outputs
        self.unread = [0] * len(graph.values)
        for value_id in graph.outputs:
            self.unread[value_id] += 1
        # number of ops that must run before each op; an op that is not needed waits for ever
        self.waiting = [1] * len(self.ops)
        self.followers: list[list[int]] = [[] for _ in self.ops]
        for op_id in self.base:
            before = predecessors(graph, op_id)
            self.waiting[op_id] = len(before)
            for earlier in before:
                self.followers[earlier].append(op_id)
            for value_id in dict.fromkeys(self.ops[op_id].inputs):
                self.unread[value_id] += 1
        self.done = [False] * len(self.ops)
        self.order: list[int] = []
        self.fresh = _Fresh()

    def run(self) -> list[int]:
        """Returns the order."""
        for at, op_id in enumerate(self.base):
            if self.done[op_id]:
                continue
            following = self.base[at + 1] if at + 1 < len(self.base) else -1
            self.fresh = _Fresh()
            self._commit(op_id)
            while run := self._next_run(following):
                for member in run:
                    self._commit(member)
        return self.order

    def _next_run(self, following: int) -> list[int]:
        """Chooses the ops to move ahead next; empty where no op is worth it.

        First comes an op whose result is small beside what it reads, then one that shrinks memory
        by itself, then a run of ops that does.
        """
        for longest in (0, 1, CLUSTER_OPS):
            while (candidate := self.fresh.pop(longest)) is not None:
                if self.done[candidate]:
                    continue
                if not longest:
                    run = [candidate] if self._reduces(candidate) else []
                elif longest > 1 and candidate == following:
                    run = []
                else:
                    run = self._shrinking_cluster(candidate, longest)
                if run:
                    self.fresh.push(candidate)  # it may be left: a run can end before its first op
                    return run
        return []

    def _commit(self, op_id: int) -> None:
        """Schedules an op.

        Ops are examined again that became ready, that may now free something, or that watch a
        state that has changed.
        """
        op = self.ops[op_id]
        self.done[op_id] = True
        self.order.append(op_id)
        self.fresh.changed(op_id)
        for value_id in dict.fromkeys(op.inputs):
            self.unread[value_id] -= 1
            if self.unread[value_id] <= CLUSTER_OPS:
                self.fresh.changed(~value_id)
            if self.unread[value_id] == 1:  # whoever reads it last now frees it
                for reader in self.readers[value_id]:
                    if not self.done[reader] and not self.waiting[reader]:
                        self.fresh.push(reader)
        for follower in self.followers[op_id]:
            self.waiting[follower] -= 1
            if self.waiting[follower] <= CLUSTER_OPS:
                self.fresh.changed(follower)
            if self.waiting[follower] <= PULLED_OPS:
                self.fresh.push(follower)

    def _reduces(self, op_id: int) -> bool:
        """Returns whether an op that is ready makes little of much."""
        op = self.ops[op_id]
        most = max((self.nbytes[v] for v in op.inputs if self.producer[v] is not None), default=0)
        return (
            not self.waiting[op_id]
            and 0 < sum(self.nbytes[v] for v in op.outputs) <= SMALL_SHARE * most
        )

    def _pulled(
        self, op_id: int, share: float, read: set[int], run: Collection[int] = ()
    ) -> list[int] | None:
        """Returns the ops that must run before ``op_id`` can, besides ``run``.

        Returns ``None`` when they are many, or their outputs hold more than ``share`` of the
        largest input of ``op_id``.
        """
        missing: dict[int, None] = {}
        stack = [op_id]
        room = int(share * max((self.nbytes[v] for v in self.ops[op_id].inputs), default=0))
        while stack:
            op = self.ops[stack.pop()]
            before = [*(p for v in op.inputs if (p := self.producer[v]) is not None), *op.after]
            for earlier in before:
                if (
                    self.done[earlier]
                    or earlier in missing
                    or earlier in run
                    or earlier not in self.needed
                ):
                    continue
                read.add(earlier)
                room -= sum(self.nbytes[v] for v in self.ops[earlier].outputs)
                if room < 0 or len(missing) == PULLED_OPS:
                    return None
                missing[earlier] = None
                stack.append(earlier)
        return sorted(missing)

    def _delta(self, op_id: int, unread: dict[int, int]) -> int:
        """Returns bytes alive after ``op_id`` minus bytes alive before it."""
        op = self.ops[op_id]
        delta = sum(self.nbytes[v] for v in op.outputs if self.unread[v])
        for value_id in dict.fromkeys(op.inputs):
            left = unread.get(value_id, self.unread[value_id]) - 1
            unread[value_id] = left
            if not left and self.producer[value_id] is not None:
                delta -= self.nbytes[value_id]
        return delta

    def _shrinking_cluster(self, first: int, longest: int) -> list[int]:
        """Returns the shortest run of ready ops, from ``first`` on, after which less is alive.

        Where the last op has no outputs, no more alive is enough. Returns an empty list where there
        is no such run.
        """
        unread: dict[int, int] = {}
        waiting: dict[int, int] = {}
        run: dict[int, None] = {}
        total = 0
        ready, read = [first], {first}
        if self.waiting[first]:
            pulled = self._pulled(first, SMALL_SHARE, read) if longest > 1 else None
            ready = [] if pulled is None else [*pulled, first]
            waiting.update(dict.fromkeys(ready, 0))
        while len(run) < longest:
            if not ready and run:
                ready = self._with_pulled(run, read)
                waiting.update(dict.fromkeys(ready, 0))
            if not ready:
                break
            op_id = ready.pop(0)
            total += self._delta(op_id, unread)
            run[op_id] = None
            if total < 0 or (
                total == 0 and not any(self.nbytes[v] for v in self.ops[op_id].outputs)
            ):
                return list(run)
            for follower in self.followers[op_id]:
                waiting[follower] = waiting.get(follower, self.waiting[follower]) - 1
                if not waiting[follower]:
                    ready.append(follower)
        if longest > 1:  # a single op is examined again anyway when something changes for it
            read.update(run, waiting, (~value_id for value_id in unread))
            self.fresh.watch(first, read)
        return []

    def _with_pulled(self, run: Collection[int], read: set[int]) -> list[int]:
        """Returns a follower of ``run``, preceded by the few other ops that it waits for.

        Returns an empty list where all followers wait for more.
        """
        for op_id in run:
            for follower in self.followers[op_id]:
                if follower not in run and self.waiting[follower] <= PULLED_OPS:
                    pulled = self._pulled(follower, 1.0, read, run)
                    if pulled:
                        return [*pulled, follower]
        return []
