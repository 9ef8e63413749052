"""Lists how JAX's primitives run on a slice of the batch, read off their definitions.

A primitive may run in slices along one axis of its result, or along one axis that it sums over. The
table says, for each axis of a result, what a part reads of every input: the input's part along some
axis, or all of it. A primitive missing here stays whole, and so does one whose shapes do not allow
slices; both are always right. The rules do not depend on which axis is the batch's; that only says
where to begin (:mod:`~keras_remat.backends.jax.slice_analysis`).

Random bits are a function of their place (JAX's partitionable threefry), so a slice of dropout is a
slice of the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from keras_remat.backends.jax import private
from keras_remat.backends.jax.kinds import CONVOLUTION, KERNEL_GRADIENT, KINDS, POOLING_GRADIENT
from keras_remat.backends.slice_modes import SUM, Mode, Shape, same_place
from keras_remat.backends.tables import names
from keras_remat.backends.xla.fusion import Equation

#: Modes of the inputs; ``None`` if the primitive cannot run so.
Found = Sequence[Mode] | None

RANDOM = "random_bits"


@dataclass(frozen=True)
class Operands:
    """Holds the facts a rule looks at.

    Args:
        source: the equation of the jaxpr.
        shapes: shapes of its inputs.
        result: the shape of its first output.
    """

    source: Any
    shapes: tuple[Shape, ...]
    result: Shape

    @property
    def params(self) -> Mapping[str, Any]:
        """Returns the primitive's parameters."""
        params: Mapping[str, Any] = self.source.params
        return params


def _elementwise(op: Operands, axis: int) -> Found:
    """Slices operands of one shape, whose dimensions may be 1, or all be missing."""
    if any(len(shape) not in (0, len(op.result)) for shape in op.shapes):
        return None
    size = op.result[axis]
    if any(shape and shape[axis] not in (1, size) for shape in op.shapes):
        return None
    return [axis if shape and shape[axis] == size else None for shape in op.shapes]


def _all_but(parameter: str) -> Callable[[Operands, int], Found]:
    """Returns the rule of primitives that work along the axes in a parameter, and treat all other
    axes alike."""

    def rule(op: Operands, axis: int) -> Found:
        used = op.params[parameter]  # a tuple, or a number of Python's or NumPy's
        axes = used if isinstance(used, tuple) else (used,)
        rank = len(op.result)
        return None if axis in {one % rank for one in axes} else [axis] * len(op.shapes)

    return rule


def _reshape(op: Operands, axis: int) -> Found:
    if op.params.get("dimensions") is not None and "new_sizes" in op.params:
        return None
    place = same_place(op.result, axis, op.shapes[0])
    return None if place is None else [place]


def _broadcast(op: Operands, axis: int) -> Found:
    to = op.params["broadcast_dimensions"]
    at = to.index(axis) if axis in to else None
    return [at if at is not None and op.shapes[0][at] == op.result[axis] else None]


def _iota(op: Operands, axis: int) -> Found:
    return None if axis == op.params["dimension"] or op.shapes else []


def _pad(op: Operands, axis: int) -> Found:
    return [axis, None] if tuple(op.params["padding_config"][axis]) == (0, 0, 0) else None


def _slice(op: Operands, axis: int) -> Found:
    strides = op.params["strides"]
    is_whole = op.shapes[0][axis] == op.result[axis]
    return [axis] if is_whole and (strides is None or strides[axis] == 1) else None


def _dynamic_slice(op: Operands, axis: int) -> Found:
    is_whole = op.shapes[0][axis] == op.result[axis]
    return [axis, *[None] * (len(op.shapes) - 1)] if is_whole else None


def _dynamic_update(op: Operands, axis: int) -> Found:
    is_whole = op.shapes[1][axis] == op.result[axis]
    return [axis, axis, *[None] * (len(op.shapes) - 2)] if is_whole else None


def _transpose(op: Operands, axis: int) -> Found:
    return [op.params["permutation"][axis]]


def _reduce(op: Operands, axis: int) -> Found:
    kept = [at for at in range(len(op.shapes[0])) if at not in op.params["axes"]]
    return [kept[axis]] * len(op.shapes)


def _product(op: Operands, axis: int) -> Found:
    (left_summed, right_summed), (left_batch, right_batch) = op.params["dimension_numbers"]
    if axis < len(left_batch):
        return [left_batch[axis], right_batch[axis]]
    left, right = (
        [at for at in range(len(shape)) if at not in (*summed, *batch)]
        for shape, summed, batch in zip(
            op.shapes, (left_summed, right_summed), (left_batch, right_batch), strict=True
        )
    )
    at = axis - len(left_batch)
    return [left[at], None] if at < len(left) else [None, right[at - len(left)]]


def _convolution(op: Operands, axis: int) -> Found:
    numbers = op.params["dimension_numbers"]
    if axis != numbers.out_spec[0] or op.params["batch_group_count"] != 1:
        return None
    return [numbers.lhs_spec[0], None]


def _window(op: Operands, axis: int) -> Found:
    params = op.params
    wanted = {
        "window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1,
        "window_dilation": 1,
    }  # fmt: skip
    if any(name in params and _entry(params[name], axis) != one for name, one in wanted.items()):
        return None
    return [axis] * len(op.shapes)


def _entry(parameter: Any, axis: int) -> Any:
    entry = parameter[axis]
    return tuple(entry) if isinstance(entry, Sequence) else entry


