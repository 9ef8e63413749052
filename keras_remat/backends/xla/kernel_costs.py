"""What one kernel that XLA makes of a cluster takes: the slower of its arithmetic and its traffic,
and a launch."""

from __future__ import annotations

import math
from dataclasses import replace

from keras_remat.backends.xla.fused_graph import FusedStep
from keras_remat.backends.xla.fusion import Kinds
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule

SECONDS_PER_FLOP = {"cpu": 2e-11, "gpu": 2e-14}
SECONDS_PER_BYTE = {"cpu": 1e-10, "gpu": 5e-13}
SECONDS_PER_KERNEL = {"cpu": 2e-6, "gpu": 3e-6}
EXPENSIVE_FLOPS = {"cpu": 75, "gpu": 8}
RANDOM_FLOPS = {"cpu": 1350, "gpu": 100}
GROUPED_FACTOR = {"cpu": 250, "gpu": 10}
"""CPU: XLA:CPU of JAX 0.10.2 on two x86-64 cores, measured: a product of 4096 × 512 × 512,
additions, exponentials and random bits of 2 million elements, in flops of that product per element,
and a depthwise convolution against a dense one per flop. GPU: guesses of the order of magnitude,
not measured. Only the ratios decide about a plan."""

FUSED_SHARE = 0.1
"""What an elementwise op costs when it runs again, of what it would cost as a kernel of its own: it
is fused into its readers, writes nothing, and much of what it reads they read too. XLA fuses it
there whether it was kept or not, so a schedule that keeps such values instead of the products and
convolutions they come from is not obeyed; this share makes it the dearer one."""


def kernel_time_s(flops: float, traffic_bytes: int, platform: str) -> float:
    """Estimated seconds of one kernel.

    Args:
        flops: its arithmetic, in operations of a matrix product.
        traffic_bytes: what it reads and writes.
        platform: ``"cpu"`` or ``"gpu"``.
    """
    return SECONDS_PER_KERNEL[platform] + max(
        flops * SECONDS_PER_FLOP[platform], traffic_bytes * SECONDS_PER_BYTE[platform]
    )


def op_time_s(traced: FusedStep, op: Op, kinds: Kinds, flops: float, platform: str) -> float:
    """Estimated seconds of one op: of the one kernel that XLA makes of a cluster, which pays for
    what it reads and writes, and nothing for the values inside it."""
    program = traced.program
    traffic = sum(program.sizes[traced.numbers[v]] for v in (*op.inputs, *op.outputs))
    random = any(program.equations[at].kind in kinds.random for at in traced.handles[op.id])
    fused = op.kind in kinds.elementwise and not random
    return kernel_time_s(flops, traffic, platform) * (FUSED_SHARE if fused else 1.0)


def scaled(profile: Profile, schedule: Schedule, step_time_s: float) -> Profile:
    """Returns a profile whose times over a schedule sum to a step's measured time; their split over
    the ops stays an estimate."""
    factor = step_time_s / math.fsum(profile.op_time_s[i] for i in schedule.order)
    return replace(profile, op_time_s=tuple(t * factor for t in profile.op_time_s))
