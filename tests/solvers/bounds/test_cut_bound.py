"""The bound of one cut: never above the optimum of any order, equal to it in known cases, and what
takes room at a cut."""

from __future__ import annotations

import random

import pytest
from graph_builder import Builder
from random_problems import chain_problem

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.solvers.bounds import cut_bound, window_bound
from keras_remat.solvers.bounds.cut_bound import crossing_bytes, promising_cuts
from tests.solvers.bounds.cases import (
    least_seconds,
    overwritten_output,
    small_problem,
    two_readers,
)
from tests.solvers.brute_force import fastest

A, B, C, D, E = range(5)
#: The bound is the solver's answer less its tolerance.
NEARLY = 1 - 2 * window_bound.SAFETY


def example(budget_bytes: int, times: tuple[float, ...] = (1.0,) * 5) -> Problem:
    """The running example: a → b → c → d, and e reads a and d; bytes 4 1 6 1 2."""
    return Problem(chain_example(), Profile(times, (0,) * 5, 0), budget_bytes)


def bound(problem: Problem) -> float:
    return cut_bound.lower_bound_s(problem, deadline=Deadline(float("inf")))


def enforced_s(problem: Problem, cut: int) -> float:
    """Seconds of recomputation that a cut enforces, to four digits."""
    bound_s = window_bound.lower_bound_s(problem, [cut], limit_s=10.0, relax=True)
    return round(bound_s - problem.store_all_time_s, 4)


# ------------------------------------------------------------------ against exhaustive search


@pytest.mark.parametrize("seed", range(90))
def test_it_is_never_above_the_optimum_of_any_order(seed: int) -> None:
    problem = small_problem(seed)
    best = least_seconds(seed)
    if best is None:
        return
    for op_id in sorted(problem.graph.needed):
        assert window_bound.lower_bound_s(problem, [op_id], limit_s=10.0, relax=True) <= best
    assert problem.store_all_time_s <= bound(problem) <= best


def test_it_mostly_sees_that_something_must_run_again() -> None:
    optima = {seed: least_seconds(seed) for seed in range(90)}
    dear = [
        problem
        for seed, best in optima.items()
        if best is not None and best > (problem := small_problem(seed)).store_all_time_s
    ]
    assert len(dear) > 15
    assert sum(bound(problem) > problem.store_all_time_s for problem in dear) > len(dear) / 2


def test_running_example_must_recompute_a() -> None:
    problem = example(7)
    best = fastest(problem, any_order=True)
    assert best is not None
    assert 6 * NEARLY <= bound(problem) <= best[0] == 6


def test_a_chain_s_bound_grows_as_the_budget_falls() -> None:
    bounds = [bound(chain_problem(6).with_budget(budget)) for budget in (8, 7, 6, 5, 4)]
    assert bounds[0] == chain_problem(6).store_all_time_s
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0] + 1


# ------------------------------------------------------------------ what a cut enforces


def test_what_cannot_stay_runs_again_and_costs_its_time() -> None:
    problem = example(7, (3.0, 1.0, 1.0, 1.0, 1.0))
    assert enforced_s(problem, C) == pytest.approx(3.0)
    assert enforced_s(problem.with_budget(11), C) == pytest.approx(0.0)


def test_only_a_part_may_have_to_go() -> None:
    """Of the four bytes of a, two have room: the relaxation keeps half of it."""
    assert enforced_s(example(9), C) == pytest.approx(0.5)


def test_the_first_op_enforces_nothing() -> None:
    assert enforced_s(example(1), A) == 0.0


def test_what_runs_again_needs_its_inputs() -> None:
    """The last value is wanted later; to have it again, the whole chain before it runs again."""
    graph = Graph(
        (
            Op(0, "a", "", (), (0,)),
            Op(1, "b", "", (0,), (1,)),
            Op(2, "c", "", (1,), (2,)),
            Op(3, "cut", "", (2,), (3,), after=(2,)),
            Op(4, "d", "", (2, 3), (4,)),
        ),
        (
            *(Value(i, f"v{i}", 10, producer=i) for i in range(3)),
            Value(3, "v3", 10, producer=3),
            Value(4, "v4", 1, producer=4),
        ),
        (4, 1),
    )
    problem = Problem(graph, Profile((1.0, 2.0, 4.0, 1.0, 1.0), (0,) * 5, 0), 20)
    # c's output stays, as the cut reads it; b's is a graph output, and comes again after a.
    assert enforced_s(problem, 3) == pytest.approx(1.0 + 2.0)


