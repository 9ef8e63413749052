"""Puts the events of a ``fit`` into words: every sentence of its report and its warnings.

Each function tells one fact, from numbers and records. The caller hands the sentence to
:class:`~keras_remat.training.fit_state.FitState`, as an event or as a warning, too.

This is one file, though long: a reader who looks for a sentence looks here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_remat.core.events import EventKind
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Usage
from keras_remat.core.slices import Slicing
from keras_remat.errors import statement_of
from keras_remat.planning.plan import Plan
from keras_remat.reporting.text import slices_text
from keras_remat.units import format_bytes, format_rate, format_seconds, format_unequal_bytes


class News(NamedTuple):
    """Holds an event: its kind, and a sentence for the user."""

    kind: EventKind
    message: str


# -------------------------------------------------------------------- the model and the device


def remark(what: object) -> News:
    """Tells a sentence that another module has written."""
    return News(EventKind.REMARK, str(what))


def trained_plainly(error: Exception) -> News:
    """Tells why a batch of ``train_on_batch`` is trained by Keras's own step."""
    return News(EventKind.REMARK, f"Keras's own step trains it. {error}")


def no_statistics(device: str) -> News:
    """Tells that the device's allocator keeps no statistics."""
    return News(
        EventKind.PREDICTED,
        f"The allocator of {device} keeps no statistics: peaks are predicted and not measured. "
        "Call keras_remat.enable_cpu_memory_stats() before the model is built, or set "
        "TF_ENABLE_ONEDNN_OPTS=1 where the processor has oneDNN's instructions.",
    )


def small_arrays_are_not_counted(held_bytes: int, measured_bytes: int, smallest_bytes: int) -> News:
    """Tells that the device's statistics leave out small arrays, which are much of a step."""
    return News(
        EventKind.REMARK,
        f"The step holds {format_bytes(held_bytes)} by prediction, and measures "
        f"{format_bytes(measured_bytes)}: oneDNN's allocator counts no array below "
        f"{format_bytes(smallest_bytes)}. Neither the peaks told here nor the limit count those. "
        "With TF_ENABLE_ONEDNN_OPTS=0 in the environment, and "
        "keras_remat.enable_cpu_memory_stats() before the model is built, all are counted.",
    )


def other_updates() -> News:
    """Tells that the optimizer's count of updates differs from plain ``fit``'s."""
    return News(
        EventKind.REMARK,
        "Nobody knows the length of the data: plain fit on TensorFlow counts an update more in "
        "every epoch than it trains. Here it is not counted, so an optimizer that reads the "
        "count (Adam) moves the weights otherwise from the second epoch on.",
    )


def large_validation(size: int, needed_bytes: int, limit: Limit, fitting_size: int) -> News:
    """Tells, before it runs, of validation that is predicted to need more than the limit.

    Args:
        size: samples of a validation batch.
        needed_bytes: bytes that such a batch is predicted to need.
        limit: the ``fit``'s limit.
        fitting_size: the samples that keep to the limit; 0 for none.
    """
    way_out = (
        f"give fit validation_batch_size={fitting_size}" if fitting_size else "raise the limit"
    )
    return News(
        EventKind.VALIDATION,
        f"Validation of {size} samples at once is predicted to need {format_bytes(needed_bytes)}, "
        f"over the limit of {limit}: {way_out}.",
    )


def smaller_validation(size: int, needed_bytes: int, limit: Limit, fitting_size: int) -> News:
    """Tells, before it runs, of validation whose batches are made smaller to keep the limit.

    The arguments are those of :func:`large_validation`.
    """
    return News(
        EventKind.VALIDATION,
        f"Validation of {size} samples at once would need about {format_bytes(needed_bytes)}, over "
        f"the limit of {limit}: it runs in batches of {fitting_size}, with the same numbers.",
    )


def whole_data(nbytes: int, limit: Limit) -> News:
    """Tells that ``fit`` holds large arrays as a whole in the memory that counts."""
    return News(
        EventKind.REMARK,
        f"fit was given {format_bytes(nbytes)} of arrays, and holds them as a whole in the memory "
        f"that the limit of {format_bytes(limit.total_bytes)} counts. A keras.utils.PyDataset, or "
        "a tf.data.Dataset that reads them batch by batch, does not.",
    )


