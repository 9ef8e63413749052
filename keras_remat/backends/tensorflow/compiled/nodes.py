"""A node of a pure graph, written once more into a function that is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def run_node(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Adds a copy of a ``NodeDef`` to the graph that is traced, and returns its outputs."""
    attributes = {k: v for k, v in node.attr.items() if k not in ("_output_shapes", "_class")}
    graph = tf.compat.v1.get_default_graph()
    return list(graph.create_op(node.op, inputs, name=node.name, attrs=attributes).outputs)
