"""One process of ``gpu_models.py``: ``python gpu_models_case.py WORDS`` (JSON).

``make`` plans a model for a card that need not be there and saves the plans. ``run`` trains it on
the live card, plainly, with the parts of the model under ``jax.checkpoint``, or by a saved plan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import cards_case
import keras
import numpy as np
import turns
from rows import MIB
from watch import Repeated, statistics

import keras_remat
from keras_remat.backends.base import load_backends
from keras_remat.backends.xla.module_costs import costs
from keras_remat.cards.process import initialize_with_zeros
from keras_remat.cards.table import card
from keras_remat.core.problem import Problem

#: Steps before a turn, and those that are timed in it.
BEFORE, TIMED = 8, 20
#: Layers of a part under ``jax.checkpoint``, at least.
PART_LAYERS = 4


def make(name: str, card_name: str, shares: list[float], folder: str, factor: float) -> Any:
    """Yields what was planned for shares of what the plain step adds to the resident bytes."""
    initialize_with_zeros()
    model, batch_size = cards_case.compiled_model(name)
    batch_size = int(factor * batch_size)
    (backend,) = load_backends(model, "compiled", card(card_name))
    traced = backend.trace(model, backend.example_batch(model, batch_size))
    problem = Problem(traced.graph, backend.estimated_profile(traced), name=name)
    resident = problem.profile.resident_bytes
    plain = cards_case.added_bytes_of(traced)(problem, None)
    known = {"name": name, "card": card_name, "batch_size": batch_size}
    known |= {"resident_mib": resident / MIB, "plain_mib": plain / MIB}
    for share in shares:
        started = time.perf_counter()
        try:
            plan = keras_remat.make_plan(
                model, batch_size, resident + int(share * plain), card=card_name, margin=0.0,
                solver_time_limit_s=20.0,
            )  # fmt: skip
        except keras_remat.RematError as error:
            yield known | {"at": share, "status": f"{type(error).__name__}: {error}"[:200]}
            continue
        plan.save(Path(folder) / f"{name}-{share:g}.json")
        yield (
            known
            | writings(traced, plan.solution.schedule, card_name)
            | {
                "at": share,
                "status": "planned",
                "limit_mib": share * plain / MIB,
                "predicted_mib": (plan.predicted.peak_bytes - resident) / MIB,
                "compiled_mib": _above(plan.compiled, resident),
                "overhead": plan.overhead,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )


def writings(traced: Any, schedule: Any, card_name: str) -> dict[str, Any]:
    """Returns bytes, and roofline time as a share of the plain step's, of all ways to write a
    schedule down, counted from the compiled modules."""
    from keras_remat.backends.jax import lower as lowering
    from keras_remat.backends.jax.measure import added_bytes
    from keras_remat.core.writing import Writing

    rates = card(card_name).rates

    def seconds(compiled: Any) -> float:
        return costs(compiled.as_text(), rates).time_s

    plain, found = seconds(lowering.lower_plain(traced)), {}
    for writing in Writing:
        name, compiled = writing.name.lower(), lowering.lower(traced, schedule, writing)
        found[f"{name}_mib"] = added_bytes(compiled) / MIB
        found[f"{name}_time"] = seconds(compiled) / plain
    return found


def _above(usage: Any, resident: int) -> float | None:
    return None if usage is None else (usage.peak_bytes - resident) / MIB


def batch_of(model: keras.Model, loss: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random inputs and targets of a model of ``cards_case``."""
    generator = np.random.default_rng(0)
    (inputs,), (outputs,) = model.inputs, model.outputs
    shape = (size, *inputs.shape[1:])
    words = cards_case.WORDS
    if inputs.dtype == "int32":
        x = generator.integers(0, words, shape, "int32")
    else:
        x = generator.normal(size=shape).astype("float32")
    if loss == "words":
        return x, generator.integers(0, words, (size, *outputs.shape[1:-1]), "int32")
    if loss in ("classes", "probabilities"):
        return x, generator.integers(0, 10, size, "int32")
    return x, generator.uniform(size=(size, *outputs.shape[1:])).astype("float32")


class Timed(keras.callbacks.Callback):
    """Notes losses and peaks, and times steps when it is this process's turn."""

    def __init__(self, name: str):
        super().__init__()
        self.losses: list[float] = []
        self.peak_before_turn, self.step_s, self._name, self._began_s = 0, 0.0, name, 0.0
        self._turn: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == BEFORE:
            self.peak_before_turn = statistics().get("peak", 0)
            self._turn = turns.alone(self._name)
            self._turn.__enter__()
            self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < BEFORE:
            self.losses.append(float((logs or {})["loss"]))
        if batch == BEFORE + TIMED - 1:
            float((logs or {})["loss"])  # waits for the steps
            self.step_s = (time.perf_counter() - self._began_s) / TIMED
            self._turn.__exit__(None, None, None)


def run(name: str, variant: str, folder: str, factor: float) -> dict[str, Any]:
    """Returns what a ``fit`` showed.

    Args:
        name: of the model.
        variant: ``"plain"``, ``"checkpoint"``, or the share of a saved plan.
        folder: of the plans.
        factor: on the model's batch size.
    """
    keras.utils.set_random_seed(0)
    model, size = cards_case.compiled_model(name)
    size = int(factor * size)
    batch = batch_of(model, cards_case.MODELS[name][1], size)
    row: dict[str, Any] = {"name": name, "variant": variant, "batch_size": size}
    timed, remat = Timed(f"{name}-{variant}"), None
    if variant == "checkpoint":
        from cards_peers import checkpointed

        checkpointed(model, PART_LAYERS, "nothing_saveable")
    elif variant != "plain":
        path = Path(folder) / f"{name}-{variant}.json"
        remat = keras_remat.RematAutotune(None, "keep", plan=path, margin=0.0, verbose=0)
    else:
        (backend,) = load_backends(model, "compiled", None)
        traced = backend.trace(model, backend.example_batch(model, batch))
        problem = Problem(traced.graph, backend.estimated_profile(traced))
        row["own_analysis_mib"] = cards_case.added_bytes_of(traced)(problem, None) / MIB
    callbacks = [timed] if remat is None else [remat, timed]
    model.fit(
        Repeated(batch, BEFORE + TIMED), epochs=1, shuffle=False, verbose=0, callbacks=callbacks
    )
    told = statistics()
    row |= {
        "resident_mib": told.get("current", 0) / MIB,
        "early_peak_mib": timed.peak_before_turn / MIB,
        "peak_mib": told.get("peak", 0) / MIB,
        "step_ms": 1e3 * timed.step_s,
        "losses": timed.losses,
    }
    if remat is not None:
        plan = remat.plan
        row["setup_s"] = remat.report.setup_s
        row["events"] = [event.message for event in remat.report.events]
        if plan is not None:
            row["planned"] = {
                key: None if usage is None else usage.peak_bytes / MIB
                for key, usage in (
                    ("predicted", plan.predicted),
                    ("compiled", plan.compiled),
                    ("measured", plan.measured),
                )
            }
            row["card"], row["overhead"] = plan.card, plan.overhead
    return row


def main() -> None:
    """Prints a JSON object for every row."""
    words = json.loads(sys.argv[1])
    case = words.pop("case")
    if case == "make":
        for row in make(**words):
            print(json.dumps(row), flush=True)
        return
    try:
        print(json.dumps(run(**words)), flush=True)
    finally:  # whatever happened, nobody waits for this process
        turns.ready(f"{words['name']}-{words['variant']}")


if __name__ == "__main__":
    main()
