"""Solves 0-1 programs by CP-SAT in a process of its own, incumbent by incumbent.

CP-SAT is used, and not a MILP solver, because these programs are all Booleans, implications and a
few thousand knapsack rows: clause learning and large-neighbourhood search find good schedules
early, and the solver starts from a given one. The process is a fresh interpreter, so it imports
neither TensorFlow nor anything else of the caller. It is killed when its context is left, whether
at the end or by an exception such as ``KeyboardInterrupt``.

It runs one search thread, with the linear relaxation at its fullest (``linearization_level`` 2).
One thread repeats itself for a seed, and CP-SAT counts its *work* (``max_deterministic_time``), so
that a search that ends by its work limit gives the same incumbents on every machine.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from keras_remat.core import interpreter
from keras_remat.errors import MissingPackageError, RematError

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Bytes of address space that the process may have."""
STARTUP_S = 1.0
"""Seconds for starting the process and building the model, taken off the solver's own limit."""


class CpSatProcessError(RematError):
    """Reports that CP-SAT's process did not start, or ended without an answer.

    Most likely it lacked memory.
    """


@dataclass
class Program:
    """Asks for the least ``Σ cost[i]·x[i]`` over 0-1 variables.

    Attributes:
        cost: one integer per variable.
        clauses: ``(a, b, c)`` for ``x[a] ≤ x[b] + x[c]``; ``a`` = −1 stands for 1 and ``c`` = −1
            for 0.
        rows: ``(indexes, coefficients, bound)`` for ``Σ coefficient·x[index] ≤ bound``.
        hint: indexes of the variables that are 1 in a known solution, or ``None``.
    """

    cost: list[int] = field(default_factory=list)
    clauses: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[tuple[list[int], list[int], int]] = field(default_factory=list)
    hint: list[int] | None = None

    def variable(self, cost: int = 0) -> int:
        """Adds a variable and returns its index."""
        self.cost.append(cost)
        return len(self.cost) - 1


@dataclass(frozen=True)
class Answer:
    """Holds the solver's state at one moment.

    Args:
        ones: the variables that are 1 in the best assignment so far; ``None`` when only ``status``
            has changed.
        status: ``""`` while it runs, then ``"OPTIMAL"``, ``"FEASIBLE"``, ``"INFEASIBLE"`` or
            ``"UNKNOWN"``.
        work: CP-SAT's deterministic time; only with ``status``.
    """

    ones: frozenset[int] | None
    status: str = ""
    work: float | None = None


def available() -> bool:
    """Returns whether OR-Tools is installed; does not import it."""
    return importlib.util.find_spec("ortools") is not None


def require_ortools() -> None:
    """Raises :class:`MissingPackageError` unless OR-Tools is installed."""
    if not available():
        raise MissingPackageError("ortools", "Solving with CP-SAT", "solvers")


class Worker:
    """Runs a process that solves one program after the other; a context manager that ends it.

    Raises:
        CpSatProcessError: no process can be started.
    """

    def __init__(self) -> None:
        try:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        except OSError as error:
            raise CpSatProcessError(f"no temporary file can be made: {error}") from error
        try:
            self._process = interpreter.start(
                "-m",
                "keras_remat.solvers.engines._cp_sat_worker",
                str(MEMORY_LIMIT_BYTES),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise CpSatProcessError(f"the CP-SAT process did not start: {error}") from error
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._deadline = float("inf")
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def start(
        self,
        program: Program,
        *,
        time_limit_s: float,
        work_limit: float = float("inf"),
        seed: int = 0,
    ) -> None:
        """Sends a program; the answers to the one before must have been read.

        Args:
            program: the program to minimize.
            time_limit_s: seconds for the whole call, a hard limit.
            work_limit: units of CP-SAT's deterministic time; the answers within them depend on the
                program and the seed alone.
            seed: seed of CP-SAT's random choices.
        """
        used = [at for at, cost in enumerate(program.cost) if cost]
        message = {
            "variables": len(program.cost),
            "objective": (used, [program.cost[at] for at in used]),
            "clauses": program.clauses,
            "rows": program.rows,
            "hint": program.hint,
            "parameters": {
                "num_workers": 1,
                "linearization_level": 2,
                "random_seed": seed % 2**31,  # OR-Tools takes no larger ones
                "max_time_in_seconds": max(0.1, time_limit_s - STARTUP_S),
                "max_deterministic_time": work_limit,
            },
        }
        self._deadline = time.monotonic() + time_limit_s
        threading.Thread(
            target=self._write, args=(json.dumps(message) + "\n",), daemon=True
        ).start()

    def answers(self) -> Iterator[Answer]:
        """Yields the answers of the process; the last one has a status.

        The status is ``"UNKNOWN"`` when the time limit ended the process, which cannot be used any
        more then.

        Raises:
            CpSatProcessError: the process ended without an answer, with the last lines it wrote.
        """
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                yield Answer(None, "UNKNOWN")
                return
            if line is None:
                status = self._process.wait()
                self._errors.seek(0)
                raise CpSatProcessError(
                    f"the CP-SAT process ended with status {status}: "
                    f"{self._errors.read()[-500:].strip()}"
                )
            news = json.loads(line)
            ones = frozenset(news["ones"]) if "ones" in news else None
            yield Answer(ones, news.get("status", ""), news.get("work"))
            if "status" in news:
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _write(self, message: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # the process is gone (or closed, by us); its exit status and stderr tell why
