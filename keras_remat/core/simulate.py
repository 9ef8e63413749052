"""Computes time and peak of a schedule: the one definition of when a value is alive.

A value computed at position k lives until its last read before it is computed again; an instance
nobody reads lives at k only; outputs of the graph live to the end. ``live[k] = resident + Σ bytes
of the values alive at k + workspace of order[k]``: inputs and outputs of the running op are alive,
but an output that takes over the buffer of an input dying at k is not counted twice.

O(len(order) + reads). No solver reports its own peak: it is always this function's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from keras_remat.core.graph import Graph, reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule, Usage


def last_reads(graph: Graph, order: Sequence[int]) -> list[dict[int, int]]:
    """Returns for every position the values computed there, each with its last position alive.

    An instance of a graph output that is not computed again lives to ``len(order) - 1``.
    """
    born: list[dict[int, int]] = []
    newest: dict[int, int] = {}
    for k, op_id in enumerate(order):
        op = graph.ops[op_id]
        for value_id in op.inputs:
            if value_id in newest:
                born[newest[value_id]][value_id] = k
        born.append(dict.fromkeys(op.outputs, k))
        for value_id in op.outputs:
            newest[value_id] = k
    for value_id in graph.outputs:
        if value_id in newest:
            born[newest[value_id]][value_id] = len(order) - 1
    return born


def live_bytes(
    problem: Problem, schedule: Schedule, below_bytes: int | None = None
) -> npt.NDArray[np.int64]:
    """Returns bytes alive at every position of the order.

    Args:
        problem: the graph and its costs.
        schedule: a legal order.
        below_bytes: count only values smaller than this, and no resident bytes nor workspace.

    Returns:
        int64 array of shape ``[len(order)]``; without ``below_bytes``, resident bytes and workspace
        are included.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> p = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    >>> live_bytes(p, Schedule((0, 1, 2, 3, 4))).tolist()
    [4, 5, 11, 11, 7]
    >>> live_bytes(p, Schedule((0, 1, 2, 3, 0, 4))).tolist()
    [4, 5, 7, 7, 5, 7]
    """
    return np.asarray(_live(problem, schedule, below_bytes), dtype=np.int64)


def _live(problem: Problem, schedule: Schedule, below_bytes: int | None = None) -> list[int]:
    """Returns :func:`live_bytes` as Python integers, which cannot overflow."""
    graph, values = problem.graph, problem.graph.values
    nbytes = [v.nbytes if below_bytes is None or v.nbytes < below_bytes else 0 for v in values]
    born = last_reads(graph, schedule.order)
    n = len(schedule.order)
    dying: list[set[int]] = [set() for _ in range(n)]
    kept = set(graph.outputs)
    delta = [0] * (n + 1)
    delta[0] = problem.profile.resident_bytes if below_bytes is None else 0
    for k, instances in enumerate(born):
        for value_id, end in instances.items():
            delta[k] += nbytes[value_id]
            delta[end + 1] -= nbytes[value_id]
            if end > k and nbytes[value_id]:  # a value of no bytes has nothing to take over
                dying[end].add(value_id)
    live = list(accumulate(delta[:n]))
    for k, op_id in enumerate(schedule.order):
        if below_bytes is None:
            live[k] += problem.profile.op_workspace_bytes[op_id]
        op = graph.ops[op_id]
        if op.may_reuse:
            ending = dying[k] if k < n - 1 else dying[k] - kept
            live[k] -= reused_bytes(op, values, ending)
    return live


def simulate(problem: Problem, schedule: Schedule) -> Usage:
    """Returns time and peak of a legal schedule.

    Args:
        problem: the graph and its costs; the budget plays no part.
        schedule: a legal order (see :func:`keras_remat.core.validate.validate`).

    Returns:
        Seconds and bytes; the peak of an empty order is the resident bytes.

    >>> from keras_remat.core.graph import chain_example
    >>> from keras_remat.core.profile import Profile
    >>> p = Problem(chain_example(), Profile((1.0,) * 5, (0,) * 5, 0))
    >>> simulate(p, Schedule((0, 1, 2, 3, 4))), simulate(p, Schedule((0, 1, 2, 3, 0, 4)))
    (Usage(time_s=5.0, peak_bytes=11), Usage(time_s=6.0, peak_bytes=7))
    """
    peak_bytes = max(_live(problem, schedule), default=problem.profile.resident_bytes)
    return Usage(seconds(problem, schedule), peak_bytes)


def seconds(problem: Problem, schedule: Schedule) -> float:
    """Returns only the time of a legal schedule, much faster than :func:`simulate`."""
    return float(sum(problem.profile.op_time_s[op_id] for op_id in schedule.order))
