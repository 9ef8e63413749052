"""Every family of ``keras.applications``, twelve training steps as people write them, and what a
user is promised of each: limits kept, losses as plain's, predictions, set-up and step times.

    python benchmarks/zoo.py --json rows.jsonl --output zoo.md [--only VAE,ResNet50]

Every fit is a process of its own, from the same seed: plain ``fit``, plain ``fit`` again (which
tells how far losses differ by themselves), and ``fit`` with ``RematAutotune`` under a limit: what
is resident, and ``--share`` of what the plain step takes above it. A limit that is refused is
raised to what the refusal says, and marked ↑. Peaks and losses of every step are read by a callback
beside it, and the bits of all weights and slots are compared after the last; a plan below the floor
of whole ops runs in slices, which round sums in another order. Times are medians of
the third epoch of four; of all threads' seconds, too, which other processes lengthen less. The
largest models are planned only (``graph``): traced, with estimated costs. Backbones
of keras-hub are built from configurations, where keras-hub is installed. Cases that the JSON file
has, with the same settings, are not run again.

``--backend torch`` runs them on PyTorch. Of a CPU the bytes of the last epoch's steps are told
there, by the profiler, and not those of the steps before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rows import (
    MIB,
    Failed,
    cells_of,
    command_line,
    difference,
    error_of,
    failed,
    head,
    keep,
    kept,
    line_of,
    machine,
    row_of,
)

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

#: One model of each family of ``keras.applications``, and those that are planned only.
FAMILIES = (
    "VGG16", "ResNet50", "ResNet50V2", "Xception", "InceptionV3", "InceptionResNetV2", "MobileNet",
    "MobileNetV2", "MobileNetV3Small", "DenseNet121", "NASNetMobile", "EfficientNetB0",
    "EfficientNetV2B0", "ConvNeXtTiny",
)  # fmt: skip
GRAPHS = ("ResNet152", "DenseNet201", "NASNetLarge", "EfficientNetB7", "ConvNeXtXLarge")
STEPS = (
    "VAE", "GAN", "WGAN-GP", "CTC", "SimCLR", "distillation", "masked autoencoder", "VQ-VAE",
    "graph attention", "siamese", "DDIM", "CycleGAN",
)  # fmt: skip
#: What runs on PyTorch: the models with Keras's own step, and steps of one loss.
ON_TORCH = (
    *FAMILIES, "CTC", "VAE", "SimCLR", "distillation", "masked autoencoder", "VQ-VAE",
    "graph attention", "siamese", "DDIM",
)  # fmt: skip
#: Backbone of keras-hub → its configuration; each gets a head of one unit.
HUB: dict[str, dict[str, Any]] = {
    "BertBackbone": {"vocabulary_size": 1000, "num_layers": 4, "num_heads": 4, "hidden_dim": 128,
                     "intermediate_dim": 512, "max_sequence_length": 128},
    "GPT2Backbone": {"vocabulary_size": 1000, "num_layers": 4, "num_heads": 4, "hidden_dim": 128,
                     "intermediate_dim": 512, "max_sequence_length": 128},
    "LlamaBackbone": {"vocabulary_size": 1000, "num_layers": 4, "num_query_heads": 4,
                      "num_key_value_heads": 2, "hidden_dim": 128, "intermediate_dim": 384},
    "ViTBackbone": {"image_shape": (64, 64, 3), "patch_size": 8, "num_layers": 4, "num_heads": 4,
                    "hidden_dim": 128, "mlp_dim": 512},
}  # fmt: skip
TOKENS = 128
#: Steps of an epoch, and epochs; of the last one a CPU's bytes are watched on PyTorch, and the one
#: before is timed.
_STEPS, _EPOCHS = 5, 4
_TIMED = slice((_EPOCHS - 2) * _STEPS, (_EPOCHS - 1) * _STEPS)
_SOLVE_S, _SEED = 10.0, 0
#: Limits that are tried where the first is refused, each so much above what is said to be needed.
_LIMITS, _RAISED = 3, 1.05
#: What ``--check`` demands: predictions this close on so many of the cases, and set-up seconds.
PREDICTION, PREDICTED_SHARE, SETUP_S = 0.05, 0.9, 60.0


# -------------------------------------------------------------------- one case


def build(name: str, batch: int, pixels: int) -> tuple[Any, dict[str, Any]]:
    """Returns a case's compiled model, always with the same weights, and its data."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(_SEED)
    generator, samples = np.random.default_rng(_SEED), batch * _STEPS
    if name in STEPS:
        import zoo_steps

        model, data = zoo_steps.STEPS[name]()
        return model, data(generator, samples)
    if name in HUB:
        return _hub(name, generator, samples)
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(pixels, pixels, 3), classes=10
    )
    model.compile(keras.optimizers.SGD(1e-6), "sparse_categorical_crossentropy")
    images = generator.random((samples, pixels, pixels, 3), dtype=np.float32)
    return model, {"x": images, "y": generator.integers(0, 10, samples).astype(np.int32)}


