"""Tells TensorFlow that text split into words and padded has as many rows as samples.

TensorFlow does not infer it: behind a ``TextVectorization`` inside a model the number of rows is
unknown, and so are all later shapes, to the last gradient. Without sizes nothing can be planned.
Given the number of rows, TensorFlow infers the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow.graph.nodes import constant

#: Ops that pass on the number of rows.
_HANDED_ON = frozenset({"Identity", "Cast", "StridedSlice"})


def tell_rows(operations: Iterable[Any], graph_def: Any) -> None:
    """Writes the number of rows into the shape argument of the op that pads them, in place.

    Args:
        operations: operations of a traced graph.
        graph_def: the same graph, which is changed.
    """
    asked = {}
    for op in operations:
        if op.type != "RaggedTensorToTensor":
            continue
        shape, rows = tf.get_static_value(op.inputs[0]), _rows(op)
        if shape is not None and shape.ndim == 1 and shape[0] == -1 and rows is not None:
            asked[op.name] = constant(f"{op.name}/rows", [rows, *shape[1:]], op.inputs[0].dtype)
    for node in graph_def.node:
        if node.name in asked:
            node.input[0] = asked[node.name].name
    graph_def.node.extend(asked.values())


def _rows(op: Any) -> int | None:
    """Returns how many rows a padded tensor has, where that follows from static shapes."""
    kind, partition = op.get_attr("row_partition_types")[0], op.inputs[3]
    if kind == b"ROW_SPLITS":
        ends = partition.shape.num_elements()
        return None if ends is None else ends - 1
    return _split_texts(partition) if kind == b"FIRST_DIM_SIZE" else None


def _split_texts(count: Any) -> int | None:
    """Returns how many texts were split, if ``count`` is the scalar with that number: the first
    entry of the dense shape of their words."""
    while count.op.type in _HANDED_ON:
        if count.op.type == "StridedSlice":
            begin = tf.get_static_value(count.op.inputs[1])
            if begin is None or begin.any():
                return None
        count = count.op.inputs[0]
    is_shape = count.op.type == "StringSplitV2" and count.value_index == 2
    return count.op.inputs[0].shape.num_elements() if is_shape else None
