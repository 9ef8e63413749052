"""The fastest schedule by exhaustive search: the reference for exact solvers on small problems.

Dijkstra over states (ops that have run, values alive, last op run in this stage). First runs are in
default order, or in any legal one if that is asked for. With ``stages`` every stage runs each op at
most once and in ascending order, which is exactly Checkmate's model; without it anything may be
recomputed at any time.
"""

from __future__ import annotations

import heapq
from itertools import combinations

from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem

State = tuple[frozenset[int], frozenset[int], int]


def fastest(
    problem: Problem, *, stages: bool = False, any_order: bool = False
) -> tuple[float, list[int]] | None:
    """Seconds and order of the fastest schedule within the budget, or ``None`` when none fits."""
    graph, profile = problem.graph, problem.profile
    limit = problem.budget_bytes if problem.budget_bytes is not None else float("inf")
    ops = sorted(graph.needed)
    position = {op_id: t for t, op_id in enumerate(ops)}
    produced = {v for i in ops for v in graph.ops[i].outputs}
    followers: dict[int, list[int]] = {i: [] for i in ops}
    for i in ops:
        for earlier in graph.ops[i].after:
            if earlier in position:
                followers[earlier].append(position[i])
    wanted = set(graph.outputs) & produced
    everything = frozenset(range(len(ops)))
    start: State = (frozenset(), frozenset(), -1)
    queue: list[tuple[float, int, State, tuple[int, ...]]] = [(0.0, 0, start, ())]
    seen: set[State] = set()
    pushed = 0
    while queue:
        seconds, _, state, order = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        done, alive, last = state
        if done == everything and wanted <= alive:
            return seconds, list(order)
        following = [(seconds, (done, alive - {v}, last), order) for v in alive]
        for t in range(len(ops) if any_order else min(len(done) + 1, len(ops))):
            op = graph.ops[ops[t]]
            if any(position[e] not in done for e in op.after if e in position):
                continue
            if any(f in done for f in followers[ops[t]]):
                continue
            if t in done and (not op.recomputable or (stages and t <= last)):
                continue
            inputs = set(op.inputs) & produced
            if not inputs <= alive:
                continue
            held = (alive | set(op.outputs)) - inputs
            base = profile.resident_bytes + profile.op_workspace_bytes[ops[t]]
            base += sum(graph.values[v].nbytes for v in held | inputs)
            donors = sorted(set(op.may_reuse) & inputs)
            for count in range(len(donors) + 1):
                for dying in combinations(donors, count):
                    if base - reused_bytes(op, graph.values, frozenset(dying)) <= limit:
                        after = (alive | set(op.outputs)) - set(dying)
                        cost = seconds + profile.op_time_s[ops[t]]
                        state_after = (
                            done | {t},
                            after,
                            -1 if t not in done or not stages else t,
                        )
                        following.append((cost, state_after, (*order, ops[t])))
        for cost, next_state, next_order in following:
            if next_state not in seen:
                pushed += 1
                heapq.heappush(queue, (cost, pushed, next_state, next_order))
    return None
