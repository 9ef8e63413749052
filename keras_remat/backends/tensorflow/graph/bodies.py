"""Finds the memory of loops and branches: inside their bodies, and kept for a branch's gradient.

Only one of several branches runs. Each keeps the values its gradient needs in outputs of type
variant: an ``Optional`` around a buffer that the branch has made, or an empty one. The outputs are
counted as those of the branch that keeps the most. An ``Optional`` around a value that the branch
returns anyway takes no further memory.

The bodies are written into a graph only to get their shapes; they do not run.

Reference: ``cond_v2.py`` of TensorFlow (``_make_intermediates_match``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.tables import names
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.kernel_scratch import own_scratch_bytes, runs_own_kernels
from keras_remat.backends.tensorflow.graph.lists import WRITES, elements_of
from keras_remat.backends.tensorflow.graph.nodes import data_inputs, node_of, shape_of, tensor_key
from keras_remat.backends.tensorflow.memory.best_fit import rounded

#: Attributes that name the bodies of a loop or branch; a loop's condition holds next to nothing.
_BODIES = ("body", "then_branch", "else_branch", "branches")
#: Operations of a body whose outputs are buffers made by other operations.
_MAKES_NOTHING = kinds.VARIABLE_READS | names("""
    Placeholder Const OptionalGetValue TensorListGetItem TensorListPopBack
