"""Estimates the time of the one kernel that XLA makes of a cluster.

A kernel takes the longer of its arithmetic and its memory traffic, plus a launch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from keras_remat.backends.xla.fused_graph import FusedStep
from keras_remat.backends.xla.fusion import Kinds
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Rates

INDEX_BYTES = 4
"""XLA:GPU looks for the largest elements of pooling's windows with one index per dimension."""

FUSED_SHARE = 0.1
"""Cost of an elementwise op that runs again, as a share of its cost as a kernel of its own. XLA
fuses it into its readers: it writes nothing, and its readers read much of its inputs anyway. XLA
does so whether the value was kept or not. So it does not obey a schedule that keeps such values
instead of the products and convolutions they come from; this share makes that schedule the dearer
one. An op with random numbers or a reduction inside, a softmax for instance, is a kernel of its own
whatever reads it."""


def kernel_time_s(flops: float, traffic_bytes: int, rates: Rates) -> float:
    """Returns estimated seconds of one kernel.

    Args:
        flops: its arithmetic, in FLOPs of a 32-bit matrix product.
        traffic_bytes: bytes it reads and writes.
        rates: rates of the device it runs on.
    """
    return rates.seconds_per_kernel + max(
        flops * rates.seconds_per_flop, traffic_bytes * rates.seconds_per_byte
    )


def op_time_s(traced: FusedStep, op: Op, kinds: Kinds, flops: float, rates: Rates) -> float:
    """Returns estimated seconds of one op, which XLA makes one kernel. The kernel pays for what it
    reads and writes, and nothing for the values inside the cluster."""
    program = traced.program
    traffic = sum(program.sizes[traced.numbers[v]] for v in (*op.inputs, *op.outputs))
    inside = {program.equations[at].kind for at in traced.handles[op.id]}
    fused = op.kind in kinds.elementwise and not inside & (kinds.random | kinds.reductions)
    return kernel_time_s(flops, traffic, rates) * (FUSED_SHARE if fused else 1.0)


def scaled(profile: Profile, schedule: Schedule, step_time_s: float) -> Profile:
    """Returns a profile whose times over a schedule sum to a step's measured time; their split over
    the ops stays an estimate."""
    factor = step_time_s / math.fsum(profile.op_time_s[i] for i in schedule.order)
    return replace(profile, op_time_s=tuple(t * factor for t in profile.op_time_s))
