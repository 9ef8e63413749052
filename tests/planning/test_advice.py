"""The advice where no plan is found: a limit that a plan was found for."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from fake_backend import FakeBackend, chain_problem, quick_plan, store_all_peak
from random_models import advised
from random_problems import mixed_problem

from keras_remat.core.graph import UPDATE
from keras_remat.core.limit import Limit
from keras_remat.core.schedule import Schedule
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.planning import advice
from keras_remat.planning.advice import advising, tried_budget

PROBLEM = chain_problem(8)


def refusal(error, problem=PROBLEM, batch_size=8, margin=0.05, backend=None):
    """Returns what is raised for an error under a limit of which its budget is left."""
    limit = Limit(round(error.budget_bytes / (1 - margin)), margin)
    backend = backend or FakeBackend()
    with pytest.raises(type(error)) as caught, advising(problem, limit, batch_size, backend):
        raise error
    return caught.value


def test_a_limit_that_is_advised_has_a_plan():
    budget = PROBLEM.floor_bytes - 1
    message = str(refusal(InfeasibleBudgetError(budget, PROBLEM.floor_bytes, "conv")))
    limit = Limit(advised(message), 0.05)
    assert quick_plan(PROBLEM, limit.usable_bytes, solver="greedy_first")
    assert limit.total_bytes < store_all_peak(8) * 9 / 8
    assert re.search(r"or perhaps a batch of [1-7] instead of 8\. Give op\d+ less\.$", message)
    not_found = str(refusal(ScheduleNotFoundError(budget, 150, budget + 1, solver="dtr")))
    assert not_found.startswith("dtr: ")
    assert not_found.endswith("More solver time may do, too.")
    assert advised(not_found)


def test_a_limit_is_advised_where_none_was_known_to_do():
    """A search has proved that the budget is too little, and not how much is enough."""
    budget = PROBLEM.floor_bytes
    proved = InfeasibleBudgetError(budget, budget + 1, by_search=True)
    for error in (proved, ScheduleNotFoundError(budget, budget)):
        assert advised(str(refusal(error))) > budget


def test_where_what_is_in_use_before_a_step_takes_more_it_is_named():
    """Not all of it need be the model's: TensorFlow holds what was trained before, and is gone."""
    full = replace(PROBLEM, profile=replace(PROBLEM.profile, resident_bytes=200_000))
    message = str(refusal(InfeasibleBudgetError(190_000, full.floor_bytes), full))
    assert "are in use: by weights, slots and data, and by what else this process" in message
    assert advised(message) > full.floor_bytes


def test_a_smaller_batch_is_smaller_than_what_was_asked_for():
    """The need is just above the budget: the same batch again would do nothing."""
    error = InfeasibleBudgetError(PROBLEM.floor_bytes - 1, PROBLEM.floor_bytes, "conv")
    assert "a batch of 7 instead of 8" in str(refusal(error))
    assert "batch of" not in str(refusal(error, batch_size=1))


def test_no_smaller_batch_is_advised_where_an_update_needs_too_much():
    ops, at = PROBLEM.graph.ops, PROBLEM.floor_op
    update = replace(ops[at], phase=UPDATE)
    graph = replace(PROBLEM.graph, ops=(*ops[:at], update, *ops[at + 1 :]))
    error = InfeasibleBudgetError(PROBLEM.floor_bytes - 1, PROBLEM.floor_bytes, update.name)
    message = str(refusal(error, replace(PROBLEM, graph=graph)))
    assert "batch of" not in message
    assert advised(message)


def test_nothing_is_tried_before_the_message_is_asked_for(monkeypatch):
    tried = []
    monkeypatch.setattr(advice, "tried_budget", lambda *arguments: tried.append(arguments))
    error = refusal(InfeasibleBudgetError(5, 7))
    assert not tried
    assert "Raise the memory limit to at least" in str(error)
    assert len(tried) == 1


def test_where_no_budget_has_a_plan_none_is_advised(monkeypatch):
    def none(*arguments, **options):
        raise ScheduleNotFoundError(1, 1)

    monkeypatch.setattr(advice, "within_budget", none)
    assert tried_budget(PROBLEM, PROBLEM.floor_bytes, FakeBackend().memory) is None


@pytest.fixture
def tried(monkeypatch):
    """The budgets that were tried, in order."""
    budgets, quick = [], advice.within_budget

    def within_budget(problem, budget_bytes, *arguments, **options):
        budgets.append(budget_bytes)
        return quick(problem, budget_bytes, *arguments, **options)

    monkeypatch.setattr(advice, "within_budget", within_budget)
    return budgets


def test_no_limit_is_tried_again_where_the_tightest_has_no_plan(tried):
    """Each is planned for with some left free and with all."""
    assert tried_budget(PROBLEM, PROBLEM.floor_bytes, FakeBackend().memory) > PROBLEM.floor_bytes
    assert PROBLEM.floor_bytes in tried
    assert max(Counter(tried).values()) <= 2


def test_once_the_time_is_over_the_largest_limit_alone_is_tried(monkeypatch, tried):
    problem = mixed_problem(0, budget=False)
    monkeypatch.setattr(advice, "_OPTIONS", replace(advice._OPTIONS, most_s=0.0))
    memory = FakeBackend().memory
    plain = memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    enough = tried_budget(problem, problem.floor_bytes, memory)
    assert set(tried) == {enough}
    assert enough >= plain


def test_limits_with_room_are_tried_first_and_the_least_that_did_is_advised(monkeypatch, tried):
    """To find that the tightest limit has no plan may take all of the time."""
    problem = chain_problem(24)

    class AfterThree(advice.Deadline):
        is_over = property(lambda self: len(set(tried)) >= 3)

    monkeypatch.setattr(advice, "Deadline", AfterThree)
    memory = FakeBackend().memory
    plain = memory.peak_bytes(problem, Schedule.store_all(problem.graph))
    enough = tried_budget(problem, problem.floor_bytes, memory)
    assert tried == sorted(tried, reverse=True)
    assert enough == tried[-1] < (problem.floor_bytes + plain) / 2


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 40))]
)
def test_what_is_advised_for_random_problems_is_found_and_no_more_than_plain(seed):
    problem = mixed_problem(seed, budget=False)
    backend = FakeBackend()
    enough = tried_budget(problem, problem.floor_bytes, backend.memory)
    plan = quick_plan(problem, enough, backend, solver="greedy_first")
    assert plan.predicted.peak_bytes <= enough
    most = max(plan.store_all.peak_bytes * 9 // 8, problem.floor_bytes * 5 // 4)
    assert problem.floor_bytes <= enough <= most


def test_where_a_compiler_needs_more_than_is_predicted_what_it_needs_is_advised():
    memory = FakeBackend().memory
    memory.compiled_peak_bytes = lambda problem, schedule: int(1.4 * store_all_peak(8))
    enough = tried_budget(PROBLEM, PROBLEM.floor_bytes, memory)
    assert enough >= 1.4 * store_all_peak(8)
