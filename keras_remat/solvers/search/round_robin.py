"""Says whose turn it is: what still improves gets the time.

Searches that take turns are worth different amounts on different problems, and at different times.
One that finds nothing sits out a round of turns, after the next fruitless turn two, and so on; a
find makes it equal to the others again. Nobody is left out for good.

A file of its own, though short: it knows no solver.
"""

from __future__ import annotations


class RoundRobin:
    """Chooses among ``count`` searches, the first one first."""

    def __init__(self, count: int):
        self._count = count
        self._fruitless = [0] * count
        self._waits = [0] * count

    def next(self) -> int:
        """Returns the search that has to wait the least."""
        return min(range(self._count), key=lambda at: (self._waits[at], at))

    def report(self, at: int, *, found: bool) -> None:
        """Notes that a search had a turn, and whether it found something."""
        self._fruitless[at] = 0 if found else self._fruitless[at] + 1
        self._waits = [max(0, wait - 1) for wait in self._waits]
        self._waits[at] = self._count * self._fruitless[at]
