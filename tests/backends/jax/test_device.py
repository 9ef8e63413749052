"""Steps on the current state, guarded, and what they take."""

import os
import signal
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax_models as models
import keras
import numpy as np
import pytest

import keras_remat
from keras_remat.backends.jax import device as jax_device
from keras_remat.backends.jax import measure
from keras_remat.backends.jax.device import Device
from keras_remat.backends.jax.diagnosis import diagnosis
from keras_remat.backends.jax.lower import lower_plain
from keras_remat.backends.jax.measure import added_bytes
from keras_remat.backends.jax.trace import trace
from keras_remat.units import GIB, MIB


def test_asking_for_statistics_changes_nothing(monkeypatch):
    """TensorFlow's allocator is not asked for any, and TensorFlow is not imported for it."""
    monkeypatch.delenv("TF_CPU_ALLOCATOR_USE_BFC", raising=False)
    before = dict(os.environ), "tensorflow" in sys.modules
    assert not keras_remat.enable_cpu_memory_stats()
    assert (dict(os.environ), "tensorflow" in sys.modules) == before


def failing(state, batch):
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")


def test_the_device_that_was_chosen_is_the_one_that_is_named_and_measured(monkeypatch):
    class Second:
        platform, id, device_kind = "gpu", 1, "Second"

        def memory_stats(self):
            return {"bytes_limit": 7, "bytes_in_use": 3}

    monkeypatch.setattr(measure, "jax", SimpleNamespace(config=SimpleNamespace()))
    measure.jax.config.jax_default_device = Second()
    assert Device().name == "gpu:1"
    assert Device().in_use_bytes() == 3
    told = diagnosis()
    assert (told["device"], told["limit_bytes"]) == ("GPU:1", 7)


def test_the_devices_of_a_distribution_count(monkeypatch):
    """Of what they have in use the most, and of their limits the least; on a host they share it."""

    class Having:
        platform = "gpu"

        def __init__(self, at, **statistics):
            self.id, self.statistics = at, statistics

        def memory_stats(self):
            return self.statistics

    def train_on(*devices):
        mesh = SimpleNamespace(backend_mesh=SimpleNamespace(local_devices=devices))
        active = SimpleNamespace(device_mesh=mesh)
        monkeypatch.setattr(keras.distribution, "distribution", lambda: active)

    train_on(Having(2, bytes_in_use=5, bytes_limit=9), Having(3, bytes_in_use=7, bytes_limit=8))
    device = Device()
    assert (device.name, device.in_use_bytes(), device.total_bytes()) == ("gpu:2", 7, 8)
    monkeypatch.setattr(jax_device, "host_memory_bytes", lambda in_use: 100 * MIB + in_use)
    train_on(jax.local_devices()[0])
    alone = device.total_bytes()
    train_on(jax.local_devices()[0], Having(1))
    assert device.total_bytes() == 50 * MIB + (alone - 100 * MIB)


@pytest.mark.parametrize("chosen", [None, "cpu"])
def test_a_platform_may_be_chosen_by_name(chosen):
    with jax.default_device(chosen):
        assert measure.first_device() is jax.local_devices()[0]


def test_a_guarded_step_that_fails_leaves_the_state_as_it_was():
    device = Device()
    device.state = ([jnp.arange(3.0)], [jnp.uint32(7)])
    device.snapshot(None)
    with pytest.raises(jax.errors.JaxRuntimeError):
        device.run(None, failing, None, 0)
    np.testing.assert_array_equal(device.state[0][0], [0, 1, 2])
    assert int(device.state[1][0]) == 7


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_in_a_step_comes_once_the_new_state_is_kept():
    """The old one is consumed: dropped with the new one, all weights would be lost."""

    def interrupted(state, batch):
        signal.raise_signal(signal.SIGINT)
        return None, ([state[0][0] + 1],)

    device = Device()
    device.state = ([jnp.zeros(2)],)
    with pytest.raises(KeyboardInterrupt):
        device.run(None, interrupted, None, 0)
    np.testing.assert_array_equal(device.state[0][0], [1, 1])


def test_a_snapshot_guards_one_step_and_can_be_put_back_later():
    device = Device()
    device.state = ([jnp.zeros(2)],)
    put_back = device.snapshot(None)
    for _ in range(2):
        device.run(None, lambda state, batch: (None, ([state[0][0] + batch],)), 1.0, 0)
    np.testing.assert_array_equal(device.state[0][0], [2, 2])
    put_back()
    np.testing.assert_array_equal(device.state[0][0], [0, 0])


def test_a_state_in_other_containers_is_brought_into_those_of_the_old_one():
    """A user's ``train_step`` may return it in a tuple, and the steps that follow are compiled for
    what Keras makes."""
    before = ([jnp.zeros(2)], [])
    logs, after = jax_device._as_before(before, {"loss": 1.0}, [(jnp.ones(2),), ()])
    assert logs == {"loss": 1.0}
    assert jax.tree.structure(after) == jax.tree.structure(before)
    np.testing.assert_array_equal(after[0][0], [1, 1])


