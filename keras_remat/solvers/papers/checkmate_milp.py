"""Checkmate's program solved to optimality, by HiGHS or by CBC.

The program and its scope are in :mod:`keras_remat.solvers.papers.checkmate` (Jain et al. 2020, eq.
1 to 9). Its within-stage memory rows are by far the most, and hardly any bind, so they are written
lazily: solve without them, simulate the schedule, write them for the stages that went over, repeat.
The loop ends with an optimum of Checkmate's whole program. The first round is also a relaxation of
every schedule with its first runs in default order, so its bound holds for all of those.

The solver claims this: ``lower_bound_s`` is the first round's bound, and ``status`` is
``"optimal"`` when the schedule meets it: nothing faster exists *among schedules whose first runs
are in default order*, whatever they do inside a stage. An optimum of the whole program that does
not meet the bound (possible near the floor) is ``"feasible"``. Orders with other first runs are
outside of the model and of the bound.

Neither solver takes a starting point through its Python interface here, so ``dtr`` provides the
schedule that is returned (under its own name) when the time limit comes first. An infeasible
program proves nothing about other orders, and raises
:class:`keras_remat.errors.ScheduleNotFoundError`.
"""

from __future__ import annotations

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import live_bytes
from keras_remat.solvers.engines.milp import GAP, Backend, optimize
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.papers import dtr
from keras_remat.solvers.papers.checkmate import build

FALLBACK_SHARE = 0.2  # of the time limit, for dtr
MAX_VARIABLES = 1_000_000
EXACT_OPS = 30  # graphs up to this size are worth the program, for solvers with more to do
TOLERANCE = 1e-5  # relative to the cost of recomputation: what solvers may be off by


def safe_bound_s(problem: Problem, seconds: float) -> float:
    """Returns a bound with the solvers' tolerances taken off, never below the store-all time."""
    extra = seconds - problem.store_all_time_s
    return problem.store_all_time_s + max(
        0.0, extra - TOLERANCE * (extra + 1e-3 * problem.store_all_time_s)
    )


def solve(incumbent: Incumbent, seed: int, *, backend: Backend = "highs") -> None:
    """Solves Checkmate's program.

    Args:
        incumbent, seed: as for every solver.
        backend: ``"highs"`` or ``"cbc"``.

    Raises:
        MissingPackageError: the backend is not installed.
    """
    problem = incumbent.problem
    if incumbent.offer_store_all() or problem.budget_bytes is None:
        return
    incumbent.keeps_order = True
    fallback = Incumbent(problem, "dtr", FALLBACK_SHARE * incumbent.deadline.seconds)
    dtr.solve(fallback, seed)
    incumbent.least_peak_bytes = fallback.least_peak_bytes
    tighter, detailed = problem, set[int]()
    n = len(problem.graph.needed)
    if n * n > MAX_VARIABLES:
        incumbent.reason = f"{n} ops are too many for the program"
    while not incumbent.reason and not incumbent.deadline.is_over:
        try:
            program = build(tighter, detailed, deadline=incumbent.deadline)
        except TimeoutError:
            break
        answer = optimize(program, incumbent.deadline.left_s(), backend=backend)
        if answer.status == "infeasible":
            incumbent.reason = "its program has no solution; other orders may fit"
            break
        if not detailed and tighter is problem:
            incumbent.bound_s = safe_bound_s(problem, program.seconds(answer.bound))
        if answer.x is None:
            break
        order = program.order(answer.x)
        if incumbent.offer(order) or answer.status == "stopped":
            break
        over = program.stages_over(
            order, live_bytes(problem, Schedule(tuple(order))), problem.budget_bytes
        )
        if over <= detailed:  # over by the solver's tolerance only
            tighter = problem.with_budget(int((tighter.budget_bytes or 0) * (1 - 1e-5)) - 1)
        detailed |= over
    # dtr's is faster where the program was stopped early or its model is left
    if fallback.order is not None and fallback.best_s < incumbent.best_s * (1 - GAP):
        incumbent.solver = fallback.solver
        incumbent.offer(fallback.order)
    incumbent.optimal = meets_bound(incumbent)


def meets_bound(incumbent: Incumbent) -> bool:
    """Returns whether there is an order, as fast as the bound.

    Both have the tolerances of :func:`safe_bound_s`.
    """
    if incumbent.order is None:
        return False
    store_all_s = incumbent.problem.store_all_time_s
    extra = max(0.0, incumbent.best_s - store_all_s)
    return incumbent.best_s - incumbent.bound_s <= 2 * TOLERANCE * (extra + 1e-3 * store_all_s)
