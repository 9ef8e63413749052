"""Finds the static shapes of a graph's tensors: TensorFlow infers most of them, and the rest is
added here."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import data_inputs, node_of, tensor_key
from keras_remat.backends.tensorflow.graph.run_alone import output_shapes
from keras_remat.backends.tensorflow.profiler.device import on_gpu


def static_shapes(
    nodes: Mapping[str, Any],
    graph_def: Any,
    captures: Mapping[str, Any],
    inputs: tuple[tuple[str, Any, Any], ...],
) -> dict[str, tuple[tuple[int, ...] | None, Any]]:
    """Returns tensor name → (static shape or ``None``, dtype), by TensorFlow's own shape inference
    on the optimized graph."""
    found: dict[str, tuple[tuple[int, ...] | None, Any]] = {}

    def build(*placeholders: Any) -> list[Any]:
        mapped = {
            f"{name}:0": tensor for (name, *_), tensor in zip(inputs, placeholders, strict=True)
        }
        mapped |= {f"{name}:0": private.capture(external) for name, external in captures.items()}
        document = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
        document.node.extend(nodes.values())
        tf.graph_util.import_graph_def(
            document, input_map={k: v for k, v in mapped.items() if k[:-2] in nodes}, name=""
        )
        operations = tf.compat.v1.get_default_graph().get_operations()
        tensors = {tensor.name: tensor for op in operations for tensor in op.outputs} | mapped
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape) if tensor.shape.is_fully_defined() else None
            found[name] = (shape, tensor.dtype)
        return []

    private.build_function(build, [tf.TensorSpec(shape, dtype) for _, dtype, shape in inputs])
    _add_shapes_like_variables(nodes, captures, found)
    for name, node in nodes.items():
        if node.op in kinds.SIZED_BY_LIBRARY:
            operands = [found[tensor_key(i)] for i in data_inputs(node)]
            for at, shape in enumerate(output_shapes(node, operands)):
                found[f"{name}:{at}"] = (shape, found[f"{name}:{at}"][1])
    if not on_gpu():
        _add_hidden_outputs(nodes, found)
    return found


def _add_shapes_like_variables(
    nodes: Mapping[str, Any],
    captures: Mapping[str, Any],
    shapes: dict[str, tuple[tuple[int, ...] | None, Any]],
) -> None:
    """Adds the shapes of ``Fill`` ops in the shape of a variable. A loop's gradient begins with
    such zeros."""
    for name, node in nodes.items():
        shape, dtype = shapes.get(f"{name}:0", (None, None))
        if node.op != "Fill" or shape is not None:
            continue
        source = node_of(node.input[0])
        if nodes[source].op != "VariableShape":
            continue
        handle = node_of(nodes[source].input[0])
        if handle in captures:
            shapes[f"{name}:0"] = (tuple(private.variable_spec(captures[handle]).shape), dtype)


def _add_hidden_outputs(
    nodes: Mapping[str, Any], shapes: dict[str, tuple[tuple[int, ...] | None, Any]]
) -> None:
    """Gives the forward ops of ``kinds.HIDDEN_OUTPUT`` their second output: one index per element
    of the first output, as one byte where the window has fewer than 256 elements."""
    forward = {kind for kind, _ in kinds.HIDDEN_OUTPUT}
    for name, node in nodes.items():
        shape, dtype = shapes.get(f"{name}:0", (None, None))
        if node.op in forward and dtype == tf.float32:
            shapes[f"{name}:1"] = (
                shape,
                tf.uint8 if prod(node.attr["ksize"].list.i) < 256 else tf.int32,
            )
