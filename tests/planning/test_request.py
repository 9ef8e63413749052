"""The one door for plans: what is asked for, and limits that are missed by a little."""

from dataclasses import replace

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.backends.processes import Processes
from keras_remat.core.limit import Limit
from keras_remat.core.simulate import simulate
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning import budget_search
from keras_remat.planning import request as door
from keras_remat.planning.calibrated_solve import within_budget
from keras_remat.planning.request import PlanRequest, plan_for
from keras_remat.training.arguments import FitOptions
from keras_remat.training.fit_state import limit_of

PROBLEM = chain_problem(64)


class NeedsALittleMore(FakeBackend):
    """Compiling tells a twentieth more than is alive, at least 0.7 of the plain peak."""

    auto_solver = "greedy"

    def __init__(self):
        super().__init__()
        self.memory.compiled_peak_bytes = self.compiled_peak_bytes

    def compiled_peak_bytes(self, problem, schedule):
        return int(max(1.05 * simulate(problem, schedule).peak_bytes, 0.7 * store_all_peak(64)))


def asked_for(share, backend=None, **more):
    """A request for a plan under a share of the plain peak."""
    limit = Limit(int(share * store_all_peak(64)))
    told = {"problem": PROBLEM, "batch_size": 64, "limit": limit, "seconds": 2.0, **more}
    return PlanRequest.on(backend or FakeBackend(), **told)


def test_a_limit_that_is_missed_names_the_plan_that_needs_least():
    with pytest.raises(ScheduleNotFoundError) as caught:
        plan_for(asked_for(0.97 * 0.7, NeedsALittleMore()))
    assert caught.value.least_over_limit.peak_bytes == int(0.7 * store_all_peak(64))


def test_over_the_limit_the_search_and_a_quick_solver_are_asked_for_what_needs_least(monkeypatch):
    """The search has more time; where the allocator decides, a quick solver may be luckier."""
    tight, loose = (candidate(share) for share in (0.6, 1.0))
    failure = ScheduleNotFoundError(1, 0, least_over_limit=tight)
    backend = FakeBackend()
    backend.memory.order_matters = True
    asked = asked_for(0.7, backend, failure=failure)
    for other in (loose, tight):
        monkeypatch.setattr(door, "least_over_budget", lambda *_, other=other, **__: other)
        assert plan_for(asked).solution == tight.solution
        failure.least_over_limit = loose

    def none(*arguments, **options):
        raise ScheduleNotFoundError(1, 0)

    monkeypatch.setattr(door, "least_over_budget", none)
    assert plan_for(asked).solution == loose.solution
    failure.least_over_limit = None
    with pytest.raises(ScheduleNotFoundError):
        plan_for(asked)


