"""Runs cases of ``replicas_case.py`` in processes of their own, each once."""

import functools
from pathlib import Path

from own_process import came_of

#: Cases that are run together, those of one test file: starting a process takes longer than each of
#: them.
TOGETHER = (("embedding", "refusals"), ("resident", "memory", "undone", "models"))


def outcome(case):
    """Returns what came of a case."""
    return _run(next((cases for cases in TOGETHER if case in cases), (case,)))[case]


@functools.cache
def _run(cases):
    return came_of(Path(__file__).parent / "replicas_case.py", *cases)
