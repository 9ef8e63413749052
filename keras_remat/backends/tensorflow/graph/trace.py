"""Trace a Keras train step into a :class:`~keras_remat.core.graph.Graph`.

The model's own ``train_step`` is traced whole (forward, loss, backward, optimizer, metrics, state
updates), optimized by Grappler *first*, and the optimized graph becomes the ops: what is planned is
what will run. Why not before Grappler: its fusions and constant folding are worth having. Why not
let it run afterwards: it merges recomputations away (FACTS: control cycles, merged copies).

How TensorFlow's graph maps to ours:

* **Views** (``Reshape``, ``Identity``, ``Squeeze`` …) share storage, so they are folded into their
  readers, which then read the owner.
* **Reading a variable** shares the variable's buffer: its readers read a step input. Whatever
  assigns the variable comes ``after`` all of them, because a read that is still alive would make
  the assignment copy. A small variable is read into a value of its own instead, so that what
  depends on it (a dropout seed) can be recomputed after the variable changed.
* **Control edges** become ``after``; those that end in a view or a ``NoOp`` are passed on to what
  stands behind it.
* oneDNN's kernels may have an output that the graph does not show (``kinds.HIDDEN_OUTPUT``); it is
  a value like others.
* An op is **recomputable** when its OpDef has no state, or when it only reads a variable.

Handles: ``TracedStep.handles[op.id]`` is the ``NodeDef``; everything else TensorFlow-specific is in
:class:`TensorFlowStep`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from math import prod
from typing import Any

import tensorflow as tf

from keras_remat.backends.base import TracedStep
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.accumulate import accumulated_train_step
from keras_remat.backends.tensorflow.graph.rewrite import attached_nodes, rewrite_for_memory
from keras_remat.backends.tensorflow.graph.run_alone import output_shapes
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Value
from keras_remat.errors import UnsupportedModelError

#: Variables up to this size are copied when read, see the module docstring.
SMALL_VARIABLE_BYTES = 4096
#: The granularity of TensorFlow's BFC allocator.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, eq=False)
class TensorFlowStep(TracedStep):
    """A traced train step with what is needed to run it.

    Args:
        resident_bytes: bytes of weights, optimizer slots, other captured tensors and the batch,
            from their shapes.
        nodes: name → ``NodeDef`` of the optimized graph, views and constants included.
        versions: the GraphDef's ``versions`` field.
        library: the GraphDef's function library.
        value_of: tensor name → value id, for every tensor that is an op's output or a step input.
        folded: names of the nodes that are no ops: views, constants, variable reads, ``NoOp``.
        captures: placeholder name → the eager tensor (a variable's handle, a constant) it stands
            for.
        inputs: ``(placeholder name, dtype, shape)`` of the batch, in flattening order.
        output_tensors: names of the tensors the step returns, in flattening order of
            ``output_structure``.
        output_structure: what ``train_step`` returned, with symbolic tensors.
        tensor_shapes: tensor name → static shape, or ``None`` when unknown.
        attached: node name → the node whose op it is part of, see :func:`.rewrite.attached_nodes`.
        effects_behind: node name → the ops with an effect that have run once it has.
    """

    resident_bytes: int = 0
    nodes: Mapping[str, Any] = field(default_factory=dict)
    versions: Any = None
    library: Any = None
    value_of: Mapping[str, int] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    captures: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[tuple[str, Any, Any], ...] = ()
    output_tensors: tuple[str, ...] = ()
    output_structure: Any = None
    tensor_shapes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    attached: Mapping[str, str] = field(default_factory=dict)
    effects_behind: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def plain_surplus_bytes(self) -> int:
        """The products and sums of the largest weight's update, which are in place here
        (:mod:`.rewrite`)."""
        updates = (node for node in self.nodes.values() if node.op in kinds.IN_PLACE_UPDATES)
        variables = (
            private.variable_spec(self.captures[node.input[0]])
            for node in updates
            if node.input[0] in self.captures
        )
        return max(
            (2 * spec.shape.num_elements() * spec.dtype.size for spec in variables), default=0
        )

    @cached_property
    def op_id(self) -> dict[str, int]:
        """Node name → op id."""
        ids = {op.name: op.id for op in self.graph.ops}
        return ids | {name: ids[holder] for name, holder in self.attached.items()}

    @cached_property
    def node_names(self) -> dict[str, tuple[str, ...]]:
        """Op name → the names of its nodes, its own first."""
        names: dict[str, tuple[str, ...]] = {op.name: (op.name,) for op in self.graph.ops}
        for name, holder in self.attached.items():
            names[holder] += (name,)
        return names


def split_input(name: str) -> tuple[str, int]:
    """Splits a NodeDef input ``"node"``, ``"node:1"`` or ``"^node"`` into node name and output
    index (−1 for control)."""
    if name.startswith("^"):
        return name[1:], -1
    node, _, index = name.partition(":")
    return node, int(index or 0)


def tensor_key(name: str) -> str:
    """``"node"`` and ``"node:0"`` name the same tensor; returns the long form."""
    node, index = split_input(name)
    return f"{node}:{index}"


def data_spec(batch: Any) -> Any:
    """The batch's structure with a static ``TensorSpec`` for every tensor; ``None`` stays
    ``None``."""

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, tf.TensorSpec):
            return leaf
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise UnsupportedModelError(
                f"The batch holds a {type(leaf).__name__}, whose size differs from step to step; rematerialization needs dense tensors."
            )
        tensor = leaf if isinstance(leaf, tf.Tensor) else tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, batch)


def trace(model: Any, batch: Any, micro_batches: int = 1) -> TensorFlowStep:
    """Traces ``model.train_step`` for batches of this shape; the model is not changed.

    Args:
        model: a compiled and built Keras model.
        batch: what ``train_step`` gets: ``(x, y[, sample_weight])`` as tensors, arrays or
            ``tf.TensorSpec``.
        micro_batches: more than 1 trains the batch in pieces, see :mod:`.accumulate`.

    Raises:
        UnsupportedModelError: the step cannot be carried; the message says which op or type, and
            why.
    """
    structure = data_spec(batch)
    train_step = (
        model.train_step if micro_batches == 1 else accumulated_train_step(model, micro_batches)
    )
    concrete = tf.function(train_step, autograph=False).get_concrete_function(structure)
    graph = concrete.graph
    effects = [op.name for op in graph.control_outputs if _has_effect(op.type)]
    fetches = [*dict.fromkeys(tensor.name for tensor in graph.outputs), *effects]
    order = {op.name: at for at, op in enumerate(graph.get_operations())}
    captures = {placeholder.op.name: external for external, placeholder in graph.captures}
    inputs = tuple((t.op.name, t.dtype, t.shape) for t in graph.inputs if t.op.name not in captures)
    of_handle = {id(variable.handle): variable for variable in graph.variables}
    variables = {
        name: of_handle[id(external)]
        for name, external in captures.items()
        if id(external) in of_handle
    }
    graph_def = private.optimize_graph(graph.as_graph_def(), fetches, variables)
    nodes = {node.name: node for node in graph_def.node}
    outputs = tuple(tensor_key(tensor.name) for tensor in graph.outputs)
    scalars = {
        op.name for op in graph.get_operations() if op.outputs and op.outputs[0].shape.rank == 0
    }
    scalars |= {
        node.name
        for node in graph_def.node
        if node.op == "Const" and not node.attr["value"].tensor.tensor_shape.dim
    }
    nodes = rewrite_for_memory(
        nodes, [*(split_input(t)[0] for t in outputs), *effects], order, scalars
    )
    unsupported = sorted({node.op for node in nodes.values()} & kinds.UNSUPPORTED)
    if unsupported:
        raise UnsupportedModelError(
            f"The train step contains ops that cannot be scheduled: {', '.join(unsupported)}."
        )
    shapes = _static_shapes(nodes, graph_def, captures, inputs)
    translation = _Translation(nodes, captures, inputs, shapes, order)
    return translation.step(
        outputs,
        versions=graph_def.versions,
        library=graph_def.library,
        captures={name: external for name, external in captures.items() if name in nodes},
        inputs=inputs,
        output_tensors=outputs,
        output_structure=concrete.structured_outputs,
    )


def _has_effect(kind: str) -> bool:
    return (
        private.is_stateful(kind)
        and kind not in kinds.VARIABLE_READS
        and kind not in kinds.PURE_STATEFUL | {"Placeholder"}
    )


def _static_shapes(
    nodes: Mapping[str, Any],
    graph_def: Any,
    captures: Mapping[str, Any],
    inputs: tuple[tuple[str, Any, Any], ...],
) -> dict[str, tuple[tuple[int, ...] | None, Any]]:
    """Tensor name → (static shape or ``None``, dtype), by TensorFlow's own shape inference on the
    optimized graph."""
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
        for op in tf.compat.v1.get_default_graph().get_operations():
            for tensor in op.outputs:
                shape = tuple(tensor.shape) if tensor.shape.is_fully_defined() else None
                found[tensor.name] = (shape, tensor.dtype)
        for name, tensor in mapped.items():
            found[name] = (
                tuple(tensor.shape) if tensor.shape.is_fully_defined() else None,
                tensor.dtype,
            )
        return []

    private.build_function(build, [tf.TensorSpec(shape, dtype) for _, dtype, shape in inputs])
    _add_shapes_like_variables(nodes, captures, found)
    for name, node in nodes.items():
        if node.op in kinds.SIZED_BY_LIBRARY:
            operands = [found[tensor_key(i)] for i in node.input if not i.startswith("^")]
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
    """Zeros in the shape of a variable, also of one that has been through a loop: a loop's gradient
    begins with them."""
    for name, node in nodes.items():
        shape, dtype = shapes.get(f"{name}:0", (None, None))
        if node.op != "Fill" or shape is not None:
            continue
        source, _ = split_input(node.input[0])
        if nodes[source].op != "VariableShape":
            continue
        handle, index = split_input(nodes[source].input[0])
        while (
            nodes[handle].op in kinds.CONTROL_FLOW and "While" in nodes[handle].op
        ):  # hands every resource on in its place
            handle, index = split_input(nodes[handle].input[index])
        if handle in captures:
            shapes[f"{name}:0"] = (tuple(private.variable_spec(captures[handle]).shape), dtype)


def _add_hidden_outputs(
    nodes: Mapping[str, Any], shapes: dict[str, tuple[tuple[int, ...] | None, Any]]
) -> None:
    """Gives the forward ops of ``kinds.HIDDEN_OUTPUT`` their second output: an index per element of
    the first, of a byte where the window is smaller than 256 elements."""
    forward = {kind for kind, _ in kinds.HIDDEN_OUTPUT}
    for name, node in nodes.items():
        shape, dtype = shapes.get(f"{name}:0", (None, None))
        if node.op in forward and dtype == tf.float32:
            shapes[f"{name}:1"] = (
                shape,
                tf.uint8 if prod(node.attr["ksize"].list.i) < 256 else tf.int32,
            )


class _Translation:
    """One pass from NodeDefs to ops and values."""

    def __init__(
        self,
        nodes: Mapping[str, Any],
        captures: Mapping[str, Any],
        inputs: tuple[tuple[str, Any, Any], ...],
        shapes: Mapping[str, tuple[tuple[int, ...] | None, Any]],
        order: Mapping[str, int],
    ):
        self.nodes, self.captures, self.shapes = nodes, captures, shapes
        self.order = order
        self.attached = attached_nodes(nodes)
        self.step_inputs = {name for name, *_ in inputs} | set(captures)
        self.copied_reads = {
            name
            for name, node in nodes.items()
            if node.op == "ReadVariableOp" and self._nbytes(f"{name}:0") <= SMALL_VARIABLE_BYTES
        }
        self.folded = frozenset(name for name, node in nodes.items() if self._is_folded(node))
        self.views: dict[str, str] = {}

    def _is_folded(self, node: Any) -> bool:
        if node.name in self.step_inputs or node.op in {"Placeholder", "Const", "NoOp"}:
            return True
        if node.op == "ReadVariableOp":
            return node.name not in self.copied_reads
        return node.op in kinds.VIEWS

    def _nbytes(self, tensor: str) -> int:
        shape, dtype = self.shapes.get(tensor, (None, None))
        if shape is None or dtype is None or dtype.size is None:
            return 0
        size = int(dtype.size)
        for dim in shape:
            size *= dim
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def owner(self, tensor: str) -> str:
        """The tensor whose storage ``tensor`` shares: an op's output, a constant, a batch input, or
        a variable."""
        path = []
        while tensor not in self.views:
            name, index = split_input(tensor)
            node = self.nodes[name]
            if (
                name not in self.folded
                or not node.input
                or node.op in {"Placeholder", "Const", "NoOp"}
            ):
                self.views[tensor] = tensor
                break
            path.append(tensor)
            source = node.input[index] if node.op == "IdentityN" else node.input[0]
            tensor = tensor_key(source)
        for passed in path:
            self.views[passed] = self.views[tensor]
        return self.views[tensor]

    def _op_of(self, name: str) -> str:
        """The op a node is, or is part of."""
        return self.attached.get(name, name)

    def _folded_behind(self, name: str) -> Iterator[str]:
        """The folded nodes between an op and the ops it reads from, for their control edges."""
        stack = [split_input(i)[0] for i in self.nodes[name].input if not i.startswith("^")]
        seen: set[str] = set()
        while stack:
            node_name = stack.pop()
            if node_name in self.folded and node_name not in seen:
                seen.add(node_name)
                yield node_name
                stack += [
                    split_input(i)[0] for i in self.nodes[node_name].input if not i.startswith("^")
                ]

    @cached_property
    def effects_behind(self) -> dict[str, frozenset[str]]:
        """Every node → the ops with an effect that have run once it has, the nearest on each path;
        an op with an effect is its own.

        That is what a control edge asks for. That an op without an effect has run makes no
        difference to anybody, and waiting for it would forbid to run it again; Grappler leaves such
        edges where it folds the shape of a value into a constant. (Reads of variables are kept
        before writes by ``_reads_before_write``.)
        """
        inputs = {
            name: [split_input(i)[0] for i in node.input] for name, node in self.nodes.items()
        }
        behind: dict[str, frozenset[str]] = {}
        for name in TopologicalSorter(inputs).static_order():
            if _has_effect(self.nodes[name].op):
                behind[name] = frozenset({name})
            else:
                behind[name] = frozenset().union(*(behind[source] for source in inputs[name]))
        return behind

    def _edges(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Data predecessors and ``after`` predecessors of every op, by name."""
        ops = [name for name in self.nodes if name not in self.folded and name not in self.attached]
        data: dict[str, set[str]] = {}
        after: dict[str, set[str]] = {name: set() for name in ops}
        readers_of_read: dict[str, set[str]] = {}
        for name in ops:
            owners = {
                self.owner(tensor_key(i)) for i in self.nodes[name].input if not i.startswith("^")
            }
            data[name] = {self._op_of(split_input(o)[0]) for o in owners} - self.folded
            for folded in self._folded_behind(name):
                if self.nodes[folded].op == "ReadVariableOp":
                    readers_of_read.setdefault(folded, set()).add(name)
        for name in ops:
            for holder in (name, *self._folded_behind(name)):
                for control in self.nodes[holder].input:
                    if not control.startswith("^"):
                        continue
                    target = control[1:]
                    if target in readers_of_read and holder == name:
                        after[name] |= readers_of_read[target] - {name}
                    after[name] |= self.effects_behind[target] - {name}
            for read in self._reads_before_write.get(name, ()):
                after[name] |= (
                    readers_of_read.get(read, set()) if read in self.folded else {read}
                ) - {name}
        return data, after

    @cached_property
    def _reads_before_write(self) -> dict[str, list[str]]:
        """For every node that may change a variable, the reads of that variable it follows, by
        whatever path.

        Grappler drops a control edge from a read to a write where a longer path leads there; a copy
        of the read would not be on it.
        """
        inputs = {
            name: [split_input(i)[0] for i in node.input] for name, node in self.nodes.items()
        }
        resources = {
            name: [h for i in inputs[name] if (h := self._resource(i))] for name in self.nodes
        }
        bit: dict[str, int] = {}
        reads: dict[str, list[str]] = {}
        result: dict[str, list[str]] = {}
        passed: dict[str, int] = {}  # bit set of the reads among a node's ancestors
        for name in TopologicalSorter(inputs).static_order():
            before = 0
            for source in inputs[name]:
                before |= passed[source]
            for handle in resources[name]:
                if self.nodes[name].op not in kinds.VARIABLE_READS:
                    result.setdefault(name, []).extend(
                        r for r in reads.get(handle, ()) if before & bit[r]
                    )
                else:
                    bit[name] = 1 << len(bit)
                    before |= bit[name]
                    reads.setdefault(handle, []).append(name)
            passed[name] = before
        return result

    def _resource(self, name: str) -> str | None:
        """The captured variable a node hands on, or ``None``."""
        while self.nodes[name].op == "Identity":
            name = split_input(self.nodes[name].input[0])[0]
        external = self.captures.get(name)
        return name if external is not None and external.dtype == tf.resource else None

    def _topological(
        self, data: Mapping[str, set[str]], after: Mapping[str, set[str]]
    ) -> tuple[list[str], set[str]]:
        """Op names in topological order, earliest traced first, and those left over in a cycle."""
        successors: dict[str, list[str]] = {name: [] for name in data}
        missing = {}
        for name in data:
            before = data[name] | after[name]
            missing[name] = len(before)
            for earlier in before:
                successors[earlier].append(name)
        rank = self._ranks(data)

        def key(name: str) -> tuple[int, str, list[int], str]:
            """Names decide last: they differ between two builds of one model."""
            return rank[name], self.nodes[name].op, sorted(rank[i] for i in data[name]), name

        ready = [key(name) for name, count in missing.items() if count == 0]
        heapq.heapify(ready)
        result: list[str] = []
        while ready:
            name = heapq.heappop(ready)[-1]
            result.append(name)
            for later in successors[name]:
                missing[later] -= 1
                if missing[later] == 0:
                    heapq.heappush(ready, key(later))
        return result, set(data) - set(result)

    def _ranks(self, data: Mapping[str, set[str]]) -> dict[str, int]:
        """The place of every op in the traced order; an op that Grappler or a rewrite made takes
        the place of its last input.

        No op stands behind one that reads from it: where Grappler merges equal ops, the name of the
        later one may be the one that stays.
        """
        rank: dict[str, int] = {name: self.order[name] for name in data if name in self.order}
        for start in data:
            stack = [start]
            while stack:
                name = stack[-1]
                if name in rank:
                    stack.pop()
                    continue
                waiting = [i for i in data[name] if i not in rank]
                if waiting:
                    stack += waiting
                else:
                    rank[name] = max((rank[i] for i in data[name]), default=0)
                    stack.pop()
        for name in reversed(list(TopologicalSorter(data).static_order())):
            for source in data[name]:
                rank[source] = min(rank[source], rank[name])
        return rank

    def _ordered(self) -> tuple[list[str], dict[str, set[str]]]:
        while True:
            data, after = self._edges()
            order, cycle = self._topological(data, after)
            if not cycle:
                return order, after
            # A reader of a variable's old value depends on the assignment: give that read a value
            # of its own.
            reads = {
                f
                for name in cycle
                for f in self._folded_behind(name)
                if self.nodes[f].op == "ReadVariableOp"
            }
            if not reads:
                raise UnsupportedModelError(
                    f"The train step's control edges form a cycle through {sorted(cycle)[:3]}."
                )
            self.copied_reads |= reads
            self.folded = self.folded - reads
            self.views.clear()

    def _phases(
        self, order: list[str], data: Mapping[str, set[str]], after: Mapping[str, set[str]]
    ) -> dict[str, str]:
        """Backward: traced by the gradient tape, or between two such ops; update: what else depends
        on those; forward: the rest.

        A weight's update may depend on its gradient only through a slot that is assigned and read
        again, hence ``after``.
        """
        gradient = {name for name in order if "gradient_tape/" in name}
        below, above = set(gradient), set(gradient)
        for name in order:
            if (data[name] | after[name]) & below:
                below.add(name)
        for name in reversed(order):
            if name in above:
                above |= data[name]
        return {
            n: BACKWARD
            if n in gradient or (n in below and n in above)
            else UPDATE
            if n in below
            else FORWARD
            for n in order
        }

    def step(self, outputs: tuple[str, ...], **rest: Any) -> TensorFlowStep:
        order, after = self._ordered()
        data, _ = self._edges()
        phases = self._phases(order, data, after)
        ids = {name: at for at, name in enumerate(order)}
        ids |= {name: ids[holder] for name, holder in self.attached.items()}
        nodes_of = {name: [name] for name in order}
        for name, holder in self.attached.items():
            nodes_of[holder].append(name)
        values: list[Value] = []
        value_of: dict[str, int] = {}

        def value(tensor: str, producer: int | None) -> int:
            if tensor not in value_of:
                shape, dtype = self.shapes.get(tensor, (None, None))
                value_of[tensor] = len(values)
                nbytes = self._nbytes(tensor)
                values.append(
                    Value(
                        len(values), tensor, nbytes, shape, getattr(dtype, "name", None), producer
                    )
                )
            return value_of[tensor]

        ops: list[Op] = []
        for name in order:
            node = self.nodes[name]
            owners = [self.owner(tensor_key(i)) for i in node.input if not i.startswith("^")]
            owners += self._hidden_inputs(node, owners)
            tried = tuple(owners)  # a kernel looks for a buffer to take over in this order
            if (
                node.op in kinds.COMMUTATIVE
            ):  # Grappler sorts these by name; the fingerprint must not see names
                owners.sort(
                    key=lambda owner: (
                        ids.get(split_input(owner)[0], -1),
                        self.order.get(split_input(owner)[0], -1),
                    )
                )
            reads = tuple(dict.fromkeys(value(o, ids.get(split_input(o)[0])) for o in owners))
            writes = tuple(
                value(tensor, ids[name])
                for part in nodes_of[name]
                for tensor in _outputs_of(part, self.shapes)
            )
            # nodes that the layout pass fuses run once: it would fuse them crosswise with copies
            # that read the same gradient
            fused = len(nodes_of[name]) > 1
            pure = (
                not private.is_stateful(node.op)
                or node.op in kinds.VARIABLE_READS | kinds.PURE_STATEFUL
            )
            reusable = dict.fromkeys(value_of[owner] for owner in self._reusable(node, tried))
            ops.append(
                Op(
                    ids[name],
                    name,
                    node.op,
                    reads,
                    writes,
                    phases[name],
                    pure and not fused,
                    tuple(sorted(ids[a] for a in after[name])),
                    tuple(v for v in reusable if values[v].producer is not None),
                )
            )
        finals = tuple(
            dict.fromkeys(value_of[o] for t in outputs if (o := self.owner(t)) in value_of)
        )
        resident = sum(self._resident(name) for name in self.step_inputs if name in self.nodes)
        return TensorFlowStep(
            graph=Graph(tuple(ops), tuple(values), finals),
            handles={ids[name]: self.nodes[name] for name in order},
            backend="tensorflow",
            resident_bytes=resident,
            nodes=self.nodes,
            value_of=value_of,
            folded=self.folded,
            attached=self.attached,
            effects_behind=self.effects_behind,
            tensor_shapes={tensor: shape for tensor, (shape, _) in self.shapes.items()},
            **rest,
        )

    def _reusable(self, node: Any, owners: Sequence[str]) -> Sequence[str]:
        """Those of an op's inputs whose buffer its kernel may take over, in the order in which it
        tries."""
        if node.op in kinds.REUSES_INPUT:
            return owners
        if node.op in kinds.REUSES_FIRST_INPUT:
            return owners[:1]
        if (
            node.op in kinds.FUSED and b"Add" in node.attr["fused_ops"].list.s
        ):  # the sum is formed in place of what is added
            with_input = [
                kind for kind in node.attr["fused_ops"].list.s if kind in kinds.FUSED_WITH_INPUT
            ]
            return owners[2 + with_input.index(b"Add") :][:1]
        return ()

    def _hidden_inputs(self, node: Any, owners: Sequence[str]) -> Iterator[str]:
        """What oneDNN's pass makes a gradient op read beside its inputs."""
        for (forward, gradient), at in kinds.HIDDEN_OUTPUT.items():
            if node.op != gradient:
                continue
            name, index = split_input(owners[at])
            if self.nodes[name].op == forward and index == 0 and f"{name}:1" in self.shapes:
                yield f"{name}:1"

    def _resident(self, name: str) -> int:
        external = self.captures.get(name)
        if external is not None and external.dtype == tf.resource:
            handles = getattr(external, "_handle_data", None)
            entries = handles.shape_and_type if handles is not None else ()
            total = 0
            for entry in entries:
                size = tf.as_dtype(entry.dtype).size
                for dim in entry.shape.dim:
                    size *= max(dim.size, 0)
                total += size
            return total
        return self._nbytes(f"{name}:0")


def _outputs_of(name: str, shapes: Mapping[str, Any]) -> Iterator[str]:
    index = 0
    while f"{name}:{index}" in shapes:
        yield f"{name}:{index}"
        index += 1
