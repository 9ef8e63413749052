"""Taking recomputations back: legal, within the budget, never slower."""

import random

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.trim import trimmed
from tests.random_problems import mixed_problem


def test_running_example() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    again = (0, 1, 2, 3, 0, 4)
    assert trimmed(problem.with_budget(11), again) == (0, 1, 2, 3, 4)
    assert trimmed(problem.with_budget(10), again) == again
    assert trimmed(problem.with_budget(5), again) == again
    assert trimmed(problem.with_budget(5), []) == ()


def test_random_orders_stay_legal_and_fit() -> None:
    shorter = 0
    for seed in range(200):
        problem = mixed_problem(seed, budget=False)
        rng = random.Random(seed)

        def policy(walk: Walk, seed: int = seed, problem: Problem = problem) -> None:
            rng = random.Random(seed)
            for op_id in Schedule.store_all(problem.graph).order:
                walk.demand(op_id)
                walk.drop([v for v in sorted(walk.alive) if rng.random() < 0.3])

        order = order_of(problem, policy)
        before = simulate(problem, Schedule(tuple(order)))
        problem = problem.with_budget(max(1, before.peak_bytes + rng.randint(0, 10)))
        after = trimmed(problem, order)
        validate(problem, Schedule(after))
        shorter += len(after) < len(order)
    assert shorter > 50
