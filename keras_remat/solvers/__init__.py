"""Every solver under one signature: ``Problem → Solution``.

A solver is a module of this package with a function ``solve(problem, *, time_limit_s, seed) ->
Solution``; ``SOLVERS`` maps its public name to it, and imports the module only when it is called.
:func:`solve` is the way in: it refuses budgets below the floor before any solver runs, and lets no
schedule out that :func:`keras_remat.core.validate.validate` does not accept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError

Solver = Callable[..., Solution]


class _Registry(Mapping[str, Solver]):
    """Public solver name → solver, imported on first use."""

    def __init__(self, modules: Mapping[str, str]):
        self._modules = dict(modules)

    def __getitem__(self, name: str) -> Solver:
        target = self._modules[name]
        module, _, function = target.partition(":")
        solver: Solver = getattr(
            importlib.import_module(f"{__name__}.{module}"), function or "solve"
        )
        return solver

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


SOLVERS: Mapping[str, Solver] = _Registry(
    {
        "store_all": "papers.store_all",
        "chen_sqrt_n": "papers.chen:sqrt_n",
        "chen_sqrt_n_ap": "papers.chen:sqrt_n_ap",
        "chen_sqrt_n_linear": "papers.chen:sqrt_n_linear",
        "chen_greedy": "papers.chen:greedy",
        "chen_greedy_ap": "papers.chen:greedy_ap",
        "chen_greedy_linear": "papers.chen:greedy_linear",
        "griewank": "papers.griewank",
        "chain_dp": "papers.chain_dp",
        "checkmate_milp": "papers.checkmate_milp:solve_highs",
        "checkmate_milp_cbc": "papers.checkmate_milp:solve_cbc",
        "checkmate_lp": "papers.lp_rounding:solve_deterministic",
        "lp_rounding": "papers.lp_rounding",
        "dtr": "papers.dtr",
        "dtr_eq": "papers.dtr:solve_eq",
        "dtr_local": "papers.dtr:solve_local",
        "dtr_msps": "papers.dtr:solve_msps",
        "dtr_lru": "papers.dtr:solve_lru",
        "dtr_size": "papers.dtr:solve_size",
        "dtr_random": "papers.dtr:solve_random",
        "greedy": "search.greedy",
        "greedy_first": "search.greedy:solve_first",
        "backward": "search.backward",
        "intervals": "search.intervals",
        "anneal": "search.anneal",
        "auto": "auto",
    }
)


def solve(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Solves a problem with a named solver.

    Args:
        problem: its ``budget_bytes`` is the limit; ``None`` means none.
        solver: a name in ``SOLVERS``.
        time_limit_s: seconds the solver may take.
        seed: the same problem and seed give the same schedule.
        progress: called with every better solution (and every better bound) while ``auto`` or
            ``greedy`` runs; other solvers call it once.

    Returns:
        A solution whose schedule is legal, within the budget, with ``usage`` filled in.

    Raises:
        InfeasibleBudgetError: proved that no schedule fits.
        ScheduleNotFoundError: none found, none proved impossible.
        ValueError: unknown solver or a time limit that is not positive.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; there are {', '.join(SOLVERS)}")
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be positive, got {time_limit_s!r}")
    check_floor(problem)
    watch = {"progress": progress} if solver in ("auto", "greedy") and progress is not None else {}
    solution = SOLVERS[solver](problem, time_limit_s=time_limit_s, seed=seed, **watch)
    validate(problem, solution.schedule)
    solution = replace(solution, usage=simulate(problem, solution.schedule))
    if progress is not None:
        progress(solution)
    return solution


def check_floor(problem: Problem) -> None:
    """Raises :class:`InfeasibleBudgetError` when the budget is below the floor."""
    if problem.budget_bytes is not None and problem.budget_bytes < problem.floor_bytes:
        op_id = problem.floor_op
        name = None if op_id is None else problem.graph.ops[op_id].name
        raise InfeasibleBudgetError(problem.budget_bytes, problem.floor_bytes, name)