def _hub(name: str, generator: Any, samples: int) -> tuple[Any, dict[str, Any]]:
    import keras
    import keras_hub
    import numpy as np

    def data(tensor: Any) -> Any:
        if len(tensor.shape) == 4:
            return generator.random((samples, *tensor.shape[1:]), dtype=np.float32)
        return np.ones((samples, TOKENS), np.int32)

    backbone = getattr(keras_hub.models, name)(**HUB[name])
    x = keras.tree.map_structure(data, backbone.input)
    told = backbone.output
    told = told.get("sequence_output") if isinstance(told, dict) else told
    model = keras.Model(backbone.input, keras.layers.Dense(1)(told[:, 0]))
    model.compile(keras.optimizers.Adam(1e-6), "mse")
    return model, {"x": x, "y": generator.random((samples, 1), dtype=np.float32)}


def trained(name: str, batch: int, pixels: int, limit_bytes: int | None = None) -> dict[str, Any]:
    """Fits a case, plainly or under a limit, and returns what was watched and planned."""
    import keras
    from watch import StepWatch, long_fit

    import keras_remat

    model, data = build(name, batch, pixels)
    of_batch = sum(leaf.nbytes for leaf in keras.tree.flatten(data)) // _STEPS
    data = keras.tree.map_structure(keras.ops.convert_to_tensor, data)
    watch = StepWatch(watched_epoch=_EPOCHS - 1, batch_bytes=of_batch)
    callbacks, found = [watch], {}
    if limit_bytes is not None:
        remat = keras_remat.RematAutotune(
            limit_bytes, "keep", solver_time_limit_s=_SOLVE_S, verbose=0
        )
        callbacks.append(remat)
    try:
        long_fit(model, **data, batch_size=batch, epochs=_EPOCHS, callbacks=callbacks)
    except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError) as error:
        return _refusal(error)
    if limit_bytes is not None:
        found = _found(remat)
    return found | {
        "peaks": watch.peaks,
        "step_s": median(watch.times_s[_TIMED]),
        "step_cpu_s": median(watch.cpu_s[_TIMED]),
        "losses": watch.losses,
        "bits": bits_of(model),
        "resident_bytes": watch.resident_bytes,
    }


def bits_of(model: Any) -> str:
    """Returns what tells the bits of a model's variables and of its optimizer's from any others."""
    import keras

    variables = [*model.variables, *(model.optimizer.variables if model.optimizer else ())]
    found = hashlib.sha256()
    for variable in {id(v): v for v in variables}.values():
        found.update(keras.ops.convert_to_numpy(variable).tobytes())
    return found.hexdigest()


def _found(remat: Any) -> dict[str, Any]:
    """Returns what the callback found."""
    report, plan = remat.report, remat.plan
    found = {
        "setup_s": report.planning_time_s,
        "events": [str(event.kind) for event in report.events],
    }
    if plan is None or plan.measured is None:
        last = report.events[-1].message if report.events else "nothing happened"
        return found | {"status": f"plain: {last}"}
    return found | {
        "status": "planned",
        "ops": len(plan.problem.graph.ops) if plan.problem else None,
        "predicted_bytes": plan.predicted.peak_bytes,
        "measured_bytes": plan.measured.peak_bytes,
        "overhead": plan.overhead,
        "parts": plan.slicing.parts if plan.slicing else 1,
    }


def measured(
    name: str, share: float, timeout_s: float, backend: str, **asked: int
) -> dict[str, Any]:
    """Trains a case three times, each in a process of its own, and returns its row."""
    plain = _child(name, timeout_s, backend, **asked)
    again = _child(name, timeout_s, backend, **asked)
    resident, peak = plain["resident_bytes"], max(plain["peaks"][1:] + again["peaks"][1:])
    limit = int(resident + share * (peak - resident))
    row: dict[str, Any] = {
        "plain_bytes": peak,
        "resident_bytes": resident,
        "plain_s": again["step_s"],
        "plain_cpu_s": again["step_cpu_s"],
        "plain_twice": difference(plain["losses"], again["losses"]),
        "plain_weights_equal": plain["bits"] == again["bits"],
    }
    for _ in range(_LIMITS):
        row["limit_bytes"] = limit
        ours = _child(name, timeout_s, backend, **asked, limit_bytes=limit)
        if "refusal" not in ours:
            break
        row |= {"status": ours["refusal"], "raised": True}
        limit = int(_RAISED * ours["needed_share"] * limit)
    else:
        return row
    peaks, losses, bits = ours.pop("peaks"), ours.pop("losses"), ours.pop("bits")
    ours.pop("resident_bytes")
    limit = row["limit_bytes"]
    return (
        row
        | ours
        | {
            "over_limit_steps": sum(peak > limit for peak in peaks),
            "highest_bytes": max(peaks),
            "last_bytes": max(peaks[-_STEPS:]),
            "loss_difference": difference(plain["losses"], losses),
            "weights_equal": bits == plain["bits"],
            "time_ratio": ours["step_s"] / row["plain_s"],
            "cpu_ratio": ours["step_cpu_s"] / row["plain_cpu_s"],
        }
    )


