"""MobileNetV2 trains with half the memory its plain training step takes; about a minute on two CPU cores, no downloads.

    pip install -e '.[tensorflow-cpu]' && python examples/quickstart.py

The first ``fit`` only measures: without a limit nothing has to change. The second one gets half of that peak as its limit. Peaks are those of
the device's allocator; on a CPU that is oneDNN's, which also counts the data set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_remat

CLASSES, MIB = 10, 2**20


def build(pixels: int) -> keras.Model:
    """A compiled MobileNetV2, the same weights every time."""
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    return model


def layer_of(op_name: str) -> str:
    """The Keras layer in an op's name: ``gradient_tape/mobilenetv2_1.00_128_1/Conv1_1/…`` → ``Conv1``."""
    scopes = [part for part in op_name.split("/")[:-1] if part != "gradient_tape"]
    layer = scopes[1] if len(scopes) > 1 else scopes[0] if scopes else op_name
    return layer.rsplit("_", 1)[0] if layer.rsplit("_", 1)[-1].isdigit() else layer


def print_recomputed(problem: keras_remat.Problem, plan: keras_remat.Plan, top: int = 8) -> None:
    """What runs twice, by kind of op and by layer."""
    runs = plan.solution.schedule.recomputed
    kinds, layers = Counter(), Counter()
    for op_id, extra in runs.items():
        op = problem.graph.ops[op_id]
        kinds[op.kind] += extra
        layers[layer_of(op.name)] += extra
    print(f"Recomputed: {len(runs)} of {len(problem.graph.ops)} ops in {len(layers)} layers")
    print("  by kind   " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(top)))
    print("  by layer  " + ", ".join(f"{layer} {count}" for layer, count in layers.most_common(top)))


def main(argv: list[str] | None = None) -> int:
    """Returns 0 when the measured peak kept the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the solver (default 10)")
    arguments = parser.parse_args(argv)
    pixels, batch_size = arguments.pixels, arguments.batch_size
    generator = np.random.default_rng(0)
    x = generator.random((4 * batch_size, pixels, pixels, 3), dtype=np.float32)
    y = generator.integers(0, CLASSES, (len(x), 1))

    watching = keras_remat.RematAutotune(batch_size="keep")
    build(pixels).fit(x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False, callbacks=[watching])
    plain = watching.report.baseline
    limit = plain.peak_bytes // 2
    print(f"Plain step: {plain.peak_bytes / MIB:.1f} MiB measured. Now with a limit of {limit / MIB:.1f} MiB:", flush=True)

    keras.backend.clear_session()
    remat = keras_remat.RematAutotune(memory_limit=limit, batch_size="keep", solver_time_limit_s=arguments.seconds)
    model = build(pixels)
    model.fit(x, y, batch_size=batch_size, epochs=4, verbose=2, shuffle=False, callbacks=[remat])

    plan = remat.plan
    print(f"\n{plan}")
    print_recomputed(remat.problem, plan)
    print(f"\n{'':16}{'peak':>12}{'time per step':>16}")
    for name, usage in (("plain", plain), ("rematerialized", plan.measured)):
        print(f"{name:16}{usage.peak_bytes / MIB:8.1f} MiB{usage.time_s:14.3f} s")
    kept = plan.measured.peak_bytes <= limit
    print(f"limit           {limit / MIB:8.1f} MiB: {'kept' if kept else 'NOT KEPT'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