""")


#: Ops that add a round's part to a sum.
_SUMS = frozenset({"Add", "AddV2", "AddN"})


@dataclass(frozen=True)
class BodyBytes:
    """Holds the memory of the loops and branches of a graph.

    Args:
        handed_on: tensor name → bytes behind the ``Optional`` that a branch returns.
        shared: tensor name of an ``Optional`` → the output of the same op whose buffer it holds.
        workspace: op name → the most bytes alive in its largest body beside the op's inputs and
            outputs, if the body runs one op at a time.
        waiting: name of a loop → bytes that wait to be added to sums, per round that Keras's own
            step begins before an earlier round has ended.
    """

    handed_on: dict[str, int] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)


def body_bytes(
    nodes: Mapping[str, Any],
    library: Any,
    captures: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...] | None, Any]],
    smallest_bytes: int,
    in_lists: Mapping[str, int],
) -> BodyBytes:
    """Returns the memory of the loops and branches of a graph.

    Args:
        nodes: nodes of the graph, by name.
        library: its functions.
        captures: placeholder name → the eager tensor that it stands for.
        shapes: tensor name → static shape and dtype.
        smallest_bytes: bytes of the smallest buffer that counts, as in the allocator.
        in_lists: tensor name → bytes of the elements that were made with the list.
    """
    found = BodyBytes()
    calls = [node for node in nodes.values() if node.op in kinds.CONTROL_FLOW]
    functions = {function.signature.name: function for function in library.function}

    def known_shape(tensor: str) -> tuple[int, ...] | None:
        return shapes.get(tensor, (None, None))[0]

    def operand(tensor: str) -> Any:
        external = captures.get(node_of(tensor))
        if external is not None and external.dtype == tf.resource:
            return private.capture(external)
        shape, dtype = shapes.get(tensor_key(tensor), (None, tf.variant))
        elements = elements_of(nodes, known_shape, tensor) if dtype == tf.variant else None
        if elements is not None:
            return private.list_placeholder(*elements)
        return tf.compat.v1.placeholder(dtype, shape)

    def build() -> list[Any]:
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(library=library), name="")
        bodies = _Bodies(functions, smallest_bytes)
        for node in calls:
            operands = [operand(tensor) for tensor in data_inputs(node)]
            filled = [f"{node.name}:{at}" in in_lists for at in range(len(operands))]
            kept, shared, workspace = bodies.of(node, operands, filled)
            found.handed_on.update({f"{node.name}:{at}": n for at, n in kept.items()})
            found.shared.update(
                {f"{node.name}:{at}": f"{node.name}:{to}" for at, to in shared.items()}
            )
            found.workspace[node.name] = workspace
            if bodies.waiting:
                found.waiting[node.name] = bodies.waiting
        return []

    if calls:
        private.build_function(build, [])
    return found


@dataclass(frozen=True)
class _Kept:
    """Holds what one body keeps in its outputs of type variant.

    Args:
        nbytes: index of an output → bytes that only this output holds.
        shared: index of an output → the output whose buffer it holds.
    """

    nbytes: Mapping[int, int]
    shared: Mapping[int, int]

    def rank(self) -> tuple[int, int]:
        """Returns the sort key by which the branch that keeps the most is found."""
        return sum(self.nbytes.values()), len(self.shared)


class _Bodies:
    """Reads bodies, also those of inner loops and branches, in the graph that is being built.

    Attributes:
        waiting: bytes that a round of the last loop read adds to sums; 0 after a branch.
    """

    def __init__(self, functions: Mapping[str, Any], smallest_bytes: int):
        self._functions, self._smallest = functions, smallest_bytes
        self._count = self.waiting = 0

    def of(
        self, node: Any, operands: Sequence[Any], filled: Sequence[bool] = ()
    ) -> tuple[Mapping[int, int], Mapping[int, int], int]:
        """Returns index of an output → bytes kept for the gradient, index of an output → the output
        whose buffer it shares, and the bytes of workspace, of a loop or branch.

        Args:
            node: the loop or branch.
            operands: tensors for its inputs.
            filled: for every output whether it is a list whose elements count as the op's output.
        """
        is_loop = "While" in node.op
        most, needed, results = _Kept({}, {}), 0, 0
        for definition in map(self._functions.get, _called(node)):
            if definition is None:
                continue
            self._count += 1
            given = operands if is_loop else operands[1:]
            operations, returned = private.import_body(definition, given, f"body_{self._count}")
            inner = {
                op.name: self.of(op.node_def, op.inputs)
                for op in operations
                if op.type in kinds.CONTROL_FLOW
            }
            in_lists = _elements(returned, given, filled) if is_loop else frozenset()
            self.waiting = self._added(operations, returned, given) if is_loop else 0
            needed = max(needed, self._needed(operations, returned, inner, in_lists))
            if not is_loop:  # the results of a loop's round live beside the round's inputs
                most = max(most, self._kept(returned, inner), key=_Kept.rank)
                results = sum(map(self._nbytes, returned))
        return most.nbytes, most.shared, max(0, needed - results - sum(most.nbytes.values()))

    def _added(
        self, operations: Sequence[Any], returned: Sequence[Any], given: Sequence[Any]
    ) -> int:
        """Returns the bytes that a round adds to sums. Only sums count that nothing else in the
        round reads: no later round waits for them."""
        reading = (op for op in operations if op.type not in kinds.VIEWS)
        readers = Counter(_owner(tensor).name for op in reading for tensor in op.inputs)
        added = 0
        for total, tensor in zip(given, returned, strict=False):
            read = [_owner(x) for x in _owner(tensor).op.inputs]
            if _owner(tensor).op.type in _SUMS and readers[total.name] == 1:
                parts = [x for x in read if x.name != total.name]
                added += sum(self._made(x, {}) for x in parts) if len(parts) < len(read) else 0
        return added

    def _kept(self, returned: Sequence[Any], inner: Mapping[str, Any]) -> _Kept:
        """Returns what the outputs of a branch keep, each buffer once."""
        first: dict[str, int] = {
            _owner(tensor).name: at
            for at, tensor in enumerate(returned)
            if tensor.dtype != tf.variant
        }
        nbytes: dict[int, int] = {}
        shared: dict[int, int] = {}
        for at, tensor in enumerate(returned):
            if tensor.dtype != tf.variant or tensor.op.type != "OptionalFromValue":
                continue
            owner = _owner(tensor.op.inputs[0])
            if owner.name in first:
                shared[at] = first[owner.name]
                continue
            first[owner.name] = at
            if held := self._made(owner, inner):
                nbytes[at] = held
        return _Kept(nbytes, shared)

    def _made(self, tensor: Any, inner: Mapping[str, Any]) -> int:
        """Returns the bytes of a tensor's buffer; 0 if the body does not make the buffer."""
        if tensor.op.type in _MAKES_NOTHING:
            return 0
        if tensor.dtype == tf.variant:
            handed_on = inner.get(tensor.op.name, ({},))[0]
            return int(handed_on.get(tensor.value_index, 0))
        return self._nbytes(tensor)

    def _nbytes(self, tensor: Any) -> int:
        if not tensor.shape.is_fully_defined():
            return 0
        nbytes = rounded(int(tensor.dtype.size) * prod(tensor.shape))
        return nbytes if nbytes >= self._smallest else 0

    def _needed(
        self,
        operations: Sequence[Any],
        returned: Sequence[Any],
        inner: Mapping[str, Any],
        in_lists: Collection[str] = (),
    ) -> int:
        """Returns the most bytes alive while a body runs in its order, beside its inputs.

        Args:
            operations: the body's operations, in order.
            returned: tensors that the body returns.
            inner: name of an inner loop or branch → result of :meth:`of`.
            in_lists: names of tensors that count elsewhere, as elements of lists. Before they are
                made, other values may use their bytes.
        """
        last = {_owner(tensor).name: at for at, op in enumerate(operations) for tensor in op.inputs}
        kept = {_owner(tensor).name for tensor in _unwrapped(returned)}
        alive: dict[str, int] = {}
        made = (output for op in operations for output in op.outputs if output.name in in_lists)
        room = sum(self._made(output, inner) for output in made)
        most = 0
        for at, op in enumerate(operations):
            if op.type in kinds.VIEWS | {"OptionalFromValue"}:
                continue
            read = dict.fromkeys(_owner(tensor).name for tensor in op.inputs)
            ending = [n for n in read if n in alive and n not in kept and last[n] <= at]
            for output in op.outputs:
                nbytes = self._made(output, inner)
                if op.type in kinds.REUSES_INPUT:
                    taken = next((name for name in ending if alive[name] == nbytes), None)
                    if taken is not None:
                        ending.remove(taken)
                        del alive[taken]
                is_counted = output.name in in_lists
                room -= nbytes if is_counted else 0
                alive[output.name] = 0 if is_counted else nbytes
            workspace = inner[op.name][2] if op.name in inner else _scratch_bytes(op)
            most = max(most, sum(alive.values()) + workspace - room)
            unread = (o.name for o in op.outputs if o.name not in last and o.name not in kept)
            for name in (*ending, *unread):
                del alive[name]
        return most