def changed_layers(names: Sequence[str]) -> News:
    """Tells of layers whose ``trainable`` has changed since Keras has traced its step."""
    return News(
        EventKind.REMARK,
        f"trainable of {', '.join(names[:3])}{' and others' * (len(names) > 3)} has "
        "changed since the train function was first traced. Plain fit goes on with what it "
        "was then; a step that is traced now takes what it is now. Call compile() after "
        "such a change.",
    )


def unknown_sizes(count: int) -> News:
    """Tells of arrays whose sizes no trace knows."""
    return News(
        EventKind.REMARK,
        f"The sizes of {count} arrays are known only when the step runs: plans count them as "
        "nothing, and may need more than is predicted. A larger margin leaves room for them.",
    )


def differs(difference: str) -> News:
    """Tells what differs between a step in micro-batches and Keras's own."""
    return News(EventKind.MICRO_BATCHES, difference)


def set_up_was_long(spent_s: float, most_s: float) -> News:
    """Tells that set-up took too long for the first plan to be improved further."""
    return News(
        EventKind.ENOUGH,
        f"Set-up took {format_seconds(spent_s)} before the first plan trained, more than "
        f"{format_seconds(most_s)}: from then on that plan was improved no further.",
    )


# -------------------------------------------------------------------- the plain step


def plain_risks(size: int, bound_bytes: int, limit: Limit) -> News:
    """Tells that the plain step is predicted not to fit."""
    return News(
        EventKind.RISK,
        f"The plain step of {size} samples may need up to {format_bytes(bound_bytes)}, over the "
        f"limit of {limit}: it will not be run.",
    )


def plain_exceeds(size: int, measured_bytes: int, predicted_bytes: int, limit: Limit) -> News:
    """Tells that the plain step measured over the limit."""
    return News(
        EventKind.EXCEEDED,
        f"The plain step of {size} samples takes {format_bytes(measured_bytes)} measured "
        f"({format_bytes(predicted_bytes)} predicted), above the limit of "
        f"{format_bytes(limit.total_bytes)}. Making a plan.",
    )


def plain_fits(size: int, measured_bytes: int | None, limit: Limit) -> News:
    """Tells that the plain step keeps to the limit; without a measurement, by prediction."""
    takes = "is predicted to keep"
    if measured_bytes is not None:
        takes = f"takes {format_bytes(measured_bytes)} measured,"
    return News(
        EventKind.FITS,
        f"The plain step of {size} samples {takes} within "
        f"{format_bytes(limit.total_bytes)}: nothing is changed.",
    )


def plain_is_back() -> News:
    """Tells that the plain step comes back, as it was measured."""
    return News(EventKind.PLAIN, "The plain step comes back, as it was measured to fit.")


def plain_fits_after_all(needed_bytes: int, limit: Limit) -> News:
    """Tells that the plain step comes back, because it fits by its ops' measured costs."""
    return News(
        EventKind.PLAIN,
        f"By what was measured the plain step needs {format_bytes(needed_bytes)}, within "
        f"{format_bytes(limit.usable_bytes)}: it comes back.",
    )


def plain_is_tried(limit: Limit) -> News:
    """Tells that the plain step is measured where no plan keeps to the limit."""
    return News(
        EventKind.PLAIN,
        f"No schedule was found that keeps to {format_bytes(limit.total_bytes)}: the "
        "plain step is measured, which may take less.",
    )


# -------------------------------------------------------------------- recording


def will_record() -> News:
    """Tells that steps which would run plainly are recorded first."""
    return News(
        EventKind.PROFILE,
        "The next steps run in order and are recorded: what their ops cost tells how large a "
        "batch can be.",
    )


def recorded(what: str) -> News:
    """Tells a remark of the profiler."""
    return News(EventKind.PROFILE, what)


