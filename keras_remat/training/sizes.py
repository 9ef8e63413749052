"""Chooses the batch size that a running ``fit`` trains with: the loader's, or a larger one.

With ``batch_size="keep"`` every loader batch is one step. Otherwise the first steps train loader
batches as they come; once their costs are known, the largest batch that fits is searched
(:mod:`keras_remat.batch_size.search`), and from then on samples are held back until a batch of the
chosen size is full.

The search only predicts. The steps that train are measured, and the size goes up or down by the
same rule as outside of ``fit`` (:mod:`keras_remat.batch_size.sizes`). With ``"fastest"``, sizes are
doubled as long as steps take less time for a sample; before a larger size stays, the loader's is
measured once more.

One file, though a little long: every move from one size to another.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

from keras_remat.backends.batches import batch_size_of
from keras_remat.batch_size import search_work
from keras_remat.batch_size.found import BatchSearch, overhead_bound
from keras_remat.batch_size.scaling import graph_at
from keras_remat.batch_size.search import search_batch_size
from keras_remat.batch_size.size_chooser import SizeChooser
from keras_remat.batch_size.sizes import largest_wanted
from keras_remat.batch_size.step_scaling import (
    Scaling,
    searched_by_traces,
    searched_further,
    searched_in_slices,
)
from keras_remat.core.limit import Limit
from keras_remat.errors import BudgetError, RematError, UnsupportedModelError
from keras_remat.planning.plan import Plan
from keras_remat.training import size_costs, steps, tell
from keras_remat.training.batches import Due, divisible
from keras_remat.training.contest import compared
from keras_remat.training.decide import Phase
from keras_remat.training.fit_state import FitState
from keras_remat.training.grouping import bytes_beside
from keras_remat.training.record import COMPARED_STEPS, FitRecord, SizesRecord
from keras_remat.training.shape_state import PriorPlans, StepConstraints
from keras_remat.training.tools import running_tools


@dataclass(frozen=True)
class SizeOptions:
    """Limits how much of a ``fit`` may go into the choice of a batch size.

    Args:
        search_steps, search_share: most time of a search, in steps of training, and as a share of
            the steps that are left.
        least_search_s, most_search_s: bounds of that time in seconds, the solves while sizes are
            tried included.
        quick, late, trial_solves, solve: shares of that time for the quick solver, for the thorough
            one, for all solves while sizes are tried, and for one such solve.
        least_profiled_steps: steps that must be left for a step to be recorded, because recording
            takes as long as 8 to 20 steps.
        first_margin, pool_margin: least margin of a first larger batch, as a share of the limit;
            ``pool_margin`` where plain steps leave the memory pool in pieces. MobileNetV2's steps
            took 2 % and 9.5 % over prediction.
        next_margin: least margin of every later larger batch, and of plans for larger batches.
            Without it, some of MobileNetV2's steps took up to 3.3 % more than a limit without a
            margin (benchmarks/results/busy.md); they were up to 3.5 % over prediction.
    """

    search_steps: int = 200
    search_share: float = 0.2
    least_search_s: float = 3.0
    most_search_s: float = 60.0
    quick: float = 0.3
    late: float = 0.4
    trial_solves: float = 0.3
    solve: float = 0.1
    least_profiled_steps: int = 100
    first_margin: float = 0.03
    pool_margin: float = 0.1
    next_margin: float = 0.05


OPTIONS = SizeOptions()


def constraints_of(fit: FitState, due: Due) -> StepConstraints:
    """Returns the constraints on how a batch is trained.

    A batch that is larger than any that has trained is refused where it misses the limit.
    """
    sizes = fit.record.sizes
    if due.is_rest:
        return StepConstraints(require_planned=due.is_joined)
    if sizes.chosen is None:
        may_split = fit.options.batch_size != "keep"
        return StepConstraints(may_split=may_split, wants_profile=_wants_profile(fit, sizes))
    grows = sizes.chooser is not None and due.size > sizes.chooser.trained
    least_margin = OPTIONS.next_margin if due.size > sizes.loader else 0.0
    return StepConstraints(allow_over_limit=not grows, least_margin=least_margin)


def is_comparing(fit: FitState) -> bool:
    """Returns whether the times of steps decide which size trains."""
    return fit.options.batch_size == "fastest" and fit.record.sizes.is_looking


# -------------------------------------------------------------------- what was seen


def after_step(fit: FitState, due: Due, batch: Any) -> FitRecord:
    """Returns the record after a batch was trained; another size may follow."""
    record, size, is_fastest = fit.record, due.size, fit.options.batch_size == "fastest"
    if due.is_rest:
        return record
    if record.sizes.chosen is not None:
        return _after_measured(fit, record, size)
    if record.sizes.is_searching and record.is_settled and _tells(fit, batch):
        costs = record.running.costs
        if costs is not None and costs.micro_batches > 1:
            fit.event(*tell.no_larger_batch("it is trained in micro-batches."))
            return _with(record, is_searching=False)
        if not is_fastest or len(record.sizes.step_s) == COMPARED_STEPS:
            return _searched(fit, _with(record, is_searching=False), batch)
    elif not record.sizes.is_searching and size == record.sizes.loader and is_fastest:
        return _after_measured(fit, record, size)
    return record


def after_failure(fit: FitState, due: Due, error: RematError) -> FitRecord:
    """Returns the record after a batch could not be trained; a smaller size follows.

    Raises:
        RematError: ``error``, where no smaller size follows.
    """
    sizes, cannot_be_run = fit.record.sizes, isinstance(error, UnsupportedModelError)
    if not cannot_be_run and not isinstance(error, BudgetError):
        raise error
    if due.is_joined:
        return fit.record
    if due.is_rest or sizes.chosen is None:
        raise error
    if cannot_be_run and due.size > sizes.loader:
        return _as_given(fit, fit.record, tell.no_larger_batch(error))
    if cannot_be_run or sizes.chooser is None:
        raise error
    chooser = sizes.chooser.after_trial(due.size, None, 0, fits=False)
    return _go_on(fit, _with(fit.record, chooser=chooser), tell.does_not_fit(due.size, error))


def after_other_samples(fit: FitState, error: UnsupportedModelError) -> FitRecord:
    """Returns the record after a batch came that cannot be joined with others, or be split."""
    sizes = fit.record.sizes
    if sizes.size > sizes.loader:
        return _as_given(fit, fit.record, tell.no_larger_batch(error))
    fit.event(*tell.no_other_batch(error))
    return _changed(fit, fit.record, sizes.loader)


def after_epoch(fit: FitState) -> FitRecord:
    """Returns the record after an epoch, and says why no larger batch was searched in it.

    Where the epoch's length was unknown before and the size leaves too few updates, a smaller size
    follows.
    """
    record, sizes, wanted = fit.record, fit.record.sizes, fit.options.batch_size
    if sizes.is_searching and sizes.mostly_others:
        fit.warn(*tell.first_batch_is_odd(sizes.loader))
        record = _with(record, is_searching=False)
    if isinstance(wanted, int) or sizes.chosen is None or not sizes.epoch_samples:
        return record
    most = largest_wanted(wanted, sizes.loader, sizes.epoch_samples)
    if most is None or sizes.chosen <= most:
        return record
    size = max(sizes.loader, most - most % _multiple(fit, sizes.scaling))
    return _changed(fit, _with(record, chooser=None), size)


# -------------------------------------------------------------------- the search


def _tells(fit: FitState, batch: Any) -> bool:
    """Returns whether a batch has the loader's size and the reference shape."""
    is_of_size = batch_size_of(batch) == fit.record.sizes.loader
    return is_of_size and fit.signatures.of(batch) == fit.record.running.reference


