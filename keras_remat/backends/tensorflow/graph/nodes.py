"""Reads and writes the nodes of a graph: ``NodeDef`` objects that name their inputs.

An input is a tensor, ``"node"`` or ``"node:1"``, or a control edge, ``"^node"``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from math import prod
from typing import Any

import tensorflow as tf

#: Larger constants are not read as numbers: they cannot be shapes.
_MOST_NUMBERS = 64


def split_input(name: str) -> tuple[str, int]:
    """Splits an input into node name and output index (−1 for a control edge)."""
    if name.startswith("^"):
        return name[1:], -1
    node, _, index = name.partition(":")
    return node, int(index or 0)


def node_of(name: str) -> str:
    """Returns the name of the node that an input comes from. It also takes the inputs of a
    function's nodes, ``node:output:index``."""
    return name.removeprefix("^").partition(":")[0]


def tensor_key(name: str) -> str:
    """Returns the long name of a tensor: ``"node:0"`` for ``"node"``."""
    node, index = split_input(name)
    return f"{node}:{index}"


def data_inputs(node: Any) -> list[str]:
    """Returns the tensors that a node reads, as it names them."""
    return [i for i in node.input if not i.startswith("^")]


def control_inputs(node: Any) -> list[str]:
    """Returns the names of the nodes that a node waits for by control edges."""
    return [i[1:] for i in node.input if i.startswith("^")]


def copied(node: Any, inputs: Iterable[str], name: str = "") -> Any:
    """Returns a copy of a node with other inputs and, where given, another name."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.name = name or node.name
    del copy.input[:]
    copy.input.extend(inputs)
    return copy


def new_node(name: str, kind: str, inputs: Iterable[str] = (), **types: Any) -> Any:
    """Returns a node.

    Args:
        name: name of the node.
        kind: type of its op.
        inputs: what it reads and waits for.
        types: attributes that are dtypes.
    """
    node = tf.compat.v1.NodeDef(name=name, op=kind, input=inputs)
    for attribute, dtype in types.items():
        node.attr[attribute].type = tf.as_dtype(dtype).as_datatype_enum
    return node


def constant(name: str, value: Any, dtype: Any) -> Any:
    """Returns a node that is a constant."""
    node = new_node(name, "Const", dtype=dtype)
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def outputs_of(name: str, shapes: Container[str]) -> list[str]:
    """Returns the outputs of a node.

    Args:
        name: name of the node.
        shapes: the names of all tensors.
    """
    found: list[str] = []
    while (tensor := f"{name}:{len(found)}") in shapes:
        found.append(tensor)
    return found


def reachable(roots: Iterable[str], sources: Callable[[str], Iterable[str]]) -> set[str]:
    """Returns the roots and all nodes that they depend on.

    Args:
        roots: names of nodes.
        sources: returns the names of the nodes that a node depends on.
    """
    stack, found = list(roots), set()
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += sources(name)
    return found


def called_functions(node: Any) -> list[str]:
    """Returns the names of the functions that a node's attributes name."""
    attributes = node.attr.values()
    return [f.name for a in attributes for f in (a.func, *a.list.func) if f.name]


def constant_bytes(node: Any) -> int:
    """Returns the bytes of a constant's value."""
    written = node.attr["value"].tensor
    size: int = tf.dtypes.as_dtype(written.dtype).size
    elements: int = prod(dim.size for dim in written.tensor_shape.dim)
    return size * elements


def numbers_of(node: Any) -> list[int] | None:
    """Returns the numbers of a node that is a small constant of ints; ``None`` for others."""
    if node.op != "Const" or not tf.as_dtype(node.attr["dtype"].type).is_integer:
        return None
    tensor = node.attr["value"].tensor
    if prod(d.size for d in tensor.tensor_shape.dim) > _MOST_NUMBERS:
        return None
    return [int(n) for n in tf.make_ndarray(tensor).reshape(-1)]


def is_compiled(node: Any) -> bool:
    """Returns whether XLA compiles a call even in a step that is not compiled. On a CPU, Keras
    calls grouped convolutions so."""
    return "_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b


def shape_of(tensor: Any) -> tuple[int, ...] | None:
    """Returns the static shape of a graph's tensor; ``None`` where it is not known."""
    return tuple(tensor.shape) if tensor.shape.is_fully_defined() else None


def run_node(node: Any, inputs: Sequence[Any]) -> list[Any]:
    """Adds a copy of a pure graph's node to the graph being traced; returns its outputs."""
    attributes = {k: v for k, v in node.attr.items() if k not in ("_output_shapes", "_class")}
    graph = tf.compat.v1.get_default_graph()
    return list(graph.create_op(node.op, inputs, name=node.name, attrs=attributes).outputs)
