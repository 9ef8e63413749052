"""``find_max_batch_size``: the largest batch that really trains.

What :mod:`keras_remat.batch_size.search` finds by prediction is run, and where prediction and
device disagree, the device wins: a found size is trained for a few real steps, on the given samples
repeated, and every variable is put back. Which size is the next one is decided as inside ``fit``
(:mod:`keras_remat.batch_size.size_chooser`).

A size may have a graph of its own, where the framework folds an op at some sizes and not at others:
every size is compared with its own trace before it runs, and planned anew where the ops are others.

Where the given batch fits under no schedule of whole ops, and fits in slices, it is sizes in the
same slices that are searched (:mod:`keras_remat.batch_size.step_scaling`).

One file, though a little long: a search and the trials that follow it share one time limit.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from keras_remat.backends.base import Backend, TracedStep, preserved_state
from keras_remat.backends.batches import batch_size_of, repeated_batch, sliced
from keras_remat.backends.example_batches import example_batch
from keras_remat.batch_size import search_work
from keras_remat.batch_size.cost_fit import transfer_costs
from keras_remat.batch_size.found import BatchSearch, SizeTrial, is_allowed
from keras_remat.batch_size.scaling import Scaling, traced_at
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.step_scaling import in_slices, step_scaling
from keras_remat.checks import check_seconds, is_number
from keras_remat.core.graph import Graph
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Usage
from keras_remat.core.slices import Slicing
from keras_remat.core.target import Target
from keras_remat.errors import (
    InfeasibleBudgetError,
    RematError,
    ScheduleNotFoundError,
    UnsupportedModelError,
    without_inner_frames,
)
from keras_remat.planning.advice import advising
from keras_remat.planning.make_plan import (
    TracedModel,
    target_of,
    traced_as_it_trains,
)
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.planning.slicing import plan_with_slices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FindOptions:
    """Rules what the parts of the time limit are for.

    Args:
        search, least_clock: the share of the limit that the search may take, and the least that the
            clock leaves it, however long tracing took.
        quick: of that, what the quick solver gets. The thorough solver gets the rest.
        running: of the thorough search's time, what is kept for running a size at most.
        first_step: a first step, with its compilation, takes about so many times the predicted
            seconds.
        solve: of the limit, what one solve afterwards may take.
    """

    search: float = 0.8
    least_clock: float = 0.3
    quick: float = 0.25
    running: float = 0.9
    first_step: float = 2.5
    solve: float = 0.1


_OPTIONS = FindOptions()
#: Trains a size under a plan; what a step takes, or ``None`` when the device ran out of memory.
Train = Callable[[int, Plan], Usage | None]


@without_inner_frames
def find_max_batch_size(
    model: Any,
    batch: Any,
    memory_limit: int | str | None = None,
    *,
    card: str | Target | None = None,
    max_overhead: float | Literal["forward"] | None = "forward",
    profile: Literal["measured", "estimated"] | None = None,
    margin: float = 0.05,
    time_limit_s: float = 60.0,
    seed: int = 0,
    compilation: str = "auto",
) -> BatchSearch:
    """Finds the largest batch a model can train with; the model comes back as it was.

    Args:
        model: a compiled Keras model.
        batch: a batch to begin with: ``(x, y[, sample_weight])``, or an int where inputs and
            targets follow from the model. Where it fits only with some ops in slices of the batch,
            sizes in such slices are searched; where it does not fit, its first half is tried, and
            so on.
        memory_limit: every byte the device's allocator may have in use; ``None`` is all that the
            device has, and of a card what a framework uses of it by default.
        card: as in :func:`~keras_remat.planning.make_plan.make_plan`; the answer is a prediction.
        max_overhead: bound on the slowdown per sample, (time − store-all time) / store-all time;
            ``"forward"``, the default, is one extra forward pass, the rule of the Checkmate paper;
            ``None`` lifts it.
        profile: ``"measured"``, the default, runs a few steps at the given batch, and up to
            :data:`~keras_remat.batch_size.size_chooser.MOST_SIZES` of the sizes found, so that the
            answer is a size that trained; ``"estimated"``, the only one for a card, runs nothing,
            and the answer is a prediction.
        margin: share of the limit that predictions keep free; a measured peak may take it.
        time_limit_s: for everything: tracing, measuring, the search, and the sizes that run. The
            first size runs however late it is, and so do smaller ones until one has trained; after
            that none is begun that would end too late.
        seed: for the solver.
        compilation: as in ``RematAutotune``; ``"auto"`` searches for the model's own mode.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: the model cannot be rematerialized, or its graph changes with the
            batch size.
        ValueError, TypeError: wrong arguments.
    """
    _check_bound(max_overhead)
    check_seconds("time_limit_s", time_limit_s)
    target, started = target_of(card), time.perf_counter()
    backend, step = _first_that_fits(
        model,
        batch,
        lambda batch: traced_as_it_trains(
            model, batch, memory_limit, margin, profile, seed, compilation, target
        ),
    )
    runs = target is None and profile != "estimated"
    slicing = step.traced.slicing
    parts = 1 if slicing is None else slicing.parts
    bounds = _Bounds(started, time_limit_s, max_overhead, parts, seed)
    if not runs:
        return _estimated(backend, model, step, bounds).naming(card=step.card)
    scaling = step_scaling(backend, model, step)
    search = _searched(backend, step, scaling, bounds, runs=True)
    runner = SizeRunner(backend, model, step.batch, slicing)
    chooser = bounds.chooser(backend, search)
    found = verified_search(search, scaling, chooser, step.limit, runner, runner.graph)
    return found.naming(slicing=slicing)


def _check_bound(max_overhead: Any) -> None:
    is_bound = is_number(max_overhead) and max_overhead >= 0
    if not is_bound and max_overhead is not None and max_overhead != "forward":
        raise ValueError(
            f'max_overhead must be at least 0, None or "forward", got {max_overhead!r}'
        )


@dataclass(frozen=True)
class _Bounds:
    """Says what bounds a search.

    Args:
        started_s: when it began, by ``time.perf_counter``.
        time_limit_s, max_overhead, seed: as of :func:`find_max_batch_size`.
        parts: every size is a multiple of it.
    """

    started_s: float
    time_limit_s: float
    max_overhead: float | Literal["forward"] | None
    parts: int
    seed: int

    def chooser(self, backend: Backend, search: BatchSearch) -> SizeChooser:
        """Returns what chooses the sizes that run after a search."""
        return SizeChooser.after(
            backend,
            search,
            max_overhead=self.max_overhead,
            solve_s=_OPTIONS.solve * self.time_limit_s / search_work.OPTIONS.patience,
            deadline_s=self.started_s + self.time_limit_s,
            multiple=self.parts,
            seed=self.seed,
        )


def _searched(
    backend: Backend, step: TracedModel, scaling: Scaling, bounds: _Bounds, *, runs: bool
) -> BatchSearch:
    """Returns what a search by prediction finds.

    Args:
        runs: whether sizes run afterwards, which takes time of the limit.
    """
    now_s, limit_s = time.perf_counter(), bounds.time_limit_s
    traced_s, parts = now_s - bounds.started_s, bounds.parts
    deadline_s = max(bounds.started_s + limit_s, now_s + _OPTIONS.least_clock * limit_s)
    search_s = _OPTIONS.search * limit_s
    late_s = (1 - _OPTIONS.quick) * search_s

    def running_s(plan: Plan) -> float:
        """Estimates how long a trial of one batch size takes: trace, solve, first step."""
        return min(
            _OPTIONS.running * late_s, traced_s + _OPTIONS.first_step * plan.predicted.time_s
        )

    # what cannot be met is one sample, or one for each slice
    with advising(scaling.at(parts), step.limit, parts, backend, seed=bounds.seed):
        search = search_batch_size(
            scaling,
            batch_size_of(step.batch),
            step.limit,
            backend,
            max_overhead=bounds.max_overhead,
            time_limit_s=_OPTIONS.quick * search_s,
            late_solver="auto",
            late_time_limit_s=late_s,
            afterwards_s=running_s if runs else None,
            deadline_s=deadline_s,
            multiple=parts,
            seed=bounds.seed,
        )
    spent_s = time.perf_counter() - bounds.started_s
    return replace(search, search_time_s=spent_s, time_limit_s=limit_s)


def _estimated(backend: Backend, model: Any, step: TracedModel, bounds: _Bounds) -> BatchSearch:
    """Returns what a search by prediction alone finds: sizes of whole ops, or, where the given
    batch fits in slices only, sizes in such slices.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    scaling = step_scaling(backend, model, step)
    try:
        found = _searched(backend, step, scaling, bounds, runs=False)
    except (InfeasibleBudgetError, ScheduleNotFoundError):
        further = _estimated_in_slices(backend, model, step, bounds)
        if further is None:
            raise
        return replace(further, plain_batch_size=0)
    if found.max_batch_size >= batch_size_of(step.batch):
        return found
    further = _estimated_in_slices(backend, model, step, bounds)
    if further is None or further.max_batch_size <= found.max_batch_size:
        return found
    return replace(further, plain_batch_size=found.plain_batch_size)


