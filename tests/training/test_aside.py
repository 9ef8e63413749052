"""Where nothing is to be done, nothing is: Keras's own train function runs from the second step on,
and ours takes its place again where a step comes near the limit."""

import warnings
from dataclasses import replace

import pytest
from fake_backend import FakeBackend, event_kinds, store_all_peak
from fake_fit import fitted

from keras_remat.backends.processes import Processes
from keras_remat.core.events import EventKind
from keras_remat.training import aside, callers

SIZES = [8] * 10


@pytest.fixture
def of_one_size(monkeypatch):
    """Has all batches said to have no more samples than the first."""
    monkeypatch.setattr(callers.RunningFit, "may_grow", False)


def fit(backend, sizes=SIZES, epochs=2, **options):
    """Returns the callback and, for every step, whether Keras's own function was called."""
    options = {"memory_limit": 2**30, "batch_size": "keep", "profile_steps": 2, **options}
    own, run_plain = [], backend.run_plain
    with fitted(backend, **options) as (model, callback):

        def make(force=False):
            if model.train_function is None or force:
                model.train_function = keras_own

        def keras_own(iterator):
            batch = next(iterator)
            own.append(True)
            return run_plain(batch)

        model.make_train_function = make
        backend.run_plain = lambda batch: own.append(False) or run_plain(batch)
        model.fit(sizes, epochs, callback)
        assert model.train_function is keras_own
    return callback, own


def test_from_the_second_step_on_the_train_function_is_kerass_own(of_one_size):
    callback, own = fit(FakeBackend())
    assert own == [False] + [True] * 19
    assert event_kinds(callback.report) == [EventKind.FITS]
    assert [epoch.samples for epoch in callback.report.epochs] == [80, 80]
    assert [epoch.steps for epoch in callback.report.epochs] == [10, 10]
    assert {epoch.peak_bytes for epoch in callback.report.epochs} == {store_all_peak(8)}
    assert callback.report.baseline.peak_bytes == store_all_peak(8)
    assert callback.plan is None


def test_what_cannot_be_measured_is_not_predicted_anew_for_every_epoch(of_one_size):
    """On TensorFlow that is a simulation, which took longer than the steps of an epoch."""

    def asked_in(epochs):
        backend, asked = FakeBackend(has_statistics=False), []
        backend.plain_surplus_bytes = 4096  # what Keras's own step needs above the ops in order
        predict = backend.memory.peak_bytes
        backend.memory.peak_bytes = lambda *of: asked.append(of) or predict(*of)
        with pytest.warns(UserWarning, match="enable_cpu_memory_stats"):
            callback, _ = fit(backend, epochs=epochs)
        assert {epoch.peak_bytes for epoch in callback.report.epochs} == {store_all_peak(8) + 4096}
        assert callback.report.baseline.peak_bytes == store_all_peak(8) + 4096
        return len(asked)

    assert asked_in(6) == asked_in(2)


class CountsNothing(FakeBackend):
    """Has an allocator whose statistics leave out all that a step allocates: small arrays."""

    watched_bytes = property(lambda self: 0, lambda self, nbytes: None)

    def measure(self, run, *, wait=True):
        result, usage = super().measure(run, wait=wait)
        return result, replace(usage, peak_bytes=0)


def test_a_step_of_small_arrays_that_are_not_counted_is_measured_and_not_predicted(of_one_size):
    def asked_in(epochs):
        backend, asked = CountsNothing(), []
        predict = backend.memory.peak_bytes
        backend.memory.peak_bytes = lambda *of: asked.append(of) or predict(*of)
        _, own = fit(backend, epochs=epochs)
        assert own == [False] + [True] * (10 * epochs - 1)
        return len(asked)

    assert asked_in(6) == asked_in(2)


@pytest.mark.parametrize(("times", "tells"), [(2, True), (20, False)])
def test_what_the_device_does_not_count_is_told_where_it_is_much_of_the_limit(
    of_one_size, times, tells
):
    backend = CountsNothing()
    backend.memory.smallest_bytes = 2**18
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback, _ = fit(backend, memory_limit=times * store_all_peak(8))
    told = [e.message for e in callback.report.events if e.kind is EventKind.REMARK]
    assert len(told) == tells
    assert all("counts no array below 256 KiB" in one for one in told)
    assert tells == any("counts no array below" in str(one.message) for one in caught)


def test_batches_that_may_grow_are_watched_from_inside_until_their_step_is_final():
    """And then from outside, as long as twice as much would fit."""
    _, own = fit(FakeBackend())
    assert own == [False] * 3 + [True] * 17
    _, own = fit(FakeBackend(), memory_limit=int(1.5 * store_all_peak(8)), margin=0.0)
    assert own == [False] * 20


def test_of_several_processes_none_stands_aside(of_one_size, monkeypatch):
    """One that fails has to tell the others."""
    monkeypatch.setattr(Processes, "count", 2)
    _, own = fit(FakeBackend())
    assert own == [False] * 20


def test_a_larger_batch_that_is_searched_is_ours():
    backend = FakeBackend()
    _, own = fit(backend, batch_size=16, epochs=3)
    assert not any(own[5:])
    assert {len(samples) for _, samples in backend.ran[-5:]} == {16}


def test_a_step_over_the_limit_is_planned_for(of_one_size):
    """What the plain step takes rises in the middle of training."""
    limit = store_all_peak(8) + 4000
    calls = []

    def surplus(what, size):
        calls.append(what)
        return 8000 if what == "plain" and len(calls) > 20 else 0

    backend = FakeBackend(surplus_bytes=surplus)
    callback, own = fit(backend, memory_limit=limit, margin=0.0, epochs=4)
    assert own[:10] == [False] + [True] * 9
    assert EventKind.EXCEEDED in event_kinds(callback.report)
    assert callback.plan is not None
    assert backend.kinds[-5:] == ["remat"] * 5
    assert sum(epoch.samples for epoch in callback.report.epochs) == 4 * 80
    assert len(backend.samples) == 4 * 80


def test_near_the_limit_the_steps_are_watched_from_inside(of_one_size):
    """Within the limit, but not with the margin."""
    peak = store_all_peak(8)
    risen = []
    backend = FakeBackend(surplus_bytes=lambda what, size: 1000 if len(risen) > 20 else 0)
    run_plain = backend.run_plain
    backend.run_plain = lambda batch: risen.append(batch) or run_plain(batch)
    callback, own = fit(backend, memory_limit=int((peak + 500) / 0.95), margin=0.05, epochs=4)
    assert own[:5] == [False] + [True] * 4
    assert own[-5:] == [False] * 5
    assert callback.plan is None
    assert sum(epoch.samples for epoch in callback.report.epochs) == 4 * 80


@pytest.mark.parametrize("left", [0, 7])
def test_a_step_that_leaves_keras_s_loss_alone_has_its_batches_taken_for_whole(left, monkeypatch):
    """Its count stays 0, or what validation has left of it, and says nothing of a generator."""
    counts = iter([0, left, left])
    monkeypatch.setattr(aside, "samples_counted", lambda model: next(counts))
    callback, _ = fit(FakeBackend())
    assert [epoch.samples for epoch in callback.report.epochs] == [80, 80]
