"""Runs a base order and evicts values to make room, at native speed.

This is the kernel of :mod:`keras_remat.solvers.search.eviction`, which explains the decisions
(:mod:`keras_remat.solvers.engines.native` explains how it is compiled). All functions work on one
:class:`State`. Its ops and values are records: rows of arrays in machine code, and objects in
Python. Lists of varying length are parts of ``links``: an op's inputs are
``links[op.inputs : op.inputs_end]``. Bytes are integers, seconds are floats.

:func:`go_on` pauses after a number of steps, so that its caller looks at the clock, and goes on
from there. One file, though long: Numba compiles again when the file of a function changed, and
knows nothing of changes in files that it calls.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from keras_remat.solvers.engines.native import entry, jit

OPS_PER_STEP = 10
"""Running an op is a step. Looking at this many missing ops for the cost of a value is a step, too,
and so is looking at this many values for changed costs."""
ORDER_PLACES = 5_000
"""Number of steps, and of ops in the order, after which the pass pauses."""
ALL = 1 << 62
"""Stands for a look at all missing ops."""

DONE, PAUSED, FULL, EXPLODED, LOST, SLOWER = range(6)
"""How a pass ended: the order is complete; it pauses; nothing can be evicted; the recomputations
explode; a value cannot be computed again; a faster schedule is known."""

OWN = {
    "at": int,  # the position in the base order, and behind it in the outputs
    "now": int,  # the position in the base order, its end among the outputs
    "held_bytes": int,
    "budget_bytes": int,
    "most_steps": int,  # steps after which nothing is computed again
    "steps": int,
    "pause": int,  # steps after which the pass pauses
    "looked_at_again": int,  # factor by which the number of ops of a further look grows
    "depth": int,  # of the stack of ops that wait for inputs
    "n_computed": int,
    "n_order": int,
    "n_stale": int,
    "n_changed": int,
    "stamp": int,  # the newest mark
    "spare_s": float,  # left for recomputations
    "tick_s": float,  # of a mean op
    "cost_exponent": float,
    "distance_exponent": float,
}
OP = {
    "inputs": int,  # what other ops compute, each once
    "inputs_end": int,
    "by_id": int,  # the same, ascending
    "by_id_end": int,
    "outputs": int,
    "outputs_end": int,
    "reuse": int,  # inputs whose buffers it may take over
    "reuse_end": int,
    "time_s": float,
    "workspace_bytes": int,
    "last_run": int,  # the position before which it may last run
    "ran": bool,
    "pending": bool,  # an output was evicted and will be asked for again
    "earliest": int,  # positions at which it will
    "latest": int,
    "mark": int,
    "maker_mark": int,
}
VALUE = {
    "nbytes": int,
    "producer": int,  # -1: a step input
    "readers": int,
    "readers_end": int,
    "children": int,  # values that its readers compute
    "children_end": int,
    "reads": int,  # the next position at which it is read
    "reads_end": int,
    "kept": bool,  # never dropped
    "alive": bool,
    "born": bool,  # computed at least once
    "locks": int,
    "looked_at": int,  # number of missing ops in its cost
    "waiting": int,  # pending ops that read it
    "is_stale": bool,
    "is_changed": bool,
    "mark": int,
}


class State(NamedTuple):
    """Holds the state of a pass.

    Args:
        own: numbers of the pass, by the names of :data:`OWN`.
        ops, values: records by the names of :data:`OP` and :data:`VALUE`.
        links: lists of ids and positions that belong to these records.
        base: the order to follow.
        ends: outputs of the graph.
        order: ops that have run since the last pause.
        waits, computed, computed_from: the stack of ops that wait for inputs, the inputs that were
            computed for them, and where those of each op begin.
        stale: values to appraise again.
        changed: values that came or went since values were appraised.
        given_up, found, makers: ids noted by :func:`give_up`, :func:`missing`, :func:`note_makers`.
        stack: ids still to be looked at.
        open: for each value, whether it is alive and can be evicted.
        positive_bytes: bytes of each value, above zero.
        cost_s: seconds to compute each value again, as far as was looked.
        need: the position at which each value is needed next.
        ids, gains, scores: entries for each value that can be evicted.
    """

    own: Any
    ops: Any
    values: Any
    links: Any
    base: Any
    ends: Any
    order: Any
    waits: Any
    computed: Any
    computed_from: Any
    stale: Any
    changed: Any
    given_up: Any
    found: Any
    makers: Any
    stack: Any
    open: Any
    positive_bytes: Any
    cost_s: Any
    need: Any
    ids: Any
    gains: Any
    scores: Any


@entry
def go_on(t: Any) -> int:
    """Goes on with a pass; returns how it ended, or that it pauses."""
    own, end = t.own, len(t.base)
    while own.at < end + len(t.ends):
        at = own.at
        if own.depth == 0:
            own.now = min(at, end)
            if at < end:
                wait(t, t.base[at])
            elif t.values[t.ends[at - end]].alive:
                lock(t, t.ends[at - end])
                own.at += 1
                continue
            else:
                wait(t, t.values[t.ends[at - end]].producer)
        status = materialize(t)
        if status != DONE:
            return status
        op_id = t.waits[0]
        op = t.ops[op_id]
        if at < end:
            for v in t.links[op.inputs : op.inputs_end]:
                t.values[v].reads += 1
                make_stale(t, v)
        status = execute(t, op_id)
        if status != DONE:
            return status
        if at >= end:
            lock(t, t.ends[at - end])
        own.at += 1
    return DONE


@jit
def wait(t: Any, op_id: int) -> None:
    """Puts an op onto the stack of ops that wait for inputs."""
    own = t.own
    t.waits[own.depth] = op_id
    t.computed_from[own.depth] = own.n_computed
    own.depth += 1


@jit
def materialize(t: Any) -> int:
    """Computes the missing inputs of the first op that waits.

    Afterwards all its inputs are alive, and locked until it has run. Of several missing inputs, the
    one with the most bytes to compute comes first, as in Sethi and Ullman's order for expressions.
    An input that was computed for an op stays locked until the op runs; an input that was alive
    before may be evicted and computed again.
    """
    own = t.own
    while own.depth:
        if own.steps >= own.pause or own.n_order >= ORDER_PLACES:
            return PAUSED
        op_id = t.waits[own.depth - 1]
        count = note_makers(t, op_id)
        if count:
            if own.steps > own.most_steps:
                return EXPLODED
            for k in range(count):
                if t.ops[t.makers[k]].last_run < own.now:
                    return LOST
            wait(t, t.makers[0] if count == 1 else with_most_bytes(t, count))
            continue
        own.depth -= 1
        op, first = t.ops[op_id], t.computed_from[own.depth]
        for v in t.links[op.inputs : op.inputs_end]:
            if not is_among(t.computed, first, own.n_computed, v):
                lock(t, v)
        own.n_computed = first
        if own.depth:
            status = execute(t, op_id)
            if status != DONE:
                return status
            keep_for_reader(t, op_id)
    return DONE


@jit
def note_makers(t: Any, op_id: int) -> int:
    """Notes the ops that compute the missing inputs of an op; returns their number."""
    own, op, count = t.own, t.ops[op_id], 0
    own.stamp += 1
    for v in t.links[op.by_id : op.by_id_end]:
        value = t.values[v]
        if not value.alive and t.ops[value.producer].maker_mark != own.stamp:
            t.ops[value.producer].maker_mark = own.stamp
            t.makers[count] = value.producer
            count += 1
    return count


@jit
def with_most_bytes(t: Any, count: int) -> int:
    """Returns which of the noted ops has the most bytes to compute until it has run."""
    best, most = -1, -1
    for k in range(count):
        nbytes = 0
        for i in range(missing(t, t.makers[k], ALL)):
            op = t.ops[t.found[i]]
            for v in t.links[op.outputs : op.outputs_end]:
                nbytes += t.values[v].nbytes
        if nbytes > most:
            best, most = t.makers[k], nbytes
    return best


@jit
def is_among(table: Any, first: int, last: int, value_id: int) -> bool:
    """Returns whether a part of a table holds a value."""
    for k in range(first, last):  # noqa: SIM110 (Numba compiles no generator)
        if table[k] == value_id:
            return True
    return False


@jit
def keep_for_reader(t: Any, op_id: int) -> None:
    """Locks the outputs of an op that the op waiting for them reads."""
    own, op, reader = t.own, t.ops[op_id], t.ops[t.waits[t.own.depth - 1]]
    first = t.computed_from[own.depth - 1]
    for v in t.links[op.outputs : op.outputs_end]:
        is_read = is_among(t.links, reader.inputs, reader.inputs_end, v)
        if is_read and not is_among(t.computed, first, own.n_computed, v):
            lock(t, v)
            t.computed[own.n_computed] = v
            own.n_computed += 1


@jit
def lock(t: Any, value_id: int) -> None:
    """Keeps a value from being evicted."""
    t.values[value_id].locks += 1
    t.open[value_id] = False


@jit
def unlock(t: Any, value_id: int) -> None:
    """Takes one lock off a value."""
    value = t.values[value_id]
    value.locks -= 1
    if value.locks == 0:
        make_stale(t, value_id)


@jit
def make_stale(t: Any, value_id: int) -> None:
    """Has a value appraised again."""
    value, own = t.values[value_id], t.own
    if not value.is_stale:
        value.is_stale = True
        t.stale[own.n_stale] = value_id
        own.n_stale += 1


@jit
def note_change(t: Any, value_id: int) -> None:
    """Notes that a value came or went."""
    value, own = t.values[value_id], t.own
    if not value.is_changed:
        value.is_changed = True
        t.changed[own.n_changed] = value_id
        own.n_changed += 1


@jit
def is_wanted(t: Any, value_id: int) -> bool:
    """Returns whether a value will be read, also to compute an evicted value again."""
    value = t.values[value_id]
    return bool(value.reads < value.reads_end or value.waiting > 0)


@jit
def execute(t: Any, op_id: int) -> int:
    """Runs an op whose inputs are alive and locked once for it.

    Returns how the pass ended, or :data:`DONE` where it goes on.
    """
    own, op = t.own, t.ops[op_id]
    inputs = t.links[op.inputs : op.inputs_end]
    outputs = t.links[op.outputs : op.outputs_end]
    settle(t, op_id)
    for v in outputs:
        if t.values[v].alive:
            lock(t, v)
    if not make_room(t, op_id):
        return FULL
    settle(t, op_id)  # an eviction just now may have counted on running it again
    for v in outputs:
        if t.values[v].alive:
            unlock(t, v)
    t.order[own.n_order] = op_id
    own.n_order += 1
    own.steps += 1
    if op.ran:
        own.spare_s -= op.time_s
        if own.spare_s <= 0:
            return SLOWER
    op.ran = True
    for v in outputs:
        value = t.values[v]
        if not value.alive:
            value.alive = True
            value.born = True
            own.held_bytes += value.nbytes
            note_change(t, v)
            make_stale(t, v)
    for v in inputs:
        unlock(t, v)
    for v in inputs:
        drop_if_unwanted(t, v)
    for v in outputs:
        drop_if_unwanted(t, v)
    return DONE


@jit
def settle(t: Any, op_id: int) -> None:
    """Notes that an op runs now, and is pending no more."""
    op = t.ops[op_id]
    if op.pending:
        op.pending = False
        op.earliest = len(t.base)
        op.latest = -1
        for v in t.links[op.inputs : op.inputs_end]:
            t.values[v].waiting -= 1


@jit
def drop_if_unwanted(t: Any, value_id: int) -> None:
    """Drops a value that no op will read."""
    value = t.values[value_id]
    if value.alive and value.locks == 0 and not value.kept and not is_wanted(t, value_id):
        drop(t, value_id)


@jit
def drop(t: Any, value_id: int) -> None:
    """Takes a value out of memory."""
    t.values[value_id].alive = False
    t.open[value_id] = False
    t.own.held_bytes -= t.values[value_id].nbytes
    note_change(t, value_id)


@jit
def make_room(t: Any, op_id: int) -> bool:
    """Evicts values until an op can run; returns whether it can.

    An eviction can make an input of the op wanted again, so that its buffer cannot be taken over.
    Therefore the bytes needed are computed again after each eviction.
    """
    while t.own.held_bytes + needed(t, op_id) > t.own.budget_bytes:
        refresh(t)
        count = give_up(t, op_id)
        for k in range(count):
            appraise(t, t.given_up[k])
        if not evict_best(t, count):
            return False
    return True


@jit
def needed(t: Any, op_id: int) -> Any:
    """Returns the bytes to allocate before an op can run."""
    op = t.ops[op_id]
    total = op.workspace_bytes
    for v in t.links[op.outputs : op.outputs_end]:
        if not t.values[v].alive:
            total += t.values[v].nbytes
    if takes_over(t, op_id):
        total -= take_over(t, op_id)
    return total


@jit
def takes_over(t: Any, op_id: int) -> bool:
    """Returns whether an op can take buffers over; outputs that are alive already cannot."""
    op = t.ops[op_id]
    if op.reuse == op.reuse_end:
        return False
    for v in t.links[op.outputs : op.outputs_end]:
        if t.values[v].alive and t.values[v].nbytes > 0:
            return False
    return True


@jit
def take_over(t: Any, op_id: int) -> int:
    """Marks the outputs of an op that take over a buffer; returns their bytes."""
    op, total = t.ops[op_id], 0
    t.own.stamp += 1
    for v in t.links[op.reuse : op.reuse_end]:
        output = lacking(t, op_id, t.values[v].nbytes)
        if output >= 0 and is_dying(t, v):
            t.values[output].mark = t.own.stamp
            total += t.values[v].nbytes
    return total


@jit
def lacking(t: Any, op_id: int, nbytes: int) -> int:
    """Returns an output of a size that has no buffer to take over yet, or -1."""
    op = t.ops[op_id]
    for v in t.links[op.outputs : op.outputs_end]:
        if t.values[v].nbytes == nbytes and t.values[v].mark != t.own.stamp:
            return int(v)
    return -1


@jit
def is_dying(t: Any, value_id: int) -> bool:
    """Returns whether an input of the running op is not needed after it."""
    value = t.values[value_id]
    is_free = value.locks == 1 and value.alive and not value.kept
    return bool(is_free and not is_wanted(t, value_id))


@jit
def give_up(t: Any, op_id: int) -> int:
    """Notes inputs that are read again later but whose buffers an op could take over.

    They have to be computed again for the later reads. Returns their number.
    """
    if not takes_over(t, op_id):
        return 0
    take_over(t, op_id)
    op, count = t.ops[op_id], 0
    for v in t.links[op.reuse : op.reuse_end]:
        nbytes = t.values[v].nbytes
        helps = not nbytes or lacking(t, op_id, nbytes) >= 0
        if helps and t.values[v].locks == 1 and is_evictable(t, v) and is_wanted(t, v):
            t.given_up[count] = v
            count += 1
    return count


@jit
def is_evictable(t: Any, value_id: int) -> bool:
    """Returns whether a value is alive, and can be computed again."""
    value = t.values[value_id]
    is_there = value.producer >= 0 and value.alive and not value.kept
    return bool(is_there and t.ops[value.producer].last_run >= t.own.now)


@jit
def refresh(t: Any) -> None:
    """Appraises the values again whose cost may have changed."""
    mark_children(t)
    for k in range(t.own.n_stale):
        v = t.stale[k]
        t.values[v].is_stale = False
        is_usable = t.values[v].locks == 0 and is_evictable(t, v)
        t.open[v] = is_usable
        if is_usable:
            appraise(t, v)
    t.own.n_stale = 0


@jit
def mark_children(t: Any) -> None:
    """Has values appraised again that are computed from values which came or went.

    They are computed from these directly or through missing values, so that the seconds of their
    recomputation have changed.
    """
    own = t.own
    own.stamp += 1
    stamp, depth = own.stamp, own.n_changed
    seen = depth
    for k in range(depth):
        value = t.values[t.changed[k]]
        value.is_changed = False
        value.mark = stamp
        t.stack[k] = t.changed[k]
    while depth:
        depth -= 1
        value = t.values[t.stack[depth]]
        for v in t.links[value.children : value.children_end]:
            child = t.values[v]
            if child.mark != stamp:
                child.mark = stamp
                seen += 1
                if child.alive:
                    make_stale(t, v)
                elif child.born:
                    t.stack[depth] = v
                    depth += 1
    own.steps += seen // OPS_PER_STEP
    own.n_changed = 0


@jit
def appraise(t: Any, value_id: int) -> None:
    """Notes the least cost of evicting a value, and when it will be needed again."""
    value, need = t.values[value_id], len(t.base)
    value.looked_at = 1
    t.cost_s[value_id] = t.ops[value.producer].time_s + 0.01 * t.own.tick_s
    if value.reads < value.reads_end:
        need = t.links[value.reads]
    if value.waiting:
        for i in t.links[value.readers : value.readers_end]:
            if t.ops[i].pending:
                need = min(need, t.ops[i].earliest)
    t.need[value_id] = need


@jit
def missing(t: Any, op_id: int, limit: int) -> int:
    """Notes in ``found`` an op and the ops that must run before it; returns their number.

    Args:
        limit: number of ops after which no more are looked for.
    """
    ops, values, links, found, stack = t.ops, t.values, t.links, t.found, t.stack
    t.own.stamp += 1
    stamp, count, depth = t.own.stamp, 1, 1
    found[0] = stack[0] = op_id
    ops[op_id].mark = stamp
    while depth and count < limit:
        depth -= 1
        reader = ops[stack[depth]]
        for v in links[reader.inputs : reader.inputs_end]:
            value = values[v]
            if not value.alive:
                i = value.producer
                if ops[i].mark != stamp:
                    ops[i].mark = stamp
                    found[count] = stack[depth] = i
                    count += 1
                    depth += 1
    t.own.steps += count // OPS_PER_STEP
    return count


@jit
def look_further(t: Any, value_id: int) -> None:
    """Looks at more of the ops that the eviction of a value would have run again."""
    value, seconds = t.values[value_id], 0.0
    most = t.own.looked_at_again * value.looked_at
    count = missing(t, value.producer, most)
    for k in range(count):
        seconds += t.ops[t.found[k]].time_s
    value.looked_at = ALL if count < most else most
    t.cost_s[value_id] = seconds + 0.01 * t.own.tick_s


@jit
def raised(number: float, exponent: float) -> float:
    """Returns a power, the same to the bit in machine code and in Python."""
    if exponent == 0.0:
        return 1.0
    if exponent == 0.5:
        return math.sqrt(number)
    return number if exponent == 1.0 else number**exponent


@jit
def appraise_all(t: Any, count: int) -> int:
    """Lists the values that can be evicted, open ones and those given up, with their scores.

    Returns their number.
    """
    own, total = t.own, 0
    for v in range(len(t.open)):
        if t.open[v]:
            t.ids[total] = v
            total += 1
    for k in range(count):
        t.ids[total] = t.given_up[k]
        total += 1
    for k in range(total):
        v = t.ids[k]
        distance = max(t.need[v] - own.now, 0.5)
        t.gains[k] = t.positive_bytes[v] * raised(distance, own.distance_exponent)
        t.scores[k] = raised(t.cost_s[v], own.cost_exponent) / t.gains[k]
    return total


def appraise_all_in_numpy(t: Any, count: int) -> int:
    """Does what :func:`appraise_all` does, where nothing is compiled."""
    own = t.own
    ids = np.concatenate([np.flatnonzero(t.open), np.array(t.given_up[:count], dtype=np.int64)])
    total = len(ids)
    t.ids[:total] = ids
    distances = np.maximum(t.need[ids] - own.now, 0.5)
    t.gains[:total] = t.positive_bytes[ids] * distances**own.distance_exponent
    t.scores[:total] = t.cost_s[ids] ** own.cost_exponent / t.gains[:total]
    return total


@jit
def least(scores: Any, count: int) -> int:
    """Returns the index of the least of the first ``count`` scores, the first of several."""
    at = 0
    for k in range(1, count):
        if scores[k] < scores[at]:
            at = k
    return at


def least_in_numpy(scores: Any, count: int) -> int:
    """Does what :func:`least` does, where nothing is compiled."""
    return int(np.argmin(scores[:count]))


@jit
def evict_best(t: Any, count: int) -> bool:
    """Evicts the value with the least score that can be evicted; returns whether one could.

    Args:
        count: number of inputs that are given up.
    """
    total = appraise_all(t, count)
    while total:
        at = least(t.scores, total)
        if t.scores[at] == math.inf:
            return False
        v = int(t.ids[at])
        if t.values[v].looked_at < ALL:
            look_further(t, v)
            t.scores[at] = raised(t.cost_s[v], t.own.cost_exponent) / t.gains[at]
        elif evict(t, v):
            return True
        else:
            t.open[v] = False  # until a value that it is computed from comes or goes
            t.scores[at] = math.inf
    return False


@jit
def evict(t: Any, value_id: int) -> bool:
    """Evicts a value if it can be computed again whenever it will be needed."""
    value, earliest, latest = t.values[value_id], len(t.base) + 1, -1
    if value.reads < value.reads_end:
        earliest = latest = t.links[value.reads]
    if value.waiting:
        for i in t.links[value.readers : value.readers_end]:
            if t.ops[i].pending:
                earliest = min(earliest, t.ops[i].earliest)
                latest = max(latest, t.ops[i].latest)
    count = missing(t, value.producer, ALL)
    ops, values, links, found = t.ops, t.values, t.links, t.found
    for k in range(count):
        if ops[found[k]].last_run < latest:
            return False
    drop(t, value_id)
    for k in range(count):
        op = ops[found[k]]
        op.latest = max(op.latest, latest)
        op.earliest = min(op.earliest, earliest)
        for v in links[op.inputs : op.inputs_end]:
            if not op.pending:
                values[v].waiting += 1
            make_stale(t, v)
        op.pending = True
    return True
