"""Drives a ``fit``: forms batches, runs steps, notes results, decides on moves and makes them.

Only this module assigns ``fit.record``, which holds all that is known of a fit. ``batches`` puts
batches together, and ``steps`` runs them. The table in ``decide`` and the rules in ``contest``
decide what follows. ``effects`` makes the moves of one shape, ``modes`` those between compiled and
ordered steps and between numbers of micro-batches, ``sizes`` those between batch sizes. ``tell``
has every sentence.

Every batch that comes in is trained exactly once: a step that runs out of memory is undone, and its
batch trained again, under a plan for the memory that the device had.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from keras_remat.backends.batches import batch_size_of
from keras_remat.core.schedule import Usage
from keras_remat.errors import RematError, UnsupportedModelError
from keras_remat.training import batches, effects, modes, sizes, steps
from keras_remat.training.decide import Move, decide
from keras_remat.training.facts import facts_of
from keras_remat.training.fit_state import FitState
from keras_remat.training.record import FitRecord, Mode
from keras_remat.training.shape_state import (
    USUAL_CONSTRAINTS,
    PlainShape,
    PlannedShape,
    Signature,
    StepConstraints,
)
from keras_remat.training.tools import Tools, running_tools, tools_of
from keras_remat.training.undo import Outcome, Trained


def note(fit: FitState, seen: Callable[[FitState], FitRecord]) -> None:
    """Assigns a new record after an event that is no step: a begin, an epoch's end."""
    fit.record = seen(fit)


def train(fit: FitState, arrived: Any) -> Any:
    """Trains a loader batch, in batches of the size in force; returns the newest logs."""
    size = batch_size_of(arrived)
    if size == 0:  # there is nothing to plan, and joined with others it adds nothing
        is_joined = fit.record.sizes.chosen is not None
        return fit.record.logs if is_joined else fit.installed.run_plain(arrived)
    try:
        fit.record = batches.arrived(fit.record, arrived)
    except UnsupportedModelError as error:  # it cannot be joined with the held batches, or be split
        if fit.record.held.samples and fit.record.sizes.size <= fit.record.sizes.loader:
            _finish_before(fit, arrived)
        else:
            fit.record = sizes.after_other_samples(fit, error)
        return train(fit, arrived)
    for due in batches.due(fit, is_end=size < fit.record.sizes.loader):
        _train_one(fit, due)
    fit.record = batches.kept(fit.record)
    return fit.record.logs


def _finish_before(fit: FitState, arrived: Any) -> None:
    """Trains the held samples before a batch that cannot be joined with them.

    Where they cannot be trained, the batch is held as well: all of them train unmodified.
    """
    try:
        finish(fit)
    except UnsupportedModelError:
        fit.record = replace(fit.record, held=fit.record.held.with_newest(arrived))
        raise


def finish(fit: FitState) -> Any:
    """Trains the samples that are held back; returns the newest logs, or ``None`` without any."""
    if not fit.record.held.samples:
        return None
    for due in batches.due(fit, is_end=True, with_rest=True):
        _train_one(fit, due)
    return fit.record.logs


def _train_one(fit: FitState, due: batches.Due) -> None:
    batch, fit.record = batches.taken(fit.record, due)
    constraints, is_compared = sizes.constraints_of(fit, due), sizes.is_comparing(fit)
    started = time.perf_counter()
    try:
        with batches.learning_rate(fit, due.size):
            logs = train_batch(fit, fit.installed.as_given(batch), constraints, is_compared)
    except RematError as error:  # it was not trained
        fit.record = batches.given_back(fit.record, batch)
        fit.record = sizes.after_failure(fit, due, error)
    else:
        fit.record = batches.after_step(fit, due, logs, time.perf_counter() - started)
        fit.record = sizes.after_step(fit, due, batch)
        return
    del batch
    gc.collect()  # the error is in a reference cycle with frames that hold the batch


