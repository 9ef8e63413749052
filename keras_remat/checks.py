"""Checks arguments; errors say what is wrong, what was given, and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, TypeGuard

from keras_remat.errors import unknown_name


def check_among(name: str, value: Any, accepted: tuple[Any, ...], *more: str) -> None:
    """Raises ``ValueError`` for a value that is not among the accepted ones."""
    if value not in accepted:
        forms = ", ".join([*map(repr, accepted), *more])
        raise ValueError(f"{name} must be one of {forms}; got {value!r}")


def check_name(what: str, value: Any, names: Collection[str]) -> None:
    """Raises ``TypeError`` for no string, ``ValueError`` for an unknown name.

    The message has the nearest known name.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be one of the names {', '.join(names)}; got {value!r}")
    if value not in names:
        raise ValueError(unknown_name(what, value, names))


def check_int(name: str, value: Any, *, least: int, names: Collection[str] = ()) -> None:
    """Raises ``TypeError`` for a value that is no int, ``ValueError`` for one below ``least``.

    The message says that one of ``names`` may be given instead.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        instead = f", or one of {', '.join(map(repr, names))}" if names else ""
        raise TypeError(f"{name} must be an int of at least {least}{instead}; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_share(name: str, value: Any) -> None:
    """Raises ``TypeError`` for a value that is no number, ``ValueError`` for one not in [0, 1)."""
    _check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")


def check_seconds(name: str, value: Any) -> None:
    """Raises ``TypeError`` for no number, ``ValueError`` unless it is positive and finite."""
    _check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_number(name: str, value: Any) -> None:
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
