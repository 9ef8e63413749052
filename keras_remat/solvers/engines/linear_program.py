"""Builds linear and integer programs row by row: the one place that knows sparse matrices.

``min cost · x`` subject to ``low ≤ A x ≤ high`` and ``floor ≤ x ≤ ceiling``; some variables may be
integral. Programs are solved by :mod:`keras_remat.solvers.engines.milp`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import scipy.sparse

from keras_remat.core.deadline import NO_DEADLINE, Deadline

Term = tuple[int, float]
"""(variable, coefficient)."""


class LinearProgram:
    """Holds variables and rows, which are added one after the other.

    Args:
        deadline: once it is over, adding raises ``TimeoutError``.

    Attributes:
        cost, floor, ceiling, integral: lists with one entry per variable.
        low, high: lists with one entry per row.
    """

    def __init__(self, deadline: Deadline = NO_DEADLINE) -> None:
        self.deadline = deadline
        self.cost: list[float] = []
        self.floor: list[float] = []
        self.ceiling: list[float] = []
        self.integral: list[bool] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._entries: list[float] = []

    def variable(
        self,
        cost: float = 0.0,
        *,
        floor: float = 0.0,
        ceiling: float = 1.0,
        integral: bool = False,
    ) -> int:
        """Adds a variable and returns its index."""
        self._check_clock()
        self.cost.append(cost)
        self.floor.append(floor)
        self.ceiling.append(ceiling)
        self.integral.append(integral)
        return len(self.cost) - 1

    def between(self, terms: Iterable[Term], low: float, high: float) -> None:
        """Adds the row ``low ≤ Σ coefficient · variable ≤ high``."""
        self._check_clock()
        for column, entry in terms:
            self._rows.append(len(self.low))
            self._columns.append(column)
            self._entries.append(entry)
        self.low.append(low)
        self.high.append(high)

    def at_most(self, terms: Iterable[Term], high: float) -> None:
        """Adds the row ``Σ coefficient · variable ≤ high``."""
        self.between(terms, -np.inf, high)

    def _check_clock(self) -> None:
        if self.deadline.is_over:
            raise TimeoutError("there is no time left for the program")

    @property
    def entry_count(self) -> int:
        """Returns how many coefficients there are."""
        return len(self._entries)

    @property
    def matrix(self) -> scipy.sparse.csc_array:
        """Returns the coefficients, rows by variables.

        Coefficients that a row has for the same variable are added up.
        """
        return scipy.sparse.csc_array(
            (self._entries, (self._rows, self._columns)), shape=(len(self.low), len(self.cost))
        )
