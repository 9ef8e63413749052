"""Lists how TensorFlow's ops run on a slice of the batch, by the ops' definitions.

An op may run in slices along the first axis of its result, or of the values it sums up. A table
gives the mode of every input and output by the op's type. Where modes depend on shapes or
attributes, a function computes them. A type missing here stays whole, and so does an op with an
unknown shape: both are always right.

Rules look only at shapes, never at which axis is the batch's, so a rule holds for any operands.
``FusedBatchNorm`` reads the whole batch and stays whole. A uniform or normal random op draws four
numbers from each step of a counter (Philox; Salmon et al. 2011). So a part begins at a later step,
and a slice of dropout is a slice of the same mask. Other random ops stay whole. Loops have other
rules (:mod:`.loop_slices`).

One file, though long: the table, and the code that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any, Literal

import tensorflow as tf

from keras_remat.backends.tables import names
from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.nodes import (
    data_inputs,
    node_of,
    numbers_of,
    outputs_of,
    split_input,
    tensor_key,
)
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.core.slices import SliceRule

#: How a part of an op reads an input: only a part of it; the whole; as the shape of the op's
#: result, whose first number becomes the part's; or as the counter of a random op, which is
#: advanced for later parts.
InputMode = Literal["part", "whole", "shape", "counter"]

Shape = tuple[int, ...]
#: How the outputs of all parts make the whole op's.
OutputMode = Literal["part", "sum", "mean"]
#: How many numbers a random op draws from each step of its counter.
DRAWN_AT_ONCE = 4
#: Algorithms of random ops that draw so: Philox, and TensorFlow's choice, Philox outside of XLA.
_PHILOX = (1, 3)
#: Modes of the inputs, and the mode of the outputs; ``None`` if the op stays whole.
Found = tuple[tuple[InputMode, ...], OutputMode] | None

#: All inputs have the shape of the result or are broadcast to it.
_ELEMENTWISE = (
    kinds.REUSES_INPUT - names("BiasAdd Softmax LogSoftmax Select _UnaryOpsComposition")
) | names("""
    Cast ZerosLike OnesLike Less LessEqual Greater GreaterEqual Equal NotEqual IsFinite IsNan
    _UnaryOpsComposition
""")

#: Views that only change a shape.
RESHAPING = names("Identity Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot")

_FIXED: Mapping[str, tuple[tuple[InputMode, ...], OutputMode]] = {
    **dict.fromkeys(
        ("Conv2D", "DepthwiseConv2dNative", "Conv3D", "BiasAdd", "ResizeBilinear",
         "ResizeNearestNeighbor"),
        (("part", "whole"), "part"),
    ),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", "Conv3DBackpropInputV2"),
        (("shape", "whole", "part"), "part"),
    ),
    **dict.fromkeys(
        ("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2"),
        (("part", "whole", "part"), "sum"),
    ),
    "BiasAddGrad": (("part",), "sum"),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), (("part",), "part")),
    "MaxPoolGrad": (("part", "part", "part"), "part"),
    "AvgPoolGrad": (("shape", "part"), "part"),
    "ResizeNearestNeighborGrad": (("part", "whole"), "part"),
    "ResizeBilinearGrad": (("part", "part"), "part"),
    "SparseSoftmaxCrossEntropyWithLogits": (("part", "part"), "part"),
    "ResourceGather": (("whole", "part"), "part"),
    "Fill": (("shape", "whole"), "part"),
}  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """Holds the data that a rule reads.

    Args:
        node: the op's node.
        shapes: shapes of its inputs.
        result: shape of its output 0.
        constants: position of an input → its numbers, for constants of a few ints.
    """

    node: Any
    shapes: Sequence[Shape]
    result: Shape
    constants: Mapping[int, list[int]]

    def like_result(self, shape: Shape) -> InputMode:
        """Returns the mode of an input that is broadcast to the result."""
        same = bool(shape) and len(shape) == len(self.result) and shape[0] == self.result[0]
        return "part" if same else "whole"


def _elementwise(op: Operands) -> Found:
    return tuple(op.like_result(shape) for shape in op.shapes), "part"


def _choice(op: Operands) -> Found:
    """Handles ``Select``: takes each number, or each row, from one of two inputs. It broadcasts
    only its condition."""
    return ("part" if op.shapes[0] else "whole", "part", "part"), "part"


def _by_sample(op: Operands) -> Found:
    """Handles ops that normalize the last axis."""
    return (("part",), "part") if len(op.result) > 1 else None


def _fused_inputs(op: Operands) -> list[InputMode] | None:
    """Returns the modes of a fused product's inputs after its two factors."""
    modes: list[InputMode] = []
    for kind in op.node.attr["fused_ops"].list.s:
        if kind == b"BiasAdd":
            modes.append("whole")
        elif kind == b"Add":
            modes.append("part")
        elif kind not in (b"Relu", b"Relu6", b"Elu", b"LeakyRelu", b"Tanh", b"Sigmoid"):
            return None
    return modes if len(modes) == len(op.shapes) - 2 else None


