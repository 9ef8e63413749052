"""Rewrites the optimized graph so that schedules need less memory, at no cost.

* ``IdentityN`` is a view per output, but as one node it waits for all of its inputs: the one in a
  Keras optimizer's ``apply`` joins all weight gradients before the first update. It is split into
  single ``Identity`` nodes.
* oneDNN's layout pass, which runs when a function is instantiated, fuses ``Conv2D`` with
  ``BiasAdd``, ``Pad`` with ``Conv2D``, and ``Conv2DBackpropFilter`` with ``BiasAddGrad``. The pass
  ignores control edges: an order with another op between the two becomes a cycle. For the first two
  pairs an ``Identity`` in between prevents fusion. The gradients of a convolution's kernel and bias
  become one op (:func:`attached_nodes`): plain ``fit`` fuses them, and fused they are summed up in
  another order than apart.
* ``AddN`` of three and more terms becomes a chain of ``AddV2``. Its kernel starts with whichever
  input's buffer it may take over (``AddNOp::Compute``), so the order of a floating-point sum, and
  its last bit, would depend on the schedule. It also holds all terms at once. The terms of a
  gradient are added in traced order: Grappler has sorted them by name, and in that order the first
  term would wait for the last. A sum that Grappler made of nested additions (residual connections)
  keeps its order, which is that of plain ``fit``.
* SGD's momentum, m ← μ m − η g and then w ← w + m, becomes TensorFlow's single op for it
  (``ResourceApplyKerasMomentum``, which computes the same bits) and works in place. Keras has three
  products of the size of the weights alive at once, and moves the momentum's variable to another
  chunk of the allocator's pool in every step, which loses more and more memory in chunks larger
  than requested.
* Nodes that nothing depends on are dropped (variable reads that only order ops, dead gradients).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow.graph.nodes import (
    control_inputs,
    copied,
    data_inputs,
    node_of,
    reachable,
    split_input,
)


def rewrite_for_memory(
    nodes: Mapping[str, Any],
    roots: Sequence[str],
    order: Mapping[str, int],
    scalars: Container[str] = (),
) -> dict[str, Any]:
    """Returns the nodes of an equivalent graph. A root that became part of another node has that
    node's name.

    Args:
        nodes: name → ``NodeDef`` in topological order.
        roots: names of the nodes whose values or effects are wanted.
        order: node name → position in the traced order; nodes that Grappler made are missing.
        scalars: names of nodes whose output 0 is known to be a scalar.
    """
    result, replaced = _fuse_momentum(_split_add_n(_split_identity_n(nodes), order), scalars)
    result = _keep_apart(result)
    used = reachable(
        (replaced.get(root, root) for root in roots), lambda name: map(node_of, result[name].input)
    )
    return {name: node for name, node in result.items() if name in used}


def past_loops(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nodes, with readers of a variable's handle behind a loop reading the handle
    before it. A loop returns every resource at the position of its input."""
    before = {
        f"{name}:{at}" if at else name: read
        for name, node in nodes.items()
        if "While" in node.op
        for at, (read, dtype) in enumerate(
            zip(data_inputs(node), node.attr["T"].list.type, strict=True)
        )
        if dtype == tf.resource.as_datatype_enum
    }

    def first(tensor: str) -> str:
        while tensor in before:
            tensor = before[tensor]
        return tensor

    return {
        name: copied(node, map(first, node.input)) if before.keys() & set(node.input) else node
        for name, node in nodes.items()
    }


#: Type of a reader → types of producers of its input 0 that it would be fused with.
_FUSED_BY_ONEDNN: Mapping[str, frozenset[str]] = {
    "BiasAdd": frozenset({"Conv2D", "DepthwiseConv2dNative", "Conv3D", "MatMul"}),
    "Conv2D": frozenset({"Pad"}),
    "_FusedConv2D": frozenset({"Pad"}),
    "Conv3D": frozenset({"Pad"}),
    "_FusedConv3D": frozenset({"Pad"}),
}


