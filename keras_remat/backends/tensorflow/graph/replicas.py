"""Cuts the step of one replica out of the graph that ``tf.distribute.MirroredStrategy`` runs.

``strategy.run(train_step)`` is traced whole, as Keras does. In the resulting graph every op is on
the device of its replica. The replicas' parts consist of the same ops and meet only in collective
ops (``CollectiveReduceV2``: stateful, so they run once and in one order). A collective op has one
more input on every device: its number, which is drawn anew before every step. So the first
replica's part is a train step like any other. It is optimized, planned and written once, and then
imported once per device (:mod:`..ordered.lower`), with that device's variables, part of the batch
and numbers. The planned graph does not grow with the number of replicas. And no control edge can
lead from one replica to another, which could deadlock with a collective op.

In Keras's own step the replicas exchange all gradients in one buffer. It lives beside the gradients
it is joined from, and then beside those it is split into: twice the weights, in any order. Traced
here, gradients go in packs, so that a weight may be updated and its gradient freed before the next
pack is made.

The parts are checked to be the same: every op gets a hash of its type, its attributes and the
hashes of its inputs. A placeholder's hash is that of the thing it stands for (a mirrored variable,
an array of the batch). A replica may read a value from the first replica if the value is the same
on all of them: Keras counts a step on one device and sends the count to the others.

Known limits: a batch with parts of unequal shapes, and a train step that asks which replica it runs
on, are refused with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph.effects import has_effect
from keras_remat.backends.tensorflow.graph.nodes import copied
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray, part_of
from keras_remat.backends.tensorflow.graph.step import Replica, TensorFlowStep, without_graph
from keras_remat.backends.tensorflow.graph.trace import (
    RecordedStep,
    data_spec,
    touched_variables,
    translated,
    variables_of,
)
from keras_remat.errors import UnsupportedBatchError, UnsupportedModelError

#: Attributes that two equal ops may differ in.
_NAMING = frozenset({"_class", "_output_shapes", "_gradient_op_type", "shared_name"})

#: Bytes of a pack of gradients, at least: as in PyTorch's data parallel training.
PACK_BYTES = 25 * 2**20

#: What a placeholder stands for: a kind of thing, and its number.
Role = tuple[str, int]


def trace(model: Any, batch: Any, smallest_bytes: int = 0) -> TensorFlowStep:
    """Traces the train step of one replica of a model; the model is not changed.

    Args:
        model: a model compiled and built under a ``MirroredStrategy``.
        batch: the argument of ``train_step``, every array a :class:`.sharded.ShardedArray`.
        smallest_bytes: bytes of the smallest request that the allocator counts.

    Raises:
        UnsupportedBatchError: the parts of an array differ in shape.
        UnsupportedModelError: the step is not supported; the message says why.
    """
    strategy = model.distribute_strategy
    devices = strategy.extended.worker_devices
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, ShardedArray) and not leaf.is_even:
            shapes = " and ".join(str(tuple(part.shape)) for part in leaf.parts)
            raise UnsupportedBatchError(
                f"A batch of {leaf.shape[0]} samples does not divide evenly among {len(devices)} "
                f"replicas (parts of shapes {shapes}): its step runs without rematerialization. A "
                "batch size that the replicas divide, and drop_remainder, keep all batches even."
            )
    structures = [
        data_spec(
            tf.nest.map_structure(
                lambda leaf, at=at: None if leaf is None else part_of(leaf, at), batch
            )
        )
        for at in range(len(devices))
    ]

    def all_replicas(*given: Any) -> Any:
        returned = strategy.run(model.train_step, args=(private.per_replica(given),))
        parts = strategy.experimental_local_results
        return [
            tf.nest.map_structure(lambda leaf, at=at: _nth(parts(leaf), at), returned)
            for at in range(len(devices))
        ]

    with private.exchanged_in_packs(strategy, PACK_BYTES), private.losses_counted_as(model):
        function = tf.function(all_replicas, autograph=False)
        concrete = private.concrete_function(function, *structures)
    return translated(_Cut(strategy, concrete).first_replica(), smallest_bytes)


def _nth(parts: Sequence[Any], at: int) -> Any:
    """Returns replica ``at``'s part of a result; the only part where there is just one."""
    return parts[at] if len(parts) > 1 else parts[0]


