"""Predicts from shapes what convolutions take on a CPU beside their results.

oneDNN reads images whose channels lie last, as Keras has them, where they are. It copies the
weights, and their gradient, into its own layout: one copy forward and two backward, however many
images there are. Where channels lie first (``data_format="channels_first"``, transposed and 1-D
convolutions), it copies images and results, too, with channels in blocks of a vector register. A
tensor that lies in neither way is copied whole first. PyTorch's own kernels, which take a single
small image and float64, gather patches of images into a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from keras_remat.backends.torch import private
from keras_remat.backends.torch.program import Node
from keras_remat.backends.torch.recorder import Call, Layout

aten = torch.ops.aten


@dataclass(frozen=True)
class _Convolution:
    """Holds what a convolution reads and writes.

    Args:
        results: results of a forward one; their gradient of a backward one.
        options: strides, paddings, dilations, whether it is transposed, output paddings, groups.
        asked: whether a backward one makes the gradient of the images, and that of the weights;
            both false for a forward one.
    """

    images: Layout
    weights: Layout
    results: Layout
    options: Sequence[Any]
    asked: Sequence[bool]


def scratch_bytes(node: Node, layouts: Sequence[Layout]) -> int:
    """Returns the most bytes that a convolution takes beside its results; 0 for other nodes."""
    convolution = _convolution(node, layouts)
    return 0 if convolution is None else _scratch_bytes(convolution)


def scratch_between(
    node: Node, layouts: Sequence[Layout], other: Node, others: Sequence[Layout], share: Fraction
) -> int:
    """Returns :func:`scratch_bytes` at a third batch size, from traces at two.

    Args:
        node, layouts: from a trace at one batch size.
        other, others: from a trace at a second batch size.
        share: where the batch size is, from 0 for the first to 1 for the second.
    """
    a, b = _convolution(node, layouts), _convolution(other, others)
    if a is None or b is None:
        return 0
    pairs = (a.images, b.images), (a.weights, b.weights), (a.results, b.results)
    images, weights, results = (_between(one, another, share) for one, another in pairs)
    return _scratch_bytes(replace(a, images=images, weights=weights, results=results))


def _between(one: Layout, other: Layout, share: Fraction) -> Layout:
    shape, stride = (
        tuple(math.floor(a + (b - a) * share) for a, b in zip(*both, strict=True))
        for both in ((one.shape, other.shape), (one.stride, other.stride))
    )
    return replace(one, shape=shape, stride=stride)


def _convolution(node: Node, layouts: Sequence[Layout]) -> _Convolution | None:
    """Returns what a convolution reads and writes; ``None`` for other nodes."""
    if node.call is None:
        return None
    operator, args = node.call.operator, node.call.args
    is_backward = operator is aten.convolution_backward.default
    if not is_backward and operator is not aten.convolution.default:
        return None
    images, weights = (layouts[one.number] for one in args[is_backward : is_backward + 2])
    results = layouts[args[0].number] if is_backward else _made(node.call, layouts)
    # a part of the batch is made for the layout of the whole result
    results = replace(results, shape=(images.shape[0], *results.shape[1:]))
    options = args[3 + is_backward : 9 + is_backward]
    return _Convolution(
        images, weights, results, options, args[10][:2] if is_backward else (False, False)
    )


def _scratch_bytes(convolution: _Convolution) -> int:
    images, weights, results = convolution.images, convolution.weights, convolution.results
    asked, options = convolution.asked, convolution.options
    kernel = private.convolution_kernel(images, weights, options)
    is_last = (
        len(images.shape) > 3
        and 1 in (images.stride[1], weights.stride[1])
        and not kernel.endswith("3d")  # PyTorch's own
    )
    read = (images, weights, results) if any(asked) else (images, weights)
    whole = sum(_bytes(one) for one in read if not _is_packed(one, is_last))
    if kernel.startswith("Slow"):
        return whole + _gathered_bytes(kernel, convolution)
    if is_last:
        return whole + (2 if asked[1] else 1) * _bytes(weights)
    return whole + _blocked_bytes(convolution)


def _made(call: Call, layouts: Sequence[Layout]) -> Layout:
    (number,) = call.outputs
    assert number is not None
    return layouts[number]


def _bytes(one: Layout) -> int:
    return int(math.prod(one.shape) * one.dtype.itemsize)


def _is_packed(one: Layout, is_last: bool) -> bool:
    """Returns whether a tensor's elements lie without gaps, its channels last or first."""
    order = [0, *range(2, len(one.shape)), 1] if is_last else range(len(one.shape))
    needed = 1
    for axis in reversed(order):
        if one.shape[axis] != 1 and one.stride[axis] != needed:
            return False
        needed *= one.shape[axis]
    return True


def _gathered_bytes(kernel: str, one: _Convolution) -> int:
    """Returns the bytes of the matrix of patches."""
    strides, _, _, is_transposed, _, _ = one.options
    is_of_images_only = one.asked[0] and not one.asked[1]
    if {*one.weights.shape[2:], *strides} == {1} or (kernel == "Slow2d" and is_of_images_only):
        return 0
    by_sample = "Dilated" in kernel or (is_transposed and any(one.asked))
    samples = 1 if by_sample else one.images.shape[0]
    places = math.prod((one.images if is_transposed else one.results).shape[2:])
    return int(samples * places * _bytes(one.weights) // one.weights.shape[0])


def _blocked_bytes(convolution: _Convolution) -> int:
    """Returns the most bytes that oneDNN's copies take where channels lie first."""
    images, weights, results = convolution.images, convolution.weights, convolution.results
    asked = convolution.asked
    strides, _, _, is_transposed, _, groups = convolution.options
    block = (16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8) * (groups == 1) or 1

    def in_blocks(one: Layout, axes: tuple[int, ...]) -> int:
        shape = [math.ceil(n / block) * block if a in axes else n for a, n in enumerate(one.shape)]
        return int(math.prod(shape) * one.dtype.itemsize)

    x, y, w = in_blocks(images, (1,)), in_blocks(results, (1,)), in_blocks(weights, (0, 1))
    has_few = images.shape[1] < block  # channels: oneDNN reads the images as they are
    read = 0 if has_few else x
    if not any(asked):
        copied = y + (1 + bool(is_transposed)) * _bytes(results)
        w = in_blocks(weights, (0,)) if has_few else w
        return max(read + w + y, copied) - _bytes(results)
    steps, made = [0], [_bytes(images) * asked[0], _bytes(weights) * asked[1]]
    if asked[0]:
        is_copied_twice = not is_transposed and set(strides) != {1}
        steps += [y + w + x, x + (1 + is_copied_twice) * made[0]]
    if asked[1]:
        w = in_blocks(weights, (0,)) if has_few else w
        steps += [made[0] + y + read + w, made[0] + 2 * w]
    return max(steps) - sum(made)
