"""Puts batches together: decides which samples the next step trains.

Samples keep their order and each is trained exactly once per epoch: those that are left when the
epoch's data ends are trained in one smaller step, before validation. This module knows no plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.batches import batch_size_of
from keras_remat.training.fit_state import FitState
from keras_remat.training.grouping import HeldBatches
from keras_remat.training.record import FitRecord


def arrived(record: FitRecord, batch: Any) -> FitRecord:
    """Returns the record after a loader batch has come, which is held until it is trained.

    Raises:
        UnsupportedModelError: the batch cannot be joined with those that are held.
    """
    sizes, samples = record.sizes, batch_size_of(batch)
    if not sizes.loader:
        sizes = replace(sizes, loader=samples)
    joins = sizes.chosen is not None
    held = record.held.adding(batch) if joins else record.held.with_newest(batch)
    return replace(record, held=held, sizes=sizes.after_arrival(samples))


def kept(record: FitRecord) -> FitRecord:
    """Returns the record where the rest of the newest batch can wait for the next one."""
    return replace(record, held=record.held.keeping_newest()) if record.held.samples else record


@dataclass(frozen=True)
class Due:
    """Describes the next step of held samples.

    Args:
        size: number of its samples.
        is_rest: whether these are too few for a full batch.
        is_joined: whether such a rest is trained in one step, and not in the loader's batches.
    """

    size: int
    is_rest: bool = False
    is_joined: bool = False


def due(fit: FitState, *, is_end: bool, with_rest: bool = False) -> Iterator[Due]:
    """Yields the steps that can be made of the held samples.

    The caller trains a step, or fails to, before it asks for the next one: the held samples and the
    size in force may have changed by then. A rest is one step, unless the devices do not divide it
    evenly. Where it cannot be trained in one step, it is trained in the loader's batches, whose
    size has trained before.

    Args:
        is_end: whether the newest batch is the epoch's last, as far as its size tells.
        with_rest: whether less than a full batch is trained, too.
    """
    while (size := _next_size(fit, is_end=is_end)) is not None:
        yield Due(size)
    rest, loader = fit.record.held.samples if with_rest else 0, fit.record.sizes.loader
    if rest and (rest <= loader or rest == divisible(fit, rest)):
        yield Due(rest, is_rest=True, is_joined=True)
    while with_rest and fit.record.held.samples:
        size = _without_small_rest(fit, min(loader, fit.record.held.samples))
        yield Due(size, is_rest=True)


def _next_size(fit: FitState, *, is_end: bool) -> int | None:
    """Returns the size of the next full batch: the chosen one, or that of the oldest held batch;
    ``None`` where too few samples are held."""
    held, chosen = fit.record.held, fit.record.sizes.chosen
    if chosen is None:
        return batch_size_of(held.batches[0]) if held.samples else None
    if held.samples < chosen:
        return None
    return _without_small_rest(fit, chosen) if is_end else chosen


def taken(record: FitRecord, due: Due) -> tuple[Any, FitRecord]:
    """Returns the next step's batch and the record without it; unjoined batches stay as they
    came."""
    as_it_came = record.sizes.chosen is None
    batch, held = record.held.taking_oldest() if as_it_came else record.held.taking(due.size)
    return batch, replace(record, held=held)


def given_back(record: FitRecord, batch: Any) -> FitRecord:
    """Returns the record where a batch is held again, which was taken and not trained."""
    held, sizes = record.held, record.sizes
    if sizes.chosen is None:
        return replace(record, held=held.with_oldest(batch))
    return replace(record, held=held.given_back(batch, sizes.loader))


def divisible(fit: FitState, size: int) -> int:
    """Returns the largest size up to ``size`` that the devices divide evenly."""
    return size - size % _devices(fit)


def learning_rate(fit: FitState, size: int) -> AbstractContextManager[None]:
    """Makes a context in which the learning rate is that of a step of ``size`` samples."""
    loader, chosen, rate = fit.record.sizes.loader, fit.record.sizes.chosen, fit.learning_rate
    if chosen is None:  # the loader's own batches may differ in size
        return rate.during(1.0)
    # a rest that is smaller than the loader's batches is trained as such a rest always is
    return rate.during(rate.factor(max(size, min(loader, chosen)), loader))


def in_new_epoch(fit: FitState) -> FitRecord:
    """Returns the record of an epoch that begins."""
    record, has_plan = fit.record, fit.record.running.plan is not None
    sizes, baseline = record.sizes.in_new_epoch(has_plan=has_plan), record.baseline.in_new_epoch()
    return replace(record, sizes=sizes, baseline=baseline)


def none_held(fit: FitState) -> FitRecord:
    """Returns the record where nothing is held; the caller trains the samples that were."""
    return replace(fit.record, held=HeldBatches())


def after_step(fit: FitState, due: Due, logs: Any, time_s: float) -> FitRecord:
    """Returns the record after a step, which took ``time_s`` seconds."""
    record, sizes, size = fit.record, fit.record.sizes, due.size
    is_final = record.is_settled and size == sizes.size
    sizes = sizes.after_step(
        size,
        changed=sizes.chosen is not None or record.running.plan is not None,
        final_s=time_s if is_final else None,
    )
    # a rest right after the size has changed is no smaller batch
    before = fit.report.batch_size or 0
    fit.report.batch_size = max(before, size) if due.is_rest else sizes.largest
    return replace(record, sizes=sizes, logs=logs)


def _without_small_rest(fit: FitState, size: int) -> int:
    """Returns the size of the next step of joined batches: a little less than ``size`` where it
    would leave fewer samples than there are devices."""
    multiple = _devices(fit)
    leaves_too_few = 0 < fit.record.held.samples - size < multiple < size
    return size - multiple if leaves_too_few else size


def _devices(fit: FitState) -> int:
    return fit.backends[fit.record.mode.at].batch_multiple
