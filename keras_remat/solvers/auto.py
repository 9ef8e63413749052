"""The default solver."""

from __future__ import annotations

from dataclasses import replace

from keras_remat.problem import Problem
from keras_remat.schedule import Solution
from keras_remat.solvers import greedy


def solve(problem: Problem, *, time_limit_s: float = 30.0, seed: int = 0) -> Solution:
    """Returns the greedy schedule."""
    return replace(greedy.solve(problem, time_limit_s=time_limit_s, seed=seed))
