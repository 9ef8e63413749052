"""``find_max_batch_size``: the largest batch that really trains.

What :mod:`keras_remat.batch_size.search` finds by prediction is run, and where prediction and
device disagree, the device wins. A found size is trained for a few real steps, on the given samples
repeated, and every variable is put back. What was measured above (or below) the prediction is taken
off (or added to) what may be used, and the largest size that a known order reaches by that is the
next to run: smaller after a failure, larger after a success. Where known orders reach no further,
one more is solved for; where the allocator is not replayed, an order predicted to be a little over
the limit still has its chance on the device. It ends when sizes that train and that do not are 3 %
apart, or the time is over.

A size may have a graph of its own, where the framework folds an op at some sizes and not at others:
every size is compared with its own trace before it runs, and planned anew where the ops are others.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from keras_remat.backends.base import Backend, TracedStep, load_backend, preserved_state
from keras_remat.backends.batches import batch_size_of, repeated_batch
from keras_remat.batch_size.cost_fit import carried_problem
from keras_remat.batch_size.scaling import BatchScaling, batch_scaling
from keras_remat.batch_size.search import (
    BatchSearch,
    Probe,
    SizeSearch,
    is_allowed,
    search_batch_size,
)
from keras_remat.core.graph import Graph
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule, Usage
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.make_plan import (
    TracedModel,
    measured_problem,
    plan_problem,
    reused_plan,
    traced_model,
)
from keras_remat.planning.plan import Plan

#: A size is the largest when one that is this share larger does not train.
RESOLUTION = 0.03
#: Sizes that are trained at most.
MOST_SIZES = 10
#: Steps per size; the second one finds the allocator's pool as the first one left it. Where that
#: would end too late, it can be left out if the first one's peak is off the prediction, which is of
#: many steps, by no more than this share.
STEPS, AS_PREDICTED = 2, 0.005
#: An order predicted to be over the budget by no more than this share of it may still be run.
WORTH_RUNNING = 0.1
#: Seconds for a plan to measure a second size under.
_SECOND_PLAN_S = 1.0
#: How far above the least size worth running an order is solved for.
_AIM = 1.02
#: Of the time that is left after tracing, what the search with the quick solver may take, the
#: thorough one has the rest; of that, what is kept for a size to run, at most; and of the time
#: limit, what one solve afterwards may take.
_QUICK_SHARE, _RUNNING_SHARE, _SOLVE_SHARE = 0.25, 0.9, 0.1
#: Measured seconds of the first step of a size, with what it brings along, over the predicted ones.
_LATER = 2.5
#: The least of the time limit that the search gets, however long tracing took.
_LEAST_SHARE = 0.3

#: Trains a size under a plan; what a step takes, or ``None`` when the device ran out of memory.
Train = Callable[[int, Plan], Usage | None]


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
        batch: a batch to begin with: ``(x, y[, sample_weight])``, or an int where inputs and
            targets follow from the model.
        memory_limit: every byte the device's allocator may have in use.
        max_overhead: bound on the slowdown per sample, (time − store-all time) / store-all time;
            ``"forward"``, the default, is one extra forward pass, the rule of the Checkmate paper;
            ``None`` lifts it.
        profile: ``"measured"`` runs a few steps at the given batch, and up to :data:`MOST_SIZES` of
            the sizes found, so that the answer is a size that trained; ``"estimated"`` runs
            nothing, and the answer is a prediction.
        margin: share of the limit that is kept free.
        time_limit_s: for everything: tracing, measuring, the search, and the sizes that run. The
            first size runs however late it is, and so do smaller ones until one has trained; after
            that none is begun that would end too late.
        seed: for the solver.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: the model cannot be rematerialized, or its graph changes with the
            batch size.
        ValueError, TypeError: wrong arguments.
    """
    number = isinstance(max_overhead, (int, float)) and max_overhead >= 0
    if not number and max_overhead is not None and max_overhead != "forward":
        raise ValueError(
            f'max_overhead must be at least 0, None or "forward", got {max_overhead!r}'
        )
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}")
    started = time.perf_counter()
    backend = load_backend()
    step = traced_model(backend, model, batch, memory_limit, margin, profile, seed)
    traced_s = time.perf_counter() - started
    scaling = measured_scaling(backend, model, step)
    left_s = max(_LEAST_SHARE * time_limit_s, time_limit_s - (time.perf_counter() - started))
    late_s = (1 - _QUICK_SHARE) * left_s

    def running_s(plan: Plan) -> float:
        """What a size takes that runs: to be chosen and traced about as long as the size given
        took, and a longer step."""
        return min(_RUNNING_SHARE * late_s, traced_s + _LATER * plan.predicted.time_s)

    search = search_batch_size(
        scaling,
        batch_size_of(step.batch),
        step.limit_bytes,
        step.budget_bytes,
        backend,
        max_overhead=max_overhead,
        time_limit_s=_QUICK_SHARE * left_s,
        late_solver="auto",
        late_time_limit_s=late_s,
        afterwards_s=running_s if profile == "measured" else None,
        seed=seed,
    )
    search = replace(search, search_time_s=time.perf_counter() - started)
    if profile == "estimated":
        return search
    trainer = Trainer(backend, model, step.batch, step.budget_bytes, started + time_limit_s)
    return verified_search(
        search,
        scaling,
        trainer,
        step.budget_bytes,
        backend,
        graph_of=trainer.graph,
        max_overhead=max_overhead,
        solve_s=_SOLVE_SHARE * time_limit_s,
        deadline_s=started + time_limit_s,
        seed=seed,
    )


