"""Makes a smaller problem of an op-level graph: only big values, and the ops that touch them.

A traced train step has up to 15,000 ops, most of which work on scalars, shapes, keys and weights'
statistics. Their values are kept, so they need no decision. The coarse problem keeps the ops that
read or write a big value, and drops the others. The most bytes that small values hold at once are
added to the resident bytes. Dependencies through dropped ops and small values become values of zero
bytes; ``after`` is carried along the same paths. An order of the coarse problem is expanded by
putting every dropped op back at its place in the base order, or as close to it as dependencies
allow.

Known limits: small values are never recomputed, and ops that touch no big value are never moved on
their own. The expanded order is always simulated on the full problem, and that result counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes

SMALL_SHARE = 0.005
"""Share of the budget less the resident bytes that small values may hold at once."""


class Coarse:
    """Holds a coarse problem and the way back.

    Attributes:
        problem: the coarse problem; its store-all time is that of the coarse ops only.
        ops: the full problem's op for every coarse op.
    """

    def __init__(self, full: Problem, base: Sequence[int], threshold_bytes: int):
        """Coarsens ``full``.

        Args:
            full: the full problem, with a budget or without.
            base: a legal order of the needed ops without recomputation; coarse ops are numbered in
                this order.
            threshold_bytes: values of at least this size are big.
        """
        self.full, self.base, self.threshold_bytes = full, tuple(base), threshold_bytes
        graph = full.graph
        self._place = {op_id: at for at, op_id in enumerate(self.base)}
        self._big = big = [
            v.producer is not None and v.nbytes >= threshold_bytes for v in graph.values
        ]
        self.ops = tuple(
            i for i in self.base
            if full.profile.op_workspace_bytes[i] >= threshold_bytes
            or any(big[v] for v in graph.ops[i].inputs + graph.ops[i].outputs)
        )  # fmt: skip
        self._index = {op_id: at for at, op_id in enumerate(self.ops)}
        self._dropped = tuple(i for i in self.base if i not in self._index)
        self.problem = self._build()

    def _build(self) -> Problem:
        graph, profile = self.full.graph, self.full.profile
        reached, orders = self._paths()
        values: list[Value] = []
        number: dict[int, int] = {}  # big value of the full graph → value of the coarse graph
        made: list[tuple[int, ...]] = []
        for at, op_id in enumerate(self.ops):
            op = graph.ops[op_id]
            for value_id in op.outputs:
                if self._big[value_id]:
                    number[value_id] = len(values)
                    values.append(replace(graph.values[value_id], id=len(values), producer=at))
            # stands for the small values that depend on this op; an output, so that it is needed
            signal = len(values)
            values.append(Value(signal, f"{op.name}:small", 0, producer=at))
            made.append((*(number[v] for v in op.outputs if v in number), signal))
        ops = []
        for at, op_id in enumerate(self.ops):
            op = graph.ops[op_id]
            inputs = [number[v] for v in dict.fromkeys(op.inputs) if v in number]
            ops.append(
                Op(
                    at,
                    op.name,
                    op.kind,
                    (*inputs, *(made[source][-1] for source in reached[at])),
                    made[at],
                    op.phase,
                    op.recomputable,
                    tuple(orders[at]),
                    tuple(number[v] for v in op.may_reuse if v in number),
                )
            )
        kept = (
            *(number[v] for v in graph.outputs if v in number),
            *(outputs[-1] for outputs in made),
        )
        times = tuple(profile.op_time_s[i] for i in self.ops)
        workspace = tuple(profile.op_workspace_bytes[i] for i in self.ops)
        # nobody reads the batch here, but an allocator's replay wants to see it
        for value in graph.values:
            if value.producer is None and value.nbytes >= self.threshold_bytes:
                values.append(replace(value, id=len(values)))
        small = small_peak(self.full, self.base, self.threshold_bytes)
        costs = Profile(times, workspace, profile.resident_bytes + small)
        coarse = Graph(tuple(ops), tuple(values), kept)
        return Problem(coarse, costs, self.full.budget_bytes, self.full.name)

    def _paths(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the dependencies of each coarse op.

        The first list has the coarse ops that it depends on through small values, the second one
        those that it must follow (``after``).
        """
        graph = self.full.graph
        small_sources: dict[int, set[int]] = {}  # dropped op → coarse ops it depends on by values
        followed: dict[int, set[int]] = {}  # dropped op → coarse ops that must run before by after
        reached: list[list[int]] = []
        orders: list[list[int]] = []
        for op_id in self.base:
            op = graph.ops[op_id]
            sources: set[int] = set()
            follows: set[int] = set()
            for producer in graph.producers(op_id):
                if producer in self._index:
                    sources.add(self._index[producer])
                else:
                    sources |= small_sources[producer]
                    follows |= followed[producer]
            for earlier in op.after:
                if earlier in self._index:
                    follows.add(self._index[earlier])
                elif earlier in self._place:
                    sources |= small_sources[earlier]
                    follows |= followed[earlier]
            if op_id in self._index:
                at = self._index[op_id]
                direct = {
                    self._index[maker]
                    for v in op.inputs
                    if self._big[v] and (maker := graph.maker(v)) in self._index
                }
                reached.append(sorted(sources - direct))
                orders.append(sorted(follows - {at}))
            else:
                small_sources[op_id], followed[op_id] = sources, follows
        return reached, orders

    def project(self, order: Sequence[int]) -> tuple[int, ...]:
        """Returns a legal full order without the dropped ops, as a coarse order."""
        return tuple(self._index[op_id] for op_id in order if op_id in self._index)

    def expand(self, order: Sequence[int]) -> tuple[int, ...]:
        """Returns the order of all ops for a legal order of the coarse problem.

        A dropped op runs once, after position ``max(earliest, min(wish, latest))`` of the coarse
        order: ``earliest`` follows from the ops it needs, ``latest`` from the ops that need it, and
        ``wish`` is its place in the base order. All three grow along dependencies, so that sorting
        by that position and then by the base order is topological.
        """
        graph = self.full.graph
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, index in enumerate(order):
            first.setdefault(self.ops[index], at)
            last[self.ops[index]] = at
        earliest: dict[int, int] = {}
        wish: dict[int, int] = {}
        passed = -1
        for op_id in self.base:
            if op_id in self._index:
                passed = max(passed, first[op_id])
                continue
            op = graph.ops[op_id]
            needs = [first[p] if p in first else earliest[p] for p in graph.producers(op_id)]
            follows = [last[p] if p in last else earliest[p] for p in op.after if p in self._place]
            earliest[op_id], wish[op_id] = max([-1, *needs, *follows]), passed
        latest = dict.fromkeys(self._dropped, len(order))
        for op_id in reversed(self.base):
            op = graph.ops[op_id]
            point = first[op_id] - 1 if op_id in first else latest[op_id]
            for before in (*graph.producers(op_id), *graph.ops[op_id].after):
                if before in latest:
                    latest[before] = min(latest[before], point)
        buckets: list[list[int]] = [[] for _ in range(len(order) + 1)]
        for op_id in self._dropped:
            point = max(earliest[op_id], min(wish[op_id], latest[op_id]))
            buckets[point + 1].append(op_id)
        result = list(buckets[0])
        for at, index in enumerate(order):
            result.append(self.ops[index])
            result += buckets[at + 1]
        return tuple(result)


def small_value_threshold(problem: Problem, base: Sequence[int]) -> int:
    """Returns the size in bytes from which a value is big.

    It is the largest of some powers of two below the room (the budget less the resident bytes) for
    which smaller values never hold ``SMALL_SHARE`` of the room at once.
    """
    room = problem.room_bytes
    if room is None:
        raise ValueError("needs a budget")
    room = max(1, room)
    shifts = range(6, room.bit_length())
    first = bisect_left(
        shifts,
        True,
        key=lambda shift: small_peak(problem, base, room >> shift) <= SMALL_SHARE * room,
    )
    return max(1, room >> (6 + first))


def small_peak(problem: Problem, base: Sequence[int], threshold_bytes: int) -> int:
    """Returns the most bytes that values below a threshold hold at once in an order."""
    return int(live_bytes(problem, Schedule(tuple(base)), threshold_bytes).max(initial=0))
