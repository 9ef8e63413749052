"""Writes the 0-1 program of :mod:`keras_remat.solvers.search.intervals`.

It decides which ops run again and where, and which values are retained.

**Cells.** The base order is interleaved with *candidate cells*: op v may run again in slot s, that
is, just before the op at base position s. Candidates of one slot follow each other in base order.
``X[c]`` says that candidate cell c runs (a base cell always does).

**Segments.** The cells that write or may read a value are its events; ``K[y,j]`` says that y is
retained between its events j and j + 1. For a cell c, a value it reads (segments i before and i'
after c) and one it writes:

    (1) X[c] ≤ K[y,i]                      what is read is there
    (2) K[y,i'] ≤ K[y,i]                   reading creates nothing
    (3) K[y,i'] ≤ K[y,i] + X[c]            writing does
    (4) Σ bytes·K over segments across c + Σ bytes·K[y,i] over values read or written at c
        + Σ bytes·X[c] over values written at c, less taken-over buffers
        + workspace·X[c] ≤ budget − resident
    (5) K[y,i] + X[c] ≤ 1                  a value that is there is not computed again

With every op a candidate in every slot this is Checkmate's program (arXiv 1910.02653, eq. 1-9),
stage by stage; choosing slots where a value has a reader, and those of its recomputed readers a few
levels up, keeps it small. Takeovers are counted by size: the k-th output of a size needs a buffer
of its own unless k inputs of that size that may be taken over are given up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from keras_remat.core.problem import Problem
from keras_remat.solvers.engines import cp_sat

Pair = tuple[int, int]
"""(slot, op) of a recomputation."""

SMALL_OPS = 500
"""Orders up to this length are searched without the shortcuts that long ones need."""
TINY_OPS = 40
"""In orders up to this length a value may be computed again anywhere in a gap, not only at its end,
and ops have two turns in every slot."""
ROW_SLACK = 0.003
"""Share of the capacity by which a row that stands for several cells may overstate each of them."""
TIME_STEPS = 10**7
"""The store-all time is divided into this many units."""


@dataclass(frozen=True)
class Cell:
    """Holds a place in the order where an op runs (base) or may run again (candidate).

    A candidate has a variable.
    """

    slot: int
    op_id: int
    variable: int  # −1 where it certainly runs


def recomputations(order: Sequence[int], base: Sequence[int]) -> Iterator[Pair]:
    """Yields every run of an op after its first one, with its slot.

    The slot is the base position of the next first run.
    """
    place = {op_id: at for at, op_id in enumerate(base)}
    seen: set[int] = set()
    waiting: list[int] = []
    for op_id in order:
        if op_id in seen:
            waiting.append(op_id)
        else:
            seen.add(op_id)
            yield from ((place[op_id], again) for again in waiting)
            waiting.clear()
    yield from ((len(base), again) for again in waiting)


class Model:
    """Writes the program of the module docstring, and reads an order from an assignment.

    Args:
        problem: a problem with a budget.
        base: the order of the first runs.
        candidates: recomputations that the program decides on.
        hint: a legal order to start from, with the first runs in the order of ``base``;
            recomputations that are no candidates are left out.

    Attributes:
        program: the program that CP-SAT solves.
    """

    KEPT, GONE = -1, -2  # segments that are constant: retained, or not there at all

    def __init__(
        self,
        problem: Problem,
        base: Sequence[int],
        candidates: Collection[Pair],
        hint: Sequence[int] | None,
    ):
        self.problem, self.graph, self.base = problem, problem.graph, base
        self.program = cp_sat.Program()
        place = {op_id: at for at, op_id in enumerate(base)}
        budget = problem.budget_bytes
        if budget is None:
            raise ValueError("a program needs a budget")
        self.unit_bytes = max(
            1, math.gcd(*(v.nbytes for v in self.graph.values), *problem.profile.op_workspace_bytes)
        )
        unit_s = max(problem.store_all_time_s / TIME_STEPS, 1e-15)
        self.capacity = (budget - problem.profile.resident_bytes) // self.unit_bytes
        rounds = 2 if len(base) <= TINY_OPS else 1
        cells = [(at, 1, at, op_id) for at, op_id in enumerate(base)]
        cells += [
            (slot, 0, place[op_id] + turn * len(base), op_id)
            for slot, op_id in set(candidates)
            for turn in range(rounds)
        ]
        self.cells: list[Cell] = []
        for slot, is_base, _, op_id in sorted(cells):
            variable = -1
            if not is_base:
                variable = self.program.variable(round(problem.profile.op_time_s[op_id] / unit_s))
            self.cells.append(Cell(slot, op_id, variable))
        # Per value its events (cell index; len(cells) is the end of the step) and the segment after
        # each of them.
        self.events: dict[int, list[int]] = {}
        self.segments: dict[int, list[int]] = {}
        for at, cell in enumerate(self.cells):
            op = self.graph.ops[cell.op_id]
            for value_id in dict.fromkeys((*op.inputs, *op.outputs)):
                value = self.graph.values[value_id]
                # a value of no bytes is kept and needs no decision
                if value.producer is not None and value.nbytes > 0:
                    self.events.setdefault(value_id, []).append(at)
        for value_id in self.graph.outputs:
            if value_id in self.events:
                self.events[value_id].append(len(self.cells))
        for value_id, events in self.events.items():
            self._segment(value_id, events)
        self._rows()
        if hint is not None:
            self.program.hint = self._hint(hint)

    def order(self, ones: frozenset[int]) -> tuple[int, ...]:
        """Returns the order that an assignment stands for."""
        return tuple(
            cell.op_id for cell in self.cells if cell.variable < 0 or cell.variable in ones
        )

    def units(self, nbytes: int) -> int:
        return nbytes // self.unit_bytes

    def _segment(self, value_id: int, events: list[int]) -> None:
        """Chooses constants and variables for the segments of a value, the last one first.

        Writes (1), (2), (3) and (5).
        """
        producer = self.graph.values[value_id].producer
        after = [self.GONE] * len(events)
        clauses = self.program.clauses
        for j in range(len(events) - 1, 0, -1):
            cell = self.cells[events[j]] if events[j] < len(self.cells) else None
            later = after[j]
            if cell is None or cell.variable < 0:
                before = self.KEPT  # a read that certainly happens
            elif cell.op_id != producer:
                before = self.KEPT if later == self.KEPT else self.program.variable()
                if before >= 0:
                    clauses.append((cell.variable, before, -1))
                    if later >= 0:
                        clauses.append((later, before, -1))
            else:
                before = self.program.variable()
                if later != self.GONE:
                    clauses.append((later, before, cell.variable))
                self.program.rows.append(([before, cell.variable], [1, 1], 1))
            after[j - 1] = before
        self.segments[value_id] = after

    def _rows(self) -> None:
        """Writes (4) for every cell where the budget could be exceeded."""
        # variable → units, of the values retained across the current cell
        across: dict[int, int] = {}
        optional = 0  # their sum
        kept = 0  # units retained whatever the variables say
        slack = self.capacity * ROW_SLACK if len(self.base) > SMALL_OPS else 0
        merged = _MergedRows(self.program, self.capacity, slack)
        next_event = dict.fromkeys(self.events, 0)
        segment = dict.fromkeys(self.events, self.GONE)
        for cell in self.cells:
            op = self.graph.ops[cell.op_id]
            touched = [v for v in dict.fromkeys((*op.inputs, *op.outputs)) if v in self.events]
            later = {v: self.segments[v][next_event[v]] for v in touched}
            own = self.units(self.problem.profile.op_workspace_bytes[op.id])
            own += sum(self.units(self.graph.values[v].nbytes) for v in op.outputs)
            if kept + optional + own > self.capacity:
                merged.add(*self._row(cell, across, kept, later))
            else:
                merged.flush()
            for value_id in touched:
                units = self.units(self.graph.values[value_id].nbytes)
                for old, sign in ((segment[value_id], -1), (later[value_id], 1)):
                    if old == self.KEPT:
                        kept += sign * units
                    elif old >= 0 and sign < 0:
                        del across[old]
                        optional -= units
                    elif old >= 0:
                        across[old] = units
                        optional += units
                segment[value_id] = later[value_id]
                next_event[value_id] += 1
        merged.flush()

    def _row(
        self, cell: Cell, across: dict[int, int], kept: int, later: dict[int, int]
    ) -> tuple[dict[int, int], int]:
        """Returns the terms (variable → units) and the constant of (4) at a cell.

        Args:
            later: value read or written at the cell → its segment after the cell.
        """
        op = self.graph.ops[cell.op_id]
        terms, constant = dict(across), kept
        workspace = self.units(self.problem.profile.op_workspace_bytes[op.id])
        if cell.variable < 0:
            constant += workspace
        elif workspace:
            terms[cell.variable] = workspace
        donors = [v for v in dict.fromkeys(op.may_reuse) if v in self.events]
        rank: Counter[int] = Counter()  # of an output among those of its size
        for value_id in op.outputs:
            nbytes = self.graph.values[value_id].nbytes
            rank[nbytes] += 1
            mine = [later[v] for v in donors if self.graph.values[v].nbytes == nbytes]
            new = self._new_buffer(cell, mine, rank[nbytes])
            if new == self.KEPT:
                constant += self.units(nbytes)
            elif new >= 0:
                terms[new] = terms.get(new, 0) + self.units(nbytes)
        return terms, constant

    def _new_buffer(self, cell: Cell, donors: list[int], rank: int) -> int:
        """Returns the variable that is 1 when an output of a cell needs a buffer of its own.

        It needs one when fewer than ``rank`` inputs of its size are given up at the cell.

        Args:
            donors: segments, after the cell, of the inputs whose buffers the output could take
                over.
            rank: place of the output among the outputs of its size, from 1.
        """
        runs = cell.variable if cell.variable >= 0 else self.KEPT
        if donors.count(self.GONE) >= rank:
            return self.GONE
        spare = len(donors) - donors.count(self.KEPT)  # inputs that may be given up
        if spare < rank:
            return runs
        new = self.program.variable()
        # Σ retained ≤ spare − rank unless there is a new buffer or the cell does not run
        needed = [d for d in donors if d >= 0]
        if runs >= 0:
            self.program.rows.append(
                ([*needed, runs, new], [*[1] * len(needed), rank, -rank], spare)
            )
        else:
            self.program.rows.append(([*needed, new], [*[1] * len(needed), -rank], spare - rank))
        return new

    def _hint(self, order: Sequence[int]) -> list[int]:
        """Returns the variables that are 1 when the cells of ``order``'s recomputations run."""
        wanted = set(recomputations(order, self.base))
        runs = []
        for cell in self.cells:
            runs.append(cell.variable < 0 or (cell.slot, cell.op_id) in wanted)
            wanted.discard((cell.slot, cell.op_id))  # it may have a second turn
        ones = {
            cell.variable
            for cell, on in zip(self.cells, runs, strict=True)
            if on and cell.variable >= 0
        }
        for value_id, events in self.events.items():
            producer = self.graph.values[value_id].producer
            wanted_later = False
            for j in range(len(events) - 1, 0, -1):
                at = events[j]
                if at == len(self.cells):
                    wanted_later = True
                elif runs[at]:
                    wanted_later = self.cells[at].op_id != producer
                if wanted_later and self.segments[value_id][j - 1] >= 0:
                    ones.add(self.segments[value_id][j - 1])
        return sorted(ones)


