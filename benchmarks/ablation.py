"""What each trick of the memory model is worth inside ``fit``, on two allocators.

    python benchmarks/ablation.py [--models unet,ResNet50] [--tricks none,compact] [--json FILE]

Every row is one ``fit`` in a process of its own, with one trick switched off. The limit is halfway
between what is resident and the plain peak of the same ``fit``. A trick stays only if leaving it
out costs at least 3 % of the measured peak or of the batch on both allocators: oneDNN's, and
TensorFlow's BFC (``TF_CPU_ALLOCATOR_USE_BFC=1 TF_ENABLE_ONEDNN_OPTS=0``).
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
TRICKS = ("nothing", "tidy", "probe", "probe+tidy", "compaction", "half-corrections", "reserve")
MIB = 2**20
_STEPS = 16
_TIMEOUT_S = 400


def _switch_off(trick: str) -> None:
    """Replaces one trick by what a package without it would do."""
    from dataclasses import replace

    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend
    from keras_remat.planning import fit_plans, make_plan, to_budget

    if "tidy" in trick:
        TensorFlowBackend.tidy = lambda self, model: None
    if "probe" in trick:
        TensorFlowBackend.with_pool = lambda self, traced, problem, idle_bytes: problem
    if trick == "reserve":
        TensorFlowBackend.reserve = lambda self, limit_bytes: None
    if trick == "compaction":
        make_plan.compacted = lambda problem, schedule, *_, **__: schedule
        to_budget.compacted = lambda problem, schedule, *_, **__: schedule
    if trick == "half-corrections":

        def calibrated(
            self: Any, problem: Any, schedule: Any, measured_peak_bytes: int
        ) -> tuple[Any, int]:
            surplus = measured_peak_bytes - self._backend.predicted_peak_bytes(problem, schedule)
            resident = problem.profile.resident_bytes + max(0, surplus)
            return replace(problem, profile=replace(problem.profile, resident_bytes=resident)), 0

        fit_plans.StepPlanner.calibrated = calibrated


def _child(name: str, trick: str, batch_size: str) -> dict[str, Any]:
    """One plain and one rematerialized ``fit``."""
    import keras
    import models
    import tensorflow as tf
    from step_case import Probe

    import keras_remat
    from keras_remat.backends.base import load_backend

    _switch_off(trick)
    keras.utils.set_random_seed(0)
    model, case = models.make(name)
    data = case.steps(_STEPS)
    backend = load_backend()
    plain = Probe(backend)
    arguments = {"batch_size": case.batch_size, "verbose": 0, "shuffle": False}
    model.fit(**data, **arguments, epochs=1, callbacks=[plain])
    resident = tf.config.experimental.get_memory_info("CPU:0")["current"]
    limit = (resident + max(plain.peaks)) // 2
    remat = keras_remat.RematAutotune(
        memory_limit=limit, margin=0.0, batch_size=batch_size, solver_time_limit_s=8, verbose=0
    )
    probe = Probe(backend, remat)
    model.fit(**data, **arguments, epochs=6 if batch_size == "max" else 2, callbacks=[probe, remat])
    plan = remat.plan
    return {
        "limit": limit,
        "plain": max(plain.peaks),
        "predicted": plan and plan.predicted.peak_bytes,
        "measured": plan and plan.measured and plan.measured.peak_bytes,
        "overhead": plan and plan.overhead,
        "size": remat.report.batch_size,
        "tightened": sum(event.kind == "tighten" for event in remat.report.events),
    }


def _row(allocator: str, name: str, trick: str, size: str) -> dict[str, Any]:
    environment = {**os.environ, **ALLOCATORS[allocator], "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--child", name, trick, size]
    row: dict[str, Any] = {"allocator": allocator, "model": name, "off": trick, "mode": size}
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
    head = f"| {row['allocator']} | {row['model']} | {row['mode']} | {row['off']} "
    if "error" in row or not row["measured"]:
        return head + f"| {row.get('error', 'no plan was measured')} ||||||"
    error = row["predicted"] / row["measured"] - 1
    return head + (
        f"| {row['limit'] / MIB:.1f} | {row['predicted'] / MIB:.1f} | {row['measured'] / MIB:.1f} "
        f"| {error:+.1%} | {row['overhead']:.1%} | {row['tightened']} | {row['size']} |"
    )


def main() -> None:
    """Prints one row per allocator, model, mode and trick."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="unet,MobileNetV2,transformer")
    parser.add_argument("--tricks", default=",".join(TRICKS))
    parser.add_argument("--modes", default="keep")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS))
    parser.add_argument("--json", type=Path, help="every row is added to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_child(*arguments.child)))
        return
    print("| allocator | model | batch | off | limit MiB | predicted | measured | error ", end="")
    print(
        "| overhead | tightened | batch size |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for allocator in arguments.allocators.split(","):
        for name in arguments.models.split(","):
            for mode in arguments.modes.split(","):
                for trick in arguments.tricks.split(","):
                    row = _row(allocator, name, trick, mode)
                    print(_line(row), flush=True)
                    if arguments.json:
                        with arguments.json.open("a") as file:
                            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