def _gather(op: Operands, axis: int) -> Found:
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    batch = numbers.operand_batching_dims
    if axis in numbers.offset_dims:
        kept = [
            at
            for at in range(len(op.shapes[0]))
            if at not in numbers.collapsed_slice_dims and at not in batch
        ]
        at = kept[numbers.offset_dims.index(axis)]
        is_whole = sizes[at] == op.shapes[0][at] and at not in numbers.start_index_map
        return [at, None] if is_whole else None
    place = [at for at in range(len(op.result)) if at not in numbers.offset_dims].index(axis)
    if place in numbers.start_indices_batching_dims:
        return [batch[numbers.start_indices_batching_dims.index(place)], place]
    return [None, place]


def _update_places(op: Operands) -> list[int]:
    """Returns the axes of a scatter's updates that are the indices' axes, in their order."""
    windows = op.params["dimension_numbers"].update_window_dims
    return [at for at in range(len(op.shapes[2])) if at not in windows]


def _scatter(op: Operands, axis: int) -> Found:
    numbers = op.params["dimension_numbers"]
    batch = numbers.operand_batching_dims
    if axis in batch:
        place = numbers.scatter_indices_batching_dims[batch.index(axis)]
        return [axis, place, _update_places(op)[place]]
    kept = [
        at
        for at in range(len(op.result))
        if at not in numbers.inserted_window_dims and at not in batch
    ]
    if axis not in kept or axis in numbers.scatter_dims_to_operand_dims:
        return None
    at = numbers.update_window_dims[kept.index(axis)]
    return [axis, None, at] if op.shapes[2][at] == op.result[axis] else None


#: Draws of fewer values are counted in one 32-bit word.
_COUNTED = 2**32


def _random(op: Operands, axis: int) -> Found:
    drawn_alone = axis == 0 and op.shapes == ((),) and prod(op.result) < _COUNTED
    return [None] if drawn_alone and private.draws_by_place(op.source) else None


#: Primitive → rule for the modes that a part of a result reads, by the axis of the result.
PARTS: Mapping[str, Callable[[Operands, int], Found]] = {
    **dict.fromkeys(KINDS.elementwise | names("copy copy_p stop_gradient"), _elementwise),
    **dict.fromkeys(names("reshape squeeze expand_dims"), _reshape),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "pad": _pad,
    "rev": _all_but("dimensions"),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "concatenate": _all_but("dimension"),
    "transpose": _transpose,
    **dict.fromkeys(KINDS.reductions, _reduce),
    **dict.fromkeys(names("cumsum cumprod cummax cummin cumlogsumexp split"), _all_but("axis")),
    "sort": _all_but("dimension"),
    "top_k": _all_but("axis"),
    "dot_general": _product,
    CONVOLUTION: _convolution,
    **dict.fromkeys(
        names("reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add")
        | {POOLING_GRADIENT},
        _window,
    ),
    "gather": _gather,
    **dict.fromkeys(names("scatter scatter-add scatter_add"), _scatter),
    RANDOM: _random,
}


def _sum_of_reduced(op: Operands, axes: Sequence[int]) -> Found:
    """Sums over the sliced axis; if another axis is reduced, the input is a sum over the parts
    already."""
    return [axes[0] if axes[0] in op.params["axes"] else SUM]


def _sum_of_products(op: Operands, axes: Sequence[int]) -> Found:
    (left, right), _ = op.params["dimension_numbers"]
    return list(axes) if tuple(axes) in [*zip(left, right, strict=True)] else None


def _sum_of_kernels(op: Operands, axes: Sequence[int]) -> Found:
    numbers = op.params["dimension_numbers"]
    summed = numbers.lhs_spec[1], numbers.rhs_spec[1]
    return summed if tuple(axes) == summed and op.params["feature_group_count"] == 1 else None


def _sum_of_updates(op: Operands, axes: Sequence[int]) -> Found:
    """Lets every part add to the first input, which is zero."""
    numbers, places = op.params["dimension_numbers"], _update_places(op)
    at = axes[1]
    if not 0 <= at < len(places) or at in numbers.scatter_indices_batching_dims:
        return None
    if places[at] != axes[2]:
        return None
    return [SUM, at, axes[2]]


def _sum_of_sums(op: Operands, axes: Sequence[int]) -> Found:
    return [SUM] * len(op.shapes)


#: Primitive → rule for the modes that a part reads if its result is a term of a sum, by the axes of
#: the inputs; -1 for none.
SUMS: Mapping[str, Callable[[Operands, Sequence[int]], Found]] = {
    "reduce_sum": _sum_of_reduced,
    "dot_general": _sum_of_products,
    KERNEL_GRADIENT: _sum_of_kernels,
    **dict.fromkeys(names("scatter-add scatter_add"), _sum_of_updates),
    **dict.fromkeys(
        names("add add_any sub neg reshape squeeze transpose copy stop_gradient"), _sum_of_sums
    ),
}


def part_params(
    equation: Equation, modes: Sequence[Mode], part: Sequence[Any], made: Shape
) -> dict[str, Any]:
    """Returns the parameters of a part; they hold its shapes.

    Args:
        equation: the whole equation.
        modes: mode of each input.
        part: avals of the inputs that the part reads.
        made: shape of its result.
    """
    kind, params = equation.kind, dict(equation.source.params)
    if kind == "reshape":
        params["new_sizes"] = made
    elif kind in ("broadcast_in_dim", "iota"):
        params["shape"] = made
    elif kind == "slice":
        (axis,) = (mode for mode in modes if isinstance(mode, int))
        limits = list(params["limit_indices"])
        limits[axis] = part[0].shape[axis]
        params["limit_indices"] = tuple(limits)
    elif kind == "dynamic_slice":
        params["slice_sizes"] = made
    elif kind == "gather" and isinstance(modes[0], int):
        axis, sizes = modes[0], list(params["slice_sizes"])
        sizes[axis] = min(sizes[axis], part[0].shape[axis])
        params["slice_sizes"] = tuple(sizes)
    return params
