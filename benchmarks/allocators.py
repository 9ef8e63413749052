"""One ``fit`` per model and allocator: what was predicted, and what was measured.

    python benchmarks/allocators.py [--models unet,ResNet50] [--allocators oneDNN,BFC] [--json FILE]

Every row is one process: a plain ``fit``, then one with ``RematAutotune``. The limit lies halfway
between what is resident and the plain peak of the same process, and no margin is kept. Times are
medians of whole steps, by a stopwatch around them. The allocators are oneDNN's, and TensorFlow's
BFC as it is without oneDNN (``TF_CPU_ALLOCATOR_USE_BFC=1 TF_ENABLE_ONEDNN_OPTS=0``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ALLOCATORS = {
    "oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "1"},
    "BFC": {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"},
}
MIB = 2**20
_STEPS = 16
_TIMEOUT_S = 400


def _child(name: str) -> dict[str, Any]:
    """One plain and one rematerialized ``fit``."""
    import keras
    import models
    import tensorflow as tf
    from step_case import Probe
    from watch import long_fit

    import keras_remat

    keras.utils.set_random_seed(0)
    model, case = models.make(name)
    data = case.steps(_STEPS)
    plain = Probe()
    arguments = {"batch_size": case.batch_size, "verbose": 0, "shuffle": False}
    model.fit(**data, **arguments, epochs=1, callbacks=[plain])
    resident = tf.config.experimental.get_memory_info("CPU:0")["current"]
    limit = (resident + max(plain.peaks)) // 2
    remat = keras_remat.RematAutotune(memory_limit=limit, margin=0.0, batch_size="keep", verbose=0)
    probe = Probe(remat)
    long_fit(model, **data, **arguments, epochs=2, callbacks=[probe, remat])
    plan = remat.plan
    return {
        "limit": limit,
        "plain": max(plain.peaks),
        "predicted": plan and plan.predicted.peak_bytes,
        "measured": plan and plan.measured and plan.measured.peak_bytes,
        "overhead": plan and plan.overhead,
        "final": probe.final_peak_bytes,
        "plain_s": plain.final_time_s,
        "step_s": probe.final_time_s,
        "tightened": sum(event.kind == "tighten" for event in remat.report.events),
    }


def _row(allocator: str, name: str) -> dict[str, Any]:
    environment = {**os.environ, **ALLOCATORS[allocator], "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--child", name]
    row: dict[str, Any] = {"allocator": allocator, "model": name}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**row, "error": f"more than {_TIMEOUT_S} s"}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1][:200]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def _line(row: dict[str, Any]) -> str:
    head = f"| {row['allocator']} | {row['model']} "
    if "error" in row or not row["measured"]:
        return head + f"| {row.get('error', 'no plan was measured')} ||||||||"
    error = row["predicted"] / row["measured"] - 1
    return head + (
        f"| {row['plain'] / MIB:.1f} | {row['limit'] / MIB:.1f} | {row['predicted'] / MIB:.1f} "
        f"| {row['measured'] / MIB:.1f} | {error:+.1%} | {row['final'] / MIB:.1f} "
        f"| {row['overhead']:.1%} | {row['step_s'] / row['plain_s'] - 1:.1%} | {row['tightened']} |"
    )


def main() -> None:
    """Prints one row per allocator and model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="ResNet50,MobileNetV2,unet,transformer")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS))
    parser.add_argument("--json", type=Path, help="every row is added to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_child(arguments.child)))
        return
    print("| allocator | model | plain MiB | limit | predicted | measured | error ", end="")
    print("| highest step of the last plan | extra time, predicted | measured | tightened |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in arguments.models.split(","):
        for allocator in arguments.allocators.split(","):
            row = _row(allocator, name)
            print(_line(row), flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
