"""Keeps the values that cross a few cuts of the forward phase, and recomputes the rest.

The rest is recomputed once, segment by segment.

Chen, Xu, Zhang, Guestrin 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv 1604.06174:
algorithm 2 with a cut every k ops (sec. 4.2, k = √n gives O(√n) memory for one more forward pass)
and algorithm 3 with a cut whenever the bytes since the last one exceed b (sec. 4.3, "greedy"). The
generalisations are those of Checkmate (arXiv 1910.02653, sec. 6.1): ``ap`` cuts at articulation
points only, ``linear`` at any position of the default order. On a chain the two are the same. The
plain names use articulation points where there are any beside the linear form, and return the
better.

The papers fix k = √n; here k and b are searched, and the fastest schedule within the budget wins.
Known limits: nothing is recomputed more than once unless a cut's own values need it, and all values
after the last cut are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.linearize import Linearized

MAX_TRIALS = 200


def segmented_order(linear: Linearized, cuts: Sequence[int]) -> list[int]:
    """Returns the order that keeps the values crossing cuts, and recomputes the others.

    Args:
        linear: the problem's forward phase.
        cuts: ascending forward positions.
    """
    graph = linear.problem.graph
    dropped_after: dict[int, list[int]] = {}
    start = 0
    for cut in cuts:
        made = [v for op_id in linear.forward[start : cut + 1] for v in graph.ops[op_id].outputs]
        dropped_after[linear.forward[cut]] = [v for v in made if linear.last_forward_read[v] <= cut]
        start = cut + 1

    def policy(walk: Walk) -> None:
        for op_id in linear.default_order:
            walk.demand(op_id)
            walk.drop(dropped_after.get(op_id, ()))

    return order_of(linear.problem, policy)


def sqrt_n_cuts(candidates: Sequence[int]) -> Iterator[list[int]]:
    """Yields every k-th candidate for every k, from the k closest to the root of their number."""
    n = len(candidates)
    root = max(1, round(n**0.5))
    for k in spread(range(1, n + 1), root - 1):
        yield list(candidates[k - 1 :: k])


def greedy_cuts(linear: Linearized, candidates: Sequence[int]) -> Iterator[list[int]]:
    """Yields the cuts of algorithm 3 for byte limits from the largest op's bytes to all bytes.

    It begins with the middle of these limits, on a logarithmic scale.
    """
    graph = linear.problem.graph
    made = [
        sum(graph.values[v].nbytes for v in graph.ops[op_id].outputs) for op_id in linear.forward
    ]
    total, largest = sum(made), max(made, default=0)
    if not candidates or total == 0:
        return
    steps = min(MAX_TRIALS, 4 * len(candidates))
    limits = sorted({int(largest * (total / largest) ** (i / steps)) for i in range(steps)})
    allowed = set(candidates)
    for limit in spread(limits, len(limits) // 2):
        cuts, since = [], 0
        for at, nbytes in enumerate(made):
            since += nbytes
            if since > limit and at in allowed:
                cuts.append(at)
                since = 0
        yield cuts


def spread(items: Sequence[int], center: int) -> list[int]:
    """Returns at most ``MAX_TRIALS`` items, evenly chosen, those closest to ``center`` first."""
    stride = max(1, -(-len(items) // MAX_TRIALS))
    return [
        items[i]
        for i in sorted(range(center % stride, len(items), stride), key=lambda i: abs(i - center))
    ]


def solve(
    incumbent: Incumbent,
    seed: int,
    *,
    by_bytes: bool = False,
    forms: Sequence[str] = ("ap", "linear"),
) -> None:
    """Offers schedules with a checkpoint every k cuts or every b bytes.

    Args:
        incumbent, seed: as for every solver; nothing is random here.
        by_bytes: whether to count bytes (algorithm 3) and not cuts.
        forms: where checkpoints may be: ``"ap"`` at articulation points, ``"linear"`` at any cut of
            the linearized order.
    """
    if incumbent.offer_store_all():
        return
    linear = Linearized(incumbent.problem)
    tried: set[tuple[int, ...]] = set()
    for form in forms:
        candidates = linear.articulation_cuts if form == "ap" else linear.all_cuts
        for cuts in greedy_cuts(linear, candidates) if by_bytes else sqrt_n_cuts(candidates):
            if incumbent.deadline.is_over:
                break
            if tuple(cuts) not in tried:
                tried.add(tuple(cuts))
                incumbent.offer(segmented_order(linear, cuts))
    if tuple(forms) == ("ap",) and not linear.articulation_cuts:
        incumbent.reason = "the forward phase has no articulation point"
