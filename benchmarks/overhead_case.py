"""Measures for :mod:`overhead` what a step costs with the callback and without it, in one process,
on the framework that ``KERAS_BACKEND`` names; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import keras
import numpy as np
from scipy.stats import bootstrap

import keras_remat
from keras_remat.backends.base import load_backend

BATCH, WIDTH = 8, 8
#: Epochs of a fit that are not timed: the callback traces, measures and settles in them.
_UNTIMED = 2
#: Epochs that are. The quickest counts: what else runs on the machine makes single ones slower.
_TIMED = 4
#: Seconds that an epoch takes about, where that is fewer steps than were asked for; and the fewest.
_EPOCH_S, _FEWEST_STEPS = 0.25, 50
#: A fit under a plan makes its step anew, which takes long with many variables: fewer rounds.
_PLANNED_ROUNDS_SHARE = 0.5


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


class Stopwatch:
    """Takes the time of calls, each one apart; it costs a fraction of a microsecond a call.

    Args:
        parts: what is timed inside of the calls, and does not count.
        frees: whether what a call was given is freed in the time of the next one. A step's batch
            and, on JAX, the state that it consumed are freed by whoever calls it, with the callback
            or without it, and hundreds of arrays take as long as all else that is timed.
    """

    def __init__(self, *parts: Stopwatch, frees: bool = False) -> None:
        self.times_s: list[float] = []
        self.total_s, self._parts = 0.0, parts
        self._frees, self._given = frees, tuple[Any, ...]()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same, and whose calls are timed."""

        @wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            before_s = sum(part.total_s for part in self._parts)
            began_s = time.perf_counter()
            if self._frees:
                self._given = given
            try:
                return function(*given, **named)
            finally:
                taken_s = time.perf_counter() - began_s
                self.total_s += taken_s
                of_parts_s = sum(part.total_s for part in self._parts) - before_s
                self.times_s.append(taken_s - of_parts_s)

        return timed

    def median_s(self) -> float:
        """Returns the median of the later half: the first steps plan."""
        return median(self.times_s[len(self.times_s) // 2 :])


class TimedHooks:
    """Times a callback's hooks of a batch, and those of one that does nothing.

    Attributes:
        empty: the callback that does nothing; it has to be in the same fit.
    """

    def __init__(self, callback: keras.callbacks.Callback):
        self.empty = keras.callbacks.Callback()
        self._own, self._of_empty = _hooks_of(callback), _hooks_of(self.empty)

    def added_s(self) -> float:
        """Returns what the hooks take of the median step, without a stopwatch's own time."""
        own, of_empty = (sum(h.median_s() for h in hooks) for hooks in (self._own, self._of_empty))
        return own - of_empty


def _hooks_of(callback: keras.callbacks.Callback) -> list[Stopwatch]:
    """Times a callback's hooks of a batch from now on."""
    hooks = {"on_train_batch_begin": Stopwatch(), "on_train_batch_end": Stopwatch()}
    for name, watch in hooks.items():
        setattr(callback, name, watch.around(getattr(callback, name)))
    return list(hooks.values())


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

    def step_s(self, *callbacks: keras.callbacks.Callback) -> float:
        """Returns what a step of a fit takes in the quickest of its timed epochs."""
        epochs = Epochs()
        self.model.fit(
            *self.data, batch_size=BATCH, epochs=_UNTIMED + _TIMED, verbose=0, shuffle=False,
            callbacks=[*callbacks, epochs],
        )  # fmt: skip
        return min(epochs.times_s[_UNTIMED:]) / self.steps

    def hooks_s(self) -> float:
        """Returns what the callback's own hooks of a batch take where nothing is to be done, by
        the median step; seen from inside, what else runs on the machine hardly changes it."""
        remat = keras_remat.RematAutotune(None, "keep", verbose=0)
        hooks = TimedHooks(remat)
        self.step_s(remat, hooks.empty)
        return hooks.added_s()

    def inside_s(self, plan: keras_remat.Plan) -> float:
        """Returns what a step under a plan takes beside the lowered step and the next batch, by
        the median step; seen from inside, as :meth:`hooks_s`."""
        remat = keras_remat.RematAutotune(None, "keep", plan=plan, verbose=0)
        name = keras.backend.backend()
        installed = import_module(f"keras_remat.backends.{name}.swap").InstalledTrainFunction
        if name == "jax":
            from jax.stages import Compiled as Lowered
        else:
            from keras_remat.backends.tensorflow.ordered.lower import LoweredStep as Lowered
        step, batch = Stopwatch(frees=True), Stopwatch()
        call = Stopwatch(step, batch)

        def steps(self: Any, iterator: Any) -> Any:
            return trains(self, iter(batch.around(iterator.__next__), None))

        trains = installed._steps
        hooks = TimedHooks(remat)
        with (
            patch.object(installed, "__call__", call.around(installed.__call__)),
            patch.object(Lowered, "__call__", step.around(Lowered.__call__)),
            patch.object(installed, "_steps", steps),
        ):
            self.step_s(remat, hooks.empty)
        return call.median_s() + hooks.added_s()

    def idle_s(self) -> float:
        """Returns what a step of a fit with nothing to do takes."""
        return self.step_s(keras_remat.RematAutotune(None, "keep", verbose=0))

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

    def bare_s(self, plan: keras_remat.Plan) -> float:
        """Returns what a call of the lowered step takes in fit's loop."""
        with self._bare(plan):
            return self.step_s()

    def planned_s(self, plan: keras_remat.Plan) -> float:
        """Returns what a step of a fit under a plan takes."""
        return self.step_s(keras_remat.RematAutotune(None, "keep", plan=plan, verbose=0))

    def plan(self) -> keras_remat.Plan:
        """Returns a plan for the model's step."""
        batch = tuple(part[:BATCH] for part in self.data)
        return keras_remat.make_plan(self.model, batch, "80%", solver="greedy")


class Compared(NamedTuple):
    """What a step takes in two kinds of fits."""

    one_s: float
    other_s: float
    least_ratio: float  # of the 95 % interval of the other over the one
    most_ratio: float


def lower_quartile(times_s: Any, axis: int = -1) -> Any:
    return np.quantile(times_s, 0.25, axis=axis)


def compared(one: Callable[[], float], other: Callable[[], float], rounds: int) -> Compared:
    """Returns what two kinds of fits take, of rounds in which each kind runs once, in random order.

    A kind's number is the lower quartile of its fits; the interval is a bootstrap of these.
    """
    order, times_s = random.Random(0), tuple[list[float], ...](([], []))
    for _ in range(rounds):
        for kind in order.sample(range(2), 2):
            times_s[kind].append((one, other)[kind]())

    def ratio(ones_s: Any, others_s: Any, axis: int = -1) -> Any:
        return lower_quartile(others_s, axis) / lower_quartile(ones_s, axis)

    interval = bootstrap(times_s, ratio, method="percentile", rng=0).confidence_interval
    return Compared(*map(lower_quartile, times_s), interval.low, interval.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variables", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("rounds", type=int)
    options = parser.parse_args()
    step_s = Case(options.variables, _FEWEST_STEPS).step_s()
    steps = max(_FEWEST_STEPS, min(options.steps, int(_EPOCH_S / step_s)))
    case = Case(options.variables, steps)
    case.step_s()  # traces and compiles
    rounds = max(2, round(_PLANNED_ROUNDS_SHARE * options.rounds))
    # first, as in a user's process: what dozens of fits leave is in the way of every call
    hooks_s, plan = case.hooks_s(), case.plan()
    inside_s = lower_quartile([case.inside_s(plan) for _ in range(rounds)])
    idle = compared(case.step_s, case.idle_s, options.rounds)
    planned = compared(partial(case.bare_s, plan), partial(case.planned_s, plan), rounds)
    row = {
        "backend": keras.backend.backend(),
        "variables": options.variables,
        "steps": steps,
        "plain_s": idle.one_s,
        "idle_s": idle.other_s,
        "idle_ratio": idle.other_s / idle.one_s,
        "idle_least": idle.least_ratio,
        "idle_most": idle.most_ratio,
        "hooks_us": 1e6 * hooks_s,
        "inside_us": 1e6 * inside_s,
        "bare_s": planned.one_s,
        "planned_s": planned.other_s,
        "planned_ratio": planned.other_s / planned.one_s,
        "added_s": planned.other_s - planned.one_s,
        "added_least_s": (planned.least_ratio - 1) * planned.one_s,
        "added_most_s": (planned.most_ratio - 1) * planned.one_s,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
