"""One model of ``gpu_models.py`` on PyTorch: ``python gpu_models_torch_case.py WORDS`` (JSON).

Bits are compared with Keras's own ``fit`` under PyTorch's deterministic kernels. Bytes are the
allocator's, above what is resident; plans, Keras's own step and peers are timed one after the
other, in this process's turn. With ``equal_bytes`` each peer is measured instead beside a plan for
the bytes that it takes, step by step in turns; on a CPU in the seconds of all threads, which other
processes lengthen less.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import cards_case
import keras
import torch
import turns
from gpu_models_case import batch_of
from gpu_torch_case import Fitted, compared_bits, profiled
from model_parts import parts
from rows import MIB

import keras_remat
from keras_remat.backends.base import load_backend, preserved_state
from keras_remat.errors import RematError

#: Of what store-all adds to the resident bytes.
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
CALLS, TURNS = 10, 5
#: Layers that a part has at least which ``torch.utils.checkpoint`` runs: half a block of the
#: transformers, and a block.
PART_LAYERS = (4, 8)
#: Seconds that a plan for a peer's bytes is looked for.
SOLVE_S = 10.0


def built(name: str, factor: float, scope: Any = None) -> tuple[Any, Any]:
    """Returns a compiled model and a batch."""
    keras.utils.set_random_seed(0)
    with scope or nullcontext():
        model, size = cards_case.compiled_model(name)
    return model, batch_of(model, cards_case.MODELS[name][1], int(factor * size))


class Part(keras.layers.Layer):
    """A part of a model that runs in training, also where it is called once more in the backward
    phase, outside of the model's call.

    Args:
        function: the part.
    """

    def __init__(self, function: keras.Function):
        super().__init__(autocast=False)
        self.function = function
        self.built = True

    def call(self, values: Any, training: Any = None) -> Any:
        return keras.tree.flatten(self.function(values))


def checkpointed(model: Any, least: int) -> None:
    """Has the parts of a functional model run under ``torch.utils.checkpoint``."""
    from torch.utils.checkpoint import checkpoint

    pieces = [Part(function) for function, _ in parts(model, least)]

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        made = dict(zip(map(id, model.inputs), keras.tree.flatten(inputs), strict=True))
        for part in pieces:
            given = [made[id(x)] for x in keras.tree.flatten(part.function.inputs)]
            results = checkpoint(
                lambda *values, part=part: part(list(values), training=True),
                *given,
                use_reentrant=False,
            )
            outputs = keras.tree.flatten(part.function.outputs)
            made.update(zip(map(id, outputs), results, strict=True))
        outputs = [made[id(x)] for x in model.outputs]
        return outputs if len(outputs) > 1 else outputs[0]

    model.call = call


def peers() -> Iterator[tuple[str, Any, Callable[[Any], None] | None]]:
    """Yields peers: what each is called, the scope in which a model is built, and what is done to
    it then."""
    yield "keras.RematScope", keras.RematScope(mode="full"), None
    for least in PART_LAYERS:
        yield (
            f"torch checkpoint, parts of {least}",
            None,
            lambda model, least=least: checkpointed(model, least),
        )


def bits(name: str, factor: float) -> dict[str, Any]:
    """Losses and weights of plain ``fit``, of it once more, and of a plan."""

    def fitted(*callbacks: Any) -> Fitted:
        model, (x, y) = built(name, factor)
        size = len(x) // 2
        history = model.fit(
            x, y, batch_size=size, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks)
        ).history
        return history["loss"], [keras.ops.convert_to_numpy(w) for w in model.weights]

    remat, told = compared_bits(fitted, margin=0.0)
    return told | {"plan": None if remat.plan is None else str(remat.plan)}


def measured(device: Any, run: Callable[[], Any], resident: int) -> dict[str, Any]:
    """Returns what a step takes that has run before."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    used = [device.measure(run)[1] for _ in range(CALLS)][2:]
    return {
        "allocated_mib": (max(usage.peak_bytes for usage in used) - resident) / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
        "ms": 1e3 * median(usage.time_s for usage in used),
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
    prepared: list[tuple[dict[str, Any], Callable[[], Any]]] = []
    with preserved_state(backend, model):
        problem = profiled(backend, traced, batch)
        resident = problem.profile.resident_bytes
        store_all = keras_remat.Schedule.store_all(traced.graph)
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
            }  # fmt: skip
            prepared.append((told, lambda run=run: run(batch)))
        plain = traced.plain_peak_bytes(problem, backend.memory) - resident
        with turns.alone(f"torch-{name}"):
            for told, call in prepared:
                yield told | measured(backend.device, call, resident)
            prepared.clear()
            call = keras_step(model, arrays)
            call()
            found = measured(backend.device, call, resident)
            told = {"step": "Keras", "predicted_mib": plain / MIB}
            yield told | found
            del call, model
            yield from _peers(name, factor, backend)


