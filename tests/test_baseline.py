"""The plain step's time where it cannot run: from measured steps of a plan, and from smaller plain steps."""

from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend, FakeOutOfMemoryError, batch_of, chain_problem, event_kinds, store_all_peak, tuner_on

from keras_remat.backends.examples import batch_size_of
from keras_remat.baseline import PredictedBaseline, order_cost
from keras_remat.planner import TunerOptions
from keras_remat.report import AutotuneReport

SIZE = 100
TIGHT = int(store_all_peak(SIZE) * 0.7)


def cost_on(backend, usable_bytes=TIGHT):
    return order_cost(backend, SimpleNamespace(), batch_of(0, SIZE), chain_problem(SIZE), usable_bytes)


@pytest.mark.parametrize(("share", "size"), [(0.7, 50), (0.4, 25), (0.2, 12)])
def test_the_largest_part_of_the_batch_that_fits_is_measured(share, size):
    backend = FakeBackend(order_cost=1.25)
    cost = cost_on(backend, int(share * store_all_peak(SIZE)))
    assert cost.batch_size == size
    assert cost.share == pytest.approx(0.8)
    assert cost.free_s == pytest.approx(0.016)
    assert backend.samples == [], "what the steps changed was put back"
    assert backend.calls == 2 * 6, "the first of each compiles"


def test_nothing_is_measured_where_it_would_say_nothing():
    assert cost_on(FakeBackend(), store_all_peak(SIZE) // 20) is None
    assert cost_on(FakeBackend(folds=lambda size: size < SIZE)) is None
    compiled = FakeBackend()
    compiled.compilation = "compiled"
    assert cost_on(compiled) is None
    assert compiled.traced == []
    assert order_cost(FakeBackend(), SimpleNamespace(), batch_of(0, 1), chain_problem(1), TIGHT) is None


def test_arrays_that_are_no_samples_are_no_reason_to_end_fit(monkeypatch):
    backend = FakeBackend()

    def refuse(batch, size):
        from keras_remat.errors import UnsupportedModelError

        raise UnsupportedModelError(f"not {batch_size_of(batch)} samples")

    monkeypatch.setattr(backend, "resized_spec", refuse)
    assert cost_on(backend) is None


def test_running_out_of_memory_ends_the_comparison_and_nothing_else():
    backend = FakeBackend()
    backend.fails_at = {4}
    assert cost_on(backend) is None
    assert backend.samples == []


def test_other_errors_pass_through_with_the_state_put_back(monkeypatch):
    backend = FakeBackend()
    monkeypatch.setattr(backend, "is_out_of_memory", lambda error: False)
    backend.fails_at = {4}
    with pytest.raises(FakeOutOfMemoryError):
        cost_on(backend)
    assert backend.samples == []


@pytest.mark.parametrize("order", [1.0, 1.25])
def test_the_baseline_of_a_fit_has_no_cost_of_order(order):
    backend = FakeBackend(slowness=1.0, order_cost=order)
    tuner, report = tuner_on(backend, TunerOptions(memory_limit=TIGHT, solver="greedy", margin=0.0, profile_steps=2))
    for step in range(12):
        tuner.run(batch_of(step * SIZE, SIZE))
    assert tuner.settled
    assert event_kinds(report).count("baseline") == 1
    assert report.baseline_source == "predicted"
    assert report.baseline.time_s == pytest.approx(16.0)
    assert backend.samples == list(range(12 * SIZE))


def test_short_steps_are_not_compared():
    backend = FakeBackend(order_cost=1.25)
    tuner, report = tuner_on(backend, TunerOptions(memory_limit=TIGHT, solver="greedy", margin=0.0, profile_steps=2))
    for step in range(12):
        tuner.run(batch_of(step * SIZE, SIZE))
    assert "baseline" not in event_kinds(report)
    assert backend.traced == [SIZE]


@pytest.mark.parametrize(("slowness", "steps"), [(1.0, 9), (1e-3, 3)])
def test_long_plain_steps_are_measured_more_often(slowness, steps):
    backend = FakeBackend(slowness=slowness)
    tuner, report = tuner_on(backend, TunerOptions(memory_limit=None, profile_steps=2))
    for step in range(12):
        assert (report.baseline is not None) == tuner.settled == (step >= steps)
        tuner.run(batch_of(step * SIZE, SIZE))
    assert report.baseline.time_s == pytest.approx(16.0 * slowness)


def test_the_prediction_follows_the_steps():
    report = AutotuneReport()
    baseline = PredictedBaseline(report)
    plan = SimpleNamespace(
        store_all=SimpleNamespace(time_s=3.0, peak_bytes=7), predicted=SimpleNamespace(time_s=4.0, peak_bytes=5)
    )
    baseline.begin(plan, 10, 1.0)
    assert (report.baseline.time_s, report.baseline.peak_bytes) == (0.75, 7)
    assert (report.baseline_batch_size, report.baseline_source) == (10, "predicted")
    for seconds in (2.0, 4.0, 100.0):
        baseline.step(seconds)
    assert report.baseline.time_s == 3.0
    baseline.epoch_begins()
    assert report.baseline.time_s == 3.0
    baseline.step(8.0)
    assert report.baseline.time_s == 6.0
    baseline.order_share = 0.5
    baseline.begin(plan, 20, 1.0)
    baseline.step(8.0)
    assert report.baseline.time_s == 3.0
    assert report.baseline_batch_size == 20
