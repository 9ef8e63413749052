"""Decides which ops of an order wait for the ones before them.

The allocator's peak follows an order exactly only if every allocation and deallocation happens in
that order. Ops that run ahead take their buffers earlier, and from other chunks of the pool in
every step: the peak jumps by several percent from step to step and cannot be predicted. So every op
that touches the pool waits for the last such op. This costs little parallelism between ops, since
an op of that size uses all cores by itself. All other ops, the many small ones, run as soon as
their inputs are there. Only recomputed ones among them wait too; otherwise they would run early,
which makes recomputing pointless.

On a GPU, ops of one stream run in the order in which they are enqueued, and waiting costs nothing.
An op that runs on the host, or keeps its outputs there, is different: a control edge from a kernel
to it is a copy that waits until the GPU is idle. No op waits for such an op, and it waits for none.

If nothing is recomputed and there is no budget, no op waits: the step runs as TensorFlow runs the
plain one, and is as fast.
"""

from __future__ import annotations

from collections.abc import Set

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.units import KIB

#: Smaller allocations are not worth waiting for on any allocator; oneDNN's does not count them.
SMALL_BYTES = 256 * KIB


def ordered_positions(
    problem: Problem,
    schedule: Schedule,
    smallest_bytes: int,
    on_host: Set[int] = frozenset(),
) -> list[bool]:
    """Returns for every position of the order whether its op runs after the last such op before it.

    Args:
        problem: the graph, its costs, and the budget, if any.
        schedule: a legal order.
        smallest_bytes: bytes of the smallest value or workspace that counts.
        on_host: ids of ops that take no memory of the device.
    """
    if problem.budget_bytes is None and not schedule.recomputed:
        return [False] * len(schedule.order)
    graph, workspace = problem.graph, problem.profile.op_workspace_bytes
    pooled = [
        value.producer is not None and value.nbytes >= smallest_bytes for value in graph.values
    ]
    touches = [
        op.id not in on_host
        and (
            op.kind in kinds.CONTROL_FLOW  # the memory of its body is unknown
            or workspace[op.id] >= max(1, smallest_bytes)
            or any(pooled[v] for v in (*op.inputs, *op.outputs))
        )
        for op in graph.ops
    ]
    seen: set[int] = set()
    ordered = []
    for op_id in schedule.order:
        ordered.append(touches[op_id] or (op_id in seen and op_id not in on_host))
        seen.add(op_id)
    return ordered
