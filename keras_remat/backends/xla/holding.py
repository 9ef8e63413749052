"""Which results of a plan an optimization barrier has to hold, so that they exist on a GPU.

XLA:GPU computes an elementwise value, or a slice, inside of the kernels that read it, however late
those come, and until then keeps what the value is made of. Where a plan computes such a value to
let go of something, and a product or a convolution comes before it is read, it is held: then it
exists when the plan says so. The gradient of a skip connection is such a value, a slice of the
gradient of a concatenation three times as large.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from keras_remat.backends.xla.fusion import HELD_BYTES, Kinds
from keras_remat.core.graph import Graph


def waiting(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions of an order whose result has to be held.

    Args:
        graph: whose ops are clusters.
        order: op ids.
        kinds: the framework's names.
    """
    values, inside = graph.values, kinds.elementwise | kinds.cut
    fusible = kinds.fusible | kinds.reductions
    first: dict[int, int] = {}  # op's position → where its result is read first
    last: dict[tuple[int, int], int] = {}  # value and where it was computed → where it is read last
    made: dict[int, int] = {}  # value → where it was computed last
    read: dict[int, list[tuple[int, int]]] = {}  # position → large values, and where computed
    products = []
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        size = max((values[v].nbytes for v in op.outputs), default=0)
        for value in op.inputs:
            if value in made:
                first.setdefault(made[value], at)
                last[value, made[value]] = at
        if op.kind in inside and len(op.outputs) == 1 and size >= HELD_BYTES:
            large = [v for v in op.inputs if v in made and values[v].nbytes * 8 >= size]
            read[at] = [(v, made[v]) for v in large]
        elif op.kind not in fusible and size >= HELD_BYTES:
            products.append(at)
        made.update(dict.fromkeys(op.outputs, at))

    def is_let_go(one: tuple[int, int], before: int) -> bool:
        after = bisect_right(products, last[one])
        return after < len(products) and products[after] < before

    return frozenset(
        at
        for at, inputs in read.items()
        if at in first and any(is_let_go(one, first[at]) for one in inputs)
    )


def read_from_memory(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions of an order whose result something reads that no kernel computes it in,
    a product for instance, before it is computed again.

    Args:
        graph, order, kinds: as of :func:`waiting`.
    """
    fusible = kinds.fusible | kinds.reductions
    made: dict[int, int] = {}  # value → where it was computed last
    found: set[int] = set()
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        if op.kind not in fusible:
            found.update(made[value] for value in op.inputs if value in made)
        made.update(dict.fromkeys(op.outputs, at))
    return frozenset(found)
