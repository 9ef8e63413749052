"""Reads and writes bytes and memory limits as people do. Only this module knows 2**30.

Accepted memory limits: a positive ``int`` of bytes, a size such as ``"8GiB"``, ``"512 mib"``,
``"8G"`` (which is 8 GiB, as in most tools) or ``"8GB"`` (decimal), or a percentage such as
``"80%"`` of a known total. ``"8Gb"`` is refused: it could mean gigabits. So are limits under
:data:`LEAST_LIMIT`: no step fits there, and a user who writes ``8`` means ``"8GiB"``.
"""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "k": KIB, "m": MIB, "g": GIB, "t": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
#: Bytes; see the module. A device's limit is at least the first and below ``_TOO_MANY``, which fits
#: no 64-bit integer.
LEAST_LIMIT, _TOO_MANY, _LONGEST_NUMBER = 1024, 2**63, 40
_SIZE = re.compile(r"\s*([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*([A-Za-z]*|%)\s*")

ACCEPTED = 'an int of bytes, a size like "8GiB", "512MiB" or "8GB", or a percentage like "80%"'


def format_bytes(nbytes: int) -> str:
    """Returns ``nbytes`` for people, with a binary unit and at most two decimals.

    >>> format_bytes(7), format_bytes(3 * 2**30), format_bytes(1_500_000)
    ('7 B', '3 GiB', '1.43 MiB')
    """
    unit, size = byte_unit(nbytes)
    if size == 1:
        return f"{nbytes} B"
    hundredths = round(Fraction(100 * nbytes, size))  # exact: a float overflows at 1e308
    sign, (whole, rest) = "-" * (hundredths < 0), divmod(abs(hundredths), 100)
    return f"{sign}{whole}.{rest:02d}".rstrip("0").rstrip(".") + f" {unit}"


def byte_unit(nbytes: int) -> tuple[str, int]:
    """Returns name and size of the largest binary unit that ``nbytes`` reaches.

    >>> byte_unit(5), byte_unit(3 * 2**30)
    (('B', 1), ('GiB', 1073741824))
    """
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
    return next((name, size) for name, size in units if abs(nbytes) >= size or size == 1)


def format_unequal_bytes(first: int, second: int) -> tuple[str, str]:
    """Returns both numbers for people, never equal where they are not.

    The exact bytes are added where rounding would make them look equal.

    >>> format_unequal_bytes(3 * 2**30, 2**30), format_unequal_bytes(2**30 + 1, 2**30)
    (('3 GiB', '1 GiB'), ('1 GiB (1073741825 B)', '1 GiB (1073741824 B)'))
    """
    texts = format_bytes(first), format_bytes(second)
    if first == second or texts[0] != texts[1]:
        return texts
    return f"{texts[0]} ({first} B)", f"{texts[1]} ({second} B)"


def format_rate(rate: float) -> str:
    """Returns a number of things per second for people, to three digits at least.

    >>> format_rate(18473.2), format_rate(99.9), format_rate(0.04)
    ('18,473', '99.9', '0.040')
    """
    digits = 0 if rate >= 100 else 1 if rate >= 10 else 2 if rate >= 1 else 3
    return f"{rate:,.{digits}f}"


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
    limit: int | str,
    *,
    total_bytes: int | None = None,
    what: str = "memory_limit",
    least: int = 1,
) -> int:
    """Returns a memory limit in bytes.

    Args:
        total_bytes: the total that a percentage refers to; ``None`` when there is none.
        least: the smallest number of bytes that is accepted.

    Raises:
        TypeError: ``limit`` is neither an int nor a string.
        ValueError: not positive, under ``least``, not finite, over 100 %, an unknown unit, or a
            percentage of an unknown total.

    >>> parse_bytes("8GiB") == 8 * 2**30, parse_bytes("50%", total_bytes=1000)
    (True, 500)
    """
    if isinstance(limit, bool) or (not isinstance(limit, str) and not hasattr(limit, "__index__")):
        if isinstance(limit, float) and not math.isfinite(limit):
            raise ValueError(f"{what} must be finite, got {limit!r}; accepted: {ACCEPTED}")
        raise TypeError(f"{what} must be {ACCEPTED}; got {limit!r} of type {type(limit).__name__}")
    if not isinstance(limit, str):
        return _checked(operator.index(limit), limit, what, least)
    match = _SIZE.fullmatch(limit)
    if match is None:
        raise ValueError(f"{what}={limit!r} is not a size; accepted: {ACCEPTED}")
    if len(match[1]) > _LONGEST_NUMBER:
        raise ValueError(f"{what} has {len(match[1])} digits; no device has so much memory")
    number, unit = Fraction(match[1]), match[2]  # exact: a float drops bytes above 2**53
    if unit == "%":
        return _share(number, total_bytes, limit, what)
    if re.fullmatch("[A-Za-z]b", unit) and not unit.islower():
        raise ValueError(
            f"{what}={limit!r} has the unknown unit {unit!r}, which could mean bits; "
            f'did you mean "{match[1]}{unit[0]}iB"?'
        )
    if unit.lower() not in _UNITS:
        raise ValueError(f"{what}={limit!r} has the unknown unit {unit!r}; accepted: {ACCEPTED}")
    return _checked(int(number * _UNITS[unit.lower()]), limit, what, least)


def _share(number: Fraction, total_bytes: int | None, limit: str, what: str) -> int:
    """Returns ``number`` percent of a total."""
    if not 0 < number <= 100:
        raise ValueError(f"{what}={limit!r} must be above 0% and at most 100%")
    if total_bytes is None:
        raise ValueError(
            f"{what}={limit!r} is a percentage, but the total it refers to is unknown here; "
            "give bytes"
        )
    return max(1, int(total_bytes * number / 100))


def _checked(nbytes: int, given: int | str, what: str, least: int) -> int:
    if nbytes <= 0:
        raise ValueError(f"{what} must be positive, got {given!r}; accepted: {ACCEPTED}")
    if nbytes >= _TOO_MANY:
        raise ValueError(f"{what} is over 8388607 TiB; no device has so much memory")
    if nbytes < least:
        raise ValueError(
            f"{what}={given!r} is {format_bytes(nbytes)}, in which no step fits; "
            f'did you mean "{nbytes}GiB"? accepted: {ACCEPTED}'
        )
    return nbytes


def check_memory_limit(limit: int | str | None) -> None:
    """Raises the errors of :func:`parse_bytes`, without knowing the device's total.

    ``None`` is accepted.

    Raises:
        TypeError, ValueError: as :func:`parse_bytes`; also a limit under :data:`LEAST_LIMIT`.
    """
    if limit is not None:
        parse_bytes(limit, total_bytes=TIB, least=LEAST_LIMIT)
