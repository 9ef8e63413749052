import jax_models as models
import pytest

from keras_remat.backends.jax.fit_budget import compile_within
from keras_remat.backends.jax.lower import lower_plain
from keras_remat.backends.jax.measure import memory
from keras_remat.backends.jax.profile import profile
from keras_remat.backends.jax.trace import trace
from keras_remat.errors import InfeasibleBudgetError, PeakExceededError, ScheduleNotFoundError
from keras_remat.problem import Problem
from keras_remat.schedule import Schedule, Solution
from keras_remat.simulate import simulate


@pytest.fixture(scope="module")
def setting():
    model = models.mixer(blocks=4, dropout=0)
    traced = trace(model, models.batch(model, 64))
    return traced, profile(traced)


def solve(problem):
    """Store all if it fits, else forget all but the sums between blocks."""
    graph = problem.graph
    sums = {op.id for op in graph.ops if op.phase == "forward" and op.name.startswith("jvp(add")}
    for schedule in (Schedule.store_all(graph), models.forget(graph, sums)):
        usage = simulate(problem, schedule)
        if usage.peak_bytes <= problem.budget_bytes:
            return Solution(schedule, "test", "feasible", 0.0, usage=usage)
    raise ScheduleNotFoundError(problem.budget_bytes, problem.floor_bytes, usage.peak_bytes)


def test_the_measured_peak_is_within_the_budget(setting):
    traced, costs = setting
    plain = memory(lower_plain(traced))
    budget = plain.peak_bytes - plain.temp_bytes * 35 // 100
    plan = compile_within(traced, costs, budget, solve)
    assert plan.memory.peak_bytes <= budget
    assert plan.attempts[-1].measured_bytes == plan.memory.peak_bytes
    assert plan.solution.schedule.recomputed


def test_over_the_budget_is_planned_again_for_less(setting):
    """A start that trusts the model too much: the first compilation needs more than it said."""
    traced, costs = setting
    generous = simulate_store_all(traced, costs)
    asked = []

    def recorded(problem):
        asked.append(problem.budget_bytes)
        return solve(problem)

    plan = compile_within(traced, costs, generous, recorded, first_ratio=0.5)
    assert asked[0] > generous
    assert len(plan.attempts) == 2
    assert asked == sorted(asked, reverse=True)
    assert plan.attempts[0].measured_bytes > generous >= plan.attempts[1].measured_bytes


def simulate_store_all(traced, costs):
    return simulate(Problem(traced.graph, costs), Schedule.store_all(traced.graph)).peak_bytes * 9 // 10


def test_below_the_floor_nothing_is_compiled(setting):
    traced, costs = setting
    with pytest.raises(InfeasibleBudgetError):
        compile_within(traced, costs, costs.resident_bytes, solve)


def test_not_reached_within_the_tries(setting):
    traced, costs = setting
    budget = simulate_store_all(traced, costs)

    def stubborn(problem):
        schedule = Schedule.store_all(problem.graph)
        return Solution(schedule, "test", "feasible", 0.0, usage=simulate(problem, schedule))

    with pytest.raises(PeakExceededError) as caught:
        compile_within(traced, costs, budget, stubborn, tries=1)
    assert caught.value.peak_bytes > budget == caught.value.budget_bytes
