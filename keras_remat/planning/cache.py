"""Keeps measured plans in a folder, so that a later ``fit`` of the same step begins with one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.errors import InvalidProblemError, RematError
from keras_remat.planning.plan import Plan, load_plan


@dataclass(frozen=True)
class PlanCache:
    """Keeps plans by graph and budget, for one setting.

    Args:
        folder: the folder of the plan files; it is made when the first plan is kept.
        setting: everything else that a plan depends on: device, versions, options.
    """

    folder: Path
    setting: tuple[str, ...]

    def path(self, graph: Graph, budget_bytes: int) -> Path:
        """Returns the path of the plan of a graph under a budget."""
        key = hashlib.sha256("\n".join(self.setting).encode()).hexdigest()
        return self.folder / f"{graph.fingerprint[:32]}_{budget_bytes}_{key[:16]}.plan.json"

    def read(self, problem: Problem, budget_bytes: int) -> Plan | None:
        """Returns the measured plan for a problem; ``None`` where the cache has none.

        Raises:
            InvalidProblemError: the file is no plan for this graph.
            OSError: it cannot be read.
        """
        path = self.path(problem.graph, budget_bytes)
        if not path.exists():
            return None
        plan = load_plan(path)
        try:
            plan.check(problem)
        except RematError as error:
            raise InvalidProblemError(str(error), source=str(path)) from error
        return plan

    def keep(self, plan: Plan, graph: Graph, budget_bytes: int) -> None:
        """Keeps a measured plan.

        Raises:
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        plan.save(self.path(graph, budget_bytes))
