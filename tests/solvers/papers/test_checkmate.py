"""Checkmate's program against exhaustive search over exactly its model, and its relaxation against
every default-order schedule."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from keras_remat.core.graph import chain_example
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.validate import validate
from keras_remat.solvers.engines.milp import optimize
from keras_remat.solvers.papers.checkmate import build, last_useful_stages
from tests.random_problems import chain_problem, mixed_problem, with_budget_fraction
from tests.solvers.brute_force import fastest
from tests.solvers.counted_clock import CountedClock


def small_problems(count: int) -> Iterator[Problem]:
    seed = 0
    while count:
        problem = mixed_problem(seed, "random" if seed % 2 else "training")
        seed += 1
        if len(problem.graph.needed) <= 7 and len(problem.graph.values) <= 9:
            count -= 1
            yield problem


def test_equals_exhaustive_search_of_its_model() -> None:
    solved = infeasible = recomputing = 0
    for problem in small_problems(60):
        program = build(problem)
        answer = optimize(program, 30.0)
        best = fastest(problem, stages=True)
        if best is None:
            assert answer.status == "infeasible"
            infeasible += 1
            continue
        assert answer.status == "optimal"
        assert answer.x is not None
        schedule = Schedule(tuple(program.order(answer.x)))
        validate(problem, schedule)
        assert simulate(problem, schedule).time_s == pytest.approx(best[0])
        solved += 1
        recomputing += len(schedule) > len(problem.graph.needed)
    assert solved > 40
    assert recomputing > 8
    assert infeasible > 0


def test_without_detailed_stages_it_bounds_every_default_order_schedule() -> None:
    met = 0
    for problem in small_problems(60):
        program = build(problem, ())
        whole, relaxed = optimize(program, 30.0), optimize(program, 30.0, relax=True)
        best = fastest(problem)
        if best is None:
            continue
        assert relaxed.status == whole.status == "optimal"
        assert program.seconds(relaxed.bound) <= program.seconds(whole.bound) + 1e-4
        assert program.seconds(whole.bound) <= best[0] + 1e-4
        met += program.seconds(whole.bound) == pytest.approx(best[0], abs=1e-4)
    assert met > 30


def test_cbc_agrees_with_highs() -> None:
    pytest.importorskip("cylp")
    for problem in small_problems(25):
        program = build(problem)
        highs, cbc = optimize(program, 30.0), optimize(program, 30.0, backend="cbc")
        assert highs.status == cbc.status
        if highs.x is not None and cbc.x is not None:
            assert highs.x @ program.cost == pytest.approx(cbc.x @ program.cost, abs=1e-3)


def test_paper_example_8_layers_frontier_advancing() -> None:
    """Jain et al. sec. 4.6: an 8-layer network; all stages, solved to optimality at once."""
    problem = with_budget_fraction(chain_problem(8), 0.6)
    program = build(problem)
    answer = optimize(program, 60.0)
    assert answer.status == "optimal"
    assert answer.x is not None
    validate(problem, Schedule(tuple(program.order(answer.x))))


def test_useless_variables_are_left_out() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)
    run_until, read_until = last_useful_stages(problem, (0, 1, 2, 3, 4))
    assert run_until == [
        5,
        5,
        5,
        5,
        5,
    ]  # the output may be dropped and recomputed at the end, and with it all it needs
    assert read_until == [5, 5, 5, 5, 6]
    kept_output = replace(
        problem,
        graph=replace(
            problem.graph,
            ops=(*problem.graph.ops[:4], replace(problem.graph.ops[4], recomputable=False)),
        ),
    )
    assert last_useful_stages(kept_output, (0, 1, 2, 3, 4)) == (
        [4, 4, 4, 4, 4],
        [4, 4, 4, 4, 6],
    )
    program = build(problem)
    assert all(t <= run_until[i] for t, i in program.run)


def test_stages_over_names_the_stage() -> None:
    problem = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0), 7)
    program = build(problem, ())
    order = [0, 1, 2, 3, 4]
    assert program.stages_over(order, live_bytes(problem, Schedule(tuple(order))), 7) == {2, 3}


def test_the_clock_is_read_while_the_program_is_written() -> None:
    clock = CountedClock(allowed=1000)
    with pytest.raises(TimeoutError):
        build(chain_problem(60).with_budget(30), (), deadline=clock)
    assert clock.reads == 1001


def test_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="budget"):
        build(chain_problem(3))


def test_nothing_to_decide() -> None:
    problem = chain_problem(1).with_budget(2)
    answer = optimize(build(problem), 1.0)
    assert answer.status == "optimal"
    assert isinstance(answer.x, np.ndarray)
