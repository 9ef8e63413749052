"""What Keras's own step would take where it cannot run.

The steps that do run are measured, and by op times a plain one takes so much less. But a rematerialized step runs its ops one after the other, and
Keras's own runs those at once that do not wait for each other, which times of single ops do not tell. How much that is worth is measured at a
smaller size, where both fit: every variable is put back afterwards.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from keras_remat.backends.base import Backend, TracedStep, preserved_state
from keras_remat.backends.examples import batch_size_of, repeated_batch
from keras_remat.errors import UnsupportedModelError
from keras_remat.plan import Plan
from keras_remat.problem import Problem
from keras_remat.report import AutotuneReport
from keras_remat.schedule import Schedule, Usage
from keras_remat.time_fit import carried_problem

#: What the size is divided by, until both steps fit.
_DIVISORS = (2, 4, 8)
#: Pairs of steps that are compared, and seconds after which no more than one is.
_PAIRS, _MOST_S = 5, 10.0
#: How many of an epoch's newest steps tell what the plan takes.
_STEPS = 100


@dataclass(frozen=True)
class OrderCost:
    """Seconds of steps that recompute nothing, measured.

    Args:
        batch_size: samples per step.
        free_s: in whatever order the framework runs them.
        ordered_s: one op after the other.
    """

    batch_size: int
    free_s: float
    ordered_s: float

    @property
    def share(self) -> float:
        """The free step's seconds over the ordered one's; below 1 where ops gain by running at once."""
        return self.free_s / self.ordered_s


class PredictedBaseline:
    """The plain step's time in a report, predicted from measured steps of a plan.

    It follows them from epoch to epoch: a device that slows down would slow the plain step down, too.

    Args:
        report: gets the baseline.

    Attributes:
        order_share: seconds of a step whose ops may run at once over those of one that runs them in order.
    """

    def __init__(self, report: AutotuneReport):
        self.order_share = 1.0
        self._report = report
        self._plan_share, self._peak_bytes = 1.0, 0
        self._steps_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self, plan: Plan, batch_size: int, time_s: float) -> None:
        """A plan whose steps were seen to take ``time_s`` seconds; the steps that follow tell better."""
        self._plan_share = plan.store_all.time_s / plan.predicted.time_s if plan.predicted.time_s > 0 else 1.0
        self._peak_bytes = plan.store_all.peak_bytes
        self._steps_s.clear()
        self._report.baseline_batch_size, self._report.baseline_source = batch_size, "predicted"
        self._set(time_s)

    def epoch_begins(self) -> None:
        """What is compared from here on is this epoch's."""
        self._steps_s.clear()

    def step(self, time_s: float) -> None:
        """One more step of the plan, that nothing was copied before."""
        self._steps_s.append(time_s)
        self._set(median(self._steps_s))

    def _set(self, time_s: float) -> None:
        self._report.baseline = Usage(self.order_share * self._plan_share * time_s, self._peak_bytes)


def order_cost(backend: Backend, model: Any, batch: Any, problem: Problem, usable_bytes: int) -> OrderCost | None:
    """Measures what order costs at the largest part of a batch whose plain step fits.

    Args:
        backend: of the framework Keras runs on.
        model: compiled and built; its variables are put back.
        batch: what ``train_step`` gets.
        problem: the step of this batch with its costs.
        usable_bytes: what the device may have in use.

    Returns:
        ``None`` where steps run as one program, no smaller step with the same ops fits, or the device runs out of memory after all.
    """
    if backend.compilation != "ordered":
        return None
    for divisor in _DIVISORS:
        size = batch_size_of(batch) // divisor
        try:
            traced = backend.trace(model, backend.resized_spec(batch, size)) if size else None
        except UnsupportedModelError:
            return None
        if traced is None or not traced.graph.has_ops_of(problem.graph):
            return None
        smaller = carried_problem(problem, traced.graph)
        peak = backend.predicted_peak_bytes(smaller, Schedule.store_all(traced.graph)) + traced.plain_surplus_bytes
        if peak <= usable_bytes:
            return _measured(backend, model, traced, smaller.with_budget(usable_bytes), repeated_batch(backend, batch, size))
    return None


def _measured(backend: Backend, model: Any, traced: TracedStep, problem: Problem, batch: Any) -> OrderCost | None:
    """Both steps in turn, each compiled by a first step that does not count."""
    store_all = Schedule.store_all(traced.graph)
    runs = [backend.lower(traced, p, store_all) for p in (problem.with_budget(None), problem)]

    def pair() -> list[float]:
        return [backend.measure(partial(run, batch))[1].time_s for run in runs]

    with preserved_state(backend, model):
        try:
            pair()
            started = time.perf_counter()
            pairs = [pair()]
            while len(pairs) < _PAIRS and time.perf_counter() - started < _MOST_S:
                pairs.append(pair())
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            return None
        finally:
            runs.clear()
            gc.collect()  # what they hold on the device is free before anything is planned
    free_s, ordered_s = map(median, zip(*pairs, strict=True))
    return OrderCost(batch_size_of(batch), free_s, ordered_s)
