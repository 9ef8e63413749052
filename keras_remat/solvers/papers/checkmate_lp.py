"""The linear relaxation of Checkmate's program: a lower bound in seconds of computation, and the
kernel of rounding.

Jain et al. 2020, sec. 5. Without within-stage memory rows (see
:mod:`keras_remat.solvers.papers.checkmate`) the relaxation has a quarter of the rows, costs a
fiftieth of the time, loses next to nothing, and holds for every schedule whose first runs are in
default order; that is the default. ``within_stages=True`` is the relaxation of Checkmate's own
program. On Checkmate's ResNet50 (353 ops) the former takes about 20 s.

As a solver, ``checkmate_lp`` returns the best deterministic rounding of S
(:mod:`keras_remat.solvers.papers.lp_rounding`) with the bound attached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.errors import InfeasibleBudgetError
from keras_remat.solvers.engines.milp import optimize
from keras_remat.solvers.papers.checkmate import Program, build
from keras_remat.solvers.papers.checkmate_milp import MAX_VARIABLES, safe_bound_s


@dataclass(frozen=True)
class Relaxed:
    """A solved relaxation.

    Args:
        program: what was relaxed.
        x: its optimum, or ``None`` when there is none within the time.
        bound_s: seconds no schedule of the program's scope beats; the store-all time when nothing
            better was proved.
        infeasible: the relaxation has no point, so no schedule of its scope fits.
    """

    program: Program | None
    x: np.ndarray | None
    bound_s: float
    infeasible: bool = False


def relaxation(
    problem: Problem,
    time_limit_s: float,
    *,
    budget_bytes: int | None = None,
    within_stages: bool = False,
) -> Relaxed:
    """Solves the linear relaxation.

    Args:
        problem: must have a budget unless ``budget_bytes`` is given.
        time_limit_s: seconds.
        budget_bytes: a budget to use instead of the problem's.
        within_stages: write the within-stage memory rows of all stages.
    """
    if len(problem.graph.needed) ** 2 > MAX_VARIABLES:
        return Relaxed(None, None, problem.store_all_time_s)
    program = build(problem, None if within_stages else (), budget_bytes=budget_bytes)
    answer = optimize(program, time_limit_s, relax=True)
    if answer.status == "infeasible":
        return Relaxed(program, None, problem.store_all_time_s, infeasible=True)
    return Relaxed(program, answer.x, safe_bound_s(problem, program.seconds(answer.bound)))


def lower_bound_s(
    problem: Problem, time_limit_s: float = 30.0, *, within_stages: bool = False
) -> float:
    """Seconds that no schedule with its first runs in default order beats under the budget.

    Args:
        problem: without a budget the bound is the store-all time.
        time_limit_s: seconds; when they run out the bound is the store-all time.
        within_stages: the relaxation of Checkmate's own program, whose bound holds within its
            stages only.

    Returns:
        Seconds; ``inf`` when the relaxation is infeasible, that is when no schedule of that scope
        fits.

    Raises:
        InfeasibleBudgetError: the budget is below the floor.
    """
    if problem.budget_bytes is None:
        return problem.store_all_time_s
    if problem.budget_bytes < problem.floor_bytes:
        raise InfeasibleBudgetError(problem.budget_bytes, problem.floor_bytes)
    answer = relaxation(problem, time_limit_s, within_stages=within_stages)
    return float("inf") if answer.infeasible else answer.bound_s
