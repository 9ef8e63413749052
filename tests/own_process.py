"""Runs a script of the tests in a process of its own: devices are chosen once per process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
#: A device that waits for another for ever is an error after so many seconds.
TIMEOUT_S = 300


def came_of(script, *arguments):
    """Returns what a script prints last, as JSON.

    Args:
        script: its path.
        arguments: words of its command line.
    """
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def free_port():
    """Returns a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
