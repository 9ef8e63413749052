"""A condition that is false and that a compiler can know only when given tensors exist;
:mod:`keras_remat.backends.xla.protect` says what for.

    condition = (bits | 1) == 0, where bits are those of one element of each tensor, joined by
    bitwise or

Never true, whatever the bits, so ``select(condition, 0, x)`` is ``x`` bit for bit and a NaN spreads
nowhere; and XLA's simplifier, which keeps no track of known bits, cannot fold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}
"""By the bytes of an element."""


def joined_bits(tensors: Sequence[Any]) -> Any:
    """The first elements of non-empty tensors of known rank as one ``uint32`` scalar, joined by
    bitwise or with 1; wider elements keep their low half."""
    bits = tf.constant(1, tf.uint32)
    for x in tensors:
        element = (
            tf.reshape(tf.slice(x, [0] * x.shape.rank, [1] * x.shape.rank), [])
            if x.shape.rank
            else x
        )
        if element.dtype.is_complex:
            element = tf.math.real(element)
        if element.dtype.is_floating:
            element = tf.bitcast(element, UNSIGNED[element.dtype.size])
        bits |= tf.cast(element, tf.uint32)
    return bits


def never(tensors: Sequence[Any]) -> Any:
    """A boolean scalar that is false and can be known only when all ``tensors`` exist."""
    return tf.equal(joined_bits(tensors), tf.constant(0, tf.uint32))
