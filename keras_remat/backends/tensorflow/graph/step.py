"""Holds a traced train step on TensorFlow, and converts its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import tensorflow as tf

from keras_remat.backends.base import TracedStep
from keras_remat.backends.host import cores
from keras_remat.backends.memory import MemoryModel
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import called_functions, constant_bytes
from keras_remat.backends.tensorflow.graph.run_alone import (
    compiled_scratch_bytes,
    one_sample_scratch_bytes,
)
from keras_remat.backends.tensorflow.memory.best_fit import ONEDNN_SMALL_BYTES
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule


@dataclass(frozen=True)
class Replica:
    """Holds the data that differ between the replicas of one step.

    Args:
        captures: placeholder name → the eager tensor (a variable's handle, a constant) it stands
            for.
        device: device of the replica; empty where TensorFlow chooses.
        keys: functions called before every step, in this order. They return the step's last inputs:
            the numbers by which its collective ops find those of the other replicas.
    """

    captures: Mapping[str, Any]
    device: str = ""
    keys: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class TouchedVariables:
    """Holds the variables of all devices that a traced step reads or writes, whoever owns them.

    Args:
        all: distinct ``tf.Variable`` objects, in order of first use.
        written: the variables that the step may write.
    """

    all: tuple[Any, ...]
    written: tuple[Any, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorFlowStep(TracedStep):
    """Holds a traced train step with everything needed to run it.

    Args:
        resident_bytes: bytes of weights, optimizer slots, other captured tensors and the batch,
            from their shapes.
        nodes: name → ``NodeDef`` of the optimized graph, views and constants included.
        versions: the GraphDef's ``versions`` field.
        library: the GraphDef's function library.
        body_workspace_bytes: name of a loop or branch → bytes of workspace of its largest body.
        waiting_bytes: name of a loop → bytes that each of its rounds adds to sums.
        folded: names of the nodes that are no ops: views, constants, variable reads, ``NoOp``.
        inputs: ``(placeholder name, dtype, shape)`` of the batch's tensors, in flattening order,
            then of the keys of a replica.
        output_tensors: names of the tensors the step returns, in flattening order of
            ``output_structure``.
        output_structure: structure of ``train_step``'s result, from :func:`without_graph`.
        tensor_shapes: tensor name → static shape, or ``None`` when unknown.
        attached: node name → the node whose op it is part of, see :func:`.rewrite.attached_nodes`.
        effects_behind: node name → the ops with an effect that have run once the node has.
        divisions: op name → a constant and a division by it. They replace the op where plain
            ``fit`` does not know the batch size (:mod:`.counts`).
        replicas: all replicas, each of which trains its part of a batch; the traced one first.
        variables: the variables that the step touches.
    """

    resident_bytes: int
    nodes: Mapping[str, Any]
    versions: Any
    library: Any
    body_workspace_bytes: Mapping[str, int]
    waiting_bytes: Mapping[str, int]
    folded: frozenset[str]
    inputs: tuple[tuple[str, Any, Any], ...]
    output_tensors: tuple[str, ...]
    output_structure: Any
    tensor_shapes: Mapping[str, tuple[int, ...] | None]
    attached: Mapping[str, str]
    effects_behind: Mapping[str, frozenset[str]]
    divisions: Mapping[str, tuple[Any, Any]]
    replicas: tuple[Replica, ...]
    variables: TouchedVariables

    @cached_property
    def held_bytes(self) -> Sequence[int]:
        """Returns the bytes of each large constant in the graph and in every called function, once
        a call, also in the body of a loop; see :class:`~keras_remat.backends.base.TracedStep`."""
        functions = {function.signature.name: function for function in self.library.function}

        def of(nodes: Iterable[Any]) -> Iterator[int]:
            for node in nodes:
                if node.op == "Const":
                    yield constant_bytes(node)
                known = filter(functions.__contains__, called_functions(node))
                yield from chain.from_iterable(of(functions[name].node_def) for name in known)

        return tuple(nbytes for nbytes in of(self.nodes.values()) if nbytes >= ONEDNN_SMALL_BYTES)

    @cached_property
    def plain_surplus_bytes(self) -> int:
        """Returns the bytes of the products and sums in the update of the largest weight. Planned
        steps compute them in place (:mod:`.rewrite`)."""
        updates = (node for node in self.nodes.values() if node.op in kinds.IN_PLACE_UPDATES)
        captures = self.replicas[0].captures
        variables = (
            private.variable_spec(captures[node.input[0]])
            for node in updates
            if node.input[0] in captures
        )
        return max(
            (2 * spec.shape.num_elements() * spec.dtype.size for spec in variables), default=0
        )

    @cached_property
    def plain_least_bytes(self) -> int:
        """Returns twice the bytes that replicas exchange. Keras's own step holds them in one
        buffer, beside the gradients it is joined from or split into (:mod:`.replicas`)."""
        exchanged = (op for op in self.graph.ops if op.kind == "CollectiveReduceV2")
        return 2 * sum(self.graph.values[at].nbytes for op in exchanged for at in op.outputs)

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the predicted peak of Keras's own step, with its ops in traced order.

        In truth it runs an op as soon as its predecessors have run, on a CPU several at once, and
        its peak varies from run to run: see :meth:`plain_unordered_bytes`.
        """
        if self.whole is not None:
            return self.whole.step.plain_peak_bytes(self.whole.problem(problem), memory)
        peak_bytes = memory.plain_step_peak_bytes(problem, Schedule.store_all(self.graph))
        return self._with_own_needs(problem, peak_bytes)

    def plain_unordered_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns the highest peak of simulated runs of Keras's own step, on a CPU."""
        if self.whole is not None:
            return self.whole.step.plain_unordered_bytes(self.whole.problem(problem), memory)
        at_once = 1 if on_gpu() else threads() // max(1, len(self.replicas))
        if at_once < 2:
            return 0
        peak_bytes = memory.unordered_peak_bytes(
            problem, at_once, self.plain_surplus_bytes, self._ahead_bytes
        )
        return self._with_own_needs(problem, peak_bytes)

    @cached_property
    def _ahead_bytes(self) -> dict[int, int]:
        """Returns op id of a loop → bytes that wait to be summed in rounds run ahead of the first
        unfinished one. Planned steps run hardly any round ahead."""
        return {
            self.op_id[name]: (self.nodes[name].attr["parallel_iterations"].i - 1) * nbytes
            for name, nbytes in self.waiting_bytes.items()
            if name in self.op_id
        }

    def _with_own_needs(self, problem: Problem, peak_bytes: int) -> int:
        """Returns a peak plus the memory that only Keras's own step needs, not the traced one."""
        resident_bytes = problem.profile.resident_bytes
        needed = max(peak_bytes - resident_bytes, self.plain_least_bytes)
        return resident_bytes + needed + self.plain_surplus_bytes

    @cached_property
    def compiled_scratch_bytes(self) -> dict[str, int]:
        """Returns op name → bytes of scratch of a call that XLA compiles, measured by running it
        alone where it can."""
        captures = self.replicas[0].captures
        return compiled_scratch_bytes(self.nodes, self.library, captures, self.tensor_shapes)

    @cached_property
    def one_sample_scratch_bytes(self) -> dict[str, int]:
        """Returns op name → bytes of scratch of oneDNN's convolution of one sample, measured by
        running it alone where it can."""
        return one_sample_scratch_bytes(self.nodes, self.tensor_shapes)

    @cached_property
    def op_id(self) -> dict[str, int]:
        """Returns node name → op id."""
        ids = {op.name: op.id for op in self.graph.ops}
        return ids | {name: ids[holder] for name, holder in self.attached.items()}

    @cached_property
    def node_names(self) -> dict[str, tuple[str, ...]]:
        """Returns op name → the names of its nodes, its own first."""
        names: dict[str, tuple[str, ...]] = {op.name: (op.name,) for op in self.graph.ops}
        for name, holder in self.attached.items():
            names[holder] += (name,)
        return names


def threads() -> int:
    """Returns how many ops TensorFlow runs at once on this machine's CPU."""
    asked: int = tf.config.threading.get_inter_op_parallelism_threads()
    return asked or cores()


def given_leaves(batch: Any) -> list[Any]:
    """Returns the arrays of a batch in flattening order; Keras's iterators carry ``None`` (no
    sample weights, say) as an empty ``Optional``."""
    leaves = tf.nest.flatten(batch)
    return [x for x in leaves if x is not None and not isinstance(x, tf.experimental.Optional)]


def without_graph(structure: Any) -> Any:
    """Returns a traced function's result with a ``TensorSpec`` for every tensor. A tensor would
    keep the function's graph alive."""
    return tf.nest.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x, structure
    )


def packed(structure: Any, outputs: Iterable[Any]) -> Any:
    """Returns a step's outputs in the structure that ``train_step`` returned when traced."""
    given = iter(outputs)
    flat = [next(given) if isinstance(x, tf.TensorSpec) else x for x in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, flat)
