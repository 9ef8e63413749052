"""What the quick solver found is not looked for again, and what it may find with more work is."""

import gc
import weakref
from dataclasses import replace

import pytest
from fake_backend import FakeBackend, chain_problem, store_all_peak

from keras_remat.core.slices import SliceRule, Slicing, sliced_graph
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.planning import budget_search
from keras_remat.planning.budget_search import BudgetSearch
from keras_remat.planning.quick_orders import QUICK, quick_orders
from keras_remat.planning.slice_costs import sliced_costs

PROBLEM = chain_problem(64)
BUDGET = int(0.7 * store_all_peak(64))


@pytest.fixture
def asked(monkeypatch):
    """The targets that a solver is really asked for."""
    targets, real = [], budget_search.solve

    def solve(problem, **options):
        targets.append(problem.budget_bytes)
        return real(problem, **options)

    monkeypatch.setattr(budget_search, "solve", solve)
    return targets


def found(memory, target=BUDGET, problem=PROBLEM, solver=QUICK, seed=0, seconds=0.5):
    search = BudgetSearch(problem, target, memory, solver, seed)
    return [one.schedule for one in search.solve_at(target, seconds)]


def test_an_answer_is_remembered_whatever_the_seconds_are(asked):
    memory = FakeBackend().memory
    first = found(memory)
    for seconds in (1e-6, 0.7, 30.0):
        assert found(memory, seconds=seconds) == first
    assert asked == [BUDGET]


def test_another_question_is_asked(asked):
    memory = FakeBackend().memory
    found(memory)
    found(memory, target=BUDGET + 1)
    found(memory, seed=1)
    found(memory, problem=chain_problem(64))  # equal, and yet its costs may be measured anew
    found(FakeBackend().memory)
    assert len(asked) == 5


def test_a_budget_makes_no_other_question(asked):
    memory = FakeBackend().memory
    assert found(memory) == found(memory, problem=PROBLEM.with_budget(BUDGET))
    assert asked == [BUDGET]


@pytest.mark.parametrize("solver", ["greedy", "auto"])
def test_what_follows_from_the_seconds_is_not_remembered(asked, solver):
    memory = FakeBackend().memory
    for _ in range(2):
        found(memory, solver=solver)
    assert len(asked) == 2


def test_where_nothing_was_found_more_work_is_another_question(monkeypatch):
    asked, memory = [], FakeBackend().memory

    def solve(problem, *, time_limit_s, **options):
        asked.append(time_limit_s)
        raise ScheduleNotFoundError(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr(budget_search, "solve", solve)
    for seconds in (2.0, 1.0, 2.4, 3.0, 1e-6):
        with pytest.raises(ScheduleNotFoundError):
            found(memory, seconds=seconds)
    assert asked == [2.0, 3.0]


def test_a_graph_in_slices_is_not_solved_twice_with_the_same_work(monkeypatch):
    """Whatever the seconds, its first schedule gets ``sliced_first_passes`` steps per op."""
    asked, memory = [], FakeBackend().memory
    whole = chain_problem(64, layers=40)
    rules = {1: SliceRule(frozenset(whole.graph.ops[1].inputs))}
    graph = sliced_graph(whole.graph, rules, Slicing((1,), 2))
    sliced = sliced_costs(whole, graph, [0] * len(graph.graph.ops))

    def solve(problem, *, time_limit_s, **options):
        asked.append(time_limit_s)
        raise ScheduleNotFoundError(problem.budget_bytes, problem.floor_bytes)

    monkeypatch.setattr(budget_search, "solve", solve)
    for seconds in (0.1, 0.2, 10.0):
        with pytest.raises(ScheduleNotFoundError):
            found(memory, problem=sliced, seconds=seconds)
    assert asked == [0.1, 10.0]


def test_few_answers_are_kept_and_none_longer_than_the_fit(monkeypatch):
    monkeypatch.setattr("keras_remat.planning.quick_orders._MOST", 2)
    memory, problem = FakeBackend().memory, replace(chain_problem(8), name="one")
    at = [problem.with_budget(n) for n in (1, 2, 3)]
    for one in at:
        quick_orders(memory).keep(one, 0, 1.0, [])
    assert [quick_orders(memory).of(one, 0, 1.0) for one in at] == [None, [], []]
    seen = weakref.ref(quick_orders(memory))
    del memory
    gc.collect()
    assert seen() is None
