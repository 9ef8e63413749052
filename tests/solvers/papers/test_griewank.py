"""Revolve on uniform chains: its counts are Griewank & Walther's, and they are optimal."""

from functools import cache

import pytest

from keras_remat.core.graph import Graph, Op, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules
from keras_remat.errors import ScheduleNotFoundError
from keras_remat.solvers import solve
from keras_remat.solvers.orders.linearize import Linearized
from keras_remat.solvers.papers.griewank import binomial_split, revolve_order
from tests.random_problems import SHAPES, chain_problem, mixed_problem
from tests.solvers.counted_clock import CountedClock


@cache
def least_runs(length: int, slots: int) -> int:
    """Forward runs to reverse ``length`` ops, by the recursion of the paper's proof."""
    if length <= 1:
        return 0
    if slots == 0:
        return length * (length - 1) // 2
    return min(
        m + least_runs(length - m, slots - 1) + least_runs(m, slots) for m in range(1, length)
    )


def revolve_chain(n: int) -> Problem:
    """``n`` forward ops; the backward op of each reads only what its forward op computed, so
    reversing needs exactly that value."""
    ops = [Op(i, f"f{i}", "", (i - 1,) if i else (), (i,), "forward") for i in range(n)]
    for i in range(n):
        ops.append(
            Op(
                n + i,
                f"b{n - 1 - i}",
                "",
                (n - 1 - i, n + i - 1) if i else (n - 1,),
                (n + i,),
                "backward",
            )
        )
    values = tuple(Value(i, "", 1, producer=i) for i in range(2 * n))
    return Problem(
        Graph(tuple(ops), values, (2 * n - 1,)), Profile((1.0,) * n + (0.0,) * n, (0,) * 2 * n, 0)
    )


@pytest.mark.parametrize("slots", range(5))
def test_griewank_walther_2000_split(slots: int) -> None:
    for length in range(1, 45):
        best = least_runs(length, slots)
        if length > 1 and slots:
            m = binomial_split(length, slots)
            assert m + least_runs(length - m, slots - 1) + least_runs(m, slots) == best


@pytest.mark.parametrize("n", [2, 5, 10, 21, 35])
def test_griewank_walther_2000_order_makes_that_many_runs(n: int) -> None:
    """The n values and the start are n + 1 states to reverse; the last two values are at hand after
    the first pass, which may save some."""
    linear = Linearized(revolve_chain(n))
    for slots in range(1, 6):
        order = Schedule(tuple(revolve_order(linear, slots)))
        check_rules(linear.problem, order)
        usage = simulate(linear.problem, order)
        assert least_runs(n, slots) <= usage.time_s <= least_runs(n + 1, slots)
        assert usage.peak_bytes <= slots + 4


def test_memory_grows_with_the_logarithm() -> None:
    for n in (16, 64, 256):
        slots = n.bit_length()
        linear = Linearized(chain_problem(n))
        usage = simulate(linear.problem, Schedule(tuple(revolve_order(linear, slots))))
        assert usage.peak_bytes <= slots + 5
        assert usage.time_s <= n * (2 + slots)


def test_meets_budgets_segments_cannot() -> None:
    problem = chain_problem(100).with_budget(11)
    solution = solve(problem, solver="griewank")
    assert solution.usage is not None
    assert solution.usage.time_s <= 6 * 100


def test_the_clock_is_read_within_an_order() -> None:
    clock = CountedClock(allowed=50)
    with pytest.raises(TimeoutError):
        revolve_order(Linearized(chain_problem(50)), 3, clock)
    assert clock.reads == 51
    with pytest.raises(ScheduleNotFoundError):
        solve(chain_problem(50).with_budget(12), solver="griewank", time_limit_s=1e-6)


def test_every_number_of_slots_is_legal_on_any_graph() -> None:
    for seed in range(100):
        problem = mixed_problem(seed, sorted(SHAPES)[seed % len(SHAPES)], budget=False)
        for slots in (0, 1, 2, 4):
            check_rules(problem, Schedule(tuple(revolve_order(Linearized(problem), slots))))
