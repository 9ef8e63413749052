"""How much of an order must be enforced so that memory obeys it.

A strict chain of control edges would make memory follow the order exactly, and cost the parallelism of the executor. An op may start
early as long as what all early ops allocate fits into the slack under the budget. So: when every op up to position p has finished, the
*window* (p, e(p)] holds the ops that may have started; e(p) is the furthest position for which

    live after p  +  Σ over p < j ≤ e(p) of (bytes op j allocates)  ≤  budget,

where nothing that the early ops free is counted, and no window holds more than a small share of the peak: ops that run far ahead allocate in
another order every step, and the allocator's fragmentation then makes the measured peak jump from step to step. The anchor a(j) is the first
p whose window reaches j; op j waits for a *fence* that has waited for all ops up to a(j). Without a budget only recomputations are ordered.
"""

from __future__ import annotations

import numpy as np

from keras_remat.problem import Problem
from keras_remat.schedule import Schedule
from keras_remat.simulate import last_reads

#: The most that ops running ahead of the order may allocate, as a share of the bytes above the resident ones.
AHEAD_SHARE = 0.1
#: An op that allocates less than this never waits, unless it is a recomputation.
SMALL_OP_BYTES = 64 * 1024


def allocated_bytes(problem: Problem, schedule: Schedule) -> np.ndarray:
    """Bytes each position allocates: outputs and workspace, buffer reuse left out. int64 ``[len(order)]``."""
    graph, workspace = problem.graph, problem.profile.op_workspace_bytes
    per_op = [sum(graph.values[v].nbytes for v in op.outputs) + workspace[op.id] for op in graph.ops]
    return np.array([per_op[op_id] for op_id in schedule.order], dtype=np.int64)


def anchors(problem: Problem, schedule: Schedule, budget_bytes: int) -> np.ndarray:
    """For every position the position all ops up to which must have finished before it may start, or −1 for none.

    Args:
        problem: the graph and its costs.
        schedule: a legal order.
        budget_bytes: what memory may reach, resident bytes included; never below the schedule's own peak.

    Returns:
        int64 array ``[len(order)]``, non-decreasing, ``anchors[k] < k``.
    """
    n = len(schedule.order)
    values = problem.graph.values
    delta = np.zeros(n + 1, dtype=np.int64)
    for k, instances in enumerate(last_reads(problem, schedule)):
        for value_id, end in instances.items():
            delta[k] += values[value_id].nbytes
            delta[max(end, k)] -= values[value_id].nbytes
    after = problem.profile.resident_bytes + np.cumsum(delta[:n])  # bytes alive once position k has finished
    allocated = np.concatenate([[0], np.cumsum(allocated_bytes(problem, schedule))])
    resident = problem.profile.resident_bytes
    slack = budget_bytes - np.concatenate([[resident], after])
    slack = np.clip(slack, 0, int(AHEAD_SHARE * max(0, budget_bytes - resident)))
    # window of the state "p ops have finished": positions p .. reach[p]-1 may start; at least the next one
    reach = np.searchsorted(allocated, allocated[: n + 1] + slack, side="right") - 1
    reach = np.maximum.accumulate(np.maximum(reach, np.arange(1, n + 2)))
    # the fewest finished ops with which position k may start
    finished = np.searchsorted(reach, np.arange(n), side="right")
    return finished - 1


def fences(problem: Problem, schedule: Schedule, budget_bytes: int) -> dict[int, int]:
    """Position → anchor, for the positions that must wait: those that allocate much, and recomputations."""
    anchor = anchors(problem, schedule, budget_bytes)
    size = allocated_bytes(problem, schedule)
    seen: set[int] = set()
    waits: dict[int, int] = {}
    for k, op_id in enumerate(schedule.order):
        if anchor[k] >= 0 and (size[k] >= SMALL_OP_BYTES or op_id in seen):
            waits[k] = int(anchor[k])
        elif op_id in seen:
            waits[k] = k - 1
        seen.add(op_id)
    return waits
