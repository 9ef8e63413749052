"""The bound of many cuts: never above the optimum of any order, equal to it on chains, and above
what one cut sees."""

from __future__ import annotations

from itertools import pairwise

import pytest
from graph_builder import Builder
from random_problems import chain_problem, mixed_problem

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import Graph, Op, Value, chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.topology import predecessors
from keras_remat.solvers.bounds import cut_bound, window_bound
from keras_remat.solvers.bounds.window_bound import longest_chain
from tests.solvers.bounds.cases import (
    least_seconds,
    overwritten_output,
    small_problem,
    two_readers,
)
from tests.solvers.brute_force import fastest

#: Far more than any problem here takes.
LIMIT_S = 60.0


def bound(problem: Problem, **options: object) -> float:
    cuts = longest_chain(problem)
    options["limit_s"] = LIMIT_S
    return window_bound.lower_bound_s(problem, cuts, **options)  # type: ignore[arg-type]


def optimum(problem: Problem) -> float:
    best = fastest(problem, any_order=True)
    assert best is not None
    return best[0]


def example(budget_bytes: int | None) -> Problem:
    """The running example: a → b → c → d, and e reads a and d; bytes 4 1 6 1 2."""
    return Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), budget_bytes)


# ------------------------------------------------------------------ against exhaustive search


@pytest.mark.parametrize("seed", range(90))
def test_it_is_never_above_the_optimum_of_any_order(seed: int) -> None:
    problem = small_problem(seed)
    best = least_seconds(seed)
    if best is None:
        return
    assert problem.store_all_time_s <= bound(problem) <= best
    few = longest_chain(problem)[::2]
    assert window_bound.lower_bound_s(problem, few, limit_s=LIMIT_S) <= best


def test_it_is_mostly_the_optimum() -> None:
    optima = {seed: least_seconds(seed) for seed in range(90)}
    dear = [
        (problem, best)
        for seed, best in optima.items()
        if best is not None and best > (problem := small_problem(seed)).store_all_time_s
    ]
    assert len(dear) > 15
    exact = [bound(problem) == pytest.approx(best, rel=1e-5) for problem, best in dear]
    assert sum(exact) > len(dear) / 2


@pytest.mark.parametrize(("layers", "budget"), [(4, 4), (5, 5), (5, 4), (6, 4)])
def test_on_a_chain_it_is_the_optimum(layers: int, budget: int) -> None:
    problem = chain_problem(layers).with_budget(budget)
    assert optimum(problem) > problem.store_all_time_s
    assert bound(problem) == pytest.approx(optimum(problem), rel=1e-5)


def test_running_example_must_recompute_a() -> None:
    assert bound(example(7)) == pytest.approx(6.0, rel=1e-5)
    assert optimum(example(7)) == 6.0


def test_it_adds_up_what_different_cuts_enforce() -> None:
    """Two running examples, one after the other: in each a must be computed again, and one cut
    sees one of them."""
    builder = Builder()
    last: tuple[int, ...] = ()
    for _ in range(2):
        a = builder.add("a", 4, last)
        b = builder.add("b", 1, (a,))
        c = builder.add("c", 6, (b,))
        d = builder.add("d", 1, (c,))
        last = (builder.add("e", 2, (a, d)),)
    problem = builder.problem(last, 9)
    one_cut = cut_bound.lower_bound_s(problem, deadline=Deadline(float("inf")))
    assert one_cut < bound(problem) - 0.1
    assert bound(problem) == pytest.approx(optimum(problem), rel=1e-5)


# ------------------------------------------------------------------ what it is given


def test_it_grows_as_the_budget_falls() -> None:
    problem = chain_problem(5)
    bounds = [bound(problem.with_budget(budget)) for budget in (8, 5, 4)]
    assert bounds[0] == problem.store_all_time_s
    assert bounds == sorted(set(bounds))


def test_more_cuts_see_no_less() -> None:
    problem = chain_problem(5).with_budget(4)
    chain = longest_chain(problem)
    bounds = [
        window_bound.lower_bound_s(problem, cuts, limit_s=LIMIT_S)
        for cuts in (chain[:0], chain[4:5], chain[3:7], chain)
    ]
    assert bounds[0] == problem.store_all_time_s
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[1] < bounds[-1]


