"""Rewrites of the optimized graph that cost nothing and let a schedule go lower.

* ``IdentityN`` is a view per output, but as one node it waits for all of its inputs: the one in a
  Keras optimizer's ``apply`` joins all weight gradients before the first update. It is split into
  single ``Identity`` nodes.
* oneDNN's layout pass, which runs when a function is instantiated, fuses ``Conv2D`` with
  ``BiasAdd``, ``Pad`` with ``Conv2D`` and ``Conv2DBackpropFilter`` with ``BiasAddGrad`` without
  looking at control edges: an order that puts something between the two becomes a cycle. An
  ``Identity`` between the first two keeps them apart. The gradients of a convolution's kernel and
  bias become one op (:func:`attached_nodes`), because fused they are summed up in another order
  than apart, and plain ``fit`` fuses them.
* ``AddN`` of three and more terms becomes a chain of ``AddV2``. Its kernel starts with whichever
  input's buffer it may take over (``AddNOp::Compute``), so the order of a floating-point sum, and
  its last bit, would hang on the schedule; and it holds all terms at once. The terms of a gradient
  are added as they are traced, because Grappler has sorted them by name and the first would wait
  for the last; a sum that Grappler made of nested additions (residual connections) keeps its order,
  which is the one that plain ``fit`` adds in.
* SGD's momentum, m ← μ m − η g and then w ← w + m, becomes the one op that TensorFlow has for it
  (``ResourceApplyKerasMomentum``, which computes the same bits). It works in place, where Keras's
  three products of the size of the weights are alive at once and the momentum's variable moves to
  another chunk of the allocator's pool with every step, more and more of which is lost in chunks
  larger than asked for.
* Nodes nothing depends on are dropped (variable reads that only order things, dead gradients).
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
    """Returns the nodes of an equivalent graph; a root that has become part of another node is
    there under that one's name.

    Args:
        nodes: name → ``NodeDef`` in topological order.
        roots: names of the nodes whose values or effects are wanted.
        order: node name → its place in the traced order; nodes that Grappler made are missing.
        scalars: names of nodes whose output 0 is known to have no dimensions.
    """
    result, replaced = _fuse_momentum(_split_add_n(_split_identity_n(nodes), order), scalars)
    result = _keep_apart(result)
    used = reachable(
        (replaced.get(root, root) for root in roots), lambda name: map(node_of, result[name].input)
    )
    return {name: node for name, node in result.items() if name in used}


def past_loops(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nodes where readers of a variable's handle that a loop hands on read the handle:
    a loop hands every resource on in its place."""
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


#: Reader type → the types of the producer of its input 0 it would be fused with.
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
    """Nodes that run as part of another's op: ``BiasAddGrad`` → the only ``Conv2DBackpropFilter``
    that reads the same gradient."""
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
        # whoever waits for the node by a control edge still waits for all of it
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
    """Returns one op per weight for ``AssignVariableOp(m, μ m − η g)`` and ``AssignAddVariableOp(w,
    m)``, under the second one's name; and the first one's name → that name."""
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
    """Returns the assignment of the momentum that ``add`` adds to a weight, and μ, η and g;
    ``None`` where this is something else, or somebody else looks at what is between the two."""
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
    """Returns a product's scalar factor and the other one; ``None`` twice where neither or both are
    known to be scalar."""
    left, right = product.input[:2]
    known = [node_of(i) in scalars and split_input(i)[1] == 0 for i in (left, right)]
    if known[0] == known[1]:
        return None, None
    return (left, right) if known[0] else (right, left)


def traced_places(
    inputs: Mapping[str, Collection[str]], order: Mapping[str, int]
) -> dict[str, int]:
    """Returns the place of every node in the traced order, inputs first; one that was made later
    stands where its last input does."""
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
