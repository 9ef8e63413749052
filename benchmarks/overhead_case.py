"""Measures for :mod:`overhead` what a step costs with the callback and without it, in one process,
on the framework that ``KERAS_BACKEND`` names; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from statistics import median
from typing import Any

import keras
import numpy as np

import keras_remat
from keras_remat.backends.base import load_backend

BATCH, WIDTH = 8, 8
#: Epochs of a fit that are not timed: the callback traces, measures and settles in them.
_UNTIMED = 2
#: Epochs that are. The quickest counts: what else runs on the machine makes single ones slower.
_TIMED = 6
#: Seconds that an epoch takes about, where that is fewer steps than were asked for; and the fewest.
_EPOCH_S, _FEWEST_STEPS = 1.0, 50


class Epochs(keras.callbacks.Callback):
    """Takes the time of every epoch. It has no hook of a batch: Keras would wait for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times_s.append(time.perf_counter() - self._began_s)


def model_of(variables: int) -> keras.Model:
    """Returns a chain of dense layers, with two variables each."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(variables // 2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


class Case:
    """Trains one model with and without the callback.

    Args:
        variables: of the model.
        steps: of an epoch.
    """

    def __init__(self, variables: int, steps: int):
        self.model, self.steps = model_of(variables), steps
        shape = (steps * BATCH, WIDTH)
        self.data = np.ones(shape, "float32"), np.zeros(shape, "float32")

    def step_s(self, callback: keras.callbacks.Callback | None = None) -> float:
        """Returns what a step of a fit takes in the quickest of its timed epochs."""
        epochs = Epochs()
        callbacks = [epochs] if callback is None else [callback, epochs]
        self.model.fit(
            *self.data, batch_size=BATCH, epochs=_UNTIMED + _TIMED, verbose=0, shuffle=False,
            callbacks=callbacks,
        )  # fmt: skip
        return min(epochs.times_s[_UNTIMED:]) / self.steps

    def hooks_s(self) -> float:
        """Returns what the callback's own hooks of a batch take where nothing is to be done, by
        the median step; seen from inside, what else runs on the machine hardly changes it."""
        remat = keras_remat.RematAutotune(None, "keep", verbose=0)
        taken: dict[str, list[float]] = {"on_train_batch_begin": [], "on_train_batch_end": []}

        def timed(hook: Callable[..., None], times_s: list[float]) -> Callable[..., None]:
            def called(batch: int, logs: Any = None) -> None:
                began_s = time.perf_counter()
                hook(batch, logs)
                times_s.append(time.perf_counter() - began_s)

            return called

        for name, times_s in taken.items():
            setattr(remat, name, timed(getattr(remat, name), times_s))
        self.step_s(remat)
        return sum(map(median, taken.values()))

    def idle(self) -> tuple[float, float]:
        """Returns what a step takes in a plain fit, and in one with nothing to do."""
        return self.step_s(), self.step_s(keras_remat.RematAutotune(None, "keep", verbose=0))

    @contextmanager
    def _bare(self, plan: keras_remat.Plan) -> Any:
        """Puts the lowered step itself in the place of the train function."""
        backend = load_backend()
        batch = backend.example_batch(self.model, tuple(part[:BATCH] for part in self.data))
        traced = backend.trace(self.model, batch)
        problem = keras_remat.Problem(traced.graph, backend.estimated_profile(traced))
        problem = problem.with_budget(plan.budget_bytes)  # else a step in order is another one
        step: Any = backend.lower(traced, problem, plan.solution.schedule)
        functions: dict[str, Callable[..., Any]] = {
            "jax": lambda state, iterator: step.compiled(state, next(iterator)),
            "tensorflow": lambda iterator: step(next(iterator)),
        }
        own, self.model.train_function = self.model.train_function, functions[backend.name]
        try:
            yield
        finally:
            self.model.train_function = own

    def planned(self, plan: keras_remat.Plan) -> tuple[float, float]:
        """Returns what a call of the lowered step takes in fit's loop, and a step of a fit under
        the same plan."""
        with self._bare(plan):
            bare_s = self.step_s()
        remat = keras_remat.RematAutotune(None, "keep", plan=plan, verbose=0)
        return bare_s, self.step_s(remat)

    def plan(self) -> keras_remat.Plan:
        """Returns a plan for the model's step."""
        batch = tuple(part[:BATCH] for part in self.data)
        return keras_remat.make_plan(self.model, batch, "80%", solver="greedy")


def quickest(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the smallest number of each side: what else runs on a machine only adds to them."""
    one, other = zip(*pairs, strict=True)
    return min(one), min(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variables", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("pairs", type=int)
    options = parser.parse_args()
    step_s = Case(options.variables, _FEWEST_STEPS).step_s()
    steps = max(_FEWEST_STEPS, min(options.steps, int(_EPOCH_S / step_s)))
    case = Case(options.variables, steps)
    case.step_s()  # traces and compiles
    idle = [case.idle() for _ in range(options.pairs)]
    hooks_s, plan = case.hooks_s(), case.plan()
    planned = [case.planned(plan) for _ in range(options.pairs)]
    (plain_s, idle_s), (bare_s, planned_s) = map(quickest, (idle, planned))
    row = {
        "backend": keras.backend.backend(),
        "variables": options.variables,
        "steps": steps,
        "plain_s": plain_s,
        "idle_s": idle_s,
        "idle_ratio": idle_s / plain_s,
        "hooks_us": 1e6 * hooks_s,
        "bare_s": bare_s,
        "planned_s": planned_s,
        "planned_ratio": planned_s / bare_s,
        "added_s": planned_s - bare_s,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