def measured_scaling(backend: Backend, model: Any, step: TracedModel) -> BatchScaling:
    """The step at any size; where it was measured, it is measured at a second size too, so that
    costs can be fitted.

    That is half the size, which fits where the whole does and takes half the time; or, where the
    half has other ops, twice the size, where that fits. Without either, one size has to do.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    size = batch_size_of(step.batch)
    for other in (size // 2, 2 * size) if step.plan is not None else ():
        traced = backend.trace(model, backend.resized_spec(step.batch, other)) if other else None
        if traced is not None and traced.graph.has_ops_of(step.traced.graph):
            profile = _profile_at(other, traced, backend, model, step)
            measured = {} if profile is None else {other: profile}
            return BatchScaling(
                step.traced.graph, size, traced.graph, other, step.problem, measured
            )
    return batch_scaling(backend, model, step.traced, step.problem, step.batch)


def _profile_at(
    size: int, traced: TracedStep, backend: Backend, model: Any, step: TracedModel
) -> Profile | None:
    """The profile measured at another size; ``None`` where nothing fits there, the profiler is
    busy, or saw too little."""
    assert step.plan is not None
    problem, order = carried_problem(step.problem, traced.graph), step.plan.solution.schedule
    try:
        plan = reused_plan(problem, order, step.budget_bytes, backend.memory) or plan_problem(
            problem, step.budget_bytes, backend, solver="greedy_first", time_limit_s=_SECOND_PLAN_S
        )
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        return None
    measured = measured_problem(
        backend, model, traced, problem, plan, repeated_batch(step.batch, size)
    )
    return None if measured is problem else measured.profile


class Trainer:
    """Trains a batch, its samples repeated, in steps of any size; the model's variables are put
    back after each size.

    Args:
        backend: of the framework Keras runs on.
        model: compiled and built.
        batch: what ``train_step`` gets.
        budget_bytes: a step that measures over it is the last one of its size.
        deadline_s: by ``time.perf_counter``; what would end later and can be left out is left out.
    """

    def __init__(
        self,
        backend: Backend,
        model: Any,
        batch: Any,
        budget_bytes: int,
        deadline_s: float = math.inf,
    ):
        self._backend, self._model, self._batch, self._budget = backend, model, batch, budget_bytes
        self._deadline_s = deadline_s
        self._traced: tuple[int, TracedStep] | None = None  # of the newest size

    def _trace(self, size: int) -> TracedStep:
        if self._traced is None or self._traced[0] != size:
            self._traced = None
            gc.collect()  # the step before is in reference cycles
            self._traced = (
                size,
                self._backend.trace(self._model, self._backend.resized_spec(self._batch, size)),
            )
        return self._traced[1]

    def graph(self, size: int) -> Graph:
        """The train step's graph at a size."""
        return self._trace(size).graph

    def __call__(self, size: int, plan: Plan) -> Usage | None:
        """Trains at most :data:`STEPS` steps; the last one's time and the highest peak, or ``None``
        when the device ran out of memory."""
        backend, traced = self._backend, self._trace(size)
        assert plan.problem is not None
        batch = repeated_batch(self._batch, size)
        problem = replace(plan.problem, graph=traced.graph, budget_bytes=plan.budget_bytes)
        run = backend.lower(traced, problem, plan.solution.schedule)
        usages: list[Usage] = []
        with preserved_state(backend, self._model):
            try:
                while not self._is_enough(usages, plan):
                    usages.append(backend.measure(lambda: run(batch))[1])
            except Exception as error:
                if not backend.is_out_of_memory(error):
                    raise
                return None
        return Usage(usages[-1].time_s, max(usage.peak_bytes for usage in usages))

    def _is_enough(self, usages: list[Usage], plan: Plan) -> bool:
        if not usages:
            return False
        last, predicted = usages[-1], plan.predicted.peak_bytes
        if len(usages) == STEPS or last.peak_bytes > self._budget:
            return True
        as_predicted = (
            self._backend.memory.order_matters
            and abs(last.peak_bytes - predicted) <= AS_PREDICTED * predicted
        )
        return as_predicted and time.perf_counter() + last.time_s > self._deadline_s


