"""Changes an order one run at a time and keeps its live bytes up to date, at native speed.

This is the kernel of :mod:`keras_remat.solvers.search.anneal`
(:mod:`keras_remat.solvers.engines.native` explains how it is compiled). Runs sit in *cells*. There
are more cells than runs, so that a run is put between two others without moving any: the no-ops of
FastSA (Imanishi, Xu, Takagi, Wang, Castillo, NeurIPS 2023). Inserting or removing a run changes
only the lifetimes of the values that it reads and writes; each change adds bytes to a range of the
live bytes. FastSA keeps the live bytes in a segment tree, whose root is the peak. Here they are an
array, and one pass over a range updates it and the *excess*, the sum over cells of the bytes above
the budget. A range has some hundred cells, which vector instructions pass as fast as a tree is
climbed, and the excess shows that a move helps even where the peak stays the same.

The state is three arrays, so that a call passes little: ``live`` has the bytes alive per cell and
at the end of the step; ``f`` the seconds of all runs and, from entry 1, of each op; ``s``
everything else. ``s[NAME]`` is a number or where a table begins: ``s[s[RUNS] + op · s[LIMIT] + k]``
is the cell of run ``k`` of an op. The semantics is that of :mod:`keras_remat.core.simulate`; a test
compares them after every change.

One file, though long: Numba compiles again when the file of a function changed, and knows nothing
of changes in files that it calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_remat.solvers.engines.native import entry, jit

(
    END,  # cells
    LIMIT,  # the most runs of an op
    BUDGET,  # bytes
    EXCESS,  # bytes
    TAKES_OVER,  # whether any op takes over buffers
    LOGGED,  # changes in the log
    N_AGAIN,  # ops in AGAIN
    N_MOVABLE,
    N_BIG,
    N_KEPT,
    N_OPS,
    N_VALUES,
    RESIDENT,  # bytes
    OP_AT,  # per cell the op, or -1
    REUSED,  # bytes taken over per cell
    RUNS,  # cells of the runs of an op, ascending, LIMIT places for each
    N_RUNS,
    READS,  # cells in which a value is read, ascending, from READ_AT of the value
    READ_AT,
    N_READS,
    AGAIN,  # ops that run more than once
    AGAIN_PLACE,
    LOG,  # changes of a move: (op, cell) inserted, (op, ~cell) removed
    TOUCHED,  # cells in which what is taken over may have changed
    INPUTS,  # of an op, from INPUT_AT of the op to INPUT_AT of the next
    INPUT_AT,
    OUTPUTS,
    OUTPUT_AT,
    REUSE,  # inputs whose buffers an op may take over
    REUSE_AT,
    BEFORE,  # ops all of whose runs come before all runs of this one
    BEFORE_AT,
    LATER,
    LATER_AT,
    NBYTES,
    PRODUCER,
    WORKSPACE,
    RECOMPUTABLE,
    MOVABLE,  # ops of the order
    BIG,  # values that can be computed again, and hold bytes
    KEPT,  # values alive at the end
) = range(41)
"""Indices of the numbers in ``s``; from OP_AT on, the numbers are the indices at which its tables
begin."""

DRAWS = 6
"""Number of random numbers of a move."""
CHAIN_OPS = 12
"""Number of runs that one move adds, at most."""
REACHES = (6, 30, 150, 1 << 30)
"""Number of cells by which a run is moved, at most."""


@jit
def add_bytes(live: Any, first: int, last: int, size: int, budget: int) -> int:
    """Adds bytes to the cells from ``first`` up to ``last``; returns the growth of the excess."""
    grown = 0
    part = live[first:last]  # indices from 0 are known not to be negative, and become vectors
    for k in range(len(part)):
        old = part[k]
        part[k] = old + size
        grown += max(old + size - budget, 0) - max(old - budget, 0)
    return grown


def add_bytes_in_numpy(live: Any, first: int, last: int, size: int, budget: int) -> int:
    """Does what :func:`add_bytes` does, where nothing is compiled."""
    if first >= last:
        return 0
    old = live[first:last] - budget
    new = old + size
    live[first:last] += size
    return int((np.maximum(new, 0) - np.maximum(old, 0)).sum())


@jit
def shift(s: Any, live: Any, first: int, last: int, size: int) -> None:
    """Adds bytes to a range of cells."""
    s[EXCESS] += add_bytes(live, first, last, size, s[BUDGET])


@jit
def runs_before(s: Any, op: int, cell: int) -> Any:
    """Returns the number of runs of an op before a cell."""
    first = op * s[LIMIT]
    at = s[s[N_RUNS] + op]
    while at and s[s[RUNS] + first + at - 1] >= cell:
        at -= 1
    return at


@jit
def last_read(s: Any, value: int, which: int) -> Any:
    """Returns the last cell in which the instance of run number ``which`` is alive."""
    op = s[s[PRODUCER] + value]
    first = op * s[LIMIT]
    begin = s[s[RUNS] + first + which]
    until = s[s[RUNS] + first + which + 1] if which + 1 < s[s[N_RUNS] + op] else s[END] + 1
    start = s[s[READ_AT] + value]
    low, high = 0, s[s[N_READS] + value]
    while low < high:
        middle = (low + high) // 2
        if s[s[READS] + start + middle] < until:
            low = middle + 1
        else:
            high = middle
    if low and s[s[READS] + start + low - 1] > begin:
        return s[s[READS] + start + low - 1]
    return begin


@jit
def dies_at(s: Any, value: int, cell: int) -> bool:
    """Returns whether the last read of the instance that is alive at a cell is there."""
    at = runs_before(s, s[s[PRODUCER] + value], cell)
    return bool(at > 0 and last_read(s, value, at - 1) == cell)


@jit
def update_reuse(s: Any, live: Any, count: int) -> None:
    """Counts again the bytes that the ops in the first ``count`` touched cells take over."""
    for k in range(count):
        cell = s[s[TOUCHED] + k]
        if cell >= s[END] or s[s[OP_AT] + cell] < 0:
            continue
        op = s[s[OP_AT] + cell]
        first, last = s[s[REUSE_AT] + op], s[s[REUSE_AT] + op + 1]
        if first == last:
            continue
        now = 0
        taken = 0
        for j in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
            size = s[s[NBYTES] + s[s[OUTPUTS] + j]]
            for i in range(first, last):
                value = s[s[REUSE] + i]
                bit = 1 << (i - first)
                if not taken & bit and s[s[NBYTES] + value] == size and dies_at(s, value, cell):
                    taken |= bit
                    now += size
                    break
        if now != s[s[REUSED] + cell]:
            shift(s, live, cell, cell + 1, s[s[REUSED] + cell] - now)
            s[s[REUSED] + cell] = now


@jit
def can_insert(s: Any, op: int, cell: int) -> bool:
    """Returns whether the cell is empty and one more run there breaks none of S1, S3 and S4."""
    limit = s[LIMIT]
    if s[s[OP_AT] + cell] >= 0 or s[s[N_RUNS] + op] >= limit:
        return False
    for k in range(s[s[INPUT_AT] + op], s[s[INPUT_AT] + op + 1]):
        producer = s[s[PRODUCER] + s[s[INPUTS] + k]]
        if s[s[N_RUNS] + producer] == 0 or s[s[RUNS] + producer * limit] >= cell:
            return False
    for k in range(s[s[BEFORE_AT] + op], s[s[BEFORE_AT] + op + 1]):
        earlier = s[s[BEFORE] + k]
        count = s[s[N_RUNS] + earlier]
        if count and s[s[RUNS] + earlier * limit + count - 1] > cell:
            return False
    for k in range(s[s[LATER_AT] + op], s[s[LATER_AT] + op + 1]):
        later = s[s[LATER] + k]
        if s[s[N_RUNS] + later] and s[s[RUNS] + later * limit] < cell:
            return False
    return True


@jit
def insert_read(s: Any, value: int, cell: int) -> None:
    """Notes that a value is read in a cell."""
    start = s[s[READ_AT] + value]
    at = s[s[N_READS] + value]
    while at and s[s[READS] + start + at - 1] > cell:
        s[s[READS] + start + at] = s[s[READS] + start + at - 1]
        at -= 1
    s[s[READS] + start + at] = cell
    s[s[N_READS] + value] += 1


@jit
def remove_read(s: Any, value: int, cell: int) -> None:
    """Forgets that a value is read in a cell."""
    start = s[s[READ_AT] + value]
    count = s[s[N_READS] + value] - 1
    at = count
    while s[s[READS] + start + at] != cell:
        at -= 1
    for k in range(at, count):
        s[s[READS] + start + k] = s[s[READS] + start + k + 1]
    s[s[N_READS] + value] = count


@jit
def count_run(s: Any, op: int, change: int) -> None:
    """Keeps the list of the ops that run more than once."""
    before = s[s[N_RUNS] + op]
    s[s[N_RUNS] + op] = before + change
    if before == 1 and change > 0:
        s[s[AGAIN] + s[N_AGAIN]] = op
        s[s[AGAIN_PLACE] + op] = s[N_AGAIN]
        s[N_AGAIN] += 1
    elif before == 2 and change < 0:
        s[N_AGAIN] -= 1
        moved = s[s[AGAIN] + s[N_AGAIN]]
        s[s[AGAIN] + s[s[AGAIN_PLACE] + op]] = moved
        s[s[AGAIN_PLACE] + moved] = s[s[AGAIN_PLACE] + op]


@jit
def insert(s: Any, live: Any, f: Any, op: int, cell: int) -> bool:
    """Inserts a run of an op; returns whether that was legal, and changes nothing if not."""
    if not can_insert(s, op, cell):
        return False
    touched = 1
    s[s[TOUCHED]] = cell
    for k in range(s[s[INPUT_AT] + op], s[s[INPUT_AT] + op + 1]):
        value = s[s[INPUTS] + k]
        last = last_read(s, value, runs_before(s, s[s[PRODUCER] + value], cell) - 1)
        if last < cell:
            shift(s, live, last + 1, cell + 1, s[s[NBYTES] + value])
            s[s[TOUCHED] + touched] = last
            touched += 1
        insert_read(s, value, cell)
    at = runs_before(s, op, cell)
    first = op * s[LIMIT]
    for k in range(s[s[N_RUNS] + op], at, -1):
        s[s[RUNS] + first + k] = s[s[RUNS] + first + k - 1]
    s[s[RUNS] + first + at] = cell
    count_run(s, op, 1)
    for k in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
        value = s[s[OUTPUTS] + k]
        last = last_read(s, value, at)
        if last > cell and at:  # these reads were of the instance before this one
            kept = last_read(s, value, at - 1)
            shift(s, live, kept + 1, cell, -s[s[NBYTES] + value])
            s[s[TOUCHED] + touched] = kept
            touched += 1
        else:
            shift(s, live, cell, last + 1, s[s[NBYTES] + value])
        s[s[TOUCHED] + touched] = last
        touched += 1
    s[s[OP_AT] + cell] = op
    if s[s[WORKSPACE] + op]:
        shift(s, live, cell, cell + 1, s[s[WORKSPACE] + op])
    f[0] += f[1 + op]
    if s[TAKES_OVER]:
        update_reuse(s, live, touched)
    return True


@jit
def can_remove(s: Any, cell: int) -> bool:
    """Returns whether all readers of a run's outputs could read those of an earlier run."""
    op = s[s[OP_AT] + cell]
    at = runs_before(s, op, cell)
    if at:
        return True
    if s[s[N_RUNS] + op] < 2:
        return False
    for k in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
        if last_read(s, s[s[OUTPUTS] + k], 0) != cell:
            return False
    return True


