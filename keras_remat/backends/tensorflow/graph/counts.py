"""Divides by the batch size where plain ``fit`` knows it only at run time.

A mean and its gradient divide by the count of averaged numbers. Our trace knows the batch size, so
the count is a constant, and Grappler turns the division into a product with the reciprocal, whose
last bit may differ. Keras's own step is traced for the sizes its data set promises. If batches may
have any size (the last one may be smaller), the count is computed from the batch, and the division
stays a division. A step that is lowered for such a fit divides, too. The planned graph is the same
in both cases.

Counts are recognized by how they are written: by TensorFlow's gradient of ``Mean``, or as the
product of a shape that begins with the batch size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import frexp, isfinite
from typing import Any

import numpy as np
import tensorflow as tf

from keras_remat.backends.tensorflow.graph.nodes import (
    constant,
    control_inputs,
    data_inputs,
    new_node,
    node_of,
)

_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
#: Ops between a shape and the count that is the divisor.
_PASSED = frozenset({"Cast", "Identity", "Prod"})
_TAPE = "gradient_tape/"
#: End of the name that Grappler gives a folded reciprocal; equal ones are one node.
_RECIPROCAL = "_recip"


def batch_counts(
    graph_def: Any, inputs: Collection[str], sizes: Collection[int | None]
) -> dict[str, float]:
    """Returns name → divisor of the divisions whose divisor depends on the batch size.

    Powers of two are left out, because their reciprocals are exact.

    Args:
        graph_def: the graph as traced, in traced order.
        inputs: names of the placeholders of the batch.
        sizes: first dimensions of the batch's tensors.
    """
    nodes = {node.name: node for node in graph_def.node}
    of_batch = set(inputs)
    found: dict[str, float] = {}
    for node in graph_def.node:
        sources = [node_of(tensor) for tensor in data_inputs(node)]
        if of_batch.isdisjoint(sources):
            continue
        of_batch.add(node.name)
        if node.op in _DIVISIONS and sources[0] in of_batch:
            count = _count(nodes, node, sizes)
            if count and isfinite(count) and frexp(count)[0] != 0.5:
                found[node.name] = count
    return found


def _count(nodes: Mapping[str, Any], division: Any, sizes: Collection[int | None]) -> float | None:
    """Returns the divisor of a division if it is a count of the batch."""
    divisor = nodes[node_of(data_inputs(division)[1])]
    passed = is_product = False
    while divisor.op in _PASSED:
        passed, is_product = True, is_product or divisor.op == "Prod"
        divisor = nodes[node_of(data_inputs(divisor)[0])]
    if divisor.op != "Const":
        return None
    shape = tf.make_ndarray(divisor.attr["value"].tensor)
    if shape.size != 1 and not (is_product and shape.ndim == 1):
        return None  # each column has a divisor of its own
    if passed and np.issubdtype(shape.dtype, np.integer):
        is_count = bool(shape.size) and int(shape.flat[0]) in sizes
    else:
        is_count = _TAPE in division.name and _scope(division) == _scope(divisor)
    return float(np.prod(shape, dtype=np.float64)) if is_count else None


def _scope(node: Any) -> str:
    return str(node.name).rpartition("/")[0]


def divisions(nodes: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, tuple[Any, Any]]:
    """Returns name → a constant and a division, for every product that Grappler made of a division
    by a count. They replace the product.

    Args:
        nodes: nodes of the optimized graph, by name.
        counts: result of :func:`batch_counts`.
    """
    result: dict[str, tuple[Any, Any]] = {}
    for name, count in counts.items():
        node = nodes.get(name)
        if node is None or node.op != "Mul":
            continue
        inputs = data_inputs(node)
        others = [tensor for tensor in inputs if not node_of(tensor).endswith(_RECIPROCAL)]
        if len(inputs) != 2 or len(others) != 1:
            continue
        dtype = tf.as_dtype(node.attr["T"].type)
        divisor = constant(f"{name}/count", np.asarray(count).astype(dtype.as_numpy_dtype), dtype)
        controls = [f"^{before}" for before in control_inputs(node)]
        division = new_node(name, "RealDiv", [others[0], divisor.name, *controls], T=dtype)
        divisor.device = division.device = node.device
        result[name] = divisor, division
    return result
