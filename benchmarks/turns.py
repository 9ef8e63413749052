"""Turns at one device: many processes prepare side by side, and each measures alone.

A process says that it is ready and waits for the others, then takes the device for itself. What it
measures then has no other process beside it, and what takes a CPU long is done by all at once.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Variable: a folder, the number of processes, and the time after which nobody is waited for.
VARIABLE = "TURNS"
_POLL_S = 0.2


def variables(folder: Path, processes: int, patience_s: float) -> dict[str, str]:
    """Returns what tells processes of their turns.

    Args:
        folder: of theirs; it is made anew.
        processes: that take part.
        patience_s: seconds from now, after which they do not wait for those that are not ready.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    return {VARIABLE: f"{folder}|{processes}|{time.time() + patience_s}"}


def ready(name: str) -> None:
    """Says that a process will no longer use the device outside of its turn; also after a fault.

    Without turns nothing happens.
    """
    if VARIABLE in os.environ:
        folder, _, _ = os.environ[VARIABLE].split("|")
        (Path(folder) / f"{name}.ready").touch()


@contextmanager
def alone(name: str) -> Iterator[None]:
    """The device for one process, when all are ready or nobody is waited for any more."""
    if VARIABLE not in os.environ:
        yield
        return
    folder, processes, until = os.environ[VARIABLE].split("|")
    ready(name)
    while time.time() < float(until) and _count(folder) < int(processes):
        time.sleep(_POLL_S)
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _count(folder: str) -> int:
    return sum(1 for _ in Path(folder).glob("*.ready"))
