"""Traces a Keras train step into a :class:`~keras_remat.core.graph.Graph`.

The model's own ``train_step`` is traced whole (forward, loss, backward, optimizer, metrics, state
updates). Grappler optimizes it *first*, and the optimized graph becomes the ops, so the planned
graph is the one that runs. Grappler's fusions and constant folding are worth having. It cannot run
after planning: it would merge the copies of an op, and so undo recomputation.

How TensorFlow's graph maps to ours:

* **Views** (``Reshape``, ``Identity``, ``Squeeze`` …) share storage, so they are folded into their
  readers, which then read the owner.
* **Reading a variable** shares the variable's buffer: its readers read a step input. An op that
  assigns the variable comes ``after`` all readers, because a read that is still alive would make
  the assignment copy. A small variable is read into a new value instead, so that ops that depend on
  it (on a dropout seed) can be recomputed after the variable changed. So is a variable whose rows
  the step updates (an embedding's table): the reading kernel copies it (``kinds.UPDATES_ROWS``).
* **Control edges** become ``after``. An edge from a view or a ``NoOp`` becomes edges from the ops
  behind it.
* oneDNN's kernels may have an output that the graph does not show (``kinds.HIDDEN_OUTPUT``); it is
  a value like any other.
* An op is **recomputable** when its OpDef has no state, or when it only reads variables. So is a
  loop or branch whose functions contain only such ops.

``TracedStep.handles[op.id]`` is the ``NodeDef``; everything else specific to TensorFlow is in
:class:`.step.TensorFlowStep`. :mod:`.translate` carries out the rules above.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from keras_remat.backends import batches
from keras_remat.backends.micro_batches import watched_micro_batches
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph import kinds, lists
from keras_remat.backends.tensorflow.graph.accumulate import accumulated_train_step
from keras_remat.backends.tensorflow.graph.bodies import body_bytes
from keras_remat.backends.tensorflow.graph.branch_updates import order_branch_updates
from keras_remat.backends.tensorflow.graph.counts import batch_counts, divisions
from keras_remat.backends.tensorflow.graph.effects import calls_without_effect, has_effect
from keras_remat.backends.tensorflow.graph.kernel_scratch import order_bodies
from keras_remat.backends.tensorflow.graph.nodes import node_of, tensor_key
from keras_remat.backends.tensorflow.graph.ragged import tell_rows
from keras_remat.backends.tensorflow.graph.rewrite import past_loops, rewrite_for_memory
from keras_remat.backends.tensorflow.graph.shapes import static_shapes
from keras_remat.backends.tensorflow.graph.sliced import StepSlicer
from keras_remat.backends.tensorflow.graph.step import (
    Replica,
    TensorFlowStep,
    TouchedVariables,
    without_graph,
)
from keras_remat.backends.tensorflow.graph.translate import Translation
from keras_remat.errors import InvalidProblemError, UnsupportedModelError


def data_spec(batch: Any) -> Any:
    """Returns the batch's structure with a static ``TensorSpec`` for every tensor; ``None`` stays
    ``None``."""

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, tf.TensorSpec):
            return leaf
        batches.check_dense(leaf)
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, batch)


def resized_spec(batch: Any, size: int) -> Any:
    """Returns specs of a batch like ``batch`` with ``size`` samples; see
    :meth:`keras_remat.backends.base.Backend.resized_spec`."""
    return batches.resized_spec(batch, size, lambda shape, leaf: tf.TensorSpec(shape, leaf.dtype))


def trace(
    model: Any, batch: Any, micro_batches: int = 1, smallest_bytes: int = 0
) -> TensorFlowStep:
    """Traces ``model.train_step`` for batches of this shape; the model is not changed.

    Args:
        model: a compiled and built Keras model.
        batch: the argument of ``train_step``: ``(x, y[, sample_weight])`` as tensors, arrays or
            ``tf.TensorSpec``.
        micro_batches: number of micro-batches that the batch is split into, see
            :mod:`.accumulate`.
        smallest_bytes: bytes of the smallest request that the allocator counts.

    Raises:
        UnsupportedModelError: the step is not supported; the message says which op or type, and
            why.
    """
    structure = data_spec(batch)
    train_step = accumulated_train_step(model, micro_batches, structure)
    with watched_micro_batches(model, micro_batches, tf.init_scope) as differences:
        function = tf.function(train_step, autograph=False)
        concrete = private.concrete_function(function, structure)
    graph = concrete.graph
    captures = {placeholder.op.name: external for external, placeholder in graph.captures}
    step = translated(
        RecordedStep(
            operations=graph.get_operations(),
            graph_def=graph.as_graph_def(),
            effects=[op.name for op in graph.control_outputs if has_effect(op.type)],
            outputs=[tensor.name for tensor in graph.outputs],
            output_structure=without_graph(concrete.structured_outputs),
            inputs=tuple(
                (t.op.name, t.dtype, t.shape) for t in graph.inputs if t.op.name not in captures
            ),
            variables=variables_of(graph),
            replicas=(Replica(captures),),
            touched=touched_variables(graph),
        ),
        smallest_bytes,
    )
    slicer = StepSlicer(step, _AtSize(model, structure, smallest_bytes))
    return replace(step, differences=tuple(differences), slicer=slicer)


class _AtSize:
    """Traces a model's step at other batch sizes and keeps the newest trace.

    Args:
        model: the model, which is not kept alive.
        structure: specs of the batch.
        smallest_bytes: as in :func:`trace`.
    """

    def __init__(self, model: Any, structure: Any, smallest_bytes: int):
        self._model, self._structure = weakref.ref(model), structure
        self._smallest_bytes = smallest_bytes
        self._newest: tuple[int, TensorFlowStep] | None = None

    def __call__(self, size: int) -> TensorFlowStep:
        """Returns the step for ``size`` samples.

        Raises:
            InvalidProblemError: the model cannot be traced at that size, or no longer exists.
        """
        if self._newest is None or self._newest[0] != size:
            model = self._model()
            if model is None:
                raise InvalidProblemError("the model of the step no longer exists")
            try:
                spec = resized_spec(self._structure, size)
                self._newest = size, trace(model, spec, 1, self._smallest_bytes)
            except Exception as error:  # whatever the layers of a user's model raise
                raise InvalidProblemError(
                    f"the step cannot be traced for {size} samples: {type(error).__name__}: {error}"
                ) from error
        return self._newest[1]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """Holds a train step as TensorFlow has traced it; that of one replica where there are several.

    Args:
        operations: the operations, in traced order.
        graph_def: the same operations as a GraphDef.
        effects: names of the operations with an effect that must happen.
        outputs: names of the tensors that the step returns.
        output_structure, inputs, replicas: as in :class:`.step.TensorFlowStep`.
        variables: placeholder name → the variable whose handle it stands for.
        touched: the variables of all devices.
    """

    operations: Sequence[Any]
    graph_def: Any
    effects: Sequence[str]
    outputs: Sequence[str]
    output_structure: Any
    inputs: tuple[tuple[str, Any, Any], ...]
    variables: Mapping[str, Any]
    replicas: tuple[Replica, ...]
    touched: TouchedVariables


def variables_of(graph: Any) -> dict[str, Any]:
    """Returns the variable behind every placeholder of a traced function that stands for one."""
    of_handle = {id(variable.handle): variable for variable in graph.variables}
    return {
        placeholder.op.name: of_handle[id(external)]
        for external, placeholder in graph.captures
        if id(external) in of_handle
    }


def touched_variables(graph: Any) -> TouchedVariables:
    """Returns the variables that a traced function captures. Every variable it changes is among
    them, whether a model's, an optimizer's, Keras's own or a global one."""
    known, touched, written = variables_of(graph), [], []
    for external, placeholder in graph.captures:
        if external.dtype != tf.resource:
            continue
        variable = known.get(placeholder.op.name)
        if variable is None:  # only its handle is used, as for a random generator's state
            variable = private.variable_of(external)
        if variable is not None:
            touched.append(variable)
            if any(has_effect(reader.type) for reader in placeholder.consumers()):
                written.append(variable)
    return TouchedVariables(tuple(touched), tuple(written))


