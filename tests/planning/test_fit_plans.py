"""The plans a running ``fit`` asks for: limits that are missed by a little."""

import pytest
from fake_backend import FakeBackend, chain_problem, planner_on, store_all_peak

from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning import fit_plans
from keras_remat.planning.fit_plans import TunerOptions, limit_of

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
    planner = planner_on(
        backend, TunerOptions(limit, solver_time_limit_s=2.0, margin=0.0, profile_steps=1)
    )
    return planner.best(PROBLEM, 64)


def test_a_limit_that_is_missed_names_the_plan_that_came_closest():
    with pytest.raises(ScheduleNotFoundError) as caught:
        best(0.97)
    assert caught.value.closest.predicted.peak_bytes == int(0.7 * store_all_peak(64))


def test_the_closest_plan_is_the_best_of_what_the_search_saw_and_a_quick_one(monkeypatch):
    """The search has more time; where the allocator decides, a quick solver may be luckier."""
    tight, loose = (quick(share) for share in (0.6, 1.0))
    failure = ScheduleNotFoundError(1, 0, closest=tight)
    backend = FakeBackend()
    backend.memory.order_matters = True
    planner = planner_on(backend, TunerOptions(int(0.7 * store_all_peak(64))))
    for other in (loose, tight):
        monkeypatch.setattr(fit_plans, "closest_plan", lambda *_, other=other, **__: other)
        assert planner.closest(PROBLEM, failure) is tight
        failure.closest = loose

    def none(*arguments, **options):
        raise ScheduleNotFoundError(1, 0)

    monkeypatch.setattr(fit_plans, "closest_plan", none)
    assert planner.closest(PROBLEM, failure) is loose
    failure.closest = None
    with pytest.raises(ScheduleNotFoundError):
        planner.closest(PROBLEM, failure)


def test_the_floor_says_what_would_lower_it():
    limit = PROBLEM.floor_bytes // 2
    planner = planner_on(FakeBackend(), TunerOptions(limit, solver_time_limit_s=2.0))
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.best(PROBLEM, 64)
    name = PROBLEM.graph.ops[PROBLEM.floor_op].name
    assert str(caught.value).endswith(f"is needed. Give {name} less.")


def quick(share, roomy_share=None):
    """A quick plan under a share of the plain peak, and one that should need less."""
    plain = store_all_peak(64)
    options = TunerOptions(int(share * plain), solver_time_limit_s=2.0, margin=0.0)
    roomy = roomy_share and int(roomy_share * plain)
    return planner_on(FakeBackend(), options).quick(PROBLEM, 64, roomy)


def test_a_quick_plan_leaves_the_room_it_is_asked_for():
    plain = store_all_peak(64)
    assert quick(1.0).predicted.peak_bytes == plain
    plan = quick(1.0, roomy_share=0.9)
    assert plan.predicted.peak_bytes <= 0.9 * plain
    assert plan.budget_bytes == plain


def test_room_is_given_up_where_no_schedule_leaves_it():
    plain = store_all_peak(64)
    least = min(quick(share).predicted.peak_bytes for share in (0.5, 0.6, 0.7)) / plain
    plan = quick(1.02 * least, roomy_share=0.5 * PROBLEM.floor_bytes / plain)
    assert plan.predicted.peak_bytes <= plan.budget_bytes == int(1.02 * least * plain)


@pytest.mark.parametrize("order_matters", [True, False])
def test_another_order_is_measured_whatever_is_predicted_where_the_allocator_decides(
    order_matters, monkeypatch
):
    ran, other = (quick(share) for share in (0.6, 1.0))
    backend = FakeBackend()
    backend.memory.order_matters = order_matters
    planner = planner_on(backend, TunerOptions(int(0.7 * store_all_peak(64))))

    def none(*arguments, **options):
        raise ScheduleNotFoundError(1, 0, closest=ran if order_matters else other)

    monkeypatch.setattr(fit_plans, "plan_problem", none)
    monkeypatch.setattr(fit_plans, "closest_plan", lambda *_, **__: other)
    needed = ran.predicted.peak_bytes
    over_limit = [ran.solution.schedule]
    with pytest.raises(ScheduleNotFoundError):
        planner.nearest(PROBLEM, 64, needed)
    if not order_matters:
        with pytest.raises(ScheduleNotFoundError):
            planner.nearest(PROBLEM, 64, needed, over_limit)
        return
    assert planner.nearest(PROBLEM, 64, needed, over_limit) is other
    with pytest.raises(ScheduleNotFoundError):
        planner.nearest(PROBLEM, 64, needed, [*over_limit, other.solution.schedule])


def test_a_fit_is_not_planned_for_more_than_the_device_has():
    backend = FakeBackend()
    with pytest.warns(UserWarning, match="is taken"):
        limit = limit_of(backend, TunerOptions(2 * backend.memory_bytes))
    assert limit.total_bytes == backend.memory_bytes
    assert limit_of(backend, TunerOptions()) == limit
