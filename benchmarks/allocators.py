"""One ``fit`` per model and allocator: what was predicted, and what was measured.

    python benchmarks/allocators.py [--models unet,ResNet50] [--allocators oneDNN,BFC] [--json FILE]

Every row is one process: a plain ``fit``, then one with ``RematAutotune``. The limit lies halfway
between what is resident and the plain peak of the same process, and no margin is kept. *Plain* is
its highest step, *of predicted* that over what is predicted, *of simulated* over the most that it
takes in simulated runs in no order, all above what is resident. Times are
medians of whole steps, by a stopwatch around them. The allocators are oneDNN's, and TensorFlow's
BFC as it is without oneDNN (``TF_CPU_ALLOCATOR_USE_BFC=1 TF_ENABLE_ONEDNN_OPTS=0``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rows import MIB, UNLIMITED_BYTES, Failed, failure_line, head, keep, line_of, row_of

ALLOCATORS = {
    "oneDNN": {"TF_ENABLE_ONEDNN_OPTS": "1"},
    "BFC": {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"},
}
COLUMNS = (
    "allocator", "model", "plain MiB", "of predicted", "of simulated", "limit", "predicted",
    "measured", "error", "highest step of the last plan", "extra time, predicted", "measured",
    "tightened",
)  # fmt: skip
_STEPS = 16
_TIMEOUT_S = 400


def _child(name: str) -> dict[str, Any]:
    """One plain and one rematerialized ``fit``."""
    import keras
    import models
    from step_case import Probe
    from watch import long_fit, statistics

    import keras_remat
    from keras_remat.backends.base import load_backend
    from keras_remat.planning.make_plan import traced_model

    keras.utils.set_random_seed(0)
    model, case = models.make(name)
    data, backend = case.steps(_STEPS), load_backend()
    plain = Probe(1, 0)
    model.fit(**data, batch_size=case.batch_size, verbose=0, shuffle=False, callbacks=[plain])
    batch = models.batches(case.steps(1), case.batch_size)[0]
    step = traced_model(backend, model, batch, UNLIMITED_BYTES, 0.0, "estimated", 0)
    resident = step.problem.profile.resident_bytes
    expected = step.traced.plain_peak_bytes(step.problem, backend.memory) - resident
    unordered = step.traced.plain_unordered_bytes(step.problem.with_budget(None), backend.memory)
    limit = (statistics()["current"] + max(plain.peaks)) // 2
    remat = keras_remat.RematAutotune(memory_limit=limit, margin=0.0, batch_size="keep", verbose=0)
    probe = Probe(2, 0, remat)
    long_fit(model, **data, batch_size=case.batch_size, epochs=2, callbacks=[probe, remat])
    plan = remat.plan
    return {
        "limit": limit,
        "plain": max(plain.peaks),
        "plain_share": (max(plain.peaks) - resident) / expected,
        "unordered_share": (max(plain.peaks) - resident) / max(1, unordered - resident),
        "predicted": plan and plan.predicted.peak_bytes,
        "measured": plan and plan.measured and plan.measured.peak_bytes,
        "overhead": plan and plan.overhead,
        "final": probe.final_peak_bytes,
        "plain_s": plain.final_time_s,
        "step_s": probe.final_time_s,
        "tightened": sum(event.kind == "tighten" for event in remat.report.events),
    }


def _row(allocator: str, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"allocator": allocator, "model": name}
    try:
        return row | row_of(
            "allocators.py", "--child", name, timeout_s=_TIMEOUT_S, **ALLOCATORS[allocator]
        )
    except Failed as error:
        return row | {"error": str(error)}


def _line(row: dict[str, Any]) -> str:
    cells = [row["allocator"], row["model"]]
    if "error" in row or not row["measured"]:
        return failure_line(COLUMNS, *cells, row.get("error", "no plan was measured"))
    plain, limit, predicted, measured, final = (
        f"{row[key] / MIB:.1f}" for key in ("plain", "limit", "predicted", "measured", "final")
    )
    error = row["predicted"] / row["measured"] - 1
    extra = row["step_s"] / row["plain_s"] - 1
    shares = (f"{row[key]:.2f}" for key in ("plain_share", "unordered_share"))
    cells += [plain, *shares, limit, predicted, measured]
    cells += [f"{error:+.1%}", final]
    return line_of([*cells, f"{row['overhead']:.1%}", f"{extra:.1%}", row["tightened"]])


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
    print(head(COLUMNS, left=2))
    for name in arguments.models.split(","):
        for allocator in arguments.allocators.split(","):
            row = _row(allocator, name)
            print(_line(row), flush=True)
            keep(row, arguments.json)


if __name__ == "__main__":
    main()