@jit
def remove(s: Any, live: Any, f: Any, cell: int) -> bool:
    """Removes the run in a cell; returns whether that was legal, and changes nothing if not."""
    if not can_remove(s, cell):
        return False
    op = s[s[OP_AT] + cell]
    at = runs_before(s, op, cell)
    first = op * s[LIMIT]
    own = s[s[REUSED] + cell] - s[s[WORKSPACE] + op]
    if own:
        shift(s, live, cell, cell + 1, own)
    s[s[REUSED] + cell] = 0
    s[s[OP_AT] + cell] = -1
    touched = 0
    for k in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
        value = s[s[OUTPUTS] + k]
        last = last_read(s, value, at)
        if last > cell and at:
            kept = last_read(s, value, at - 1)
            shift(s, live, kept + 1, cell, s[s[NBYTES] + value])
            s[s[TOUCHED] + touched] = kept
            s[s[TOUCHED] + touched + 1] = last
            touched += 2
        else:
            shift(s, live, cell, last + 1, -s[s[NBYTES] + value])
    for k in range(at, s[s[N_RUNS] + op] - 1):
        s[s[RUNS] + first + k] = s[s[RUNS] + first + k + 1]
    count_run(s, op, -1)
    for k in range(s[s[INPUT_AT] + op], s[s[INPUT_AT] + op + 1]):
        value = s[s[INPUTS] + k]
        remove_read(s, value, cell)
        last = last_read(s, value, runs_before(s, s[s[PRODUCER] + value], cell + 1) - 1)
        if last < cell:
            shift(s, live, last + 1, cell + 1, -s[s[NBYTES] + value])
            s[s[TOUCHED] + touched] = last
            touched += 1
    f[0] -= f[1 + op]
    if s[TAKES_OVER]:
        update_reuse(s, live, touched)
    return True


