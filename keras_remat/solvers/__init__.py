"""Offers every solver under one signature: ``Problem → Solution``.

A solver is a module of this package with a function ``solve(incumbent, seed)``
(:mod:`keras_remat.solvers.orders.incumbent`); ``SOLVERS`` maps its public name to it, and imports
the module only when it is called. :func:`solve` is the way in: it refuses budgets below the floor
before any solver runs, and returns only schedules that
:func:`keras_remat.core.validate.validate` accepts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keras_remat.checks import check_int, check_name, check_seconds
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import (
    InfeasibleBudgetError,
    InvalidProblemError,
    without_inner_frames,
)
from keras_remat.solvers.orders.incumbent import run
from keras_remat.solvers.orders.timeline import TOO_MANY_BYTES

Solver = Callable[..., Solution]
SECONDS = 1e-200, 1e200
"""Least and largest sum of the times of all ops, so that quotients of times, and sums over a
schedule, stay finite."""


def _solver(name: str, target: str, **options: Any) -> Solver:
    """Returns a solver that is imported when it is called.

    Args:
        name: public name.
        target: the solver's module, and its function there unless that is ``solve``.
        options: options of the function that make this variant of the solver.
    """

    def solve_by_name(problem: Problem, **arguments: Any) -> Solution:
        module, _, function = target.partition(":")
        search = getattr(importlib.import_module(f"{__name__}.{module}"), function or "solve")
        return run(search, problem, name=name, **options, **arguments)

    return solve_by_name


SOLVERS: dict[str, Solver] = {
    "store_all": _solver("store_all", "orders.incumbent:store_all"),
    "chen_sqrt_n": _solver("chen_sqrt_n", "papers.chen"),
    "chen_sqrt_n_ap": _solver("chen_sqrt_n_ap", "papers.chen", forms=("ap",)),
    "chen_sqrt_n_linear": _solver("chen_sqrt_n_linear", "papers.chen", forms=("linear",)),
    "chen_greedy": _solver("chen_greedy", "papers.chen", by_bytes=True),
    "chen_greedy_ap": _solver("chen_greedy_ap", "papers.chen", by_bytes=True, forms=("ap",)),
    "chen_greedy_linear": _solver(
        "chen_greedy_linear", "papers.chen", by_bytes=True, forms=("linear",)
    ),
    "griewank": _solver("griewank", "papers.griewank"),
    "chain_dp": _solver("chain_dp", "papers.chain_dp"),
    "checkmate_milp": _solver("checkmate_milp", "papers.checkmate_milp"),
    "checkmate_milp_cbc": _solver("checkmate_milp_cbc", "papers.checkmate_milp", backend="cbc"),
    "checkmate_lp": _solver("checkmate_lp", "papers.lp_rounding", randomized=False),
    "lp_rounding": _solver("lp_rounding", "papers.lp_rounding"),
    "dtr": _solver("dtr", "papers.dtr"),
    "dtr_eq": _solver("dtr_eq", "papers.dtr", score="eq"),
    "dtr_local": _solver("dtr_local", "papers.dtr", score="local"),
    "dtr_msps": _solver("dtr_msps", "papers.dtr", score="msps"),
    "dtr_lru": _solver("dtr_lru", "papers.dtr", score="lru"),
    "dtr_size": _solver("dtr_size", "papers.dtr", score="size"),
    "dtr_random": _solver("dtr_random", "papers.dtr", score="random"),
    "greedy": _solver("greedy", "search.greedy"),
    "greedy_first": _solver("greedy_first", "search.greedy:solve_first"),
    "backward": _solver("backward", "search.backward"),
    "intervals": _solver("intervals", "search.intervals"),
    "anneal": _solver("anneal", "search.anneal"),
    "auto": _solver("auto", "auto"),
}


@without_inner_frames
def solve(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Callable[[Solution], None] | None = None,
    patience: float = 1.0,
    keep_on_interrupt: bool = True,
) -> Solution:
    """Solves a problem with a named solver.

    Args:
        problem: its ``budget_bytes`` is the limit; ``None`` means none.
        solver: a name in ``SOLVERS``.
        time_limit_s: seconds the solver may take.
        seed: the same problem and seed give the same schedule.
        progress: called with every better solution, by ``auto`` also with every better bound, and
            with the solution that is returned.
        patience: factor on the time limit. The clock ends work that is counted by the limit only
            after that many times as long, for machines that are busy with other things.
        keep_on_interrupt: whether Ctrl-C ends the search and keeps the best schedule. If not, or
            before there is one, ``KeyboardInterrupt`` is raised.

    Returns:
        A solution whose schedule is legal, within the budget, with ``usage`` filled in.

    Raises:
        InfeasibleBudgetError: the solver proved that no schedule fits.
        InvalidProblemError: the problem's bytes or seconds sum to more than solvers can add up, or
            its seconds to almost 0.
        ScheduleNotFoundError: no schedule was found, but it is not proved that none fits.
        ValueError, TypeError: wrong arguments.
    """
    check_name("solver", solver, SOLVERS)
    check_seconds("time_limit_s", time_limit_s)
    check_int("seed", seed, least=0)
    check_floor(problem)
    _check_sums(problem)
    best: Solution | None = None

    def told(solution: Solution) -> None:
        nonlocal best
        validate(problem, solution.schedule)
        best = solution
        if progress is not None:
            progress(solution)

    try:
        solution = SOLVERS[solver](
            problem, time_limit_s=float(time_limit_s), seed=int(seed),  # Python's, for JSON, too
            progress=told, patience=patience,
        )  # fmt: skip
    except KeyboardInterrupt:
        if best is None or not keep_on_interrupt:
            raise
        return best
    solution = replace(solution, usage=simulate(problem, solution.schedule))
    told(solution)
    return solution


def check_floor(problem: Problem) -> None:
    """Raises :class:`InfeasibleBudgetError` when the budget is below the floor."""
    if problem.budget_bytes is not None and problem.budget_bytes < problem.floor_bytes:
        op_id = problem.floor_op
        name = None if op_id is None else problem.graph.ops[op_id].name
        raise InfeasibleBudgetError(problem.budget_bytes, problem.floor_bytes, name)


def _check_sums(problem: Problem) -> None:
    """Raises :class:`InvalidProblemError` for bytes and seconds that solvers cannot add up."""
    total = problem.profile.resident_bytes + sum(problem.profile.op_workspace_bytes)
    total += sum(value.nbytes for value in problem.graph.values)
    if total >= TOO_MANY_BYTES:
        raise InvalidProblemError(
            f"resident bytes, values and workspaces sum to {total} bytes; less than "
            f"{TOO_MANY_BYTES} can be solved. Give sizes in a larger unit",
            value=total,
        )
    total_s, (least_s, most_s) = sum(problem.profile.op_time_s), SECONDS
    if total_s and not least_s <= total_s <= most_s:
        raise InvalidProblemError(
            f"the times of the ops sum to {total_s:g} seconds; none, and from {least_s:g} to "
            f"{most_s:g}, can be solved. Give times in another unit",
            value=total_s,
        )
