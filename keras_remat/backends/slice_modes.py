"""Names the modes of a value in an op that runs on a part of the batch, axis by axis.

A file of its own, though short: the tables of all frameworks and XLA's writer share it.
"""

from __future__ import annotations

from math import prod
from typing import Literal

Shape = tuple[int, ...]
#: How a part of an op reads or makes a value. An axis: a part of the value along that axis.
#: ``None``: the whole value. For results only: ``"sum"`` and ``"mean"``, a term of a sum or mean
#: over the parts, and ``"same"``, a value that is the same in every part.
Mode = int | Literal["sum", "mean", "same"] | None
SUM: Literal["sum"] = "sum"
MEAN: Literal["mean"] = "mean"
SAME: Literal["same"] = "same"


def same_place(shape: Shape, axis: int, other: Shape) -> int | None:
    """Returns the axis of ``other`` with as many elements outside of it as ``axis`` of ``shape``
    has, so that parts along one are parts along the other; ``None`` where there is none."""
    outside = prod(shape[:axis])
    found = (at for at, size in enumerate(other) if size > 1 and prod(other[:at]) == outside)
    return next(found, None)