@jit
def add(s: Any, live: Any, f: Any, op: int, cell: int) -> bool:
    """Inserts a run and logs the change."""
    if not insert(s, live, f, op, cell):
        return False
    at = 2 * s[LOGGED]
    s[s[LOG] + at], s[s[LOG] + at + 1] = op, cell
    s[LOGGED] += 1
    return True


@jit
def take(s: Any, live: Any, f: Any, cell: int) -> bool:
    """Removes a run and logs the change."""
    op = s[s[OP_AT] + cell]
    if not remove(s, live, f, cell):
        return False
    at = 2 * s[LOGGED]
    s[s[LOG] + at], s[s[LOG] + at + 1] = op, ~cell
    s[LOGGED] += 1
    return True


@jit
def undo(s: Any, live: Any, f: Any) -> None:
    """Takes the logged changes back, the last one first."""
    for k in range(s[LOGGED] - 1, -1, -1):
        cell = s[s[LOG] + 2 * k + 1]
        if cell >= 0:
            remove(s, live, f, cell)
        else:
            insert(s, live, f, s[s[LOG] + 2 * k], ~cell)
    s[LOGGED] = 0


@jit
def empty_before(s: Any, cell: int, after: int) -> int:
    """Returns the last empty cell before one and after another, or -1 where none is near."""
    for at in range(cell - 1, max(after, cell - 60), -1):
        if s[s[OP_AT] + at] < 0:
            return at
    return -1


