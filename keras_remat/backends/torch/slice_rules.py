"""Lists how PyTorch's operators run on a slice of the batch, read off their definitions.

An operator may run in slices along an axis of its result, or along an axis that it sums over. The
table gives every such way: how a part reads each tensor, and how each result of a part relates to
the whole result. Views are in it, too: they carry an axis from a value to its reader. An operator
missing here stays whole, and so does one whose shapes do not allow slices; both are always right.
The rules do not depend on which axis is the batch's; that only says where to begin
(:mod:`~keras_remat.backends.torch.slice_analysis`).

Random numbers are drawn whole, and a part reads a slice of them, because every device counts a
generator on in its own way. One file, though long: one table, and its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keras_remat.backends.slice_modes import MEAN, SAME, SUM, Mode, Shape, same_place
from keras_remat.backends.tables import names
from keras_remat.backends.torch import private
from keras_remat.backends.torch.recorder import Call, Layout, Ref


@dataclass(frozen=True)
class Way:
    """Holds one way in which an operator runs on a part.

    Args:
        outputs: mode of each result.
        inputs: name of an argument → mode in which a part reads its tensors; an argument that is
            not named is read whole.
    """

    outputs: tuple[Mode, ...]
    inputs: Mapping[str, Mode] = field(default_factory=dict)

    @property
    def axis(self) -> int | None:
        """Returns the axis of the first result that is made part by part."""
        return next((mode for mode in self.outputs if isinstance(mode, int)), None)


class Operands:
    """Holds the facts a rule looks at.

    Args:
        call: the operator's call.
        layouts: layouts of all tensors.

    Attributes:
        name: the operator's name, without the underscore of one that writes.
        arguments: arguments by name, with defaults for those not given.
        shapes: name of an argument → shape of its tensor, or of the first one in a list.
        has_lists: whether there are lists of tensors.
        results: shapes of the results, or of the tensors written; ``None`` for a result that is no
            tensor.
    """

    def __init__(self, call: Call, layouts: Sequence[Layout]):
        self.call = call
        name = private.schema_name(call.operator)
        self.name = name.removesuffix("_") if call.writes else name
        self.arguments = private.arguments_of(call.operator, call.args, call.kwargs)
        self.shapes: dict[str, Shape] = {}
        for key, given in self.arguments.items():
            first = given[0] if isinstance(given, (list, tuple)) and given else given
            if isinstance(first, Ref):
                self.shapes[key] = layouts[first.number].shape
        lists = (one for one in self.arguments.values() if isinstance(one, (list, tuple)))
        self.has_lists = any(one and isinstance(one[0], Ref) for one in lists)
        made = call.writes or call.outputs
        self.results = tuple(None if n is None else layouts[n].shape for n in made)

    @property
    def result(self) -> Shape:
        """Returns the shape of the first result that is a tensor."""
        return next(shape for shape in self.results if shape is not None)

    @property
    def axes(self) -> Iterator[int]:
        """Yields the axes of the result that can be divided into parts."""
        return (axis for axis, size in enumerate(self.result) if size > 1)

    def every(self, mode: Mode) -> tuple[Mode, ...]:
        """Returns a mode for every result."""
        return (mode,) * len(self.results)

    def dims(self, name: str, rank: int) -> set[int]:
        """Returns the axes that an argument names; all axes if it names none."""
        given = self.arguments.get(name)
        given = (given,) if isinstance(given, int) else given
        return {at % max(rank, 1) for at in given} if given else set(range(rank))


Ways = Iterator[Way]


def _aligned(op: Operands, axis: int) -> dict[str, Mode] | None:
    """Returns the modes of tensors that are broadcast to a result, for a part of that result;
    ``None`` if they are not broadcast."""
    modes: dict[str, Mode] = {}
    for name, shape in op.shapes.items():
        at = axis - len(op.result) + len(shape)
        if at < 0 or shape[at] == 1:
            continue
        if shape[at] != op.result[axis]:
            return None
        modes[name] = at
    return modes


def _pointwise(op: Operands) -> Ways:
    for axis in op.axes:
        modes = _aligned(op, axis)
        if modes is not None:
            yield Way(op.every(axis), modes)


def _made(op: Operands) -> Ways:
    """Yields ways for operators that fill a shape with one number, whatever they read."""
    for axis in op.axes:
        yield Way(op.every(axis))


def _kept_alike(op: Operands, worked: set[int], rank: int) -> Ways:
    """Yields ways for operators that work along some axes, and treat all others alike.

    Args:
        worked: the axes that they work along; a tensor or a result may lack all of them.
        rank: number of axes of those that lack none.
    """
    for axis in sorted(set(range(rank)) - worked):
        without = axis - sum(at < axis for at in worked)
        made = axis if len(op.result) == rank else without
        read = {name: axis if len(shape) == rank else without for name, shape in op.shapes.items()}
        size = op.result[made]
        if all(op.shapes[name][at : at + 1] == (size,) for name, at in read.items()):
            yield Way(op.every(made), read)


def _along(parameter: str) -> Callable[[Operands], Ways]:
    """Returns the rule of operators that work along the axes in an argument."""

    def rule(op: Operands) -> Ways:
        rank = max(map(len, (op.result, *op.shapes.values())))
        return _kept_alike(op, op.dims(parameter, rank), rank)

    return rule


def _triangle(op: Operands) -> Ways:
    rank = len(op.result)
    return _kept_alike(op, {rank - 2, rank - 1}, rank)


def _reduction(op: Operands) -> Ways:
    yield from _along("dim")(op)
    adds: Mapping[str, Mode] = {"sum": SUM, "mean": MEAN}
    if op.name in adds:
        for at in sorted(op.dims("dim", len(op.shapes["self"]))):
            yield Way((adds[op.name],), {"self": at})


def _product(op: Operands) -> Ways:
    """Yields ways for matrix products, single or batched, with or without an added tensor."""
    *added, left, right = op.shapes
    rank = len(op.result)
    for axis in op.axes:
        modes = _added(op, axis) if added else {}
        if axis < rank - 2:
            yield Way((axis,), {**modes, left: axis, right: axis})
        else:
            yield Way((axis,), {**modes, left if axis == rank - 2 else right: axis})
    if not added:
        yield Way((SUM,), {left: rank - 1, right: rank - 2})


def _added(op: Operands, axis: int) -> dict[str, Mode]:
    """Returns the mode of the tensor that is added to a product, and broadcast to it."""
    shape = op.shapes["self"]
    at = axis - len(op.result) + len(shape)
    return {"self": at} if at >= 0 and shape[at] > 1 else {}


def _vector_product(op: Operands) -> Ways:
    if op.name == "mv":
        yield Way((0,), {"self": 0})
        yield Way((SUM,), {"self": 1, "vec": 0})
    else:
        yield Way((SUM,), {"self": 0, "tensor": 0})


def _by_sample(op: Operands) -> Ways:
    """Yields a way for operators on images that treat samples alike, along the first axis."""
    axes_of_image = next((int(letter) for letter in op.name if letter.isdigit()), 1)
    if len(op.result) >= 2 + axes_of_image:  # else it is a single image
        read = ("grad_output", "self", "input", "indices")
        yield Way(op.every(0), {name: 0 for name in read if name in op.shapes})


def _normalization(op: Operands) -> Ways:
    """Yields ways for normalization of the last axes, and for its gradient."""
    normalized = len(op.arguments["normalized_shape"])
    read = ("grad_out", "input", "mean", "rstd")
    is_gradient = "grad_out" in op.shapes
    for axis in range(len(op.shapes["input"]) - normalized):
        modes: dict[str, Mode] = {name: axis for name in read if name in op.shapes}
        sums: list[Mode] = [SUM] * (len(op.results) - 1)
        yield Way((axis, *sums) if is_gradient else op.every(axis), modes)


def _batch_normalization(op: Operands) -> Ways:
    """Yields ways if the statistics are given; otherwise the whole batch is needed."""
    if op.arguments.get("training") or op.arguments.get("train"):
        return
    if "grad_out" in op.shapes:
        yield Way((0, SUM, SUM), {"grad_out": 0, "input": 0})
    else:
        yield Way((0, *[SAME] * (len(op.results) - 1)), {"input": 0})


def _embedding(op: Operands) -> Ways:
    for axis in range(len(op.shapes["indices"])):
        yield Way((axis,), {"indices": axis})


def _embedding_gradient(op: Operands) -> Ways:
    if not op.arguments["scale_grad_by_freq"]:
        for axis in range(len(op.shapes["indices"])):
            yield Way((SUM,), {"grad_output": axis, "indices": axis})


def _index_selection(op: Operands) -> Ways:
    dims = op.dims("dim", len(op.result))
    for axis in op.axes:
        yield Way((axis,), {"index": 0} if axis in dims else {"self": axis})


def _negative_log_likelihood(op: Operands) -> Ways:
    """Yields a way for the losses of single samples. Their total weight is then 0, and nobody reads
    it."""
    if op.arguments["reduction"] or len(op.shapes["self"]) < 2:
        return
    modes: dict[str, Mode] = {"self": 0, "target": 0}
    if "grad_output" in op.shapes:
        yield Way((0,), {**modes, "grad_output": 0, "total_weight": SAME})
    else:
        yield Way((0, SAME), modes)


def _padding(op: Operands) -> Ways:
    padded = op.arguments["pad"]
    rank = len(op.result)
    for axis in op.axes:
        last = 2 * (rank - 1 - axis)
        if not any(padded[last : last + 2]):
            yield Way((axis,), {"self": axis})


def _repetition(op: Operands) -> Ways:
    times, shape = op.arguments["repeats"], op.shapes["self"]
    for axis in op.axes:
        if times[axis] == 1:
            yield Way((axis,), {"self": axis - len(op.result) + len(shape)})


def _attention(op: Operands) -> Ways:
    """Yields a way for attention sample by sample."""
    if op.arguments.get("dropout_p"):
        return
    samples = op.shapes["query"][0]
    read = ("grad_out", "query", "key", "value", "out", "logsumexp")
    modes: dict[str, Mode] = {name: 0 for name in read if name in op.shapes}
    if any(op.shapes[name][0] != samples for name in modes):
        return
    for name, shape in op.shapes.items():
        if name not in modes:
            modes[name] = SAME
            if name.startswith("attn_"):
                modes[name] = 0 if len(shape) == 4 and shape[0] == samples > 1 else None
    yield Way(tuple(0 if _has(shape, samples) else SAME for shape in op.results), modes)


def _has(shape: Shape | None, samples: int) -> bool:
    return shape is not None and len(shape) > 1 and shape[0] == samples


def _convolution_gradients(op: Operands) -> Ways:
    yield Way((0, SUM, SUM), {"grad_output": 0, "input": 0})


# -------------------------------------------------------------------- views


def _reshape(op: Operands) -> Ways:
    for axis in op.axes:
        place = same_place(op.result, axis, op.shapes["self"])
        if place is not None:
            yield Way((axis,), {"self": place})


def _permutation(op: Operands) -> Ways:
    order = list(range(len(op.result)))
    if "dims" in op.arguments:
        order = [dim % len(order) for dim in op.arguments["dims"]]
    elif len(order) > 1:
        first, second = op.arguments.get("dim0", 0), op.arguments.get("dim1", 1)
        order[first], order[second] = order[second], order[first]
    for axis in op.axes:
        yield Way((axis,), {"self": order[axis]})


#: Operators that work element by element, although PyTorch does not mark them so, or that read only
#: the shape of a tensor.
_POINTWISE = names("""
    _to_copy clone copy fill zero masked_fill where lift_fresh_copy native_dropout_backward
    elu_backward leaky_relu_backward hardtanh_backward softplus_backward hardswish_backward
    hardsigmoid_backward mish_backward zeros_like ones_like full_like empty_like
