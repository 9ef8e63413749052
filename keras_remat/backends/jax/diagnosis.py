"""Reports what JAX can measure on this machine, for ``keras-remat doctor``."""

from __future__ import annotations

import os
from typing import Any

from keras_remat.backends.host import host_memory_bytes
from keras_remat.backends.jax.measure import first_device, live_target

_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


def diagnosis() -> dict[str, Any]:
    """Returns the facts by name: about the device, its memory, its kernels and XLA."""
    device = first_device()
    stats = device.memory_stats() or {}
    on_cpu = not live_target().on_gpu
    limit = int(stats.get("bytes_limit", 0)) or (host_memory_bytes(0) if on_cpu else 0)
    source = "what machine, container and address space have left"
    if not on_cpu:
        source = "bytes_limit of JAX's allocator, by default 75 % of the card"
    advice = []
    if not stats and not on_cpu:
        advice.append(
            f"JAX's allocator keeps no statistics ({_ALLOCATOR}="
            f"{os.environ.get(_ALLOCATOR, '')}): unset {_ALLOCATOR}, and peaks are measured."
        )
    return {
        "device": f"{device.platform.upper()}:{device.id}",
        "allocator": os.environ.get(_ALLOCATOR, "default"),
        "statistics": bool(stats),
        "peaks": "peaks are measured" if stats else "peaks are those of the compiler's analysis",
        "limit_bytes": limit,
        "limit_source": source,
        "in_use_bytes": int(stats.get("bytes_in_use", 0)),
        "kernels_timed": False,
        "kernels": "whole compiled steps are timed, not their kernels",
        "xla": True,
        "xla_detail": "compiles for this device",
        "advice": advice,
    }
