"""Runs Revolve: the fastest way through a uniform chain with a number of checkpoint slots.

Griewank, Walther 2000, *Algorithm 799: revolve*, ACM TOMS 26(1). With s slots and at most r runs of
every forward op a chain of β(s, r) = (s + r)! / (s! r!) ops can be reversed, so memory and work
grow with log n. When the backward phase asks for a forward position that is not kept, the forward
phase is run again from the nearest checkpoint below it, and the free slots are filled on the way at
the positions the binomial rule names.

It is written as a policy of :mod:`keras_remat.solvers.orders.demand` and not as Revolve's action
list, so that it works on every graph: a slot holds the values crossing one cut of the forward phase
(:mod:`keras_remat.solvers.orders.linearize`). In a chain that is one value, and the schedule is
Revolve's. The number of slots is searched: more slots are never slower on a chain, so the largest
number that fits the budget wins; but all numbers are tried where time allows, because bytes differ
along a real graph. Known limits: slots are counted, not weighed, so on chains that are not uniform
``chain_dp`` is better.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from math import comb

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.linearize import Linearized
from keras_remat.solvers.papers.chen import spread

MAX_RUNS = 30  # of any forward op: fewer slots would need more, and an order of quadratic length


def binomial_split(length: int, slots: int) -> int:
    """Returns how many ops to advance from a checkpoint before taking the next one.

    Args:
        length: number of forward ops to reverse, at least 2.
        slots: free slots for further checkpoints, at least 1.

    Returns:
        A number from 1 to ``length - 1``: the largest optimal one. With ``r`` the least number such
        that ``length <= comb(slots + 1 + r, r)``, the part above the new checkpoint is reversed
        with one slot less and must not need more than r runs, the part below it not more than r − 1
        (Griewank & Walther, sec. 2).
    """
    runs = 1
    while comb(slots + 1 + runs, runs) < length:
        runs += 1
    # reversible below with slots + 1 (the checkpoint's own is freed) and runs − 1
    below_most = comb(slots + runs, runs - 1)
    above_least = comb(slots + runs - 1, runs - 1)
    return max(1, min(below_most, length - above_least, length - 1))


def revolve_order(linear: Linearized, slots: int, deadline: Deadline = NO_DEADLINE) -> list[int]:
    """Returns the order that reverses the forward phase with a number of checkpoints.

    Args:
        linear: the problem's forward phase.
        slots: number of cuts whose crossing values may be kept at once, at least 0.
        deadline: deadline for the order.

    Raises:
        TimeoutError: the deadline was over before the order was complete.
    """
    return order_of(linear.problem, lambda walk: _Reversal(linear, slots, walk).run(), deadline)


class _Reversal:
    """Reverses the forward phase by a walk, with at most ``slots`` checkpoints.

    Attributes:
        checkpoints: forward positions of the cuts kept, ascending.
        alive: forward values that are alive.
    """

    def __init__(self, linear: Linearized, slots: int, walk: Walk):
        self.linear, self.slots, self.walk = linear, slots, walk
        self.graph, self.position = linear.problem.graph, linear.position
        self.last_read = linear.last_forward_read
        self.checkpoints: list[int] = []
        self.alive: set[int] = set()

    def run(self) -> None:
        """Runs the default order."""
        self._place(-1, len(self.linear.forward) - 1)
        for op_id in self.linear.default_order:
            if op_id in self.position:
                self._drop([v for v in self.alive if self.last_read[v] < self.position[op_id]])
                self.walk.demand(op_id)
                self.alive.update(self.graph.ops[op_id].outputs)
            else:
                self._rerun(op_id)

    def _is_kept(self, value_id: int) -> bool:
        """Returns whether a value crosses one of the checkpoints."""
        producer = self.graph.values[value_id].producer
        if producer is None:
            return True
        at = bisect_left(self.checkpoints, self.position[producer])
        return at < len(self.checkpoints) and self.checkpoints[at] < self.last_read[value_id]

    def _place(self, start: int, end: int) -> None:
        """Fills the free slots from a checkpoint at ``start`` to the wanted position ``end``."""
        free = self.slots - len(self.checkpoints)
        while free > 0 and end - start >= 2:
            # the start is one to reverse, too
            start += min(binomial_split(end - start + 1, free), end - start - 1)
            self.checkpoints.append(start)
            free -= 1
        self.checkpoints.sort()

    def _drop(self, value_ids: Iterable[int]) -> None:
        gone = [v for v in value_ids if not self._is_kept(v)]
        self.walk.drop(gone)
        self.alive.difference_update(gone)

    def _rerun(self, op_id: int) -> None:
        """Recomputes the missing inputs of a backward op, from the nearest checkpoint below."""
        ops, position, walk = self.graph.ops, self.position, self.walk
        target = max((position[i] for i in walk.missing(op_id) if i in position), default=None)
        if target is None:
            walk.demand(op_id)
            return
        del self.checkpoints[bisect_left(self.checkpoints, target) :]
        wanted = set(ops[op_id].inputs)
        self._drop(self.alive - wanted)
        self._place(self.checkpoints[-1] if self.checkpoints else -1, target)
        again = walk.missing(op_id)
        last_use = {v: at for at, i in enumerate(again) for v in (*ops[i].outputs, *ops[i].inputs)}
        for at, i in enumerate(again):
            walk.run(i)
            if i in position:
                self.alive.update(ops[i].outputs)
            touched = (*ops[i].inputs, *ops[i].outputs)
            done = (v for v in touched if v in self.alive and last_use[v] == at)
            self._drop([v for v in done if v not in wanted])
        walk.run(op_id)


def solve(incumbent: Incumbent, seed: int) -> None:
    """Runs Revolve with the best number of slots."""
    if incumbent.offer_store_all():
        return
    linear = Linearized(incumbent.problem)
    n = len(linear.forward)
    least = next((s for s in range(n) if comb(s + 1 + MAX_RUNS, MAX_RUNS) >= n), 0)
    with suppress(TimeoutError):
        for slots in spread(range(least, n), n - 1 - least):
            incumbent.offer(revolve_order(linear, slots, incumbent.deadline))
