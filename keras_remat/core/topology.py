"""Finds what must run before an op or after it: predecessors, ancestors and descendants.

Plain walks and not networkx: a graph of 15,000 ops is asked thousands of times, and a copy of it
would have to be kept in step.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from keras_remat.core.graph import Graph


def predecessors(graph: Graph, op_id: int) -> set[int]:
    """Returns the needed ops that an op directly depends on.

    These are the producers of the values it reads, and the ops in its ``after``.

    >>> from keras_remat.core.graph import chain_example
    >>> sorted(predecessors(chain_example(), 4))
    [0, 3]
    """
    return graph.producers(op_id) | (set(graph.ops[op_id].after) & graph.needed)


def ancestors_of(graph: Graph, op_id: int) -> set[int]:
    """Returns the ops that have run before an op first runs.

    >>> from keras_remat.core.graph import chain_example
    >>> sorted(ancestors_of(chain_example(), 3))
    [0, 1, 2]
    """
    found: set[int] = set()
    stack = [op_id]
    while stack:
        fresh = predecessors(graph, stack.pop()) - found
        found |= fresh
        stack += fresh
    return found


def descendants_of(graph: Graph, op_id: int) -> set[int]:
    """Returns the ops that cannot have run before an op first runs.

    >>> from keras_remat.core.graph import chain_example
    >>> sorted(descendants_of(chain_example(), 2))
    [3, 4]
    """
    found = {op_id}
    for op in graph.ops[op_id + 1 :]:
        if not found.isdisjoint((*graph.producers(op.id), *op.after)):
            found.add(op.id)
    return found - {op_id}


def last_runs(graph: Graph, base: Sequence[int]) -> list[int]:
    """Returns for each op the position in a base order before which it may run again.

    That is the position of the first op that must follow it (S4), the end where none must, and -1
    where S3 forbids that it runs again.

    >>> from keras_remat.core.graph import chain_example
    >>> last_runs(chain_example(), (0, 1, 2, 3, 4))
    [5, 5, 5, 5, 5]
    """
    last = [len(base) if op.recomputable else -1 for op in graph.ops]
    for position, op_id in enumerate(base):
        for earlier in graph.ops[op_id].after:
            last[earlier] = min(last[earlier], position)
    return last


def topological_order(
    before: Mapping[Any, Collection[Any]], rank: Callable[[Any], Any]
) -> list[Any]:
    """Returns the keys in an order in which each follows all keys that must come before it.

    Of the keys that can come next, the one with the smallest rank does; of equal ranks, the
    smallest key. Keys in a cycle, and behind one, are left out.

    Args:
        before: key → the distinct keys that must come before it.
        rank: returns the rank of a key, which can be compared.

    >>> topological_order({"c": ["a"], "b": ["a"], "a": []}, rank=lambda key: key != "c")
    ['a', 'c', 'b']
    """
    waiting = {key: len(earlier) for key, earlier in before.items()}
    followers: dict[Any, list[Any]] = defaultdict(list)
    for key, all_earlier in before.items():
        for earlier in all_earlier:
            followers[earlier].append(key)
    ready = [(rank(key), key) for key, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        key = heapq.heappop(ready)[1]
        order.append(key)
        for follower in followers[key]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (rank(follower), follower))
    return order