def train_batch(
    fit: FitState, batch: Any, constraints: StepConstraints = USUAL_CONSTRAINTS, timed: bool = False
) -> Any:
    """Trains one batch and returns its logs; where the running mode fails, the next one takes over.

    A ``timed`` step is waited for. The error of the last mode is raised.
    """
    size, limit, trial = batch_size_of(batch), fit.record.lowered_limit, fit.record.contest.trial
    if trial is not None and size != trial.size:
        return _step(fit, trial.champion, batch, USUAL_CONSTRAINTS, False)
    while True:
        contest = fit.record.contest
        allowed = modes.constraints_in(contest, constraints)
        waits = timed or contest.trial is not None
        try:
            logs = _step(fit, contest.running, batch, allowed, waits)
        except modes.FAILURES as error:
            fit.record = modes.after_failure(fit, limit, size, error)
            if fit.record.mode is contest.running:
                raise
        else:
            fit.record = modes.after_step(fit, size)
            return logs


def _step(fit: FitState, mode: Mode, batch: Any, constraints: StepConstraints, timed: bool) -> Any:
    """Trains one batch in a mode: tries again until it is trained or nothing is left."""
    tools, key = tools_of(fit, mode), fit.signatures.of(batch)
    is_seen = timed or steps.is_look_due(tools)
    settled = None if is_seen else steps.settled_shape(tools, key, constraints)
    if settled is not None:
        return train_settled(tools, settled, batch)
    fit.record = steps.arrived(tools, batch, key, constraints)
    while True:
        while steps.is_overtaken(tools, tools.steps.shapes[key]):
            _follow(tools, key, Outcome(batch))
        shape = tools.steps.shapes[key]
        if steps.is_to_be_recorded(shape):  # an interrupt may come at any time
            fit.record = fit.record.with_shape(mode, replace(shape, started=True))
            fit.record = fit.record.with_shape(mode, steps.begin_recording(tools, shape))
        fit.record, outcome = steps.attempt(tools, key, batch, timed=timed)
        before = tools.steps.shapes[key]
        _follow(tools, key, outcome)
        fit.record = tools.learnt(before, tools.steps.shapes[key])
        if isinstance(outcome, Trained):
            return outcome.result


def _follow(tools: Tools, key: Signature, outcome: Outcome) -> None:
    """Decides on a shape's next move and makes it; where it cannot be made, the next best one."""
    fit, shape = tools.fit, tools.steps.shapes[key]
    facts, failure = facts_of(tools, shape, outcome), None
    while True:
        move, phase = decide(facts)
        shape = shape.trying(move)
        if move is Move.REFUSE:
            raise effects.refusal(tools, shape, outcome, failure)
        fit.record, failure = effects.make(tools, move, shape, outcome, phase)
        if failure is None:
            if facts.failed or move in effects.PLANNING:
                gc.collect()  # as in _train_one
            return
        facts, shape = facts.without(move), shape.without(move)


def train_settled(tools: Tools, shape: PlannedShape, batch: Any) -> Any:
    """Runs a final step and returns its logs; costs little more than the step's call."""
    fit, backend, device = tools.fit, tools.backend, tools.fit.record.device
    logs, usage = backend.measure(partial(shape.run, batch), wait=False)
    usage = Usage(device.step_s, usage.peak_bytes)  # the time of the last one that was waited for
    fit.count(shape.batch_size, usage, logs)
    if device.after_plain:  # a record is made anew only where something is new
        fit.record = replace(fit.record, device=replace(device, after_plain=False))
    if backend.device.has_statistics and not fit.limit.holds(usage.peak_bytes):
        fit.record = fit.record.with_shape(tools.mode, replace(shape, steps=(usage,)))
        _follow(tools, shape.signature, Trained(batch, logs, usage))
    return logs


def watched(fit: FitState, shape: PlainShape, usage: Usage) -> None:
    """Notes the usage of plain steps that were watched from outside, and makes the next move.

    Where they are over the limit, the move waits for the shape's next batch.
    """
    tools, before = running_tools(fit), steps.seen(shape, usage)
    fit.record = fit.record.with_shape(tools.mode, before)
    if not tools.is_over(before):
        _follow(tools, before.signature, Trained(None, None, usage))
    fit.record = tools.learnt(before, tools.steps.shapes[before.signature])
