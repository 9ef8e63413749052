"""Holds a schedule that can be changed one run at a time, with its live bytes kept up to date.

Runs sit in *cells*. There are more cells than runs, so that a run can be put between two others
without moving any. :mod:`keras_remat.solvers.engines.moves` changes the runs and the bytes alive;
this module holds the state it works on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_remat.core.problem import Problem
from keras_remat.solvers.engines import moves, native

SPARE_CELLS = 2
"""Number of empty cells per run."""
CROWDED = 0.5
"""Share of the cells. Where more are full, there is little room between runs."""
TOO_MANY_BYTES = 2**61
"""Stands for no budget: every problem that is solved has fewer bytes. Sums of a few such numbers
stay within 64 bits."""
SPARE_RUNS = 6
"""Number of runs that an op may have beyond the most that any op has in the order."""


class Timeline:
    """Runs in cells.

    Args:
        problem: the excess is counted above its budget, if it has one.
        order: a legal order.
        compiled: whether the kernel is compiled or ordinary Python; both give the same.

    Attributes:
        problem, compiled: as given.
        kernel: the functions that change the timeline.
        state: the arrays that these functions work on.
        end: the number of cells.
        buffer: an array of as many entries, for results of the kernel.

    Raises:
        ValueError: the order is not legal.
    """

    def __init__(self, problem: Problem, order: Sequence[int], *, compiled: bool):
        self.problem, self.compiled = problem, compiled
        self.kernel = native.kernel(moves, compiled=compiled)
        self._place(order)

    def _place(self, order: Sequence[int]) -> None:
        """Makes new cells, and puts the runs of an order into them."""
        self.end = (len(order) + 1) * (SPARE_CELLS + 1)
        s, live, f = _state(self.problem, order, self.end)
        runs: Any = np.asarray(order, dtype=np.int64)
        self.buffer: Any = np.full(self.end, -1)
        self.state: Any = (s, live, f)
        if not self.compiled:
            self.state = (s.tolist(), live, f.tolist())
            runs, self.buffer = runs.tolist(), self.buffer.tolist()
        at = self.kernel.fill(*self.state, runs, len(order))
        if at >= 0:
            raise ValueError(f"op {order[at]} at position {at} of the order is not legal")

    def spread(self) -> None:
        """Spaces the runs evenly again, in more cells where these are crowded."""
        if self.kernel.spread(*self.state, self.buffer) > CROWDED * self.end:
            self._place(self.order())

    @property
    def op_at(self) -> Sequence[int]:
        """Returns the op in every cell, -1 in empty ones."""
        begin = self.state[0][moves.OP_AT]
        cells: Sequence[int] = self.state[0][begin : begin + self.end]
        return cells

    @property
    def excess(self) -> int:
        """Returns bytes above the budget, summed over the cells."""
        return int(self.state[0][moves.EXCESS])

    def order(self) -> tuple[int, ...]:
        """Returns the ops in the order of their cells."""
        return order_of(self.op_at)


def order_of(op_at: Iterable[int]) -> tuple[int, ...]:
    """Returns the ops in cells, without the empty ones."""
    return tuple(int(op_id) for op_id in op_at if op_id >= 0)


def _state(problem: Problem, order: Sequence[int], end: int) -> tuple[Any, Any, Any]:
    """Returns ``s``, ``live`` and ``f`` of the kernel, without any run.

    One function, though long: a list of tables.

    Args:
        problem: see :class:`Timeline`.
        order: the order that will be put in; its ops may be moved.
        end: the number of cells.
    """
    graph = problem.graph
    runs = Counter(order)
    limit = max(runs.values(), default=1) + SPARE_RUNS
    producer = [-1 if value.producer is None else value.producer for value in graph.values]
    later: list[list[int]] = [[] for _ in graph.ops]
    for op in graph.ops:
        for earlier in op.after:
            later[earlier].append(op.id)

    def computed(value_ids: Sequence[int]) -> list[int]:
        return [v for v in dict.fromkeys(value_ids) if producer[v] >= 0]

    most = max((len(op.inputs) + 2 * len(op.outputs) for op in graph.ops), default=0)
    read_at = np.cumsum([0, *(limit * len(readers) + 1 for readers in graph.readers)])
    tables: dict[int, Any] = {
        moves.OP_AT: np.zeros(end),
        moves.REUSED: np.zeros(end),
        moves.RUNS: np.zeros(len(graph.ops) * limit),
        moves.N_RUNS: np.zeros(len(graph.ops)),
        moves.READS: np.zeros(int(read_at[-1])),
        moves.READ_AT: read_at,
        moves.N_READS: np.zeros(len(graph.values)),
        moves.AGAIN: np.zeros(len(graph.ops)),
        moves.AGAIN_PLACE: np.zeros(len(graph.ops)),
        moves.LOG: np.zeros(2 * moves.CHAIN_OPS + 8),
        moves.TOUCHED: np.zeros(most + 8),
        moves.NBYTES: [value.nbytes for value in graph.values],
        moves.PRODUCER: producer,
        moves.WORKSPACE: problem.profile.op_workspace_bytes,
        moves.RECOMPUTABLE: [op.recomputable for op in graph.ops],
        moves.MOVABLE: sorted(runs),
        moves.BIG: [
            value.id
            for value in graph.values
            if value.nbytes
            and producer[value.id] in runs
            and graph.ops[producer[value.id]].recomputable
        ],
        moves.KEPT: sorted(set(graph.outputs)),
    }
    lists: list[tuple[int, int, Sequence[Sequence[int]]]] = [
        (moves.INPUTS, moves.INPUT_AT, [computed(op.inputs) for op in graph.ops]),
        (moves.OUTPUTS, moves.OUTPUT_AT, [op.outputs for op in graph.ops]),
        (moves.REUSE, moves.REUSE_AT, [computed(op.may_reuse) for op in graph.ops]),
        (moves.BEFORE, moves.BEFORE_AT, [op.after for op in graph.ops]),
        (moves.LATER, moves.LATER_AT, later),
    ]
    for table, place, members in lists:
        tables[table] = [member for one in members for member in one]
        tables[place] = np.cumsum([0, *map(len, members)])
    numbers = {
        moves.END: end,
        moves.LIMIT: limit,
        moves.BUDGET: TOO_MANY_BYTES if problem.budget_bytes is None else problem.budget_bytes,
        moves.TAKES_OVER: len(tables[moves.REUSE]) > 0,
        moves.N_MOVABLE: len(tables[moves.MOVABLE]),
        moves.N_BIG: len(tables[moves.BIG]),
        moves.N_KEPT: len(tables[moves.KEPT]),
        moves.N_OPS: len(graph.ops),
        moves.N_VALUES: len(graph.values),
        moves.RESIDENT: problem.profile.resident_bytes,
    }
    parts = [np.asarray(tables[at], dtype=np.int64) for at in sorted(tables)]
    head = [numbers.get(at, 0) for at in range(moves.OP_AT)]
    begins = moves.OP_AT + len(parts) + np.cumsum([0, *map(len, parts[:-1])])
    s = np.concatenate([np.asarray(head, dtype=np.int64), begins, *parts])
    f = np.asarray([0.0, *problem.profile.op_time_s])
    return s, np.zeros(end + 1, dtype=np.int64), f
