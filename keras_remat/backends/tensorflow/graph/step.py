"""A traced train step on TensorFlow, and what goes in and comes out when it runs."""

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
    """Says what differs between the replicas that run one step side by side.

    Args:
        captures: placeholder name → the eager tensor (a variable's handle, a constant) it stands
            for.
        device: where it runs; empty where TensorFlow chooses.
        keys: what is called before every step, in this order, for the step's last inputs: the
            numbers under which its collective ops meet those of the other replicas.
    """

    captures: Mapping[str, Any]
    device: str = ""
    keys: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class TouchedVariables:
    """Holds the variables of all devices that a traced step reads or writes, whoever holds them.

    Args:
        all: distinct ``tf.Variable`` objects, in the order in which they were first used.
        written: the ones that the step may write.
    """

    all: tuple[Any, ...]
    written: tuple[Any, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorFlowStep(TracedStep):
    """Holds a traced train step with what is needed to run it.

    Args:
        resident_bytes: bytes of weights, optimizer slots, other captured tensors and the batch,
            from their shapes.
        nodes: name → ``NodeDef`` of the optimized graph, views and constants included.
        versions: the GraphDef's ``versions`` field.
        library: the GraphDef's function library.
        body_workspace_bytes: name of a loop or branch → what its largest body holds on its way.
        waiting_bytes: name of a loop → what each of its rounds adds to sums.
        folded: names of the nodes that are no ops: views, constants, variable reads, ``NoOp``.
        inputs: ``(placeholder name, dtype, shape)`` of the batch, in flattening order, and then of
            the keys of a replica.
        output_tensors: names of the tensors the step returns, in flattening order of
            ``output_structure``.
        output_structure: what ``train_step`` returned, as :func:`without_graph` returns it.
        tensor_shapes: tensor name → static shape, or ``None`` when unknown.
        attached: node name → the node whose op it is part of, see :func:`.rewrite.attached_nodes`.
        effects_behind: node name → the ops with an effect that have run once it has.
        divisions: op name → a constant, and the division by it that takes the op's place where
            plain ``fit`` does not know the batch's size (:mod:`.counts`).
        replicas: all that run the step on their part of a batch, the traced one first.
        variables: what it touches.
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
        """Returns the bytes of the large constants of the graph, and of every call of a function,
        also in the body of a loop; see :class:`~keras_remat.backends.base.TracedStep`."""
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
        """Returns the products and sums of the largest weight's update, which are in place here
        (:mod:`.rewrite`)."""
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
        """Returns twice the bytes that replicas exchange: in Keras's own step they are in one
        buffer, beside what it is made of or divided into (:mod:`.replicas`)."""
        exchanged = (op for op in self.graph.ops if op.kind == "CollectiveReduceV2")
        return 2 * sum(self.graph.values[at].nbytes for op in exchanged for at in op.outputs)

    def plain_peak_bytes(self, problem: Problem, memory: MemoryModel) -> int:
        """Returns what Keras's own step is predicted to need, with its ops as they were traced.

        It runs an op as soon as all that it waits for has run, on a CPU several at once, and takes
        another peak from run to run: see :meth:`plain_unordered_bytes`.
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
        """Returns op id of a loop → what waits for sums in the rounds that are ahead of the first
        one that runs. Planned steps run next to none ahead."""
        return {
            self.op_id[name]: (self.nodes[name].attr["parallel_iterations"].i - 1) * nbytes
            for name, nbytes in self.waiting_bytes.items()
            if name in self.op_id
        }

    def _with_own_needs(self, problem: Problem, peak_bytes: int) -> int:
        """Returns a peak with what Keras's own step needs and the traced one does not."""
        resident_bytes = problem.profile.resident_bytes
        needed = max(peak_bytes - resident_bytes, self.plain_least_bytes)
        return resident_bytes + needed + self.plain_surplus_bytes

    @cached_property
    def compiled_scratch_bytes(self) -> dict[str, int]:
        """Returns op name → bytes of scratch of the calls that XLA compiles, as far as running each
        alone tells."""
        captures = self.replicas[0].captures
        return compiled_scratch_bytes(self.nodes, self.library, captures, self.tensor_shapes)

    @cached_property
    def one_sample_scratch_bytes(self) -> dict[str, int]:
        """Returns op name → bytes of scratch of oneDNN's convolutions of one sample, as far as
        running each alone tells."""
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
    """Returns what a traced function returned with a ``TensorSpec`` for every tensor, each of which
    would hold the function's graph."""
    return tf.nest.map_structure(
        lambda x: tf.TensorSpec(x.shape, x.dtype) if isinstance(x, tf.Tensor) else x, structure
    )


def packed(structure: Any, outputs: Iterable[Any]) -> Any:
    """Returns what ``train_step`` returned when it was traced, with a step's outputs for its
    tensors."""
    given = iter(outputs)
    flat = [next(given) if isinstance(x, tf.TensorSpec) else x for x in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, flat)