def planned(name: str, share: float, pixels: int) -> dict[str, Any]:
    """Plans a case without training it, and returns its row."""
    import keras_remat

    batch = 2
    model, _ = build(name, batch, pixels)
    started = time.perf_counter()
    options = {"profile": "estimated", "solver_time_limit_s": _SOLVE_S, "margin": 0.0}
    roomy = keras_remat.make_plan(model, batch, 2**45, **options | {"solver": "store_all"})
    trace_s = time.perf_counter() - started
    resident = roomy.problem.profile.resident_bytes
    limit = int(resident + share * (roomy.store_all.peak_bytes - resident))
    row: dict[str, Any] = {"plain_bytes": roomy.store_all.peak_bytes, "resident_bytes": resident}
    row |= {"ops": len(roomy.problem.graph.ops), "trace_s": trace_s}
    for _ in range(_LIMITS):
        row["limit_bytes"] = limit
        started = time.perf_counter()
        try:
            plan = keras_remat.make_plan(model, batch, limit, **options)
        except (keras_remat.InfeasibleBudgetError, keras_remat.ScheduleNotFoundError) as error:
            row |= _refusal(error) | {"raised": True}
            limit = int(_RAISED * row["needed_share"] * limit)
            continue
        seconds = time.perf_counter() - started
        told = {"predicted_bytes": plan.predicted.peak_bytes, "overhead": plan.overhead}
        return row | told | {"status": "graph", "setup_s": seconds}
    return row | {"status": row["refusal"]}


def _refusal(error: Any) -> dict[str, Any]:
    """Returns what an error says, and what is needed as a multiple of what there was."""
    needed = max(getattr(error, "best_peak_bytes", None) or 0, error.floor_bytes)
    share = max(1.0, needed / error.budget_bytes)
    return {"refusal": f"{type(error).__name__}: {error}", "needed_share": share}


# -------------------------------------------------------------------- all cases


def cases(backend: str) -> list[str]:
    """The names of all cases that can run here."""
    hub = list(HUB) if find_spec("keras_hub") else []
    return [*ON_TORCH, *hub] if backend == "torch" else [*STEPS, *FAMILIES, *hub, *GRAPHS]


def run(name: str, share: float, timeout_s: float, backend: str, **asked: int) -> dict[str, Any]:
    """Runs a case; a failure is a row with its status."""
    started = time.perf_counter()
    try:
        row = (
            _child(name, timeout_s, backend, share=share, pixels=asked["pixels"])
            if name in GRAPHS
            else measured(name, share, timeout_s, backend, **asked)
        )
    except Failed as error:
        return {"name": name, "status": f"error: {error}"}
    return {"name": name} | row | {"seconds": round(time.perf_counter() - started, 1)}


def _child(name: str, timeout_s: float, backend: str, **options: Any) -> dict[str, Any]:
    """Runs one fit, or one plan, in a process of its own, on a backend of Keras.

    Raises:
        Failed: it did not end well.
    """
    told = json.dumps({"name": name} | options)
    return row_of("zoo.py", "--child", told, timeout_s=timeout_s, KERAS_BACKEND=backend)


#: Heading of a column → key in a row, and how it is written.
COLUMNS = {
    "case": ("name", ""),
    "status": ("status", ""),
    "ops": ("ops", "d"),
    "plain MiB": ("plain_bytes", "MiB"),
    "limit": ("limit_bytes", "MiB"),
    "predicted": ("predicted_bytes", "MiB"),
    "measured": ("measured_bytes", "MiB"),
    "error": ("off", "+.1%"),
    "highest step": ("highest_bytes", "MiB"),
    "steps over": ("over_limit_steps", "d"),
    "loss difference": ("loss_difference", ".0e"),
    "plain twice": ("plain_twice", ".0e"),
    "weights": ("weights", ""),
    "set-up s": ("setup_s", ".0f"),
    "time / plain": ("time_ratio", ".2f"),
    "of all threads": ("cpu_ratio", ".2f"),
}


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    status = " ".join(row["status"].split()).replace("|", "/")
    told = row | {"status": status[:160], "off": error_of(row), "weights": _weights(row)}
    if row.get("raised"):
        told["limit_bytes"] = f"{row['limit_bytes'] / MIB:.1f}↑"
    return line_of(cells_of(told, COLUMNS.values(), missing=""))


