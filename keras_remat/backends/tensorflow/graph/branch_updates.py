"""Makes the updates inside of branches run one after another.

``keras.optimizers.LossScaleOptimizer``, and any step that skips an update, assigns all weights and
slots in one branch. The executor begins every op that is ready, so the products for all weights are
alive at once there, and no schedule reaches into a branch. So a control edge leads from every
assignment to the ops that only the next one needs: then the products of one assignment are alive at
a time. Results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from graphlib import TopologicalSorter
from itertools import chain
from operator import or_
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.effects import has_effect
from keras_remat.backends.tensorflow.graph.nodes import (
    called_functions,
    control_inputs,
    data_inputs,
    node_of,
)


def order_branch_updates(graph_def: Any) -> None:
    """Orders the updates in the branches of a graph, in place, and renames its functions.

    Args:
        graph_def: an optimized graph with its library.
    """
    branches = (node for node in graph_def.node if node.op in kinds.BRANCHES)
    called = chain.from_iterable(map(called_functions, branches))
    private.change_functions(graph_def, called, _order)


def _order(function: Any) -> bool:
    """Orders the updates of one function, in place; returns whether it has several."""
    nodes = {node.name: node for node in function.node_def}
    if sum(has_effect(node.op) for node in nodes.values()) < 2:
        return False
    _pass_joins_by(function, nodes)
    groups = list(_groups(function, nodes))
    before: Any = None
    for group in groups:
        own = {node.name for node in group if node.op != "Const"}
        for node in group:
            sources = {node_of(i) for i in node.input}
            waits = before is not None and node.name in own and before.name not in sources
            if waits and sources.isdisjoint(own):
                node.input.append(f"^{before.name}")
        before = group[-1]
    placed = {node.name for group in groups for node in group}
    rest = [node for node in nodes.values() if node.name not in placed]
    ordered = [*(node for group in groups for node in group), *rest]
    copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
    del function.node_def[:]
    function.node_def.extend(copies)
    return True


def _pass_joins_by(function: Any, nodes: dict[str, Any]) -> None:
    """Connects readers of an ``IdentityN`` to its inputs, in place."""

    def source(tensor: str) -> tuple[str, list[str]]:
        controls: list[str] = []
        while (join := nodes.get(node_of(tensor))) is not None and join.op == "IdentityN":
            controls += (i for i in join.input if i.startswith("^"))
            tensor = join.input[int(tensor.rpartition(":")[2])]
        return tensor, controls

    for node in nodes.values():
        if node.op == "IdentityN":
            continue
        found = [source(i) for i in data_inputs(node)]
        controls = [f"^{i}" for i in control_inputs(node)]
        controls += (control for _, others in found for control in others)
        inputs = [*(tensor for tensor, _ in found), *dict.fromkeys(controls)]
        if inputs != list(node.input):
            del node.input[:]
            node.input.extend(inputs)
    for result, tensor in list(function.ret.items()):
        function.ret[result] = source(tensor)[0]
    waited_for = {node_of(i) for node in nodes.values() for i in node.input}
    waited_for |= set(function.control_ret.values())
    for name in [n for n, node in nodes.items() if node.op == "IdentityN"]:
        if name not in waited_for:  # it would hold its inputs until all of them are computed
            del nodes[name]


def _by_gradient(function: Any, nodes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the nodes with an effect, sorted by gradient.

    Nodes that depend on the same gradient (a weight's and its slots') are next to each other. The
    sort key is the first of the function's arguments, resources aside, that a node depends on.
    """
    bits = {
        argument.name: 1 << at
        for at, argument in enumerate(function.signature.input_arg)
        if argument.type != tf.resource.as_datatype_enum
    }
    sources = {name: [*map(node_of, node.input)] for name, node in nodes.items()}
    for name in TopologicalSorter(sources).static_order():
        behind = (bits.get(source, 0) for source in sources.get(name, ()))
        bits[name] = reduce(or_, behind, bits.get(name, 0))
    roots = [name for name, node in nodes.items() if has_effect(node.op)]
    return sorted(roots, key=lambda name: bits[name] & -bits[name])


def _groups(function: Any, nodes: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yields for every node with an effect the nodes that it needs and no earlier one has needed,
    in an order in which they can run, and the node last."""
    placed: set[str] = set()
    for root in _by_gradient(function, nodes):
        group: list[Any] = []
        waiting = [root]
        while waiting:  # no recursion: a chain of ops may be long
            name = waiting[-1]
            missing = [
                source
                for source in map(node_of, nodes[name].input)
                if source in nodes and source not in placed
            ]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if name not in placed:
                placed.add(name)
                group.append(nodes[name])
                if has_effect(nodes[name].op):
                    yield group
                    group = []
