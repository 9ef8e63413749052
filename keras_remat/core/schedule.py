"""A schedule is a sequence of op ids in which an id may repeat. Nothing else.

Frees, evictions, retention intervals, peak and time are derived from it
(:mod:`keras_remat.core.simulate`), so a double free, a use after free or a leak cannot be written
down. A schedule is legal for a graph when

* S1 every value that is read was computed at an earlier position;
* S2 every needed op appears;
* S3 an op that is not recomputable appears at most once;
* S4 every copy of an op comes after every copy of the ops in its ``after``.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from keras_remat.core.graph import Graph
from keras_remat.errors import InvalidScheduleError


@dataclass(frozen=True)
class Usage:
    """Holds a step's time in seconds and its peak in bytes, resident bytes included."""

    time_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Schedule:
    """Holds the order in which ops run; an id that repeats is recomputed.

    Args:
        order: op ids; NumPy integers become ``int``, so that equal schedules are equal and can be
            written as JSON.

    Raises:
        TypeError: something in ``order`` is no integer.
        InvalidScheduleError: an id is negative (Python would count it from the end of the graph).

    >>> Schedule([0, 1, 2, 3, 0, 4]).order
    (0, 1, 2, 3, 0, 4)
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        order = tuple(self.order)
        if not set(map(type, order)) <= {int}:
            for position, op_id in enumerate(order):
                if isinstance(op_id, bool) or not hasattr(op_id, "__index__"):
                    raise TypeError(
                        f"op id at position {position} must be an int, got {op_id!r} of type "
                        f"{type(op_id).__name__}"
                    )
            order = tuple(map(operator.index, order))
        if order and (lowest := min(order)) < 0:
            position = order.index(lowest)
            raise InvalidScheduleError(
                "S2", f"unknown op id {lowest} at position {position}", position=position
            )
        object.__setattr__(self, "order", order)

    def __len__(self) -> int:
        return len(self.order)

    @classmethod
    def store_all(cls, graph: Graph) -> Schedule:
        """Returns the default order of the needed ops, each once."""
        return cls(tuple(sorted(graph.needed)))

    @property
    def recomputed(self) -> dict[int, int]:
        """Returns ids of the ops that run more than once, with the number of extra runs."""
        return {op_id: count - 1 for op_id, count in Counter(self.order).items() if count > 1}


@dataclass(frozen=True)
class Solution:
    """Holds the result of a solver.

    Args:
        schedule: validated against the problem before it is returned.
        solver: name in ``SOLVERS`` of the solver whose schedule this is.
        status: ``"optimal"`` when the solver proved that no legal schedule is faster under the
            budget, else ``"feasible"``.
        solve_time_s: seconds spent solving.
        lower_bound_s: seconds that no schedule under the budget beats, or ``None`` when nothing was
            proved.
        usage: time and peak of ``schedule`` by :func:`keras_remat.core.simulate.simulate`.
        keeps_order: whether ``status`` and ``lower_bound_s`` hold only for schedules whose first
            runs are in the graph's order, as in Checkmate's program.
    """

    schedule: Schedule
    solver: str
    status: Literal["optimal", "feasible"]
    solve_time_s: float
    lower_bound_s: float | None = None
    usage: Usage | None = None
    keeps_order: bool = False

    def __post_init__(self) -> None:
        if self.status not in ("optimal", "feasible"):
            raise ValueError(f'status must be "optimal" or "feasible", got {self.status!r}')

    @property
    def gap(self) -> float | None:
        """Returns (time − lower bound) / time, a ratio; ``None`` without a bound."""
        if self.lower_bound_s is None or self.usage is None:
            return None
        if self.usage.time_s <= 0:
            return 0.0
        return max(0.0, (self.usage.time_s - self.lower_bound_s) / self.usage.time_s)
