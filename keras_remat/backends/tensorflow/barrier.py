"""Makes a false condition that a compiler can know only when given tensors exist.

:mod:`keras_remat.backends.xla.protect` says what it is for.

    condition = (bits | 1) == 0, where bits are those of one element of each tensor, joined by
    bitwise or

The condition is false for any bits, so ``select(condition, fill, x)`` is ``x`` bit for bit, and a
NaN spreads nowhere. XLA's simplifier cannot fold it, since it does not track known bits. The fill
is a number that programs do not write, since XLA folds a select between two equal constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_remat.backends.xla.protect import FLOAT_FILL, INTEGER_FILL

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}
"""Bytes of an element → unsigned dtype of that size."""


def _joined_bits(tensors: Sequence[Any]) -> Any:
    """Returns the first elements of non-empty tensors of known rank as one ``uint32`` scalar,
    joined by bitwise or with 1; wider elements keep their low half."""
    bits = tf.constant(1, tf.uint32)
    for x in tensors:
        if x.shape.rank:
            x = tf.reshape(tf.slice(x, [0] * x.shape.rank, [1] * x.shape.rank), [])
        if x.dtype.is_complex:
            x = tf.math.real(x)
        if x.dtype.is_floating:
            x = tf.bitcast(x, _UNSIGNED[x.dtype.size])
        bits |= tf.cast(x, tf.uint32)
    return bits


def _summed(bits: Any) -> Any:
    """Returns an odd number made of ``bits`` by a running sum.

    If both branches of a condition hold only cheap ops, XLA computes both and selects, and fuses
    the values they read with their sources. A running sum, even of two numbers, is not cheap.
    """
    sums = tf.cumsum(tf.bitcast(tf.stack([bits, tf.constant(1, tf.uint32)]), tf.int32))
    return tf.bitcast(sums[1], tf.uint32) | tf.constant(1, tf.uint32)


def never(tensors: Sequence[Any], in_branch: bool = False) -> Any:
    """Returns a boolean scalar that is false and can be known only when all ``tensors`` exist.

    Args:
        tensors: at least one, of known rank. One without elements has no bits and is left out.
        in_branch: whether they are read in the branch of a condition, which reads them from memory.
            A slice outside of a branch could be fused with the op that computes the tensor.
    """
    tensors = [x for x in tensors if x.shape.num_elements() != 0]
    if in_branch and tensors:
        condition = never([min(tensors, key=lambda x: x.shape.num_elements() * x.dtype.size)])
        bits = tf.cond(
            condition,
            lambda: tf.constant(1, tf.uint32),
            lambda: _summed(_joined_bits(tensors)),
        )
    else:
        bits = _joined_bits(tensors)
    return tf.equal(bits, tf.constant(0, tf.uint32))


def guard(x: Any, condition: Any) -> Any:
    """Returns ``x``, bit for bit, depending on ``condition`` from :func:`never`."""
    if x.dtype.is_bool:  # exclusive or, since a boolean has no third value for the fill
        return tf.not_equal(x, condition)
    inexact = x.dtype.is_floating or x.dtype.is_complex
    fill = FLOAT_FILL if inexact else min(INTEGER_FILL, x.dtype.max)
    return tf.raw_ops.SelectV2(condition=condition, t=tf.constant(fill, x.dtype), e=x)
