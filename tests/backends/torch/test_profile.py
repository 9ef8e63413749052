"""Times and workspaces of recorded steps, on a GPU that stands in."""

from itertools import count

import pytest
import torch
import torch_models as models

import keras_remat
from keras_remat.backends.torch import backend, private
from keras_remat.backends.torch.device import CudaDevice
from keras_remat.backends.torch.profile import Recorder


class Event:
    """Is recorded every two milliseconds."""

    ticks = count()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = 2.0 * next(self.ticks)

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize("steps", [1, 2])
def test_a_gpu_times_the_ops_of_a_single_step_too(steps, monkeypatch):
    """The recording of a step over the limit ends with it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(private, "cuda_in_use_bytes", lambda: 100)
    monkeypatch.setattr(private, "cuda_peak_bytes", lambda: 10**9 + 100)
    model, batch = models.CASES["sgd"]()
    on = backend()
    traced = on.trace(model, on.example_batch(model, batch))
    order = keras_remat.Schedule.store_all(traced.graph)
    problem = keras_remat.Problem(traced.graph, on.estimated_profile(traced))
    lowered = on.lower(traced, problem, order)
    recorder = Recorder(CudaDevice(0))
    assert recorder.start()
    for position in list(range(len(order))) * steps:
        recorder._device.probe(position)
    profile = recorder.stop(lowered, 0)
    assert profile.source == "measured"
    *times, last = profile.op_time_s
    assert times == pytest.approx([2e-3] * len(times))
    assert last < 1e-3
    made = sum(traced.graph.values[v].nbytes for v in traced.graph.ops[0].outputs)
    assert profile.op_workspace_bytes[0] == 10**9 - made
    assert profile.op_workspace_bytes[-1] == 0
