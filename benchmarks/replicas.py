"""Training on several devices with ``keras.distribution`` on JAX: memory of each, exchanges between
them, losses, step time.

    python benchmarks/replicas.py [--devices 4] [--share 0.5] [--json FILE]

The devices are made up by the host (``--xla_force_host_platform_device_count``), so memory and the
number of exchanges are those of real ones, and times are not. Every row is a process of its own:
a model under ``DataParallel`` or ``ModelParallel``, plain and with a limit of what is resident plus
a share of what the plain step adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROWS = (("data", "mixer"), ("data", "convnet"), ("model", "mixer"))
BATCH, STEPS = 64, 6


def measured(kind: str, name: str, share: float) -> dict[str, Any]:
    """One row, in this process."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import jax
    import jax_models
    import keras

    import keras_remat
    from keras_remat.backends.jax import device, lower

    compile_step, texts = lower.compile_step, []

    def noted(*arguments: Any, **options: Any) -> Any:
        compiled = compile_step(*arguments, **options)
        texts.append((compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()))
        return compiled

    lower.compile_step = device.compile_step = noted
    if kind == "data":
        distribution = keras.distribution.DataParallel()
    else:
        mesh = keras.distribution.DeviceMesh((2, jax.device_count() // 2), ["batch", "model"])
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*dense.*kernel"], layouts[".*dense.*bias"] = (None, "model"), ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)

    def fit(remat: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(0)
        model = getattr(jax_models, name)(blocks=4)
        data = jax_models.batch(model, STEPS * BATCH)
        history = model.fit(
            *data, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, callbacks=[remat]
        )
        last, (temp, text) = remat.report.epochs[-1], texts[-1]
        return {
            "losses": history.history["loss"],
            "temp": temp,
            "all_reduces": text.count(" all-reduce("),
            "peak": last.peak_bytes,
            "step_s": last.step_time_s / last.steps,
        }

    plain = fit(keras_remat.RematAutotune(None, "keep", verbose=0))
    resident = device.Device().in_use_bytes()
    limit = int(resident + share * (plain["peak"] - resident))
    ours = fit(keras_remat.RematAutotune(limit, "keep", margin=0.0, verbose=0))
    pairs = zip(plain["losses"], ours["losses"], strict=True)
    return {
        "distribution": kind,
        "model": name,
        "limit_mib": limit / 2**20,
        "peak_mib": ours["peak"] / 2**20,
        "temp_ratio": ours["temp"] / plain["temp"],
        "all_reduces_plain": plain["all_reduces"],
        "all_reduces": ours["all_reduces"],
        "loss_difference": max(abs(a - b) / abs(a) for a, b in pairs),
        "time_ratio": ours["step_s"] / plain["step_s"],
    }


def main() -> int:
    """Every row, each in a process of its own; the status is 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(*arguments.row, arguments.share)))
        return 0
    flags = f"--xla_force_host_platform_device_count={arguments.devices}"
    variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if p)
    rows: list[dict[str, Any]] = []
    for kind, name in ROWS:
        command = [sys.executable, __file__, "--share", str(arguments.share), "--row", kind, name]
        done = subprocess.run(
            command,
            env=os.environ | variables | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            rows.append({"distribution": kind, "model": name, "error": last[:300]})
        else:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        if arguments.json:
            found = {"date": time.strftime("%Y-%m-%d"), "devices": arguments.devices, "rows": rows}
            arguments.json.write_text(json.dumps(found, indent=1))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
