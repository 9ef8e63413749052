"""A guarded step leaves no trace when it runs out of memory; an unguarded one is the framework's
business."""

import time
import weakref
from types import SimpleNamespace

import pytest

from keras_remat.backends.processes import Processes
from keras_remat.core.schedule import Usage
from keras_remat.training.record import DeviceFacts
from keras_remat.training.undo import OutOfMemory, StepGuard, Trained

BATCH = 3


class RanOut(Exception):
    pass


class Device:
    """State is one list; a copy of it takes ``copy_s`` seconds, a step is said to take
    ``step_s``."""

    processes = Processes()

    def __init__(self, copy_s=0.0, step_s=1.0):
        self.state, self.copies, self.copy_s, self.step_s = [], 0, copy_s, step_s
        self.waits = 0

    def snapshot(self, model):
        time.sleep(self.copy_s)
        self.copies += 1
        before = list(self.state)
        return lambda: self.state.__setitem__(slice(None), before)

    def measure(self, step, *, wait=True):
        self.waits += wait
        return step(), Usage(self.step_s, 7)

    @property
    def device(self):
        return SimpleNamespace(peak_bytes=lambda: 5)

    def is_out_of_memory(self, error):
        return isinstance(error, RanOut)


class Guard:
    """Attempts steps one after the other, and remembers what they show of the device."""

    def __init__(self, device):
        self.guard, self.facts = StepGuard(SimpleNamespace(), device), DeviceFacts()
        self.pending = None

    def attempt(self, step, **terms):
        terms["pending"] = self.pending
        outcome, self.facts = self.guard.attempt(step, BATCH, self.facts, **terms)
        self.pending = None if terms.get("timed", True) else outcome.result
        return outcome


def failing(device, error):
    def step(batch):
        device.state.append("half a step")
        raise error

    return step


def test_guarded_step_is_undone():
    device = Device()
    guard = Guard(device)
    outcome = guard.attempt(device.state.append, guarded=True)
    assert outcome == Trained(BATCH, None, Usage(1.0, 7))
    outcome = guard.attempt(failing(device, RanOut()), guarded=True)
    assert device.state == [BATCH]
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_bytes == 5
    assert isinstance(outcome.cause, RanOut)


@pytest.mark.parametrize(("guarded", "restored", "times"), [(1, 1, 1), (1, 0, 0), (0, 1, 0)])
def test_variables_are_put_back_at_once_where_a_guarded_step_asks_for_it(guarded, restored, times):
    device, called = Device(copy_s=0.01), []
    device.snapshot = lambda model: lambda: called.append(len(device.state))
    guard = Guard(device)
    outcome = guard.attempt(device.state.append, guarded=guarded, restored=restored)
    assert isinstance(outcome, Trained)
    assert called == [0] * times, "before the step"


def test_of_several_processes_one_alone_does_not_train_a_batch_again():
    """The others are in the middle of the step: the error ends it in all of them."""
    device = Device()
    device.processes = SimpleNamespace(count=2)
    with pytest.raises(RanOut):
        Guard(device).attempt(failing(device, RanOut()), guarded=True)
    assert device.copies == 0


def test_what_the_failed_call_held_is_free_before_the_state_comes_back():
    """Also what frames hold that the framework cut out of the traceback."""
    held, alive = [], []
    device = Device()
    device.snapshot = lambda model: lambda: alive.append([ref() is not None for ref in held])

    class Copy:
        pass

    def inner():
        copy = Copy()
        held.append(weakref.ref(copy))
        raise RanOut

    def hidden():
        copy = Copy()
        held.append(weakref.ref(copy))
        inner()

    def step(batch):
        try:
            hidden()
        except RanOut as error:
            last = error.__traceback__.tb_next.tb_next  # as TensorFlow's and Keras's filters do
            raise RanOut from error.with_traceback(last)

    outcome = Guard(device).attempt(step, guarded=True)
    assert isinstance(outcome, OutOfMemory)
    assert alive == [[False, False]]


def test_other_errors_and_interrupts_are_not_touched():
    device = Device()
    guard = Guard(device)
    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            guard.attempt(failing(device, error), guarded=True)
    assert device.state == ["half a step"] * 2


def test_unguarded_step_is_guarded_all_the_same_where_a_copy_is_cheap():
    device = Device(step_s=60.0)
    guard = Guard(device)
    guard.attempt(lambda batch: None, guarded=True)
    guard.attempt(lambda batch: None, guarded=False)
    assert device.copies == 2
    outcome = guard.attempt(failing(device, RanOut()), guarded=False)
    assert isinstance(outcome, OutOfMemory)
    assert device.state == []


def test_unguarded_step_whose_copy_is_dear_raises_what_the_framework_raises():
    device = Device(copy_s=0.01, step_s=1e-6)
    guard = Guard(device)
    guard.attempt(lambda batch: None, guarded=True)
    with pytest.raises(RanOut):
        guard.attempt(failing(device, RanOut()), guarded=False)
    assert device.copies == 1


def test_a_step_that_is_not_timed_is_not_waited_for_and_a_timed_one_waits_for_it_first():
    device = Device()
    guard = Guard(device)
    results = []
    for timed in (True, False, False, True):
        outcome = guard.attempt(lambda batch: 5, guarded=False, timed=timed)
        results.append(outcome)
        device.step_s += 1.0 if timed else 0.5
    assert [outcome.usage.time_s for outcome in results] == [1.0, 1.0, 1.0, 3.0]
    assert [outcome.result for outcome in results] == [5] * 4
    assert device.waits == 3, "twice for a time, once for what was queued before"
