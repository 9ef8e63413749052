"""Undoes steps that run out of memory, so that their batches can be trained again.

A step that fails midway may already have moved a moving average or updated a weight. So before a
*guarded* step the model's variables are copied to the host, and put back when the device refuses an
allocation. The first steps of everything new are guarded; later ones only where the copy takes next
to none of the step's time. An unguarded step that runs out of memory raises the framework's
exception.

TensorFlow's legacy stateful random ops cannot be put back; Keras draws from seed variables, which
can.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.base import Backend, RunStep
from keras_remat.backends.host import address_space_for_threads
from keras_remat.core.schedule import Usage
from keras_remat.training.record import DeviceFacts

#: A copy is taken before every step while it takes less than this share of the step's time.
CHEAP_SHARE = 0.02
#: What is known of a device before the first step.
NOTHING_SEEN = DeviceFacts()


@dataclass(frozen=True)
class Outcome:
    """Is the base of a step's results: trained, or out of memory."""

    batch: Any


@dataclass(frozen=True)
class Trained(Outcome):
    """A step trained its batch."""

    result: Any
    usage: Usage


@dataclass(frozen=True)
class OutOfMemory(Outcome):
    """A guarded step ran out of memory, and the state is as it was before.

    Args:
        peak_bytes: the most the allocator had in use before it failed.
        cause: the exception that the framework raised.
    """

    peak_bytes: int
    cause: Exception


class StepGuard:
    """Measures steps of a model and undoes those that run out of memory."""

    def __init__(self, model: Any, backend: Backend):
        self._model, self._backend = model, backend

    def attempt(
        self,
        step: RunStep,
        batch: Any,
        facts: DeviceFacts = NOTHING_SEEN,
        *,
        guarded: bool,
        restored: bool = False,
        timed: bool = True,
        pending: Any = None,
    ) -> tuple[Trained | OutOfMemory, DeviceFacts]:
        """Runs a step once; returns its outcome and what the device has shown by then.

        Args:
            facts: what steps in all modes have shown of the device.
            guarded: whether the step must be undone if it fails, whatever the copy costs.
            restored: whether a copy that is taken is put back at once, before the step.
            timed: whether the call waits until the step ends; else its time is reported as that of
                the last step that was waited for.
            pending: the result of the step before, where that was not waited for.
        """
        if timed and pending is not None:
            self._backend.measure(lambda: pending)  # the time of queued steps is not this step's
        # of several processes one alone cannot train a batch again
        is_alone = self._backend.processes.count == 1
        put_back: Callable[[], None] | None = None
        copy_s = facts.copy_s
        if is_alone and (guarded or _is_cheap(facts)):
            started = time.perf_counter()
            put_back = self._backend.snapshot(self._model)
            copy_s = time.perf_counter() - started
        if restored and put_back is not None:
            put_back()
        try:
            with address_space_for_threads():
                result, usage = self._backend.measure(lambda: step(batch), wait=timed)
        except Exception as error:
            if put_back is None or not self._backend.is_out_of_memory(error):
                raise
            peak = self._backend.device.peak_bytes()
            _forget_locals(error)
            put_back()
            return OutOfMemory(batch, peak, error), replace(facts, copy_s=copy_s)
        step_s = usage.time_s if timed else facts.step_s
        facts = replace(facts, copy_s=copy_s, step_s=step_s)
        return Trained(batch, result, replace(usage, time_s=step_s)), facts


def _is_cheap(facts: DeviceFacts) -> bool:
    return facts.copy_s is not None and facts.copy_s <= CHEAP_SHARE * facts.step_s


def _forget_locals(error: BaseException | None) -> None:
    """Frees the local variables of failed calls, above all the batch's copies on the device.

    Frameworks hide frames from the traceback; these are still callers of the frames that are left.
    """
    while error is not None:
        for failed, _ in traceback.walk_tb(error.__traceback__):
            for frame, _ in traceback.walk_stack(failed):
                try:
                    frame.clear()
                except RuntimeError:  # it runs still, and so do its callers
                    break
        error = error.__context__
