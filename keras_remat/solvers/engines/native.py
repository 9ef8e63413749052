"""Compiles the inner loops of the searches with Numba, and runs them as Python without it.

Why Numba: a million moves a second need machine code, users have no compiler, and a wheel of our
own for every platform would have to be built and tested on each. Numba has wheels for Linux, macOS
and Windows (numba 4 MB and llvmlite 55 MB to download on Linux, 210 MB unpacked), supports the
NumPy releases this package runs on, and compiles the source that is also the oracle of its tests.
Importing it takes half a second, so it is imported only when a search needs it.

A *kernel* module holds functions of flat sequences and numbers under :func:`jit`. They are written
so that arrays and lists serve alike. :func:`plain` gives the same functions as ordinary Python.

Compiling takes about ten seconds, once per machine and release: Numba keeps the machine code in
``__pycache__``, or in the user's cache folder where that cannot be written. No solve waits for it.
:func:`begin` compiles in a process of its own, and until :func:`is_compiled` says that its machine
code is there, searches run as Python, at a fiftieth of the speed. So the first solve after an
installation makes fewer moves than the second. Where nothing can be written, or Numba is missing,
all solves run as Python.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar, cast

from keras_remat.core import interpreter

F = TypeVar("F", bound=Callable[..., Any])

KERNEL = "keras_remat.solvers.engines.moves"
WARM_UP = "from keras_remat.solvers.search import anneal; anneal.warm_up()"
"""What the process that compiles runs."""
LONGEST_S = 120.0
"""Seconds in which compiling is done on any machine."""


def jit(function: F) -> F:
    """Compiles a function of a kernel module when it is first called, where Numba can."""
    try:
        return compiled_once(function)
    except (ImportError, RuntimeError):
        function.py_func = function  # type: ignore[attr-defined]
        return function


def compiled_once(function: F) -> F:
    """Compiles a function when it is first called on a machine.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: there is no folder for its machine code.
    """
    from numba import njit

    return cast(F, njit(cache=True)(function))


def kernel(*, compiled: bool) -> Any:
    """Returns the functions of the kernel, compiled or as ordinary Python for lists.

    In Python a function ``f`` that has a twin ``f_in_numpy`` is replaced by it.
    """
    module = importlib.import_module(KERNEL)
    if compiled:
        return module
    space = dict(vars(module))
    for name, function in vars(module).items():
        if hasattr(function, "py_func"):
            source = space.get(f"{name}_in_numpy", function.py_func)
            space[name] = FunctionType(source.__code__, space, name, source.__defaults__)
    return SimpleNamespace(**space)


@cache
def begin() -> subprocess.Popen[bytes] | None:
    """Starts the process that compiles, or finds that everything is compiled; once. ``None`` where
    no process can be started."""
    null = subprocess.DEVNULL
    try:
        return interpreter.start("-c", WARM_UP, stdin=null, stdout=null, stderr=null)
    except OSError:
        return None


def is_compiled(wait_s: float = 0.0) -> bool:
    """Returns whether the machine code is there.

    Args:
        wait_s: seconds to wait for it. Where it has been compiled before, a second is enough.
    """
    process = begin()
    try:
        return process is not None and process.wait(max(wait_s, 0.0)) == 0
    except subprocess.TimeoutExpired:
        return False
