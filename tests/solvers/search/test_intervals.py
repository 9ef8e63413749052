"""The interval program: CP-SAT's answers are valid, and optimal among orders with the same first
runs."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from random_problems import chain_problem, mixed_problem

from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import check_rules, validate
from keras_remat.errors import MissingPackageError, ScheduleNotFoundError
from keras_remat.solvers import SOLVERS, solve
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.search import interval_program, intervals
from tests.solvers.brute_force import fastest

needs_ortools = pytest.mark.skipif(not cp_sat.available(), reason="ortools is not installed")


def compare_with_exhaustive_search(seed: int) -> bool:
    """On a problem of at most 7 ops the interval program's best is the fastest of all orders with
    these first runs, and Checkmate's where that recomputes no op twice; returns whether there was
    anything to compare."""
    problem = mixed_problem(seed, ("random", "training", "layered")[seed % 3])
    if len(problem.graph.needed) > 7 or len(problem.graph.values) > 9:
        return False
    best = fastest(problem)
    try:
        found = simulate(problem, SOLVERS["intervals"](problem, time_limit_s=20).schedule).time_s
    except ScheduleNotFoundError:
        assert best is None
        return False
    assert best is not None
    assert found == pytest.approx(best[0])
    staged = solve(problem, solver="checkmate_milp", time_limit_s=20.0)
    if max(staged.schedule.recomputed.values(), default=0) <= 1 and staged.usage is not None:
        assert found <= staged.usage.time_s + 1e-9
    return True


@needs_ortools
def test_agrees_with_exhaustive_search() -> None:
    assert sum(compare_with_exhaustive_search(seed) for seed in range(45)) > 5


@needs_ortools
@pytest.mark.slow
def test_agrees_with_exhaustive_search_on_more_problems() -> None:
    assert sum(compare_with_exhaustive_search(seed) for seed in range(45, 1200)) > 150


@needs_ortools
@pytest.mark.parametrize("seed", range(8))
def test_solutions_are_valid(seed: int) -> None:
    problem = mixed_problem(seed)
    try:
        solution = SOLVERS["intervals"](problem, time_limit_s=3)
    except ScheduleNotFoundError:
        return
    validate(problem, solution.schedule)


@needs_ortools
def test_more_than_one_recomputation_of_an_op() -> None:
    """A chain of 8 under a budget of 5 bytes recomputes its first op again and again."""
    problem = chain_problem(8).with_budget(5)
    schedule = SOLVERS["intervals"](problem, time_limit_s=10).schedule
    validate(problem, schedule)
    assert max(schedule.recomputed.values()) >= 2


@pytest.mark.parametrize("seed", range(40))
def test_every_assignment_that_satisfies_the_program_fits(seed: int) -> None:
    """The rows never understate: any order whose hint satisfies them is within the budget when it
    is simulated."""
    problem = mixed_problem(seed)
    base = tuple(sorted(problem.graph.needed))
    pairs = sorted(intervals.candidates(problem, base, 3))
    rng = random.Random(seed)
    for _ in range(20):
        chosen = set(rng.sample(pairs, min(len(pairs), rng.randint(0, 4))))
        order = []
        for at in range(len(base) + 1):
            order += sorted(op_id for slot, op_id in chosen if slot == at)
            order += base[at : at + 1]
        model = interval_program.Model(problem, base, pairs, order)
        assert model.program.hint is not None
        ones = frozenset(model.program.hint)
        assert model.order(ones) == tuple(order)
        rows_hold = all(
            sum(c for i, c in zip(indexes, coefficients, strict=True) if i in ones) <= bound
            for indexes, coefficients, bound in model.program.rows
        )
        check_rules(problem, Schedule(tuple(order)))
        if rows_hold:
            validate(problem, Schedule(tuple(order)))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "available", lambda: False)
    with pytest.raises(MissingPackageError, match=r"keras-remat\[solvers\]") as caught:
        SOLVERS["intervals"](chain_problem(4).with_budget(5))
    assert caught.value.extra == "solvers"


@needs_ortools
def test_ortools_is_not_imported_here() -> None:
    code = (
        "import sys; sys.path[:0] = ['.', 'tests']; "
        "from random_problems import chain_problem; from keras_remat.solvers import SOLVERS; "
        "SOLVERS['intervals'](chain_problem(6).with_budget(6), time_limit_s=5); "
        "sys.exit('ortools' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def answers_to(program: cp_sat.Program) -> list[cp_sat.Answer]:
    with cp_sat.Worker() as worker:
        worker.start(program, time_limit_s=10)
        return list(worker.answers())


@needs_ortools
def test_a_small_program() -> None:
    program = cp_sat.Program()
    a, b, c = program.variable(3), program.variable(2), program.variable(2)
    program.clauses += [(-1, a, b), (-1, a, c)]
    *_, last = answers = answers_to(program)
    assert last.status == "OPTIMAL"
    assert next(i.ones for i in reversed(answers) if i.ones is not None) == {a}
    program.rows.append(([a], [1], 0))
    answers = answers_to(program)
    assert next(i.ones for i in reversed(answers) if i.ones is not None) == {b, c}
    program.rows.append(([b, c], [1, 1], 1))
    assert answers_to(program)[-1].status == "INFEASIBLE"


@needs_ortools
def test_a_seed_may_be_larger_than_those_of_ortools() -> None:
    program = cp_sat.Program()
    program.variable(1)
    with cp_sat.Worker() as worker:
        worker.start(program, time_limit_s=10, seed=2**31)
        assert list(worker.answers())[-1].status == "OPTIMAL"


@needs_ortools
def test_leaving_the_context_ends_the_process() -> None:
    program = cp_sat.Program()
    for _ in range(3):
        program.variable(1)
    with cp_sat.Worker() as worker:
        worker.start(program, time_limit_s=30)
        next(worker.answers())
    assert worker._process.returncode is not None
