"""All that can only be seen on a GPU, in one command of less than 20 minutes.

    python benchmarks/gpu.py --out DIR [--jax-only | --torch-only] [--memory 6GiB]

With ``--torch-only`` it takes less than nine minutes. Every part (:mod:`gpu_case`, on PyTorch
:mod:`gpu_torch_case`) is a process of its own with a time limit, and ``DIR/result.json`` and
``DIR/report.md`` are written after each, so that what was found survives what breaks. Memory is
capped, so that every card meets a real out-of-memory soon. A part that fails, or cannot run here,
is a row that says so.

``--stand-in`` runs the same parts on a CPU with small models: TensorFlow's own BFC allocator over
host memory stands for the card's. What it finds says that the parts work, and nothing of a GPU; the
report says on what it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rows import HERE, MIB, command_line, head, line_of, variables

#: What the stand-in's card has, and how many times the seconds its parts get.
STAND_IN_MIB, STAND_IN_SLOWNESS = 512, 3


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        name: in tables, and with ``--parts``.
        backend: of Keras.
        case: the function of :mod:`gpu_case` or :mod:`gpu_torch_case`.
        limit_s: seconds it gets.
        options: its own arguments.
    """

    name: str
    backend: str
    case: str
    limit_s: float
    options: tuple[tuple[str, Any], ...] = ()


PARTS = (
    Part("JAX: environment", "jax", "environment", 60),
    Part("JAX: compile seconds", "jax", "compile_seconds", 120),
    Part("JAX: memory, plain", "jax", "analysis", 90, (("share", 1.0),)),
    Part("JAX: memory, 0.5", "jax", "analysis", 90, (("share", 0.5),)),
    Part("JAX: out of memory", "jax", "out_of_memory", 90),
    Part("JAX: steps", "jax", "steps", 150, (("jit", True),)),
    Part("JAX: the promise", "jax", "promise", 240),
    Part("JAX: no argument", "jax", "untouched", 150),
    Part("PyTorch: environment", "torch", "environment", 40),
    Part("PyTorch: bits", "torch", "bits", 100),
    Part("PyTorch: memory", "torch", "memory", 120),
    Part("PyTorch: memory, expandable", "torch", "memory", 90, (("expandable", True),)),
    Part("PyTorch: out of memory", "torch", "out_of_memory", 80),
    Part("PyTorch: largest batch", "torch", "largest", 100),
    Part("TensorFlow: environment", "tensorflow", "environment", 60),
    Part("TensorFlow: allocator", "tensorflow", "allocator", 60),
    Part("TensorFlow: out of memory", "tensorflow", "out_of_memory", 150),
    Part("TensorFlow: ordered steps", "tensorflow", "steps", 180, (("jit", False),)),
    Part("TensorFlow: compiled steps", "tensorflow", "steps", 180, (("jit", True),)),
    Part("TensorFlow: the promise", "tensorflow", "promise", 300),
    Part("TensorFlow: no argument", "tensorflow", "untouched", 200),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_line(__doc__)
    result.add_argument("--out", type=Path, required=True, metavar="DIR")
    only = result.add_mutually_exclusive_group()
    only.add_argument("--jax-only", action="store_true", help="no other framework")
    only.add_argument("--torch-only", action="store_true", help="no other framework")
    result.add_argument("--memory", default="6GiB", help="of the card that is used (default 6GiB)")
    result.add_argument("--stand-in", action="store_true", help="on a CPU, with small models")
    result.add_argument("--parts", default="", metavar="TEXT", help="those whose name contains it")
    return result


def chosen(arguments: argparse.Namespace) -> list[Part]:
    """The parts that were asked for, in order."""
    return [
        part
        for part in PARTS
        if arguments.parts in part.name
        and not (arguments.jax_only and part.backend != "jax")
        and not (arguments.torch_only and part.backend != "torch")
    ]


def environment(part: Part, memory_bytes: int, stand_in: bool) -> dict[str, str]:
    """The variables a part runs under; its memory is capped by them where that can be done so."""
    result = variables(KERAS_BACKEND=part.backend)
    if stand_in:
        return result | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(memory_bytes // MIB),
        }
    if dict(part.options).get("expandable"):
        result |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    card = card_bytes()
    if part.backend == "jax" and card:
        share = min(0.9, memory_bytes / card)
        result |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}"}
    return result


def card_bytes() -> int:
    """What the first NVIDIA GPU has; 0 where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(told.stdout.split()[0]) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def run_part(part: Part, options: dict[str, Any], out: Path) -> dict[str, Any]:
    """Runs one part; what it found, or why not, with how long it took.

    A part adds to its answer as it goes, so what it found before its time was up counts.
    """
    slug = part.name.replace(":", "").replace(",", "").replace(" ", "-").lower()
    request, answer = out / f"{slug}.options.json", out / f"{slug}.answer.json"
    answer.unlink(missing_ok=True)
    script = "gpu_torch_case.py" if part.backend == "torch" else "gpu_case.py"
    own = {"case": part.case, "answer": str(answer), "folder": str(out / slug)}
    request.write_text(json.dumps(options | dict(part.options) | own))
    limit_s = part.limit_s * (STAND_IN_SLOWNESS if options["stand_in"] else 1)
    started, status = time.perf_counter(), "done"
    with (out / f"{slug}.log").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, str(HERE / script), str(request)],
                env=environment(part, options["memory_bytes"], options["stand_in"]),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
            status = "done" if code == 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
    found = json.loads(answer.read_text()) if answer.exists() else {}
    request.unlink()
    answer.unlink(missing_ok=True)
    return {
        "part": part.name,
        "status": found.pop("skipped", status),
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }


def machine() -> str:
    """What this ran on, in one line."""
    names = ("tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib", "torch", "keras-remat")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    return (
        f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}"
    )


def report(result: dict[str, Any]) -> str:
    """The result as Markdown: one table per part."""
    where = "a CPU standing in for a GPU" if result["stand_in"] else "what is named below"
    lines = [
        "# What a GPU showed",
        "",
        f"{result['date']}, run on {where}: {result['machine']}. Memory capped at "
        f"{result['memory_bytes'] / MIB:.0f} MiB.",
    ]
    if result["stand_in"]:
        lines += ["", "**No GPU took part. Nothing here says anything about one.**"]
    for part in result["parts"]:
        lines += ["", f"## {part['part']}", "", f"{part['status']}, {part['seconds']} s"]
        facts = part.get("facts", {})
        lines += [""] * bool(facts) + [f"- {name}: {_shown(fact)}" for name, fact in facts.items()]
        rows = part.get("rows", [])
        if rows:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            lines += ["", head(columns)]
            lines += [line_of(_shown(row.get(name, "")) for name in columns) for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Runs the parts; the status is 1 where one did not get to its end."""
    arguments = parser().parse_args()
    from keras_remat.units import parse_bytes

    memory = STAND_IN_MIB * MIB if arguments.stand_in else parse_bytes(arguments.memory)
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = {"memory_bytes": memory, "stand_in": arguments.stand_in}
    result = options | {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "parts": [],
    }
    for part in chosen(arguments):
        found = run_part(part, options, arguments.out.resolve())
        result["parts"].append(found)
        (arguments.out / "result.json").write_text(json.dumps(result, indent=1))
        (arguments.out / "report.md").write_text(report(result))
        print(f"{part.name}: {found['status']}, {found['seconds']} s", flush=True)
    return int(any(part["status"].startswith(("ended", "stopped")) for part in result["parts"]))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
