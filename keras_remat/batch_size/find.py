"""Finds the largest batch that really trains: ``find_max_batch_size``.

:mod:`keras_remat.batch_size.search` finds sizes by prediction. Where there is a device, these sizes
are trained (:mod:`keras_remat.batch_size.trials`). Search and trials share one time limit.

Where the given batch fits under no schedule of whole ops, but fits in slices, sizes in the same
slices are searched (:mod:`keras_remat.batch_size.step_scaling`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from keras_remat.backends.base import Backend
from keras_remat.backends.batches import batch_size_of, sliced
from keras_remat.backends.example_batches import example_batch
from keras_remat.batch_size import search_work
from keras_remat.batch_size.found import BatchSearch, SizeTrial, is_allowed
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.step_scaling import Scaling, searched_by_traces, step_scaling
from keras_remat.batch_size.trials import SizeRunner, verified_search
from keras_remat.checks import check_seconds, is_number
from keras_remat.core.schedule import Schedule
from keras_remat.core.target import Target
from keras_remat.errors import (
    BudgetError,
    RematError,
    UnsupportedModelError,
    statement_of,
    without_inner_frames,
)
from keras_remat.planning.advice import advising
from keras_remat.planning.make_plan import (
    TracedModel,
    target_of,
    traced_as_it_trains,
)
from keras_remat.planning.request import PlanRequest
from keras_remat.planning.slicing import plan_with_slices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FindOptions:
    """Rules how the time limit is divided.

    Args:
        search_share: share of the limit that the search may take, however long tracing took.
        quick_share: share of the search's time for the quick solver; the thorough solver gets the
            rest.
        solve_share: share of the limit that one solve after the search may take.
        first_search_share: share of the limit that a search for a size to learn from may take.
    """

    search_share: float = 0.8
    quick_share: float = 0.25
    solve_share: float = 0.1
    first_search_share: float = 0.1


_OPTIONS = FindOptions()


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
        memory_limit: bytes that the device's allocator may have in use; ``None`` is all of the
            device's memory; of a card's, what a framework uses by default.
        card: as in :func:`~keras_remat.planning.make_plan.make_plan`; the answer is a prediction.
        max_overhead: bound on the slowdown per sample, (time − store-all time) / store-all time;
            ``"forward"``, the default, is one extra forward pass, the rule of the Checkmate paper;
            ``None`` lifts it.
        profile: ``"measured"``, the default, runs a few steps at the given batch, and up to
            :data:`~keras_remat.batch_size.size_chooser.MOST_SIZES` of the sizes found, so that the
            answer is a size that trained; ``"estimated"``, the only one for a card, runs nothing,
            and the answer is a prediction.
        margin: share of the limit that predictions keep free; a measured peak may take it.
        time_limit_s: seconds for tracing, measuring, the search, and the sizes that run. The search
            gets 0.8 of it, however long tracing and measuring took: on a busy machine, all together
            may take longer. Then the first size runs, and smaller ones until one has trained,
            however late it is. After that, no size is begun that would end too late.
        seed: seed of the solver.
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
    asked = memory_limit, margin, profile, seed, compilation, target
    backend, step = _first_that_fits(
        model,
        batch,
        lambda batch: traced_as_it_trains(model, batch, *asked),
        runs=target is None or target.is_live,
    )
    parts = 1 if step.traced.slicing is None else step.traced.slicing.parts
    bounds = _Bounds(started, time_limit_s, max_overhead, parts, seed)
    if target is None and profile != "estimated":
        return _trained(backend, model, step, bounds)
    return _estimated(backend, model, step, bounds).naming(card=step.card)


def _check_bound(max_overhead: Any) -> None:
    is_bound = is_number(max_overhead) and max_overhead >= 0
    if not is_bound and max_overhead is not None and max_overhead != "forward":
        raise ValueError(
            f'max_overhead must be at least 0, None or "forward", got {max_overhead!r}'
        )


@dataclass(frozen=True)
class _Bounds:
    """Holds the bounds of a search.

    Args:
        started_s: seconds of ``time.perf_counter`` at which the search began.
        time_limit_s, max_overhead, seed: as in :func:`find_max_batch_size`.
        parts: number of slices; every size is a multiple of it.
    """

    started_s: float
    time_limit_s: float
    max_overhead: float | Literal["forward"] | None
    parts: int
    seed: int

    def chooser(self, backend: Backend, search: BatchSearch) -> SizeChooser:
        """Returns the chooser of the sizes that run after a search."""
        return SizeChooser.after(
            backend,
            search,
            max_overhead=self.max_overhead,
            solve_s=_OPTIONS.solve_share * self.time_limit_s / search_work.OPTIONS.patience,
            deadline_s=self.started_s + self.time_limit_s,
            multiple=self.parts,
            seed=self.seed,
        )


def _searched(
    backend: Backend,
    model: Any,
    step: TracedModel,
    scaling: Scaling,
    bounds: _Bounds,
    known: tuple[int, Schedule] | None = None,
) -> BatchSearch:
    """Searches by prediction.

    Args:
        known: see :func:`~keras_remat.batch_size.search.search_batch_size`.
    """
    limit_s, parts = bounds.time_limit_s, bounds.parts
    search_s = _OPTIONS.search_share * limit_s
    search = partial(
        search_batch_size,
        scaling,
        batch_size_of(step.batch),
        step.limit,
        backend,
        max_overhead=bounds.max_overhead,
        time_limit_s=_OPTIONS.quick_share * search_s,
        late_time_limit_s=(1 - _OPTIONS.quick_share) * search_s,
        multiple=parts,
        seed=bounds.seed,
        known=known,
    )
    # a search fails at its smallest size: one sample, or one for each slice
    with advising(scaling.at(parts), step.limit, parts, backend, seed=bounds.seed):
        found = searched_by_traces(backend, model, step.batch, scaling, search)
    spent_s = time.perf_counter() - bounds.started_s
    return replace(found, search_time_s=spent_s, time_limit_s=limit_s)


def _learn_of_larger(
    backend: Backend,
    model: Any,
    step: TracedModel,
    scaling: Scaling,
    runner: SizeRunner,
    bounds: _Bounds,
) -> tuple[int, Schedule] | None:
    """Trains a size that a first, short search finds, and returns its size and order.

    The kernels' workspace is recorded at that size, so that the full search does not extrapolate
    from a few samples. Returns ``None`` where nothing ran or nothing can be recorded.
    """
    if not runner.learns:
        return None
    search = partial(
        search_batch_size,
        scaling,
        batch_size_of(step.batch),
        step.limit,
        backend,
        max_overhead=bounds.max_overhead,
        time_limit_s=_OPTIONS.first_search_share * bounds.time_limit_s,
        multiple=bounds.parts,
        seed=bounds.seed,
    )
    try:
        found = searched_by_traces(backend, model, step.batch, scaling, search)
        size, plan = found.max_batch_size, found.plan
        if runner.graph(size).has_ops_of(scaling.at(size).graph):
            runner(size, plan)
            return size // bounds.parts, plan.solution.schedule
    except (BudgetError, UnsupportedModelError) as error:
        logger.debug(
            "keras_remat: no first look at larger batches: %s", statement_of(error)
        )  # told later
    return None


def _trained(backend: Backend, model: Any, step: TracedModel, bounds: _Bounds) -> BatchSearch:
    """Searches, trains the sizes found, and returns the search with the results.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    scaling = step_scaling(backend, model, step)
    runner = SizeRunner(backend, model, step.batch, scaling)
    known = _learn_of_larger(backend, model, step, scaling, runner, bounds)
    search = _searched(backend, model, step, scaling, bounds, known)
    chooser = bounds.chooser(backend, search)
    found = verified_search(search, scaling, chooser, step.limit, runner, runner.graph)
    return found.naming(slicing=scaling.slicing)