class _MergedRows:
    """Adds ``constant + Σ units·x ≤ capacity`` for successive cells.

    Cells that differ little share one row, with the largest of their terms.
    """

    def __init__(self, program: cp_sat.Program, capacity: int, slack: float):
        self.program, self.capacity, self.slack = program, capacity, slack
        self.terms: dict[int, int] = {}
        self.constant, self.total, self.least = 0, 0, 0

    def add(self, terms: dict[int, int], constant: int) -> None:
        own = constant + sum(terms.values())
        if not self.slack and constant == self.constant and terms == self.terms:
            return
        if self.terms and self.slack:
            extra = sum(max(0, units - self.terms.get(index, 0)) for index, units in terms.items())
            total = self.total + extra + max(0, constant - self.constant)
            if total - min(own, self.least) <= self.slack:
                for index, units in terms.items():
                    self.terms[index] = max(units, self.terms.get(index, 0))
                self.constant, self.total = max(constant, self.constant), total
                self.least = min(own, self.least)
                return
        self.flush()
        self.terms, self.constant, self.total, self.least = dict(terms), constant, own, own

    def flush(self) -> None:
        used = [(index, units) for index, units in self.terms.items() if units]
        if used or self.constant > self.capacity:  # without variables, a program without solutions
            self.program.rows.append(
                ([i for i, _ in used], [u for _, u in used], self.capacity - self.constant)
            )
        self.terms, self.constant = {}, 0
