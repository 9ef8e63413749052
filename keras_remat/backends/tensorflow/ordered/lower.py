"""Turns an order of ops into a TensorFlow function that runs it.

The optimized graph is written again, node by node in the order of the schedule. An op that repeats
becomes a copy under another name, and a reader reads the newest copy before it. Views are copied
with the instance they look at. Control edges enforce the order that tensors do not: assignments
after the reads they follow (S4), and the order of ops that touch the allocator's pool
(:mod:`.ordering`).

The function runs verbatim: a configuration that travels with the call keeps Grappler and the
common-subexpression pass away. TensorFlow still folds constants when a function first runs. Large
results would stay in use and are in no plan, so a constant that such an op reads becomes an
argument of the function.

Loops and branches are marked for TensorFlow's lowering to ``Switch`` and ``Merge``. It runs an
LSTM's step in two thirds of the time of function calls and computes the same bits. Only two
iterations of a loop run at once, since the memory of more differs from step to step. Only one does
if kernels of the body request scratch of tens of MiB (:mod:`..graph.kernel_scratch`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from graphlib import TopologicalSorter
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.kernel_scratch import gathering_functions
from keras_remat.backends.tensorflow.graph.nodes import (
    called_functions,
    control_inputs,
    copied,
    data_inputs,
    node_of,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.sharded import part_of
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep, given_leaves, packed
from keras_remat.backends.tensorflow.ordered import ordering
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule

#: As fast as TensorFlow's default of ten.
_PARALLEL_ITERATIONS = 2


class LoweredStep:
    """Runs one schedule as a train step; call it with a batch of the traced shape.

    Ops that do not touch the allocator's pool may run in another order.

    Args:
        traced: the step the problem's graph came from.
        problem: its graph, costs and budget. Without a budget, a schedule that recomputes nothing
            runs in no order.
        schedule: a legal order.
        smallest_bytes: bytes of the pool's smallest request; 0 orders every op that holds data.
        any_size: whether plain ``fit`` does not know the batch size (:mod:`..graph.counts`).
        constants: content → constant that other steps hold. Sharing matters, since the allocator
            may put a copy into a free chunk of nearly twice its size.
    """

    def __init__(
        self,
        traced: TensorFlowStep,
        problem: Problem,
        schedule: Schedule,
        smallest_bytes: int = 0,
        *,
        any_size: bool = False,
        constants: MutableMapping[bytes, tf.Tensor] | None = None,
    ):
        self.traced, self.problem, self.schedule = traced, problem, schedule
        constants = {} if constants is None else constants
        self._handed_in = {
            name: _shared(traced.nodes[name].attr["value"].tensor, constants)
            for name in sorted(_unfolded(traced, smallest_bytes))
        }
        divisions = traced.divisions if any_size else {}
        writer = _Writer(traced, schedule, self._handed_in.keys(), divisions)
        on_host = {
            op_id
            for op_id, node in traced.handles.items()
            if on_gpu() and private.stays_on_host(node)
        }
        ordered = ordering.ordered_positions(problem, schedule, smallest_bytes, on_host)
        self._function = _build(traced, writer, writer.write(ordered), self._handed_in)
        self.names = writer.names

    def __call__(self, batch: Any) -> Any:
        """Runs one step; returns what ``train_step`` returns."""
        leaves = given_leaves(batch)
        given = [
            tensor
            for at, replica in enumerate(self.traced.replicas)
            for tensor in (
                *(part_of(leaf, at) for leaf in leaves),
                *(key() for key in replica.keys),
            )
        ]
        outputs = private.call_verbatim(self._function, [*given, *self._handed_in.values()])
        return packed(self.traced.output_structure, outputs)


class _Writer:
    """Writes the nodes of one schedule."""

    def __init__(
        self,
        traced: TensorFlowStep,
        schedule: Schedule,
        unfolded: Set[str],
        divisions: Mapping[str, tuple[Any, Any]],
    ):
        self.traced, self.schedule, self.unfolded = traced, schedule, unfolded
        self.divisions = divisions
        self.names: list[tuple[str, ...]] = []  # names of the nodes at every position
        self._nodes: list[Any] = []
        self._copies: dict[str, list[str]] = {}  # op name → names of all its copies so far
        self._views: dict[tuple[str, tuple[str, ...]], str] = {}
        self._placed: set[str] = set()
        self._gathering = gathering_functions(traced.library)
        self.used_placeholders: set[str] = set()
        self.ends: list[str] = []  # what the step returns, as tensor names

    def write(self, ordered: Sequence[bool]) -> Any:
        """Returns the GraphDef. An op at an ``ordered`` position runs after the last such op."""
        graph = self.traced.graph
        before: tuple[str, ...] = ()
        for op_id, waits in zip(self.schedule.order, ordered, strict=True):
            nodes = self.traced.node_names[graph.ops[op_id].name]
            self.names.append(tuple(self._emit(name, before if waits else ()) for name in nodes))
            before = self.names[-1] if waits else before
        self.ends = [self._tensor(tensor) for tensor in self.traced.output_tensors]
        self._finish(before)
        document = tf.compat.v1.GraphDef(versions=self.traced.versions, library=self.traced.library)
        document.node.extend(self._nodes)
        return document

    def _finish(self, last: Sequence[str]) -> None:
        """Writes the node that waits for all effects and for the nodes of the last ordered op."""
        done = tf.compat.v1.NodeDef(name="remat_done", op="NoOp")
        graph = self.traced.graph
        once = (
            names
            for names, op_id in zip(self.names, self.schedule.order, strict=True)
            if not graph.ops[op_id].recomputable
        )
        done.input.extend(f"^{name}" for name in dict.fromkeys(chain(last, *once)))
        self._nodes.append(done)

    def _emit(self, op_name: str, before: Sequence[str]) -> str:
        node = self.traced.nodes[op_name]
        copies = self._copies.setdefault(op_name, [])
        name = op_name if not copies else f"{op_name}/remat_{len(copies)}"
        if op_name in self.divisions:
            divisor, node = self.divisions[op_name]
            if not copies:
                self._append(divisor, divisor.name, (), ())
            inputs = [self._tensor(tensor_key(node.input[0])), divisor.name]
        else:
            inputs = [self._tensor(tensor_key(i)) for i in data_inputs(node)]
        self._append(node, name, inputs, [*self._controls(node), *before])
        copies.append(name)
        return name

    def _append(self, node: Any, name: str, inputs: Sequence[str], controls: Sequence[str]) -> None:
        copy = copied(node, [*inputs, *(f"^{c}" for c in dict.fromkeys(controls))], name)
        for attribute in ("_output_shapes", "_class"):
            if attribute in copy.attr:
                del copy.attr[attribute]
        if copy.op in kinds.CONTROL_FLOW:
            copy.attr["_lower_using_switch_merge"].b = True
            if "parallel_iterations" in copy.attr:
                is_large = not self._gathering.isdisjoint(called_functions(copy))
                copy.attr["parallel_iterations"].i = 1 if is_large else _PARALLEL_ITERATIONS
        self._nodes.append(copy)

    def _controls(self, node: Any) -> list[str]:
        """Returns the nodes that a node waits for beside its data: every copy so far of the ops
        behind its control edges."""
        graph, op_id = self.traced.graph, self.traced.op_id.get(node.name)
        if op_id is None:
            effects = (self.traced.effects_behind[i] for i in control_inputs(node))
            names = sorted(frozenset().union(*effects))
        else:
            after = (graph.ops[earlier].name for earlier in graph.ops[op_id].after)
            names = [name for op in after for name in self.traced.node_names[op]]
        return [copy for name in names for copy in self._copies.get(name, ())]

    def _tensor(self, tensor: str) -> str:
        """Returns the tensor's newest instance; writes views on demand."""
        name, index = split_input(tensor)
        if name not in self.traced.folded:
            return f"{self._copies[name][-1]}:{index}"
        node = self.traced.nodes[name]
        if node.op == "Placeholder" or name in self.unfolded:
            self.used_placeholders.add(name)
            return f"{name}:{index}"
        inputs = tuple(self._tensor(tensor_key(i)) for i in data_inputs(node))
        key = (name, inputs)
        if key not in self._views:
            written = name if name not in self._placed else f"{name}/remat_{len(self._views)}"
            self._placed.add(name)
            self._append(node, written, inputs, self._controls(node))
            self._views[key] = written
        return f"{self._views[key]}:{index}"