def test_what_a_failed_step_had_not_consumed_stays_where_it_is():
    """Else the device would have to hold the state twice, just when it has no memory left."""

    def consumes_one(state, batch):
        state[0][0].delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")

    device = Device()
    device.state = ([jnp.arange(3.0), jnp.ones(2)],)
    whole = device.state[0][1]
    put_back = device.snapshot(None)
    with pytest.raises(jax.errors.JaxRuntimeError):
        device.run(None, consumes_one, None, 0)
    assert device.state[0][1] is whole
    restored = device.state[0][0]
    np.testing.assert_array_equal(restored, [0, 1, 2])
    put_back()  # as a guard does, after the step has put it back itself
    assert device.state[0][0] is restored


def test_what_is_put_back_takes_the_place_of_what_is_let_go(monkeypatch):
    device = Device()
    device.state = ([jnp.zeros(2), jnp.ones(2)],)
    put_back = device.snapshot(None)
    device.run(None, lambda state, batch: (None, ([x + 1 for x in state[0]],)), None, 0)
    trained, upload = device.state[0], jnp.array

    def checked(value):
        assert all(leaf.is_deleted() for leaf in trained)
        return upload(value)

    monkeypatch.setattr("keras_remat.backends.jax.device.jnp.array", checked)
    put_back()
    np.testing.assert_array_equal(device.state[0][0], [0, 0])
    np.testing.assert_array_equal(device.state[0][1], [1, 1])


def test_outside_fit_the_state_is_in_the_models_variables():
    model = models.small()
    batch = tuple(jnp.asarray(part) for part in models.batch(model))
    trace(model, batch)
    model.make_train_function()
    before = model.get_weights()
    logs = Device().run_plain(model, model.train_function, batch)
    assert np.isfinite(float(logs["loss"]))
    assert int(model.optimizer.iterations) == 1
    assert any((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))


def test_peak_is_what_is_in_use_and_what_the_compiled_step_adds():
    model = models.mixer(blocks=1)
    batch = tuple(jnp.asarray(part) for part in models.batch(model))
    traced = trace(model, batch)
    model.make_train_function()
    device = Device()
    other = jnp.ones((8, MIB // 4))
    in_use = device.in_use_bytes()
    _, usage = device.measure(lambda: device.run_plain(model, model.train_function, batch))
    assert usage.peak_bytes == in_use + added_bytes(lower_plain(traced))
    assert usage.time_s > 0
    assert in_use >= other.nbytes


class FakeAllocator:
    """Statistics as a GPU's allocator keeps them."""

    def __init__(self, monkeypatch):
        self.bytes_in_use = self.peak_bytes_in_use = 10 * MIB
        self.bytes_limit = GIB
        monkeypatch.setattr(
            "keras_remat.backends.jax.device.device_statistic", lambda name: getattr(self, name)
        )

    def step(self, peak_bytes):
        def run(state, batch):
            self.peak_bytes_in_use = max(self.peak_bytes_in_use, peak_bytes)
            return None, state

        return run


def test_the_peak_of_a_first_run_is_not_the_steps(monkeypatch):
    """Kernels may have been chosen by running them; what the program allocates is known."""
    allocator, device = FakeAllocator(monkeypatch), Device()
    device.state = ()
    first, later, as_before = (
        device.measure(
            lambda peak=peak, first=first: device.run(
                None, allocator.step(peak), None, 5 * MIB, first=first
            )
        )[1].peak_bytes
        for peak, first in ((4 * GIB, True), (4 * GIB + MIB, False), (0, False))
    )
    assert first == 15 * MIB
    assert later == 4 * GIB + MIB
    assert as_before == 15 * MIB


def test_after_out_of_memory_a_step_took_no_more_than_there_is(monkeypatch):
    FakeAllocator(monkeypatch)
    device = Device()
    device.state = ()
    with pytest.raises(jax.errors.JaxRuntimeError):
        device.measure(lambda: device.run(None, failing, None, 2 * GIB, first=True))
    assert device.peak_bytes() == GIB


def test_bytes_in_use_count_a_held_array():
    device = Device()
    before = device.in_use_bytes()
    held = jnp.ones((8, MIB // 4))
    assert device.in_use_bytes() - before == 8 * MIB
    del held
    assert device.in_use_bytes() == before


def test_nothing_run_is_the_bytes_in_use():
    device = Device()
    result, usage = device.measure(lambda: {"loss": 2.0, "none": None})
    assert result == {"loss": 2.0, "none": None}
    assert usage.peak_bytes == device.in_use_bytes()


def test_steps_are_timed_while_a_recording_is_under_way():
    device = Device()
    device.state = ()
    device.run(None, lambda state, batch: (None, state), None, 0)
    device.step_times.start()
    for _ in range(3):
        device.run(None, lambda state, batch: (None, state), None, 0)
    assert len(device.step_times.times_s) == 3
    assert min(device.step_times.times_s) > 0


def test_memory_is_at_most_the_machines():
    with open("/proc/meminfo") as file:
        total_kib = int(file.readline().split()[1])
    assert GIB // 4 < Device().total_bytes() <= total_kib * 1024
