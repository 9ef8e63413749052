"""Reads the forward phase of any graph as a chain of cuts, for the literature's chain algorithms.

A cut after forward position ``p`` separates positions up to ``p`` from the later ones; the values
that cross it are all that later forward ops read. Keeping the crossing values of a few cuts
therefore lets everything between two cuts be recomputed from the first of them, on any graph. A cut
crossed by one value is an articulation point; in a chain every cut is one. Taking the crossing
*set* is what makes the linearized form recompute correctly where a single op is no separator;
keeping only the op before the cut would recompute arbitrarily far back.

In a problem without phases the forward phase is taken to end where the store-all schedule has its
peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.core.topology import predecessors

#: A value this many times smaller than the largest does not keep a cut from being an articulation
#: point.
NEGLIGIBLE = 1024


@dataclass(frozen=True)
class Linearized:
    """Holds the forward ops of a problem in default order.

    Args:
        problem: the problem.
    """

    problem: Problem

    @cached_property
    def default_order(self) -> tuple[int, ...]:
        return Schedule.store_all(self.problem.graph).order

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Returns ids of the forward ops."""
        order = self.default_order
        ops = self.problem.graph.ops
        if any(ops[i].phase != FORWARD for i in order):
            return tuple(i for i in order if ops[i].phase == FORWARD)
        if not order:
            return ()
        return order[: int(np.argmax(live_bytes(self.problem, Schedule(order)))) + 1]

    @cached_property
    def position(self) -> dict[int, int]:
        """Returns forward op id → position."""
        return {op_id: at for at, op_id in enumerate(self.forward)}

    @cached_property
    def last_forward_read(self) -> dict[int, int]:
        """Returns each value of the forward phase → the position of its last forward reader.

        A value without one has its own position.
        """
        graph = self.problem.graph
        last: dict[int, int] = {}
        for at, op_id in enumerate(self.forward):
            for value_id in graph.ops[op_id].inputs:
                if value_id in last:
                    last[value_id] = at
            last.update(dict.fromkeys(graph.ops[op_id].outputs, at))
        return last

    @cached_property
    def crossing_counts(self) -> list[int]:
        """Returns for every forward position the number of values that cross the cut after it.

        Negligibly small values do not count.
        """
        values = self.problem.graph.values
        largest = max((values[v].nbytes for v in self.last_forward_read), default=0)
        delta = [0] * (len(self.forward) + 1)
        for value_id, last in self.last_forward_read.items():
            if values[value_id].nbytes * NEGLIGIBLE >= largest:
                maker = self.problem.graph.maker(value_id)  # it was computed in the forward phase
                delta[self.position[maker]] += 1
                delta[last] -= 1
        return [int(c) for c in np.cumsum(delta[:-1])]

    @cached_property
    def comes_first(self) -> bool:
        """Returns whether the whole forward phase may run before every other op.

        Then no forward op needs or must follow one of the other ops.
        """
        others = {i for i in self.default_order if i not in self.position}
        return all(others.isdisjoint(predecessors(self.problem.graph, i)) for i in self.forward)

    @cached_property
    def all_cuts(self) -> tuple[int, ...]:
        """Returns every forward position but the last."""
        return tuple(range(len(self.forward) - 1))

    @cached_property
    def articulation_cuts(self) -> tuple[int, ...]:
        """Returns the forward positions with at most one value crossing the cut after them."""
        return tuple(at for at in self.all_cuts if self.crossing_counts[at] <= 1)