def _unfolded(traced: TensorFlowStep, smallest_bytes: int) -> Set[str]:
    """Returns names of the constants that become arguments of the function: one for every op that
    has a large output and depends on constants alone."""
    first: dict[str, str] = {}  # node that depends on constants alone → the first of the constants
    found: set[str] = set()
    sources = {name: [node_of(i) for i in data_inputs(node)] for name, node in traced.nodes.items()}
    for name in TopologicalSorter(sources).static_order():
        node = traced.nodes[name]
        if node.op == "Const":
            first[name] = name
        elif (
            sources[name]
            and all(source in first for source in sources[name])
            and not private.is_stateful(node.op)
        ):
            first[name] = first[sources[name][0]]
            outputs = traced.graph.ops[traced.op_id[name]].outputs if name in traced.op_id else ()
            if any(traced.graph.values[v].nbytes >= max(1, smallest_bytes) for v in outputs):
                found.add(first[name])
    return found


def _shared(written: Any, constants: MutableMapping[bytes, tf.Tensor]) -> tf.Tensor:
    """Returns a constant as a tensor, shared with an equal constant where there is one."""
    key = sha256(written.SerializeToString(deterministic=True)).digest()
    known = constants.get(key)
    if known is None:
        known = constants[key] = tf.constant(tf.make_ndarray(written))
    return known


