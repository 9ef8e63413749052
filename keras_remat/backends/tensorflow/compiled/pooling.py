"""The gradient of max pooling, with a start value of its own.

XLA:GPU scatters it into an array of zeros, which it would share with every ReLU of its shape and
keep from the first of them on. Added up from a zero that exists only when the gradient does, the
array exists as long as it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_remat.backends.tensorflow import private


def with_start(node: Any, image: Any, gradient: Any, start: Any) -> Any | None:
    """Returns what a ``MaxPoolGrad`` or ``MaxPool3DGrad`` computes, to the bit, where ``start`` is
    zero; ``None`` for a layout or padding that Keras does not write.

    Args:
        node: the ``NodeDef``.
        image: what was pooled, of known shape.
        gradient: of the pooled image.
        start: a scalar of their dtype.
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
    """Returns how many elements stand before and after a dimension that keeps its size but for the
    stride."""
    total = max(0, (-(-size // stride) - 1) * stride + window - size)
    return [total // 2, total - total // 2]