def _fused(op: Operands) -> Found:
    more = _fused_inputs(op)
    is_transposed = op.node.op == "_FusedMatMul" and op.node.attr["transpose_a"].b
    return None if more is None or is_transposed else (("part", "whole", *more), "part")


def _product(op: Operands) -> Found:
    attributes = op.node.attr
    if not attributes["transpose_a"].b:
        return ("part", "whole"), "part"
    return None if attributes["transpose_b"].b else (("part", "part"), "sum")


def _batch_product(op: Operands) -> Found:
    return _elementwise(op) if len(op.result) > 2 else None


def _einsum(op: Operands) -> Found:
    equation = op.node.attr["equation"].s.decode()
    operands, arrow, result = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or "." in equation or not result or not all(terms):
        return None
    labels: tuple[tuple[str, OutputMode], ...] = ((result[0], "part"), (terms[0][0], "sum"))
    for label, output in labels:
        if output == "sum" and label in result:
            continue
        if all(label not in term[1:] for term in (*terms, result)):
            modes: tuple[InputMode, ...] = tuple(
                "part" if term[0] == label else "whole" for term in terms
            )
            if "part" in modes:
                return modes, output
    return None


def _softmax_cross_entropy(op: Operands) -> Found:
    features, labels = op.shapes
    return ("part", "part" if labels[0] == features[0] else "whole"), "part"


def _leaves_first(axes: Sequence[int] | None, shape: Shape) -> bool:
    """Returns whether the first axis of a shape is not among some axes; false for unknown ones."""
    return axes is not None and 0 not in {axis % len(shape) for axis in axes}


def _reduction(op: Operands) -> Found:
    axes = op.constants.get(1)
    if axes is None or not op.shapes[0]:
        return None
    if _leaves_first(axes, op.shapes[0]):
        return ("part", "whole"), "part"
    if op.node.op == "Sum":
        return ("part", "whole"), "sum"
    if op.node.op != "Mean" or tf.as_dtype(op.node.attr["T"].type).is_integer:
        return None  # a mean of ints is cut off after its point
    return ("part", "whole"), "mean"


def _along_another_axis(op: Operands) -> Found:
    """Handles ops that work along the axes named by the second input."""
    is_other = _leaves_first(op.constants.get(1), op.shapes[0])
    return (("part", "whole"), "part") if is_other else None


def _splitting(op: Operands) -> Found:
    """Handles ops that divide a value along the axis named by the first input."""
    is_other = _leaves_first(op.constants.get(0), op.shapes[1])
    return (("whole", "part"), "part") if is_other else None


def _concatenation(op: Operands) -> Found:
    if not _leaves_first(op.constants.get(len(op.shapes) - 1), op.result):
        return None
    parts: list[InputMode] = ["part"] * (len(op.shapes) - 1)
    return (*parts, "whole"), "part"


def _transposition(op: Operands) -> Found:
    order = op.constants.get(1)
    return (("part", "whole"), "part") if order and order[0] == 0 else None


def _padding(op: Operands) -> Found:
    widths = op.constants.get(1)
    if widths is None or widths[:2] != [0, 0]:
        return None
    more: list[InputMode] = ["whole"] * (len(op.shapes) - 1)
    return ("part", *more), "part"


def _tiling(op: Operands) -> Found:
    times = op.constants.get(1)
    if times and times[0] == 1:
        return ("part", "whole"), "part"
    # the same row for all samples: a part repeats it as often as the first number says
    return (("whole", "shape"), "part") if times and op.shapes[0][0] == 1 else None


def _broadcast(op: Operands) -> Found:
    return (op.like_result(op.shapes[0]), "shape"), "part"


def _gathering(op: Operands) -> Found:
    axis = op.constants.get(2)
    if axis != [0] or op.node.attr["batch_dims"].i or not op.shapes[1]:
        return None
    return ("whole", "part", "whole"), "part"


def _one_hot(op: Operands) -> Found:
    return None if op.node.attr["axis"].i == 0 else (("part", "whole", "whole", "whole"), "part")


