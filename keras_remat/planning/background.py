"""Solves for a plan in a process of its own, while training goes on.

The process is a fresh interpreter (``python -m keras_remat.planning.background FOLDER``). It
imports no framework: the request's memory model knows the measurements so far. Request and answer
are files, so that text which a library prints is not mistaken for an answer. They are pickled, in a
folder that only one user can read. The training process keeps the new process's stdin open while it
lives. When it ends, the new process removes the folder and ends, too.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from keras_remat.core import interpreter
from keras_remat.errors import BudgetError, RematError
from keras_remat.planning.plan import Plan
from keras_remat.planning.request import PlanRequest, plan_for

_REQUEST, _ANSWER, _ERRORS = "request", "answer", "errors"


class PlanProcessError(RematError):
    """Reports that the planning process ended without an answer, for lack of memory perhaps."""


class PlanProcess:
    """Runs a process that answers one request.

    The process is killed when nothing refers to this object any more.
    """

    def __init__(self, request: PlanRequest):
        self._problem = request.problem
        self._folder = TemporaryDirectory(prefix="keras_remat_")
        folder = Path(self._folder.name)
        (folder / _REQUEST).write_bytes(pickle.dumps(request.elsewhere()))
        with (folder / _ERRORS).open("wb") as errors:
            self._process = interpreter.start(
                "-m", "keras_remat.planning.background", str(folder),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._folder)

    @property
    def has_ended(self) -> bool:
        """Returns whether the process has ended, so that its answer is there at once."""
        return self._process.poll() is not None

    def answer(self) -> Plan:
        """Waits for the plan and returns it; may be called once.

        Raises:
            InfeasibleBudgetError, ScheduleNotFoundError: there is no plan.
            PlanProcessError: the process ended without an answer, or its files are gone.
        """
        status, folder = self._process.wait(), Path(self._folder.name)
        try:
            if status:
                errors = (folder / _ERRORS).read_text(errors="replace")[-500:].strip()
                raise PlanProcessError(f"the process that plans ended with {status}: {errors}")
            found: Plan | Exception = pickle.loads((folder / _ANSWER).read_bytes())
        except OSError as error:
            raise PlanProcessError(f"what the process answered cannot be read: {error}") from error
        finally:
            self.end()
        if isinstance(found, Exception):
            raise found
        return replace(found, problem=self._problem)

    def end(self) -> None:
        """Kills the process and removes its files; a second time, it does nothing."""
        self._end()


def _end(process: subprocess.Popen[bytes], folder: TemporaryDirectory[str]) -> None:
    process.kill()
    process.communicate()
    folder.cleanup()


def main(folder: Path) -> None:
    """Answers the request in a folder."""
    interpreter.end_with_parent(folder)
    request: PlanRequest = pickle.loads((folder / _REQUEST).read_bytes())
    answer: Plan | Exception
    try:
        answer = replace(plan_for(request), problem=None)
    except BudgetError as error:
        answer = error
    (folder / _ANSWER).write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    # classes are pickled by the name of their module, and this one is called __main__ here
    from keras_remat.planning import background

    background.main(Path(sys.argv[1]))
