"""Every solver under one signature: ``Problem → Solution``.

A solver is a module of this package with a function ``solve(incumbent, seed)``
(:mod:`keras_remat.solvers.orders.incumbent`); ``SOLVERS`` maps its public name to it, and imports
the module only when it is called. :func:`solve` is the way in: it refuses budgets below the floor
before any solver runs, and lets no schedule out that :func:`keras_remat.core.validate.validate`
does not accept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keras_remat.checks import check_int, check_name, check_seconds
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.core.simulate import simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InfeasibleBudgetError, without_inner_frames
from keras_remat.solvers.orders.fetch import recomputing
from keras_remat.solvers.orders.incumbent import run

Solver = Callable[..., Solution]


@dataclass(frozen=True)
class _Entry:
    """Where a solver is: its module, a function of it unless that is ``solve``, and the options
    that make this variant of it. One that does not know of fetches gets them afterwards."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fetches: bool = False

    def load(self, name: str) -> Solver:
        module, _, function = self.target.partition(":")
        search = getattr(importlib.import_module(f"{__name__}.{module}"), function or "solve")
        solver = partial(run, search, name=name, **self.options)
        return solver if self.fetches else recomputing(solver)


class _Registry(Mapping[str, Solver]):
    """Public solver name → solver, imported on first use."""

    def __init__(self, entries: Mapping[str, _Entry]):
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Solver:
        return self._entries[name].load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


SOLVERS: Mapping[str, Solver] = _Registry(
    {
        "store_all": _Entry("papers.store_all"),
        "chen_sqrt_n": _Entry("papers.chen"),
        "chen_sqrt_n_ap": _Entry("papers.chen", {"forms": ("ap",)}),
        "chen_sqrt_n_linear": _Entry("papers.chen", {"forms": ("linear",)}),
        "chen_greedy": _Entry("papers.chen", {"by_bytes": True}),
        "chen_greedy_ap": _Entry("papers.chen", {"by_bytes": True, "forms": ("ap",)}),
        "chen_greedy_linear": _Entry("papers.chen", {"by_bytes": True, "forms": ("linear",)}),
        "griewank": _Entry("papers.griewank"),
        "chain_dp": _Entry("papers.chain_dp"),
        "checkmate_milp": _Entry("papers.checkmate_milp", fetches=True),
        "checkmate_milp_cbc": _Entry("papers.checkmate_milp", {"backend": "cbc"}, fetches=True),
        "checkmate_lp": _Entry("papers.lp_rounding", {"randomized": False}),
        "lp_rounding": _Entry("papers.lp_rounding"),
        "dtr": _Entry("papers.dtr"),
        "dtr_eq": _Entry("papers.dtr", {"score": "eq"}),
        "dtr_local": _Entry("papers.dtr", {"score": "local"}),
        "dtr_msps": _Entry("papers.dtr", {"score": "msps"}),
        "dtr_lru": _Entry("papers.dtr", {"score": "lru"}),
        "dtr_size": _Entry("papers.dtr", {"score": "size"}),
        "dtr_random": _Entry("papers.dtr", {"score": "random"}),
        "greedy": _Entry("search.greedy", fetches=True),
        "greedy_first": _Entry("search.greedy:solve_first", fetches=True),
        "backward": _Entry("search.backward"),
        "intervals": _Entry("search.intervals"),
        "anneal": _Entry("search.anneal", fetches=True),
        "auto": _Entry("auto", fetches=True),
    }
)


@without_inner_frames
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
        progress: called with every better solution, by ``auto`` with every better bound, too, and
            with the one that is returned.

    Returns:
        A solution whose schedule is legal, within the budget, with ``usage`` filled in.

    Raises:
        InfeasibleBudgetError: proved that no schedule fits.
        ScheduleNotFoundError: none found, none proved impossible.
        ValueError, TypeError: wrong arguments.
    """
    check_name("solver", solver, SOLVERS)
    check_seconds("time_limit_s", time_limit_s)
    check_int("seed", seed, least=0)
    check_floor(problem)
    solution = SOLVERS[solver](problem, time_limit_s=time_limit_s, seed=seed, progress=progress)
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
