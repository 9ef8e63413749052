"""What a step takes at the least in slices of its batch, however fine they are.

The linear relaxation of :mod:`keras_remat.solvers.bounds.window_bound` lets an op run, and a value
be alive, in part. A step in slices is a point of it: an op runs for a share of the samples, and of
a value the parts of a share of them are alive. So the relaxation of the *whole* step is a bound for
every step in slices, if only nothing whole is asked for. Its cuts are therefore small ops that read
a sum over the batch, as the root of a variance: all samples have come by before one of them runs.

Small values are left out, as if they were there for nothing. That lowers the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from keras_remat.core.graph import Graph, Op
from keras_remat.core.problem import Problem
from keras_remat.core.slices import SliceRule
from keras_remat.core.topology import predecessors
from keras_remat.solvers.bounds import window_bound

#: Values of less than such a share of all bytes that a step computes are left out.
_SMALL_SHARE = 1e-4


def least_added(
    problem: Problem, rules: Mapping[int, SliceRule], cuts: int, limit_s: float
) -> float:
    """Returns what slices of a step add to its time at the least, as a share of what it takes with
    all values kept.

    Args:
        problem: the whole step, with a budget.
        rules: op id → how it may run in slices.
        cuts: how many there are; more tell more, and take longer.
        limit_s: seconds for the linear program, which proves nothing before it is solved.
    """
    graph = problem.graph
    small_bytes = _SMALL_SHARE * sum(v.nbytes for v in graph.values if v.producer is not None)
    chain = chain_of_sums(graph, rules, small_bytes)
    step = max(1, len(chain) // cuts)
    chosen = chain[step // 2 :: step]
    large, ids = large_alone(problem, chosen, small_bytes)
    once_s = problem.store_all_time_s - large.store_all_time_s
    bound_s = window_bound.lower_bound_s(
        large, [ids[op_id] for op_id in chosen], limit_s=limit_s, relax=True
    )
    return (bound_s + once_s) / problem.store_all_time_s - 1


def chain_of_sums(graph: Graph, rules: Mapping[int, SliceRule], small_bytes: float) -> list[int]:
    """Returns small ops that read what all samples of a large value are summed up to, each
    depending on the one before, as many as possible."""
    large = {value.id for value in graph.values if value.nbytes > small_bytes}
    summed = {
        v for op_id, rule in rules.items() if not large.isdisjoint(rule.sliced) for v in rule.sums
    }

    def is_cut(op: Op) -> bool:
        is_small = large.isdisjoint((*op.inputs, *op.outputs))
        return is_small and not summed.isdisjoint(op.inputs)

    length: dict[int, int] = {}
    best: dict[int, int | None] = {}
    for op_id in sorted(graph.needed):
        before = sorted(predecessors(graph, op_id))
        best[op_id] = max(before, key=lambda i: length[i], default=None)
        longest = best[op_id]
        length[op_id] = is_cut(graph.ops[op_id]) + (0 if longest is None else length[longest])
    at, chain = max(sorted(length), key=lambda i: length[i], default=None), list[int]()
    while at is not None:
        if is_cut(graph.ops[at]):
            chain.append(at)
        at = best[at]
    return chain[::-1]


def large_alone(
    problem: Problem, cuts: list[int], small_bytes: float
) -> tuple[Problem, dict[int, int]]:
    """Returns the problem of the ops that touch large values, and of the cuts; and id of an op
    there → its id now. What a small value handed on is an order of ops."""
    graph = problem.graph
    large = [value.producer is not None and value.nbytes > small_bytes for value in graph.values]
    kept = [
        op_id
        for op_id in sorted(graph.needed)
        if op_id in cuts
        or any(large[v] for v in (*graph.ops[op_id].inputs, *graph.ops[op_id].outputs))
    ]
    ids = {op_id: at for at, op_id in enumerate(kept)}
    behind: dict[int, frozenset[int]] = {}  # op → the kept ones it follows through left-out ones
    values = {v.id: at for at, v in enumerate(v for v in graph.values if large[v.id])}
    ops = []
    for op_id in sorted(graph.needed):
        follows = frozenset[int]()
        for earlier in predecessors(graph, op_id):
            follows |= {earlier} if earlier in ids else behind[earlier]
        behind[op_id] = follows
        if op_id in ids:
            op = graph.ops[op_id]
            made = tuple(values[v] for v in op.outputs if large[v])
            # what makes small values alone runs once: they stay
            ops.append(
                replace(
                    op, id=ids[op_id], after=tuple(sorted(ids[p] for p in follows)), may_reuse=(),
                    inputs=tuple(values[v] for v in op.inputs if large[v]),
                    outputs=made, recomputable=op.recomputable and bool(made),
                )
            )  # fmt: skip
    kept_values = tuple(
        replace(v, id=values[v.id], producer=ids[v.producer])
        for v in graph.values
        if large[v.id] and v.producer is not None
    )
    profile = problem.profile
    costs = replace(
        profile,
        op_time_s=tuple(profile.op_time_s[i] for i in kept),
        op_workspace_bytes=(0,) * len(kept),
    )
    outputs = tuple(values[v] for v in graph.outputs if large[v])
    return replace(problem, graph=Graph(tuple(ops), kept_values, outputs), profile=costs), ids
