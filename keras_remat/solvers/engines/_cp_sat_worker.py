"""Runs OR-Tools: reads 0-1 programs on stdin, writes incumbents on stdout, a JSON object a line.

It is a process of its own because OR-Tools and TensorFlow, loaded into one process, crash it (both
ship Abseil). That also keeps the solver's memory and threads out of a training process, and makes a
hard time limit possible. :mod:`keras_remat.solvers.engines.cp_sat` runs it as
``python -m keras_remat.solvers.engines._cp_sat_worker``, and documents the messages.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
from typing import Any

from ortools.sat.python import cp_model


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Stream(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Writes every incumbent as the list of variables that are 1."""

    def __init__(self, variables: list[Any]):
        super().__init__()
        self.variables = variables

    def on_solution_callback(self) -> None:
        ones = [at for at, variable in enumerate(self.variables) if self.value(variable)]
        _send({"ones": ones})


def build(program: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns the CP-SAT model of a program and its variables."""
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(program["variables"])]
    for at, left, right in program["clauses"]:
        clause = [variables[left]]
        if at >= 0:
            clause.append(variables[at].negated())
        if right >= 0:
            clause.append(variables[right])
        model.add_bool_or(clause)
    for indexes, coefficients, bound in program["rows"]:
        model.add(
            cp_model.LinearExpr.weighted_sum([variables[i] for i in indexes], coefficients) <= bound
        )
    indexes, coefficients = program["objective"]
    model.minimize(cp_model.LinearExpr.weighted_sum([variables[i] for i in indexes], coefficients))
    if program["hint"] is not None:
        ones = set(program["hint"])
        for at, variable in enumerate(variables):
            model.add_hint(variable, int(at in ones))
    return model, variables


def solve(program: dict[str, Any]) -> None:
    """Solves a program; writes its incumbents, and a last line with the status."""
    model, variables = build(program)
    solver = cp_model.CpSolver()
    for name, value in program["parameters"].items():
        setattr(solver.parameters, name, value)
    status = solver.solve(model, _Stream(variables))
    work = solver.response_proto.deterministic_time
    _send({"status": solver.status_name(status), "work": work})


def main() -> None:
    """Solves one program after the other, until the parent process ends.

    The parent keeps stdin open while it lives, so its end is noticed however it ends.
    """
    limits = [
        int(sys.argv[1]),
        *(
            limit
            for limit in resource.getrlimit(resource.RLIMIT_AS)
            if limit != resource.RLIM_INFINITY
        ),
    ]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), min(limits)))
    programs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(programs,), daemon=True).start()
    while True:
        solve(json.loads(programs.get()))


def _read(programs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        programs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
