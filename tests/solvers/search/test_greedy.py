"""The greedy solver: legal and within the budget on everything, and what its lookahead is for."""

from __future__ import annotations

import pytest
from graph_builder import Builder
from random_problems import chain_problem, mixed_problem, normalized_in_slices, seeds

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import SOLVERS
from keras_remat.solvers.search import eviction, greedy
from keras_remat.solvers.search.eviction import Eviction


@pytest.mark.parametrize("seed", seeds(300, 90))
def test_every_candidate_is_valid(seed: int) -> None:
    problem = mixed_problem(seed)
    for order in greedy.candidates(problem, deadline=Deadline(float("inf"))):
        validate(problem, Schedule(order))


def test_running_example_recomputes_a() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=7)
    assert SOLVERS["greedy"](problem).schedule.order == (0, 1, 2, 3, 0, 4)


def test_stuck_is_not_found() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes=6)
    with pytest.raises(ScheduleNotFoundError) as caught:
        SOLVERS["greedy"](problem)
    assert caught.value.budget_bytes == 6


def test_candidates_get_faster() -> None:
    problem = chain_problem(40)
    problem = problem.with_budget(20)
    times = [
        simulate(problem, Schedule(order)).time_s
        for order in greedy.candidates(problem, deadline=Deadline(float("inf")))
    ]
    assert times
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_first_finds_a_schedule_exactly_where_all_of_them_do(seed: int) -> None:
    problem = mixed_problem(seed)
    try:
        fastest = SOLVERS["greedy"](problem)
    except ScheduleNotFoundError:
        with pytest.raises(ScheduleNotFoundError):
            SOLVERS["greedy_first"](problem, seed=seed)
        return
    first = SOLVERS["greedy_first"](problem, seed=seed)
    validate(problem, first.schedule)
    assert first.usage is not None
    assert fastest.usage is not None
    assert first.usage.time_s >= fastest.usage.time_s


def test_first_begins_with_another_policy_by_seed() -> None:
    problem = mixed_problem(31, "training").with_budget(None)
    problem = problem.with_budget(
        (problem.floor_bytes + simulate(problem, Schedule.store_all(problem.graph)).peak_bytes) // 2
    )
    found = {
        SOLVERS["greedy_first"](problem, seed=seed).schedule for seed in range(len(greedy.POLICIES))
    }
    assert len(found) > 1


def test_an_input_goes_where_its_buffer_is_taken_over() -> None:
    """b takes the buffer of a over, which is computed again for e: without that, a and b are alive
    at once beside x."""
    builder = Builder()
    x = builder.add("x", 10, (), recomputable=False)
    a = builder.add("a", 10, (x,))
    b = builder.add("b", 10, (a,), may_reuse=(a,))
    c = builder.add("c", 1, (b,))
    e = builder.add("e", 1, (a, c))
    problem = builder.problem((x, e), 22)
    assert SOLVERS["greedy"](problem).schedule.order == (x, a, b, c, a, e)


def test_small_values_stay_for_recomputations() -> None:
    """The mean is gone when it was read last, but what was spread out from it can only be computed
    again while it is there."""
    builder = Builder()
    x = builder.add("x", 1000, (), recomputable=False)
    mean = builder.add("mean", 1, (x,))
    spread = builder.add("spread", 1000, (mean,))
    first = builder.add("first", 1, (spread,))
    other = builder.add("other", 1500, (first,))
    second = builder.add("second", 1, (other,))
    result = builder.add("result", 1, (spread, second))
    problem = builder.problem((result,), 2100)
    assert SOLVERS["greedy"](problem).schedule.order == (
        x,
        mean,
        spread,
        first,
        other,
        second,
        spread,
        result,
    )


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_normalized_batch_in_slices_is_scheduled_below_the_floor_of_whole_ops(
    share: float,
) -> None:
    """Every round over the batch computes parts again from far behind: a pass takes many steps."""
    problem, floor = normalized_in_slices(layers=8, parts=8)
    problem = problem.with_budget(int(share * floor))
    found = next(
        greedy.candidates(
            problem, deadline=Deadline(float("inf")), max_steps=greedy.steps_limit(1.0)
        )
    )
    validate(problem, Schedule(found))


