"""Rows and variables become the matrix and vectors that solvers take."""

from __future__ import annotations

import numpy as np
import pytest

from keras_remat.core.deadline import Deadline
from keras_remat.solvers.engines import milp
from keras_remat.solvers.engines.linear_program import LinearProgram


def example() -> LinearProgram:
    """``min 2 x + y`` with ``1 ≤ x + y``, ``x ≤ 0.25 + y`` and ``y ≤ 0.5`` integral."""
    program = LinearProgram()
    x = program.variable(2.0, ceiling=np.inf)
    y = program.variable(1.0, ceiling=0.5)
    program.between([(x, 1.0), (y, 1.0)], 1.0, np.inf)
    program.at_most([(x, 0.5), (x, 0.5), (y, -1.0)], 0.25)
    return program


def test_terms_of_one_variable_are_added() -> None:
    assert example().matrix.toarray().tolist() == [[1.0, 1.0], [1.0, -1.0]]
    assert example().high == [np.inf, 0.25]


def test_the_optimum_is_found() -> None:
    answer = milp.optimize(example(), 5.0, relax=True)
    assert answer.x is not None
    assert answer.x.tolist() == pytest.approx([0.5, 0.5])


def test_floors_hold() -> None:
    program = LinearProgram()
    program.variable(1.0, floor=1.0, integral=True)
    program.at_most([(0, 1.0)], 3.0)
    answer = milp.optimize(program, 5.0)
    assert answer.bound == pytest.approx(1.0)


def test_nothing_is_added_once_the_time_is_over() -> None:
    program = LinearProgram(Deadline(0.0))
    with pytest.raises(TimeoutError):
        program.variable()
    with pytest.raises(TimeoutError):
        program.at_most([], 1.0)


def test_no_engine_is_started_without_the_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("scipy.optimize.milp", started)
    monkeypatch.setattr(milp, "_cbc", started)
    backends: tuple[milp.Backend, ...] = ("highs", "cbc")
    for backend in backends:
        assert milp.optimize(example(), 0.0, backend=backend) == milp.Answer("stopped", None, 0.0)
    monkeypatch.setattr(milp, "ENTRY_S", 2.0)
    assert milp.optimize(example(), 9.0).status == "stopped"
    with pytest.raises(AssertionError):
        milp.optimize(example(), 11.0)