def test_what_may_run_before_the_cut_or_after_it_takes_room_either_way() -> None:
    """The side op reads x and makes an output of as many bytes: one of the two is alive when the
    cut runs, or x runs again. There is room for nine bytes of the ten."""
    builder = Builder()
    x = builder.add("x", 10)
    side = builder.add("side", 10, (x,))
    cut = builder.add("cut", 20, (builder.add("y", 1, (x,)),))
    problem = builder.problem((side, builder.add("end", 1, (cut,))), 30)
    assert enforced_s(problem, problem.graph.maker(cut)) == pytest.approx(0.1)
    assert enforced_s(problem.with_budget(31), problem.graph.maker(cut)) == 0.0


def enforced(budget: int, workspace: int = 0, resident: int = 0, **options: bool) -> float:
    return enforced_s(two_readers(budget, workspace, resident, **options), 2)


def test_workspace_and_resident_bytes_take_room_at_the_cut() -> None:
    assert enforced(30) == pytest.approx(0.0)
    assert enforced(30, workspace=5) == pytest.approx(0.5)
    assert enforced(30, resident=5) == pytest.approx(0.5)
    assert enforced(40, workspace=5, resident=5) == pytest.approx(0.0)


def test_an_output_that_takes_a_buffer_over_takes_no_room() -> None:
    assert enforced(20) == pytest.approx(1.0)
    assert enforced(20, may_reuse=True) == pytest.approx(0.0)


def test_a_graph_output_may_be_taken_over_and_computed_again() -> None:
    problem = overwritten_output(recomputable=True)
    best = fastest(problem, any_order=True)
    assert best is not None
    assert best[0] == problem.store_all_time_s + 1
    assert enforced_s(problem, 3) == pytest.approx(0.0)
    assert enforced_s(overwritten_output(recomputable=False), 3) == pytest.approx(5.0)


def test_a_cut_without_an_answer_enforces_nothing() -> None:
    """What cannot be computed again must stay, and has no room: no schedule fits, which is for
    others to prove."""
    assert enforced(20, recomputable=False) == 0.0


# ------------------------------------------------------------------ which cuts are tried


def test_crossing_bytes_are_those_of_what_is_made_before_and_read_from_there_on() -> None:
    problem = example(7)
    assert [crossing_bytes(problem, op_id) for op_id in range(5)] == [4, 5, 11, 11, 7]


def test_a_cut_is_where_the_store_all_schedule_is_over_the_budget() -> None:
    assert promising_cuts(example(11)) == []
    assert promising_cuts(example(10)) == [C, D]
    assert promising_cuts(example(7)) == [C, D]


@pytest.mark.parametrize("seed", range(10))
def test_few_cuts_are_tried_the_widest_first(seed: int) -> None:
    rng = random.Random(seed)
    problem = chain_problem(60, rng=rng)
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    problem = problem.with_budget(peak // 2)
    cuts = promising_cuts(problem)
    crossing = [crossing_bytes(problem, cut) for cut in cuts]
    assert len(set(cuts)) == cut_bound.CUTS
    assert crossing == sorted(crossing, reverse=True)


def test_without_a_budget_or_with_enough_it_is_the_store_all_time() -> None:
    problem = example(11)
    assert bound(problem) == bound(problem.with_budget(None)) == 5.0


def test_no_cut_is_tried_after_the_deadline() -> None:
    assert cut_bound.lower_bound_s(example(7), deadline=Deadline(0.0)) == 5.0


def test_an_op_that_nobody_needs_counts_nothing() -> None:
    graph = chain_example()
    unneeded = Op(5, "f", "", (A, B), (5,))
    graph = Graph((*graph.ops, unneeded), (*graph.values, Value(5, "f", 50, producer=5)), (E,))
    problem = Problem(graph, Profile((1.0,) * 6, (0,) * 6, 0), 7)
    assert 6 * NEARLY <= bound(problem) <= 6