@jit
def empty_near(s: Any, cell: int, low: int, high: int) -> int:
    """Returns an empty cell close to one, from ``low`` to ``high``, or -1."""
    for distance in range(12):
        if cell + distance <= high and s[s[OP_AT] + cell + distance] < 0:
            return cell + distance
        if cell - distance >= low and s[s[OP_AT] + cell - distance] < 0:
            return cell - distance
    return -1


@jit
def full_cell(s: Any, live: Any, draw: float) -> int:
    """Returns the fullest of three random cells."""
    end = s[END]
    best = int(draw * end)
    for _ in range(2):
        draw = draw * 769.0 % 1.0
        cell = int(draw * end)
        if live[cell] > live[best]:
            best = cell
    return best


@jit
def evict_across(s: Any, live: Any, f: Any, cell: int, draw: float, bound_s: float) -> bool:
    """Brings back a value that is alive across a cell, just before its next read there."""
    count = s[N_BIG]
    if count == 0:
        return False
    at = int(draw * count)
    stride = 1 + int(draw * 7919.0) % 97
    for _ in range(24):
        at = (at + stride) % count
        value = s[s[BIG] + at]
        op = s[s[PRODUCER] + value]
        run = runs_before(s, op, cell)
        if run == 0 or f[1 + op] > bound_s:
            continue
        if last_read(s, value, run - 1) <= cell:
            continue
        start = s[s[READ_AT] + value]
        k = s[s[N_READS] + value] - 1
        while k > 0 and s[s[READS] + start + k - 1] > cell:
            k -= 1
        target = empty_before(s, s[s[READS] + start + k], s[s[RUNS] + op * s[LIMIT] + run - 1])
        if target >= 0:
            return add(s, live, f, op, target)
    return False


@jit
def evict_before(s: Any, live: Any, f: Any, reader: int, draw: float, bound_s: float) -> bool:
    """Brings back an input, just before a random run of the op that reads it."""
    count = s[s[INPUT_AT] + reader + 1] - s[s[INPUT_AT] + reader]
    if count == 0:
        return False
    which = draw * count
    value = s[s[INPUTS] + s[s[INPUT_AT] + reader] + int(which)]
    op = s[s[PRODUCER] + value]
    if not s[s[RECOMPUTABLE] + op] or f[1 + op] > bound_s:
        return False
    cell = s[s[RUNS] + reader * s[LIMIT] + int(which % 1.0 * s[s[N_RUNS] + reader])]
    run = runs_before(s, op, cell)
    target = empty_before(s, cell, s[s[RUNS] + op * s[LIMIT] + run - 1])
    return target >= 0 and add(s, live, f, op, target)