def _estimated(backend: Backend, model: Any, step: TracedModel, bounds: _Bounds) -> BatchSearch:
    """Searches by prediction alone.

    Sizes are of whole ops, or, where the given batch fits only in slices, of steps in such slices.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    scaling = step_scaling(backend, model, step)
    try:
        found = _searched(backend, model, step, scaling, bounds)
    except BudgetError:
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
    """Searches by prediction in the slices in which a step fits.

    Returns ``None`` where the step fits whole, or in no slices.
    """
    size = batch_size_of(step.batch)
    request = PlanRequest.on(
        backend,
        problem=step.problem,
        batch_size=size,
        limit=step.limit,
        solver="greedy_first",
        seconds=_OPTIONS.solve_share * bounds.time_limit_s,
        seed=bounds.seed,
    )
    try:
        traced, problem, plan = plan_with_slices(step.traced, request, backend.estimated_profile)
        slicing, step = traced.slicing, replace(step, traced=traced, problem=problem)
        if slicing is None:
            return None
        scaling, bounds = step_scaling(backend, model, step), replace(bounds, parts=slicing.parts)
        found = _searched(backend, model, step, scaling, bounds)
        allowed = is_allowed(problem, plan.predicted.time_s, bounds.max_overhead)
        if found.max_batch_size < size and allowed:
            probes = (*found.probes, SizeTrial(size, plan))
            found = replace(found, max_batch_size=size, probes=probes)
        return found.naming(slicing=slicing)
    except (BudgetError, UnsupportedModelError) as error:
        logger.debug("keras_remat: sizes in slices: %s", statement_of(error))
        return None


def _first_that_fits(
    model: Any, batch: Any, traced: Callable[[Any], tuple[Backend, TracedModel]], *, runs: bool
) -> tuple[Backend, TracedModel]:
    """Traces a batch; where no plan to measure it is found, its first half, quarter and so on.

    Args:
        runs: whether steps may run. If not, a batch that is made up takes no memory.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
    """
    too_large: RematError | None = None
    while True:
        try:
            return traced(batch)
        except BudgetError as error:
            too_large = error.with_traceback(None)  # its frames hold the step
            batch = example_batch(model, batch, seed=0 if runs else None)
            size = batch_size_of(batch) // 2
            if not size:
                raise
            batch = sliced(batch, slice(size))
        except Exception:  # whatever the layers of a user's model raise
            if too_large is None:
                raise
            raise too_large from None  # the model takes no batch as small as that
