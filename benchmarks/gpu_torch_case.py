"""One part of the GPU benchmark on PyTorch, in a process of its own:
``python gpu_torch_case.py OPTIONS.json``; see :mod:`gpu`.

Predicted bytes are compared with those that the caching allocator handed out at their most
(allocated) and took from the driver (reserved).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import keras
import numpy as np
import torch
from gpu_case import BATCH, Answer, build, main, mib, samples

import keras_remat
from keras_remat import doctor
from keras_remat.backends.base import load_backend, preserved_state
from keras_remat.errors import RematError

#: Of what store-all adds to the resident bytes.
SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15)
#: Timed calls of a step, after two that are not.
CALLS = 3
#: Of what the plain step needs: the card that it does not fit.
SMALL_CARD = 0.7
_EPOCHS, _TEXT = 2, 300
#: Losses, and weights afterwards.
Fitted = tuple[list[float], list[np.ndarray]]


def on_gpu() -> bool:
    """Returns whether Keras trains on a GPU."""
    return torch.cuda.is_available()


def reserved_bytes() -> int:
    """Returns the most that the allocator took from the driver; 0 on a CPU."""
    return int(torch.cuda.max_memory_reserved()) if on_gpu() else 0


def timed(backend: Any, step: Any, batch: Any) -> tuple[float, int, int]:
    """Returns seconds, allocated and reserved peak of a step that has run before."""
    used = []
    for call in range(2 + CALLS):
        if call == 2 and on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        used.append(backend.measure(lambda: step(batch))[1])
    settled = used[2:]
    return median(u.time_s for u in settled), max(u.peak_bytes for u in settled), reserved_bytes()


def profiled(backend: Any, traced: Any, batch: Any) -> keras_remat.Problem:
    """Returns a problem with the profile of three steps that keep everything; what is resident is
    what is in use after a first one, which leaves what libraries keep."""
    estimated = backend.estimated_profile(traced, backend.device.in_use_bytes())
    problem = keras_remat.Problem(traced.graph, estimated)
    store_all = keras_remat.Schedule.store_all(traced.graph)
    step, recorder = backend.lower(traced, problem, store_all), backend.recorder()
    step(batch)
    resident = backend.device.in_use_bytes()
    if not recorder.start():
        raise RuntimeError("another profiler session is running")
    for _ in range(3):
        backend.measure(lambda: step(batch))
    profile = recorder.stop(step, resident)
    if profile is None:
        raise RuntimeError("no step was recorded")
    return keras_remat.Problem(traced.graph, profile)


def environment(options: dict[str, Any], answer: Answer) -> None:
    """What there is."""
    answer.fact(**{name: fact for name, fact in doctor.diagnosis().items() if name != "missing"})
    if on_gpu():
        answer.fact(
            card=torch.cuda.get_device_name(),
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            free_and_total=torch.cuda.mem_get_info(),
        )


def compared_bits(
    fitted: Callable[..., Fitted], margin: float
) -> tuple[keras_remat.RematAutotune, dict[str, dict[str, Any]]]:
    """Compares losses and weights of plain ``fit`` with those of it once more, and of a plan for
    0.6 of its bytes, under PyTorch's deterministic kernels.

    Args:
        fitted: trains with these callbacks.
        margin: of the plan's.

    Returns:
        The plan's callback, and what is said of both fits.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    watch = keras_remat.RematAutotune(batch_size="keep", verbose=0)
    plain = fitted(watch)
    limit = int(0.6 * watch.report.baseline.peak_bytes)
    remat = keras_remat.RematAutotune(limit, "keep", solver="greedy", margin=margin, verbose=0)
    told = {}
    for name, (losses, weights) in (("again", fitted()), ("planned", fitted(remat))):
        pairs = list(zip(plain[1], weights, strict=True))
        told[name] = {
            "losses_equal": losses == plain[0],
            "weights_equal": all(np.array_equal(a, b) for a, b in pairs),
            "largest": max(float(np.abs(a - b).max()) for a, b in pairs),
        }
    torch.use_deterministic_algorithms(False)
    return remat, told


def bits(options: dict[str, Any], answer: Answer) -> None:
    """Losses and weights of plain ``fit``, of it once more, and of a plan for 0.6 of its bytes."""
    torch.backends.cudnn.benchmark = False

    def fitted(*callbacks: Any) -> Fitted:
        model = build(options, jit=False)
        x, y = samples(options, 3 * BATCH)
        torch.manual_seed(1)
        history = model.fit(
            x, y, batch_size=BATCH, epochs=_EPOCHS, verbose=0, shuffle=False, callbacks=callbacks
        ).history
        return history["loss"], [np.asarray(w.numpy()) for w in model.weights]

    remat, told = compared_bits(fitted, margin=0.05)
    for name, row in told.items():
        answer.row(fit=name, **row)
    answer.fact(limit_mib=mib(remat.report.limit_bytes), plan=str(remat.plan))
    answer.fact(events=[event.message for event in remat.report.events])


