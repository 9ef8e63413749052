"""Guards recomputations by a data dependency that XLA can neither fold nor move.

XLA merges equal operations, ignores the order they were written in, and on CPU drops
``optimization_barrier`` before scheduling. It cannot merge operations with different inputs, and
cannot start one before its inputs exist. So one input ``x`` of a recomputation is replaced by an
equal value that depends on a *trigger*: values that exist only when the recomputation should start.

    bits = one element of each trigger value, as an unsigned integer, joined by bitwise or
    x'   = select((bits | 1) == 0, fill, x)

The condition is never true, whatever the bits, so ``x'`` has the bits of ``x``: a NaN or an
infinity in the trigger changes nothing (an arithmetic guard such as ``x + where(t == t, 0, nan)``
would spread it), and integers, booleans and keys pass. XLA's simplifier keeps no track of known
bits, so the select survives until buffers are assigned; the code generator below may then drop it
from the inner loop. An elementwise reader takes the select into its kernel; a product or
convolution has its smallest operand copied.

The guarded value may be a constant, such as the 0 of a ReLU, and a select between two equal
constants is folded at once. So the fill is a number that programs do not write
(:data:`~keras_remat.backends.xla.protect.FLOAT_FILL`). A boolean has no third value:
``x' = x xor condition``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_remat.backends.xla.protect import FLOAT_FILL, INTEGER_FILL


def is_key(x: Any) -> bool:
    """Returns whether ``x`` is an array of typed random keys."""
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def first_bits(x: Any) -> jax.Array:
    """Returns the first element of a non-empty array as ``uint32`` (wider elements keep their low
    half)."""
    if is_key(x):
        x = jax.random.key_data(x)
    element = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
    if jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = lax.real(element)
    if jnp.issubdtype(element.dtype, jnp.floating):
        bits = min(8 * element.dtype.itemsize, 32)  # a step of 32 bits may have no wider integers
        element = lax.bitcast_convert_type(element, f"uint{bits}")
    if element.ndim:
        element = lax.index_in_dim(element, 0, keepdims=False)
    return lax.convert_element_type(element, jnp.uint32)


def joined_bits(*triggers: Any) -> jax.Array:
    """Returns the first elements of non-empty arrays as one ``uint32``, joined by bitwise or with
    1."""
    return reduce(lax.bitwise_or, map(first_bits, triggers), jnp.uint32(1))


def never(triggers: Sequence[Any], in_branch: bool = False) -> jax.Array:
    """Returns a boolean scalar that is false and can be known only when all ``triggers`` (non-empty
    arrays) exist.

    Args:
        triggers: arrays.
        in_branch: whether the branch of a condition reads them, which takes them from memory; a
            slice could be fused with the ops that compute them.
    """
    if in_branch:
        condition = never([min(triggers, key=lambda x: x.size)])
        bits = lax.cond(condition, lambda *_: jnp.uint32(1), joined_bits, *triggers)
    else:
        bits = joined_bits(*triggers)
    return lax.eq(bits, jnp.uint32(0))


def guard(x: Any, condition: jax.Array) -> Any:
    """Returns ``x``, bit for bit, depending on ``condition`` from :func:`never`."""
    if is_key(x):
        return jax.random.wrap_key_data(
            guard(jax.random.key_data(x), condition), impl=jax.random.key_impl(x)
        )
    if x.dtype == bool:
        return lax.bitwise_xor(x, lax.broadcast(condition, x.shape))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        fill: float = FLOAT_FILL
    else:
        fill = min(INTEGER_FILL, int(jnp.iinfo(x.dtype).max))
    return lax.select_n(condition, x, lax.full_like(x, fill))