def recorded_nothing(*, is_busy: bool) -> News:
    """Tells why no ops were measured."""
    why = "The profiler saw too few ops"
    if is_busy:
        why = "Another profiler session is running, or is going to, or no file can be written"
    return News(EventKind.PROFILE, f"{why}; the plan stays with estimated op times.")


def recorded_exceeds(size: int, measured_bytes: int, limit: Limit) -> News:
    """Tells that a recorded step measured over the limit."""
    peak, most = format_unequal_bytes(measured_bytes, limit.total_bytes)
    return News(
        EventKind.EXCEEDED,
        f"A step of {size} samples measured {peak} while it was recorded, "
        f"over the limit of {most}: it is planned anew.",
    )


# -------------------------------------------------------------------- plans


def cached(plan: Plan) -> News:
    """Tells that a plan of another ``fit`` is used."""
    return News(EventKind.CACHE, f"A plan for this graph and limit was cached. {plan}")


def cache_is_broken(error: Exception) -> News:
    """Tells why a cached plan is not used."""
    return News(EventKind.CACHE, f"A cached plan cannot be used and is made again: {error}")


def cache_is_closed(error: Exception) -> News:
    """Tells why a plan is not kept."""
    return News(EventKind.CACHE, f"Plans cannot be kept: {error}")


def new_shape(shapes: Sequence[tuple[int, ...]]) -> News:
    """Tells that a batch of another shape is planned for."""
    arrays = ", ".join(map(str, shapes))
    return News(EventKind.SHAPE, f"No known plan fits a batch of {arrays}; making a new one.")


def swapped(plan: Plan) -> News:
    """Tells that another plan runs."""
    return News(EventKind.SWAP, f"Swapped in. {plan}")


def kept(error: Exception) -> News:
    """Tells why no other plan runs."""
    return News(EventKind.KEPT, f"The plan that is running stays: {statement_of(error)}")


def saves_too_little(steps: int | None, least_s: float) -> News:
    """Tells that solving for a faster plan would not pay."""
    return News(
        EventKind.ENOUGH,
        f"The plan that is running stays: in {steps} steps at most, a "
        f"faster one could save less than {format_seconds(least_s)}.",
    )


def solves_beside() -> News:
    """Tells that a process solves while training goes on."""
    return News(
        EventKind.BESIDE,
        "The first plan goes on while a process of its own solves for a faster one.",
    )


def cannot_solve_beside(error: Exception) -> News:
    """Tells why no process solves while training goes on."""
    return News(EventKind.BESIDE, f"No process can be started beside training: {error}")


def solved_nothing_beside(error: Exception) -> News:
    """Tells why the answer of a process beside training is not used."""
    return News(EventKind.BESIDE, f"Planning begins anew, without it: {error}")


def tightens(measured_bytes: int, predicted_bytes: int, limit: Limit) -> News:
    """Tells that a plan measured over the limit."""
    return News(
        EventKind.TIGHTEN,
        f"Measured peak {format_bytes(measured_bytes)} is over the limit of "
        f"{format_bytes(limit.total_bytes)} ({format_bytes(predicted_bytes)} "
        f"predicted): planning again for {format_bytes(measured_bytes - limit.usable_bytes)} less.",
    )


def measured(
    size: int, predicted_bytes: int, usage: Usage, limit: Limit, *, has_peak: bool
) -> News:
    """Tells the time of a final step, and its measured peak where there is one."""
    peak = f"{format_bytes(predicted_bytes)} predicted"
    if has_peak:
        where = "within" if limit.holds(usage.peak_bytes) else "STILL OVER"
        peak = (
            f"{format_bytes(usage.peak_bytes)} measured ({peak}), {where} the limit of "
            f"{format_bytes(limit.total_bytes)}"
        )
    return News(
        EventKind.MEASURED,
        f"Step of {size} samples: {peak}; {format_seconds(usage.time_s)} measured.",
    )


def in_micro_batches(size: int, count: int, limit: Limit) -> News:
    """Tells that a batch is trained in micro-batches because nothing else fits."""
    return News(
        EventKind.MICRO_BATCHES,
        f"No schedule trains {size} samples at once within "
        f"{format_bytes(limit.total_bytes)}: each step trains them in {count} "
        "micro-batches and adds up their gradients.",
    )


