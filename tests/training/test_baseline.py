"""The plain step's time where it cannot run, and how often it is measured where it can."""

from types import SimpleNamespace

import pytest
from fake_backend import (
    FakeBackend,
    batch_of,
    store_all_peak,
)
from fake_fit import driven, fitted

from keras_remat.core.schedule import Usage
from keras_remat.training import driver, modes
from keras_remat.training.arguments import FitOptions
from keras_remat.training.baseline import Baseline
from keras_remat.training.shape_state import StepConstraints

SIZE = 100
TIGHT = int(store_all_peak(SIZE) * 0.7)


def test_the_baseline_of_a_fit_follows_the_steps_of_the_epoch():
    backend = FakeBackend(slowness=1.0)
    trainer, report = driven(
        backend, FitOptions(memory_limit=TIGHT, solver="greedy", margin=0.0, profile_steps=2)
    )

    def epoch(steps=12):
        trainer.epoch_begins()
        for step in range(steps):
            trainer.run(batch_of(step * SIZE, SIZE))

    epoch()
    assert trainer.settled
    assert report.baseline_source == "predicted"
    assert report.baseline.time_s == pytest.approx(16.0)
    backend.slowness = 2.0  # the machine has something else to do
    epoch()
    assert report.baseline.time_s == pytest.approx(32.0)
    assert backend.traced == [SIZE]


@pytest.mark.parametrize(
    ("slowness", "grows", "steps"), [(1.0, True, 9), (1.0, False, 3), (1e-3, True, 3)]
)
def test_long_plain_steps_are_measured_more_often_where_larger_ones_will_follow(
    slowness, grows, steps
):
    backend = FakeBackend(slowness=slowness)
    trainer, report = driven(backend, FitOptions(memory_limit=None, profile_steps=2))
    for step in range(12):
        assert (report.baseline is not None) == (step >= 2)
        assert trainer.settled == (step >= steps)
        trainer.run(batch_of(step * SIZE, SIZE), StepConstraints(may_split=grows))
    assert report.baseline.time_s == pytest.approx(16.0 * slowness)


def test_a_model_that_is_compiled_anew_has_a_plain_step_of_its_own():
    """Once more layers learn, the step takes more than the one that was measured before."""
    backend = FakeBackend(layers=4)
    limit = int(store_all_peak(SIZE, layers=12) * 0.7)
    trainer, report = driven(
        backend, FitOptions(memory_limit=limit, solver="greedy", margin=0.0, profile_steps=2)
    )
    for layers, source in ((4, "measured"), (12, "predicted")):
        backend.layers = layers
        driver.note(trainer.fit, modes.begun_anew)
        for step in range(12):
            trainer.run(batch_of(step * SIZE, SIZE))
        assert report.baseline_source == source
        assert report.baseline.peak_bytes == store_all_peak(SIZE, layers=layers)


def test_the_speedup_under_a_plan_is_less_than_one_by_what_is_recomputed():
    how = {"memory_limit": TIGHT, "margin": 0.0, "batch_size": "keep", "profile_steps": 2}
    with fitted(FakeBackend(slowness=1.0), **how) as (model, remat):
        model.fit([SIZE] * 20, 3, remat)
    assert remat.plan.recomputes
    first, *later = remat.report.speedups
    assert first < 1, "by the first plan"
    assert later == pytest.approx([1 / (1 + remat.plan.overhead)] * 2, rel=0.01)


def plan_of(store_all_s, predicted_s):
    return SimpleNamespace(
        store_all=SimpleNamespace(time_s=store_all_s, peak_bytes=7),
        predicted=SimpleNamespace(time_s=predicted_s, peak_bytes=5),
    )


def test_the_prediction_follows_the_steps():
    plan, mode = plan_of(3.0, 4.0), ("ordered", 1)
    baseline = Baseline().predicting(plan, 10, 1.0, mode)
    assert baseline.usage == Usage(0.75, 7)
    assert (baseline.batch_size, baseline.source) == (10, "predicted")
    for seconds in (2.0, 4.0, 100.0):
        baseline = baseline.after_planned(seconds, mode)
    assert baseline.usage.time_s == 3.0
    baseline = baseline.in_new_epoch()
    assert baseline.usage.time_s == 3.0
    baseline = baseline.after_planned(8.0, mode)
    assert baseline.usage.time_s == 6.0
    baseline = baseline.predicting(plan, 20, 1.0, mode)
    assert (baseline.usage.time_s, baseline.batch_size) == (0.75, 20)


def test_every_mode_tells_of_the_one_plain_step_by_its_own_plan():
    modes = (("compiled", 1), ("ordered", 1), ("ordered", 2))
    baseline = Baseline().predicting(plan_of(3.0, 4.0), 10, 4.0, modes[0])
    baseline = baseline.predicting(plan_of(3.0, 6.0), 10, 6.0, modes[1])
    # of micro-batches, the plan for the whole batch tells better
    baseline = baseline.predicting(plan_of(5.0, 5.0), 10, 5.0, modes[2])
    for mode, seconds in zip(modes, (4.0, 6.0, 5.0), strict=True):
        baseline = baseline.in_new_epoch().after_planned(seconds, mode)
        assert baseline.usage.time_s == 3.0
