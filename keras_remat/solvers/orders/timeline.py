"""A schedule that can be changed one run at a time, with its live bytes kept up to date.

Runs sit in *cells*, of which there are more than runs, so that a run can be put between two others
without moving any. Inserting or removing a run changes the lifetimes of what it reads and writes
only; each is a range added to or taken from the array of live bytes. An empty cell holds what is
alive across it, which is never more than at its neighbours. The semantics is that of
:mod:`keras_remat.core.simulate` (a test compares them after every change).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem

SPARE_CELLS = 3
"""Empty cells before every run of a fresh timeline."""


class Timeline:
    """Runs in cells.

    Attributes:
        op_at: op id per cell, −1 for an empty one.
        runs: per op the cells in which it runs, ascending.
        live: int64, bytes alive per cell; one more entry for the end of the step.
        time_s: seconds of all runs.
    """

    def __init__(self, problem: Problem, order: Sequence[int]):
        graph = problem.graph
        self.problem, self.graph, self.ops = problem, graph, graph.ops
        self.end = len(order) * (SPARE_CELLS + 1) + SPARE_CELLS
        self.op_at = [-1] * self.end
        self.runs: list[list[int]] = [[] for _ in graph.ops]
        self.reads: list[list[int]] = [[] for _ in graph.values]
        self.live = np.full(self.end + 1, problem.profile.resident_bytes, dtype=np.int64)
        self.reused = [0] * self.end
        self.time_s = 0.0
        self.nbytes = [value.nbytes for value in graph.values]
        self.producer = [value.producer for value in graph.values]
        self.inputs = [
            tuple(v for v in dict.fromkeys(op.inputs) if self.producer[v] is not None)
            for op in graph.ops
        ]
        self.later: list[list[int]] = [
            [] for _ in graph.ops
        ]  # ops that must follow all copies of this one
        for op in graph.ops:
            for earlier in op.after:
                self.later[earlier].append(op.id)
        for value_id in set(graph.outputs):
            self.reads[value_id].append(self.end)
        for at, op_id in enumerate(order):
            if not self.insert(op_id, at * (SPARE_CELLS + 1) + SPARE_CELLS):
                raise ValueError(f"op {op_id} at position {at} of the order is not legal")

    def order(self) -> tuple[int, ...]:
        """The ops in the order of their cells."""
        return tuple(op_id for op_id in self.op_at if op_id >= 0)

    def instance(self, value_id: int, cell: int) -> tuple[int, int] | None:
        """(write, last read) of the instance of a value that a run in ``cell`` would read; ``None``
        if there is none."""
        producer = self.producer[value_id]
        assert producer is not None
        at = bisect_left(self.runs[producer], cell)
        if not at:
            return None
        return self.runs[producer][at - 1], self._last_read(value_id, at - 1)

    def _last_read(self, value_id: int, which: int) -> int:
        """Last read of the instance written by run number ``which`` of the producer, or the cell of
        that run."""
        runs = self.runs[self.producer[value_id]]  # type: ignore[index]
        until = runs[which + 1] if which + 1 < len(runs) else self.end + 1
        reads = self.reads[value_id]
        at = bisect_right(reads, until - 1) - 1
        return max(runs[which], reads[at]) if at >= 0 else runs[which]

    def can_insert(self, op_id: int, cell: int) -> bool:
        """Whether the cell is empty and a run of ``op_id`` there breaks none of S1, S3, S4 (taken
        as one more run)."""
        if self.op_at[cell] >= 0:
            return False
        for value_id in self.inputs[op_id]:
            producer = self.producer[value_id]
            assert producer is not None
            if not self.runs[producer] or self.runs[producer][0] >= cell:
                return False
        if any(
            self.runs[earlier] and self.runs[earlier][-1] > cell
            for earlier in self.ops[op_id].after
        ):
            return False
        return not any(
            self.runs[later] and self.runs[later][0] < cell for later in self.later[op_id]
        )

    def insert(self, op_id: int, cell: int) -> bool:
        """Runs ``op_id`` in an empty cell; returns whether that was legal, and changes nothing if
        it was not."""
        if not self.can_insert(op_id, cell):
            return False
        op, live = self.ops[op_id], self.live
        touched = {cell}
        for value_id in self.inputs[op_id]:
            instance = self.instance(value_id, cell)
            assert instance is not None
            last = instance[1]
            if last < cell:
                live[last + 1 : cell + 1] += self.nbytes[value_id]
                touched.add(last)
            insort(self.reads[value_id], cell)
        runs = self.runs[op_id]
        at = bisect_left(runs, cell)
        olds = [self._last_read(value_id, at - 1) if at else None for value_id in op.outputs]
        runs.insert(at, cell)
        for value_id, old in zip(op.outputs, olds, strict=True):
            size = self.nbytes[value_id]
            last = self._last_read(value_id, at)
            if old is None or old < cell:
                live[cell : last + 1] += size
            else:
                kept = self._last_read(value_id, at - 1)
                live[kept + 1 : cell] -= size
                touched |= {kept, old}
            touched.add(last)
        self.op_at[cell] = op_id
        live[cell] += self.problem.profile.op_workspace_bytes[op_id]
        self.time_s += self.problem.profile.op_time_s[op_id]
        self._update_reuse(touched)
        return True

    def can_remove(self, cell: int) -> bool:
        """Whether everything that reads what the run in ``cell`` writes could read an earlier run
        of it."""
        op_id = self.op_at[cell]
        runs = self.runs[op_id]
        at = bisect_left(runs, cell)
        if at:
            return True
        return len(runs) > 1 and all(
            self._last_read(value_id, at) == cell for value_id in self.ops[op_id].outputs
        )

    def remove(self, cell: int) -> bool:
        """Takes the run in ``cell`` out; returns whether that was legal, and changes nothing if it
        was not."""
        if not self.can_remove(cell):
            return False
        op_id = self.op_at[cell]
        op, live, runs = self.ops[op_id], self.live, self.runs[op_id]
        at = bisect_left(runs, cell)
        live[cell] += self.reused[cell] - self.problem.profile.op_workspace_bytes[op_id]
        self.reused[cell] = 0
        self.op_at[cell] = -1
        touched: set[int] = set()
        lasts = [self._last_read(value_id, at) for value_id in op.outputs]
        kepts = [self._last_read(value_id, at - 1) if at else None for value_id in op.outputs]
        del runs[at]
        for value_id, last, kept in zip(op.outputs, lasts, kepts, strict=True):
            size = self.nbytes[value_id]
            if last > cell and kept is not None:
                live[kept + 1 : cell] += size
                touched |= {kept, last}
            else:
                live[cell : last + 1] -= size
        for value_id in self.inputs[op_id]:
            reads = self.reads[value_id]
            del reads[bisect_left(reads, cell)]
            instance = self.instance(value_id, cell + 1)
            assert instance is not None
            last = instance[1]
            if last < cell:
                live[last + 1 : cell + 1] -= self.nbytes[value_id]
                touched.add(last)
        self.time_s -= self.problem.profile.op_time_s[op_id]
        self._update_reuse(touched)
        return True

    def _update_reuse(self, cells: set[int]) -> None:
        for cell in cells:
            if cell >= self.end or (op_id := self.op_at[cell]) < 0:
                continue
            op = self.ops[op_id]
            if not op.may_reuse:
                continue
            dying = {
                v for v in op.may_reuse if self.producer[v] is not None and self._dies_at(v, cell)
            }
            now = reused_bytes(op, self.graph.values, dying)
            self.live[cell] += self.reused[cell] - now
            self.reused[cell] = now

    def _dies_at(self, value_id: int, cell: int) -> bool:
        instance = self.instance(value_id, cell)
        return instance is not None and instance[1] == cell
