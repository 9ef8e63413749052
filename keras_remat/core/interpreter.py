"""Starts fresh interpreters that can import this package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

#: Variables of these kinds choose devices, compilers or dtypes.
_OF_A_FRAMEWORK = ("JAX_", "XLA_", "TF_", "KERAS_BACKEND", "CUDA_", "NVIDIA_", "HIP_", "ROCR_")


def start(
    *arguments: str, variables: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Starts an interpreter, which an interrupt of the caller does not end.

    With Ctrl-C, the user ends training, and not the processes that run beside it.

    Args:
        arguments: command-line arguments of the interpreter.
        variables: its environment variables; those of :func:`environment`, if not given.
        options: options of ``subprocess.Popen``.

    Raises:
        OSError: no interpreter can be started; an embedded one may not know its own file.
    """
    command = [sys.executable or "", *arguments]
    variables = environment() if variables is None else variables
    return subprocess.Popen(command, env=variables, start_new_session=True, **options)


def for_cards(framework: str = "jax") -> dict[str, str]:
    """Returns the caller's environment, changed so that Keras runs on a framework on the CPU.

    A process that compiles for a card that is not there then works whatever the caller chose.
    """
    kept = {
        name: value for name, value in environment().items() if not name.startswith(_OF_A_FRAMEWORK)
    }
    chosen = {"KERAS_BACKEND": framework, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**kept, **chosen, "CUDA_VISIBLE_DEVICES": ""}


def environment() -> dict[str, str]:
    """Returns the caller's environment, in which this package can always be imported."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent(folder: Path) -> None:
    """Ends this process as soon as the one that started it has ended, and removes their folder.

    A process that is killed cannot remove a folder, nor end the processes that it started.

    Args:
        folder: holds the files that the two exchange; the other process removes it where it can.
    """
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: Path) -> None:
    # the other process keeps its end open while it lives. Not sys.stdin.read: the lock of its
    # buffer would outlast the interpreter
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