def _keep_apart(nodes: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, node in nodes.items():
        partners = _FUSED_BY_ONEDNN.get(node.op)
        source = node.input[0] if node.input else ""
        producer = nodes.get(node_of(source))
        if partners is not None and producer is not None and producer.op in partners:
            apart = _new(f"{name}/apart", "Identity", node, [source], node.attr["T"].type)
            result[apart.name] = apart
            node = copied(node, [apart.name, *node.input[1:]])
        result[name] = node
    return result


def attached_nodes(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Returns node → the node whose op it runs in: a ``BiasAddGrad`` → the only
    ``Conv2DBackpropFilter`` that reads the same gradient."""
    kernels: dict[str, list[str]] = {}
    biases: dict[str, list[str]] = {}
    for name, node in nodes.items():
        if node.op == "Conv2DBackpropFilter":
            kernels.setdefault(node.input[2], []).append(name)
        elif node.op == "BiasAddGrad":
            biases.setdefault(node.input[0], []).append(name)
    return {
        names[0]: kernels[at][0]
        for at, names in biases.items()
        if len(names) == 1 and len(kernels.get(at, ())) == 1
    }


def _split_identity_n(nodes: Mapping[str, Any]) -> dict[str, Any]:
    split: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    for name, node in nodes.items():
        if node.op != "IdentityN":
            split[name] = node
            continue
        controls = [f"^{i}" for i in control_inputs(node)]
        for at, source in enumerate(data_inputs(node)):
            dtype = node.attr["T"].list.type[at]
            part = _new(f"{name}/part_{at}", "Identity", node, [source, *controls], dtype)
            split[part.name] = part
            renamed[f"{name}:{at}" if at else name] = part.name
        # nodes with a control edge from this node still wait for all parts
        parts = (f"^{name}/part_{at}" for at in range(len(node.attr["T"].list.type)))
        split[name] = _new(name, "NoOp", node, parts)
    return {
        name: copied(node, (renamed.get(i, i) for i in node.input))
        if any(i in renamed for i in node.input)
        else node
        for name, node in split.items()
    }


def _fuse_momentum(
    nodes: Mapping[str, Any], scalars: Container[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Replaces ``AssignVariableOp(m, μ m − η g)`` and ``AssignAddVariableOp(w, m)`` by one op per
    weight, under the second one's name. Returns all nodes, and the first one's name → that name."""
    readers: dict[str, list[str]] = defaultdict(list)
    for name, node in nodes.items():
        for source in node.input:
            readers[node_of(source)].append(name)
    fused: dict[str, Any] = {}
    replaced: dict[str, str] = {}
    for name, node in nodes.items():
        found = _momentum_step(nodes, node, readers, scalars)
        if found is not None:
            assigned, (momentum, rate, gradient) = found
            controls = {*control_inputs(node), *control_inputs(assigned)} - {assigned.name}
            inputs = [node.input[0], assigned.input[0], rate, gradient, momentum]
            inputs += (f"^{i}" for i in sorted(controls))
            dtype = node.attr["dtype"].type
            fused[name] = _new(name, "ResourceApplyKerasMomentum", node, inputs, dtype)
            replaced[assigned.name] = name
    result: dict[str, Any] = {}
    for name, node in nodes.items():
        if name in replaced:
            continue
        renamed = [f"^{replaced[i[1:]]}" if i[1:] in replaced else i for i in node.input]
        if name not in fused and renamed != list(node.input):
            node = copied(node, dict.fromkeys(renamed))
        result[name] = fused.get(name, node)
    return result, replaced


def _momentum_step(
    nodes: Mapping[str, Any], add: Any, readers: Mapping[str, list[str]], scalars: Container[str]
) -> tuple[Any, tuple[str, str, str]] | None:
    """Returns the assignment of the momentum that ``add`` adds to a weight, with μ, η and g.
    ``None`` where ``add`` does something else, or other nodes read the values in between."""
    if add.op != "AssignAddVariableOp":
        return None
    read = nodes[node_of(add.input[1])]
    before = control_inputs(read)
    if read.op != "ReadVariableOp" or readers[read.name] != [add.name] or len(before) != 1:
        return None
    assign = nodes[before[0]]
    if assign.op != "AssignVariableOp" or assign.input[0] != read.input[0]:
        return None
    difference = nodes[node_of(assign.input[1])]
    if difference.op != "Sub" or readers[difference.name] != [assign.name]:
        return None
    products = [nodes[node_of(i)] for i in difference.input[:2]]
    if any(p.op != "Mul" or readers[p.name] != [difference.name] for p in products):
        return None
    momentum, old = _scalar_first(products[0], scalars)
    rate, gradient = _scalar_first(products[1], scalars)
    if momentum is None or rate is None or gradient is None or old is None:
        return None
    slot = nodes[node_of(old)]
    if (
        slot.op != "ReadVariableOp"
        or slot.input[0] != assign.input[0]
        or readers[slot.name] != [products[0].name]
    ):
        return None
    return assign, (momentum, rate, gradient)


def _scalar_first(product: Any, scalars: Container[str]) -> tuple[str | None, str | None]:
    """Returns a product's scalar factor and its other factor; ``None`` twice unless exactly one is
    known to be scalar."""
    left, right = product.input[:2]
    known = [node_of(i) in scalars and split_input(i)[1] == 0 for i in (left, right)]
    if known[0] == known[1]:
        return None, None
    return (left, right) if known[0] else (right, left)


def traced_places(
    inputs: Mapping[str, Collection[str]], order: Mapping[str, int]
) -> dict[str, int]:
    """Returns node → position in the traced order, inputs first. A node made after tracing has the
    position of its last input."""
    places: dict[str, int] = {}
    for name in TopologicalSorter(inputs).static_order():
        places[name] = (
            order[name] if name in order else max((places[i] for i in inputs[name]), default=0)
        )
    return places


def _split_add_n(nodes: Mapping[str, Any], order: Mapping[str, int]) -> dict[str, Any]:
    places = traced_places(
        {name: [node_of(i) for i in node.input] for name, node in nodes.items()}, order
    )
    result: dict[str, Any] = {}
    for name, node in nodes.items():
        terms = data_inputs(node)
        if (
            node.op != "AddN"
            or len(terms) < 3
            or node.attr["T"].type == tf.variant.as_datatype_enum
        ):
            result[name] = node
            continue
        if name in order and len(terms) > 3:
            terms.sort(key=lambda term: places[node_of(term)])
        controls = [f"^{i}" for i in control_inputs(node)]
        total = terms[0]
        for at, term in enumerate(terms[1:], start=1):
            inputs = [total, term, *controls]
            total = name if at == len(terms) - 1 else f"{name}/sum_{at}"
            result[total] = _new(total, "AddV2", node, inputs, node.attr["T"].type)
    return result


def _new(name: str, op: str, like: Any, inputs: Iterable[str], dtype: int = 0) -> Any:
    """Returns a new node on the device of another."""
    node = tf.compat.v1.NodeDef(name=name, op=op, device=like.device, input=inputs)
    if dtype:
        node.attr["T"].type = dtype
    return node