def _searched(fit: FitState, record: FitRecord, batch: Any) -> FitRecord:
    loader, wanted, at_most = record.sizes.loader, fit.options.batch_size, _at_most(fit, record)
    if isinstance(wanted, int) and wanted <= loader:
        return record if wanted == loader else _made_smaller(fit, record, batch, wanted)
    if at_most is not None and at_most <= loader:
        return _as_given(fit, record, tell.keeps_updates())
    backend = running_tools(fit).backend
    record = _with(record, held_bytes=_bytes_held_beside(fit, batch))
    try:
        with fit.long_task("searching the largest batch that fits"):
            record = size_costs.with_reference_traced(fit, record, batch)
            find = partial(_search, fit, record, batch, at_most)
            scaling, search = searched_in_slices(size_costs.scaling_of(fit, record, batch), find)
            if isinstance(wanted, int) and at_most is not None:
                limit = _limit(fit, record)
                in_slices = size_costs.scalings_in_slices(record, scaling, at_most, limit)
                scaling, search = searched_further(scaling, search, in_slices, at_most, find)
            record = _with(record, scaling=scaling)
    except (UnsupportedModelError, BudgetError) as error:
        return _as_given(fit, record, tell.no_larger_batch(error))
    fit.event(*tell.searched(search))
    fit.report.max_batch_size = search.max_batch_size
    in_pieces = backend.memory.restores_after_plain
    chooser = SizeChooser.after(
        backend,
        search,
        at_most=at_most,
        first_margin=OPTIONS.pool_margin if in_pieces else OPTIONS.first_margin,
        next_margin=OPTIONS.next_margin,
        trained=loader,
        solve_s=OPTIONS.solve * _search_s(fit, record) / search_work.OPTIONS.patience,
        work_s=OPTIONS.trial_solves * _search_s(fit, record) / search_work.OPTIONS.patience,
        multiple=_multiple(fit, scaling),
        seed=fit.options.seed,
    )
    record = _with(record, search=search, chooser=chooser)
    if wanted == "fastest":
        return _compared(fit, record, loader)
    return _go_on(fit, record) if search.max_batch_size > loader else record


