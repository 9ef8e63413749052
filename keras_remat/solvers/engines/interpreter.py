"""A fresh interpreter that can import this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def start(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Starts one that an interrupt of the caller does not end.

    Args:
        arguments: of the interpreter.
        options: of ``subprocess.Popen``.

    Raises:
        OSError: none can be started; an embedded interpreter may not know its own file.
    """
    command = [sys.executable or "", *arguments]
    return subprocess.Popen(command, env=environment(), start_new_session=True, **options)


def environment() -> dict[str, str]:
    """Returns the caller's environment, with this package importable however the caller found
    it."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