def memory(options: dict[str, Any], answer: Answer) -> None:
    """Predicted against allocated and reserved bytes, and the time of a step, at six budgets."""
    model, backend = build(options, jit=False), load_backend()
    backend.check(model)
    batch = backend.example_batch(model, samples(options, BATCH))
    traced = backend.trace(model, batch)
    resident = backend.device.in_use_bytes()
    problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced, resident))
    store_all = keras_remat.Schedule.store_all(traced.graph)
    with preserved_state(backend, model):
        model.make_train_function()
        model.train()
        device = backend.device  # it watches what it runs
        plain = timed(
            backend,
            lambda given: device.run("plain", given, lambda b: model.train_function([b])),
            batch,
        )
        predicted = traced.plain_peak_bytes(problem, backend.memory)
        answer.row(**_row("plain", predicted, plain, 0))
        problem = profiled(backend, traced, batch)
        resident = problem.profile.resident_bytes
        most = keras_remat.simulate(problem, store_all).peak_bytes - resident
        for share in SHARES:
            try:
                budget = problem.with_budget(resident + int(share * most))
                solution = keras_remat.solve(budget, solver="greedy", time_limit_s=15)
            except RematError as error:
                answer.row(step=f"{share:.2f}", refused=str(error)[:_TEXT])
                continue
            run = backend.lower(traced, problem, solution.schedule)
            again = len(solution.schedule) - len(traced.graph.needed)
            predicted = backend.memory.peak_bytes(problem, solution.schedule)
            answer.row(**_row(f"{share:.2f}", predicted, timed(backend, run, batch), again))


def _row(name: str, predicted: int, measured: tuple[float, int, int], again: int) -> dict[str, Any]:
    seconds, allocated, reserved = measured
    return {
        "step": name,
        "recomputed": again,
        "predicted_mib": mib(predicted),
        "allocated_mib": mib(allocated),
        "off": allocated / predicted - 1,
        "reserved_mib": mib(reserved),
        "ms": 1e3 * seconds,
    }


def out_of_memory(options: dict[str, Any], answer: Answer) -> None:
    """A card on which Keras's own step dies, and a plan trains."""
    if not on_gpu():
        answer.skipped("a CPU is not capped")
        return
    x, y = samples(options, 4 * BATCH)
    watch = keras_remat.RematAutotune(batch_size="keep", solver="greedy", verbose=0)
    build(options, jit=False).fit(x, y, batch_size=BATCH, verbose=0, callbacks=[watch])
    peak, (_, total) = watch.report.baseline.peak_bytes, torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(SMALL_CARD * peak / total)
    answer.fact(plain_mib=mib(peak), card_mib=mib(SMALL_CARD * peak))
    try:
        build(options, jit=False).fit(x, y, batch_size=BATCH, verbose=0)
        answer.row(fit="plain", came="trained")
    except torch.OutOfMemoryError as error:
        answer.row(fit="plain", came=f"{type(error).__name__}: {str(error)[:_TEXT]}")
    torch.cuda.empty_cache()
    remat = keras_remat.RematAutotune(batch_size="keep", solver="greedy", verbose=0)
    started = time.perf_counter()
    history = build(options, jit=False).fit(
        x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[remat]
    )
    answer.row(fit="planned", came=f"trained in {time.perf_counter() - started:.1f} s")
    answer.fact(plan=str(remat.plan), losses=history.history["loss"])
    answer.fact(events=[event.message for event in remat.report.events])


def largest(options: dict[str, Any], answer: Answer) -> None:
    """The largest batch under the cap, plain and planned, which is then trained."""
    limit = options["memory_bytes"]
    model = build(options, jit=False)
    started = time.perf_counter()
    found = keras_remat.find_max_batch_size(model, samples(options, BATCH), limit)
    answer.fact(search=str(found), seconds=time.perf_counter() - started)
    size = found.max_batch_size
    remat = keras_remat.RematAutotune(limit, "keep", solver="greedy", verbose=0)
    x, y = samples(options, 4 * size)
    losses = build(options, jit=False).fit(
        x, y, batch_size=size, epochs=2, verbose=0, callbacks=[remat]
    )
    answer.fact(plan=str(remat.plan), losses=losses.history["loss"])
    answer.fact(events=[event.message for event in remat.report.events])


if __name__ == "__main__":
    assert keras.backend.backend() == "torch"
    sys.exit(main(sys.argv[1], (environment, bits, memory, out_of_memory, largest)))
