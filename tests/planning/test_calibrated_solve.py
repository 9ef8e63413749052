"""Targets and compiled peaks: what is solved, what is compiled, and what is kept of it."""

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.planning import calibrated_solve
from keras_remat.planning.plan_problem import plan_problem

PROBLEM = chain_problem(64)
PLAIN = store_all_peak(64)
STORE_ALL = Schedule.store_all(PROBLEM.graph)


class Compiling(FakeBackend):
    """Tells the peak of a schedule when it is compiled, ``ratio`` times the bytes alive.

    Attributes:
        compiled: the schedules, in order.
    """

    auto_solver = "greedy"

    def __init__(self, ratio, **options):
        super().__init__(**options)
        self.ratio, self.compiled = ratio, []
        self.memory.compiled_peak_bytes = self.compiled_peak_bytes

    def compiled_peak_bytes(self, problem, schedule):
        self.compiled.append(schedule)
        return int(self.ratio(schedule) * simulate(problem, schedule).peak_bytes)


def planned(backend, budget):
    return plan_problem(PROBLEM, budget, backend, solver="auto", time_limit_s=5.0)


def test_a_step_that_recomputes_nothing_may_fit_where_keras_own_does_not():
    """Predicted for it is what Keras's own step needs."""
    plain_is = Compiling(
        lambda schedule: 1.0,
        allocator_bytes=lambda problem, s: PLAIN if s == STORE_ALL else 0,
    )
    plan = planned(plain_is, int(1.2 * PLAIN))
    assert plan.predicted.peak_bytes == PLAIN
    assert not plan.recomputes


def test_what_is_predicted_not_to_fit_is_compiled_at_last():
    """Predictions are twice of what compiling tells, so no target gives one that is promising."""
    backend = Compiling(
        lambda schedule: 1.3 if schedule == STORE_ALL else 1.0,
        allocator_bytes=lambda problem, s: simulate(problem, s).peak_bytes,
    )
    budget = int(0.9 * PLAIN)
    assert planned(backend, budget).predicted.peak_bytes <= budget


def test_the_nearest_of_all_that_were_compiled_is_told():
    backend = Compiling(lambda schedule: 1.0 + 0.1 * len(schedule.order) / len(STORE_ALL.order))
    floor = PROBLEM.floor_bytes
    with pytest.raises(ScheduleNotFoundError, match="auto: no schedule found") as caught:
        planned(backend, floor)
    peaks = [backend.compiled_peak_bytes(PROBLEM, s) for s in list(backend.compiled)]
    assert caught.value.best_peak_bytes == min(peaks) > floor
    assert caught.value.closest.predicted.peak_bytes == min(peaks)
    assert caught.value.closest.problem == PROBLEM


def test_so_many_are_compiled_and_no_more(monkeypatch):
    monkeypatch.setattr(calibrated_solve, "_MOST_COMPILATIONS", calibrated_solve._SURE_COMPILATIONS)
    backend = Compiling(lambda schedule: 3.0)
    with pytest.raises(ScheduleNotFoundError):
        planned(backend, int(0.9 * PLAIN))
    assert len(set(backend.compiled)) == calibrated_solve._SURE_COMPILATIONS
