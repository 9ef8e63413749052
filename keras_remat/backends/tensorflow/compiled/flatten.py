"""Makes a traced step stateless: variables go in, their new values come out, and everything between
is pure.

XLA compiles it that way in the end. Doing it before planning removes reads, writes and control
edges: an operation needs only its inputs, any order that respects them is legal, and a repeated
operation cannot see a variable that has changed meanwhile.

Grappler then folds the constants of the pure graph. Passes that make operations without an XLA
kernel are off. Shapes must be static, as XLA needs anyway. Loops and branches stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.compiled.walk import Walk, value_name
from keras_remat.backends.tensorflow.graph.nodes import (
    data_inputs,
    node_of,
    reachable,
    tensor_key,
)
from keras_remat.backends.xla.fusion import Equation
from keras_remat.core.topology import topological_order


@dataclass(frozen=True)
class Literal:
    """Represents a constant as an operation's input.

    Args:
        name: name of its node.
        dtype, nbytes: dtype and bytes of the constant.
    """

    name: str
    dtype: Any
    nbytes: int


@dataclass(frozen=True)
class FlatProgram:
    """Holds a step's operations over numbered tensors.

    Args:
        equations: the operations, in traced order.
        shapes, dtypes: shape and dtype of every number; a shape is ``None`` where TensorFlow does
            not know it.
        given: names of the placeholders, which are the first numbers: batch, variables, other
            captured tensors.
        outputs: numbers and literals that the step computes.
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
        """Returns how many numbers are placeholders."""
        return len(self.given)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Returns the bytes of every number."""
        return tuple(
            nbytes(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def describe(self, number: int) -> tuple[tuple[int, ...] | None, str]:
        """Returns shape and dtype of a number."""
        return self.shapes[number], self.dtypes[number].name


def nbytes(shape: tuple[int, ...] | None, dtype: Any) -> int:
    """Returns the bytes of a tensor; 0 for a list of tensors, which has none of its own."""
    return 0 if shape is None else prod(shape) * int(dtype.size)


@dataclass(frozen=True)
class Stateless:
    """Holds a step as a pure function.

    Args:
        program: the operations.
        batch: how many of the first numbers are the batch's tensors, in flattening order.
        handles: variables (resource tensors), the next numbers.
        captured: other eager tensors, the last of the given numbers.
        written: number of a variable → its new value, a number or literal among the program's
            outputs.
        returned: numbers or literals that the step returns, in flattening order of its structure.
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
    walk = Walk(graph, captures, source.library)
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
    given = [*batch, *(value_name(name) for name in variables), *others]
    written = {
        name: walk.state[name] for name in variables if walk.state[name] != f"{value_name(name)}:0"
    }
    returned = [walk.tensor(t.name) for t in graph.outputs]
    fetches = list(dict.fromkeys([*returned, *written.values()]))
    document = tf.compat.v1.GraphDef(versions=source.versions, library=source.library)
    present = {node.name for node in walk.nodes}
    document.node.extend(walk.placeholder(name) for name in given if name not in present)
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


def _numbered(
    document: Any, given: Sequence[str], fetches: Sequence[str], order: Mapping[str, int]
) -> FlatProgram:
    """Returns the nodes that the fetches need, as equations."""
    nodes = {node.name: node for node in document.node}
    inputs = {name: [tensor_key(i) for i in data_inputs(node)] for name, node in nodes.items()}
    needed = reachable(map(node_of, fetches), lambda name: map(node_of, inputs[name]))
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(document, name="")
        tensors = {t.name: t for operation in graph.get_operations() for t in operation.outputs}
    numbers = {f"{name}:0": at for at, name in enumerate(given)}
    literals: dict[str, Literal] = {}

    def atom(tensor: str) -> Any:
        return literals[tensor] if tensor in literals else numbers[tensor]

    equations = []
    # in traced order; nodes that Grappler made run as soon as they can
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