def _peers(name: str, factor: float, backend: Any) -> Any:
    for which, scope, change in peers():
        try:
            call, model, _ = peer_step(name, factor, scope, change)
            for v in model.trainable_variables:
                v.value.grad = None
            resident = backend.device.in_use_bytes()
            yield {"step": which} | measured(backend.device, call, resident)
        except Exception as error:  # whatever a peer raises is its row
            yield {"step": which, "refused": f"{type(error).__name__}: {error}"[:200]}


def peer_step(
    name: str, factor: float, scope: Any, change: Callable[[Any], None] | None
) -> tuple[Callable[[], Any], Any, Any]:
    """Returns a peer's step, which has run once, its model, and what tells its bytes."""
    model, arrays = built(name, factor, scope)
    backend = load_backend()
    backend.check(model)
    batch = backend.example_batch(model, arrays)
    if change is not None:
        change(model)
    model.make_train_function()

    def call() -> Any:
        return backend.device.run(("plain",), batch, lambda given: model.train_function([given]))

    call()
    return call, model, backend


def equal_bytes(name: str, factor: float) -> Any:
    """Yields for every peer what it takes, and what a plan for as many bytes takes."""
    model, arrays = built(name, factor)
    ours = load_backend()
    ours.check(model)
    batch = ours.example_batch(model, arrays)
    traced = ours.trace(model, batch)
    with preserved_state(ours, model):
        problem = profiled(ours, traced, batch)
        resident = problem.profile.resident_bytes
        for which, scope, change in (("Keras", None, None), *peers()):
            row: dict[str, Any] = {"peer": which}
            try:
                call, other, backend = peer_step(name, factor, scope, change)
                added = max(added_bytes(backend.device, other, call) for _ in range(2))
                row["peer_mib"] = added / MIB
                limited = problem.with_budget(resident + added)
                solution = keras_remat.solve(limited, solver="auto", time_limit_s=SOLVE_S)
            except Exception as error:  # whatever a peer raises is its row
                yield row | {"refused": f"{type(error).__name__}: {error}"[:200]}
                continue
            run = ours.lower(traced, problem, solution.schedule)
            took = max(added_bytes(ours.device, model, lambda run=run: run(batch)) for _ in "12")
            predicted = ours.memory.peak_bytes(problem, solution.schedule) - resident
            row |= {"mib": took / MIB, "predicted_mib": predicted / MIB}
            yield row | in_turns(call, lambda run=run: run(batch))
            del call, other, run


def added_bytes(device: Any, model: Any, call: Callable[[], Any]) -> int:
    """Returns what a step adds to what is in use without gradients of the step before."""
    left = (v.value.grad for v in model.trainable_variables)
    resident = device.in_use_bytes() - sum(g.nbytes for g in left if g is not None)
    return int(device.measure(call)[1].peak_bytes) - resident


def in_turns(peer: Callable[[], Any], ours: Callable[[], Any]) -> dict[str, float]:
    """Returns milliseconds of two steps that take turns: of the clock on a GPU, of all threads on a
    CPU."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    spans: dict[str, list[float]] = {"peer_ms": [], "ms": []}
    for _ in range(TURNS):
        for key, call in (("peer_ms", peer), ("ms", ours)):
            started = clock()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spans[key].append(1e3 * (clock() - started))
    return {key: median(each) for key, each in spans.items()}


def main() -> None:
    """Prints a JSON object for every row."""
    words = json.loads(sys.argv[1])
    name, policy = words["name"], words["policy"]
    keras.config.set_dtype_policy(policy)
    known = {"name": name, "policy": policy}
    try:
        if words["bits"]:
            print(json.dumps(known | {"step": "bits"} | bits(name, words["factor"])), flush=True)
        found = equal_bytes if words["equal_bytes"] else steps
        for row in found(name, words["factor"]):
            print(json.dumps(known | row), flush=True)
    finally:  # whatever happened, nobody waits for this process
        turns.ready(f"torch-{name}")


if __name__ == "__main__":
    main()
