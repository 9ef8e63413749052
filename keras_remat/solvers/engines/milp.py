"""Calls mixed-integer solvers: HiGHS through SciPy, CBC through CyLP.

Both run in this process. They read the clock between their own steps, but not while they take a
program in. So their limit is lower than the time left, and they are not started where too little is
left. CyLP has no wheels for some machines; asking for it there raises
:class:`keras_remat.errors.MissingPackageError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.sparse

from keras_remat.errors import MissingPackageError
from keras_remat.solvers.engines.linear_program import LinearProgram

GAP = 1e-6  # relative, at which a program counts as solved
ENTRY_S = 1.5e-6
"""Seconds per coefficient that HiGHS goes on beyond its limit, at most: it was 0.5 s with 0.7
million, 2.7 s with 2.1 million and 6.1 s with 4.1 million."""
Backend = Literal["highs", "cbc"]


@dataclass(frozen=True)
class Answer:
    """Holds the result of a solver.

    Args:
        status: ``"optimal"``, ``"infeasible"`` or ``"stopped"`` (by the time limit).
        x: the best point found, or ``None``.
        bound: a cost that no point of the program is below; 0 when nothing was proved.
    """

    status: Literal["optimal", "infeasible", "stopped"]
    x: np.ndarray | None
    bound: float


def optimize(
    program: LinearProgram,
    time_limit_s: float,
    *,
    relax: bool = False,
    backend: Backend = "highs",
    gap: float = GAP,
) -> Answer:
    """Solves a program.

    Args:
        program: the program to minimize.
        time_limit_s: seconds.
        relax: whether to solve the linear relaxation; HiGHS only.
        backend: ``"highs"`` or ``"cbc"``.
        gap: relative gap at which HiGHS counts a program as solved.
    """
    if not program.cost:  # nothing to decide; rows are constants
        feasible = max(program.low, default=0) <= 1e-9 and min(program.high, default=0) >= -1e-9
        return Answer("optimal" if feasible else "infeasible", np.zeros(0), 0.0)
    time_limit_s -= ENTRY_S * program.entry_count
    if time_limit_s <= 0:
        return Answer("stopped", None, 0.0)
    if backend == "cbc":
        return _cbc(program, time_limit_s)
    from scipy.optimize import Bounds, LinearConstraint, milp

    result = milp(
        program.cost,
        integrality=None if relax else program.integral,
        bounds=Bounds(program.floor, program.ceiling),
        constraints=LinearConstraint(program.matrix, program.low, program.high),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
    if result.status == 0:
        return Answer("optimal", result.x, float(result.fun if relax else result.mip_dual_bound))
    if result.status == 2:
        return Answer("infeasible", None, 0.0)
    bound = 0.0 if relax or result.mip_dual_bound is None else float(result.mip_dual_bound)
    return Answer("stopped", None if relax else result.x, max(0.0, bound))


def _cbc(program: LinearProgram, time_limit_s: float) -> Answer:
    try:
        from cylp.cy import CyClpSimplex
        from cylp.py.modeling.CyLPModel import CyLPModel
    except ImportError as error:
        raise MissingPackageError("cylp", "The solver CBC", "solvers") from error
    model = CyLPModel()
    x = model.addVariable("x", len(program.cost))
    floor, ceiling, lower, upper = (
        np.clip(bounds, -1e30, 1e30)
        for bounds in (program.floor, program.ceiling, program.low, program.high)
    )
    model += lower <= scipy.sparse.csr_matrix(program.matrix) @ x <= upper
    model += floor <= x <= ceiling
    model.objective = np.asarray(program.cost) @ x
    simplex = CyClpSimplex(model)
    simplex.logLevel = 0
    simplex.setInteger(x[np.flatnonzero(program.integral)])
    cbc = simplex.getCbcModel()
    cbc.logLevel = 0
    cbc.maximumSeconds = time_limit_s
    cbc.allowableFractionGap = GAP
    cbc.solve()
    status = cbc.status
    # an integral relaxation is a solution that is not counted
    found = status == "solution" or cbc.solutionCount > 0
    point = np.array(cbc.primalVariableSolution["x"]) if found else None
    if status == "solution":
        return Answer("optimal", point, float(cbc.bestPossibleObjValue))
    if "infeasible" in status:
        return Answer("infeasible", None, 0.0)
    return Answer("stopped", point, max(0.0, float(cbc.bestPossibleObjValue)))
