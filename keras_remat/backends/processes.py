"""Lets processes that train one model together make the same decisions.

Each process runs the same script on its own devices, and every step is one program on all devices.
If one process ran another program, or none, the others would wait for ever. So no decision may
depend on anything that differs between processes. Plans and predictions are the first process's
(:func:`decided_once`). The largest of the processes' measurements counts. Where one process cannot
make something, none makes it (:func:`made_by_all`). Where a process fails, the others end with its
reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

Result = TypeVar("Result")
_Arguments = ParamSpec("_Arguments")


class Processes:
    """Represents all processes that train a model, as seen by one of them. In this class there is
    only one.

    All processes call every method but :meth:`end` and :meth:`fail`, in the same order.
    """

    count: int = 1
    """Number of processes."""

    def begin(self, setting: Mapping[str, str]) -> None:
        """Begins a ``fit`` once all processes have reached it.

        Args:
            setting: name → a setting that must be the same in all processes.

        Raises:
            UnsupportedModelError: a setting differs.
            ProcessFailedError: another process has failed, or did not reach the ``fit``.
        """

    def end(self) -> None:
        """Ends the ``fit``; a second call does nothing."""

    def fail(self, error: BaseException) -> None:
        """Ends the ``fit`` of all processes, because of an error in this one."""

    def most(self, *numbers: int) -> list[int]:
        """Returns for each number the largest of all processes."""
        return list(numbers)

    def least(self, *numbers: int) -> list[int]:
        """Returns for each number the smallest of all processes."""
        return list(numbers)

    def of_first(self, make: Callable[[], Result]) -> Result:
        """Returns the first process's result of ``make``, or raises its error. The others do not
        call ``make``."""
        return make()

    def of_all(self, make: Callable[[], Result]) -> Result:
        """Returns this process's result of ``make`` if ``make`` works in all processes; else raises
        the error of the first process where it fails."""
        return make()


#: Method of an object that has a ``_backend``.
_Method = Callable[Concatenate[Any, _Arguments], Result]


def decided_once(method: _Method[_Arguments, Result]) -> _Method[_Arguments, Result]:
    """Makes a method return or raise, in all processes, what it does in the first one.

    Args:
        method: method of an object that has a ``_backend``; its result can be pickled.
    """
    return _together(lambda processes, make: processes.of_first(make), method)


def made_by_all(method: _Method[_Arguments, Result]) -> _Method[_Arguments, Result]:
    """Makes a method raise in all processes the error that it raises in one of them.

    Args:
        method: method of an object that has a ``_backend``.
    """
    return _together(lambda processes, make: processes.of_all(make), method)


def _together(
    verb: Callable[[Processes, Callable[[], Result]], Result], method: _Method[_Arguments, Result]
) -> _Method[_Arguments, Result]:
    @functools.wraps(method)
    def together(self: Any, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> Result:
        return verb(self._backend.processes, lambda: method(self, *args, **options))

    return together
