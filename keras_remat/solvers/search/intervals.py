"""Retention intervals, with as many recomputations per op as pay, by CP-SAT.

Bartan et al. 2023 (MOCCASIN, arXiv 2304.14463, sec. 3) give every op of a fixed order one or two
*retention intervals* with integer ends. Here an interval is written as a run of retained segments
instead, which needs Booleans only and lifts three limits of that model: an op may run again more
than once, values recomputed in one slot do not count all at once, and buffers that are taken over
count once.

**Cells.** The base order is interleaved with *candidate cells*: op v may run again in slot s, that
is, just before the op at base position s. Candidates of one slot follow each other in base order.
``X[c]`` says that candidate cell c runs (a base cell always does).

**Segments.** The cells that write or may read a value are its events; ``K[y,j]`` says that y is
retained between its events j and j + 1. For a cell c, a value it reads (segments i before and i'
after c) and one it writes:

    (1) X[c] ≤ K[y,i]                      what is read is there
    (2) K[y,i'] ≤ K[y,i]                   reading creates nothing
    (3) K[y,i'] ≤ K[y,i] + X[c]            writing does
    (4) Σ bytes·K over segments across c + Σ bytes·K[y,i] over values read or written at c + Σ
    bytes·X[c] over values written at c,
        less taken-over buffers, + workspace·X[c] ≤ budget − resident
    (5) K[y,i] + X[c] ≤ 1                  a value that is there is not computed again

With every op a candidate in every slot this is Checkmate's program (arXiv 1910.02653, eq. 1-9),
stage by stage; choosing slots where a value has a reader, and those of its recomputed readers a few
levels up, keeps it small. Takeovers are counted by size: the k-th output of a size needs a buffer
of its own unless k inputs of that size that may be taken over are given up.

Known limits: what is computed again between two first runs is so in the order of the first ones,
each op once (twice in tiny orders); the order of first runs is fixed, so the program's bound says
nothing about other orders and is not reported; ``status`` is ``"optimal"`` only when nothing is
recomputed or the bound that holds for every order (:mod:`keras_remat.solvers.bounds.cut_bound`) is
met.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Solution
from keras_remat.core.simulate import live_bytes, simulate
from keras_remat.core.validate import validate
from keras_remat.errors import InvalidScheduleError, PeakExceededError
from keras_remat.solvers.engines import cp_sat
from keras_remat.solvers.orders.effort import effort_s
from keras_remat.solvers.orders.incumbent import Incumbent, Progress
from keras_remat.solvers.search import greedy

DEPTHS = (2, 4, 8, 16)
"""Successive depths of candidates; the next is tried when the program of the last was solved to its
optimum."""
WORK_PER_S = 0.12
"""Units of CP-SAT's deterministic time per second of a time limit: fewer than it does in a second,
so that they run out first."""
MINIMUM_S = 1.0
"""Starting the solver's process with less time left is not worth it."""
TIGHT_SHARE = 0.9
"""A gap matters when more than this share of the budget is in use somewhere in it."""
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
    """A place in the order where an op runs (base), runs again (fixed) or may run again (candidate,
    with its variable)."""

    slot: int
    op_id: int
    variable: int  # −1 where it certainly runs


@dataclass(frozen=True)
class Model:
    """The 0-1 program of a problem and how to read an order from an assignment."""

    program: cp_sat.Program
    cells: tuple[Cell, ...]
    unit_s: float

    def chosen(self, ones: frozenset[int]) -> set[tuple[int, int]]:
        """(slot, op) of the candidates that run in an assignment."""
        return {(cell.slot, cell.op_id) for cell in self.cells if cell.variable in ones}

    def order(self, ones: frozenset[int]) -> tuple[int, ...]:
        """The order an assignment stands for."""
        return tuple(
            cell.op_id for cell in self.cells if cell.variable < 0 or cell.variable in ones
        )


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """Returns the best schedule CP-SAT finds over the default order.

    Args:
        problem, time_limit_s, seed, progress: as in :func:`keras_remat.solvers.solve`.

    Raises:
        MissingPackageError: OR-Tools is not installed (the extra ``solvers``).
        ScheduleNotFoundError: none found in time.
    """
    cp_sat.require_ortools()
    incumbent = Incumbent(problem, "intervals", time_limit_s, progress)
    if incumbent.offer_store_all():
        return incumbent.solution()
    base, deadline = tuple(sorted(problem.graph.needed)), incumbent.deadline
    steps = greedy.steps_limit(time_limit_s / 4)
    known = [
        s.order
        for s in greedy.candidates(problem, deadline=deadline, max_steps=steps, orders=[base])
    ]
    work = work_limit(0.75 * time_limit_s)
    for depth in DEPTHS:
        search = improve(problem, base, known, depth=depth, deadline=deadline, work=work, seed=seed)
        end = yield_into(known, search)
        work -= end.work
        if not end.solved:
            break
    for order in known:
        incumbent.offer(order)
    return incumbent.solution()


