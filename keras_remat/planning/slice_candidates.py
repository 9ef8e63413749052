"""Lists the sets of ops that may run in slices to keep a budget: few ops and few parts first.

:mod:`keras_remat.planning.slicing` decides among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.slices import SliceRule, Slicing

#: Numbers of parts that are tried.
PARTS = (2, 4, 8, 16, 32, 64)
#: Shares of the budget less the resident bytes. Ops that need more than such a share are put into
#: slices: first those that cannot run at all, then those beside which hardly anything may be kept.
_SHARES = (1.0, 0.7, 0.45)
#: A value above this share of the same bytes is large: the ops that make and read it run in the
#: same slices.
_LARGE_SHARE = 1 / 16


def candidates(
    problem: Problem, rules: Mapping[int, SliceRule], budget_bytes: int
) -> Iterator[Slicing]:
    """Yields ways to slice a step so that a budget is kept, few ops and few parts first.

    Args:
        rules: op id → how the op may run in slices.
        budget_bytes: bytes of the budget, which the whole step exceeds.
    """
    room = budget_bytes - problem.profile.resident_bytes
    seen: set[Slicing] = set()
    for share in _SHARES if room > 0 else ():
        heavy = {
            op_id
            for op_id in problem.graph.needed & rules.keys()
            if problem.op_floor_bytes(op_id) - problem.profile.resident_bytes > share * room
        }
        for parts in PARTS:
            able = able_ops(rules, parts)
            chosen = grown(problem.graph, rules, heavy & able, able, _LARGE_SHARE * room)
            if not chosen:
                break
            slicing = Slicing(tuple(sorted(chosen)), parts)
            if slicing not in seen:
                seen.add(slicing)
                yield slicing


def able_ops(rules: Mapping[int, SliceRule], parts: int) -> frozenset[int]:
    """Returns the ops that can run in ``parts`` slices, each with its partners."""
    able = {op_id for op_id, rule in rules.items() if rule.divides % parts == 0}
    while alone := {op_id for op_id in able if not rules[op_id].partners <= able}:
        able -= alone
    return frozenset(able)


def grown(
    graph: Graph,
    rules: Mapping[int, SliceRule],
    seeds: frozenset[int] | set[int],
    able: frozenset[int],
    large_bytes: float,
) -> set[int]:
    """Returns the seeds and all ops that have to run in slices with them.

    These are the ops that exchange parts of large values with the seeds, and the ops between them,
    however small their values are: at a whole op in between, one part of a large value would have
    to wait for all the others.
    """
    stack, chosen = sorted(seeds), set[int]()
    while stack:
        op_id = stack.pop()
        if op_id in chosen:
            continue
        chosen.add(op_id)
        rule, op = rules[op_id], graph.ops[op_id]
        stack += rule.partners
        for v in (*rule.sliced, *(v for v in op.outputs if v not in rule.sums)):
            producer = graph.values[v].producer
            if graph.values[v].nbytes <= large_bytes:
                continue
            if producer in able and v not in rules[producer].sums:
                stack.append(producer)
            stack += (r for r in graph.readers[v] if r in able and v in rules[r].sliced)
    return chosen | _between(graph, rules, chosen, able)


def _between(
    graph: Graph, rules: Mapping[int, SliceRule], chosen: set[int], able: frozenset[int]
) -> set[int]:
    """Returns the ops that hand parts on from chosen ops to other chosen ones.

    Ops that only read parts of step inputs, and whose values only chosen ops read, are returned,
    too. Where such an op runs whole, a compiler may keep more bytes for it than it makes.
    """
    feeds = set(chosen)
    for op in reversed(graph.ops):
        if op.id in feeds:
            feeds.update(graph.producers(op.id))
    handing_on = set(chosen)
    for op in graph.ops:
        if op.id in able & feeds and rules[op.id].partners <= feeds:
            made = ((v, graph.values[v].producer) for v in rules[op.id].sliced)
            if any(p in handing_on and v not in rules[p].sums for v, p in made if p is not None):
                handing_on |= {op.id, *rules[op.id].partners}
    for op_id in able - handing_on if handing_on else ():
        readers = [(r, v) for v in graph.ops[op_id].outputs for r in graph.readers[v]]
        rule = rules[op_id]
        is_fed = rule.sliced and all(graph.values[v].producer is None for v in rule.sliced)
        alone = all(r in handing_on and v in rules[r].sliced for r, v in readers)
        if is_fed and readers and alone and not rule.sums | rule.partners:
            handing_on.add(op_id)
    return handing_on - chosen
