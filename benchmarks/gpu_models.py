"""Eight models on a live GPU, in a few minutes: what plans that were made elsewhere take there, and
how long, beside Keras's own step and what others checkpoint.

Plans are made first, on any machine with the extra ``cards``, and travel with the repository:

    KERAS_BACKEND=jax python benchmarks/gpu_models.py --make --plans DIR --card H100
    python benchmarks/gpu_models.py --plans DIR --out OUT [--jax-only | --torch-only]

All processes prepare side by side and then take turns at the GPU (:mod:`turns`), so that each is
timed alone. ``OUT/rows.jsonl`` grows with every row, and ``OUT/report.md`` is written at the end;
``--read OUT`` writes it again. ``--torch-only --equal-bytes`` sets each peer on PyTorch beside a
plan for the bytes that it takes, on a CPU, too (``--factor 0.125``, one model at a time). Bytes are
above what is resident. On JAX *deviceless* is what the compiler said without the card, *on the
card* the most that the allocator had handed out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import turns
from rows import (
    Failed,
    command_line,
    failed,
    head,
    keep,
    kept,
    largest,
    line_of,
    printed_by,
    version_of,
)

from keras_remat.core.writing import WRITINGS

JAX_MODELS = ("bert", "gpt", "vit", "MobileNetV2", "ResNet50", "unet", "lstm", "vae")
TORCH_MODELS = {
    "bert": "float32", "gpt": "mixed_bfloat16", "vit": "float32", "MobileNetV2": "mixed_bfloat16",
    "unet": "float32", "vae": "float32",
}  # fmt: skip
SHARES = (0.7, 0.5)
VARIANTS = ("plain", "checkpoint", *map(str, SHARES))
JAX_COLUMNS = (
    "model, batch", "step", "deviceless MiB", "on the card MiB", "off",
    "allocator's peak, with XLA's trials", "step ms", "time of plain", "predicted",
    "losses differ by",
)  # fmt: skip
#: What ``--check`` demands of predictions.
WORST_ERROR = 0.03


def parser() -> argparse.ArgumentParser:
    """Returns what reads the command line."""
    words = command_line(__doc__)
    words.add_argument("--plans", type=Path, metavar="DIR", help="where plans are, or are put")
    words.add_argument("--make", action="store_true", help="makes plans, without a GPU")
    words.add_argument("--card", default="H100", help="that plans are made for")
    words.add_argument("--at", default=",".join(map(str, SHARES)), help="shares of the plain step")
    words.add_argument("--out", type=Path, metavar="DIR", help="rows and report")
    words.add_argument("--read", type=Path, metavar="DIR", help="only writes the report of rows")
    words.add_argument("--models", default=",".join(JAX_MODELS), help="on JAX, with commas")
    words.add_argument("--torch-models", default=",".join(TORCH_MODELS), help="on PyTorch")
    words.add_argument(
        "--variants", default=",".join(VARIANTS), help="of a step on JAX; default: %(default)s"
    )
    words.add_argument("--no-bits", default="", help="models on PyTorch whose bits are known")
    only = words.add_mutually_exclusive_group()
    only.add_argument("--jax-only", action="store_true", help="no other framework")
    only.add_argument("--torch-only", action="store_true", help="no other framework")
    words.add_argument(
        "--equal-bytes", action="store_true", help="on PyTorch, only plans for peers' bytes"
    )
    words.add_argument("--factor", type=float, default=2, help="on the batch sizes of cards.py")
    words.add_argument("--patience", type=float, default=150.0, help="seconds until turns begin")
    words.add_argument("--timeout", type=float, default=280.0, help="seconds of one process")
    words.add_argument("--check", action="store_true", help="exit with 1 when a bound fails")
    return words


def made(options: Any) -> int:
    """Makes the plans that are missing."""
    options.plans.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        words = {
            "case": "make", "name": name, "card_name": options.card,
            "shares": [float(share) for share in options.at.split(",")],
            "folder": str(options.plans.resolve()), "factor": options.factor,
        }  # fmt: skip
        variables = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        for row in printed_by("gpu_models_case.py", json.dumps(words), **variables):
            keep(row, options.plans / "made.jsonl")
            print(row, flush=True)
    print(writings_table(kept(options.plans / "made.jsonl")))
    return 0


def writings_table(rows: list[dict[str, Any]]) -> str:
    """Returns what the ways to write plans for GPUs down take, by the compiled modules; times
    are shares of the plain step's, by the card's roofline."""
    lines = [head(("model, batch", "at", "limit MiB", "written", "MiB", "time"), 1)]
    for row in rows:
        for way in WRITINGS:
            if f"{way}_mib" in row:
                taken = f"{row[f'{way}_mib']:.1f}", f"{row[f'{way}_time']:.2f}"
                cells = row["at"], f"{row['limit_mib']:.1f}", way, *taken
                lines.append(line_of((f"{row['name']}, {row['batch_size']}", *cells)))
    return "\n".join(lines)


def jobs(options: Any) -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """Yields what runs: a script, a name, its words and its variables."""
    if not options.torch_only:
        folder = str(options.plans.resolve())
        variables = {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        variables["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cuda")
        for name in options.models.split(","):
            for variant in options.variants.split(","):
                words = {"case": "run", "name": name, "variant": variant, "folder": folder}
                yield "gpu_models_case.py", "jax", words | {"factor": options.factor}, variables
    if not options.jax_only:
        for name in options.torch_models.split(","):
            words = {"name": name, "policy": TORCH_MODELS[name], "factor": options.factor}
            words["equal_bytes"] = options.equal_bytes
            words["bits"] = not options.equal_bytes and name not in options.no_bits.split(",")
            variables = {"KERAS_BACKEND": "torch", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            yield "gpu_models_torch_case.py", "torch", words, variables


def run(options: Any) -> int:
    """Runs everything side by side."""
    options.out.mkdir(parents=True, exist_ok=True)
    todo = list(jobs(options))
    shared = turns.variables(options.out / "turns", len(todo), options.patience)
    lock, started = threading.Lock(), time.perf_counter()

    def one(job: Any) -> None:
        script, framework, words, variables = job
        known = {"framework": framework, "name": words["name"]}
        known |= {"variant": words["variant"]} if "variant" in words else {}
        try:
            for row in printed_by(
                script, json.dumps(words), timeout_s=options.timeout, **(variables | shared)
            ):
                with lock:
                    row |= {"at_s": round(time.perf_counter() - started, 1)}
                    keep(known | row, options.out / "rows.jsonl")
        except Failed as error:
            with lock:
                keep(known | {"failed": str(error)}, options.out / "rows.jsonl")

    keep({"machine": _machine(), "date": time.strftime("%Y-%m-%d")}, options.out / "rows.jsonl")
    with ThreadPoolExecutor(len(todo)) as pool:
        list(pool.map(one, todo))
    return report(options.out, options.plans, options.check)


def _machine() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        name = " ".join(card.stdout.split())
    except (OSError, subprocess.SubprocessError):
        name = "no GPU"
    versions = (f"{p} {version_of(p)}" for p in ("jax", "torch", "keras"))
    return f"{name}; {', '.join(versions)}"


def report(out: Path, plans: Path | None, check: bool) -> int:
    """Writes the tables; returns the exit status."""
    rows = kept(out / "rows.jsonl")
    about = next((row for row in rows if "machine" in row), {})
    said = {
        (row["name"], f"{row['at']:g}"): row
        for row in (kept(plans / "made.jsonl") if plans else [])
        if row["status"] == "planned"
    }
    lines = ["# Models on a live GPU", "", f"{about.get('date')}: {about.get('machine')}", ""]
    lines += jax_table(rows, said) + torch_table(rows)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return failed(failures(rows, said), check)


def _by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (row["name"], row["variant"]): row
        for row in rows
        if row.get("framework") == "jax" and "step_ms" in row
    }


def jax_table(rows: list[dict[str, Any]], said: Any) -> list[str]:
    """Returns the table of JAX's models."""
    found = _by_case(rows)
    plain_said = {name: row["plain_mib"] for (name, _), row in said.items()}
    lines = ["## JAX", "", head(JAX_COLUMNS, 2)]
    for (name, variant), row in found.items():
        plain, told = found.get((name, "plain"), {}), said.get((name, variant), {})
        is_plan = "planned" in row
        deviceless = told.get("compiled_mib") if is_plan else plain_said.get(name)
        took = added_mib(row)
        losses = zip(plain.get("losses", []), row["losses"], strict=False)
        apart = [abs(a - b) for a, b in losses]
        cells = (
            f"{name}, {row['batch_size']}",
            f"plan at {variant}" if is_plan else variant,
            deviceless and f"{deviceless:.1f}",
            took and f"{took:.1f}",
            took and deviceless and f"{took / deviceless - 1:+.1%}",
            f"{row['peak_mib'] - row['resident_mib']:.1f}",
            f"{row['step_ms']:.1f}",
            plain and f"{row['step_ms'] / plain['step_ms']:.2f}",
            is_plan and f"{1 + row['overhead']:.2f}",
            apart and f"{largest(apart):.1e}",
        )
        lines.append(line_of(cell or "" for cell in cells))
    lines += [f"\n{row['name']}, {row['variant']}: {row['failed']}"
              for row in rows if "failed" in row and row["framework"] == "jax"]  # fmt: skip
    return [*lines, ""]


