"""A traced step without state: variables go in and their new values come out, and everything
between is pure.

XLA compiles it that way in the end. Done before planning, reads, writes and control edges are gone:
what an operation needs is its inputs, any order that has those is legal, and a repeated operation
cannot see a variable that has changed meanwhile. The operations are taken in the order they were
traced in, which is the one that automatic control dependencies stand for.

The pure graph is then constant-folded by Grappler, with every pass off that makes operations XLA
has no kernel for. Shapes must be static, as under XLA anyway. Loops and branches are carried whole;
a branch that changes variables (an optimizer that scales the loss skips steps by one) gets their
values and returns the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled.kinds import ALIASES, NOTHING
from keras_remat.backends.tensorflow.compiled.nodes import traced_function
from keras_remat.backends.tensorflow.graph import kinds as op_kinds
from keras_remat.backends.tensorflow.graph.nodes import data_inputs, node_of, tensor_key
from keras_remat.backends.xla.fusion import Equation
from keras_remat.core.topology import topological_order
from keras_remat.errors import UnsupportedModelError


@dataclass(frozen=True)
class Literal:
    """A constant as an operation's input.

    Args:
        name: of its node.
        dtype, nbytes: of the constant.
    """

    name: str
    dtype: Any
    nbytes: int


@dataclass(frozen=True)
class FlatProgram:
    """A step's operations over numbered tensors.

    Args:
        equations: in traced order.
        shapes, dtypes: of every number; a shape is ``None`` where TensorFlow does not know it.
        given: names of the placeholders of the first numbers: batch, variables, other captured
            tensors.
        outputs: numbers and literals.
        constants: name → ``Const`` node.
        library: the functions of its loops and branches.
    """

    equations: tuple[Equation, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[Any, ...]
    given: tuple[str, ...]
    outputs: tuple[Any, ...]
    constants: Mapping[str, Any]
    library: Any

    @property
    def n_given(self) -> int:
        """How many numbers are placeholders."""
        return len(self.given)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every number."""
        return tuple(
            nbytes(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def describe(self, number: int) -> tuple[tuple[int, ...] | None, str]:
        """Shape and dtype of a number."""
        return self.shapes[number], self.dtypes[number].name


def nbytes(shape: tuple[int, ...] | None, dtype: Any) -> int:
    """Bytes of a tensor; 0 for what has no bytes of its own (a list of tensors)."""
    return 0 if shape is None or not dtype.size else prod(shape) * int(dtype.size)


@dataclass(frozen=True)
class Stateless:
    """A step as a pure function.

    Args:
        program: what it computes.
        batch: how many of the given numbers are the batch's tensors, in flattening order.
        handles: variables (resource tensors), given next.
        captured: other eager tensors, given last.
        written: numbers among the variables' → the new value, a number or literal among the
            program's outputs.
        returned: what the step returns: numbers or literals, in flattening order of its structure.
    """

    program: FlatProgram
    batch: int
    handles: tuple[Any, ...]
    captured: tuple[Any, ...]
    written: Mapping[int, Any]
    returned: tuple[Any, ...]


def flatten(graph: Any) -> Stateless:
    """Returns a ``FuncGraph`` of a train step as a pure function.

    Raises:
        UnsupportedModelError: it holds an operation with an effect that cannot be turned into a
            value.
    """
    captures = {placeholder.op.name: external for external, placeholder in graph.captures}
    source = graph.as_graph_def()
    walk = _Walk(graph, captures, source.library)
    variables = [
        name
        for name, external in captures.items()
        if external.dtype == tf.resource and name in walk.state
    ]
    constants = {node.name for node in walk.nodes if node.op == "Const"}
    others = [
        name  # a small tensor is captured by its value, as a constant
        for name, external in captures.items()
        if external.dtype != tf.resource and name not in constants
    ]
    batch = [t.op.name for t in graph.inputs if t.op.name not in captures]
    given = [*batch, *(_value_name(name) for name in variables), *others]
    written = {
        name: walk.state[name] for name in variables if walk.state[name] != f"{_value_name(name)}:0"
    }
    returned = [walk.tensor(t.name) for t in graph.outputs]
    fetches = list(dict.fromkeys([*returned, *written.values()]))
    document = tf.compat.v1.GraphDef(versions=source.versions, library=source.library)
    document.node.extend(walk.placeholder(name) for name in given if name not in walk.names)
    document.node.extend(walk.nodes)
    document = private.constant_folded(document, fetches)
    program = _numbered(
        document, given, fetches, {node.name: at for at, node in enumerate(walk.nodes)}
    )
    atom = dict(zip(fetches, program.outputs, strict=True))
    numbers = {name: len(batch) + at for at, name in enumerate(variables)}
    return Stateless(
        program,
        len(batch),
        tuple(captures[name] for name in variables),
        tuple(captures[name] for name in others),
        {numbers[name]: atom[new] for name, new in written.items()},
        tuple(atom[t] for t in returned),
    )


def _value_name(handle: str) -> str:
    return f"{handle}/value"


class _Walk:
    """Runs through the operations in traced order and writes them down without state.

    Args:
        graph: of a step, or of a branch.
        captures: placeholder → the variable's handle, or the other tensor, that it stands for.
        library: the functions of the step; pure branches are added to it.
    """

    def __init__(self, graph: Any, captures: Mapping[str, Any], library: Any):
        self.graph, self._captures, self._library = graph, captures, library
        self._same: dict[str, str] = {}  # tensor → the tensor it is
        self._handle: dict[str, str] = {}  # node → the captured variable it hands on
        self.state: dict[str, str] = {}  # variable → its current value
        self.nodes: list[Any] = []
        self._specs: dict[str, Any] = {}
        nodes = {node.name: node for node in graph.as_graph_def().node}
        for operation in graph.get_operations():
            self._visit(nodes[operation.name])

    def tensor(self, name: str) -> str:
        """The pure graph's tensor for one of the traced graph's."""
        return self._same.get(tensor_key(name), tensor_key(name))

    @property
    def names(self) -> set[str]:
        """Of the nodes that were written down."""
        return {node.name for node in self.nodes}

    def placeholder(self, name: str) -> Any:
        """The node that stands for the value of a variable."""
        node, spec = tf.compat.v1.NodeDef(name=name, op="Placeholder"), self._specs[name]
        node.attr["dtype"].type = spec.dtype.as_datatype_enum
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
        elif node.op in ALIASES:
            self._same.update((f"{node.name}:{at}", tensor) for at, tensor in enumerate(inputs))
        elif node.op not in op_kinds.UNSUPPORTED and (
            node.op == "Placeholder"
            or node.op in op_kinds.PURE_STATEFUL
            or not private.is_stateful(node.op)
        ):
            self._append(node, node.op, node.name, inputs)
        elif node.op in op_kinds.CONTROL_FLOW:
            # stateful by name; a variable that its functions change would be among its inputs
            self._append(node, op_kinds.STATELESS[node.op], node.name, inputs)
        else:
            raise UnsupportedModelError(
                f"{node.op} ({node.name}) has an effect that cannot be compiled into one step."
            )

    def _append(
        self,
        node: Any,
        kind: str,
        name: str,
        inputs: Sequence[str],
        attributes: Sequence[str] | None = None,
    ) -> str:
        copy = tf.compat.v1.NodeDef(name=name, op=kind)
        copy.input.extend(inputs)
        for attribute, value in node.attr.items():
            if attributes is None or attribute in attributes:
                copy.attr[attribute].CopyFrom(value)
        self.nodes.append(copy)
        return f"{name}:0"

    def _constant(self, name: str, value: Any, dtype: Any) -> str:
        node = tf.compat.v1.NodeDef(name=name, op="Const")
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        self.nodes.append(node)
        return f"{name}:0"

    def current(self, handle: str) -> str:
        """The tensor that is a variable's value now."""
        if handle not in self.state:
            self._specs[_value_name(handle)] = private.variable_spec(self._captures[handle])
            self.state[handle] = f"{_value_name(handle)}:0"
        return self.state[handle]

    def _access(self, node: Any, handles: Sequence[str], inputs: list[str]) -> None:
        """An operation on one variable, as one on its current value."""
        handle, name = handles[0], node.name
        if len(handles) > 1 or node.op not in _ACCESS:
            raise UnsupportedModelError(
                f"{node.op} ({name}) on a variable cannot be compiled into one step."
            )
        current = self.current(handle)
        spec = self._specs[_value_name(handle)]
        how = _ACCESS[node.op]
        if node.op == "ReadVariableOp":
            self._same[f"{name}:0"] = current
        elif node.op == "AssignVariableOp":
            self.state[handle] = inputs[1]
        elif node.op == "VariableShape":
            self._constant(name, list(spec.shape), tf.as_dtype(node.attr["out_type"].type))
        elif node.op == "ResourceGather":
            axis = self._constant(f"{name}/axis", node.attr["batch_dims"].i, tf.int32)
            self._append(node, how, name, [current, inputs[1], axis], ("Tindices", "batch_dims"))
            self._typed("Tparams", spec.dtype, Taxis=tf.int32)
        elif how.startswith("TensorScatter"):
            axis = self._constant(f"{name}/axis", -1, tf.int32)
            rows = self._append(node, "ExpandDims", f"{name}/rows", [inputs[1], axis], ())
            self.nodes[-1].attr["T"].CopyFrom(node.attr["Tindices"])
            self._typed("Tdim", tf.int32)
            self.state[handle] = self._append(
                node, how, name, [current, rows, inputs[2]], ("Tindices",)
            )
            self._typed("T", spec.dtype)
        else:
            self.state[handle] = self._append(node, how, name, [current, inputs[1]], ())
            self._typed("T", spec.dtype)

    def _branch(self, node: Any, inputs: Sequence[str]) -> None:
        """A condition whose branches read or change variables, as one that gets their values and
        returns the new ones."""
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
            *(self._specs[_value_name(name)] for name in used.values()),
        ]
        pure = [branch.as_function(plain, list(used), specs) for branch in branches]
        self._library.function.extend(function.function_def for function in pure)
        copy = tf.compat.v1.NodeDef(name=node.name, op="StatelessIf", input=[condition, *arguments])
        copy.attr["Tcond"].CopyFrom(node.attr["Tcond"])
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

    def _walk(self, definition: Any, handles: Sequence[str | None]) -> _Walk:
        """Runs through a branch, which gets variables for some of its arguments."""
        graph = private.function_graph(definition, self.graph)
        captures = {
            argument.op.name: self._captures[handle]
            for argument, handle in zip(graph.inputs, handles, strict=True)
            if handle is not None
        }
        return _Walk(graph, captures, self._library)

    def uses(self, at: int) -> bool:
        """Whether a branch reads or changes the variable that is its argument number ``at``."""
        return self.graph.inputs[at].op.name in self.state

    def as_function(self, plain: Sequence[int], used: Sequence[int], specs: Sequence[Any]) -> Any:
        """A branch as a pure function.

        Args:
            plain: numbers of the arguments that are no variables: its first ones.
            used: numbers of those that are variables, whose values come next and whose new values
                it returns last.
            specs: of its arguments.
        """
        names = [argument.op.name for argument in self.graph.inputs]
        new = [self.current(names[at]) for at in used]
        given = [*(names[at] for at in plain), *(_value_name(names[at]) for at in used)]
        returned = [*(self.tensor(result.name) for result in self.graph.outputs), *new]
        return traced_function(self.nodes, given, specs, returned, self._library)

    def _typed(self, attribute: str, dtype: Any, **more: Any) -> None:
        for key, value in {attribute: dtype, **more}.items():
            self.nodes[-1].attr[key].type = value.as_datatype_enum


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
"""Operations on a variable, and what they are on its value."""


def _numbered(
    document: Any, given: Sequence[str], fetches: Sequence[str], order: Mapping[str, int]
) -> FlatProgram:
    """The nodes that the fetches need, as equations."""
    nodes = {node.name: node for node in document.node}
    inputs = {name: [tensor_key(i) for i in data_inputs(node)] for name, node in nodes.items()}
    needed, stack = set(), [node_of(t) for t in fetches]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += [node_of(i) for i in inputs[name]]
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(document, name="")
        tensors = {t.name: t for operation in graph.get_operations() for t in operation.outputs}
    numbers = {f"{name}:0": at for at, name in enumerate(given)}
    literals: dict[str, Literal] = {}

    def atom(tensor: str) -> Any:
        return literals[tensor] if tensor in literals else numbers[tensor]

    equations = []
    # as traced; what Grappler made runs as soon as it can
    before = {name: {node_of(i) for i in inputs[name]} for name in needed}
    for name in topological_order(before, lambda name: order.get(name, -1)):
        node, outputs = nodes[name], graph.get_operation_by_name(name).outputs
        if node.op == "Const":
            shape = tuple(outputs[0].shape)
            literals[f"{name}:0"] = Literal(name, outputs[0].dtype, nbytes(shape, outputs[0].dtype))
        elif name not in given:
            first = len(numbers)
            numbers.update((t.name, first + at) for at, t in enumerate(outputs))
            scope = name.rpartition("/")[0]
            computed = tuple(range(first, first + len(outputs)))
            equations.append(
                Equation(node, node.op, scope, tuple(map(atom, inputs[name])), computed)
            )
    known = [tensors[t] for t in numbers]
    return FlatProgram(
        tuple(equations),
        tuple(tuple(t.shape) if t.shape.is_fully_defined() else None for t in known),
        tuple(t.dtype for t in known),
        tuple(given),
        tuple(atom(t) for t in fetches),
        {literal.name: nodes[literal.name] for literal in literals.values()},
        document.library,
    )
