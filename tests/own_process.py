"""Runs Python in a process of its own: a process chooses devices and imports modules once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
#: A device that waits for another for ever is an error after so many seconds.
TIMEOUT_S = 300
#: Names, in the environment of a process that runs one test, that test.
_ALONE = "KERAS_REMAT_TESTS_ALONE"


def search_path(*first):
    """Returns ``PYTHONPATH`` with folders in front: packages may lie in one that it names."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join((*map(str, first), *filter(None, inherited)))


def environment(**variables):
    """Returns this process's, with the package and the tests' modules found first, and
    ``variables``."""
    path = search_path(TESTS.parent, TESTS)
    return os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"} | variables


def output_of(*words, **options):
    """Returns what ``python WORDS`` prints; it has to end well.

    Args:
        words: of its command line, such as a script and its arguments.
        options: of :func:`subprocess.run`.
    """
    options = {"env": environment(), "timeout": TIMEOUT_S} | options
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def ran_alone(file, test, **variables):
    """Runs a test in a process of its own, where it has to pass; returns whether it did, which is
    not so in that process.

    Args:
        file: which the test is in.
        test: its name.
        variables: of that process's environment.
    """
    if os.environ.get(_ALONE) == test:
        return False
    words = ("-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"{file}::{test}")
    output_of(*words, env=environment(**{_ALONE: test}, **variables))
    return True


def came_of(*words, **options):
    """Returns what ``python WORDS`` prints last, as JSON; options as of :func:`output_of`."""
    return json.loads(output_of(*words, **options).splitlines()[-1])


def free_port():
    """Returns a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
