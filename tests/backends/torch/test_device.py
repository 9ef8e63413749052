"""What a step takes of memory and time, on a CPU as it is and on a GPU that stands in; texts of out
of memory."""

import types

import keras
import numpy as np
import pytest
import torch
import torch_models as models

import keras_remat
from keras_remat.backends import keras_private
from keras_remat.backends.base import load_backend
from keras_remat.backends.batches import batch_bytes, repeated_batch
from keras_remat.backends.torch import device as devices
from keras_remat.backends.torch import private
from keras_remat.backends.torch.device import CpuDevice, CudaDevice, is_out_of_memory
from keras_remat.units import GIB, MIB


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_out_of_memory_is_known_by_its_type_or_text(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_what_an_allocation_of_the_cpu_raises_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_memory_events_are_every_allocation_in_order(capfd):
    kept = torch.ones(3)
    with private.memory_events() as events:
        large = torch.empty(MIB, dtype=torch.uint8)
        small = torch.empty(MIB // 2, dtype=torch.uint8)
        del large, small
        kept + 1
    sizes = [nbytes for _, nbytes in events if abs(nbytes) >= MIB // 2]
    assert sizes == [MIB, MIB // 2, -MIB, -MIB // 2]
    with private.memory_events() as outer:
        large = torch.empty(MIB, dtype=torch.uint8)
        with private.memory_events() as inner:
            small = torch.empty(MIB // 2, dtype=torch.uint8)
            del large
            assert not private.profiler_runs(), "both are ours"
        del small
    told = [[n for _, n in events if abs(n) >= MIB // 2] for events in (outer, inner)]
    assert told == [[MIB, MIB // 2, -MIB, -MIB // 2], [MIB // 2, -MIB]]
    assert capfd.readouterr().err == "", "lines of the profiler"
    assert not private.profiler_runs()


def test_a_profiler_of_the_users_own_is_left_alone():
    def step(batch):
        return batch + 1

    device = CpuDevice()
    device.expect(step, 5 * MIB)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _, usage = device.measure(lambda: device.run(step, torch.ones(4), step))
        assert private.profiler_runs()
    assert usage.peak_bytes == 5 * MIB + 16, "what is predicted, and the batch"
    assert profiler.events() is not None


def test_a_peak_counts_kernels_scratch_and_gradients_that_are_left():
    model, batch = models.CASES["sgd"]()
    data = tuple(map(torch.as_tensor, batch))
    keras_private.build(model, data)
    model.make_train_function()
    device = CpuDevice()
    device.trains(model)

    def step(given):
        return device.run(("plain",), given, lambda b: model.train_function([b]))

    before = device.in_use_bytes()
    peaks = [device.measure(lambda: step(data))[1].peak_bytes for _ in range(4)]
    batch_bytes = data[0].nbytes + data[1].nbytes
    gradients = sum(w.value.nbytes for w in model.trainable_weights)
    assert device.in_use_bytes() == before + batch_bytes + gradients
    assert peaks[1] == peaks[2] == peaks[3]
    assert before < peaks[0] <= peaks[1] <= peaks[0] + gradients


def test_gradients_that_a_plain_step_left_are_not_resident_under_a_plan():
    """A larger batch was said to fit under no schedule: what a plan frees first was counted."""
    model, batch = models.CASES["sgd"]()
    on = load_backend()
    data = on.example_batch(model, batch)
    traced = on.trace(model, data)
    before = on.device.in_use_bytes()
    model.make_train_function()
    model.train_function([data])
    gradients = sum(w.value.nbytes for w in model.trainable_weights)
    assert on.device.in_use_bytes() == before + gradients
    assert on.estimated_profile(traced, on.device.in_use_bytes()).resident_bytes == before
    assert on.estimated_profile(traced, 0).resident_bytes == 0


def test_a_batch_that_is_traced_is_in_use_before_it_trains_and_one_that_is_asked_about_is_not():
    """The first step of a larger batch in ``fit`` was planned with the bytes of a smaller one."""
    model, batch = models.CASES["sgd"]()
    on = load_backend()
    data = on.example_batch(model, batch)
    on.trace(model, data)
    before, samples = on.device.in_use_bytes(), len(data[0])
    on.trace(model, on.resized_spec(data, 5 * samples))
    assert on.device.in_use_bytes() == before
    on.trace(model, repeated_batch(data, 3 * samples))
    assert on.device.in_use_bytes() == before + 2 * batch_bytes(data)


def test_gradients_that_a_plain_step_left_are_there_in_the_forward_phase_of_the_next():
    layers = [keras.layers.Dense(512, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    on = load_backend()
    data = on.example_batch(model, (np.ones((512, 512), "float32"), np.ones((512, 1), "float32")))
    traced = on.trace(model, data)

    def predicted():
        profile = on.estimated_profile(traced, on.device.in_use_bytes())
        return traced.plain_peak_bytes(keras_remat.Problem(traced.graph, profile), on.memory)

    first = predicted()
    model.make_train_function()
    model.train_function([data])
    gradients = sum(w.value.nbytes for w in model.trainable_weights)
    assert predicted() == first + gradients
    model.zero_grad()
    assert predicted() == first


def lowered():
    """The backend, a model, its batch, and its step lowered without recomputation."""
    model, batch = models.CASES["sgd"]()
    on = load_backend()
    data = on.example_batch(model, batch)
    traced = on.trace(model, data)
    problem = keras_remat.Problem(traced.graph, on.estimated_profile(traced))
    planned = on.lower(traced, problem, keras_remat.Schedule.store_all(traced.graph))
    return on, model, data, planned


def test_a_planned_step_takes_the_same_after_a_plain_one_and_its_copy_nothing():
    """The gradients that Keras's own step leaves are freed before a planned one; the copy for
    undoing a step is not the allocator's."""
    on, model, data, planned = lowered()
    model.make_train_function()
    peaks = []
    for at in range(4):
        if at % 2:
            on.device.run(("plain",), data, lambda b: model.train_function([b]))
            assert model.trainable_weights[0].value.grad is not None
        peaks.append(on.measure(lambda: planned(data))[1].peak_bytes)
    assert len(set(peaks)) == 1
    with private.memory_events() as events:
        put_back = on.snapshot(model)
    assert sum(nbytes for _, nbytes in events if nbytes > 0) <= torch.get_rng_state().nbytes
    before = [weight.numpy().copy() for weight in model.weights]
    planned(data)
    put_back()
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)


def test_a_planned_step_goes_when_nobody_holds_it_any_more():
    """It was kept, with its recording, and recorded anew whenever a callback set a number."""
    on, _, data, planned = lowered()
    planned(data)
    assert on.record_anew() is False
    del planned
    assert on.record_anew() is None


class Card:
    """Stands in for ``torch.cuda``: a card of 8 GiB, of which a quarter is other processes'."""

    def __init__(self, fraction=1.0):
        self.allocated, self.peak, self.reserved = GIB, GIB, 2 * GIB
        self.fraction, self.waited = fraction, 0

    def memory_allocated(self, index):
        return self.allocated

    def max_memory_allocated(self, index):
        return self.peak

    def reset_peak_memory_stats(self, index):
        self.peak = self.allocated

    def memory_reserved(self, index):
        return self.reserved

    def mem_get_info(self, index):
        return 8 * GIB - self.reserved - 2 * GIB, 8 * GIB

    def get_per_process_memory_fraction(self, index):
        return self.fraction

    def synchronize(self, index=None):
        self.waited += 1


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(devices, "torch", types.SimpleNamespace(cuda=card, device=torch.device))
    return card


def test_a_gpu_measures_what_its_allocator_hands_out(card):
    device = CudaDevice(0)

    def step():
        card.peak = max(card.peak, 3 * GIB)
        return "logs"

    card.peak = 7 * GIB  # of a step before
    result, usage = device.measure(step)
    assert (result, usage.peak_bytes, card.waited) == ("logs", 3 * GIB, 2)
    assert device.in_use_bytes() == GIB
    _, usage = device.measure(step, wait=False)
    assert (usage.time_s, usage.peak_bytes, card.waited) == (0.0, 3 * GIB, 2)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 6 * GIB), (0.5, 4 * GIB)])
def test_a_gpu_has_what_is_free_and_no_more_than_its_fraction(card, fraction, expected):
    card.fraction = fraction
    assert CudaDevice(0).total_bytes() == expected


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(private, "device", lambda: torch.device("mps"))
    with pytest.raises(Exception, match="'mps'"):
        load_backend()
    assert keras.backend.backend() == "torch"