def _range_slice(op: Operands) -> Found:
    begin = op.constants.get(1)
    if not begin or begin[0] or op.shapes[0][0] != op.result[0]:
        return None
    return ("part", "whole", "shape"), "part"


def _strided_slice(op: Operands) -> Found:
    steps, attributes = op.constants.get(3), op.node.attr
    others = ("new_axis_mask", "shrink_axis_mask")
    if any(attributes[name].i & 1 for name in others) or steps is None:
        return None
    whole = op.shapes[0] if op.node.op == "StridedSlice" else op.result
    if attributes["ellipsis_mask"].i & 1:  # the ellipsis must stand for at least one axis
        takes_all = len(whole) >= len(steps)
    else:
        takes_all = (
            bool(attributes["begin_mask"].i & attributes["end_mask"].i & 1) and steps[0] == 1
        )
    if not takes_all:
        return None
    if op.node.op == "StridedSlice":
        return ("part", "whole", "whole", "whole"), "part"
    return ("shape", "whole", "whole", "whole", "part"), "part"


def _random(op: Operands) -> Found:
    (algorithm,) = op.constants.get(3) or (0,)
    is_single = op.node.attr["dtype"].type != tf.float64.as_datatype_enum
    if algorithm not in _PHILOX or not is_single:
        return None
    return ("shape", "whole", "counter", "whole"), "part"


_BY_SHAPE: Mapping[str, Callable[[Operands], Found]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _by_sample),
    "Select": _choice,
    **dict.fromkeys(("_FusedConv2D", "_FusedDepthwiseConv2dNative", "_FusedMatMul"), _fused),
    "MatMul": _product,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_product),
    "Einsum": _einsum,
    "SoftmaxCrossEntropyWithLogits": _softmax_cross_entropy,
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), _reduction),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "ReverseV2"), _along_another_axis),
    "Split": _splitting,
    "ConcatV2": _concatenation,
    "Transpose": _transposition,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _padding),
    "Tile": _tiling,
    "BroadcastTo": _broadcast,
    "GatherV2": _gathering,
    "OneHot": _one_hot,
    **dict.fromkeys(("StatelessRandomUniformV2", "StatelessRandomNormalV2"), _random),
    "Slice": _range_slice,
    **dict.fromkeys(("StridedSlice", "StridedSliceGrad"), _strided_slice),
}


def modes_of(op: Operands) -> Found:
    """Returns the modes of an op's inputs and outputs; ``None`` where it stays whole."""
    fixed, by_shape = _FIXED.get(op.node.op), _BY_SHAPE.get(op.node.op)
    found = fixed if by_shape is None else by_shape(op)
    if found is None or len(found[0]) != len(op.shapes) or (found[1] == "part" and not op.result):
        return None
    if any(
        mode == "shape" and not _tells_shape(op.constants.get(at), op.result)
        for at, mode in enumerate(found[0])
    ):
        return None
    return found


def input_modes(step: TensorFlowStep, node: Any) -> Found:
    """Returns :func:`modes_of` a node; also ``None`` where a shape is not known."""
    result = step.tensor_shapes.get(f"{node.name}:0")
    if node.op not in _FIXED.keys() | _BY_SHAPE.keys() or result is None:
        return None
    keys = [tensor_key(i) for i in data_inputs(node)]
    shapes = [step.tensor_shapes.get(key) for key in keys]
    known = zip(keys, shapes, strict=True)
    if any(shape is None and not is_variable(step, key) for key, shape in known):
        return None
    constants = {at: value for at, key in enumerate(keys) if (value := _constant(step, key))}
    return modes_of(Operands(node, [shape or () for shape in shapes], result, constants))


def _tells_shape(numbers: Sequence[int] | None, result: Shape) -> bool:
    return numbers is not None and len(numbers) == len(result) and numbers[0] in (result[0], -1)


def _constant(step: TensorFlowStep, key: str) -> list[int] | None:
    """Returns the numbers of a small constant of ints; ``None`` for other tensors."""
    return numbers_of(step.nodes[node_of(views_to(step, key)[-1])])


def views_to(step: TensorFlowStep, tensor: str) -> list[str]:
    """Returns a tensor, the tensor it is a view of, and so on; the last one owns the storage."""
    chain = [tensor]
    while (name := node_of(chain[-1])) in step.folded and (read := data_inputs(step.nodes[name])):
        chain.append(tensor_key(read[0]))
    return chain


