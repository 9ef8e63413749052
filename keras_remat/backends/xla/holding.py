"""Finds what a plan's order needs on a GPU so that XLA keeps to it.

These are results that a barrier has to hold, ops that must not share a kernel, and the places where
weights are updated.

**Held.** XLA:GPU computes an elementwise value, or a slice, inside the kernels that read it,
however late they run, and until then keeps what the value is made of. A plan may compute such a
value in order to let go of what it is made of. If a product or a convolution runs before the value
is read, a barrier holds the value: then it exists when the plan says so. The gradient of a skip
connection is such a value, a slice of the gradient of a concatenation three times as large.

A sum that several ops read is held, too. Otherwise each reader would compute it again, and its
summands would live until the last reader. But a barrier keeps the sum out of the kernels of its
readers, which takes time. Where a plan has room for the summands, the sum is not held
(:func:`needed`).

**Apart.** XLA:GPU computes several elementwise values of one operand in one kernel if none needs
another. A ReLU that runs again for the gradient of a kernel and the ReLU's own gradient are such
values. A plan lets go of the first before it computes the second. In one kernel both exist, and
with them what the second is computed from.

**Updates.** A scheduler that counts bytes puts an update off: the update makes three arrays of a
weight's size (the weight and two moments) and lets go of one, its gradient. The scheduler does not
count that the new arrays are written over old ones. So large gradients wait until the end of the
step, unless later ops wait for the update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from keras_remat.backends.xla.fusion import HELD_BYTES, Kinds
from keras_remat.core.graph import FORWARD, UPDATE, Graph
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, live_bytes

UNHELD_SHARE = 0.95
"""Share of a schedule's peak that may be alive with results left unheld. Measured on a U-Net's plan
for half of plain's bytes on an H100: 182.2 MiB and 1.19 of plain's time with all sums held; 186.7
MiB, over its limit, and 1.13 at 1; 182.2 MiB and 1.14 at 0.96; 182.2 MiB and 1.15 at 0.9."""

WAITING_SHARE = 1.05
"""Largest ratio of the bytes alive with updates at the end of the step, where gradients of dense
kernels wait for them, to the bytes alive otherwise. On a T4 the ratio is 1.00 in plans for half of
the bytes of a BERT-like, a GPT-like and a ViT, where early updates take up to 2 % of the step's
time. It is 1.09 in VGG16's plan for 0.7, where early updates take no time: it took 528.5 MiB with
late ones and 467.3 MiB with early ones."""


#: A value, and the position of an order where it was computed.
_Computed = tuple[int, int]


def _read(graph: Graph, order: Sequence[int]) -> list[list[_Computed]]:
    """Returns the computed values that are read at each position of an order."""
    made: dict[int, int] = {}  # value → where it was computed last
    read = []
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        read.append([(v, made[v]) for v in op.inputs if v in made])
        made.update(dict.fromkeys(op.outputs, at))
    return read


def _fused(graph: Graph, order: Sequence[int], kinds: Kinds) -> dict[int, list[_Computed]]:
    """Returns the positions of large results that XLA can compute in the kernels of their readers,
    with the large values that each is made of."""
    found, inside = {}, kinds.elementwise | kinds.cut
    for at, read in enumerate(_read(graph, order)):
        op, size = graph.ops[order[at]], _made_bytes(graph, order[at])
        if op.kind in inside and len(op.outputs) == 1 and size >= HELD_BYTES:
            found[at] = [one for one in read if graph.values[one[0]].nbytes * 8 >= size]
    return found


def _made_bytes(graph: Graph, op_id: int) -> int:
    """Returns the bytes of an op's largest result."""
    return max((graph.values[v].nbytes for v in graph.ops[op_id].outputs), default=0)