def test_a_known_schedule_changes_nothing() -> None:
    problem = chain_problem(5).with_budget(4)
    known = bound(problem, known_s=optimum(problem))
    assert known == pytest.approx(bound(problem), rel=1e-5)


def test_without_a_budget_or_without_cuts_it_is_the_store_all_time() -> None:
    assert bound(example(None)) == 5.0
    assert window_bound.lower_bound_s(example(7), [], limit_s=LIMIT_S) == 5.0


def test_out_of_time_it_is_still_a_bound() -> None:
    problem = chain_problem(12).with_budget(6)
    chain = longest_chain(problem)
    hurried = window_bound.lower_bound_s(problem, chain, limit_s=1e-3)
    assert problem.store_all_time_s <= hurried <= bound(problem) * (1 + 1e-5)


def enforced(budget: int, workspace: int = 0, resident: int = 0, **options: bool) -> float:
    """Seconds beyond the store-all time."""
    problem = two_readers(budget, workspace, resident, **options)
    return window_bound.lower_bound_s(problem, [2], limit_s=LIMIT_S) - 4.0


def test_workspace_and_resident_bytes_take_room_at_a_cut() -> None:
    assert enforced(30) == 0.0
    assert enforced(30, workspace=5) == pytest.approx(1.0, rel=1e-4)
    assert enforced(30, resident=5) == pytest.approx(1.0, rel=1e-4)
    assert enforced(40, workspace=5, resident=5) == 0.0


def test_an_output_that_takes_a_buffer_over_takes_no_room() -> None:
    assert enforced(20) == pytest.approx(1.0, rel=1e-4)
    assert enforced(20, may_reuse=True) == 0.0


def test_a_graph_output_may_be_taken_over_and_computed_again() -> None:
    problem, kept = overwritten_output(recomputable=True), overwritten_output(recomputable=False)
    assert optimum(problem) == problem.store_all_time_s + 1
    assert bound(problem) <= optimum(problem)
    assert window_bound.lower_bound_s(kept, [3], limit_s=LIMIT_S) > kept.store_all_time_s + 4


@pytest.mark.parametrize(("recomputable", "extra"), [(True, 1.0), (False, 5.0)])
def test_what_cannot_be_computed_again_must_stay(recomputable: bool, extra: float) -> None:
    """At the cut there is room for x or for z, both of which are read later."""
    graph = Graph(
        (
            Op(0, "x", "", (), (0,), recomputable=recomputable),
            Op(1, "z", "", (), (1,)),
            Op(2, "y", "", (0, 1), (2,)),
            Op(3, "cut", "", (2,), (3,)),
            Op(4, "first", "", (0, 3), (4,)),
            Op(5, "last", "", (1, 4), (5,)),
        ),
        tuple(Value(i, f"v{i}", (10, 10, 1, 10, 1, 1)[i], producer=i) for i in range(6)),
        (5,),
    )
    problem = Problem(graph, Profile((1.0, 5.0, 1.0, 1.0, 1.0, 1.0), (0,) * 6, 0), 21)
    found = window_bound.lower_bound_s(problem, [3], limit_s=LIMIT_S)
    assert found == pytest.approx(problem.store_all_time_s + extra, rel=1e-5)
    assert found <= optimum(problem)


# ------------------------------------------------------------------ the longest chain


def test_running_example_is_a_chain() -> None:
    assert longest_chain(example(7)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_every_op_of_a_chain_needs_the_one_before_and_no_chain_is_longer(seed: int) -> None:
    problem = mixed_problem(seed)
    chain = longest_chain(problem)
    assert set(chain) <= problem.graph.needed
    for earlier, later in pairwise(chain):
        assert earlier in predecessors(problem.graph, later)
    depth: dict[int, int] = {}
    for op_id in sorted(problem.graph.needed):
        before = predecessors(problem.graph, op_id)
        depth[op_id] = 1 + max((depth[i] for i in before), default=0)
    assert len(chain) == max(depth.values(), default=0)


def test_a_graph_that_needs_nothing_has_no_chain() -> None:
    problem = Problem(Graph((), (), ()), Profile((), (), 0), 7)
    assert longest_chain(problem) == []
    assert bound(problem) == 0.0
