"""Builds linear and integer programs row by row: the one place that knows sparse matrices.

``min cost · x`` subject to ``low ≤ A x ≤ high`` and ``floor ≤ x ≤ ceiling``; some variables may be
integral. Programs are solved by :mod:`keras_remat.solvers.engines.milp`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import scipy.sparse

Term = tuple[int, float]
"""(variable, coefficient)."""


class LinearProgram:
    """Variables and rows, added one after the other."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._floor: list[float] = []
        self._ceiling: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._entries: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def variable(
        self,
        cost: float = 0.0,
        *,
        floor: float = 0.0,
        ceiling: float = 1.0,
        integral: bool = False,
    ) -> int:
        """Adds a variable and returns its index."""
        self._cost.append(cost)
        self._floor.append(floor)
        self._ceiling.append(ceiling)
        self._integral.append(integral)
        return len(self._cost) - 1

    def between(self, terms: Iterable[Term], low: float, high: float) -> None:
        """Adds the row ``low ≤ Σ coefficient · variable ≤ high``."""
        at = len(self._low)
        for column, entry in terms:
            self._rows.append(at)
            self._columns.append(column)
            self._entries.append(entry)
        self._low.append(low)
        self._high.append(high)

    def at_most(self, terms: Iterable[Term], high: float) -> None:
        """Adds the row ``Σ coefficient · variable ≤ high``."""
        self.between(terms, -np.inf, high)

    @property
    def cost(self) -> np.ndarray:
        """Float per variable."""
        return np.asarray(self._cost, dtype=np.float64)

    @property
    def floor(self) -> np.ndarray:
        """The least value of every variable."""
        return np.asarray(self._floor, dtype=np.float64)

    @property
    def ceiling(self) -> np.ndarray:
        """The largest value of every variable."""
        return np.asarray(self._ceiling, dtype=np.float64)

    @property
    def integral(self) -> np.ndarray:
        """1 for every integral variable, 0 for the others."""
        return np.asarray(self._integral, dtype=np.int64)

    @property
    def low(self) -> np.ndarray:
        """The left side of every row."""
        return np.asarray(self._low, dtype=np.float64)

    @property
    def high(self) -> np.ndarray:
        """The right side of every row."""
        return np.asarray(self._high, dtype=np.float64)

    @property
    def matrix(self) -> scipy.sparse.csc_array:
        """The coefficients, rows by variables; what a row names twice is added."""
        return scipy.sparse.csc_array(
            (self._entries, (self._rows, self._columns)), shape=(len(self._low), len(self._cost))
        )