def _elements(
    returned: Sequence[Any], given: Sequence[Any], filled: Sequence[bool]
) -> frozenset[str]:
    """Returns the names of the tensors that a round, or the next round, puts into lists.

    Args:
        returned, given: tensors that the body returns and gets.
        filled: for every returned tensor whether it is a list whose elements are wanted.
    """
    at_of = {tensor.name: at for at, tensor in enumerate(given)}
    found = set()
    for tensor, is_filled in zip(returned, filled, strict=False):
        write = _owner(tensor).op
        if is_filled and write.type in WRITES:
            element = _owner(write.inputs[-1])
            if element.name in at_of:
                element = _owner(returned[at_of[element.name]])
            found.add(element.name)
    return frozenset(found)


def _scratch_bytes(op: Any) -> int:
    """Returns the bytes of scratch of an operation's kernel, where shapes give them; else 0."""
    if not op.outputs or not runs_own_kernels():
        return 0
    operands = [shape_of(tensor) for tensor in op.inputs]
    return own_scratch_bytes(op.node_def, operands, shape_of(op.outputs[0]))


def _called(node: Any) -> Iterator[str]:
    """Yields the names of a loop's or branch's bodies."""
    for name in _BODIES:
        if name in node.attr:
            attribute = node.attr[name]
            yield from (f.name for f in (attribute.func, *attribute.list.func) if f.name)


def _owner(tensor: Any) -> Any:
    """Returns the tensor whose buffer a tensor shares."""
    while tensor.op.type in kinds.VIEWS and tensor.op.inputs:
        at = tensor.value_index if tensor.op.type == "IdentityN" else 0
        tensor = tensor.op.inputs[at]
    return tensor


def _unwrapped(returned: Sequence[Any]) -> Iterator[Any]:
    """Yields the tensors that a body returns; for an ``Optional``, the tensor inside it."""
    for tensor in returned:
        wrapped = tensor.op.type == "OptionalFromValue"
        yield tensor.op.inputs[0] if wrapped else tensor
