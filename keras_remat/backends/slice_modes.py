"""Names what a value is to an op that runs on a part of the batch, axis by axis.

A file of its own, though short: the tables of all frameworks and XLA's writer share it.
"""

from __future__ import annotations

from math import prod
from typing import Literal

Shape = tuple[int, ...]
#: What a value is to a part of its op. An axis: its part along that axis. ``None``: all of it.
#: Only of a result: ``"sum"`` or ``"mean"``, a term of one over the parts, and ``"same"``, which
#: every part makes alike.
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