def _estimated_in_slices(
    backend: Backend, model: Any, step: TracedModel, bounds: _Bounds
) -> BatchSearch | None:
    """Returns what a search by prediction finds in the slices in which a step fits; ``None`` where
    it fits whole, or in no slices."""
    size = batch_size_of(step.batch)
    request = PlanRequest.on(
        backend,
        problem=step.problem,
        batch_size=size,
        limit=step.limit,
        solver="greedy_first",
        seconds=_OPTIONS.solve * bounds.time_limit_s,
        seed=bounds.seed,
    )
    try:
        traced, problem, plan = plan_with_slices(step.traced, request, backend.estimated_profile)
        slicing, step = traced.slicing, replace(step, traced=traced, problem=problem)
        if slicing is None:
            return None
        scaling, bounds = step_scaling(backend, model, step), replace(bounds, parts=slicing.parts)
        found = _searched(backend, step, scaling, bounds, runs=False)
        allowed = is_allowed(problem, plan.predicted.time_s, bounds.max_overhead)
        if found.max_batch_size < size and allowed:
            probes = (*found.probes, SizeTrial(size, plan))
            found = replace(found, max_batch_size=size, probes=probes)
        return found.naming(slicing=slicing)
    except (InfeasibleBudgetError, ScheduleNotFoundError, UnsupportedModelError) as error:
        logger.debug("keras_remat: sizes in slices: %s", error)
        return None


