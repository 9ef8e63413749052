"""Lists the cards that a step can be compiled for.

Sources: NVIDIA's data sheets and architecture white papers (Turing, Volta, Ampere GA100 and GA102,
Ada, Hopper, Blackwell) for units, clocks, caches, bandwidth and arithmetic, dense, without
sparsity; the CUDA C++ programming guide, table "Technical specifications per compute capability",
for shared memory and threads; the driver for a card's memory, which is less than its name says and
is rounded here. Arithmetic of 32-bit products is TF32's where a card has it, which is what JAX and
TensorFlow use by default; of 16-bit ones, float16's summed in 32 bits. T4 and V100 have no units
for bfloat16, which the table does not tell apart.

``usable_bytes`` is three quarters of a card, which JAX takes by default; an option gives it more,
and newer versions may grow to all of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log
from typing import Any

from keras_remat.checks import check_name
from keras_remat.core.target import Chip, Target, gpu_rates
from keras_remat.units import GIB, KIB, LEAST_LIMIT, MIB, parse_bytes

USABLE_SHARE = 0.75
LEAST_RATE, LARGEST_RATE = 1e-3, 1e6
"""Rates that a card may be said to have, in GB/s and TFLOPS."""
#: Example of a text that describes a card that the table does not know.
EXAMPLE = "RTX4070:memory=11.7GiB,capability=8.9,bandwidth=504,tflops=29"

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
    """Returns a card of the table by its name, in any case, or a card of the user's own.

    ``"RTX3060:memory=8GiB"`` is a card of the table with a changed property, and the whole text is
    its name. ``"RTX4070:memory=11.7GiB,capability=8.9,bandwidth=504,tflops=29"`` is a card that the
    table does not know, and the text before the colon is its name. ``bandwidth`` is in GB/s;
    ``tflops`` are those of 32-bit matrix products (TF32's, where the card has it), ``half_tflops``
    of 16-bit ones; ``cores`` are multiprocessors. Properties that the text does not give are those
    of the card of the table that is nearest by capability and arithmetic; the cores are in
    proportion to the arithmetic.

    Raises:
        ValueError: the table does not know the name, and the text does not describe the card; or a
            property makes no sense.
    """
    known = {key.lower(): target for key, target in CARDS.items() if key}
    plain, colon, told = (part.strip() for part in name.partition(":"))
    if not colon:
        if plain.lower() in known:
            return known[plain.lower()]
        raise ValueError(_unknown(plain, known))
    if not plain:
        raise ValueError(f"The card {name!r} has no name before the colon")
    own = _told(name, told)
    base = known.get(plain.lower())
    if base is not None:
        return _changed(base, own, f"{base.card}:{told}")
    missing = [key for key in _NEEDED if key not in own]
    if missing:
        raise ValueError(
            f"No card of the table is called {plain!r}; one of your own also needs "
            f"{', '.join(missing)}, as in {EXAMPLE!r}"
        )
    near = _nearest(own["capability"], own["tflops"])
    return _changed(replace(near, device=plain), own, plain)


def _unknown(name: str, known: Mapping[str, Target]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    advice = (
        f"did you mean {' or '.join(str(known[n].card) for n in near)}?"
        if near
        else f"known are {', '.join(str(t.card) for t in CARDS.values())}."
    )
    return f"No card is called {name!r}: {advice} One of your own is told as {EXAMPLE!r}"


def _told(name: str, told: str) -> dict[str, Any]:
    """Reads the text behind the colon of a card's name; returns key → value.

    Raises:
        ValueError: an unknown key, one that comes twice, or a value that makes no sense.
    """
    own: dict[str, Any] = {}
    for part in told.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        check_name("property of a card", key, _READ)
        if not equals or key in own:
            raise ValueError(f"{key} must come once, with a value, in the card {name!r}")
        own[key] = _READ[key](value, key)
    return own


def _rate(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not LEAST_RATE <= number <= LARGEST_RATE:
        raise ValueError(
            f"{what} must be a number from {LEAST_RATE:g} to {LARGEST_RATE:g}, got {text!r}"
        )
    return number


def _count(text: str, what: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{what} must be an int of at least 1, got {text!r}")
    return int(text)


def _capability(text: str, what: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,2})[.]([0-9])", text)
    capability = (int(match[1]), int(match[2])) if match else (0, 0)
    if capability < min(_SHARED):
        least = ".".join(map(str, min(_SHARED)))
        raise ValueError(f"{what} must be one such as 8.6, and at least {least}; got {text!r}")
    return capability


#: Property that a card's text may give → function that reads it.
_READ: dict[str, Callable[[str, str], Any]] = {
    "memory": lambda text, what: parse_bytes(text, what=what, least=LEAST_LIMIT),
    "capability": _capability,
    "bandwidth": _rate,
    "tflops": _rate,
    "half_tflops": _rate,
    "cores": _count,
}
_NEEDED = ("memory", "capability", "bandwidth", "tflops")


def _nearest(capability: tuple[int, int], tflops: float) -> Target:
    """Returns the card of the table that gives a new card its missing properties.

    It is the card of the nearest arithmetic among those of the nearest capability that is no
    higher.
    """
    family = max(one for one in _SHARED if one <= capability)
    return min(
        (target for target in CARDS.values() if target.capability == family),
        key=lambda target: abs(log(tflops * 1e12 * target.rates.seconds_per_flop)),
    )


def _changed(base: Target, own: Mapping[str, Any], name: str) -> Target:
    """Returns a card with some properties changed."""
    assert base.chip is not None
    rates, total = base.rates, own.get("memory", base.total_bytes)
    flops_per_s = own["tflops"] * 1e12 if "tflops" in own else 1 / rates.seconds_per_flop
    faster = flops_per_s * rates.seconds_per_flop
    half_tflops = own.get("half_tflops", flops_per_s / rates.half_flop / 1e12)
    bytes_per_s = int(own["bandwidth"] * 1e9) if "bandwidth" in own else base.chip.bytes_per_s
    cores = own.get("cores", max(1, round(faster * base.chip.cores)))
    return replace(
        base,
        rates=gpu_rates(flops_per_s, half_tflops * 1e12, bytes_per_s),
        card=name,
        capability=own.get("capability", base.capability),
        total_bytes=total,
        usable_bytes=int(USABLE_SHARE * total),
        chip=replace(base.chip, cores=cores, bytes_per_s=bytes_per_s),
    )
