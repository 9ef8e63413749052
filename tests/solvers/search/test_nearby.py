"""From a known schedule to one within a budget that it is over."""

from dataclasses import replace

from fake_backend import chain_problem

from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.solvers import solve
from keras_remat.solvers.search import nearby

SIZE = 50


def known(share):
    """A schedule for ``share`` of what store-all takes."""
    problem = chain_problem(SIZE)
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    return problem.with_budget(int(share * peak)), solve(
        problem.with_budget(int(share * peak)), solver="greedy"
    ).schedule


def test_a_known_order_becomes_one_within_a_smaller_budget():
    problem, start = known(0.8)
    smaller = problem.with_budget(int(0.85 * problem.budget_bytes))
    assert simulate(problem, start).peak_bytes > smaller.budget_bytes
    found = list(nearby.schedules(smaller, start, time_limit_s=2.0))
    assert found
    for schedule in found:
        validate(smaller, schedule)
    times = [simulate(smaller, schedule).time_s for schedule in found]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_a_known_order_for_a_larger_batch():
    """The same ops, all values larger: what the known order is over the budget by is computed
    again."""
    problem, start = known(0.8)
    larger = chain_problem(SIZE + SIZE // 10).with_budget(problem.budget_bytes)
    found = next(nearby.schedules(larger, start, time_limit_s=5.0))
    validate(larger, found)
    assert sum(found.recomputed.values()) >= sum(start.recomputed.values())


def test_what_no_schedule_reaches_is_not_found():
    problem, start = known(0.8)
    assert not list(
        nearby.schedules(problem.with_budget(problem.floor_bytes - 1), start, time_limit_s=0.2)
    )


def test_where_all_values_are_small_there_is_nothing_to_search():
    problem, start = known(0.8)
    budget = problem.budget_bytes * 10**4
    assert not list(nearby.schedules(problem.with_budget(budget), start, time_limit_s=2.0))


def test_excess_costs_the_same_whatever_is_resident():
    """It was a share of the budget: where weights fill it, too much was hardly a fault."""
    problem, start = known(0.8)
    weights = 1000 * problem.budget_bytes
    smaller = problem.with_budget(int(0.85 * problem.budget_bytes))
    costs = replace(smaller.profile, resident_bytes=smaller.profile.resident_bytes + weights)
    heavier = replace(smaller, profile=costs, budget_bytes=smaller.budget_bytes + weights)
    assert next(nearby.schedules(heavier, start, time_limit_s=1.0))