def _first_that_fits(
    model: Any, batch: Any, traced: Callable[[Any], tuple[Backend, TracedModel]]
) -> tuple[Backend, TracedModel]:
    """Traces a batch, or its first half, quarter and so on, where no plan to measure it under is
    found.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
    """
    too_large: RematError | None = None
    while True:
        try:
            return traced(batch)
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            too_large = error
            batch = example_batch(model, batch)
            size = batch_size_of(batch) // 2
            if not size:
                raise
            batch = sliced(batch, slice(size))
        except Exception:  # whatever the layers of a user's model raise
            if too_large is None:
                raise
            raise too_large from None  # the model takes no batch as small as that


class SizeRunner:
    """Trains a batch, its samples repeated, in steps of any size; the model's variables are put
    back after each size.

    Args:
        slicing: which ops run in slices.
    """

    def __init__(self, backend: Backend, model: Any, batch: Any, slicing: Slicing | None = None):
        self._backend, self._model, self._batch = backend, model, batch
        self._slicing = slicing
        self._traced: tuple[int, TracedStep] | None = None  # of the newest size

    def _trace(self, size: int) -> TracedStep:
        if self._traced is None or self._traced[0] != size:
            self._traced = None
            gc.collect()  # the step before is in reference cycles
            whole = traced_at(self._backend, self._model, self._batch, size)
            self._traced = size, in_slices(whole, self._slicing)
        return self._traced[1]

    def graph(self, size: int) -> Graph:
        """Returns the train step's graph at a size.

        Raises:
            UnsupportedModelError: the model cannot take a batch of that size.
        """
        return self._trace(size).graph

    def __call__(self, size: int, plan: Plan) -> Usage | None:
        """Trains two steps of a size and returns what the second took; ``None`` when the device ran
        out of memory. The first call of a step autotunes, and says nothing about later ones."""
        backend, traced = self._backend, self._trace(size)
        known = plan.problem
        if known is None:
            raise ValueError("a plan that was loaded tells no costs: plan anew")
        problem = replace(known, graph=traced.graph, budget_bytes=plan.budget_bytes)
        try:
            with preserved_state(backend, self._model) as put_back:
                if backend.memory.order_matters:
                    put_back()  # the peak depends on what ran before
                batch = repeated_batch(self._batch, size)
                run = backend.lower(traced, problem, plan.solution.schedule)
                backend.measure(lambda: run(batch))
                _, usage = backend.measure(lambda: run(batch))
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            return None
        if backend.device.has_statistics:
            backend.memory.observe(problem, plan.solution.schedule, usage.peak_bytes)
        return usage


