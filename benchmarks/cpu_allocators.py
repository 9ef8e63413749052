"""Which way to allocator statistics costs less on a CPU where TensorFlow leaves oneDNN off.

There are two: BFC (``TF_CPU_ALLOCATOR_USE_BFC=1``, what ``enable_cpu_memory_stats`` asks for) and
oneDNN itself (``TF_ENABLE_ONEDNN_OPTS=1``). Each way trains the same U-Net in a process of its own,
the processes in turn, so that the machine's moods hit all of them: plain steps, and steps of a
greedy plan for 60 % of the plain peak. ``--isa AVX2`` keeps oneDNN from instructions that such a
CPU lacks.

    python benchmarks/cpu_allocators.py --isa AVX2

The time is the CPU's, of all cores together, in the least step of all rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from rows import MIB, command_line, head, line_of, row_of

from keras_remat.backends.base import Backend, load_backend

WAYS = {
    "no statistics": {"TF_ENABLE_ONEDNN_OPTS": "0"},
    "BFC": {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"},
    "oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "1"},
}
COLUMNS = ("way", "plain step", "its peak", "remat. step", "predicted", "measured", "error")
_SHARE, _PIXELS, _BATCH, _STEPS = 0.6, 128, 8, 8


def child(way: str) -> dict[str, Any]:
    """Trains one way and returns seconds, bytes and the losses."""
    import models

    import keras_remat

    model = models.build_unet(_PIXELS)
    generator = np.random.default_rng(0)
    images = generator.random((_BATCH, _PIXELS, _PIXELS, 3), dtype=np.float32)
    batch = (images, generator.integers(0, 2, (*images.shape[:3], 1)).astype(np.float32))
    backend = load_backend()
    batch = backend.example_batch(model, batch)
    function = model.make_train_function() or model.train_function
    plain_s, plain = _least(backend, lambda: function(iter([batch])))
    result: dict[str, Any] = {"plain_s": plain_s}
    if not backend.device.has_statistics:
        return result
    plan = keras_remat.make_plan(model, batch, int(_SHARE * plain), solver="greedy")
    traced = backend.trace(model, batch)
    run = backend.lower(traced, plan.problem, plan.solution.schedule)
    remat_s, peak = _least(backend, lambda: run(batch))
    return result | {
        "plain_bytes": plain,
        "remat_s": remat_s,
        "remat_bytes": peak,
        "predicted_bytes": plan.predicted.peak_bytes,
    }


def _least(backend: Backend, step: Callable[[], Any]) -> tuple[float, int]:
    """The least CPU seconds of a step, and the most bytes, those of the first two steps aside."""
    seconds, peaks = [], []
    for _ in range(_STEPS):
        started = time.process_time()
        peaks.append(backend.measure(step)[1].peak_bytes)
        seconds.append(time.process_time() - started)
    return min(seconds[1:]), max(peaks[2:])


def main() -> None:
    """Prints a table."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--isa", default="", help="the most that oneDNN may use, such as AVX2")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child)))
        return
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    limited = {"ONEDNN_MAX_CPU_ISA": arguments.isa} if arguments.isa else {}
    for _ in range(arguments.rounds):
        for way, environment in WAYS.items():
            variables = environment | limited
            rounds[way].append(row_of("cpu_allocators.py", "--child", way, **variables))
    print(head(COLUMNS, left=1))
    for way, results in rounds.items():
        plain_s = min(result["plain_s"] for result in results)
        if "remat_s" not in results[0]:
            print(line_of([way, f"{plain_s:.3f} s"]) + " |" * 5)
            continue
        remat_s = min(result["remat_s"] for result in results)
        last = results[-1]
        error = last["remat_bytes"] / last["predicted_bytes"] - 1
        plain, predicted, measured = (
            f"{last[key] / MIB:.1f}" for key in ("plain_bytes", "predicted_bytes", "remat_bytes")
        )
        times = f"{plain_s:.3f} s", f"{plain} MiB", f"{remat_s:.3f} s"
        print(line_of([way, *times, predicted, measured, f"{error:+.1%}"]))


if __name__ == "__main__":
    main()