def _search(
    fit: FitState,
    record: FitRecord,
    batch: Any,
    at_most: int | None,
    scaling: Scaling,
    share: float,
) -> BatchSearch:
    """Searches the largest batch by prediction, in a share of the time."""
    backend, search_s = running_tools(fit).backend, share * _search_s(fit, record)
    search = partial(
        search_batch_size,
        scaling,
        record.sizes.loader,
        _limit(fit, record),
        backend,
        at_most=at_most,
        time_limit_s=OPTIONS.quick * search_s,
        late_time_limit_s=OPTIONS.late * search_s,
        multiple=_multiple(fit, scaling),
        seed=fit.options.seed,
    )
    return searched_by_traces(backend, fit.model, batch, scaling, search)


def _multiple(fit: FitState, scaling: Scaling | None) -> int:
    """Returns the number that every size is a multiple of: that of devices, or of slices."""
    slicing = None if scaling is None else scaling.slicing
    return running_tools(fit).backend.batch_multiple if slicing is None else slicing.parts


def _made_smaller(fit: FitState, record: FitRecord, batch: Any, size: int) -> FitRecord:
    backend = running_tools(fit).backend
    size = divisible(fit, size) or backend.batch_multiple
    try:
        graph_at(backend, fit.model, batch, size)
    except UnsupportedModelError as error:
        fit.event(*tell.no_other_batch(error))
        return record
    return _changed(fit, record, size)


def _at_most(fit: FitState, record: FitRecord) -> int | None:
    """Returns the largest batch that is wanted; ``None`` where only memory bounds it."""
    samples = _samples_per_epoch(fit, record.sizes)
    at_most = largest_wanted(fit.options.batch_size, record.sizes.loader, samples)
    return None if at_most is None else divisible(fit, at_most)


def _wants_profile(fit: FitState, sizes: SizesRecord) -> bool:
    """Returns whether a larger batch will be searched, with enough steps left to train it."""
    at_most = _at_most(fit, fit.record) if sizes.is_searching else 0
    left = fit.most_steps_left
    may_grow = at_most is None or at_most > sizes.loader
    return may_grow and (left is None or left >= OPTIONS.least_profiled_steps)


def _samples_per_epoch(fit: FitState, sizes: SizesRecord) -> int | None:
    return None if fit.steps_per_epoch is None else fit.steps_per_epoch * sizes.loader


def _limit(fit: FitState, record: FitRecord) -> Limit:
    """Returns the limit for a step of joined batches: the fit's, less the bytes held beside it."""
    return fit.limit.reserving(record.sizes.held_bytes)


def _bytes_held_beside(fit: FitState, batch: Any) -> int:
    """Returns the bytes of the device's memory that lie beside a step of joined batches."""
    tools = running_tools(fit)
    return 0 if tools.on_gpu else bytes_beside(batch) // tools.backend.batch_multiple


def _search_s(fit: FitState, record: FitRecord) -> float:
    """Returns the seconds that a search may take, by the estimated time of a step.

    A measured time would depend on what else the machine does.
    """
    step_s, left = size_costs.estimated_step_s(fit, record), fit.most_steps_left
    steps = OPTIONS.search_steps if left is None else OPTIONS.search_share * left
    worth_s = min(OPTIONS.search_steps, steps) * step_s
    return min(OPTIONS.most_search_s, max(OPTIONS.least_search_s, worth_s))


# -------------------------------------------------------------------- the next size


def _after_measured(fit: FitState, record: FitRecord, size: int) -> FitRecord:
    """Chooses the next size by the measurements of this one's final steps."""
    chooser, plan = record.sizes.chooser, record.running.plan
    if chooser is None or not record.is_settled or size == chooser.failed[0]:
        return record
    peak = steps.settled_peak_bytes(running_tools(fit))
    if peak is not None and not fit.limit.holds(peak):
        record = _with(record, chooser=chooser.after_trial(size, plan, peak, fits=False))
        return _go_on(fit, record, tell.is_over(size, peak))
    if fit.options.batch_size == "fastest":
        return _compared(fit, record, size)
    if plan is None or size <= chooser.trained:
        return record
    record = _with(record, chooser=chooser.after_trial(size, plan, peak or 0, fits=True))
    bound = inf if plan.problem is None else overhead_bound(plan.problem, "forward")
    if plan.overhead > bound:
        fit.event(*tell.recomputes_more(size, plan.overhead, bound))
    return _go_on(fit, record, tell.more_fits(size, peak or 0))


