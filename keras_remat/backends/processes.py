"""Processes that train one model together: what is decided in one of them holds in all.

Each runs the same script on devices of its own, and every step is one program on all devices. A
process that ran another program, or none, would be waited for without end. So nothing that differs
from one process to another may decide: plans and predictions are the first process's
(:func:`decided_once`), of what is measured the most counts, and what one of them cannot make
(:func:`made_by_all`) none has. Where a process fails, the others end with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

Result = TypeVar("Result")
_Arguments = ParamSpec("_Arguments")


class Processes:
    """Stands for all processes that train a model, as one of them sees them; here it is the only
    one.

    Every method but :meth:`end` and :meth:`fail` is called by all of them, in the same order.
    """

    count: int = 1
    """Says how many there are."""

    def begin(self, setting: Mapping[str, str]) -> None:
        """Begins a ``fit``, once all have come to it.

        Args:
            setting: name → what has to be the same in all of them.

        Raises:
            UnsupportedModelError: it is not the same.
            ProcessFailedError: another process has failed, or did not come.
        """

    def end(self) -> None:
        """Ends the ``fit``; a second time, it does nothing."""

    def fail(self, error: BaseException) -> None:
        """Ends the ``fit`` of all processes, because of an error in this one."""

    def most(self, *numbers: int) -> list[int]:
        """Returns the largest that any process has of each number."""
        return list(numbers)

    def least(self, *numbers: int) -> list[int]:
        """Returns the smallest that any process has of each number."""
        return list(numbers)

    def of_first(self, make: Callable[[], Result]) -> Result:
        """Returns, or raises, what the first process makes; the others make nothing."""
        return make()

    def of_all(self, make: Callable[[], Result]) -> Result:
        """Returns what this process makes, where all of them can make it; else raises the error of
        the first one that cannot."""
        return make()


#: A method of an object with a ``_backend``.
_Method = Callable[Concatenate[Any, _Arguments], Result]


def decided_once(method: _Method[_Arguments, Result]) -> _Method[_Arguments, Result]:
    """Makes a method return, in all processes, what it returns or raises in the first one.

    Args:
        method: of an object with a ``_backend``; what it returns can be pickled.
    """
    return _together(lambda processes, make: processes.of_first(make), method)


def made_by_all(method: _Method[_Arguments, Result]) -> _Method[_Arguments, Result]:
    """Makes a method raise, in all processes, what it raises in one of them.

    Args:
        method: of an object with a ``_backend``.
    """
    return _together(lambda processes, make: processes.of_all(make), method)


def _together(
    verb: Callable[[Processes, Callable[[], Result]], Result], method: _Method[_Arguments, Result]
) -> _Method[_Arguments, Result]:
    @functools.wraps(method)
    def together(self: Any, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> Result:
        return verb(self._backend.processes, lambda: method(self, *args, **options))

    return together
