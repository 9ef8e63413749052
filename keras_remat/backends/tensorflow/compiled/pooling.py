"""Computes the gradient of max pooling with its own start value.

XLA:GPU scatters the gradient into an array of zeros. It would share that array with every ReLU of
the same shape, and keep it alive from the first of them on. So the array starts from a zero that
exists only when the gradient does: it is alive only as long as needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_remat.backends.tensorflow import private


def with_start(node: Any, image: Any, gradient: Any, start: Any) -> Any | None:
    """Returns the result of a ``MaxPoolGrad`` or ``MaxPool3DGrad``, bit for bit where ``start`` is
    zero; ``None`` for a layout or padding that Keras does not write.

    Args:
        node: the ``NodeDef``.
        image: the pooled op's input, of known shape.
        gradient: gradient of the pooled op's output.
        start: zero, as a scalar of their dtype.
    """
    windows, strides = ([*node.attr[name].list.i] for name in ("ksize", "strides"))
    padding, layout = node.attr["padding"].s, node.attr["data_format"].s
    if padding not in (b"VALID", b"SAME") or layout not in (b"NHWC", b"NDHWC"):
        return None
    around = (
        [[0, 0]] * len(windows)
        if padding == b"VALID"
        else [
            _padding(size, window, stride)
            for size, window, stride in zip(image.shape, windows, strides, strict=True)
        ]
    )
    return private.select_and_scatter(image, windows, strides, around, gradient, start)


def _padding(size: int, window: int, stride: int) -> Sequence[int]:
    """Returns the elements of padding before and after a dimension under ``SAME``."""
    total = max(0, (-(-size // stride) - 1) * stride + window - size)
    return [total // 2, total - total // 2]
