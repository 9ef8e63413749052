"""One model of ``gpu_models.py`` on PyTorch: ``python gpu_models_torch_case.py WORDS`` (JSON).

Bits are compared with Keras's own ``fit`` under PyTorch's deterministic kernels. Bytes are the
caching allocator's, above what is resident; plans, Keras's own step and peers are timed one after
the other, in this process's turn.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import cards_case
import keras
import numpy as np
import torch
import turns
from gpu_models_case import batch_of
from model_parts import parts
from rows import MIB

import keras_remat
from keras_remat.backends.base import load_backend, preserved_state
from keras_remat.errors import RematError

#: Of what store-all adds to the resident bytes.
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
CALLS, PART_LAYERS = 10, 4


def built(name: str, factor: float, scope: Any = None) -> tuple[Any, Any]:
    """Returns a compiled model and a batch."""
    keras.utils.set_random_seed(0)
    with scope or nullcontext():
        model, size = cards_case.compiled_model(name)
    return model, batch_of(model, cards_case.MODELS[name][1], int(factor * size))


def checkpointed(model: Any) -> None:
    """Has the parts of a functional model run under ``torch.utils.checkpoint``."""
    from torch.utils.checkpoint import checkpoint

    pieces = parts(model, PART_LAYERS)

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = dict(zip(map(id, model.inputs), keras.tree.flatten(inputs), strict=True))
        for function, _ in pieces:
            given = [made[id(x)] for x in keras.tree.flatten(function.inputs)]
            results = checkpoint(
                lambda *values, function=function: keras.tree.flatten(function(list(values))),
                *given,
                use_reentrant=False,
            )
            made.update(zip(map(id, keras.tree.flatten(function.outputs)), results, strict=True))
        outputs = [made[id(x)] for x in model.outputs]
        return outputs if len(outputs) > 1 else outputs[0]

    model.call = call


def bits(name: str, factor: float) -> dict[str, Any]:
    """Losses and weights of plain ``fit``, of it once more, and of a plan."""
    torch.use_deterministic_algorithms(True, warn_only=True)

    def fitted(*callbacks: Any) -> tuple[list[float], list[np.ndarray]]:
        model, (x, y) = built(name, factor)
        size = len(x) // 2
        history = model.fit(
            x, y, batch_size=size, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks)
        ).history
        return history["loss"], [keras.ops.convert_to_numpy(w) for w in model.weights]

    watch = keras_remat.RematAutotune(batch_size="keep", verbose=0)
    plain = fitted(watch)
    limit = int(0.6 * watch.report.baseline.peak_bytes)
    remat = keras_remat.RematAutotune(limit, "keep", solver="greedy", margin=0.0, verbose=0)
    row: dict[str, Any] = {}
    for which, (losses, weights) in (("again", fitted()), ("planned", fitted(remat))):
        row[which] = {
            "losses_equal": losses == plain[0],
            "weights_equal": all(map(np.array_equal, plain[1], weights)),
            "largest": max(
                float(np.abs(a - b).max()) for a, b in zip(plain[1], weights, strict=True)
            ),
        }
    row["plan"] = None if remat.plan is None else str(remat.plan)
    torch.use_deterministic_algorithms(False)
    return row


def measured(device: Any, run: Callable[[], Any], resident: int) -> dict[str, Any]:
    """Returns what a step takes that has run before."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    used = [device.measure(run)[1] for _ in range(CALLS)][2:]
    return {
        "allocated_mib": (max(usage.peak_bytes for usage in used) - resident) / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
        "ms": 1e3 * median(usage.time_s for usage in used),
        "ms_least": 1e3 * min(usage.time_s for usage in used),
    }


def keras_step(model: Any, batch: Any) -> Callable[[], Any]:
    """Returns Keras's own train step on a batch."""
    model.make_train_function()
    return lambda: model.train_function([batch])


def steps(name: str, factor: float) -> Any:
    """Yields what plans, Keras's own step and peers take."""
    gc.collect()  # the models of the fits before are in reference cycles
    model, arrays = built(name, factor)
    backend = load_backend()
    backend.check(model)
    batch = backend.example_batch(model, arrays)
    traced = backend.trace(model, batch)
    before = backend.device.in_use_bytes()
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced, before))
    prepared: list[tuple[dict[str, Any], Callable[[], Any]]] = []
    with preserved_state(backend, model):
        store_all = keras_remat.Schedule.store_all(traced.graph)
        step, recorder = backend.lower(traced, problem, store_all), backend.recorder()
        step(batch)
        resident = backend.device.in_use_bytes()
        if recorder.start():
            for _ in range(3):
                backend.measure(lambda: step(batch))
            profile = recorder.stop(step, resident)
            problem = problem if profile is None else keras_remat.Problem(traced.graph, profile)
        most = keras_remat.simulate(problem, store_all).peak_bytes - resident
        for share in SHARES:
            try:
                limited = problem.with_budget(resident + int(share * most))
                solution = keras_remat.solve(limited, solver="greedy", time_limit_s=15)
            except RematError as error:
                yield {"step": f"{share:g}", "refused": str(error)[:200]}
                continue
            run = backend.lower(traced, problem, solution.schedule)
            run(batch)
            told = {
                "step": f"{share:g}",
                "recomputed": len(solution.schedule) - len(traced.graph.needed),
                "predicted_mib": (
                    backend.memory.peak_bytes(problem, solution.schedule) - resident
                ) / MIB,
                "predicted_ms": 1e3 * keras_remat.simulate(problem, solution.schedule).time_s,
            }  # fmt: skip
            prepared.append((told, lambda run=run: run(batch)))
        plain = traced.plain_peak_bytes(problem, backend.memory) - resident
        yield {"resident_before_mib": before / MIB, "resident_mib": resident / MIB}
        with turns.alone(f"torch-{name}"):
            for told, call in prepared:
                yield told | measured(backend.device, call, resident)
            prepared.clear()
            call = keras_step(model, arrays)
            call()
            grads = sum(v.value.grad.nbytes for v in model.trainable_variables
                        if v.value.grad is not None)  # fmt: skip
            now = backend.device.in_use_bytes() - grads
            found = measured(backend.device, call, resident)
            told = {"step": "Keras", "predicted_mib": plain / MIB, "resident_now_mib": now / MIB}
            yield told | found
            del call, model
            yield from _peers(name, factor, backend)


def _peers(name: str, factor: float, backend: Any) -> Any:
    for which, scope, change in (
        ("keras.RematScope", keras.RematScope(mode="full"), None),
        ("torch checkpoint", None, checkpointed),
    ):
        try:
            model, arrays = built(name, factor, scope)
            if change is not None:
                change(model)
            call = keras_step(model, arrays)
            call()
            for v in model.trainable_variables:
                v.value.grad = None
            resident = backend.device.in_use_bytes()
            yield {"step": which} | measured(backend.device, call, resident)
        except Exception as error:  # whatever a peer raises is its row
            yield {"step": which, "refused": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Prints a JSON object for every row."""
    words = json.loads(sys.argv[1])
    name, policy = words["name"], words["policy"]
    keras.config.set_dtype_policy(policy)
    known = {"name": name, "policy": policy}
    try:
        if words["bits"]:
            print(json.dumps(known | {"step": "bits"} | bits(name, words["factor"])), flush=True)
        for row in steps(name, words["factor"]):
            print(json.dumps(known | row), flush=True)
    finally:  # whatever happened, nobody waits for this process
        turns.ready(f"torch-{name}")


if __name__ == "__main__":
    main()