def added_mib(row: dict[str, Any]) -> float | None:
    """What a step takes above its state and batch, by the analysis of the program that ran."""
    if "planned" in row:
        planned = row["planned"]
        took = planned["measured"] and planned["measured"] - row["resident_mib"]
        return took if took is None else float(took)
    return row.get("own_analysis_mib")


def torch_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the tables of PyTorch's models."""
    of = [row for row in rows if row.get("framework") == "torch"]
    bits = [row for row in of if row.get("step") == "bits"]
    lines = ["## PyTorch", "", head(("model", "fit", "losses", "weights", "largest difference"), 2)]
    for row in bits:
        for which in ("again", "planned"):
            lines.append(
                line_of(
                    (
                        f"{row['name']}, {row['policy']}",
                        which,
                        "equal" if row[which]["losses_equal"] else "differ",
                        "equal" if row[which]["weights_equal"] else "differ",
                        f"{row[which]['largest']:.1e}",
                    )
                )
            )
    lines += ["", head(
        ("model", "step", "predicted MiB", "allocated MiB", "off", "reserved MiB", "ms",
         "time of Keras"), 2,
    )]  # fmt: skip
    keras_ms = {row["name"]: row["ms"] for row in of if row.get("step") == "Keras"}
    for row in of:
        if "step" in row and "ms" in row:
            predicted, own = row.get("predicted_mib"), keras_ms.get(row["name"])
            lines.append(
                line_of(
                    (
                        f"{row['name']}, {row['policy']}",
                        row["step"],
                        f"{predicted:.1f}" if predicted else "",
                        f"{row['allocated_mib']:.1f}",
                        f"{row['allocated_mib'] / predicted - 1:+.1%}" if predicted else "",
                        f"{row['reserved_mib']:.0f}",
                        f"{row['ms']:.1f}",
                        f"{row['ms'] / own:.2f}" if own else "",
                    )
                )
            )
    lines += peers_table(of)
    for row in of:
        if "failed" in row or "refused" in row:
            step = row.get("step") or row.get("peer", "")
            said = row["failed"] if "failed" in row else f"{step}: {row['refused']}"
            lines.append(f"\n{row['name']}: {said}")
    return lines


