"""The reference itself: on the running example, and against the simulator."""

import random

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.validate import validate
from tests.random_problems import mixed_problem, two_branches
from tests.solvers.brute_force import fastest


def test_running_example() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)
    assert fastest(problem) == (6.0, [0, 1, 2, 3, 0, 4])
    assert fastest(problem, stages=True) == (6.0, [0, 1, 2, 3, 0, 4])
    assert fastest(problem.with_budget(6)) is None


def test_its_orders_are_legal_and_fit() -> None:
    found = 0
    for seed in range(150):
        problem = mixed_problem(seed, "random")
        if len(problem.graph.values) > 9:
            continue
        for stages in (False, True):
            best = fastest(problem, stages=stages)
            if best is not None:
                found += 1
                validate(problem, Schedule(tuple(best[1])))
    assert found > 30


def test_any_order_never_loses_to_the_default_order() -> None:
    found = 0
    for seed in range(60):
        problem = mixed_problem(seed, "random")
        if len(problem.graph.values) > 7:
            continue
        default, free = fastest(problem), fastest(problem, any_order=True)
        if free is not None:
            found += 1
            validate(problem, Schedule(tuple(free[1])))
        assert default is None or (free is not None and free[0] <= default[0])
    assert found > 10


def test_any_order_runs_one_branch_after_the_other() -> None:
    problem = two_branches()
    assert fastest(problem) is None
    best = fastest(problem, any_order=True)
    assert best is not None
    assert best[0] == 5.0
    validate(problem, Schedule(tuple(best[1])))


def test_stages_never_beat_free_orders() -> None:
    rng = random.Random(0)
    for _ in range(40):
        problem = mixed_problem(rng.randrange(10**6), "random")
        if len(problem.graph.values) <= 9:
            free, staged = fastest(problem), fastest(problem, stages=True)
            assert staged is None or (free is not None and free[0] <= staged[0])
