"""0-1 programs solved by CP-SAT in a process of its own, incumbent by incumbent.

CP-SAT, and not a MILP solver, because these programs are all Booleans, implications and a few thousand knapsack rows: clause learning
and large-neighbourhood search find good schedules early, and the solver starts from a given one. The process is a fresh
interpreter, so it imports neither TensorFlow nor anything else of the caller, and is killed when the iteration ends, whether by
exhaustion, by ``close`` or by an exception such as ``KeyboardInterrupt``.

One search thread, and the linear relaxation at its fullest (``linearization_level`` 2). One thread repeats itself for a seed, and CP-SAT
counts its *work* (``max_deterministic_time``, about 0.1 to 0.2 units a second here), so that a search that ends by its work limit gives
the same incumbents on every machine. It is no sacrifice: on these programs the relaxation does the work. ResNet50 at half its peak was
solved to its optimum in 1.4 s, by CP-SAT's eight default threads on two cores in 3.4 s and by its deterministic
multi-thread mode (``interleave_search``) in 22 s.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_remat.errors import MissingPackageError, RematError

MEMORY_LIMIT_BYTES = 4 * 2**30
STARTUP_S = 1.0
"""Seconds that starting the process and building the model take, off the solver's own limit."""
SINGLE_THREAD = {"num_workers": 1, "linearization_level": 2}


@dataclass
class Program:
    """Minimize ``Σ cost[i]·x[i]`` over 0-1 variables.

    Attributes:
        cost: one integer per variable.
        clauses: ``(a, b, c)`` for ``x[a] ≤ x[b] + x[c]``; ``a`` = −1 stands for 1 and ``c`` = −1 for 0.
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
class Incumbent:
    """What the solver knows at one moment.

    Args:
        ones: the variables that are 1 in the best assignment so far, ``None`` when only ``status`` or ``bound`` is news.
        bound: no assignment costs less; ``None`` when unknown.
        status: ``""`` while it runs, then ``"OPTIMAL"``, ``"FEASIBLE"``, ``"INFEASIBLE"`` or ``"UNKNOWN"``.
        peak_bytes: most memory the solver's process held; only with ``status``.
        work: CP-SAT's deterministic time; only with ``status``.
    """

    ones: frozenset[int] | None
    bound: int | None
    status: str = ""
    peak_bytes: int | None = None
    work: float | None = None


def available() -> bool:
    """Whether OR-Tools is installed; does not import it."""
    return importlib.util.find_spec("ortools") is not None


def require_ortools() -> None:
    """Raises :class:`MissingPackageError` unless OR-Tools is installed."""
    if not available():
        raise MissingPackageError("ortools", "Solving with CP-SAT", "solvers")


def solve_program(
    program: Program,
    *,
    time_limit_s: float,
    work_limit: float | None = None,
    seed: int = 0,
    parameters: dict[str, Any] | None = None,
) -> Iterator[Incumbent]:
    """Yields incumbents as CP-SAT finds them and a last one with its status.

    Args:
        program: what to minimize.
        time_limit_s: seconds for all of it, hard: the process is killed then.
        work_limit: units of CP-SAT's deterministic time; what is found within them depends on the program and the seed alone.
        seed: of CP-SAT's random choices.
        parameters: more CP-SAT parameters by name.

    Raises:
        MissingPackageError: OR-Tools is not installed.
        RematError: the process ended without an answer, with the last lines it wrote.
    """
    require_ortools()
    used = [at for at, cost in enumerate(program.cost) if cost]
    deadline = time.monotonic() + time_limit_s
    message: dict[str, Any] = {
        "variables": len(program.cost), "objective": (used, [program.cost[at] for at in used]), "clauses": program.clauses,
        "rows": program.rows, "hint": program.hint, "seed": seed,
        "parameters": SINGLE_THREAD | (parameters or {}), "memory_limit_bytes": MEMORY_LIMIT_BYTES,
    }  # fmt: skip
    if work_limit is not None:
        message["parameters"] |= {"max_deterministic_time": work_limit}
    message["time_limit_s"] = max(0.1, time_limit_s - STARTUP_S)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "keras_remat.solvers._cp_sat_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            yield from _conversation(process, json.dumps(message), deadline)
            if process.poll() not in (None, 0):
                errors.seek(0)
                raise RematError(f"the CP-SAT process ended with status {process.returncode}: {errors.read()[-500:].strip()}")
        finally:
            process.kill()
            process.communicate()


def _conversation(process: subprocess.Popen[str], message: str, deadline: float) -> Iterator[Incumbent]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def write() -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(message + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return  # the process is gone; its exit status and stderr tell why

    for target in (read, write):
        threading.Thread(target=target, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield Incumbent(None, None, "UNKNOWN")
            return
        if line is None:
            process.wait()
            return
        news = json.loads(line)
        ones = frozenset(news["ones"]) if "ones" in news else None
        yield Incumbent(ones, news.get("bound"), news.get("status", ""), news.get("peak_bytes"), news.get("work"))
        if "status" in news:
            return


def _environment() -> dict[str, str]:
    """The caller's environment, with this package importable however the caller found it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