def verified_search(
    search: BatchSearch,
    scaling: BatchScaling,
    train: Train,
    budget_bytes: int,
    backend: Backend,
    *,
    graph_of: Callable[[int], Graph] | None = None,
    max_overhead: float | Literal["forward"] | None = "forward",
    at_most: int | None = None,
    solver: str = "auto",
    solve_s: float = 6.0,
    deadline_s: float = math.inf,
    seed: int = 0,
) -> BatchSearch:
    """Trains what a search found and goes down or up from there.

    Args:
        search: by prediction.
        scaling: the problem at any size.
        train: runs a size, see :class:`Trainer`.
        budget_bytes: what the device may have in use; the measured peak is held against it.
        backend: whose allocator decides.
        graph_of: the graph of the train step that really runs at a size; ``None`` where it is the
            scaling's.
        max_overhead, at_most, seed: as in :func:`~keras_remat.batch_size.search.search_batch_size`.
        solver: for the sizes that no known order fits.
        solve_s: seconds for one solve.
        deadline_s: by ``time.perf_counter``; once a size has trained, none is begun that would end
            after it.

    Returns:
        The search with the largest size that trained, its plan with what was measured, and the
        smallest size that did not; the sizes as they were, where none trained.
    """
    verifier = _Verifier(
        search,
        scaling,
        train,
        budget_bytes,
        backend,
        graph_of,
        max_overhead,
        at_most or search.max_batch_size * 2**10,
        solver,
        solve_s,
        deadline_s,
        seed,
    )
    verifier.run()
    return verifier.result()


