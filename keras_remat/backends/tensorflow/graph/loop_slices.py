"""Finds how TensorFlow's loops run on a slice of the batch.

A loop (LSTM, GRU) is one op. It reads and writes lists, which are made of time-major tensors. A
part of a loop is the same loop on parts of the lists. How its body runs on a part
(:mod:`.loop_bodies`) follows from the table of ops (:mod:`.slice_rules`), op by op.

A body names the batch size in many places: in shapes of lists and gradients, and in zeros. So a
part takes its body, and the constants around the loop, from a trace of the step at the part's size.
Another trace, at half the batch, shows which sizes follow the batch.

Lists, time-major tensors and counts of rounds exist in parts only. The ops that touch them form a
*group*, which runs in slices as a whole. It does not if the body has an op that is not in the
table, or if an op outside the group reads a tensor that exists in parts only.

One file, though a little long: groups, and the parts of their loops.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from keras_remat.backends.tensorflow.graph.loop_bodies import (
    ELEMENTS,
    Bodies,
    BodyMode,
    StaysWholeError,
)
from keras_remat.backends.tensorflow.graph.nodes import (
    data_inputs,
    node_of,
    numbers_of,
    outputs_of,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.slice_rules import (
    RESHAPING,
    OutputMode,
    views_to,
)
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.core.slices import SliceRule

logger = logging.getLogger(__name__)

#: How a node of a group reads an input: its part of a tensor, the whole tensor, or a constant taken
#: from the trace at the part's size.
LoopInput = Literal["part", "whole", "traced"]


@dataclass(frozen=True)
class LoopRule:
    """Holds how a node of a group runs on a part.

    Args:
        inputs, outputs: mode of each input and output.
        sizes: their lengths along the batch's axis, where known.
        group: names of all nodes that run in slices together.
    """

    inputs: tuple[LoopInput, ...]
    outputs: tuple[OutputMode, ...]
    sizes: tuple[int, ...] = ()
    group: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Loops:
    """Holds how the loops of a step run in slices.

    Args:
        rules: node name → how the node runs on a part.
        axes: tensor that exists in parts only → its batch axis; ``None`` for a list or a count.
    """

    rules: Mapping[str, LoopRule] = field(default_factory=dict)
    axes: Mapping[str, int | None] = field(default_factory=dict)

    def slice_rules(self, step: TensorFlowStep) -> dict[int, SliceRule]:
        """Returns op id → how the op may run in slices."""
        rules = {}
        for name, rule in self.rules.items():
            op, values = step.graph.ops[step.op_id[name]], step.graph.values
            read: dict[LoopInput, set[str]] = defaultdict(set)
            for mode, tensor in zip(rule.inputs, data_inputs(step.nodes[name]), strict=True):
                read[mode].add(views_to(step, tensor_key(tensor))[-1])
            outputs = zip(op.outputs, rule.outputs, strict=True)
            rules[op.id] = SliceRule(
                frozenset(v for v in op.inputs if values[v].name in read["part"]),
                frozenset(v for v in op.inputs if values[v].name in read["whole"]),
                frozenset(v for v, mode in outputs if mode == "sum"),
                divides=gcd(*rule.sizes),
                partners=frozenset(step.op_id[one] for one in rule.group - {name}),
            )
        return rules


def has_loops(step: TensorFlowStep) -> bool:
    """Returns whether a step has loops without an effect."""
    return any(op.kind == "StatelessWhile" for op in step.graph.ops)


def loops_of(step: TensorFlowStep, half: TensorFlowStep) -> Loops:
    """Returns how loops run in slices, without loops that stay whole.

    Args:
        step: the step.
        half: the step at half the batch.
    """
    rules: dict[str, LoopRule] = {}
    axes: dict[str, int | None] = {}
    seen: set[str] = set()
    bodies = Bodies(step, half)
    for name, node in step.nodes.items():
        if node.op != "StatelessWhile" or name in seen:
            continue
        group = _Group(step, half, bodies)
        try:
            group.collect(name)
            rules |= group.rules()
            axes |= group.axes
        except StaysWholeError as reason:
            logger.debug("keras_remat: %s does not run in slices: %s", name, reason)
        seen |= group.members
    return Loops(rules, axes)


def is_alike(name: str, step: TensorFlowStep, other: TensorFlowStep) -> bool:
    """Returns whether a node has the same type and reads the same tensors, constants aside, in a
    step at two batch sizes."""
    its = other.nodes.get(name)
    if its is None or its.op != step.nodes[name].op:
        return False
    read = [
        [views_to(of, tensor_key(tensor)) for tensor in data_inputs(of.nodes[name])]
        for of in (step, other)
    ]
    constants = [
        [of.nodes[node_of(chain[-1])].op == "Const" for chain in chains]
        for of, chains in zip((step, other), read, strict=True)
    ]
    if constants[0] != constants[1]:
        return False
    pairs = zip(*read, constants[0], strict=True)
    return all(is_constant or one[-1] == two[-1] for one, two, is_constant in pairs)


class _Group:
    """Collects the nodes that run in slices together with a loop, and finds how each does.

    Attributes:
        members: names of the nodes.
        axes: as in :class:`Loops`, for this group.
    """

    def __init__(self, step: TensorFlowStep, half: TensorFlowStep, bodies: Bodies):
        self._step, self._half, self._bodies = step, half, bodies
        self.members: set[str] = set()
        self.axes: dict[str, int | None] = {}
        self._lists: dict[str, BodyMode] = {}

    @cached_property
    def _readers(self) -> Mapping[str, list[str]]:
        """Returns tensor → the nodes that read it or a view of it."""
        readers: dict[str, list[str]] = defaultdict(list)
        for op in self._step.graph.ops:
            for name in self._step.node_names[op.name]:
                for tensor in data_inputs(self._step.nodes[name]):
                    readers[self._owner(tensor)].append(name)
        for tensor in self._step.output_tensors:
            readers[self._owner(tensor)].append("")
        return readers

    def _owner(self, tensor: str) -> str:
        return views_to(self._step, tensor_key(tensor))[-1]

    def collect(self, first: str) -> None:
        """Collects, starting at a loop, all nodes that touch tensors that exist in parts only.

        Raises:
            StaysWholeError: a node cannot run on a part.
        """
        stack = [first]
        while stack:
            name = stack.pop()
            if name in self.members:
                continue
            node = self._step.nodes.get(name)
            if node is None or name in self._step.folded or name not in self._half.nodes:
                raise StaysWholeError(f"it is read by {name or 'the caller of the step'}")
            if self._step.node_names.get(name) != (name,):
                raise StaysWholeError(f"{name} is computed together with others")
            self.members.add(name)
            for tensor, axis in self._in_parts(node):
                owner = self._owner(tensor)
                chain = views_to(self._step, tensor_key(tensor))[:-1]
                if any(self._step.nodes[node_of(view)].op != "Identity" for view in chain):
                    raise StaysWholeError(f"{name} reads it in another shape")
                if self.axes.setdefault(owner, axis) != axis:
                    raise StaysWholeError(f"{owner} is read along two axes")
                stack += [node_of(owner), *self._readers[owner]]

    def _in_parts(self, node: Any) -> Iterator[tuple[str, int | None]]:
        """Yields a node's inputs and outputs that exist in parts only, each with its batch axis."""
        read, kind = [tensor_key(i) for i in data_inputs(node)], node.op
        if kind == "StatelessWhile":
            yield from ((t, None) for t in (*read, *self._made(node)) if self._is_list(t))
            if self._readers[f"{node.name}:0"]:
                yield f"{node.name}:0", None  # the count of rounds
            if self._is_count(node, 2):
                yield read[2], None
        elif kind in ("ZerosLike", "AddN", "AddV2") and self._is_list(f"{node.name}:0"):
            yield from ((t, None) for t in (*read, f"{node.name}:0"))
        elif kind in ("EmptyTensorList", "TensorListReserve"):
            yield f"{node.name}:0", None
        elif kind == "TensorListFromTensor":
            yield from ((read[0], 1), (f"{node.name}:0", None))
        elif kind == "TensorListStack":
            yield from ((read[0], None), (f"{node.name}:0", 1))
        elif kind == "ReverseV2" and self._numbers(read[1]) == [0]:
            yield from ((read[0], 1), (f"{node.name}:0", 1))
        elif kind == "Transpose" and (self._numbers(read[1]) or [])[:2] == [1, 0]:
            is_read = self._owner(read[0]) in self.axes
            if is_read == (f"{node.name}:0" in self.axes):
                raise StaysWholeError(f"{node.name} joins two time-major tensors")
            yield (read[0], 1) if is_read else (f"{node.name}:0", 1)
        elif kind in ("StridedSlice", "StridedSliceGrad") and self._takes_one(node):
            yield (read[0], 1) if kind == "StridedSlice" else (f"{node.name}:0", 1)
        else:
            raise StaysWholeError(f"{node.op} {node.name} is not known in its surroundings")

    def _made(self, node: Any) -> list[str]:
        return outputs_of(node.name, self._step.tensor_shapes)

    def _is_list(self, tensor: str) -> bool:
        owner = self._owner(tensor)
        value_id = self._value_of.get(owner)
        return value_id is not None and self._step.graph.values[value_id].dtype == "variant"

    @cached_property
    def _value_of(self) -> Mapping[str, int]:
        return {value.name: value.id for value in self._step.graph.values}

    def _is_count(self, node: Any, at: int) -> bool:
        """Returns whether input ``at`` of a loop counts the rounds of another loop."""
        made_by, index = split_input(self._owner(data_inputs(node)[at]))
        return index == 0 and self._step.nodes[made_by].op == "StatelessWhile"

    def _numbers(self, tensor: str) -> list[int] | None:
        return numbers_of(self._step.nodes[node_of(self._owner(tensor))])

    def _takes_one(self, node: Any) -> bool:
        """Returns whether a node takes a single index of the first axis."""
        begin = data_inputs(node)[1]
        masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")
        is_plain = not any(node.attr[mask].i & 1 for mask in masks)
        takes_one = len(self._numbers(begin) or ()) == 1
        return node.attr["shrink_axis_mask"].i == 1 and is_plain and takes_one

    # ---------------------------------------------------------------- rules

    def rules(self) -> dict[str, LoopRule]:
        """Returns node name → how the node runs on a part.

        Raises:
            StaysWholeError: a node cannot run on a part.
        """
        in_order = (op.name for op in self._step.graph.ops if op.name in self.members)
        found = {name: self._rule(self._step.nodes[name]) for name in in_order}
        sizes = [size for rule in found.values() for size in rule.sizes]
        if not sizes:
            raise StaysWholeError("nothing in it is known to follow the batch")
        together, divides = frozenset(found), (gcd(*sizes),)
        return {
            name: LoopRule(rule.inputs, rule.outputs, divides, together)
            for name, rule in found.items()
        }

    def _rule(self, node: Any) -> LoopRule:
        if node.op == "StatelessWhile":
            return self._loop_rule(node)
        inputs: list[LoopInput] = []
        sizes: list[int] = []
        for at, read in enumerate(data_inputs(node)):
            if self._step.nodes[node_of(self._owner(read))].op == "Const":
                inputs.append(self._constant_input(node, at))
            else:
                inputs.append("part")
                sizes += self._sizes(read)
        tensor = f"{node.name}:0"
        sizes += self._sizes(tensor)
        if tensor in self.axes and self.axes[tensor] is None:
            self._lists[tensor] = self._list_mode(node)
        outputs: list[OutputMode] = ["part"] * len(self._made(node))
        return LoopRule(tuple(inputs), tuple(outputs), tuple(sizes))

    def _constant_input(self, node: Any, at: int) -> LoopInput:
        """Returns how a part reads a constant that names a shape, an axis or a number."""
        read, its = (data_inputs(of.nodes[node.name])[at] for of in (self._step, self._half))
        one = self._step.nodes[node_of(self._owner(read))]
        other = self._half.nodes[node_of(views_to(self._half, tensor_key(its))[-1])]
        if other.op != "Const":
            raise StaysWholeError(f"{node.name} reads no constant at half the batch")
        return "whole" if one.attr["value"] == other.attr["value"] else "traced"

    def _sizes(self, tensor: str) -> list[int]:
        """Returns the lengths along the batch axis of a tensor and of the tensors it is a view of.

        Raises:
            StaysWholeError: a shape is unknown, or does not halve with the batch.
        """
        chain = views_to(self._step, tensor_key(tensor))
        axis = self.axes.get(chain[-1], 0)
        if axis is None:
            return []
        if any(self._step.nodes[node_of(view)].op not in RESHAPING for view in chain[:-1]):
            raise StaysWholeError(f"{tensor} is a view that is no other shape alone")
        sizes = []
        for one in chain:
            whole, half = (of.tensor_shapes.get(one) for of in (self._step, self._half))
            if not whole or not half or len(whole) <= axis:
                raise StaysWholeError(f"the shape of {one} is not known")
            if whole[axis] % 2 or half != (*whole[:axis], whole[axis] // 2, *whole[axis + 1 :]):
                raise StaysWholeError(f"{one} is {whole}, and {half} at half the batch")
            sizes.append(whole[axis])
        return sizes

    def _list_mode(self, node: Any) -> BodyMode:
        if node.op in ("EmptyTensorList", "TensorListReserve"):
            return "list"
        if node.op == "TensorListFromTensor":
            return "parts"
        found = {self._lists[self._owner(read)] for read in data_inputs(node)} - {"list"}
        if len(found) > 1:
            raise StaysWholeError(f"{node.name} joins lists of different kinds")
        return found.pop() if found else "list"

    def _loop_rule(self, node: Any) -> LoopRule:
        if not is_alike(node.name, self._step, self._half):
            raise StaysWholeError(f"{node.name} is another op at half the batch")
        given: list[BodyMode] = []
        inputs: list[LoopInput] = []
        sizes: list[int] = []
        for tensor in map(tensor_key, data_inputs(node)):
            owner = self._owner(tensor)
            shapes = [of.tensor_shapes.get(tensor) for of in (self._step, self._half)]
            if owner in self._lists:
                given.append(self._lists[owner])
                inputs.append("part")
            elif owner in self.axes:
                given.append("whole")
                inputs.append("part")
            elif shapes[0] == shapes[1]:
                given.append("whole")
                inputs.append("whole")
            else:
                sizes += self._sizes(tensor)
                given.append("part")
                inputs.append("part")
        carried = self._bodies.carried(node, given, self._starts_at_zero(node))
        outputs: list[OutputMode] = []
        for tensor, mode in zip(self._made(node), carried, strict=True):
            if mode in ("list", *ELEMENTS):
                self._lists[tensor] = mode
            elif mode == "whole" and self._readers[tensor] and tensor not in self.axes:
                raise StaysWholeError(f"{tensor} is alike in all parts, and is read")
            elif mode == "part":
                sizes += self._sizes(tensor)
            outputs.append("sum" if mode == "sum" else "part")
        return LoopRule(tuple(inputs), tuple(outputs), tuple(sizes))

    def _starts_at_zero(self, node: Any) -> list[bool]:
        """Returns for every input whether it is floating-point and all zeros."""
        floating = [tf.as_dtype(number).is_floating for number in node.attr["T"].list.type]
        pairs = zip(floating, data_inputs(node), strict=True)
        return [is_number and self._is_zero(self._owner(t)) for is_number, t in pairs]

    def _is_zero(self, owner: str) -> bool:
        node = self._step.nodes[node_of(owner)]
        if node.op in ("Fill", "BroadcastTo"):
            filler = data_inputs(node)[1 if node.op == "Fill" else 0]
            return self._is_zero(self._owner(filler))
        if node.op == "Const" and node.attr["dtype"].type != tf.string.as_datatype_enum:
            return not np.any(tf.make_ndarray(node.attr["value"].tensor))
        return bool(node.op == "ZerosLike")
