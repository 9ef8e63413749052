"""Bytes and memory limits as people write them. The only module that knows 2**30.

Accepted memory limits: a positive ``int`` of bytes, a size such as ``"8GiB"``, ``"512 MiB"`` or
``"8GB"`` (decimal), or a percentage such as ``"80%"`` of a known total. ``"8Gb"`` is refused: it
could mean gigabits.
"""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "B": 1,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*|%)\s*")

ACCEPTED = 'an int of bytes, a size like "8GiB", "512MiB" or "8GB", or a percentage like "80%"'


def format_bytes(nbytes: int) -> str:
    """Returns ``nbytes`` for people, with a binary unit and at most two decimals.

    >>> format_bytes(7), format_bytes(3 * 2**30), format_bytes(1_500_000)
    ('7 B', '3 GiB', '1.43 MiB')
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            number = f"{nbytes / size:.2f}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return f"{nbytes} B"


def format_unequal_bytes(first: int, second: int) -> tuple[str, str]:
    """Returns both numbers for people, with the exact bytes added where rounding would make unequal
    numbers look equal.

    >>> format_unequal_bytes(3 * 2**30, 2**30), format_unequal_bytes(2**30 + 1, 2**30)
    (('3 GiB', '1 GiB'), ('1 GiB (1073741825 B)', '1 GiB (1073741824 B)'))
    """
    texts = format_bytes(first), format_bytes(second)
    if first == second or texts[0] != texts[1]:
        return texts
    return f"{texts[0]} ({first} B)", f"{texts[1]} ({second} B)"


def format_seconds(seconds: float) -> str:
    """Returns a duration for people.

    >>> format_seconds(0.00000125), format_seconds(0.00125), format_seconds(2.5), format_seconds(75)
    ('1.25 µs', '1.25 ms', '2.5 s', '1 min 15 s')
    """
    if 0 < seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if 0 < seconds < 0.9995:  # above that three digits read 1e+03
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def parse_bytes(
    limit: int | str, *, total_bytes: int | None = None, what: str = "memory_limit"
) -> int:
    """Returns a memory limit in bytes.

    Args:
        limit: an int of bytes, a size with a unit, or a percentage of ``total_bytes``.
        total_bytes: what a percentage refers to; ``None`` when there is no such total.
        what: the argument's name for the error message.

    Raises:
        TypeError: ``limit`` is neither an int nor a string.
        ValueError: not positive, not finite, over 100 %, an unknown unit, or a percentage of an
            unknown total.

    >>> parse_bytes("8GiB") == 8 * 2**30, parse_bytes("50%", total_bytes=1000)
    (True, 500)
    """
    if isinstance(limit, bool) or (not isinstance(limit, str) and not hasattr(limit, "__index__")):
        if isinstance(limit, float) and not math.isfinite(limit):
            raise ValueError(f"{what} must be finite, got {limit!r}; accepted: {ACCEPTED}")
        raise TypeError(f"{what} must be {ACCEPTED}; got {limit!r} of type {type(limit).__name__}")
    if not isinstance(limit, str):
        nbytes = operator.index(limit)
        if nbytes <= 0:
            raise ValueError(f"{what} must be positive, got {nbytes}; accepted: {ACCEPTED}")
        return nbytes
    match = _SIZE.fullmatch(limit)
    if match is None:
        raise ValueError(f"{what}={limit!r} is not a size; accepted: {ACCEPTED}")
    number, unit = Fraction(match[1]), match[2]  # exact: a float drops bytes above 2**53
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(f"{what}={limit!r} must be above 0% and at most 100%")
        if total_bytes is None:
            raise ValueError(
                f"{what}={limit!r} is a percentage, but the total it refers to is unknown here; give bytes"
            )
        return max(1, int(total_bytes * number / 100))
    if unit not in _UNITS:
        raise ValueError(f"{what}={limit!r} has the unknown unit {unit!r}; accepted: {ACCEPTED}")
    nbytes = int(number * _UNITS[unit])
    if nbytes <= 0:
        raise ValueError(f"{what} must be positive, got {limit!r}; accepted: {ACCEPTED}")
    return nbytes


def check_memory_limit(limit: int | str | None) -> None:
    """Raises what :func:`parse_bytes` would, without needing to know the device's total; ``None``
    is accepted."""
    if limit is not None:
        parse_bytes(limit, total_bytes=TIB)