def _weights(row: dict[str, Any]) -> str | None:
    """Returns how the weights after the last step compare with plain's; ``None``: not trained."""
    if "weights_equal" not in row:
        return None
    if row["weights_equal"]:
        return "same bits"
    if row.get("parts", 1) > 1:
        return f"differ: {row['parts']} slices"
    return "differ" if row["plain_weights_equal"] else "differ, plain's too"


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what falls short, a sentence each."""
    found = [f"{r['name']}: {r['status']}" for r in rows if r["status"].startswith("error")]
    for row in rows:
        if row.get("over_limit_steps"):
            found.append(f"{row['name']}: {row['over_limit_steps']} steps over the limit")
        if row.get("loss_difference", 0.0) > max(1e-5, 2 * row.get("plain_twice", 0.0)):
            found.append(f"{row['name']}: losses differ by {row['loss_difference']:.0e}")
        if _weights(row) == "differ":
            found.append(f"{row['name']}: weights differ, where those of two plain fits do not")
        if row.get("setup_s", 0.0) > SETUP_S and (row.get("ops") or 0) <= 10_000:
            found.append(f"{row['name']}: {row['setup_s']:.0f} s of set-up")
    errors = [abs(e) for row in rows if (e := error_of(row)) is not None]
    near = sum(error <= PREDICTION for error in errors)
    if near < PREDICTED_SHARE * len(errors):
        found.append(f"predictions within {PREDICTION:.0%}: {near} of {len(errors)}")
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns how far predictions are off, and the medians of the times over plain's."""
    errors = [abs(e) for row in rows if (e := error_of(row)) is not None]
    if not errors:
        return ""
    told = f"Predictions are off by {median(errors):.2%} in the middle, {max(errors):.1%} at most."
    trained = [row for row in rows if "cpu_ratio" in row]
    if trained:
        wall, cpu = (median(row[key] for row in trained) for key in ("time_ratio", "cpu_ratio"))
        told += f" A step takes {wall:.2f} of plain's time, {cpu:.2f} of all threads' (medians)."
    return told


def report(
    rows: list[dict[str, Any]], share: float, backend: str, *, batch: int, pixels: int
) -> str:
    """Returns the rows as Markdown, and what falls short."""
    lines = ["# zoo.py", ""]
    lines += [
        f"{machine(backend)}; batch {batch}, {pixels} px; limit: resident + {share:g} of what",
        f"plain takes above; solver auto, {_SOLVE_S:.0f} s. The command explains the columns.",
    ]
    lines += ["", head(COLUMNS), *map(line, rows), "", summary(rows), "", "What falls short:", ""]
    lines += [f"- {each}" for each in failures(rows) or ["nothing"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs what is missing, and writes the table after every case."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="names; default: all")
    parser.add_argument("--backend", choices=("tensorflow", "torch"), default="tensorflow")
    parser.add_argument("--batch", type=int, default=16, help="samples (default 16)")
    parser.add_argument("--pixels", type=int, default=96, help="of an image's side (default 96)")
    parser.add_argument("--share", type=float, default=0.6, help="of plain's bytes (default 0.6)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one fit")
    parser.add_argument("--json", type=Path, metavar="FILE.jsonl", help="rows, added as they come")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 when something fails")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import keras

        import keras_remat

        if keras.backend.backend() == "tensorflow":
            keras_remat.enable_cpu_memory_stats()
        told = json.loads(arguments.child)
        print(json.dumps((planned if told["name"] in GRAPHS else trained)(**told)))
        return 0
    backend, known = arguments.backend, cases(arguments.backend)
    asked = {"batch": arguments.batch, "pixels": arguments.pixels}
    settings = asked | {"backend": backend, "share": arguments.share}
    rows = {row["name"]: row for row in kept(arguments.json) if settings.items() <= row.items()}
    wanted = arguments.only.split(",") if arguments.only else known
    unknown = set(wanted) - set(known)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in wanted:
        if name not in rows:
            row = run(name, arguments.share, arguments.timeout, backend, **asked)
            rows[name] = row | settings
            keep(rows[name], arguments.json)
        print(line(rows[name]), flush=True)
        if arguments.output:
            shown = [rows[each] for each in known if each in rows]
            arguments.output.write_text(report(shown, arguments.share, backend, **asked))
    return failed(failures(list(rows.values())), arguments.check)


if __name__ == "__main__":
    sys.exit(main())