def is_variable(step: TensorFlowStep, tensor: str) -> bool:
    """Returns whether a tensor is a variable, or is read from one without a copy."""
    external = step.replicas[0].captures.get(node_of(views_to(step, tensor)[-1]))
    return external is not None and external.dtype == tf.resource


def _is_hidden(step: TensorFlowStep, tensor: str) -> bool:
    """Returns whether a tensor is an output that the graph does not show."""
    name, index = split_input(tensor)
    hides = {forward for forward, _ in kinds.HIDDEN_OUTPUT}
    return index == 1 and name in step.nodes and step.nodes[name].op in hides


def slice_rules(step: TensorFlowStep) -> dict[int, SliceRule]:
    """Returns op id → its slice rule, for ops that may run in slices."""
    rules = {}
    for op in step.graph.ops:
        found = [_rule_of_node(step, step.nodes[name]) for name in step.node_names[op.name]]
        known = [one for one in found if one is not None]
        if len(known) == len(found):
            rules[op.id] = _together(step, op.id, known)
    return _with_partners(step, rules)


@dataclass(frozen=True)
class _NodeRule:
    """Holds how one node runs on a part.

    Args:
        sliced: tensors of which a part reads a part.
        whole: tensors of which a part reads all.
        output: mode of the outputs.
        divides: a number that the number of parts must divide.
    """

    sliced: frozenset[str]
    whole: frozenset[str]
    output: OutputMode
    divides: int


def _rule_of_node(step: TensorFlowStep, node: Any) -> _NodeRule | None:
    found = input_modes(step, node)
    if found is None:
        return None
    (modes, output), sliced, whole, divides = found, set(), set(), 0
    for mode, name in zip(modes, data_inputs(node), strict=True):
        chain = views_to(step, tensor_key(name))
        if mode in ("whole", "counter"):
            whole.add(chain[-1])
        elif mode == "part":
            shapes = [step.tensor_shapes.get(tensor) for tensor in chain]
            only_reshape = all(step.nodes[node_of(view)].op in RESHAPING for view in chain[:-1])
            if not all(shapes) or not only_reshape or is_variable(step, chain[-1]):
                return None  # a variable may be overwritten
            divides = gcd(divides, *(shape[0] for shape in shapes if shape))
            sliced.add(chain[-1])
    if not sliced and "shape" not in modes:
        return None
    for tensor in outputs_of(node.name, step.tensor_shapes) if output == "part" else ():
        shape = step.tensor_shapes[tensor]
        if not shape:
            return None
        divides = gcd(divides, shape[0])
    if "counter" in modes:
        divides = whole_draws(step.tensor_shapes[f"{node.name}:0"] or ())
        if not divides:
            return None
    return _NodeRule(frozenset(sliced), frozenset(whole), output, divides)


def whole_draws(shape: Shape) -> int:
    """Returns a number for a random op's result: if the number of parts divides it, every part
    begins with a step of the counter. Returns 0 where there is none."""
    of_one = prod(shape[1:])
    for samples in (1, 2, 4):
        if shape[0] % samples == 0 and samples * of_one % DRAWN_AT_ONCE == 0:
            return shape[0] // samples
    return 0


def _together(step: TensorFlowStep, op_id: int, found: Sequence[_NodeRule]) -> SliceRule:
    """Returns the rule of an op from the rules of its nodes, with ids of values for tensors."""
    op, values = step.graph.ops[op_id], step.graph.values
    sliced = {tensor for one in found for tensor in one.sliced}
    whole = {tensor for one in found for tensor in one.whole}
    sums = frozenset(op.outputs) if found[0].output != "part" else frozenset()
    return SliceRule(
        frozenset(
            v for v in op.inputs if values[v].name in sliced or _is_hidden(step, values[v].name)
        ),
        frozenset(v for v in op.inputs if values[v].name in whole),
        sums,
        sums if found[0].output == "mean" else frozenset(),
        gcd(*(one.divides for one in found)),
    )


def _with_partners(step: TensorFlowStep, rules: dict[int, SliceRule]) -> dict[int, SliceRule]:
    """Makes ops that share a hidden output partners, which are sliced together: oneDNN's pass looks
    for the two ops side by side."""
    for value in step.graph.values:
        if value.producer is None or not _is_hidden(step, value.name):
            continue
        together = {value.producer, *step.graph.readers[value.id]}
        for op_id in together:
            if together <= rules.keys():
                partners = rules[op_id].partners | (together - {op_id})
                rules[op_id] = replace(rules[op_id], partners=partners)
        if not together <= rules.keys():
            rules = {op_id: rule for op_id, rule in rules.items() if op_id not in together}
    return rules