class _Verifier:
    def __init__(
        self,
        search: BatchSearch,
        scaling: BatchScaling,
        train: Train,
        budget_bytes: int,
        backend: Backend,
        graph_of: Callable[[int], Graph] | None,
        max_overhead: float | Literal["forward"] | None,
        at_most: int,
        solver: str,
        solve_s: float,
        deadline_s: float,
        seed: int,
    ):
        self.search, self.scaling, self.train, self.budget, self.backend = (
            search,
            scaling,
            train,
            budget_bytes,
            backend,
        )
        self.graph_of, self.max_overhead, self.at_most, self.solver = (
            graph_of,
            max_overhead,
            at_most,
            solver,
        )
        self.solve_s, self.deadline_s, self.seed = solve_s, deadline_s, seed
        self.started = time.perf_counter()
        self.longest_s = 0.0  # that a size took
        self.error = 0  # bytes measured above the prediction, of the last size that ran
        self.failures = 0  # since a size trained
        self.good = 0
        # the smallest size that does not train, with what it needs if that is known
        self.failed: tuple[int, int | None] | None = None
        self.probes: list[Probe] = []
        # those found last reach furthest
        self.orders = list(
            dict.fromkeys(p.plan.solution.schedule for p in search.probes if p.plan is not None)
        )

    def run(self) -> None:
        most: int | None = self.search.max_batch_size
        for _ in range(MOST_SIZES):
            if most is None:
                break
            begun = time.perf_counter()
            chosen = self._chosen(most)
            if chosen is None:
                break
            self._train(*chosen)
            self.longest_s = max(self.longest_s, time.perf_counter() - begun)
            most = self._next(chosen[0])
            if self.good and not self._in_time(self.longest_s):
                break

    def _in_time(self, needed_s: float) -> bool:
        return time.perf_counter() + needed_s <= self.deadline_s

    # ---------------------------------------------------------------- which size

    @property
    def _lowest(self) -> int:
        """The least size worth running."""
        return max(self.good + 1, math.ceil(self.good * (1 + RESOLUTION)))

    @property
    def _corrected_budget(self) -> int:
        """What predictions are held against, by what the last size that ran measured above its own.

        How far off a prediction is differs from run to run, with the chunks that the one before
        left free: half of it is taken to be there again, and all of it after the second failure.
        """
        return max(1, self.budget - (self.error if self.failures > 1 else self.error // 2))

    def _next(self, size: int) -> int | None:
        """The most to try after ``size``; ``None`` at the end."""
        if not self.good:
            # the first steps down are small, the next ones longer: there is a way up again
            return (
                max(0, min(size - 1, int(size * (1 - RESOLUTION * 2 ** (self.failures - 1)))))
                or None
            )
        if self.failed is None:
            most = self.at_most
        else:  # the peak of a size that failed tells what orders reach; without it, half of the way is tried
            most = (
                self.failed[0] - 1
                if self.failed[1] is not None
                else (self.good + self.failed[0]) // 2
            )
            if most < self._lowest <= self.failed[0] - 1:
                most = self._lowest
        return most if most >= self._lowest else None

    def _chosen(self, most: int) -> tuple[int, Plan] | None:
        """The largest size up to ``most`` that an order reaches by the corrected prediction, with
        its plan there."""
        found = SizeSearch(
            self.scaling, self._corrected_budget, self.backend, self.max_overhead, most, self.seed
        )
        first = min(most, int(self._lowest * _AIM) if self.good else self.search.max_batch_size)
        orders = [*reversed(self.orders), Schedule.store_all(self.scaling.at(1).graph)]
        found.best_of(orders, first, downwards=not self.good)
        if not found.good and (not self.good or self._in_time(self.solve_s + self.longest_s)):
            found.attempt(first, self.solver, self.solve_s)
        if found.good < self._lowest:  # what a replay of the allocator says holds
            return None if self.backend.memory.order_matters else self._worth_running(first)
        plan = found.fastest
        if plan.solution.schedule not in self.orders:
            self.orders.append(plan.solution.schedule)
        return found.good, plan

    def _worth_running(self, size: int) -> tuple[int, Plan] | None:
        """A size that no order is predicted to fit, with the order that is nearest."""
        problem, budget = self.scaling.at(size), int((1 + WORTH_RUNNING) * self._corrected_budget)
        plans = [reused_plan(problem, order, budget, self.backend.memory) for order in self.orders]
        allowed = [
            plan
            for plan in plans
            if plan is not None and is_allowed(problem, plan, self.max_overhead)
        ]
        return (size, min(allowed, key=lambda plan: plan.predicted.peak_bytes)) if allowed else None

    # ---------------------------------------------------------------- running it

    def _train(self, size: int, plan: Plan) -> None:
        """Trains a size and notes what came of it."""
        own = self._for_its_graph(size, plan)
        usage = None if own is None else self.train(size, own)
        if own is not None and usage is not None:
            self.error = usage.peak_bytes - own.predicted.peak_bytes
            self.probes.append(
                Probe.of(size, replace(own, measured=usage, budget_bytes=self.budget))
            )
            if usage.peak_bytes <= self.budget:
                self.good, self.failures = size, 0
                return
        self.failures += 1
        if self.failed is None or size < self.failed[0]:
            self.failed = size, None if usage is None else usage.peak_bytes

    def _for_its_graph(self, size: int, plan: Plan) -> Plan | None:
        """``plan``, or one made anew where the step that runs at this size has other ops; ``None``
        where none fits."""
        assert plan.problem is not None
        graph = plan.problem.graph if self.graph_of is None else self.graph_of(size)
        if graph.has_ops_of(plan.problem.graph):
            return plan
        problem = carried_problem(self.scaling.at(size), graph)
        differs = f"the train step has {len(graph.ops)} ops at this size, {len(plan.problem.graph.ops)} at others"
        try:
            plan = plan_problem(
                problem,
                self._corrected_budget,
                self.backend,
                solver="greedy",
                time_limit_s=self.solve_s,
                seed=self.seed,
            )
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            self.probes.append(Probe(size, None, 0.0, f"{differs}: {error}"))
            return None
        if not is_allowed(problem, plan, self.max_overhead):
            self.probes.append(
                Probe(size, None, 0.0, f"{differs}: overhead {plan.overhead:.1%} is over the bound")
            )
            return None
        return plan

    def result(self) -> BatchSearch:
        search = replace(self.search, verification_time_s=time.perf_counter() - self.started)
        failed, failed_peak = self.failed or (None, None)
        search = replace(
            search,
            probes=(*search.probes, *self.probes),
            failed_batch_size=failed,
            failed_peak_bytes=failed_peak,
        )
        if not self.good:
            return search
        fitting = [p for p in search.probes if p.plan is not None and p.batch_size <= self.good]
        return replace(
            search,
            max_batch_size=self.good,
            plain_batch_size=min(search.plain_batch_size, self.good),
            fastest_batch_size=max(fitting, key=lambda p: p.samples_per_s).batch_size,
        )
