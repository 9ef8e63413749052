"""Compiles the inner loops of the searches with Numba, and runs them as Python without it.

Why Numba: a million moves a second need machine code, users have no compiler, and a wheel of our
own for every platform would have to be built and tested on each. Numba has wheels for Linux, macOS
and Windows (numba 4 MB and llvmlite 55 MB to download on Linux, 210 MB unpacked), supports the
NumPy releases this package runs on, and compiles the source that is also the oracle of its tests.
Importing it takes half a second, so it is imported only when a search needs it.

A *kernel* module holds functions of flat sequences, records and numbers under :func:`jit` or
:func:`entry`. They are written so that arrays and lists serve alike, and :func:`kernel` gives them
as machine code or as ordinary Python.

Compiling takes about half a minute, once per machine and release: Numba keeps the machine code in
``__pycache__``, or in the user's cache folder where that cannot be written. No solve waits for it.
:func:`begin` compiles in a process of its own, and until :func:`is_compiled` says that its machine
code is there, searches run as Python: moves at a fiftieth of the speed, and greedy's passes at a
half to a tenth (``benchmarks/ablation.py native``). So the first solve after an installation
makes fewer moves than the second. Where nothing can be written, or Numba is missing, all solves run
as Python.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

from keras_remat.core import interpreter

F = TypeVar("F", bound=Callable[..., Any])

WARM_UP = "from keras_remat.solvers.search import anneal; anneal.warm_up()"
"""Python code that the compiling process runs."""
LONGEST_S = 180.0
"""Seconds after which compiling is done on any machine."""


def jit(function: F) -> F:
    """Marks a function that only functions of its kernel module call; :func:`kernel` compiles it.

    It has no code that Python could call it by, which would take a third of the compiling.
    """
    function.numba_options = {  # type: ignore[attr-defined]
        "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    }  # fmt: skip
    return function


def entry(function: F) -> F:
    """Marks a function of a kernel module that Python calls; :func:`kernel` compiles it."""
    function.numba_options = {"no_cfunc_wrapper": True}  # type: ignore[attr-defined]
    return function


@cache
def kernel(module: ModuleType, *, compiled: bool) -> Any:
    """Returns the functions of a kernel module, compiled or as ordinary Python for lists.

    In Python a function ``f`` that has a twin ``f_in_numpy`` is replaced by it.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: there is no folder for its machine code.
    """
    if compiled:
        from numba import njit
    space = dict(vars(module))
    for name, function in vars(module).items():
        if hasattr(function, "numba_options"):
            source = function if compiled else space.get(f"{name}_in_numpy", function)
            own = FunctionType(source.__code__, space, name, source.__defaults__)
            space[name] = njit(cache=True, **function.numba_options)(own) if compiled else own
    return SimpleNamespace(**space)


@cache
def begin() -> subprocess.Popen[bytes] | None:
    """Starts the process that compiles, or finds that everything is compiled; only once.

    Returns ``None`` where no process can be started.
    """
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
