"""Which ops of an order wait for the ones before them.

The allocator's peak follows an order exactly only where everything that allocates or frees happens
in that order: ops that run ahead take their buffers earlier, and from other chunks of the pool in
every step, so that the peak jumps by several percent from step to step and nothing can be
predicted. So every op that touches the pool waits for the one before it that does. What it costs in
parallelism between ops is small, since an op of that size uses all cores by itself. All other ops,
the many small ones, run as soon as their inputs are there; recomputations among them wait too, or
they would run early and their values be there for nothing.

On a GPU, ops of one stream run in the order in which they are enqueued anyway, and waiting costs
nothing between them. An op that runs on the host, or keeps its outputs there, is different: a
control edge to it from a kernel is a copy that waits until the GPU is idle. Such ops are never
waited for, and wait for none.

Where nothing is computed twice and no budget is to be kept, nothing waits: the step runs as
TensorFlow runs the plain one, and is as fast.
"""

from __future__ import annotations

from collections.abc import Set

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.units import KIB

#: What allocates less is not worth waiting for, on no allocator; oneDNN's does not even count it.
SMALL_BYTES = 256 * KIB


def ordered_positions(
    problem: Problem,
    schedule: Schedule,
    smallest_bytes: int,
    on_host: Set[int] = frozenset(),
) -> list[bool]:
    """Returns for every position of the order whether its op runs after the last such op before it.

    Args:
        problem: the graph, its costs, and the budget that the order keeps, if it has to keep one.
        schedule: a legal order.
        smallest_bytes: what the allocator's pool serves at least
            (:data:`~.best_fit.ONEDNN_SMALL_BYTES` on the CPU).
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
            op.kind in kinds.CONTROL_FLOW  # what its body needs is not told
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