def in_no_slices(size: int, count: int, error: Exception) -> News:
    """Tells why micro-batches that were asked for are no slices of the batch."""
    return News(
        EventKind.MICRO_BATCHES,
        f"{error} So {size} samples are trained in {count} micro-batches whose gradients are added "
        "up.",
    )


def micro_batches_in_slices(count: int, slicing: Slicing) -> News:
    """Tells that micro-batches that were asked for are slices of the batch."""
    return News(
        EventKind.SLICES,
        f"The {count} micro-batches are slices of the batch: {slices_text(slicing)}. The numbers "
        "are those of the whole batch.",
    )


def in_slices(slicing: Slicing, limit: Limit) -> News:
    """Tells that some ops run on a part of the batch at a time because nothing else fits."""
    return News(
        EventKind.SLICES,
        f"No schedule of whole ops keeps to {format_bytes(limit.total_bytes)}: "
        f"{slices_text(slicing)}. The numbers are those of the whole batch.",
    )


def a_little_over(predicted_bytes: int, limit: Limit) -> News:
    """Tells that training goes on although a plan is predicted to miss the limit."""
    return News(
        EventKind.OVER_LIMIT,
        f"No schedule was found under {format_bytes(limit.usable_bytes)}; training goes on "
        f"with one that is predicted to need {format_bytes(predicted_bytes)} (the "
        f"limit is {format_bytes(limit.total_bytes)}).",
    )


def stays_over(
    size: int, measured_bytes: int, limit: Limit, *, is_plain: bool, goes_on: bool
) -> News:
    """Tells that nothing measured within the limit.

    Args:
        is_plain: whether the step with the smallest measured peak is the plain step.
        goes_on: whether training goes on with that step; else a smaller batch takes over.
    """
    follows = "Training goes on with it." if goes_on else "A smaller batch takes over."
    return News(
        EventKind.OVER_LIMIT,
        f"The {'plain step' if is_plain else 'step'} of {size} samples takes "
        f"{format_bytes(measured_bytes)} measured, over the limit of "
        f"{format_bytes(limit.total_bytes)}; no schedule that takes less was found. {follows}",
    )


def out_of_memory(size: int, predicted_bytes: int, in_use_bytes: int) -> News:
    """Tells that a step ran out of memory and was undone."""
    return News(
        EventKind.OUT_OF_MEMORY,
        f"The step of {size} samples ({format_bytes(predicted_bytes)} predicted) ran out "
        f"of memory with {format_bytes(in_use_bytes)} in use; what it had changed was "
        "put back, and its batch is trained again under a tighter plan.",
    )


def lowered_limit(limit: Limit, plan: Plan) -> News:
    """Tells the limit that is in force after a step ran out of memory."""
    return News(
        EventKind.SWAP, f"The limit is {format_bytes(limit.total_bytes)} from here on. {plan}"
    )


# -------------------------------------------------------------------- modes


def gives_way(kind: EventKind, failed: str, following: str, error: Exception) -> News:
    """Tells why another mode takes over."""
    return News(kind, f"No {failed} step, training goes on {following}: {statement_of(error)}")


def is_tried(kind: EventKind, first: str, rival: str) -> News:
    """Tells that another mode is tried."""
    return News(kind, f"Finished tuning the {first} step. Now trying {rival}.")


def cannot_be_used(kind: EventKind, failed: str, stays: str, error: Exception) -> News:
    """Tells why a mode that was tried is given up."""
    return News(
        kind,
        f"The {failed} step was tried and cannot be used, the {stays} one "
        f"stays: {statement_of(error)}",
    )


def were_compared(kind: EventKind, usages: Mapping[str, Usage], stays: str) -> News:
    """Tells the usage of the steps of two modes, and which mode stays."""
    told = ", ".join(
        f"{mode} {format_seconds(usage.time_s)} and {format_bytes(usage.peak_bytes)}"
        for mode, usage in usages.items()
    )
    return News(kind, f"Measured per step: {told}. Training goes on {stays}.")