def translated(recorded: RecordedStep, smallest_bytes: int) -> TensorFlowStep:
    """Returns a recorded step, optimized, as ops and values.

    Args:
        recorded: the step.
        smallest_bytes: bytes of the smallest request that the allocator counts.

    Raises:
        UnsupportedModelError: the step has types of ops that cannot be scheduled.
    """
    order = {op.name: at for at, op in enumerate(recorded.operations)}
    captures, inputs = recorded.replicas[0].captures, recorded.inputs
    fetches = [*dict.fromkeys(recorded.outputs), *recorded.effects]
    tell_rows(recorded.operations, recorded.graph_def)
    graph_def = private.optimize_graph(recorded.graph_def, fetches, recorded.variables, captures)
    order_branch_updates(graph_def)
    order_bodies(graph_def)
    nodes = past_loops({node.name: node for node in graph_def.node})
    _name_stateless(nodes, graph_def.library)
    outputs = tuple(tensor_key(name) for name in recorded.outputs)
    scalars = {
        op.name for op in recorded.operations if op.outputs and op.outputs[0].shape.rank == 0
    }
    scalars |= {
        node.name
        for node in graph_def.node
        if node.op == "Const" and not node.attr["value"].tensor.tensor_shape.dim
    }
    nodes = rewrite_for_memory(nodes, [*map(node_of, outputs), *recorded.effects], order, scalars)
    unsupported = sorted({node.op for node in nodes.values()} & kinds.UNSUPPORTED)
    if unsupported:
        raise UnsupportedModelError(
            f"The train step contains ops that cannot be scheduled: {', '.join(unsupported)}."
        )
    shapes = static_shapes(nodes, graph_def, captures, inputs)
    sizes = {shape[0] for _, _, shape in inputs if shape.rank}
    in_lists = lists.held_bytes(nodes, graph_def.library, shapes, smallest_bytes)
    bodies = body_bytes(nodes, graph_def.library, captures, shapes, smallest_bytes, in_lists)
    translation = Translation(
        nodes, captures, inputs, shapes, order, in_lists | bodies.handed_on, bodies.shared
    )
    return translation.step(
        outputs,
        versions=graph_def.versions,
        library=graph_def.library,
        body_workspace_bytes=bodies.workspace,
        waiting_bytes=bodies.waiting,
        inputs=inputs,
        output_tensors=outputs,
        output_structure=recorded.output_structure,
        divisions=divisions(
            nodes, batch_counts(recorded.graph_def, {n for n, *_ in inputs}, sizes)
        ),
        replicas=tuple(
            replace(one, captures={name: of for name, of in one.captures.items() if name in nodes})
            for one in recorded.replicas
        ),
        variables=recorded.touched,
    )


def _name_stateless(nodes: Mapping[str, Any], library: Any) -> None:
    """Turns loops and branches without an effect into their stateless types, in place."""
    is_pure = calls_without_effect(library)
    for node in nodes.values():
        if node.op in kinds.STATELESS and is_pure(node):
            node.op = kinds.STATELESS[node.op]
