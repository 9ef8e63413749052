"""Remembers what the quick solver found: its answer follows from problem, target and seed alone.

A ``fit`` asks it again and again for the same step: for a first plan, before every slower solver,
and for a tighter plan after a step that measured over the limit. What changes between is what the
device adds, and not what the solver is asked. Near the floor an answer takes seconds: of a U-Net of
volumes 74 solves took 183 s of 230 s, and 23 of them were different.

What is remembered belongs to a memory model, and with it to one ``fit``.
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
#: Answers that are remembered for one memory model.
_MOST = 64
#: Says what was asked: ids of graph and profile, the target in bytes, and the seed.
Asked = tuple[int, int, int, int]


class QuickOrders:
    """Holds the answers of the quick solver."""

    def __init__(self) -> None:
        # graph and profile are kept, so that nothing else gets their ids
        self._known: OrderedDict[Asked, tuple[Problem, list[Solution], int]] = OrderedDict()

    def of(self, problem: Problem, seed: int, time_limit_s: float) -> list[Solution] | None:
        """Returns what was found; empty where nothing was in as much work, and ``None`` where the
        solver was not asked for as much."""
        if (known := self._known.get(_asked(problem, seed))) is None:
            return None
        _, found, steps = known
        return list(found) if found or _steps(problem, time_limit_s) <= steps else None

    def keep(self, problem: Problem, seed: int, time_limit_s: float, found: list[Solution]) -> None:
        """Keeps an answer, and forgets the oldest one of too many."""
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
