"""A guarded step leaves no trace when it runs out of memory; an unguarded one is the framework's
business."""

import time
from types import SimpleNamespace

import pytest

from keras_remat.core.schedule import Usage
from keras_remat.training.undo import StepGuard, StepOutOfMemoryError


class OutOfMemory(Exception):
    pass


class Device:
    """State is one list; a copy of it takes ``copy_s`` seconds, a step is said to take
    ``step_s``."""

    def __init__(self, copy_s=0.0, step_s=1.0):
        self.state, self.copies, self.copy_s, self.step_s = [], 0, copy_s, step_s

    def snapshot(self, model):
        time.sleep(self.copy_s)
        self.copies += 1
        before = list(self.state)
        return lambda: self.state.__setitem__(slice(None), before)

    def measure(self, step):
        return step(), Usage(self.step_s, 7)

    @property
    def device(self):
        return SimpleNamespace(peak_bytes=lambda: 5)

    def is_out_of_memory(self, error):
        return isinstance(error, OutOfMemory)


def failing(device, error):
    def step():
        device.state.append("half a step")
        raise error

    return step


def test_guarded_step_is_undone():
    device = Device()
    guard = StepGuard(SimpleNamespace(), device)
    assert guard.run(lambda: device.state.append(1), guarded=True) == (None, Usage(1.0, 7))
    with pytest.raises(StepOutOfMemoryError) as caught:
        guard.run(failing(device, OutOfMemory()), guarded=True)
    assert device.state == [1]
    assert caught.value.peak_bytes == 5
    assert isinstance(caught.value.__cause__, OutOfMemory)


def test_other_errors_and_interrupts_are_not_touched():
    device = Device()
    guard = StepGuard(SimpleNamespace(), device)
    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            guard.run(failing(device, error), guarded=True)
    assert device.state == ["half a step"] * 2


def test_unguarded_step_is_guarded_all_the_same_where_a_copy_is_cheap():
    device = Device(step_s=60.0)
    guard = StepGuard(SimpleNamespace(), device)
    guard.run(lambda: None, guarded=True)
    guard.run(lambda: None, guarded=False)
    assert device.copies == 2
    with pytest.raises(StepOutOfMemoryError):
        guard.run(failing(device, OutOfMemory()), guarded=False)
    assert device.state == []


def test_unguarded_step_whose_copy_is_dear_raises_what_the_framework_raises():
    device = Device(copy_s=0.01, step_s=1e-6)
    guard = StepGuard(SimpleNamespace(), device)
    guard.run(lambda: None, guarded=True)
    with pytest.raises(OutOfMemory):
        guard.run(failing(device, OutOfMemory()), guarded=False)
    assert device.copies == 1
