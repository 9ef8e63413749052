"""Runs cases of ``replicas_case.py`` in processes of their own, each once."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
#: Cases that are run together: starting a process takes longer than each of them.
TOGETHER = ("refusals", "undone", "memory", "embedding")
#: A replica that waits for another for ever is an error after so many seconds.
TIMEOUT_S = 300


def outcome(case):
    """Returns what came of a case."""
    return _run(TOGETHER if case in TOGETHER else (case,))[case]


@functools.cache
def _run(cases):
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "replicas_case.py"), *cases],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