def peers_table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table of plans for the bytes of peers, where there are any."""
    lines = [
        line_of(
            (
                row["name"],
                row["peer"],
                *(f"{row[key]:.1f}" for key in ("peer_mib", "mib", "peer_ms", "ms")),
                f"{row['ms'] / row['peer_ms']:.2f}",
            )
        )
        for row in rows
        if "peer_ms" in row
    ]
    columns = ("model", "peer", "its MiB", "plan's MiB", "its ms", "plan's ms", "plan's share")
    return ["", head(columns, 2), *lines] if lines else []


def failures(rows: list[dict[str, Any]], said: Any) -> list[str]:
    """Returns what falls short, a sentence each."""
    found = [f"{row['name']}: {row['failed']}" for row in rows if "failed" in row]
    for (name, variant), row in _by_case(rows).items():
        limit = said.get((name, variant), {}).get("limit_mib")
        took = added_mib(row)
        if limit and took and took > limit:
            found.append(f"{name} at {variant}: {took:.1f} of {limit:.1f} MiB")
    for row in rows:
        if row.get("framework") != "torch":
            continue
        predicted, took = row.get("predicted_mib"), row.get("allocated_mib")
        if predicted and took and abs(took / predicted - 1) > WORST_ERROR:
            found.append(f"{row['name']}, {row['step']}: off by {took / predicted - 1:+.1%}")
        if row.get("ms", 0) > row.get("peer_ms", math.inf):
            found.append(f"{row['name']}: slower than {row['peer']} at its bytes")
        is_told = row.get("step") == "bits" and row["again"]["weights_equal"]
        if is_told and not row["planned"]["weights_equal"]:
            found.append(f"{row['name']}: weights differ by {row['planned']['largest']:.1e}")
    return found


def main() -> int:
    """Makes plans, runs, or writes the report of what ran."""
    options = parser().parse_args()
    if options.read:
        return report(options.read, options.plans, options.check)
    return made(options) if options.make else run(options)


if __name__ == "__main__":
    sys.exit(main())
