"""Nodes of a pure graph, written once more into a function that is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow.graph.nodes import tensor_key


def run_node(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Adds a copy of a ``NodeDef`` to the graph that is traced, and returns its outputs."""
    attributes = {k: v for k, v in node.attr.items() if k not in ("_output_shapes", "_class")}
    graph = tf.compat.v1.get_default_graph()
    return list(graph.create_op(node.op, inputs, name=node.name, attrs=attributes).outputs)


def traced_function(
    nodes: Sequence[Any], given: Sequence[str], specs: Sequence[Any], outputs: Sequence[str]
) -> Any:
    """Returns a concrete function of nodes.

    Args:
        nodes: pure ``NodeDef``\\ s in an order in which they can run.
        given: names of the placeholders that are its arguments.
        specs: a ``TensorSpec`` for each of them.
        outputs: names of the tensors that it returns.
    """

    def run(*arguments: Any) -> list[Any]:
        tensors = {f"{name}:0": x for name, x in zip(given, arguments, strict=True)}
        for node in nodes:
            if node.op != "Placeholder":  # those are arguments
                results = run_node(node, [tensors[tensor_key(i)] for i in node.input])
                tensors.update((f"{node.name}:{at}", x) for at, x in enumerate(results))
        return [tensors[name] for name in outputs]

    return tf.function(run, autograph=False).get_concrete_function(*specs)
