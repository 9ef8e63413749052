"""Rewrites a traced step, or a branch of one, without state.

Operations are visited in traced order, the order that automatic control dependencies enforce.
Reading a variable becomes its current value; changing it makes a new value. A branch that changes
variables (an optimizer that scales the loss has one, to skip steps) gets their values and returns
the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled.kinds import ALIASES, NOTHING
from keras_remat.backends.tensorflow.graph import kinds as op_kinds
from keras_remat.backends.tensorflow.graph.effects import calls_without_effect
from keras_remat.backends.tensorflow.graph.nodes import (
    constant,
    copied,
    data_inputs,
    new_node,
    node_of,
    run_node,
    tensor_key,
)
from keras_remat.errors import UnsupportedModelError


def value_name(handle: str) -> str:
    """Returns the name of the placeholder for a variable's value.

    Args:
        handle: name of the placeholder for the variable's handle.
    """
    return f"{handle}/value"


class Walk:
    """Visits the operations in traced order and writes them without state.

    Args:
        graph: graph of a step or of a branch.
        captures: placeholder → the variable's handle or other tensor that it stands for.
        library: the functions of the step; pure branches are added to it.
    """

    def __init__(self, graph: Any, captures: Mapping[str, Any], library: Any):
        self.graph, self._captures, self._library = graph, captures, library
        self._is_pure = calls_without_effect(library, ALIASES | NOTHING)
        self._same: dict[str, str] = {}  # traced tensor → the equal tensor of the pure graph
        self._handle: dict[str, str] = {}  # node → the captured variable whose handle it returns
        self.state: dict[str, str] = {}  # variable → its current value
        self.nodes: list[Any] = []
        self._specs: dict[str, Any] = {}
        nodes = {node.name: node for node in graph.as_graph_def().node}
        for operation in graph.get_operations():
            self._visit(nodes[operation.name])

    def tensor(self, name: str) -> str:
        """Returns the pure graph's tensor for a tensor of the traced graph."""
        return self._same.get(tensor_key(name), tensor_key(name))

    def placeholder(self, name: str) -> Any:
        """Returns the node that stands for the value of a variable."""
        spec = self._specs[name]
        node = new_node(name, "Placeholder", dtype=spec.dtype)
        node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
        return node

    def _visit(self, node: Any) -> None:
        inputs = [self.tensor(i) for i in data_inputs(node)]
        handles = [self._handle[name] for i in inputs if (name := node_of(i)) in self._handle]
        external = self._captures.get(node.name)
        if external is not None and external.dtype == tf.resource:
            self._handle[node.name] = node.name
        elif node.op in NOTHING:
            pass
        elif handles and node.op == "Identity":
            self._handle[node.name] = handles[0]
        elif handles and node.op in ("If", "StatelessIf"):
            self._branch(node, inputs)
        elif handles:
            self._access(node, handles, inputs)
        elif node.op in ("Shape", "ShapeN") and self._known_shapes(node):
            pass
        elif node.op in ALIASES:
            self._same.update((f"{node.name}:{at}", tensor) for at, tensor in enumerate(inputs))
        elif node.op not in op_kinds.UNSUPPORTED and (
            node.op == "Placeholder"
            or node.op in op_kinds.PURE_STATEFUL
            or not private.is_stateful(node.op)
        ):
            self._copy(node, node.op, inputs)
        elif node.op in op_kinds.CONTROL_FLOW and self._is_pure(node):
            self._copy(node, op_kinds.STATELESS[node.op], inputs)
        else:
            raise UnsupportedModelError(
                f"{node.op} ({node.name}) has an effect that cannot be compiled into one step."
            )

    def _known_shapes(self, node: Any) -> bool:
        """Writes the results of a shape op as constants; returns whether the shapes are known.

        Grappler infers fewer shapes, and a shape op would keep the value alive until it runs.
        """
        shapes = [x.shape for x in self.graph.get_operation_by_name(node.name).inputs]
        if not all(shape.is_fully_defined() for shape in shapes):
            return False
        dtype = tf.as_dtype(node.attr["out_type"].type)
        for at, shape in enumerate(shapes):
            name = f"{node.name}/known_{at}" if at else node.name
            self._same[f"{node.name}:{at}"] = self._append(constant(name, list(shape), dtype))
        return True

    def _append(self, node: Any) -> str:
        self.nodes.append(node)
        return f"{node.name}:0"

    def _copy(self, node: Any, kind: str, inputs: Sequence[str]) -> None:
        copy = copied(node, inputs)
        copy.op, copy.device = kind, ""
        self._append(copy)

    def current(self, handle: str) -> str:
        """Returns the tensor with a variable's current value."""
        if handle not in self.state:
            self._specs[value_name(handle)] = private.variable_spec(self._captures[handle])
            self.state[handle] = f"{value_name(handle)}:0"
        return self.state[handle]

    def _access(self, node: Any, handles: Sequence[str], inputs: list[str]) -> None:
        """Writes an operation on one variable as an operation on its current value."""
        handle, name = handles[0], node.name
        if len(handles) > 1 or node.op not in _ACCESS:
            raise UnsupportedModelError(
                f"{node.op} ({name}) on a variable cannot be compiled into one step."
            )
        current = self.current(handle)
        spec = self._specs[value_name(handle)]
        how = _ACCESS[node.op]
        if node.op == "ReadVariableOp":
            self._same[f"{name}:0"] = current
        elif node.op == "AssignVariableOp":
            self.state[handle] = inputs[1]
        elif node.op == "VariableShape":
            dtype = tf.as_dtype(node.attr["out_type"].type)
            self._append(constant(name, list(spec.shape), dtype))
        elif node.op == "ResourceGather":
            axis = self._append(constant(f"{name}/axis", node.attr["batch_dims"].i, tf.int32))
            types = {
                "Tparams": spec.dtype,
                "Tindices": node.attr["Tindices"].type,
                "Taxis": tf.int32,
            }
            gather = new_node(name, how, [current, inputs[1], axis], **types)
            gather.attr["batch_dims"].i = node.attr["batch_dims"].i
            self._append(gather)
        elif how.startswith("TensorScatter"):
            axis = self._append(constant(f"{name}/axis", -1, tf.int32))
            types = {"T": node.attr["Tindices"].type, "Tdim": tf.int32}
            rows = self._append(new_node(f"{name}/rows", "ExpandDims", [inputs[1], axis], **types))
            types = {"T": spec.dtype, "Tindices": node.attr["Tindices"].type}
            scatter = new_node(name, how, [current, rows, inputs[2]], **types)
            self.state[handle] = self._append(scatter)
        else:
            update = new_node(name, how, [current, inputs[1]], T=spec.dtype)
            self.state[handle] = self._append(update)

    def _branch(self, node: Any, inputs: Sequence[str]) -> None:
        """Writes a condition whose branches read or change variables. The new one gets their values
        and returns the new values."""
        condition, *operands = inputs
        handles = [self._handle.get(node_of(operand)) for operand in operands]
        functions = {function.signature.name: function for function in self._library.function}
        branches = [self._walk(functions[node.attr[name].func.name], handles) for name in _BRANCHES]
        plain = [at for at, handle in enumerate(handles) if handle is None]
        used = {
            at: handle
            for at, handle in enumerate(handles)
            if handle is not None and any(branch.uses(at) for branch in branches)
        }
        if len(set(used.values())) < len(used):
            raise UnsupportedModelError(
                f"{node.op} ({node.name}) gets a variable twice: it cannot be compiled into one "
                "step."
            )
        arguments = [operands[at] for at in plain] + [self.current(name) for name in used.values()]
        specs = [
            *(tf.TensorSpec.from_tensor(branches[0].graph.inputs[at]) for at in plain),
            *(self._specs[value_name(name)] for name in used.values()),
        ]
        pure = [branch.as_function(plain, list(used), specs) for branch in branches]
        self._library.function.extend(function.function_def for function in pure)
        types = {"Tcond": node.attr["Tcond"].type}
        copy = new_node(node.name, "StatelessIf", [condition, *arguments], **types)
        copy.attr["Tin"].list.type.extend(spec.dtype.as_datatype_enum for spec in specs)
        for result in pure[0].outputs:
            copy.attr["Tout"].list.type.append(result.dtype.as_datatype_enum)
            copy.attr["output_shapes"].list.shape.append(result.shape.as_proto())
        for name, function in zip(_BRANCHES, pure, strict=True):
            copy.attr[name].func.name = function.name
        self.nodes.append(copy)
        first = len(pure[0].outputs) - len(used)
        for at, handle in enumerate(used.values(), first):
            self.state[handle] = f"{node.name}:{at}"

    def _walk(self, definition: Any, handles: Sequence[str | None]) -> Walk:
        """Visits a branch, some of whose arguments are variables."""
        graph = private.function_graph(definition, self.graph)
        captures = {
            argument.op.name: self._captures[handle]
            for argument, handle in zip(graph.inputs, handles, strict=True)
            if handle is not None
        }
        return Walk(graph, captures, self._library)

    def uses(self, at: int) -> bool:
        """Returns whether a branch reads or changes the variable that is its argument number
        ``at``."""
        return self.graph.inputs[at].op.name in self.state

    def as_function(self, plain: Sequence[int], used: Sequence[int], specs: Sequence[Any]) -> Any:
        """Returns a branch as a pure function.

        Args:
            plain: positions of the arguments that are not variables; they come first.
            used: positions of the variables among the arguments; their values come next, and their
                new values are returned last.
            specs: specs of the new function's arguments.
        """
        names = [argument.op.name for argument in self.graph.inputs]
        new = [self.current(names[at]) for at in used]
        given = [*(names[at] for at in plain), *(value_name(names[at]) for at in used)]
        returned = [*(self.tensor(result.name) for result in self.graph.outputs), *new]

        def run(*arguments: Any) -> list[Any]:
            tensors = {f"{name}:0": x for name, x in zip(given, arguments, strict=True)}
            for node in self.nodes:
                if node.op != "Placeholder":  # those are arguments
                    results = run_node(node, [tensors[tensor_key(i)] for i in node.input])
                    tensors.update((f"{node.name}:{at}", x) for at, x in enumerate(results))
            return [tensors[name] for name in returned]

        return private.concrete_function(tf.function(run, autograph=False), *specs)


_BRANCHES = ("then_branch", "else_branch")
_ACCESS = {
    "ReadVariableOp": "",
    "AssignVariableOp": "",
    "VariableShape": "",
    "AssignAddVariableOp": "AddV2",
    "AssignSubVariableOp": "Sub",
    "ResourceGather": "GatherV2",
    "ResourceScatterAdd": "TensorScatterAdd",
    "ResourceScatterSub": "TensorScatterSub",
    "ResourceScatterUpdate": "TensorScatterUpdate",
}
"""Operation on a variable → the operation on its value."""