def work_limit(time_limit_s: float) -> float:
    """Units of CP-SAT's deterministic time for a time limit."""
    return WORK_PER_S * effort_s(time_limit_s)


@dataclass(frozen=True)
class End:
    """How a search ended: whether the program was solved (or has no solution), and the work
    done."""

    solved: bool
    work: float


def yield_into(found: list[tuple[int, ...]], orders: Generator[tuple[int, ...], None, End]) -> End:
    """Appends what ``orders`` yields to ``found`` and returns what it returns."""
    while True:
        try:
            found.append(next(orders))
        except StopIteration as stop:
            end: End = stop.value
            return end


def improve(
    problem: Problem,
    base: Sequence[int],
    known: Sequence[tuple[int, ...]],
    *,
    deadline: Deadline,
    work: float,
    depth: int,
    seed: int = 0,
) -> Generator[tuple[int, ...], None, End]:
    """Yields legal orders within the budget as CP-SAT finds them, each better in the program's
    terms than the one before.

    Args:
        problem: with a budget.
        base: the order of the first runs.
        known: legal orders with these first runs; their recomputations become candidates, and the
            search starts from the fastest.
        deadline: to end at.
        work: deterministic limit (:func:`work_limit`).
        depth: levels of recomputed readers whose slots a value's producer inherits.
        seed: of the search.

    Returns:
        Whether the program was solved to its optimum or shown to have no solution, and the work
        that took.
    """
    if work <= 0:
        return End(False, 0.0)
    slots = candidate_slots(problem, base, depth)
    for order in known:
        for slot, op_id in recomputations(order, base):
            slots.setdefault(op_id, set()).add(slot)
    hint = min(known, key=lambda order: simulate(problem, Schedule(order)).time_s, default=None)
    model = build(problem, base, slots, hint)
    left = deadline.left_s()
    if left <= MINIMUM_S:
        return End(False, 0.0)
    end = End(False, work)
    for incumbent in cp_sat.solve_program(
        model.program, time_limit_s=left, work_limit=work, seed=seed
    ):
        if incumbent.status:
            end = End(
                incumbent.status in ("OPTIMAL", "INFEASIBLE"),
                work if incumbent.work is None else incumbent.work,
            )
        if incumbent.ones is not None:
            order = model.order(incumbent.ones)
            if _fits(problem, order):
                yield order
    return end


def _fits(problem: Problem, order: tuple[int, ...]) -> bool:
    try:
        validate(problem, Schedule(order))
    except (InvalidScheduleError, PeakExceededError):
        return False
    return True


