"""What a plan's order needs on a GPU so that XLA keeps to it: which results a barrier has to hold,
which ops must not share a kernel, and when weights are updated.

**Held.** XLA:GPU computes an elementwise value, or a slice, inside of the kernels that read it,
however late those come, and until then keeps what the value is made of. Where a plan computes such
a value to let go of something, and a product or a convolution comes before it is read, it is held:
then it exists when the plan says so. The gradient of a skip connection is such a value, a slice of
the gradient of a concatenation three times as large.

So is a sum that several ops read. Each of them would compute it again, and what is added up would
live until the last one has. But a barrier keeps such a value out of the kernels of its readers, and
so takes time. Where a plan has room, what is added up may live as well: then nothing is held
(:func:`needed`).

**Apart.** XLA:GPU computes several elementwise values of one operand in one kernel, where none
needs another. A ReLU that runs again for the gradient of a kernel and the ReLU's own gradient are
such values. A plan has let go of the first before it computes the second. In one kernel both exist,
and with them what the second was computed from.

**Updates.** A scheduler that counts bytes puts an update off: it makes three arrays of a weight's
size (the weight and two moments) and lets go of one, its gradient. That they are written over old
ones is not counted. So large gradients wait to the end of the step, unless what follows waits for
the update.
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
"""What is not held may be alive up to this share of a schedule's peak. A U-Net's plan for half of
plain's bytes on an H100, 182.2 MiB with all sums held, took 186.7 MiB at 1, over its limit, and
182.2 at 0.96 and 0.9; of plain's time it took 1.19, and 1.13, 1.14 and 1.15."""

WAITING_SHARE = 1.05
"""What is alive where gradients of dense kernels wait to the end of the step may be so many times
what is alive otherwise. On a T4 it is 1.00 times that in plans for half of a BERT-like's, a
GPT-like's and a ViT's bytes, where early updates take up to 2 % of the step's time, and 1.09 in
VGG16's plan for 0.7, where they take none: it took 528.5 MiB with late ones, and 467.3."""