# -------------------------------------------------------------------- sizes


def searched(search: object) -> News:
    """Tells the result of the search for the largest batch."""
    return News(EventKind.SEARCH, str(search))


def no_other_batch(error: Exception) -> News:
    """Tells why no batch of another size can be trained."""
    return News(EventKind.SEARCH, f"No other batch: {error}")


def no_larger_batch(reason: Exception | str) -> News:
    """Tells why batches are trained as they come."""
    told = reason if isinstance(reason, str) else statement_of(reason)
    return News(EventKind.SEARCH, f"No larger batch: {told}")


def first_batch_is_odd(size: int) -> News:
    """Tells why no larger batch was searched in an epoch."""
    return no_larger_batch(
        f"the first one had {size} samples, and most others do not. Give fit the batch of another "
        "size last."
    )


def keeps_updates() -> News:
    """Tells that larger batches would leave an epoch too few updates."""
    return no_larger_batch("an epoch keeps ten updates; an int as batch_size lifts that.")


def reaches_no_further(predicted: int, size: int, limit: Limit) -> News:
    """Tells that a size that was predicted to fit does not, by costs measured since."""
    return no_larger_batch(
        f"{predicted} samples were predicted to keep to {format_bytes(limit.usable_bytes)}. By the "
        f"costs that were measured since, no more than {size} do. A higher limit would do."
    )


def recomputes_more(size: int, overhead: float, bound: float) -> News:
    """Tells that a plan recomputes more than the search has allowed."""
    return News(
        EventKind.REMARK,
        f"By the op times that were measured, a batch of {size} takes "
        f"{overhead:.1%} longer. One forward pass, which the search allowed, is "
        f"{bound:.1%}.",
    )


def does_not_fit(size: int, error: Exception) -> str:
    """Returns why a chosen size is not trained."""
    return f"A batch of {size} does not fit after all: {statement_of(error)}"


def is_over(size: int, measured_bytes: int) -> str:
    """Returns why a smaller size is trained: ``size`` measured over the limit."""
    return f"The {format_bytes(measured_bytes)} that a batch of {size} measured are over the limit."


def more_fits(size: int, measured_bytes: int) -> str:
    """Returns why a larger size is trained: by the measured peak of ``size``, more fits."""
    return f"By the {format_bytes(measured_bytes)} that a batch of {size} measured, more fits."


def goes_on(reason: str, *, up: bool) -> News:
    """Tells why a larger or a smaller size is trained."""
    return News(EventKind.STEP_UP if up else EventKind.STEP_DOWN, reason)


def sizes_were_compared(samples_per_s: Mapping[int, float], size: int) -> News:
    """Tells the measured rates of batch sizes, and which size trains."""
    told = ", ".join(f"{format_rate(rate)} at {of}" for of, rate in samples_per_s.items())
    return News(EventKind.SEARCH, f"Samples per second: {told}. The batch size is {size}.")


def new_size(size: int, before: int, devices: int) -> News:
    """Tells that batches of another size are trained."""
    each = f": {size // devices} on each of {devices} devices" if devices > 1 else ""
    return News(EventKind.BATCH, f"The batch size is {size} from here on ({before} before){each}.")


def larger_batch(size: int, loader: int, samples: int | None, factor: float) -> str:
    """Returns what a larger batch means for the training.

    Args:
        size: samples of a step.
        loader: samples of the batches that ``fit`` was given.
        samples: samples of an epoch; ``None`` where that is not known.
        factor: factor of the learning rate, a ratio.
    """
    updates = "fewer updates in an epoch"
    if samples is not None:
        updates = f"{-(-samples // size)} updates in an epoch instead of {-(-samples // loader)}"
    rate = (
        'The learning rate stays as it is; learning_rate_scaling="linear" or "sqrt" makes it '
        "follow the batch."
        if factor == 1.0
        else f"The learning rate is multiplied by {factor:.4g} in its steps."
    )
    return (
        f"fit was given batches of {loader} and trains batches of {size} from here "
        f'on: {updates}. {rate} batch_size="keep" keeps the batches.'
    )
