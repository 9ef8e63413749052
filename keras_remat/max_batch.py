"""``find_max_batch_size``: the largest batch that really trains.

What :mod:`keras_remat.autotune` finds by prediction is run, and where prediction and device disagree, the device wins. A found size is
trained for a few real steps, on the given samples repeated, and every variable is put back. What was measured above (or below) the
prediction is taken off (or added to) what may be used, and the plan is made again, at the same size and then at the next: smaller after a failure, larger
after a success, by the share that was left and then by 3 %, until sizes that train and that do not are 3 % apart. At every size the orders
already known are tried before anything is solved; an order predicted to be a little over the limit still has its chance on the device.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from keras_remat.autotune import BatchScaling, BatchSearch, Probe, batch_scaling, forward_overhead, search_batch_size
from keras_remat.backends.base import Backend, load_backend, preserved_state
from keras_remat.backends.examples import batch_size_of, repeated_batch
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.plan import Plan
from keras_remat.planning import plan_problem, reused_plan, traced_model
from keras_remat.problem import Problem
from keras_remat.schedule import Schedule, Usage

#: A size is the largest when one that is this share larger does not train.
RESOLUTION = 0.03
#: Sizes that are trained at most.
MOST_SIZES = 10
#: How often a size that measures over the limit is planned again.
REPLANS = 2
#: Steps per size; the second one finds the allocator's pool as the first one left it.
STEPS = 2
#: An order predicted to be over the budget by no more than this share of it may still be run.
WORTH_RUNNING = 0.1

#: Trains a size under a plan; what a step takes, or ``None`` when the device ran out of memory.
Train = Callable[[int, Plan], Usage | None]


#: Of the time limit, what the search with the quick solver, the one with the thorough solver, and one size afterwards may take.
_QUICK_SHARE, _LATE_SHARE, _SOLVE_SHARE = 0.4, 0.6, 0.2


def find_max_batch_size(
    model: Any,
    batch: Any,
    memory_limit: int | str,
    *,
    max_overhead: float | Literal["forward"] | None = "forward",
    profile: Literal["measured", "estimated"] = "measured",
    margin: float = 0.05,
    time_limit_s: float = 60.0,
    seed: int = 0,
) -> BatchSearch:
    """Finds the largest batch a model can train with; the model comes back as it was.

    Args:
        model: a compiled Keras model.
        batch: a batch to begin with: ``(x, y[, sample_weight])``, or an int where inputs and targets follow from the model.
        memory_limit: every byte the device's allocator may have in use.
        max_overhead: bound on the slowdown per sample, (time − store-all time) / store-all time; ``"forward"``, the default, is one extra
            forward pass, the rule of the Checkmate paper; ``None`` lifts it.
        profile: ``"measured"`` runs a few steps at the given batch, and up to :data:`MOST_SIZES` of the sizes found, so that the answer is a
            size that trained; ``"estimated"`` runs nothing, and the answer is a prediction.
        margin: share of the limit that is kept free.
        time_limit_s: after this the search tries no further size; the sizes that run come on top of it.
        seed: for the solver.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: the model cannot be rematerialized, or its graph changes with the batch size.
        ValueError, TypeError: wrong arguments.
    """
    number = isinstance(max_overhead, (int, float)) and max_overhead >= 0
    if not number and max_overhead is not None and max_overhead != "forward":
        raise ValueError(f'max_overhead must be at least 0, None or "forward", got {max_overhead!r}')
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}")
    backend = load_backend()
    step = traced_model(backend, model, batch, memory_limit, margin, profile, seed)
    scaling = batch_scaling(backend, model, step.traced, step.problem, step.batch)
    search = search_batch_size(
        scaling, batch_size_of(step.batch), step.limit_bytes, step.budget_bytes, backend, max_overhead=max_overhead,
        time_limit_s=_QUICK_SHARE * time_limit_s, late_solver="auto", late_time_limit_s=_LATE_SHARE * time_limit_s, seed=seed,
    )  # fmt: skip
    if profile == "estimated":
        return search
    train = trainer(backend, model, step.batch)
    return verified_search(
        search, scaling, train, step.budget_bytes, backend, max_overhead=max_overhead, solve_s=_SOLVE_SHARE * time_limit_s,
        seed=seed,
    )  # fmt: skip


def as_it_is_now(problem: Problem, backend: Backend) -> Problem:
    """``problem`` with what the device's allocator has in use and free now, before its batch is there.

    Where the allocator is not replayed, the problem stays as it is.
    """
    if not backend.fragments:
        return problem
    gc.collect()  # the step before is in reference cycles
    idle = backend.bytes_in_use()
    profile = replace(problem.profile, resident_bytes=idle + problem.graph.input_bytes)
    return backend.with_pool(replace(problem, profile=profile), idle)


def trainer(backend: Backend, model: Any, batch: Any) -> Train:
    """Trains ``batch``, its samples repeated, for :data:`STEPS` steps of any size; the model's variables are put back after each size.

    Args:
        backend: of the framework Keras runs on.
        model: compiled and built.
        batch: what ``train_step`` gets.
    """

    def train(size: int, plan: Plan) -> Usage | None:
        assert plan.problem is not None
        gc.collect()  # the step before is in reference cycles
        arrays = backend.example_batch(model, repeated_batch(batch, size))
        traced = backend.trace(model, arrays)
        schedule = plan.solution.schedule
        problem = replace(plan.problem, graph=traced.graph)
        run = backend.lower(traced, problem, schedule)
        with preserved_state(backend, model):
            try:
                usages = [backend.measure(lambda: run(arrays))[1] for _ in range(STEPS)]
            except Exception as error:
                if not backend.is_out_of_memory(error):
                    raise
                return None
        return Usage(usages[-1].time_s, max(usage.peak_bytes for usage in usages))

    return train


def verified_search(
    search: BatchSearch,
    scaling: BatchScaling,
    train: Train,
    budget_bytes: int,
    backend: Backend,
    *,
    max_overhead: float | Literal["forward"] | None = "forward",
    at_most: int | None = None,
    solver: str = "auto",
    solve_s: float = 10.0,
    seed: int = 0,
) -> BatchSearch:
    """Trains what a search found and goes down or up from there.

    Args:
        search: by prediction.
        scaling: the problem at any size.
        train: runs a size, see :func:`trainer`.
        budget_bytes: what the device may have in use; the measured peak is held against it.
        backend: whose allocator decides.
        max_overhead, at_most, seed: as in :func:`~keras_remat.autotune.search_batch_size`.
        solver: for the sizes that no known order fits.
        solve_s: seconds for it per size.

    Returns:
        The search with the largest size that trained, its plan with what was measured, and the smallest size that did not; the search as
        it was, where no size trained.
    """
    verifier = _Verifier(search, scaling, train, budget_bytes, backend, max_overhead, solver, solve_s, seed)
    verifier.run(at_most)
    return verifier.result()


class _Verifier:
    def __init__(
        self, search: BatchSearch, scaling: BatchScaling, train: Train, budget_bytes: int, backend: Backend,
        max_overhead: float | Literal["forward"] | None, solver: str, solve_s: float, seed: int,
    ):  # fmt: skip
        self.search, self.scaling, self.train, self.budget, self.backend = search, scaling, train, budget_bytes, backend
        self.max_overhead, self.solver, self.solve_s, self.seed = max_overhead, solver, solve_s, seed
        self.error = 0  # bytes measured above the prediction, of the last size that ran
        self.failures = 0
        self.good: tuple[int, Plan] | None = None
        # the smallest size that does not train, with what it needs if that is known
        self.failed: tuple[int, int | None] | None = None
        self.probes: list[Probe] = []
        self.orders = list(dict.fromkeys(p.plan.solution.schedule for p in search.probes if p.plan is not None))

    def run(self, at_most: int | None) -> None:
        size: int | None = self.search.max_batch_size
        plan: Plan | None = self.search.plan
        for _ in range(MOST_SIZES):
            assert size is not None
            peak = self._trained(size, plan)
            size = self._next(size, peak, at_most)
            if size is None:
                break
            plan = self._plan(size)

    def _trained(self, size: int, plan: Plan | None) -> int | None:
        """Trains a size; where it needs more than predicted, under plans made again for what it needed more."""
        peak = self._run(size, plan)
        for _ in range(REPLANS):
            if plan is None or peak is None or peak <= self.budget:
                break
            tried = plan.solution.schedule
            plan = self._plan(size, only_fitting=True)
            if plan is None or plan.solution.schedule == tried:
                break
            peak = self._run(size, plan)
        if (plan is None or peak is None or peak > self.budget) and (self.failed is None or size < self.failed[0]):
            self.failed = size, peak
        return peak

    def _run(self, size: int, plan: Plan | None) -> int | None:
        """Trains a size and returns its peak; ``None`` where there is no plan or no peak."""
        usage = None if plan is None else self.train(size, plan)
        peak = None if usage is None else usage.peak_bytes
        if plan is not None and usage is not None and peak is not None:
            self.error = peak - plan.predicted.peak_bytes
            plan = replace(plan, measured=usage, budget_bytes=self.budget)
            self.probes.append(Probe(size, plan, size / plan.predicted.time_s if plan.predicted.time_s > 0 else 0.0))
            if peak <= self.budget:
                self.good = size, plan
                if plan.solution.schedule not in self.orders:
                    self.orders.append(plan.solution.schedule)
        return peak

    def _next(self, size: int, peak: int | None, at_most: int | None) -> int | None:
        """The size to try after one that had this peak."""
        if self.good is None:
            self.failures += 1  # the first steps down are small, the next ones longer: there is a way up again
            share = self.budget / peak if peak is not None and peak > self.budget else 1.0
            return (
                max(1, min(size - 1, int(size * min(share, 1 - RESOLUTION * 2 ** (self.failures - 1))))) if size > 1 else None
            )
        lowest = max(self.good[0] + 1, math.ceil(self.good[0] * (1 + RESOLUTION)))
        if self.failed is None:
            wanted = max(lowest, int(size * self.budget / peak) if peak else 0)
            wanted = wanted if at_most is None else min(wanted, at_most)
            return wanted if wanted > self.good[0] else None
        if self.failed[0] <= lowest:
            return None
        return max(lowest, (self.good[0] + self.failed[0]) // 2)

    def _plan(self, size: int, *, only_fitting: bool = False) -> Plan | None:
        """The fastest known order that fits by the corrected prediction, else a new one, else one that may fit all the same (or ``None``)."""
        problem = as_it_is_now(self.scaling.at(size), self.backend)
        budget = max(1, self.budget - self.error)
        plan = self._known(problem, budget)
        if plan is None:
            try:
                plan = plan_problem(
                    problem, budget, self.backend, solver=self.solver, time_limit_s=self.solve_s, seed=self.seed
                )
            except (InfeasibleBudgetError, ScheduleNotFoundError):
                plan = None
            if plan is None or not self._is_allowed(problem, plan):
                plan = None if only_fitting else self._known(problem, int(budget * (1 + WORTH_RUNNING)))
        return plan

    def _known(self, problem: Problem, budget: int) -> Plan | None:
        plans = [
            reused_plan(problem, order, budget, self.backend) for order in [Schedule.store_all(problem.graph), *self.orders]
        ]
        allowed = [plan for plan in plans if plan is not None and self._is_allowed(problem, plan)]
        fitting = [plan for plan in allowed if plan.predicted.peak_bytes <= self.budget - self.error]
        if fitting:
            return min(fitting, key=lambda plan: plan.predicted.time_s)
        return min(allowed, key=lambda plan: plan.predicted.peak_bytes, default=None)

    def _is_allowed(self, problem: Problem, plan: Plan) -> bool:
        bound = forward_overhead(problem) if self.max_overhead == "forward" else self.max_overhead
        return bound is None or plan.overhead <= bound

    def result(self) -> BatchSearch:
        if self.good is None:
            return self.search
        size = self.good[0]
        failed, failed_peak = self.failed or (None, None)
        return replace(
            self.search, max_batch_size=size, plain_batch_size=min(self.search.plain_batch_size, size),
            probes=(*self.search.probes, *self.probes), failed_batch_size=failed, failed_peak_bytes=failed_peak,
        )  # fmt: skip