@jit
def extend(s: Any, live: Any, f: Any, draw: float) -> None:
    """Brings back the inputs of the runs just added, too, where they are not alive nearby."""
    done = 0
    while done < s[LOGGED] and s[LOGGED] < CHAIN_OPS:
        reader, cell = s[s[LOG] + 2 * done], s[s[LOG] + 2 * done + 1]
        done += 1
        if cell < 0:
            continue
        for k in range(s[s[INPUT_AT] + reader], s[s[INPUT_AT] + reader + 1]):
            value = s[s[INPUTS] + k]
            op = s[s[PRODUCER] + value]
            draw = draw * 769.0 % 1.0
            if draw < 0.3 or not s[s[RECOMPUTABLE] + op] or s[LOGGED] >= CHAIN_OPS:
                continue
            write = s[s[RUNS] + op * s[LIMIT] + runs_before(s, op, cell) - 1]
            start, at = s[s[READ_AT] + value], 0
            while s[s[READS] + start + at] < cell:
                at += 1
            last = max(write, s[s[READS] + start + at - 1]) if at else write
            after = (
                s[s[READS] + start + at + 1]
                if at + 1 < s[s[N_READS] + value]
                else cell + REACHES[2]
            )
            if cell - last > REACHES[1] and after - cell > REACHES[1]:
                target = empty_before(s, cell, last)
                if target >= 0:
                    add(s, live, f, op, target)


@jit
def drop(s: Any, live: Any, f: Any, op: int, draw: float) -> bool:
    """Removes a random run of an op, and the runs that nothing reads then."""
    cell = s[s[RUNS] + op * s[LIMIT] + int(draw * s[s[N_RUNS] + op])]
    if not take(s, live, f, cell):
        return False
    sweep(s, live, f)
    return True


@jit
def sweep(s: Any, live: Any, f: Any) -> None:
    """Removes the runs that nothing reads once those just removed are gone."""
    done = s[LOGGED] - 1
    while done < s[LOGGED] and s[LOGGED] < CHAIN_OPS:
        reader, cell = s[s[LOG] + 2 * done], ~s[s[LOG] + 2 * done + 1]
        done += 1
        for k in range(s[s[INPUT_AT] + reader], s[s[INPUT_AT] + reader + 1]):
            op = s[s[PRODUCER] + s[s[INPUTS] + k]]
            if s[s[N_RUNS] + op] < 2 or s[LOGGED] >= CHAIN_OPS:
                continue
            run = runs_before(s, op, cell) - 1
            if run < 0:
                continue
            write = s[s[RUNS] + op * s[LIMIT] + run]
            useless = True
            for j in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
                useless = useless and last_read(s, s[s[OUTPUTS] + j], run) == write
            if useless:
                take(s, live, f, write)


@jit
def move(s: Any, live: Any, f: Any, op: int, pick: float, reach: int, draw: float) -> bool:
    """Moves a random run of an op within the cells that its producers and readers leave it."""
    limit = s[LIMIT]
    which = int(pick * s[s[N_RUNS] + op])
    cell = s[s[RUNS] + op * limit + which]
    low, high = max(0, cell - reach), min(s[END] - 1, cell + reach)
    for k in range(s[s[INPUT_AT] + op], s[s[INPUT_AT] + op + 1]):
        low = max(low, s[s[RUNS] + s[s[PRODUCER] + s[s[INPUTS] + k]] * limit] + 1)
    if which == 0:
        for k in range(s[s[OUTPUT_AT] + op], s[s[OUTPUT_AT] + op + 1]):
            value = s[s[OUTPUTS] + k]
            if s[s[N_READS] + value]:
                high = min(high, s[s[READS] + s[s[READ_AT] + value]] - 1)
    if high <= low:
        return False
    target = empty_near(s, low + int(draw * (high - low + 1)), low, high)
    if target < 0 or not add(s, live, f, op, target):
        return False
    if take(s, live, f, cell):
        return True
    undo(s, live, f)
    return False


