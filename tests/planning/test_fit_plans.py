"""The plans a running ``fit`` asks for: limits that are missed by a little."""

import warnings

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.planning.fit_plans import StepPlanner, TunerOptions

PROBLEM = chain_problem(64)


class NeedsALittleMore(FakeBackend):
    """Compiling tells a twentieth more than is alive, at least 0.7 of the plain peak."""

    auto_solver = "greedy"

    def __init__(self, **options):
        super().__init__(**options)
        self.memory.compiled_peak_bytes = self.compiled_peak_bytes

    def compiled_peak_bytes(self, problem, schedule):
        return int(max(1.05 * simulate(problem, schedule).peak_bytes, 0.7 * store_all_peak(64)))


def best(share_of_what_it_needs, margin=0.0, **options):
    limit = int(share_of_what_it_needs * 0.7 * store_all_peak(64))
    backend = NeedsALittleMore(**options)
    planner = StepPlanner(
        backend, TunerOptions(limit, solver_time_limit_s=2.0, margin=margin, profile_steps=1)
    )
    return planner.best(PROBLEM, 64)


def test_a_limit_missed_by_a_little_is_trained_with_a_warning():
    with pytest.warns(UserWarning, match="Training goes on under that one"):
        plan = best(0.97)
    assert plan.predicted.peak_bytes == int(0.7 * store_all_peak(64))


def test_a_plan_that_takes_the_margin_only_needs_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best(1.01, margin=0.05)


def test_a_limit_missed_by_more_or_above_the_device_is_an_error():
    with pytest.raises(ScheduleNotFoundError):
        best(0.8)
    with pytest.raises(ScheduleNotFoundError):
        best(0.97, memory_bytes=int(0.65 * store_all_peak(64)))