def _go_on(fit: FitState, record: FitRecord, reason: str = "") -> FitRecord:
    """Goes on with the size that the rule chooses: another one, or the largest that trained.

    Args:
        reason: sentence for the user on a measurement, if there was one.
    """
    chooser, scaling, size = record.sizes.chooser, record.sizes.scaling, record.sizes.size
    if chooser is None or scaling is None:
        return record
    costs, chosen = record.running.costs, None
    if costs is not None and record.is_settled:
        scaling.whole.learn(size, costs.as_whole.problem)
    if fit.options.batch_size != "fastest":
        with fit.long_task("looking for the largest batch"):
            chooser, chosen = chooser.choose(scaling, _limit(fit, record))
    record = _with(record, chooser=chooser)
    new, plan = (chooser.trained, None) if chosen is None else chosen
    if chosen is None and chooser.trained == size == record.sizes.loader:
        predicted = fit.report.max_batch_size or 0
        news = tell.reaches_no_further(predicted, size, _limit(fit, record))
        return _as_given(fit, record, news)
    if chosen is None:
        record = _with(record, chooser=None)
        fit.report.max_batch_size = chooser.trained
    if new == size:
        return record
    if reason:
        fit.event(*tell.goes_on(reason, up=new > size))
    return _changed(fit, record, new, plan)


def _compared(fit: FitState, record: FitRecord, size: int) -> FitRecord:
    """Goes on with the size that trains the most samples per second, once it is known."""
    sizes = record.sizes
    chooser, search = sizes.chooser, sizes.search
    if len(sizes.step_s) < COMPARED_STEPS or chooser is None or search is None:
        return record
    rates, new, is_over = compared(
        sizes.samples_per_s, size, median(sizes.step_s), sizes.loader, search.max_batch_size
    )
    chooser = None if is_over else replace(chooser, trained=max(size, chooser.trained))
    record = _with(record, samples_per_s=rates, chooser=chooser)
    if is_over:
        fit.event(*tell.sizes_were_compared(rates, new))
    return record if new == size else _changed(fit, record, new, search.plan)


def _as_given(fit: FitState, record: FitRecord, why: tell.News) -> FitRecord:
    """Goes on with the batches as they come."""
    fit.event(*why)
    fit.report.max_batch_size = record.sizes.loader
    record = _with(record, chooser=None)
    return record if record.sizes.chosen is None else _changed(fit, record, record.sizes.loader)


def _changed(fit: FitState, record: FitRecord, new: int, expected: Plan | None = None) -> FitRecord:
    """Trains ``new`` samples a step from here on; the next batch's shape becomes the reference.

    Args:
        expected: a plan to begin with, made for this size or for another one of the same step.
    """
    old, scaling, loader = record.sizes.size, record.sizes.scaling, record.sizes.loader
    known = PriorPlans(costs=() if scaling is None else (scaling.whole.at(new),))
    if expected is not None and expected.problem is not None:
        plan = replace(expected, slicing=None if scaling is None else scaling.slicing)
        known = replace(known, plans=((plan, expected.problem.graph, Phase.WARM_UP),))
    # a batch that has grown and does not fit is refused, not handed to another mode
    contest = replace(record.contest, has_grown=True)
    record = replace(record, sizes=record.sizes.with_size(new), contest=contest)
    record = record.with_steps(record.mode, record.running.expecting(known))
    fit.event(*tell.new_size(new, old, running_tools(fit).backend.batch_multiple))
    if new > loader and isinstance(fit.options.batch_size, str) and not record.sizes.has_warned:
        record = _with(record, has_warned=True)
        _warn(fit, new, record.sizes)
    return record


def _warn(fit: FitState, new: int, sizes: SizesRecord) -> None:
    """Says what a larger batch means for the training."""
    fit.learning_rate.leave_schedule_alone()
    factor = fit.learning_rate.factor(new, sizes.loader)
    told = tell.larger_batch(new, sizes.loader, _samples_per_epoch(fit, sizes), factor)
    warnings.warn(f"keras_remat: {told}", stacklevel=2)


def _with(record: FitRecord, **known: Any) -> FitRecord:
    """Returns the record with new fields of its sizes."""
    return replace(record, sizes=replace(record.sizes, **known))
