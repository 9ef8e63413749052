"""Rows and variables become the matrix and vectors that solvers take."""

from __future__ import annotations

import numpy as np
import pytest

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