def test_in_slices_the_order_that_goes_slice_by_slice_comes_first_and_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near the floor no other order has a schedule, and one takes long to find. A look ends before
    that."""
    problem, floor = normalized_in_slices(layers=2, parts=2)
    problem = problem.with_budget(floor)
    default = Schedule.store_all(problem.graph).order
    orders = default[1:] + default[:1], default
    tried = []

    class Stuck:
        steps = 0

        def __init__(self, _problem: object, order: object, policy: object, *_: object):
            self.way = order == default, policy

        def run(self, limit: int) -> None:
            tried.append((*self.way, limit / len(default)))
            raise greedy.StuckError

    monkeypatch.setattr(greedy, "Eviction", Stuck)
    monkeypatch.setattr(greedy, "base_orders", lambda problem: orders)
    assert greedy.look(problem, 1.0) is None
    options, policies = greedy.OPTIONS, greedy.SLICED_POLICIES
    assert tried == [
        (is_default, policy, options.sliced_patience)
        for is_default in (True, False)
        for policy in policies
    ]
    looked, tried = tried, []
    asked = greedy.candidates(problem, deadline=Deadline(float("inf")), max_steps=10**6)
    assert list(asked) == []
    last = True, policies[0], options.sliced_last_patience
    assert tried[: len(looked) + 1] == [*looked, last]


def test_a_look_finds_no_schedule_that_is_slower_than_it_may_be() -> None:
    problem, floor = normalized_in_slices(layers=8, parts=8)
    problem = problem.with_budget(int(0.9 * floor))
    found = greedy.look(problem, float("inf"))
    assert found is not None
    validate(problem, Schedule(found))
    seconds = simulate(problem, Schedule(found)).time_s
    faster = greedy.look(problem, seconds)
    assert faster is None or simulate(problem, Schedule(faster)).time_s < seconds
    assert greedy.look(problem, problem.store_all_time_s) is None


def test_of_sums_over_parts_of_the_batch_only_the_last_one_stays() -> None:
    """Sums over all parts are small, and to compute one again takes a round over the batch."""
    problem, floor = normalized_in_slices(layers=12, parts=8, nbytes=4096)
    graph, budget = problem.graph, int(0.8 * floor)
    small = {value.id for value in graph.values if value.nbytes == 1}
    whole = {v for v in small if any(child not in small for child in graph.children[v])}
    assert len(whole) == 2 * 12 < eviction.KEPT_SHARE * budget < len(small)
    default = Schedule.store_all(graph).order
    kept = Eviction(
        problem.with_budget(budget), default, greedy.SLICED_POLICIES[0], NO_DEADLINE, float("inf")
    ).kept
    assert {v for v, is_kept in enumerate(kept) if is_kept} == whole


def test_a_pass_near_the_floor_takes_few_looks_at_what_an_eviction_costs() -> None:
    """Of most values it is soon known that another one costs less."""
    problem, floor = normalized_in_slices(layers=12, parts=8)
    problem = problem.with_budget(int(0.8 * floor))
    default = Schedule.store_all(problem.graph).order
    policy = greedy.SLICED_POLICIES[0]
    order = Eviction(problem, default, policy, NO_DEADLINE, float("inf")).run(30 * len(default))
    validate(problem, Schedule(order))


@pytest.mark.parametrize("seed", range(30))
def test_short_looks_at_what_an_eviction_costs_decide_as_long_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = mixed_problem(seed)
    found = list(greedy.candidates(problem, deadline=NO_DEADLINE))
    monkeypatch.setattr(eviction, "LOOKED_AT_AGAIN", 1000)
    assert list(greedy.candidates(problem, deadline=NO_DEADLINE)) == found
