"""Ctrl-C while a step is recorded takes effect once it is: it must not come where PyTorch's C++
asks Python how a call is made."""

import signal

import pytest
import torch
import torch_kinds as kinds
from keras import ops

from keras_remat.backends.base import load_backend
from keras_remat.backends.torch import private

pytestmark = pytest.mark.usefixtures("ctrl_c_is_heard")


def pressing(times, done):
    """A model in whose recorded step Ctrl-C is pressed, and its batch."""

    def pressed(x):
        if private.is_fake(x):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append(True)
        return ops.tanh(x)

    model, batch = kinds.of(pressed)()
    return model, tuple(map(torch.as_tensor, batch))


def test_ctrl_c_waits_until_the_step_is_recorded():
    handler, done = signal.getsignal(signal.SIGINT), []
    model, batch = pressing(1, done)
    with pytest.raises(KeyboardInterrupt):
        load_backend().trace(model, batch)
    assert done
    assert signal.getsignal(signal.SIGINT) is handler
    assert not any(private.is_fake(variable.value) for variable in model.variables)


def test_ctrl_c_that_is_pressed_again_does_not_wait():
    handler, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        load_backend().trace(*pressing(2, done))
    assert not done
    assert signal.getsignal(signal.SIGINT) is handler