def _build(
    traced: TensorFlowStep, writer: _Writer, document: Any, constants: Mapping[str, Any]
) -> Any:
    """Returns the concrete function of a written GraphDef.

    It takes the batch and the constants, and returns ``train_step``'s tensors once every effect is
    done. Replicas run side by side: no control edge leads from one to another. Their results are
    averaged, as Keras does.
    """
    count = len(traced.inputs)

    def build(*placeholders: Any) -> list[Any]:
        given = iter(placeholders)
        parts = [list(islice(given, count)) for _ in traced.replicas]
        shared = dict(zip(constants, given, strict=True))
        returned, ends = [], []
        for at, (replica, part) in enumerate(zip(traced.replicas, parts, strict=True)):
            mapped = dict(zip((name for name, *_ in traced.inputs), part, strict=True)) | shared
            mapped |= {n: private.capture(external) for n, external in replica.captures.items()}
            used = {
                f"{name}:0": tensor
                for name, tensor in mapped.items()
                if name in writer.used_placeholders
            }
            with tf.device(replica.device) if replica.device else nullcontext():
                *outputs, done = tf.graph_util.import_graph_def(
                    document,
                    input_map=used,
                    return_elements=[*writer.ends, "remat_done"],
                    name=f"replica_{at}" if at else "",
                )
            returned.append(outputs)
            ends.append(done)
        with tf.control_dependencies(ends):
            return [
                tf.identity(of_all[0] if len(of_all) == 1 else tf.reduce_mean(of_all, axis=0))
                for of_all in zip(*returned, strict=True)
            ]

    specs = [tf.TensorSpec(shape, dtype) for _, dtype, shape in traced.inputs]
    return private.build_function(
        build,
        [
            *(specs * len(traced.replicas)),
            *(tf.TensorSpec(c.shape, c.dtype) for c in constants.values()),
        ],
    )
