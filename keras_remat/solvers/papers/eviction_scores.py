"""Computes the seven eviction scores of Dynamic Tensor Rematerialization.

Each is a numerator that is divided the same way.

Kirisame et al. 2021, arXiv 2006.09616, sec. 4.1 and appendix D. With c the seconds of an op, m the
bytes of a value, s the seconds since its last use and e* its evicted neighbourhood (evicted
ancestors and descendants reachable through evicted values only), the value with the smallest score
is evicted:

* ``h_DTR`` (c + c(e*)) / (m · s); ``h_DTR_eq`` the same with e* taken as the union of the
  neighbouring components of evicted ops, kept in a union-find that only ever grows (an op that runs
  again leaves, its cost is subtracted); ``h_DTR_local`` c / (m · s);
* ``MSPS`` (c + c(evicted ancestors)) / m; ``LRU`` 1 / s; ``size`` 1 / m; ``random``.

Exact neighbourhoods are cut off after ``MAX_NEIGHBOURS`` ops, which only matters on graphs of
thousands of ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_remat.core.graph import Graph

MAX_NEIGHBOURS = 400
SCORES = ("dtr", "eq", "local", "msps", "lru", "size", "random")


class Neighbourhood:
    """Holds the costs of the values that are evicted around one.

    Args:
        graph: the graph.
        op_time_s: seconds per op.
        evicted: per value whether it was computed and is gone; the owner keeps it up to date.
    """

    def __init__(self, graph: Graph, op_time_s: Sequence[float], evicted: Sequence[bool]):
        self._time = op_time_s
        self._evicted = evicted
        self._producer = [
            -1 if value.producer is None else value.producer for value in graph.values
        ]
        self._inputs = [op.inputs for op in graph.ops]
        self._outputs = [op.outputs for op in graph.ops]
        self._readers = graph.readers
        self._parent = list(range(len(graph.ops)))
        self._sum = [0.0] * len(graph.ops)
        # the node of the union-find an evicted op stands for, -1 when it is not evicted
        self._member = [-1] * len(graph.ops)

    def ancestors(self, value_id: int, seen: set[int]) -> float:
        """Returns the seconds of the ops that must run again before the producer of a value can.

        Adds these ops to ``seen``.
        """
        total = 0.0
        stack = [self._producer[value_id]]
        while stack and len(seen) < MAX_NEIGHBOURS:
            for v in self._inputs[stack.pop()]:
                producer = self._producer[v]
                if self._evicted[v] and producer not in seen:
                    seen.add(producer)
                    total += self._time[producer]
                    stack.append(producer)
        return total

    def descendants(self, value_id: int, seen: set[int]) -> float:
        """Returns the seconds of the evicted ops that would need the value if they ran again.

        Adds these ops to ``seen``.
        """
        total = 0.0
        stack = [value_id]
        while stack and len(seen) < MAX_NEIGHBOURS:
            for reader in self._readers[stack.pop()]:
                if reader not in seen:
                    gone = [v for v in self._outputs[reader] if self._evicted[v]]
                    if gone:
                        seen.add(reader)
                        total += self._time[reader]
                        stack.extend(gone)
        return total

    def exact(self, value_id: int) -> float:
        """Returns c(e*) in seconds."""
        seen = {self._producer[value_id]}
        return self.ancestors(value_id, seen) + self.descendants(value_id, seen)

    def neighbours(self, op_id: int) -> set[int]:
        """Returns the evicted ops next to an op: its inputs' producers and its outputs' readers."""
        found = {self._producer[v] for v in self._inputs[op_id] if self._evicted[v]}
        found.update(
            r for v in self._outputs[op_id] for r in self._readers[v] if self._member[r] >= 0
        )
        return found

    def equivalence(self, value_id: int) -> float:
        """Returns c(e*) in seconds, approximated by the components of the union-find."""
        roots = {
            self._find(self._member[i])
            for i in self.neighbours(self._producer[value_id])
            if self._member[i] >= 0
        }
        return sum(self._sum[root] for root in roots)

    def join(self, op_id: int) -> None:
        """Notes that an output of an op was evicted."""
        if self._member[op_id] >= 0:
            return
        node = len(self._parent)
        self._parent.append(node)
        self._sum.append(self._time[op_id])
        self._member[op_id] = node
        for other in self.neighbours(op_id):
            if self._member[other] >= 0:
                a, b = self._find(self._member[other]), self._find(node)
                if a != b:
                    self._parent[a] = b
                    self._sum[b] += self._sum[a]

    def leave(self, op_id: int) -> None:
        """Notes that an op ran again: its cost leaves the component, which is not split."""
        node = self._member[op_id]
        if node >= 0:
            root = self._find(node)
            self._sum[root] = max(0.0, self._sum[root] - self._time[op_id])
            self._member[op_id] = -1

    def _find(self, node: int) -> int:
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node