@jit
def change(s: Any, live: Any, f: Any, draws: Any, at: int, bound_s: float) -> bool:
    """Makes a random move; returns whether it changed anything.

    Moves that make the order more than ``bound_s`` slower are not tried.
    """
    s[LOGGED] = 0
    kind = draws[at]
    again = s[N_AGAIN]
    if kind < 0.45:
        op = s[s[MOVABLE] + int(draws[at + 1] * s[N_MOVABLE])]
        if again and kind < 0.12:
            op = s[s[AGAIN] + int(draws[at + 1] * again)]
        reach = REACHES[int(draws[at + 2] * 4)]
        return move(s, live, f, op, draws[at + 3], reach, draws[at + 4])
    dropped = False
    if again and kind < 0.75:
        op = s[s[AGAIN] + int(draws[at + 1] * again)]
        dropped = drop(s, live, f, op, draws[at + 2])
        if kind < 0.6 or not dropped:
            return dropped
        bound_s += f[1 + s[s[LOG]]]
    if draws[at + 3] < 0.6:
        added = evict_across(s, live, f, full_cell(s, live, draws[at + 4]), draws[at + 5], bound_s)
    else:
        reader = s[s[MOVABLE] + int(draws[at + 4] * s[N_MOVABLE])]
        added = evict_before(s, live, f, reader, draws[at + 5], bound_s)
    if added and draws[at + 3] * 10.0 % 1.0 < 0.5:
        extend(s, live, f, draws[at + 2])
    return added or dropped


@entry
def walk(
    s: Any,
    live: Any,
    f: Any,
    draws: Any,
    exponentials: Any,
    temperature_s: float,
    weight: float,
    best_s: float,
    best_at: Any,
) -> float:
    """Makes a move per exponential number and keeps each with Metropolis's probability.

    Args:
        s, live, f: the state.
        draws: ``DRAWS`` uniform numbers per move.
        exponentials: one exponentially distributed number per move.
        temperature_s: seconds; a change for the worse by them is kept with a probability of 1/e.
        weight: seconds per unit of excess.
        best_s: the seconds to beat.
        best_at: gets ``op_at`` of the fastest order within the budget.

    Returns:
        The seconds of that order, or ``best_s`` where there is none.
    """
    energy = f[0] + weight * s[EXCESS]
    for step in range(len(exponentials)):
        bound_s = temperature_s * exponentials[step]
        if change(s, live, f, draws, step * DRAWS, bound_s + weight * s[EXCESS]):
            new = f[0] + weight * s[EXCESS]
            if new - energy <= bound_s:
                energy = new
                if s[EXCESS] == 0 and f[0] < best_s * (1 - 1e-9):
                    best_s = f[0]
                    for cell in range(s[END]):
                        best_at[cell] = s[s[OP_AT] + cell]
            else:
                undo(s, live, f)
    return best_s


@entry
def fill(s: Any, live: Any, f: Any, order: Any, count: int) -> int:
    """Inserts the first ``count`` runs of an order, evenly spaced, and nothing else.

    Returns the position of the first run that is not legal, or -1.
    """
    end = s[END]
    for cell in range(end):
        s[s[OP_AT] + cell] = -1
        s[s[REUSED] + cell] = 0
    for op in range(s[N_OPS]):
        s[s[N_RUNS] + op] = 0
    for value in range(s[N_VALUES]):
        s[s[N_READS] + value] = 0
    for k in range(s[N_KEPT]):
        value = s[s[KEPT] + k]
        s[s[N_READS] + value] = 1
        s[s[READS] + s[s[READ_AT] + value]] = end
    live[:] = s[RESIDENT]
    s[EXCESS] = max(0, s[RESIDENT] - s[BUDGET]) * (end + 1)
    s[N_AGAIN] = 0
    f[0] = 0.0
    for at in range(count):
        if not insert(s, live, f, order[at], (2 * at + 1) * end // (2 * count)):
            return at
    return -1


@entry
def spread(s: Any, live: Any, f: Any, order: Any) -> int:
    """Spaces the runs evenly again, so that there is room between them everywhere.

    Args:
        s, live, f: the state.
        order: gets the ops in the order of their cells.

    Returns:
        The number of runs.
    """
    count = 0
    for cell in range(s[END]):
        if s[s[OP_AT] + cell] >= 0:
            order[count] = s[s[OP_AT] + cell]
            count += 1
    fill(s, live, f, order, count)
    return count
