"""Translates the nodes of an optimized graph into ops and values, by the rules in :mod:`.trace`.

One class, though long: views, control edges, order and phases are facts about the same nodes, and
each needs the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, reduce
from graphlib import TopologicalSorter
from itertools import chain
from math import prod
from operator import or_
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.effects import has_effect
from keras_remat.backends.tensorflow.graph.nodes import (
    control_inputs,
    data_inputs,
    node_of,
    outputs_of,
    reachable,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.rewrite import attached_nodes, traced_places
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.backends.tensorflow.memory.best_fit import rounded
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Value
from keras_remat.core.topology import topological_order
from keras_remat.errors import UnsupportedModelError

#: Variables up to this many bytes are copied when read, see :mod:`.trace`.
SMALL_VARIABLE_BYTES = 4096


class Translation:
    """Makes one pass from NodeDefs to ops and values."""

    def __init__(
        self,
        nodes: Mapping[str, Any],
        captures: Mapping[str, Any],
        inputs: tuple[tuple[str, Any, Any], ...],
        shapes: Mapping[str, tuple[tuple[int, ...] | None, Any]],
        order: Mapping[str, int],
        behind: Mapping[str, int],
        shared: Mapping[str, str],
    ):
        """
        Args:
            nodes: name → node of the optimized graph.
            captures: placeholder name → the eager tensor that it stands for.
            inputs: as in :class:`.step.TensorFlowStep`.
            shapes: tensor name → static shape and dtype.
            order: node name → position in the traced order.
            behind: name of a tensor of type variant → the bytes behind it.
            shared: name of a tensor of type variant → the output of its op whose buffer it keeps
                alive.
        """
        self.nodes, self.captures, self.shapes = nodes, captures, shapes
        self.behind, self.shared = behind, shared
        self.order = order
        self.attached = attached_nodes(nodes)
        self.step_inputs = {name for name, *_ in inputs} | set(captures)
        self.sources = {name: [node_of(i) for i in node.input] for name, node in nodes.items()}
        scattered = {
            self._resource(self.sources[name][0])
            for name, node in nodes.items()
            if node.op in kinds.UPDATES_ROWS
        }
        self.copied_reads = {
            name
            for name, node in nodes.items()
            if node.op == "ReadVariableOp"
            and (
                self._nbytes(f"{name}:0") <= SMALL_VARIABLE_BYTES
                or self._resource(self.sources[name][0]) in scattered
            )
        }
        self.folded = frozenset(name for name, node in nodes.items() if self._is_folded(node))
        self.views: dict[str, str] = {}

    def _is_folded(self, node: Any) -> bool:
        if node.op == "ReadVariableOp":
            return node.name not in self.copied_reads
        return node.op in kinds.VIEWS | {"Placeholder", "Const", "NoOp"}

    def _nbytes(self, tensor: str) -> int:
        if tensor in self.behind:
            return self.behind[tensor]
        shape, dtype = self.shapes.get(tensor, (None, None))
        if shape is None:
            return 0
        return rounded(int(dtype.size) * prod(shape))

    def owner(self, tensor: str) -> str:
        """Returns the tensor whose storage ``tensor`` shares: an op's output, a constant, a batch
        input, or a variable."""
        path = []
        while tensor not in self.views:
            name = node_of(tensor)
            read = data_inputs(self.nodes[name])
            if name not in self.folded or not read:
                self.views[tensor] = tensor
                break
            path.append(tensor)
            tensor = tensor_key(read[0])
        for passed in path:
            self.views[passed] = self.views[tensor]
        return self.views[tensor]

    def _folded_behind(self, name: str) -> set[str]:
        """Returns the folded nodes between an op and the ops it reads from."""

        def folded(reader: str) -> frozenset[str]:
            return self.folded.intersection(map(node_of, data_inputs(self.nodes[reader])))

        return reachable(folded(name), folded)

    @cached_property
    def _computed_views(self) -> set[str]:
        """Returns the views whose shapes are computed, not constant."""
        return {
            name
            for name in self.folded
            if any(self.nodes[node_of(i)].op != "Const" for i in data_inputs(self.nodes[name])[1:])
        }

    def _shapes_read(self, *names: str) -> list[str]:
        """Returns the computed tensors that are shapes of views (the second input of ``Reshape``).
        The views are those among ``names`` and those that these nodes read from."""
        if not self._computed_views:
            return []
        views = {*names, *(view for name in names for view in self._folded_behind(name))}
        told = (data_inputs(self.nodes[view])[1:] for view in views & self._computed_views)
        made = {self.owner(tensor_key(tensor)) for inputs in told for tensor in inputs}
        return sorted(
            (tensor for tensor in made if node_of(tensor) not in self.folded),
            key=lambda tensor: (self.order.get(node_of(tensor), -1), split_input(tensor)[1]),
        )

    @cached_property
    def effects_behind(self) -> dict[str, frozenset[str]]:
        """Returns node → the ops with an effect that have run once the node has, the nearest on
        each path. For an op with an effect it is the op itself.

        A control edge means waiting for these. Nobody notices whether an op without an effect has
        run, and waiting for it would forbid running it again; Grappler leaves such edges where it
        folds the shape of a value into a constant. (``_reads_before_write`` keeps reads of
        variables before writes.)
        """
        behind: dict[str, frozenset[str]] = {}
        for name in TopologicalSorter(self.sources).static_order():
            if has_effect(self.nodes[name].op):
                behind[name] = frozenset({name})
            else:
                behind[name] = frozenset().union(*(behind[i] for i in self.sources[name]))
        return behind

    def _edges(self) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
        """Returns data predecessors and ``after`` predecessors of every op, by name."""
        ops = [name for name in self.nodes if name not in self.folded and name not in self.attached]
        data: dict[str, set[str]] = {}
        after: dict[str, set[str]] = {name: set() for name in ops}
        readers_of_read: dict[str, set[str]] = defaultdict(set)
        for name in ops:
            owners = map(self.owner, map(tensor_key, data_inputs(self.nodes[name])))
            sources = map(node_of, (*owners, *self._shapes_read(name)))
            data[name] = {self.attached.get(n, n) for n in sources} - self.folded
            for folded in self._folded_behind(name):
                if self.nodes[folded].op == "ReadVariableOp":
                    readers_of_read[folded].add(name)
        for name in ops:
            for holder in (name, *self._folded_behind(name)):
                for target in control_inputs(self.nodes[holder]):
                    if holder == name:
                        after[name] |= readers_of_read[target]
                    after[name] |= self.effects_behind[target]
            for read in self._reads_before_write.get(name, ()):
                after[name] |= readers_of_read[read] if read in self.folded else {read}
            after[name].discard(name)
        return data, after

    @cached_property
    def _reads_before_write(self) -> dict[str, list[str]]:
        """Returns node that may change a variable → earlier reads of that variable, on any path.

        Grappler drops a control edge from a read to a write if a longer path leads there too. A
        copy of the read would not be on that path.
        """
        bit: dict[str, int] = {}
        reads: dict[str, list[str]] = defaultdict(list)
        result: dict[str, list[str]] = defaultdict(list)
        passed: dict[str, int] = {}  # bit set of the reads among a node's ancestors
        for name in TopologicalSorter(self.sources).static_order():
            before = reduce(or_, (passed[source] for source in self.sources[name]), 0)
            for handle in filter(None, map(self._resource, self.sources[name])):
                if has_effect(self.nodes[name].op):
                    result[name] += (r for r in reads[handle] if before & bit[r])
                else:
                    bit[name] = 1 << len(bit)
                    before |= bit[name]
                    reads[handle].append(name)
            passed[name] = before
        return result

    def _resource(self, name: str) -> str | None:
        """Returns the captured variable whose handle a node returns, or ``None``."""
        while self.nodes[name].op == "Identity":
            name = node_of(self.nodes[name].input[0])
        external = self.captures.get(name)
        return name if external is not None and external.dtype == tf.resource else None

    def _topological(
        self, data: Mapping[str, set[str]], after: Mapping[str, set[str]]
    ) -> list[str]:
        """Returns op names in topological order, earliest traced first, without ops in a cycle."""
        rank = self._ranks(data)

        def key(name: str) -> tuple[int, str, list[int]]:
            """Returns the sort key of an op. Names only break ties: they differ between builds."""
            return rank[name], self.nodes[name].op, sorted(rank[i] for i in data[name])

        return topological_order({name: data[name] | after[name] for name in data}, key)

    def _ranks(self, data: Mapping[str, set[str]]) -> dict[str, int]:
        """Returns op → position in the traced order. An op that Grappler or a rewrite made has the
        position of its last input.

        An op's position is never behind that of a reader. It could be otherwise, since Grappler may
        keep the later name when it merges equal ops.
        """
        rank = traced_places(data, self.order)
        for name in reversed(rank):
            for source in data[name]:
                rank[source] = min(rank[source], rank[name])
        return rank

    def _ordered(self) -> tuple[list[str], dict[str, set[str]], dict[str, set[str]]]:
        """Returns op names in order, and their edges as :meth:`_edges` does."""
        while True:
            data, after = self._edges()
            order = self._topological(data, after)
            cycle = data.keys() - set(order)
            if not cycle:
                return order, data, after
            # A reader of a variable's old value depends on the assignment: copy what it reads into
            # a value.
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
            self._copy(reads)

    def _copy(self, reads: Set[str]) -> None:
        """Makes some reads of variables ops with a value of their own."""
        self.copied_reads |= reads
        self.folded = self.folded - reads
        self.views.clear()

    def _returned_before_write(self, outputs: Iterable[str]) -> set[str]:
        """Returns the reads of variables that the step returns and then overwrites. No reader keeps
        the write waiting for them."""
        returned = set(map(node_of, outputs))
        behind = returned.union(*map(self._folded_behind, returned))
        return behind.intersection(chain.from_iterable(self._reads_before_write.values()))

    def _phases(
        self, order: list[str], data: Mapping[str, set[str]], after: Mapping[str, set[str]]
    ) -> dict[str, str]:
        """Returns op → phase. Backward: traced by the gradient tape, or between two such ops.
        Update: other ops that depend on backward ones. Forward: the rest.

        Dependence includes ``after``, since a weight's update may depend on its gradient only
        through a slot that is assigned and read again. The tape also traces the lists that a loop
        fills for its gradient; making one (``EmptyTensorList``) does not count as backward.
        """
        gradient = {
            name
            for name in order
            if "gradient_tape/" in name and self.nodes[name].op != "EmptyTensorList"
        }
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
        self._copy(self._returned_before_write(outputs) & self.folded)
        order, data, after = self._ordered()
        phases = self._phases(order, data, after)
        ids = {name: at for at, name in enumerate(order)}
        ids |= {name: ids[holder] for name, holder in self.attached.items()}
        nodes_of = {name: [name] for name in order}
        for name, holder in self.attached.items():
            nodes_of[holder].append(name)
        table = _Values(self)
        ops = [
            self._op(name, ids, nodes_of[name], table, phases[name], after[name]) for name in order
        ]
        returned = (*map(self.owner, outputs), *self._shapes_read(*map(node_of, outputs)))
        finals = tuple(dict.fromkeys(table.ids[o] for o in returned if o in table.ids))
        resident = sum(self._resident(name) for name in self.step_inputs if name in self.nodes)
        return TensorFlowStep(
            graph=Graph(tuple(ops), tuple(table.values), finals),
            handles={ids[name]: self.nodes[name] for name in order},
            resident_bytes=resident,
            nodes=self.nodes,
            folded=self.folded,
            attached=self.attached,
            effects_behind=self.effects_behind,
            tensor_shapes={tensor: shape for tensor, (shape, _) in self.shapes.items()},
            **rest,
        )

    def _op(
        self,
        name: str,
        ids: Mapping[str, int],
        parts: Sequence[str],
        table: _Values,
        phase: str,
        after: Collection[str],
    ) -> Op:
        """Returns the op of a node.

        Args:
            name: name of the node.
            ids: node → op id.
            parts: the nodes that run in the op, this one first.
            table: the values; the op's inputs and outputs are added.
            phase: phase of the op.
            after: nodes that must run before it.
        """
        node = self.nodes[name]
        owners = [self.owner(tensor_key(i)) for i in data_inputs(node)]
        owners += self._hidden_inputs(node, owners)
        tried = tuple(owners)  # the order in which a kernel looks for a buffer to take over
        if node.op in kinds.COMMUTATIVE:
            # Grappler sorts these by name; the fingerprint must not see names
            owners.sort(
                key=lambda owner: (ids.get(node_of(owner), -1), self.order.get(node_of(owner), -1))
            )
        owners += self._shapes_read(name)
        reads = tuple(dict.fromkeys(table.id_of(o, ids.get(node_of(o))) for o in owners))
        written = (tensor for part in parts for tensor in outputs_of(part, self.shapes))
        writes = tuple(table.id_of(tensor, ids[name]) for tensor in written)
        reusable = dict.fromkeys(table.ids[owner] for owner in self._reusable(node, tried))
        return Op(
            ids[name],
            name,
            node.op,
            reads,
            writes,
            phase,
            # nodes that the layout pass fuses run once: with copies that read the same gradient, it
            # would fuse crosswise
            not has_effect(node.op) and len(parts) == 1,
            tuple(sorted(ids[a] for a in after)),
            tuple(v for v in reusable if table.values[v].producer is not None),
        )

    def _reusable(self, node: Any, owners: Sequence[str]) -> Sequence[str]:
        """Returns the inputs whose buffer an op's kernel may take over, in the order in which the
        kernel tries them."""
        if node.op in kinds.REUSES_INPUT:
            return owners
        if node.op in kinds.REUSES_FIRST_INPUT:
            return owners[:1]
        if (
            node.op in kinds.FUSED and b"Add" in node.attr["fused_ops"].list.s
        ):  # the sum is formed in the buffer of the added input
            with_input = [
                kind for kind in node.attr["fused_ops"].list.s if kind in kinds.FUSED_WITH_INPUT
            ]
            return owners[2 + with_input.index(b"Add") :][:1]
        return ()

    def _hidden_inputs(self, node: Any, owners: Sequence[str]) -> Iterator[str]:
        """Yields the hidden inputs of an op: the output that oneDNN's pass passes to a gradient op,
        and the buffers that an ``Optional`` among the inputs keeps alive."""
        yield from (self.shared[owner] for owner in owners if owner in self.shared)
        for (forward, gradient), at in kinds.HIDDEN_OUTPUT.items():
            if node.op != gradient:
                continue
            name, index = split_input(owners[at])
            if self.nodes[name].op == forward and index == 0 and f"{name}:1" in self.shapes:
                yield f"{name}:1"

    def _resident(self, name: str) -> int:
        external = self.captures.get(name)
        if external is not None and external.dtype == tf.resource:
            spec = private.variable_spec(external)
            return 0 if spec is None else (spec.shape.num_elements() or 0) * spec.dtype.size
        return self._nbytes(f"{name}:0")


class _Values:
    """Numbers tensors in the order in which ops read and write them.

    Attributes:
        ids: tensor → id of its value.
        values: the values, by id.
    """

    def __init__(self, translation: Translation):
        self._translation = translation
        self.ids: dict[str, int] = {}
        self.values: list[Value] = []

    def id_of(self, tensor: str, producer: int | None) -> int:
        """Returns the id of a tensor's value, which is made where there is none."""
        if tensor not in self.ids:
            at, nbytes = len(self.values), self._translation._nbytes(tensor)
            shape, dtype = self._translation.shapes.get(tensor, (None, None))
            self.ids[tensor] = at
            dtype_name = getattr(dtype, "name", None)
            self.values.append(Value(at, tensor, nbytes, shape, dtype_name, producer))
        return self.ids[tensor]