def recomputations(order: Sequence[int], base: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(slot, op) of every run after the first, the slot being the base position of the next first
    run."""
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


def candidate_slots(problem: Problem, base: Sequence[int], depth: int) -> dict[int, set[int]]:
    """For every op the slots in which running it again may pay.

    A slot is one where an output of the op is read after a gap in which the base order comes close
    to the budget; or where a reader of an output is a candidate itself, up to ``depth`` readers
    away, unless the output is there anyway for a read much later. In a long order, gaps shorter
    than 1/300 of it are left alone; in a short one a value is a candidate too where an op could
    take its buffer over if it were computed again afterwards; in a tiny one, everywhere in the gap.
    """
    graph = problem.graph
    place = {op_id: at for at, op_id in enumerate(base)}
    last = [len(base)] * len(graph.ops)  # slot after which S4 forbids another run
    for op_id in base:
        for earlier in graph.ops[op_id].after:
            last[earlier] = min(last[earlier], place[op_id])
    live = live_bytes(problem, Schedule(tuple(base)))
    tight = np.concatenate([[0], np.cumsum(live > TIGHT_SHARE * (problem.budget_bytes or 0))])
    least_gap = max(1, len(base) // 300)
    is_small = len(base) <= SMALL_OPS
    near = len(base) if is_small else len(base) // 10
    levels: dict[int, dict[int, int]] = {}
    for op_id in reversed(base):  # readers before the ops they read from
        op = graph.ops[op_id]
        if not op.recomputable:
            continue
        found: dict[int, int] = {}
        for value_id in op.outputs:
            if not graph.values[value_id].nbytes:
                continue
            reads = sorted(place[reader] for reader in graph.readers[value_id] if reader in place)
            if value_id in graph.outputs:
                reads.append(len(base))
            for previous, read in itertools.pairwise([place[op_id], *reads]):
                slot = min(
                    read, last[op_id]
                )  # for a read after that the value is computed early and held
                taken = (
                    is_small
                    and value_id in graph.ops[base[previous]].may_reuse
                    and tight[previous + 1] > tight[previous]
                )
                if taken or (slot - previous > least_gap and tight[slot] > tight[previous + 1]):
                    found |= dict.fromkeys(
                        range(previous + 2, slot) if len(base) <= TINY_OPS else (), 0
                    ) | {slot: 0}
            for reader in graph.readers[value_id]:
                for slot, level in levels.get(reader, {}).items():
                    if level < depth and slot > place[op_id] + 1:
                        at = bisect_left(reads, slot)
                        if at == len(reads) or reads[at] - slot <= near:
                            found[slot] = min(found.get(slot, depth), level + 1)
        levels[op_id] = {slot: level for slot, level in found.items() if slot <= last[op_id]}
    return {op_id: set(found) for op_id, found in levels.items() if found}


class _Builder:
    """Writes the program of the module docstring."""

    KEPT, GONE = -1, -2  # segments that are constant: retained, or not there at all

    def __init__(
        self,
        problem: Problem,
        base: Sequence[int],
        slots: dict[int, set[int]],
        fixed: Collection[tuple[int, int]] = (),
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
        self.unit_s = max(problem.store_all_time_s / TIME_STEPS, 1e-15)
        self.capacity = (budget - problem.profile.resident_bytes) // self.unit_bytes
        self.merges = len(base) > SMALL_OPS and not fixed
        candidates = {
            (slot, op_id) for op_id, chosen in slots.items() for slot in chosen
        }.difference(fixed)
        rounds = 2 if len(base) <= TINY_OPS and not fixed else 1
        again = [
            (slot, 0, place[op_id] + turn * len(base), op_id)
            for slot, op_id in candidates.union(fixed)
            for turn in range(rounds)
        ]
        self.cells = [
            Cell(
                slot,
                op_id,
                self.program.variable(self._cost(op_id))
                if not kind and (slot, op_id) in candidates
                else -1,
            )
            for slot, kind, _, op_id in sorted(
                again + [(at, 1, at, op_id) for at, op_id in enumerate(base)]
            )
        ]
        # Per value its events (cell index; len(cells) is the end of the step) and the segment after
        # each of them.
        self.events: dict[int, list[int]] = {}
        self.segments: dict[int, list[int]] = {}
        for at, cell in enumerate(self.cells):
            op = self.graph.ops[cell.op_id]
            for value_id in dict.fromkeys((*op.inputs, *op.outputs)):
                value = self.graph.values[value_id]
                if (
                    value.producer is not None and value.nbytes > 0
                ):  # what takes no room is kept and needs no decision
                    self.events.setdefault(value_id, []).append(at)
        for value_id in self.graph.outputs:
            if value_id in self.events:
                self.events[value_id].append(len(self.cells))
        for value_id, events in self.events.items():
            self._segment(value_id, events)
        self._rows()

    def _cost(self, op_id: int) -> int:
        return round(self.problem.profile.op_time_s[op_id] / self.unit_s)

    def units(self, nbytes: int) -> int:
        return nbytes // self.unit_bytes

    def _segment(self, value_id: int, events: list[int]) -> None:
        """Chooses constants and variables for the segments of a value, last one first, and writes
        (1), (2), (3), (5)."""
        producer = self.graph.values[value_id].producer
        after = [self.GONE] * len(events)
        clauses = self.program.clauses
        for j in range(len(events) - 1, 0, -1):
            cell = self.cells[events[j]] if events[j] < len(self.cells) else None
            later = after[j]
            if cell is not None and cell.variable < 0 and cell.op_id == producer:
                before = self.GONE  # certainly computed again
            elif cell is None or cell.variable < 0:
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
        across: dict[
            int, int
        ] = {}  # variable → units, of the values retained across the current cell
        optional = 0  # their sum
        kept = 0  # units retained whatever the variables say
        merged = _MergedRows(
            self.program, self.capacity, self.capacity * ROW_SLACK if self.merges else 0
        )
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
        """Terms (variable → units) and constant of (4) at ``cell``; ``later`` has the segments
        after it of what it touches."""
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
        """The variable that is 1 when an output of ``cell`` needs a buffer of its own, being the
        ``rank``-th of its size.

        It does when fewer than ``rank`` donors, whose segments after the cell these are, are given
        up.
        """
        runs = cell.variable if cell.variable >= 0 else self.KEPT
        if donors.count(self.GONE) >= rank:
            return self.GONE
        spare = len(donors) - donors.count(self.KEPT)  # given up at most
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

    def hint(self, order: Sequence[int]) -> list[int]:
        """The variables that are 1 when the cells of ``order``'s recomputations run."""
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
    """Adds ``constant + Σ units·x ≤ capacity`` for successive cells; cells that differ little share
    the row of their largest terms."""

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
                self.constant, self.total, self.least = (
                    max(constant, self.constant),
                    total,
                    min(own, self.least),
                )
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


def build(
    problem: Problem,
    base: Sequence[int],
    slots: dict[int, set[int]],
    hint: Sequence[int] | None,
    fixed: Collection[tuple[int, int]] = (),
) -> Model:
    """The program of the module docstring.

    Args:
        problem: with a budget.
        base: the order of the first runs.
        slots: op → slots in which it may run again.
        hint: a legal order to start from, with the first runs in the order of ``base``;
            recomputations outside of ``slots`` are left out.
        fixed: (slot, op) of recomputations that are not in question.
    """
    builder = _Builder(problem, base, slots, fixed)
    if hint is not None:
        builder.program.hint = builder.hint(hint)
    return Model(builder.program, tuple(builder.cells), builder.unit_s)
