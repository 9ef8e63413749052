"""Random legal schedules: any topological order, ops nobody needs, and recomputations wherever the
rules allow them."""

from __future__ import annotations

import random

from keras_remat.core.graph import Graph
from keras_remat.core.schedule import Schedule


def random_schedule(rng: random.Random, graph: Graph, *, recompute: float = 0.15) -> Schedule:
    """Returns an order that obeys S1 to S4; before every op each recomputable op repeats with
    probability ``recompute``."""
    chosen = set(graph.needed)
    for op in reversed(graph.ops):  # with some ops nobody needs, and what they read
        if op.id not in chosen and rng.random() < 0.3:
            stack = [op.id]
            while stack:
                op_id = stack.pop()
                if op_id not in chosen:
                    chosen.add(op_id)
                    stack += [
                        p
                        for v in graph.ops[op_id].inputs
                        if (p := graph.values[v].producer) is not None
                    ]
    before = {
        i: (
            {p for v in graph.ops[i].inputs if (p := graph.values[v].producer) is not None}
            | set(graph.ops[i].after)
        )
        & chosen
        for i in chosen
    }
    followers = {i: [op.id for op in graph.ops if i in op.after] for i in chosen}
    order: list[int] = []
    done: set[int] = set()
    while len(done) < len(chosen):
        for op_id in sorted(done):
            frozen = any(later in done for later in followers[op_id])
            if graph.ops[op_id].recomputable and not frozen and rng.random() < recompute:
                order.append(op_id)
        op_id = rng.choice(sorted(i for i in chosen - done if before[i] <= done))
        order.append(op_id)
        done.add(op_id)
    return Schedule(order)


def forget(graph, keep=()):
    """A schedule that drops every recomputable forward value at the first backward op, except those
    of ops in ``keep``, and recomputes what is read after that, once."""
    order, have, dropped = [], set(), False

    def run(op_id):
        stack = [op_id]
        while stack:
            at = stack[-1]
            producers = (graph.values[v].producer for v in graph.ops[at].inputs)
            missing = [p for p in producers if p is not None and p not in have]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if at not in have:
                order.append(at)
                have.add(at)

    for op in graph.ops:
        if op.phase != "forward" and not dropped:
            dropped = True
            have = {i for i in have if i in keep or not graph.ops[i].recomputable}
        if op.id in graph.needed and op.id not in have:
            run(op.id)
    return Schedule(order)
