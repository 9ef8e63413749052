"""What a value is to a part of an op that runs on a slice of the batch, in every framework whose
tables say it axis by axis."""

from __future__ import annotations

from math import prod
from typing import Literal

Shape = tuple[int, ...]
#: What a value is to a part of its op: its part along an axis; all of it (``None``); of a result, a
#: term of a sum or of a mean over the parts; or what every part has alike.
Mode = int | Literal["sum", "mean", "same"] | None
SUM: Literal["sum"] = "sum"
MEAN: Literal["mean"] = "mean"
SAME: Literal["same"] = "same"


def same_place(shape: Shape, axis: int, other: Shape) -> int | None:
    """Returns the axis of another shape that begins where ``axis`` of a shape does, counted in
    elements: parts of the one are parts of the other."""
    outside = prod(shape[:axis])
    found = (at for at, size in enumerate(other) if size > 1 and prod(other[:at]) == outside)
    return next(found, None)
