"""What must run before what: predecessors, ancestors and descendants of ops.

Plain walks and not networkx: a graph of 15,000 ops is asked thousands of times, and a copy of it
would have to be kept in step.
"""

from __future__ import annotations

from keras_remat.core.graph import Graph


def predecessors(graph: Graph, op_id: int) -> set[int]:
    """Returns the needed ops that must run just before an op: the producers of what it reads, and
    what it must follow.

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
        if any(graph.values[v].producer in found for v in op.inputs) or any(
            earlier in found for earlier in op.after
        ):
            found.add(op.id)
    return found - {op_id}
