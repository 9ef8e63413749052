"""The cards that a step can be compiled for.

Sources: NVIDIA's data sheets and architecture white papers (Turing, Volta, Ampere GA100 and GA102,
Ada, Hopper, Blackwell) for units, clocks, caches, bandwidth and arithmetic, dense, without
sparsity; the CUDA C++ programming guide, table "Technical specifications per compute capability",
for shared memory and threads; what the driver shows of a card for its memory, which is less than
its name says and rounded here. Arithmetic of 32-bit products is TF32's where a card has it, which
is what JAX and TensorFlow use by default; of 16-bit ones, float16's summed in 32 bits. T4 and V100
have no units for bfloat16, which the table does not tell apart.

JAX takes three quarters of a card by default, which is what ``usable_bytes`` says; an option gives
it more, and newer versions may grow to all of it.
"""

from __future__ import annotations

import difflib

from keras_remat.core.target import Chip, Target, gpu_rates
from keras_remat.units import GIB, KIB, MIB

USABLE_SHARE = 0.75

_SHARED = {  # KiB of shared memory of a multiprocessor, of a block; threads of a multiprocessor
    (7, 0): (96, 96, 2048),
    (7, 5): (64, 64, 1024),
    (8, 0): (164, 163, 2048),
    (8, 6): (100, 99, 1536),
    (8, 9): (100, 99, 1536),
    (9, 0): (228, 227, 2048),
    (10, 0): (228, 227, 2048),
    (12, 0): (100, 99, 1536),
}


def _card(
    card: str,
    name: str,
    capability: tuple[int, int],
    memory_gib: float,
    gb_per_s: float,
    cores: int,
    clock_ghz: float,
    l2_mib: float,
    tflops: float,
    half_tflops: float,
) -> Target:
    shared, per_block, threads = _SHARED[capability]
    name = name if name.startswith("Tesla") else f"NVIDIA {name}"
    total, bytes_per_s = int(memory_gib * GIB), int(gb_per_s * 1e9)
    return Target(
        platform="gpu",
        device=name,
        rates=gpu_rates(tflops * 1e12, half_tflops * 1e12, bytes_per_s),
        card=card,
        capability=capability,
        total_bytes=total,
        usable_bytes=int(USABLE_SHARE * total),
        chip=Chip(
            name=name,
            cores=cores,
            fpus_per_core=64 if capability in ((7, 0), (7, 5), (8, 0)) else 128,
            clock_ghz=clock_ghz,
            bytes_per_s=bytes_per_s,
            l2_bytes=int(l2_mib * MIB),
            shared_bytes_per_core=shared * KIB,
            shared_bytes_per_block=per_block * KIB,
            threads_per_core=threads,
        ),
    )


# fmt: off
CARDS = {
    target.card: target
    for target in (
        # capability, GiB, GB/s, cores, GHz, L2 MiB, TFLOPS, half
        _card("T4", "Tesla T4", (7, 5), 14.74, 320, 40, 1.59, 4, 8.1, 65),
        _card("V100", "Tesla V100-SXM2-16GB", (7, 0), 15.78, 900, 80, 1.53, 6, 15.7, 125),
        _card("L4", "L4", (8, 9), 22.05, 300, 58, 2.04, 48, 60, 121),
        _card("A10G", "A10G", (8, 6), 22.06, 600, 80, 1.71, 6, 35, 70),
        _card("RTX3060", "GeForce RTX 3060", (8, 6), 11.76, 360, 28, 1.78, 3, 12.7, 25.4),
        _card("RTX3090", "GeForce RTX 3090", (8, 6), 23.69, 936, 82, 1.70, 6, 35.6, 71),
        _card("RTX4090", "GeForce RTX 4090", (8, 9), 23.64, 1008, 128, 2.52, 72, 82.6, 165.2),
        _card("RTX5090", "GeForce RTX 5090", (12, 0), 31.36, 1792, 170, 2.41, 96, 104.8, 209.5),
        _card("A100-40", "A100-SXM4-40GB", (8, 0), 39.39, 1555, 108, 1.41, 40, 156, 312),
        _card("A100-80", "A100-SXM4-80GB", (8, 0), 79.15, 2039, 108, 1.41, 40, 156, 312),
        _card("L40S", "L40S", (8, 9), 44.39, 864, 142, 2.52, 96, 183, 362),
        _card("H100", "H100 80GB HBM3", (9, 0), 79.10, 3352, 132, 1.98, 50, 494.7, 989),
        _card("H200", "H200", (9, 0), 139.72, 4800, 132, 1.98, 50, 494.7, 989),
        _card("B200", "B200", (10, 0), 178.35, 7700, 148, 1.97, 126, 1125, 2250),
    )
}
# fmt: on
"""By name."""


def card(name: str) -> Target:
    """Returns a card of the table, whatever the case of its name.

    Raises:
        ValueError: the table does not know it; the message names those that are near, or all.
    """
    known = {key.lower(): target for key, target in CARDS.items() if key}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    advice = (
        f"did you mean {' or '.join(str(known[n].card) for n in near)}?"
        if near
        else f"known are {', '.join(str(t.card) for t in CARDS.values())}"
    )
    raise ValueError(f"No card is called {name!r}: {advice}")