class _Cut:
    """Cuts the first replica's step out of a traced function of all replicas."""

    def __init__(self, strategy: Any, concrete: Any):
        self._strategy, self._graph = strategy, concrete.graph
        self._structures = concrete.structured_outputs
        devices = strategy.extended.worker_devices
        self._devices = {device: at for at, device in enumerate(devices)}
        self._count = len(devices)
        self._operations = self._graph.get_operations()
        self._document = self._graph.as_graph_def()
        self._nodes = {node.name: node for node in self._document.node}
        self._functions = {f.signature.name: f for f in self._document.library.function}
        self._external = {p.op.name: external for external, p in self._graph.captures}
        self._variables = variables_of(self._graph)
        self._keys = private.deferred_captures(self._graph)
        self._inputs: list[list[Any]] = self._inputs_by_replica()
        self._roles: dict[str, Role] = self._roles_of_placeholders()
        self._hashes: dict[str, int] = {}
        self._varies: dict[str, bool] = {}
        sources = {
            op: [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            for op in self._operations
        }
        for op in TopologicalSorter(sources).static_order():  # a loop's stacks are traced after it
            self._hashes[op.name], self._varies[op.name] = self._hash(op), self._may_vary(op)

    # ---------------------------------------------------------------- roles of placeholders

    def _inputs_by_replica(self) -> list[list[Any]]:
        """Returns for every replica the placeholders of its batch, in flattening order."""
        given = [
            t
            for t in self._graph.inputs
            if t.op.name not in self._external and t.op.name not in self._keys
        ]
        each = len(given) // self._count
        return [given[at * each : (at + 1) * each] for at in range(self._count)]

    def _roles_of_placeholders(self) -> dict[str, Role]:
        """Returns name of a placeholder → what it stands for. Corresponding placeholders of the
        replicas have the same role."""
        roles: dict[str, Role] = {}
        for tensors in self._inputs:
            roles |= {tensor.op.name: ("batch", at) for at, tensor in enumerate(tensors)}
        for name, external in self._external.items():
            container = private.distributed_container(external)
            roles[name] = (
                ("shared", id(external)) if container is None else ("variable", id(container))
            )
        own: dict[tuple[str, int], list[str]] = {}
        for name in (*self._keys, *self._external):
            replica = self._only_reader(name)
            resource = name in self._external and self._external[name].dtype == tf.resource
            of_one = name in self._keys or (resource and roles[name][0] == "shared")
            if replica is not None and of_one:
                kind = "key" if name in self._keys else "token"
                names = own.setdefault((kind, replica), [])
                roles[name] = (kind, len(names))
                names.append(name)
        return roles

    def _only_reader(self, name: str) -> int | None:
        """Returns the replica that alone reads a placeholder; ``None`` if several do."""
        readers = self._graph.get_operation_by_name(name).outputs[0].consumers()
        replicas = {self._devices.get(reader.device) for reader in readers}
        return next(iter(replicas)) if len(replicas) == 1 else None

    def _is_mirrored(self, name: str) -> bool:
        """Returns whether a placeholder's value is the same on all replicas."""
        kind = self._roles[name][0]
        if kind != "variable":
            return kind != "batch"
        return not private.has_value_per_replica(
            private.distributed_container(self._external[name])
        )

    # ---------------------------------------------------------------- equality of replicas

    def _hash(self, op: Any) -> int:
        """Returns a number that is equal for ops of two replicas that do the same with their
        replica's inputs."""
        if op.name in self._roles:
            return hash(self._roles[op.name])
        sources = tuple((self._hashes[t.op.name], t.value_index) for t in op.inputs)
        if op.type == "Identity" and not op.control_inputs:
            return self._hashes[op.inputs[0].op.name]  # one replica may read it from another
        attributes = tuple(
            (name, self._attribute(value))
            for name, value in sorted(self._nodes[op.name].attr.items())
            if name not in _NAMING
        )
        before = Counter(
            self._hashes[control.name] for control in op.control_inputs if has_effect(control.type)
        )
        return hash((op.type, attributes, sources, frozenset(before.items())))

    def _attribute(self, value: Any) -> Hashable:
        if value.WhichOneof("value") != "func":
            return bytes(value.SerializeToString(deterministic=True))
        function = self._functions[value.func.name]  # only its names differ, also inside of it
        return frozenset(Counter(node.op for node in function.node_def).items())

    def _may_vary(self, op: Any) -> bool:
        """Returns whether an op's outputs may differ from replica to replica."""
        if op.name in self._roles:
            return not self._is_mirrored(op.name)
        if op.type.startswith("Collective"):
            return False
        return any(self._varies[t.op.name] for t in op.inputs)

    def _roots(self) -> Iterator[tuple[list[str], list[Any]]]:
        """Yields the effects and the returned tensors of every replica."""
        effects: list[list[str]] = [[] for _ in range(self._count)]
        for op in self._graph.control_outputs:
            if not has_effect(op.type):
                continue
            if op.device not in self._devices:
                raise UnsupportedModelError(
                    f"{op.name} ({op.type}) changes state on {op.device or 'no device'}, outside "
                    "of its replica's device."
                )
            effects[self._devices[op.device]].append(op.name)
        each = len(self._graph.outputs) // self._count
        for at in range(self._count):
            yield effects[at], list(self._graph.outputs[at * each : (at + 1) * each])

    def _check_equal(self, roots: Sequence[tuple[list[str], list[Any]]]) -> None:
        first_effects, first_outputs = roots[0]
        counted = Counter(self._hashes[name] for name in first_effects)
        returned = [self._hashes[t.op.name] for t in first_outputs]
        for at, (effects, outputs) in enumerate(roots[1:], start=1):
            other = Counter(self._hashes[name] for name in effects)
            odd = [n for n in effects if self._hashes[n] not in counted]
            odd += [
                t.op.name
                for t, known in zip(outputs, returned, strict=True)
                if self._hashes[t.op.name] != known
            ]
            if odd or other != counted:
                raise UnsupportedModelError(
                    f"Replica {at} does not compute what the first one does "
                    f"({odd[0] if odd else 'it changes other variables'}): one plan does not hold "
                    "for both."
                )

    # ---------------------------------------------------------------- the first replica's part

    def _part(self, roots: Sequence[Any], replica: int) -> set[str]:
        """Returns the names of a replica's ops that its roots depend on."""
        stack, names = list(roots), set()
        while stack:
            op = stack.pop()
            if op.name in names:
                continue
            names.add(op.name)
            # a control edge from another device does not matter on this one
            stack += [c for c in op.control_inputs if self._runs_on(c, replica)]
            for source in (tensor.op for tensor in op.inputs):
                if self._runs_on(source, replica):
                    stack.append(source)
                elif replica == 0 or self._varies[source.name]:
                    raise UnsupportedModelError(
                        f"{op.name} ({op.type}) on {op.device} reads {source.name} ({source.type}) "
                        f"on {source.device}: what one replica computes from its part of the batch "
                        "decides on another, outside of a collective op. (A variable with "
                        'aggregation="only_first_replica" that follows the batch does that.)'
                    )
        return names

    def _runs_on(self, op: Any, replica: int) -> bool:
        return self._devices.get(op.device, replica) == replica

    def first_replica(self) -> RecordedStep:
        """Returns the step of the first replica, and how the others differ.

        Raises:
            UnsupportedModelError: the replicas do not compute the same.
        """
        roots = list(self._roots())
        self._check_equal(roots)
        by_name = {op.name: op for op in self._operations}
        parts = [
            self._part([*(by_name[name] for name in effects), *(t.op for t in outputs)], at)
            for at, (effects, outputs) in enumerate(roots)
        ]
        keys = [name for name in self._keys if name in parts[0]]
        effects, outputs = roots[0]
        inputs = (*self._inputs[0], *(by_name[name].outputs[0] for name in keys))
        return RecordedStep(
            operations=[op for op in self._operations if op.name in parts[0]],
            graph_def=self._without_others(parts[0]),
            effects=effects,
            outputs=[tensor.name for tensor in outputs],
            output_structure=without_graph(self._structures[0]),
            inputs=tuple((t.op.name, t.dtype, t.shape) for t in inputs),
            variables={n: v for n, v in self._variables.items() if n in parts[0]},
            replicas=tuple(
                self._replica(device, parts, at) for device, at in self._devices.items()
            ),
            touched=touched_variables(self._graph),
        )

    def _without_others(self, names: set[str]) -> Any:
        """Returns the GraphDef of one replica's ops, without devices."""
        document = tf.compat.v1.GraphDef(
            versions=self._document.versions, library=self._document.library
        )
        for name, node in self._nodes.items():
            if name not in names:
                continue
            inputs = (i for i in node.input if not i.startswith("^") or i[1:] in names)
            copy = copied(node, inputs)
            if copy.device in self._devices:
                copy.device = ""
            document.node.append(copy)
        return document

    def _replica(self, device: str, parts: Sequence[set[str]], at: int) -> Replica:
        """Returns the values of the first replica's placeholders on replica ``at``."""
        own = {
            self._roles[name]: name for name in (*self._keys, *self._external) if name in parts[at]
        }
        captures: dict[str, Any] = {}
        keys: list[Callable[[], Any]] = []
        for name in (*self._keys, *self._external):
            if name not in parts[0]:
                continue
            kind = self._roles[name][0]
            if kind == "key":
                keys.append(self._keys[own[self._roles[name]]])
            elif kind == "variable":
                container = private.distributed_container(self._external[name])
                captures[name] = self._strategy.experimental_local_results(container)[at].handle
            else:
                captures[name] = self._external[own[self._roles[name]] if kind == "token" else name]
        return Replica(captures, device, tuple(keys))
