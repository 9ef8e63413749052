"""Walks the default order, and before each op recomputes the dropped values that it reads.

A policy only says when values are dropped. The walk turns that into a legal order: missing values
are collected together with the missing values they are computed from, and recomputed in the default
order. An op that may not run again (not recomputable, or an op that must follow it has already run)
makes the policy impossible for its outputs. These are then pinned (never dropped) and the walk
starts over. That ends because every round pins more. Dropping a value means only that later readers
recompute it: how long an instance really lives follows from the order
(:mod:`keras_remat.core.simulate`).

Three walks recompute on demand. They stay three, because each knows other facts when it decides;
one walk for all would have a switch at every decision. This one asks its policy between ops, knows
no budget, and collects all missing ops before it runs the first. DTR's
(:mod:`keras_remat.solvers.papers.dtr`) decides when memory is full, so it locks the values that ops
under way will read; it is a policy here, and shares the rule which ops may not run again.
:mod:`keras_remat.solvers.search.eviction` never starts over: it knows the last position at which
each op may run, and which evicted ops wait for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.problem import Problem


class Walk:
    """Makes one pass over the default order.

    Args:
        problem: the graph.
        pinned: values that are never dropped.
        deadline: no op runs once it is over, and ``TimeoutError`` is raised.

    Attributes:
        order: the ops run so far.
        alive: ids of the values that later ops may read without recomputing them.
        stuck: values that were missing but could not be recomputed; the order is useless unless
            this is empty.
        barred: ops that may not run (again), because they or a follower already did.
    """

    def __init__(
        self,
        problem: Problem,
        pinned: frozenset[int] = frozenset(),
        deadline: Deadline = NO_DEADLINE,
    ):
        self.graph, self.deadline = problem.graph, deadline
        self.pinned = pinned
        self.order: list[int] = []
        self.alive = {value.id for value in self.graph.values if value.producer is None}
        self.stuck: set[int] = set()
        self.barred: set[int] = set()

    def missing(self, op_id: int) -> list[int]:
        """Returns the ops, in the default order, that must run so that ``op_id`` has its inputs."""
        found: set[int] = set()
        stack = list(self.graph.ops[op_id].inputs)
        while stack:
            value_id = stack.pop()
            if value_id in self.alive:
                continue
            producer = self.graph.maker(value_id)  # step inputs are always alive
            if producer in self.barred:
                self.stuck.add(value_id)
                self.alive.add(value_id)
            elif producer not in found:
                found.add(producer)
                stack.extend(self.graph.ops[producer].inputs)
        return sorted(found)

    def run(self, op_id: int) -> None:
        """Runs an op whose inputs are alive."""
        if self.deadline.is_over:
            raise TimeoutError("there is no time left for the order")
        op = self.graph.ops[op_id]
        self.order.append(op_id)
        self.alive.update(op.outputs)
        if not op.recomputable:
            self.barred.add(op_id)
        self.barred.update(op.after)

    def demand(self, op_id: int) -> None:
        """Recomputes the missing inputs of ``op_id``, then runs it.

        If it may not run again, its missing outputs are stuck.
        """
        if op_id in self.barred:
            self.stuck.update(v for v in self.graph.ops[op_id].outputs if v not in self.alive)
            self.alive.update(self.graph.ops[op_id].outputs)
            return
        for earlier in self.missing(op_id):
            self.run(earlier)
        self.run(op_id)

    def drop(self, value_ids: Iterable[int]) -> None:
        """Drops values, except pinned ones and step inputs."""
        for value_id in value_ids:
            if value_id not in self.pinned and self.graph.values[value_id].producer is not None:
                self.alive.discard(value_id)


def order_of(
    problem: Problem, policy: Callable[[Walk], None], deadline: Deadline = NO_DEADLINE
) -> list[int]:
    """Returns the order that a policy leads to.

    Args:
        problem: the graph; the budget plays no part.
        policy: drives one walk from its start to its end. It is called again with more pinned
            values when it dropped a value that cannot be recomputed.
        deadline: deadline for all walks.

    Raises:
        TimeoutError: the deadline was over before a walk was complete.
    """
    pinned = frozenset(v for op in problem.graph.ops if not op.recomputable for v in op.outputs)
    while True:
        walk = Walk(problem, pinned, deadline)
        policy(walk)
        if not walk.stuck:
            return walk.order
        assert not walk.stuck <= pinned, (
            "a policy must not run an op for the first time after one that must follow it"
        )
        pinned |= walk.stuck
