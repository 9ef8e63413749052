"""Remembers the quick solver's answers, which follow from problem, target and seed alone.

A ``fit`` asks the quick solver again and again for the same step: for a first plan, before every
slower solver, and for a tighter plan after a step that measured over the limit. In between, only
the device's surplus changes, and often not the question to the solver. Near the floor an answer
takes seconds: for a U-Net of volumes, 74 solves took 183 s of 230 s, and 23 of them were different.

The answers belong to a memory model, and with it to one ``fit``.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakKeyDictionary

from keras_remat.backends.memory import MemoryModel
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Solution
from keras_remat.solvers.search.greedy import steps_limit, sure_steps

#: The solver whose answers are remembered: it takes the first order that it finds.
QUICK = "greedy_first"
#: Number of answers that are remembered for one memory model.
_MOST = 64
#: Identifies a question: ids of graph and profile, the target in bytes, and the seed.
Asked = tuple[int, int, int, int]


class QuickOrders:
    """Holds the answers of the quick solver."""

    def __init__(self) -> None:
        # graph and profile are kept, so that nothing else gets their ids
        self._known: OrderedDict[Asked, tuple[Problem, list[Solution], int]] = OrderedDict()

    def of(self, problem: Problem, seed: int, time_limit_s: float) -> list[Solution] | None:
        """Returns the remembered solutions of a problem.

        The list is empty where the solver found none in at least as much work, and ``None`` is
        returned where it was never asked, or found none in less work.
        """
        if (known := self._known.get(_asked(problem, seed))) is None:
            return None
        _, found, steps = known
        return list(found) if found or _steps(problem, time_limit_s) <= steps else None

    def keep(self, problem: Problem, seed: int, time_limit_s: float, found: list[Solution]) -> None:
        """Keeps an answer; forgets the oldest one where there are too many."""
        steps = _steps(problem, time_limit_s)
        self._known[_asked(problem, seed)] = problem, list(found), steps
        if len(self._known) > _MOST:
            self._known.popitem(last=False)


def _asked(problem: Problem, seed: int) -> Asked:
    return id(problem.graph), id(problem.profile), problem.budget_bytes or 0, seed


def _steps(problem: Problem, time_limit_s: float) -> int:
    """Returns how many steps a solve takes at most."""
    return max(steps_limit(time_limit_s), sure_steps(problem))


_OF: WeakKeyDictionary[MemoryModel, QuickOrders] = WeakKeyDictionary()


def quick_orders(memory: MemoryModel) -> QuickOrders:
    """Returns the answers that belong to a memory model."""
    return _OF.setdefault(memory, QuickOrders())
