"""Writes a traced step with some of its ops in slices: the nodes of a
:class:`~keras_remat.core.slices.SlicedGraph`.

Each op of that graph is a node with the op's name. A part is its op's node with other inputs: parts
of the sliced inputs, reshaped where there was a view, and shape constants with the part's size as
first number. Slicing adds to a graph:

* a cut is ``GatherV2`` of one row of the value viewed as ``[parts, rows of one part, ...]``. It
  copies; ``Slice`` and ``Split`` would share the buffer where it is aligned, and keep all of it
  alive;
* a join is ``Empty`` and then ``InplaceUpdate`` of one row per part, in the same view. It writes
  into its input's buffer, which no other op reads;
* a sum is ``AddV2``, in the order of the parts; a mean is divided by their number, which changes
  no bit where it is a power of two;
* a part of a random op has its counter advanced by the numbers that earlier parts draw.

Readers of a joined or summed value read it under its new name. All other nodes stay the same.

One file, though long: a single writer, which reads the nodes that it has written so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from keras_remat.backends.base import Whole
from keras_remat.backends.tensorflow.graph.loop_slices import (
    Loops,
    has_loops,
    is_alike,
    loops_of,
)
from keras_remat.backends.tensorflow.graph.nodes import (
    constant,
    control_inputs,
    copied,
    data_inputs,
    new_node,
    node_of,
    outputs_of,
    reachable,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.slice_rules import (
    DRAWN_AT_ONCE,
    input_modes,
    slice_rules,
    views_to,
)
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.backends.tensorflow.memory.best_fit import GRANULE_BYTES
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing, sliced_graph
from keras_remat.errors import InvalidProblemError

logger = logging.getLogger(__name__)

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class StepSlicer:
    """Rewrites one traced step (:class:`keras_remat.backends.base.Slicer`).

    Args:
        step: the whole step.
        at_size: traces the step at another batch size; without it, loops stay whole.
        granule_bytes: bytes to which the allocator rounds a value's size.
    """

    step: TensorFlowStep
    at_size: Callable[[int], TensorFlowStep] | None = None
    granule_bytes: int = GRANULE_BYTES

    @cached_property
    def rules(self) -> dict[int, SliceRule]:
        """Returns op id → how the op may run in slices."""
        return slice_rules(self.step) | self.loops.slice_rules(self.step)

    @cached_property
    def loops(self) -> Loops:
        """Returns how the loops of the step run in slices."""
        if self.at_size is None or self._samples % 2 or not has_loops(self.step):
            return Loops()
        try:
            return loops_of(self.step, self._in_parts(2))
        except InvalidProblemError as error:
            logger.debug("keras_remat: loops do not run in slices: %s", error)
            return Loops()

    def _of_part(self, slicing: Slicing) -> TensorFlowStep | None:
        """Returns the step traced for one part, if a loop runs in slices; else ``None``."""
        names = [self.step.graph.ops[op_id].name for op_id in slicing.ops]
        in_loops = [name for name in names if name in self.loops.rules]
        if not in_loops:
            return None
        of_part = self._in_parts(slicing.parts)
        for name in in_loops:
            if not is_alike(name, self.step, of_part):
                raise InvalidProblemError(f"{name} is another op for one of {slicing.parts} parts")
        return of_part

    @property
    def _samples(self) -> int:
        """Returns the batch size; 1 where the batch's arrays do not agree."""
        sizes = {shape[0] for _, _, shape in self.step.inputs if shape.rank}
        return int(sizes.pop() or 1) if len(sizes) == 1 else 1

    def _in_parts(self, parts: int) -> TensorFlowStep:
        """Returns the step traced for one part of the batch."""
        if self.at_size is None:
            raise LookupError("the step is not traced at another size")
        return self.at_size(self._samples // parts)

    def sliced(self, slicing: Slicing) -> TensorFlowStep:
        """Returns the step with some ops in slices.

        Raises:
            InvalidProblemError: the ops cannot run in these slices.
        """
        axes = {
            value.id: axis
            for value in self.step.graph.values
            if (axis := self.loops.axes.get(value.name)) is not None
        }
        graph = sliced_graph(self.step.graph, self.rules, slicing, self.granule_bytes, axes)
        return _Writer(self._whole, graph, self.loops, self._of_part(slicing)).step()

    @cached_property
    def _whole(self) -> TensorFlowStep:
        """Returns the whole step with this slicer, so that it can be sliced differently."""
        return replace(self.step, slicer=self)


class _Writer:
    """Writes the nodes of one sliced graph."""

    def __init__(
        self,
        step: TensorFlowStep,
        sliced: SlicedGraph,
        loops: Loops,
        of_part: TensorFlowStep | None,
    ):
        """
        Args:
            step: the whole step.
            sliced: the graph to write.
            loops: how loops run in slices.
            of_part: the step traced for one part, where a loop runs in slices.
        """
        self._step, self._sliced, self._loops, self._of_part = step, sliced, loops, of_part
        self._chosen = set(sliced.slicing.ops)
        self._nodes: dict[str, Any] = {}
        self._shapes = dict(step.tensor_shapes)
        self._attached: dict[str, str] = {}
        self._folded: set[str] = set()
        self._renamed: dict[str, str] = {}  # tensor of an op in slices → tensor that joins it
        self._divisions: dict[str, tuple[Any, Any]] = {}
        self._value_of = {value.name: value.id for value in step.graph.values}

    def step(self) -> TensorFlowStep:
        """Returns the sliced step."""
        whole = []
        for op, origin in zip(self._sliced.graph.ops, self._sliced.origins, strict=True):
            if origin.role == "whole":
                whole.append(op.name)
            elif origin.role == "part":
                self._write_part(self._step.graph.ops[origin.source].name, origin.part)
            else:
                write = {
                    "cut": self._write_cut, "start": self._write_start, "join": self._write_join,
                    "sum": self._write_sum, "divide": self._write_mean,
                }[origin.role]  # fmt: skip
                write(op.name, origin.source, origin.part)
        self._copy_whole(whole)
        graph = self._sliced.graph
        outputs = tuple(self._whole(tensor) for tensor in self._step.output_tensors)
        nodes = self._used([op.name for op in graph.ops], outputs)
        return replace(
            self._step,
            graph=graph,
            handles={op.id: nodes[op.name] for op in graph.ops},
            nodes=nodes,
            folded=frozenset(self._folded | self._step.folded) & nodes.keys(),
            attached={name: holder for name, holder in self._attached.items() if name in nodes},
            divisions={name: one for name, one in self._divisions.items() if name in nodes},
            tensor_shapes=self._shapes,
            output_tensors=outputs,
            slicer=None,
            whole=Whole(self._step, self._sliced),
            **self._bodies(),
        )

    def _bodies(self) -> dict[str, Any]:
        """Returns the changed fields of the step: its functions with those of its parts' loops, and
        the workspace of these loops."""
        if self._of_part is None:
            return {}
        library = type(self._step.library)()
        library.CopyFrom(self._step.library)
        known = {function.signature.name for function in library.function}
        library.function.extend(
            f for f in self._of_part.library.function if f.signature.name not in known
        )
        needed = dict(self._step.body_workspace_bytes)
        for name, nbytes in self._of_part.body_workspace_bytes.items():
            needed |= {f"{name}/slice_{n}": nbytes for n in range(self._sliced.slicing.parts)}
        return {"library": library, "body_workspace_bytes": needed}

    # ---------------------------------------------------------------- whole ops

    def _copy_whole(self, names: Iterable[str]) -> None:
        """Copies all nodes but those in slices. The copies read whole tensors."""
        gone = {
            name
            for op_id in self._chosen
            for name in self._step.node_names[self._step.graph.ops[op_id].name]
        }
        for name, node in self._step.nodes.items():
            if name not in gone:
                inputs = [self._whole(i) if not i.startswith("^") else i for i in node.input]
                self._nodes[name] = node if inputs == list(node.input) else copied(node, inputs)
        self._attached |= {n: h for n, h in self._step.attached.items() if n not in gone}
        for name, (divisor, division) in self._step.divisions.items():
            if name not in gone:
                read, *others = division.input
                self._divisions[name] = divisor, copied(division, [self._whole(read), *others])

    def _whole(self, tensor: str) -> str:
        return self._renamed.get(tensor_key(tensor), tensor)

    def _used(self, ops: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
        """Returns the nodes that ops or outputs depend on. That drops views of tensors that exist
        in parts only. A node that waited for a dropped node waits for the effects behind it."""

        def sources(name: str) -> list[str]:
            return [node_of(read) for read in data_inputs(self._nodes[name])]

        used = reachable([*ops, *self._attached, *map(node_of, outputs)], sources)
        kept = {name: node for name, node in self._nodes.items() if name in used}
        for name, node in kept.items():
            controls = control_inputs(node)
            if any(before not in kept for before in controls):
                effects = [
                    effect
                    for before in controls
                    for effect in ([before] if before in kept else self._effects(before))
                ]
                waits = [f"^{effect}" for effect in dict.fromkeys(effects) if effect in kept]
                kept[name] = copied(node, [*data_inputs(node), *waits])
        return kept

    def _effects(self, name: str) -> list[str]:
        return sorted(self._step.effects_behind.get(name, ()))

    # ---------------------------------------------------------------- nodes

    def _node(
        self, name: str, kind: str, inputs: Sequence[str], shape: _Shape | None, **types: Any
    ) -> str:
        """Writes a node of one output; returns its tensor.

        Args:
            name: name of the node.
            kind: type of its op.
            inputs: tensors it reads.
            shape: shape of its output.
            types: attributes that are dtypes.
        """
        self._nodes[name] = new_node(name, kind, inputs, **types)
        self._shapes[f"{name}:0"] = shape
        return f"{name}:0"

    def _constant(self, name: str, value: Any, dtype: Any = tf.int32) -> str:
        """Writes a constant; returns its tensor."""
        if name not in self._nodes:
            self._nodes[name] = constant(name, value, dtype)
            self._shapes[f"{name}:0"] = np.shape(value)
            self._folded.add(name)
        return f"{name}:0"

    def _reshaped(self, name: str, tensor: str, shape: Sequence[int], dtype: Any) -> str:
        """Returns a view of a tensor in another shape; the tensor itself if it has that shape."""
        shape = tuple(shape)
        if self._shapes.get(tensor) == shape:
            return tensor
        if name not in self._nodes:
            to = self._constant(f"{name}/shape", shape)
            self._node(name, "Reshape", (tensor, to), shape, T=dtype, Tshape=tf.int32)
            self._folded.add(name)
        return f"{name}:0"

    def _dtype(self, value_id: int) -> Any:
        return tf.as_dtype(self._step.graph.values[value_id].dtype)

    def _shape(self, tensor: str) -> _Shape:
        shape = self._step.tensor_shapes[tensor]
        if shape is None:
            raise LookupError(f"the shape of {tensor} is not known")
        return shape

    def _part_shape(self, tensor: str) -> _Shape:
        first, *rest = self._shape(tensor)
        return (first // self._sliced.slicing.parts, *rest)

    def _in_rows(self, tensor: str) -> _Shape:
        """Returns the shape of a tensor with a row for each part."""
        return (self._sliced.slicing.parts, *self._part_shape(tensor))

    # ---------------------------------------------------------------- parts

    def _write_part(self, op_name: str, part: int) -> None:
        if op_name in self._loops.rules:
            self._write_part_of_loop(op_name, part)
            return
        for name in self._step.node_names[op_name]:
            node = self._step.nodes[name]
            found = input_modes(self._step, node)
            if found is None:
                raise LookupError(f"{node.op} {name} cannot run in slices")
            modes, output = found
            new = f"{name}/slice_{part}"
            inputs = []
            for at, (mode, read) in enumerate(zip(modes, data_inputs(node), strict=True)):
                tensor = tensor_key(read)
                if mode == "part":
                    inputs.append(self._part(tensor, part))
                elif mode == "shape":
                    inputs.append(self._part_of_shape(f"{name}/slices/input_{at}", tensor))
                elif mode == "counter" and part:
                    drawn = prod(self._part_shape(f"{name}:0")) * part
                    inputs.append(self._counter(f"{new}/counter", tensor, drawn))
                else:
                    inputs.append(self._whole(tensor))
            self._nodes[new] = copied(node, inputs, new)
            self._divide_part(name, new)
            if name != op_name:
                self._attached[new] = f"{op_name}/slice_{part}"
            for at, tensor in enumerate(outputs_of(name, self._step.tensor_shapes)):
                shape = self._part_shape(tensor) if output == "part" else self._shape(tensor)
                self._shapes[f"{new}:{at}"] = shape

    def _write_part_of_loop(self, name: str, part: int) -> None:
        """Writes a part of a loop or of an op in its group, as traced at the part's size."""
        if self._of_part is None:
            raise LookupError("the step is not traced at the size of a part")
        inputs, rule, new = [], self._loops.rules[name], f"{name}/slice_{part}"
        for at, (mode, read) in enumerate(
            zip(rule.inputs, data_inputs(self._step.nodes[name]), strict=True)
        ):
            tensor = tensor_key(read)
            if mode == "part":
                inputs.append(self._part(tensor, part))
            elif mode == "traced":
                inputs.append(self._traced_constant(f"{name}/slices/input_{at}", name, at))
            else:
                inputs.append(self._whole(tensor))
        self._nodes[new] = copied(self._of_part.nodes[name], inputs, new)
        for at in range(len(rule.outputs)):
            self._shapes[f"{new}:{at}"] = self._of_part.tensor_shapes[f"{name}:{at}"]

    def _traced_constant(self, name: str, reader: str, at: int) -> str:
        """Returns the constant that input ``at`` of an op is in the trace at the part's size."""
        step = self._of_part
        if name not in self._nodes and step is not None:
            read = tensor_key(data_inputs(step.nodes[reader])[at])
            node = step.nodes[node_of(views_to(step, read)[-1])]
            self._nodes[name] = copied(node, (), name)
            self._shapes[f"{name}:0"] = step.tensor_shapes[f"{node.name}:0"]
            self._folded.add(name)
        return f"{name}:0"

    def _counter(self, name: str, tensor: str, drawn: int) -> str:
        """Returns a random op's counter after ``drawn`` numbers.

        The counter has 128 bits. TensorFlow draws the upper 64, and the lower ones begin at 0.
        """
        types = {"T": tf.uint64, "type": tf.int64}
        signed = self._node(f"{name}/signed", "Bitcast", [self._whole(tensor)], (2,), **types)
        steps = self._constant(f"{name}/steps", [drawn // DRAWN_AT_ONCE, 0], tf.int64)
        later = self._node(f"{name}/later", "AddV2", [signed, steps], (2,), T=tf.int64)
        types = {"T": tf.int64, "type": tf.uint64}
        found = self._node(name, "Bitcast", [later], (2,), **types)
        self._folded |= {name, f"{name}/signed", f"{name}/later"}
        return found

    def _divide_part(self, name: str, new: str) -> None:
        """Notes the division that replaces a part, if a division replaces the whole op."""
        if name in self._step.divisions:
            divisor, division = self._step.divisions[name]
            count = f"{new}/count"
            at = list(data_inputs(self._step.nodes[name])).index(division.input[0])
            inputs = [self._nodes[new].input[at], count]
            self._divisions[new] = copied(divisor, (), count), copied(division, inputs, new)

    def _part(self, tensor: str, part: int) -> str:
        """Returns one part of a tensor that is made in parts or cut."""
        owner = views_to(self._step, tensor)[-1]
        value_id = self._value_of[owner]
        if (value_id, part) in self._sliced.parts:
            name, index = split_input(owner)
            made = f"{name}/slice_{part}:{index}"
            if owner in self._loops.axes:
                return made
        else:
            cut = self._sliced.graph.values[self._sliced.cuts[value_id, part]].producer
            made = f"{self._sliced.graph.ops[cut or 0].name}:0"
        view = f"{node_of(tensor)}/slice_{part}/view"
        return self._reshaped(view, made, self._part_shape(tensor), self._dtype(value_id))

    def _part_of_shape(self, name: str, tensor: str) -> str:
        """Returns a constant with the shape of a part, made from the constant with the whole's
        shape, in the same dtype."""
        if name not in self._nodes:
            node = self._step.nodes[node_of(views_to(self._step, tensor)[-1])]
            numbers = np.array(tf.make_ndarray(node.attr["value"].tensor))
            if numbers[0] >= 0:
                numbers[0] //= self._sliced.slicing.parts
            self._constant(name, numbers, numbers.dtype)
        return f"{name}:0"

    # ---------------------------------------------------------------- cuts, joins and sums

    def _write_cut(self, name: str, value_id: int, part: int) -> None:
        owner, dtype = self._step.graph.values[value_id].name, self._dtype(value_id)
        base = name.rpartition("/")[0]
        rows = self._reshaped(f"{base}/cut", self._whole(owner), self._in_rows(owner), dtype)
        inputs = rows, self._constant(f"{name}/row", part), self._constant(f"{base}/cut/axis", 0)
        self._node(
            name, "GatherV2", inputs, self._part_shape(owner),
            Tparams=dtype, Tindices=tf.int32, Taxis=tf.int32,
        )  # fmt: skip

    def _write_start(self, name: str, value_id: int, part: int) -> None:
        owner = self._step.graph.values[value_id].name
        shape = self._in_rows(owner)
        inputs = (self._constant(f"{name}/shape", shape),)
        self._node(name, "Empty", inputs, shape, dtype=self._dtype(value_id))

    def _write_join(self, name: str, value_id: int, part: int) -> None:
        owner, dtype = self._step.graph.values[value_id].name, self._dtype(value_id)
        base, shape = name.rpartition("/")[0], self._in_rows(owner)
        before = f"{base}/join_{part - 1}" if part else f"{base}/joined"
        node, index = split_input(owner)
        made = f"{node}/slice_{part}:{index}"
        row = self._reshaped(f"{name}/row", made, (1, *shape[1:]), dtype)
        inputs = f"{before}:0", self._constant(f"{name}/at", [part]), row
        joined = self._node(name, "InplaceUpdate", inputs, shape, T=dtype)
        if part == self._sliced.slicing.parts - 1:
            self._renamed[owner] = self._reshaped(
                f"{base}/whole", joined, self._shape(owner), dtype
            )

    def _write_sum(self, name: str, value_id: int, part: int) -> None:
        owner = self._step.graph.values[value_id].name
        base = name.rpartition("/")[0]
        node, index = split_input(owner)
        first = f"{node}/slice_0:{index}"
        before = f"{base}/sum_{part - 1}:0" if part > 1 else first
        inputs = before, f"{node}/slice_{part}:{index}"
        total = self._node(name, "AddV2", inputs, self._shape(owner), T=self._dtype(value_id))
        if part == self._sliced.slicing.parts - 1:
            self._renamed[owner] = total

    def _write_mean(self, name: str, value_id: int, part: int) -> None:
        owner, dtype = self._step.graph.values[value_id].name, self._dtype(value_id)
        by = self._constant(f"{name}/parts", self._sliced.slicing.parts, dtype)
        self._renamed[owner] = self._node(
            name, "RealDiv", (self._renamed[owner], by), self._shape(owner), T=dtype
        )