""")

_RULES: Mapping[str, Callable[[Operands], Ways]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(names("zeros ones full empty new_zeros new_ones new_full new_empty"), _made),
    **dict.fromkeys(
        names("""
            sum mean amax amin max min argmax argmin any all prod logsumexp var std var_mean
            linalg_vector_norm
        """),
        _reduction,
    ),
    **dict.fromkeys(
        names("""
            _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data
            cumsum cumprod cummax cummin logcumsumexp sort topk gather scatter scatter_add glu cat
            stack select_backward slice_backward
        """),
        _along("dim"),
    ),
    **dict.fromkeys(names("flip roll"), _along("dims")),
    **dict.fromkeys(names("tril triu"), _triangle),
    **dict.fromkeys(names("mm bmm addmm baddbmm"), _product),
    **dict.fromkeys(names("mv dot"), _vector_product),
    "convolution_backward": _convolution_gradients,
    **dict.fromkeys(
        names("""
            native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
        """),
        _normalization,
    ),
    **dict.fromkeys(
        names("""
            native_batch_norm _native_batch_norm_legit_no_training native_batch_norm_backward
        """),
        _batch_normalization,
    ),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_gradient,
    "index_select": _index_selection,
    **dict.fromkeys(
        names("nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward"),
        _negative_log_likelihood,
    ),
    **dict.fromkeys(
        names("""
            convolution
            max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
            max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d
            max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward
            adaptive_max_pool2d_backward
            max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d_backward
            adaptive_max_pool3d_backward
            upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
            upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
            reflection_pad2d replication_pad2d reflection_pad2d_backward replication_pad2d_backward
        """),
        _by_sample,
    ),
    "constant_pad_nd": _padding,
    "repeat": _repetition,
    **dict.fromkeys(
        names("""
            _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
            _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
            _scaled_dot_product_flash_attention_for_cpu_backward
            _scaled_dot_product_flash_attention_backward
            _scaled_dot_product_efficient_attention_backward
            _scaled_dot_product_cudnn_attention_backward
        """),
        _attention,
    ),
}  # fmt: skip

_VIEWS: Mapping[str, Callable[[Operands], Ways]] = {
    **dict.fromkeys(
        names("view _unsafe_view reshape alias detach unsqueeze squeeze"), _reshape
    ),
    "expand": _pointwise,
    **dict.fromkeys(names("permute transpose t"), _permutation),
    **dict.fromkeys(names("select unbind slice split split_with_sizes"), _along("dim")),
}  # fmt: skip

#: Arguments that hold the shape of an operator's result.
_OF_RESULT = ("size", "shape", "input_sizes", "input_size")


def ways_of(op: Operands) -> tuple[Way, ...]:
    """Returns all ways in which an operator may run on a part; empty if it stays whole."""
    rule = _RULES.get(op.name) or (None if op.call.writes else _VIEWS.get(op.name))
    if rule is None and torch.Tag.pointwise in op.call.operator.tags and not op.has_lists:
        rule = _pointwise
    if rule is None or not any(shape is not None for shape in op.results):
        return ()
    return tuple(way for way in rule(op) if _has_parts(op, way))


def _has_parts(op: Operands, way: Way) -> bool:
    """Returns whether all axes that a way divides have more than one element."""
    made = zip(way.outputs, op.results, strict=True)
    read = ((mode, op.shapes[name]) for name, mode in way.inputs.items())
    return all(
        shape is None or not isinstance(mode, int) or (mode < len(shape) and shape[mode] > 1)
        for mode, shape in (*made, *read)
    )


def part_arguments(op: Operands, way: Way, parts: int) -> dict[str, Any]:
    """Returns the arguments of a part by name; tensors are still those of the whole."""
    arguments, axis = dict(op.arguments), way.axis
    told = next((name for name in _OF_RESULT if name in arguments), None)
    if told is not None and axis is not None:
        sizes = list(arguments[told])
        if sizes[axis] > 0:
            sizes[axis] //= parts
        arguments[told] = sizes
    return arguments