def test_the_floor_says_what_would_lower_it():
    limit = Limit(PROBLEM.floor_bytes // 2)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_for(asked_for(1.0, limit=limit))
    name = PROBLEM.graph.ops[PROBLEM.floor_op].name
    assert str(caught.value).endswith(f" Give {name} less.")


def quick(share, roomy_share=None):
    """A quick plan under a share of the plain peak, and one that should need less."""
    asked = asked_for(share, is_quick=True)
    roomy = roomy_share and int(roomy_share * store_all_peak(64))
    return plan_for(
        replace(asked, headroom_bytes=(roomy and asked.limit.usable_bytes - roomy) or 0)
    )


def candidate(share):
    """What a quick solver finds under a share of the plain peak."""
    memory, budget = FakeBackend().memory, int(share * store_all_peak(64))
    return within_budget(PROBLEM, budget, memory, solver="greedy_first")


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
    ran, other = (candidate(share) for share in (0.6, 1.0))
    backend = FakeBackend()
    backend.memory.order_matters = order_matters

    def none(*arguments, **options):
        raise ScheduleNotFoundError(1, 0, least_over_limit=ran if order_matters else other)

    monkeypatch.setattr(door, "within_budget", none)
    monkeypatch.setattr(door, "least_over_budget", lambda *_, **__: other)
    asked = asked_for(0.7, backend, below_bytes=ran.peak_bytes)
    after = replace(asked, avoid=frozenset([ran.schedule]))
    with pytest.raises(ScheduleNotFoundError):
        plan_for(asked)
    if not order_matters:
        with pytest.raises(ScheduleNotFoundError):
            plan_for(after)
        return
    assert plan_for(after).solution == other.solution
    with pytest.raises(ScheduleNotFoundError):
        plan_for(replace(after, avoid=after.avoid | {other.schedule}))


@pytest.mark.parametrize("order_matters", [True, False])
def test_an_order_that_measured_over_the_limit_is_not_asked_for_again(order_matters, monkeypatch):
    """Whatever is predicted, and by whomever: it was measured."""
    ran, backend = candidate(0.6), FakeBackend()
    backend.memory.order_matters = order_matters
    failure = ScheduleNotFoundError(1, 0, least_over_limit=ran)
    monkeypatch.setattr(door, "least_over_budget", lambda *_, **__: ran)
    asked = asked_for(0.7, backend, failure=failure, below_bytes=2 * ran.peak_bytes)
    assert plan_for(asked).solution == ran.solution
    with pytest.raises(ScheduleNotFoundError):
        plan_for(replace(asked, avoid=frozenset([ran.schedule])))


def test_headroom_is_given_up_in_earnest_too_where_no_schedule_leaves_it():
    asked = asked_for(1.0)
    least = asked.limit.usable_bytes - PROBLEM.floor_bytes // 2
    plan = plan_for(replace(asked, headroom_bytes=least))
    assert PROBLEM.floor_bytes < plan.predicted.peak_bytes <= asked.limit.usable_bytes
    roomy = plan_for(replace(asked, headroom_bytes=asked.limit.usable_bytes // 10))
    assert roomy.predicted.peak_bytes <= 0.9 * asked.limit.usable_bytes
    usable = asked.limit.usable_bytes
    assert (plan.budget_bytes, roomy.budget_bytes) == (usable, usable - usable // 10)


def test_a_plan_that_processes_share_is_the_first_ones():
    shared = quick(1.0)

    class Second(Processes):
        def of_first(self, make):
            return shared

    assert plan_for(asked_for(0.5, where=Second())) is shared


def test_a_fit_is_not_planned_for_more_than_the_device_has():
    backend = FakeBackend()
    with pytest.warns(UserWarning, match="is taken"):
        limit = limit_of(backend, FitOptions(2 * backend.memory_bytes))
    assert limit.total_bytes == backend.memory_bytes
    assert limit_of(backend, FitOptions()) == limit


class NeverFits(FakeBackend):
    """Its allocator needs more than any limit, whatever runs."""

    auto_solver = "auto"

    def __init__(self):
        super().__init__(allocator_bytes=lambda problem, schedule: store_all_peak(64))


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_refusal_takes_a_bounded_number_of_solves_where_no_time_is_left(monkeypatch, is_quick):
    """The quick solver makes all its corrections, the slow one a few; none is asked twice."""
    asked, real = [], budget_search.solve

    def solve(problem, *, solver, **options):
        asked.append((solver, problem.budget_bytes))
        return real(problem, solver="greedy_first", **options)

    monkeypatch.setattr(budget_search, "solve", solve)
    request = asked_for(0.8, NeverFits(), is_quick=is_quick, clock_s=0.0, headroom_bytes=1000)
    with pytest.raises(ScheduleNotFoundError):
        plan_for(request)
    corrections = budget_search.OPTIONS
    budgets, slow = len(request.budgets_bytes), [at for at in asked if at[0] == "auto"]
    assert len(slow) <= corrections.sure_corrections * (1 if is_quick else budgets)
    assert 0 < len(asked) - len(slow) <= corrections.corrections * budgets
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(("clock_s", "left_s"), [(10.0, [10.0, 6.0, 2.0]), (8.0, [8.0, 4.0])])
def test_the_time_that_is_left_is_shared_by_all_tries(monkeypatch, clock_s, left_s):
    """What was tried is not tried again once there is none."""
    given, clock = [], {"s": 0.0}

    def within(*arguments, clock_s, **options):
        given.append(clock_s)
        clock["s"] += 4.0
        raise ScheduleNotFoundError(1, 0)

    monkeypatch.setattr("keras_remat.core.deadline.time.perf_counter", lambda: clock["s"])
    monkeypatch.setattr(door, "within_budget", within)
    with pytest.raises(ScheduleNotFoundError):
        plan_for(asked_for(0.8, is_quick=True, clock_s=clock_s))
    assert given == left_s


def test_headroom_that_leaves_nothing_above_the_floor_is_given_up_at_once():
    usable, floor = int(0.8 * store_all_peak(64)), PROBLEM.floor_bytes
    for left_bytes, count in ((0, 1), (1000, 1), (20_000, 2)):
        asked = asked_for(0.8, headroom_bytes=usable - floor - left_bytes)
        assert len(asked.budgets_bytes) == count
    assert asked_for(0.8).budgets_bytes == (usable,)
