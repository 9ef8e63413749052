"""Solving for a plan in a process of its own, while training goes on.

The process is a fresh interpreter (``python -m keras_remat.planning.beside FOLDER``). It imports no
framework: it gets the problem and the memory model, which knows what was measured so far. Request
and answer are pickled files in a folder that one user alone can read; what a library prints into
the process is no answer. The process ends with the one that has started it, which keeps its stdin
open while it lives.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError
from keras_remat.planning.plan import Plan
from keras_remat.planning.plan_problem import plan_problem
from keras_remat.solvers.engines.interpreter import environment

_REQUEST, _ANSWER, _ERRORS = "request", "answer", "errors"


class PlanProcessError(RematError):
    """The process that plans ended without an answer, for want of memory for instance."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is solved for.

    Args:
        budgets_bytes: what the device may have in use; the first one that is met counts.
        memory: predicts the device's peaks.
        auto_solver: what ``"auto"`` stands for.
        solver, time_limit_s, seed, known: as in
            :func:`keras_remat.planning.plan_problem.plan_problem`.
    """

    problem: Problem
    budgets_bytes: Sequence[int]
    memory: MemoryModel
    auto_solver: str
    solver: str
    time_limit_s: float
    seed: int
    known: Schedule | None = None

    def plan(self) -> Plan | None:
        """Returns the plan for the first budget that one is found for; ``None`` without one."""
        for budget in self.budgets_bytes:
            try:
                return plan_problem(
                    self.problem,
                    budget,
                    self,
                    solver=self.solver,
                    time_limit_s=self.time_limit_s,
                    seed=self.seed,
                    known=self.known,
                )
            except (InfeasibleBudgetError, ScheduleNotFoundError):
                continue
        return None


class PlanProcess:
    """A process that answers one request; it is killed when nothing refers to it any more."""

    def __init__(self, request: Request):
        self._problem = request.problem
        self._folder = TemporaryDirectory(prefix="keras_remat_")
        folder = Path(self._folder.name)
        (folder / _REQUEST).write_bytes(pickle.dumps(request))
        with (folder / _ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keras_remat.planning.beside", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment(),
                start_new_session=True,  # Ctrl-C is the user's way to end training, not planning
            )
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    @property
    def has_ended(self) -> bool:
        """Returns whether there is nothing to wait for."""
        return self._process.poll() is not None

    def plan(self) -> Plan | None:
        """Waits for the answer and returns it, ``None`` where no schedule was found; once.

        Raises:
            PlanProcessError: the process ended without one, or its files are gone.
        """
        status, folder = self._process.wait(), Path(self._folder.name)
        try:
            if status:
                errors = (folder / _ERRORS).read_text(errors="replace")[-500:].strip()
                raise PlanProcessError(f"the process that plans ended with {status}: {errors}")
            found: Plan | None = pickle.loads((folder / _ANSWER).read_bytes())
        except OSError as error:
            raise PlanProcessError(f"what the process answered cannot be read: {error}") from error
        finally:
            self.end()
        return None if found is None else replace(found, problem=self._problem)

    def end(self) -> None:
        """Kills the process and removes its files; a second time, it does nothing."""
        self._end()


def _end(process: subprocess.Popen[bytes], folder: TemporaryDirectory[str]) -> None:
    process.kill()
    process.communicate()
    folder.cleanup()


def main(folder: Path) -> None:
    """Answers the request in a folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request: Request = pickle.loads((folder / _REQUEST).read_bytes())
    found = request.plan()
    answer = None if found is None else replace(found, problem=None)
    (folder / _ANSWER).write_bytes(pickle.dumps(answer))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    # classes are pickled by the name of their module, and this one is called __main__ here
    from keras_remat.planning import beside

    beside.main(Path(sys.argv[1]))
