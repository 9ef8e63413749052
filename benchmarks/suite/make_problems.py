"""Traces the networks of RematBench and writes their problem files and the index.

    python -m benchmarks.suite.make_problems [NETWORK ...]

Every file is a problem file of :mod:`keras_remat.core.serialize` without names, compressed. The
train step is traced on TensorFlow as ``fit`` would run it, on the CPU and without oneDNN, so that
the machine does not matter; the release of TensorFlow and Keras does, and the index names both. Op
times are *estimated* from a cost model (floating-point operations or bytes moved at fixed rates,
whichever takes longer), so that files come out the same again. Resident bytes are weights, slots
and the batch.

Budgets lie between the floor, which no schedule beats, and the store-all peak, in ninths of the
way. The lowest may have no schedule.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROBLEMS, INDEX = HERE / "problems", HERE / "index.json"
BUDGETS = 8
DIGITS = 4
"""Significant digits of op times."""


def problem_of(name: str, batch_size: int, model: Any, batch: Any, backend: Any) -> Any:
    """Returns the traced problem of a network, without a budget."""
    from keras_remat.core.problem import Problem

    traced = backend.trace(model, backend.resized_spec(batch, batch_size))
    return Problem(traced.graph, backend.estimated_profile(traced), name=f"{name}_b{batch_size}")


def document_of(problem: Any) -> dict[str, Any]:
    """Returns the object of a problem file, without names and with rounded times."""
    from keras_remat.core.serialize import problem_to_dict

    document = problem_to_dict(problem)
    document["device"] = "cost model"
    document["values"] = [{"bytes": value["bytes"]} for value in document["values"]]
    for op in document["ops"]:
        del op["name"]
        op["time_s"] = float(f"{op['time_s']:.{DIGITS}g}")
        for empty in ("after", "may_reuse"):
            if not op[empty]:
                del op[empty]
    return document


def entry_of(document: dict[str, Any], text: bytes) -> dict[str, Any]:
    """Returns what the index says of a problem."""
    from keras_remat.core.schedule import Schedule
    from keras_remat.core.serialize import problem_from_dict
    from keras_remat.core.simulate import simulate

    problem = problem_from_dict(document)
    usage = simulate(problem, Schedule.store_all(problem.graph))
    room = usage.peak_bytes - problem.floor_bytes
    return {
        "ops": len(problem.graph.ops),
        "floor_bytes": problem.floor_bytes,
        "store_all_peak_bytes": usage.peak_bytes,
        "store_all_time_s": usage.time_s,
        "budgets_bytes": [
            problem.floor_bytes + room * k // (BUDGETS + 1) for k in range(BUDGETS, 0, -1)
        ],
        "sha256": hashlib.sha256(text).hexdigest(),
    }


def write(document: dict[str, Any], folder: Path) -> bytes:
    """Writes a problem file and returns its text before it was compressed."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    folder.mkdir(exist_ok=True)
    (folder / f"{document['name']}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))
    return text


def main() -> None:
    """Makes the problems of the networks named on the command line, or of all."""
    os.environ.update(
        KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="-1", TF_ENABLE_ONEDNN_OPTS="0"
    )
    import gc

    import keras
    import tensorflow as tf

    from benchmarks.suite.models import NETWORKS
    from keras_remat.backends.base import load_backend

    parser = argparse.ArgumentParser(description="Makes the problem files of RematBench.")
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    names = parser.parse_args().networks
    backend = load_backend()
    index: dict[str, Any] = json.loads(INDEX.read_text()) if INDEX.exists() else {"problems": {}}
    index["made_with"] = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    for name in names:
        gc.collect()  # the network before this one
        network = NETWORKS[name]
        model = network.build()
        batch = backend.example_batch(model, network.sample)
        for size in network.batch_sizes:
            document = document_of(problem_of(name, size, model, batch, backend))
            entry = entry_of(document, write(document, PROBLEMS))
            index["problems"][document["name"]] = entry
            print(document["name"], entry["ops"], "ops", flush=True)
            order = [f"{n}_b{b}" for n, net in NETWORKS.items() for b in net.batch_sizes]
            known = index["problems"]
            index["problems"] = {key: known[key] for key in order if key in known}
            INDEX.write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