def verified_search(
    search: BatchSearch,
    scaling: Scaling,
    chooser: SizeChooser,
    limit: Limit,
    train: Train,
    graph_of: Callable[[int], Graph] | None = None,
) -> BatchSearch:
    """Trains what a search found and goes down or up from there.

    Args:
        chooser: chooses the sizes.
        limit: their predictions leave its margin free, and what they measure need not.
        train: runs a size, see :class:`SizeRunner`.
        graph_of: the graph of the train step that really runs at a size; ``None`` where it is the
            scaling's.

    Returns:
        The search with the largest size that trained, its plan with what was measured, and the
        smallest size that did not; the sizes as they were, where none trained.
    """
    started, probes = time.perf_counter(), list(search.probes)
    while True:
        chooser, chosen = chooser.choose(scaling, limit)
        if chosen is None:
            break
        size, plan = chosen
        problem = scaling.at(size)
        try:
            graph = problem.graph if graph_of is None else graph_of(size)
        except UnsupportedModelError as error:
            own: Plan | SizeTrial = SizeTrial(size, None, str(error))
        else:
            own = _for_its_graph(size, plan, problem, graph, chooser)
        if isinstance(own, SizeTrial):  # the reason why not
            probes.append(own)
            chooser = chooser.after_trial(size, None, 0, fits=False)
            continue
        usage = train(size, own)
        if usage is None:
            chooser = chooser.after_trial(size, own, 0, fits=False)
            continue
        probes.append(
            SizeTrial(size, replace(own, measured=usage, budget_bytes=limit.usable_bytes))
        )
        fits = limit.holds(usage.peak_bytes)
        chooser = chooser.after_trial(size, own, usage.peak_bytes, fits=fits)
    return _with_verified(
        search, probes, chooser, verification_time_s=time.perf_counter() - started
    )


def _for_its_graph(
    size: int, plan: Plan, planned: Problem, graph: Graph, chooser: SizeChooser
) -> Plan | SizeTrial:
    """Returns ``plan``, or one made anew where the step that runs at this size has other ops; a
    probe with the reason where none fits."""
    if graph.has_ops_of(planned.graph):
        return plan
    problem, others = transfer_costs(planned, graph), len(planned.graph.ops)
    differs = f"the train step has {len(graph.ops)} ops at this size, {others} at others"
    try:
        plan = plan_for(
            PlanRequest.on(
                chooser.backend,
                problem=problem,
                batch_size=size,
                limit=Limit(plan.budget_bytes),
                solver="greedy",
                seconds=chooser.solve_s,
                seed=chooser.seed,
            )
        )
    except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
        return SizeTrial(size, None, f"{differs}: {error}")
    if not is_allowed(problem, plan.predicted.time_s, chooser.max_overhead):
        return SizeTrial(size, None, f"{differs}: overhead {plan.overhead:.1%} is over the bound")
    return plan


def _with_verified(
    search: BatchSearch,
    probes: list[SizeTrial],
    chooser: SizeChooser,
    *,
    verification_time_s: float,
) -> BatchSearch:
    """Returns the search with the results of the sizes that ran."""
    failed, failed_peak = chooser.failed
    search = replace(
        search,
        probes=tuple(probes),
        failed_batch_size=failed or None,
        failed_peak_bytes=failed_peak or None,
        verification_time_s=verification_time_s,
        ended_by_clock=search.ended_by_clock or chooser.ended_by_clock,
    )
    if not chooser.trained:
        return search
    fitting = [p for p in probes if p.plan is not None and p.batch_size <= chooser.trained]
    return replace(
        search,
        max_batch_size=chooser.trained,
        plain_batch_size=min(search.plain_batch_size, chooser.trained),
        fastest_batch_size=max(fitting, key=lambda p: p.samples_per_s).batch_size,
    )