def waiting(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions of an order whose result has to be held.

    Args:
        graph: whose ops are clusters.
        order: op ids.
        kinds: the framework's names.
    """
    values, inside = graph.values, kinds.elementwise | kinds.cut
    fusible = kinds.fusible | kinds.reductions
    first: dict[int, int] = {}  # op's position → where its result is read first
    last: dict[tuple[int, int], int] = {}  # value and where it was computed → where it is read last
    made: dict[int, int] = {}  # value → where it was computed last
    read: dict[int, list[tuple[int, int]]] = {}  # position → large values, and where computed
    products = []
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        size = max((values[v].nbytes for v in op.outputs), default=0)
        for value in op.inputs:
            if value in made:
                first.setdefault(made[value], at)
                last[value, made[value]] = at
        if op.kind in inside and len(op.outputs) == 1 and size >= HELD_BYTES:
            large = [v for v in op.inputs if v in made and values[v].nbytes * 8 >= size]
            read[at] = [(v, made[v]) for v in large]
        elif op.kind not in fusible and size >= HELD_BYTES:
            products.append(at)
        made.update(dict.fromkeys(op.outputs, at))

    def is_let_go(one: tuple[int, int], before: int) -> bool:
        after = bisect_right(products, last[one])
        return after < len(products) and products[after] < before

    return frozenset(
        at
        for at, inputs in read.items()
        if at in first and any(is_let_go(one, first[at]) for one in inputs)
    )


def needed(
    graph: Graph,
    order: Sequence[int],
    kinds: Kinds,
    asked: Collection[int],
    copying: Collection[str],
) -> frozenset[int]:
    """Returns those positions of an order whose result has to be held, so that no more is alive at
    once than :data:`UNHELD_SHARE` of the most that the order has.

    What is not held exists nowhere: what it is made of lives until its last reader, or until the
    first one where a product is among them.

    Args:
        graph, order, kinds: as of :func:`waiting`.
        asked: positions of elementwise ops, whose results are asked about.
        copying: as of :func:`read_from_memory`.
    """
    schedule, problem = Schedule(tuple(order)), _without_costs(graph)
    alive, reads = live_bytes(problem, schedule), last_reads(problem, schedule)
    most = UNHELD_SHARE * alive.max(initial=0)
    ends = {(value, at): end for at, values in enumerate(reads) for value, end in values.items()}
    first = read_from_memory(graph, order, kinds, copying)
    made: dict[int, int] = {}  # value → where it was computed last
    parts: dict[int, frozenset[tuple[int, int]]] = {}  # position → what is there in its place
    found: set[int] = set()
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        if at in asked:
            result = op.outputs[0]
            end = first.get(at, ends[result, at])
            read = [parts.get(made[v], {(v, made[v])}) for v in op.inputs if v in made]
            of = frozenset(part for those in read for part in those)
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
        made.update(dict.fromkeys(op.outputs, at))
    return frozenset(found)


def read_from_memory(
    graph: Graph, order: Sequence[int], kinds: Kinds, copying: Collection[str]
) -> dict[int, int]:
    """Returns the positions of an order whose result something reads that no kernel computes it in,
    a product for instance, before it is computed again; and where that result is read first.

    Args:
        graph, order, kinds: as of :func:`waiting`.
        copying: kinds of ops that read a copy in another layout, which is all that exists.
    """
    fusible = (kinds.fusible | kinds.reductions).union(copying)
    made: dict[int, int] = {}  # value → where it was computed last
    first: dict[int, int] = {}
    found: set[int] = set()
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        for value in op.inputs:
            if value in made:
                first.setdefault(made[value], at)
                if op.kind not in fusible:
                    found.add(made[value])
        made.update(dict.fromkeys(op.outputs, at))
    return {at: first[at] for at in found}


def apart(graph: Graph, order: Sequence[int], kinds: Kinds) -> frozenset[int]:
    """Returns the positions of an order that must not run in one kernel with an earlier one, which
    runs again.

    Args:
        graph, order, kinds: as of :func:`waiting`.
    """
    values, inside = graph.values, kinds.elementwise | kinds.cut
    made: dict[int, int] = {}  # value → where it was computed last
    last: dict[int, int] = {}  # position → where its result is read last
    siblings: dict[tuple[int, int], list[int]] = defaultdict(list)
    again: set[int] = set()
    seen: set[int] = set()
    for at, op_id in enumerate(order):
        op = graph.ops[op_id]
        size = max((values[v].nbytes for v in op.outputs), default=0)
        last.update((made[v], at) for v in op.inputs if v in made)
        if op.kind in inside and len(op.outputs) == 1 and size >= HELD_BYTES:
            for v in op.inputs:
                if v in made and values[v].nbytes * 8 >= size:
                    siblings[v, made[v]].append(at)
        if op_id in seen:
            again.add(at)
        seen.add(op_id)
        made.update(dict.fromkeys(op.outputs, at))
    return frozenset(
        later
        for readers in siblings.values()
        for later in readers
        if any(at in again and last.get(at, later) < later for at in readers)
    )


def updated_early(graph: Graph, order: Sequence[int], updates: Collection[int]) -> tuple[int, ...]:
    """Returns the order with updates as early as they can run: behind what they read and all that
    reads what they overwrite.

    Args:
        graph, order: as of :func:`waiting`.
        updates: ids of the ops that are moved, with what the forward phase computes for updates
            alone, such as a rate.
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
    """Returns whether an order takes more memory than :data:`WAITING_SHARE` of its own, where
    updates come at the end of the step: their gradients wait for them.

    Args:
        graph, order: as of :func:`waiting`.
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
    """Returns what the forward phase computes for updates alone."""
    found: set[int] = set()
    updates = {op.id for op in graph.ops if op.phase == UPDATE}
    for op in reversed(graph.ops):
        readers = [reader for v in op.outputs for reader in graph.readers[v]]
        if op.phase == FORWARD and readers and all(r in updates or r in found for r in readers):
            found.add(op.id)
    return frozenset(found)
