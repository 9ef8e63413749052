"""The plans a running ``fit`` asks for: limits that are missed by a little."""

import dataclasses

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning.fit_plans import StepPlanner, TunerOptions

PROBLEM = chain_problem(64)


class NeedsALittleMore(FakeBackend):
    """Compiling tells a twentieth more than is alive, at least 0.7 of the plain peak."""

    auto_solver = "greedy"

    def __init__(self):
        super().__init__()
        self.memory.compiled_peak_bytes = self.compiled_peak_bytes

    def compiled_peak_bytes(self, problem, schedule):
        return int(max(1.05 * simulate(problem, schedule).peak_bytes, 0.7 * store_all_peak(64)))


def best(share_of_what_it_needs):
    limit = int(share_of_what_it_needs * 0.7 * store_all_peak(64))
    backend = NeedsALittleMore()
    planner = StepPlanner(
        backend, TunerOptions(limit, solver_time_limit_s=2.0, margin=0.0, profile_steps=1)
    )
    return planner.best(PROBLEM, 64)


def test_a_limit_that_is_missed_names_the_plan_that_came_closest():
    with pytest.raises(ScheduleNotFoundError) as caught:
        best(0.97)
    assert caught.value.closest.predicted.peak_bytes == int(0.7 * store_all_peak(64))


def test_the_floor_says_what_would_lower_it():
    limit = PROBLEM.floor_bytes // 2
    planner = StepPlanner(FakeBackend(), TunerOptions(limit, solver_time_limit_s=2.0))
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.best(PROBLEM, 64)
    name = PROBLEM.graph.ops[PROBLEM.floor_op].name
    assert str(caught.value).endswith(f"would do. Give {name} less.")


def quick(share, source):
    """A quick plan under a share of the plain peak, for costs of that source."""
    problem = dataclasses.replace(
        PROBLEM, profile=dataclasses.replace(PROBLEM.profile, source=source)
    )
    limit = int(share * store_all_peak(64))
    options = TunerOptions(limit, solver_time_limit_s=2.0, margin=0.0)
    return StepPlanner(FakeBackend(), options).quick(problem, 64), limit


def test_a_plan_leaves_room_until_something_was_measured():
    plan, limit = quick(1.0, "measured")
    assert plan.predicted.peak_bytes == limit
    plan, limit = quick(1.0, "estimated")
    assert plan.predicted.peak_bytes <= 0.95 * limit
    assert plan.budget_bytes == limit


def test_room_is_given_up_where_no_schedule_leaves_it():
    least = min(quick(share, "measured")[0].predicted.peak_bytes for share in (0.5, 0.6, 0.7))
    plan, limit = quick(1.02 * least / store_all_peak(64), "estimated")
    assert plan.predicted.peak_bytes <= limit == plan.budget_bytes