def waiting(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions of an order whose results have to be held.

    Between the last read of one of the op's inputs and the first read of its result, a product
    runs.

    Args:
        graph: a graph whose ops are clusters.
        order: op ids, in the order they run.
        kinds: the framework's names.
    """
    read, fusible = _read(graph, order), kinds.fusible | kinds.reductions
    first: dict[int, int] = {}  # op's position → where its result is read first
    last: dict[_Computed, int] = {}  # where it is read last
    products = []
    for at, op_id in enumerate(order):
        for one in read[at]:
            first.setdefault(one[1], at)
            last[one] = at
        if graph.ops[op_id].kind not in fusible and _made_bytes(graph, op_id) >= HELD_BYTES:
            products.append(at)

    def is_let_go(one: _Computed, before: int) -> bool:
        after = bisect_right(products, last[one])
        return after < len(products) and products[after] < before

    return frozenset(
        at
        for at, inputs in _fused(graph, order, kinds).items()
        if at in first and any(is_let_go(one, first[at]) for one in inputs)
    )


def needed(
    graph: Graph,
    order: Sequence[int],
    kinds: Kinds,
    asked: Collection[int],
    copying: Collection[str],
) -> frozenset[int]:
    """Returns those ``asked`` positions of an order whose results have to be held.

    A result is left unheld as long as no more bytes are alive than :data:`UNHELD_SHARE` of the
    order's peak. An unheld result exists nowhere. What it is made of lives until the result's last
    reader, or until its first reader if a product is among the readers.

    Args:
        graph, order, kinds: as in :func:`waiting`.
        asked: positions of the elementwise ops to decide about.
        copying: as in :func:`read_from_memory`.
    """
    schedule, problem = Schedule(tuple(order)), _without_costs(graph)
    alive, reads = live_bytes(problem, schedule), last_reads(graph, order)
    most = UNHELD_SHARE * alive.max(initial=0)
    ends = {(value, at): end for at, values in enumerate(reads) for value, end in values.items()}
    first = read_from_memory(graph, order, kinds, copying)
    parts: dict[int, frozenset[_Computed]] = {}  # position → values in its place
    found: set[int] = set()
    for at, inputs in enumerate(_read(graph, order)):
        if at not in asked:
            continue
        result = graph.ops[order[at]].outputs[0]
        end = first.get(at, ends[result, at])
        of = frozenset(part for one in inputs for part in parts.get(one[1], {one}))
        changed = alive[at + 1 : end + 1].copy()
        stays = at in first or result in graph.ops[order[end]].may_reuse
        changed[: len(changed) - stays] -= graph.values[result].nbytes
        for value, born in of:
            changed[max(0, ends[value, born] - at) :] += graph.values[value].nbytes
        if changed.max(initial=0) > most:
            found.add(at)
        else:
            alive[at + 1 : end + 1] = changed
            ends.update({part: max(end, ends[part]) for part in of})
            if at not in first:
                parts[at] = of
    return frozenset(found)


def read_from_memory(
    graph: Graph, order: Sequence[int], kinds: Kinds, copying: Collection[str]
) -> dict[int, int]:
    """Returns position → first reader, for results that something reads from memory.

    A product, for instance, cannot compute the result in its own kernel. Readers count until the
    result is computed again.

    Args:
        graph, order, kinds: as in :func:`waiting`.
        copying: kinds of ops that read a copy in another layout; only that copy exists.
    """
    fusible = (kinds.fusible | kinds.reductions).union(copying)
    first: dict[int, int] = {}
    found: set[int] = set()
    for at, inputs in enumerate(_read(graph, order)):
        for _, born in inputs:
            first.setdefault(born, at)
            if graph.ops[order[at]].kind not in fusible:
                found.add(born)
    return {at: first[at] for at in found}


def apart(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions that must not share a kernel with an earlier recomputation.

    Args:
        graph, order, kinds: as in :func:`waiting`.
    """
    # position → where its result is read last
    last = {born: at for at, inputs in enumerate(_read(graph, order)) for _, born in inputs}
    siblings: dict[_Computed, list[int]] = defaultdict(list)
    for at, inputs in _fused(graph, order, kinds).items():
        for one in inputs:
            siblings[one].append(at)
    first = {op_id: at for at, op_id in reversed([*enumerate(order)])}  # op → its first run
    return frozenset(
        later
        for readers in siblings.values()
        for later in readers
        if any(first[order[at]] < at and last.get(at, later) < later for at in readers)
    )


def updated_early(graph: Graph, order: Sequence[int], updates: Collection[int]) -> tuple[int, ...]:
    """Returns the order with updates as early as they can run.

    An update comes behind the ops it reads from and behind all readers of the values it overwrites.

    Args:
        graph, order: as in :func:`waiting`.
        updates: ids of the ops to move. Forward ops that only updates read, such as those of a
            rate, move with them.
    """
    runs, moved = Counter(order), _of_updates(graph).union(updates) if updates else ()
    last = {op_id: at for at, op_id in enumerate(order)}
    made: dict[int, int] = {}  # value → where it is computed
    places = []
    for at, op_id in enumerate(order):
        op, place = graph.ops[op_id], at
        if op_id in moved and runs[op_id] == 1:
            before = [made[v] for v in op.inputs if v in made] + [last[o] for o in op.after]
            place = last[op_id] = max(before, default=-1)
        made.update(dict.fromkeys(op.outputs, place))
        places.append((place, at))
    return tuple(order[at] for _, at in sorted(places))


def waits_for_updates(graph: Graph, order: Sequence[int], updates: Collection[int]) -> bool:
    """Returns whether late updates make an order's gradients take too much memory.

    Gradients wait for their updates. It is too much if, with updates at the end of the step, more
    than :data:`WAITING_SHARE` times the order's own peak is alive.

    Args:
        graph, order: as in :func:`waiting`.
        updates: ids of the ops that would be put off.
    """
    late = [op_id for op_id in order if op_id in updates]
    if not late:
        return False
    now, then = list(order), [*(op_id for op_id in order if op_id not in updates), *late]
    return _most_alive_bytes(graph, then) > WAITING_SHARE * _most_alive_bytes(graph, now)


def _most_alive_bytes(graph: Graph, order: Sequence[int]) -> int:
    return int(live_bytes(_without_costs(graph), Schedule(tuple(order))).max(initial=0))


def _without_costs(graph: Graph) -> Problem:
    count = len(graph.ops)
    return Problem(graph, Profile((0.0,) * count, (0,) * count, 0))


def _of_updates(graph: Graph) -> frozenset[int]:
    """Returns the ids of the forward ops whose results only updates need."""
    found: set[int] = set()
    updates = {op.id for op in graph.ops if op.phase == UPDATE}
    for op in reversed(graph.ops):
        readers = [reader for v in op.outputs for reader in graph.readers[v]]
        if op.phase == FORWARD and readers and all(r in updates or r in found for r in readers):
            found.add(op.id)
    return frozenset(found)
