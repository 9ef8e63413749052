"""Runs the default order, and when memory is full evicts the value that seems cheapest to lose.

This is *Dynamic Tensor Rematerialization* (Kirisame et al. 2021, arXiv 2006.09616), used as a
planner: nothing is computed, and only the orders of its runs are kept. Values that no later op of
the default order reads are evicted at once ("eager eviction", sec. 3.2); an evicted value that is
read again is recomputed with all it needs. Values under 1 % of the mean size are never evicted
(appendix E.2). The scores are in :mod:`keras_remat.solvers.papers.eviction_scores`.

Known result: an N-op chain trains in O(N) op runs with a budget of 2⌈√N⌉ values (theorem 3.1).
Liveness frees a value at its last read, but DTR only when it needs room, so the true peak is below
the run's. Therefore the budget of the run is searched above the real one, and recomputations are
taken back where there is room (:mod:`keras_remat.solvers.orders.trim`). On graphs small enough for
more runs, some are made with the scores blurred at random. Where nothing is left to evict, the run
goes on over its budget, and simulation decides. An op that must not run again (see
:mod:`keras_remat.solvers.orders.demand`) pins its outputs, and the run starts over.

Speed: scores are one vectorized minimum over the candidates. Up to ``OPTIONS.exact_candidates`` of
them all neighbourhoods are computed afresh for each eviction; beyond that only the winner's, again
and again until it stays the winner. A score may therefore be out of date, but not below its true
value for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from keras_remat.core.deadline import Deadline
from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.topology import last_runs
from keras_remat.solvers.orders.demand import Walk, order_of
from keras_remat.solvers.orders.incumbent import Incumbent
from keras_remat.solvers.orders.trim import trimmed
from keras_remat.solvers.papers.eviction_scores import SCORES, Neighbourhood


@dataclass(frozen=True)
class DtrOptions:
    """Rules the runs of DTR.

    Args:
        exact_candidates: number of candidates up to which all neighbourhoods are computed afresh
            for each eviction.
        rechecks: number of times that the winner's neighbourhood is computed otherwise, at most.
        runs_per_op: mean number of runs per op; a run that needs more is thrashing and given up.
        budget_percents: percents of the room that are added to the budget of a run, one run each.
        noise, noisy_trials: strength of the noise on scores, and number of runs with it.
        ops_run, ops_run_per_op: number of op runs of all runs together, and per op: limits that do
            not depend on the machine.
    """

    exact_candidates: int = 500
    rechecks: int = 20
    runs_per_op: int = 40
    budget_percents: tuple[int, ...] = (
        0, 1, 2, -1, 3, -2, 4, -3, 5, 6, -5, 8, 10, -8, 13, 16, 20, 25,
    )  # fmt: skip
    noise: float = 0.3
    noisy_trials: int = 40
    ops_run: int = 150_000
    ops_run_per_op: int = 500


OPTIONS = DtrOptions()


class _Run:
    """Makes one pass over the default order under a budget, and drops the values of a walk."""

    def __init__(
        self, walk: Walk, problem: Problem, score: str, seed: int, budget_bytes: int, noise: float
    ):
        graph, n = problem.graph, len(problem.graph.values)
        self.walk, self.problem, self.graph, self.ops = walk, problem, graph, graph.ops
        self.budget, self.alive = budget_bytes, walk.alive
        self.default_order = sorted(graph.needed)
        self.nbytes = [value.nbytes for value in graph.values]
        self.time = problem.profile.op_time_s
        self.held = problem.profile.resident_bytes
        self.clock = 0.0
        self.tick = (max(self.time, default=0.0) or 1.0) * 1e-6

        self.evicted = [False] * n
        self.locks = [0] * n
        self.reads_left = [0] * n
        for op_id in self.default_order:
            for v in set(self.ops[op_id].inputs):
                self.reads_left[v] += 1
        for v in set(graph.outputs):
            self.reads_left[v] += 1
        self.small, self.allowed = _never_and_ever_evicted(problem, self.default_order, walk.pinned)

        self.around = Neighbourhood(graph, self.time, self.evicted)
        self.numerator_of = self._numerators(score)
        self.uses_staleness = score in ("dtr", "eq", "local", "lru")
        self.refreshes = score in ("dtr", "eq", "msps")
        self.random = np.random.default_rng(seed)
        self.numerator = np.ones(n)
        self.last_use = np.zeros(n)
        self.weight = np.exp(noise * self.random.standard_normal(n)) if noise else np.ones(n)
        if score not in ("lru", "random"):
            self.weight *= np.maximum(np.asarray(self.nbytes, dtype=float), 1.0)
        self.candidate = np.zeros(n, dtype=bool)

    def _numerators(self, score: str) -> Callable[[int], float]:
        around, cost = self.around, self.time
        producer = [v.producer or 0 for v in self.graph.values]
        return {
            "dtr": lambda v: cost[producer[v]] + around.exact(v),
            "eq": lambda v: cost[producer[v]] + around.equivalence(v),
            "local": lambda v: cost[producer[v]],
            "msps": lambda v: cost[producer[v]] + around.ancestors(v, {producer[v]}),
            "lru": lambda v: 1.0,
            "size": lambda v: 1.0,
            "random": lambda v: float(self.random.random()),
        }[score]

    def execute(self) -> None:
        """Runs everything."""
        for op_id in self.default_order:
            self._demand(op_id)
            for v in set(self.ops[op_id].inputs):
                self.reads_left[v] -= 1
                self._evict_if_dead(v)
        for v in self.graph.outputs:  # DTR brings back what the caller holds
            self.locks[v] += 1
        for v in self.graph.outputs:
            if v not in self.alive:
                producer = self.graph.maker(v)  # a step input is always alive
                if producer in self.walk.barred:
                    self.walk.stuck.add(v)
                else:
                    self._demand(producer)

    def _demand(self, wanted: int) -> None:
        """Recomputes the missing inputs of an op, depth first, and runs it.

        Inputs of ops under way are locked.
        """
        stack = [wanted]
        self._lock(self.ops[wanted].inputs, 1)
        while stack:
            op_id = stack[-1]
            missing = next((v for v in self.ops[op_id].inputs if v not in self.alive), None)
            if missing is None:
                self._run(op_id)
                stack.pop()
                self._lock(self.ops[op_id].inputs, -1)
                for v in (*self.ops[op_id].inputs, *self.ops[op_id].outputs):
                    self._evict_if_dead(v)
                continue
            producer = self.graph.maker(missing)  # a step input is always alive
            if producer in self.walk.barred:
                self.walk.stuck.add(missing)
                self._revive(missing)
            else:
                stack.append(producer)
                self._lock(self.ops[producer].inputs, 1)

    def _lock(self, value_ids: Iterable[int], change: int) -> None:
        for v in set(value_ids):
            self.locks[v] += change
            self.candidate[v] = v in self.alive and self.allowed[v] and not self.locks[v]

    def _run(self, op_id: int) -> None:
        if len(self.walk.order) > OPTIONS.runs_per_op * len(self.default_order):
            raise TimeoutError("the run recomputes too much")
        op = self.ops[op_id]
        for v in op.outputs:  # the instance before this one is not read again
            if v in self.alive:
                self._forget(v)
        dying = frozenset(v for v in op.may_reuse if self.reads_left[v] == 1 and self.locks[v] == 1)
        extra = sum(self.nbytes[v] for v in op.outputs) - reused_bytes(op, self.graph.values, dying)
        self._make_room(extra + self.problem.profile.op_workspace_bytes[op_id])
        self.walk.run(op_id)
        self.clock += self.time[op_id] + self.tick
        self.around.leave(op_id)
        for v in op.outputs:
            self._revive(v)
        for v in op.inputs:
            self.last_use[v] = self.clock

    def _revive(self, v: int) -> None:
        self.alive.add(v)
        self.evicted[v] = False
        self.held += self.nbytes[v]
        self.last_use[v] = self.clock
        self.candidate[v] = self.allowed[v] and not self.locks[v]
        self.numerator[v] = self.numerator_of(v)

    def _forget(self, v: int) -> None:
        self.alive.remove(v)
        self.evicted[v], self.candidate[v] = True, False
        self.held -= self.nbytes[v]

    def _evict(self, v: int) -> None:
        self._forget(v)
        self.around.join(self.graph.maker(v))  # step inputs are never candidates

    def _evict_if_dead(self, v: int) -> None:
        if v in self.alive and self.reads_left[v] == 0 and not self.locks[v]:
            if self.allowed[v]:
                self._evict(v)
            elif self.small[v]:  # stays, and costs next to nothing
                self.held -= self.nbytes[v]
                self.nbytes[v] = 0

    def _make_room(self, extra: int) -> None:
        while self.held + extra > self.budget:
            v = self._cheapest()
            if v is None:
                return
            self._evict(v)

    def _cheapest(self) -> int | None:
        found = np.flatnonzero(self.candidate)
        if not len(found):
            return None
        weight = self.weight[found]
        if self.uses_staleness:
            weight = weight * (self.clock - self.last_use[found] + self.tick)
        if self.refreshes and len(found) <= OPTIONS.exact_candidates:
            for v in map(int, found):
                self.numerator[v] = self.numerator_of(v)
        score = self.numerator[found] / weight
        at = int(np.argmin(score))
        if self.refreshes and len(found) > OPTIONS.exact_candidates:
            for _ in range(OPTIONS.rechecks):
                v = int(found[at])
                self.numerator[v] = self.numerator_of(v)
                score[at] = self.numerator[v] / weight[at]
                best = int(np.argmin(score))
                if best == at:
                    break
                at = best
        return int(found[at])


def _never_and_ever_evicted(
    problem: Problem, order: Sequence[int], pinned: Collection[int]
) -> tuple[list[bool], list[bool]]:
    """Returns for each value whether it is too small to evict, and whether it may be evicted.

    It may be if it is large enough, not pinned, and can be recomputed up to its last reader.
    """
    graph = problem.graph
    sizes = [graph.values[v].nbytes for op_id in order for v in graph.ops[op_id].outputs]
    threshold = 0.01 * sum(sizes) / max(1, len(sizes))
    read_until = [-1] * len(graph.values)
    for at, op_id in enumerate(order):
        for v in graph.ops[op_id].inputs:
            read_until[v] = at
    for v in graph.outputs:
        read_until[v] = len(order)
    run_until = last_runs(problem.graph, order)
    small, allowed = [], []
    for value in graph.values:
        small.append(value.producer is not None and value.nbytes < threshold)
        allowed.append(
            value.producer is not None
            and value.nbytes >= threshold
            and value.id not in pinned
            and graph.ops[value.producer].recomputable
            and read_until[value.id] <= run_until[value.producer]
        )
    return small, allowed


def planned_order(
    problem: Problem,
    score: str,
    budget_bytes: int,
    seed: int,
    deadline: Deadline,
    *,
    noise: float = 0.0,
) -> list[int] | None:
    """Returns the order DTR runs under a budget; ``None`` if it thrashes or is out of time.

    Args:
        problem: the graph and its costs.
        score: one of ``SCORES``.
        budget_bytes: bytes that the run stays under as long as there is something to evict,
            resident bytes included.
        seed: seed of the score ``random`` and of the noise.
        deadline: deadline at which the run ends.
        noise: standard deviation of the logarithm of the random factor by which each value's score
            is divided.
    """
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; there are {', '.join(SCORES)}")

    def policy(walk: Walk) -> None:
        _Run(walk, problem, score, seed, budget_bytes, noise).execute()

    try:
        return order_of(problem, policy, deadline)
    except TimeoutError:
        return None


def solve(
    incumbent: Incumbent, seed: int, *, score: str = "dtr", max_ops_run: int = OPTIONS.ops_run
) -> None:
    """Runs DTR under several budgets around the real one, then with noise, and offers the orders.

    Args:
        incumbent, seed: as for every solver.
        score: ``"dtr"``, ``"eq"`` (by union-find) and ``"local"`` are h_DTR and its variants;
            ``"msps"`` is Capuchin's (Peng et al. 2020); ``"lru"``, ``"size"`` and ``"random"``
            evict the least recently used value, the largest one, any one.
        max_ops_run: number of op runs after which no further run of DTR begins.
    """
    problem = incumbent.problem
    if incumbent.offer_store_all() or problem.budget_bytes is None:
        return
    budget, room = problem.budget_bytes, problem.budget_bytes - problem.profile.resident_bytes
    trials = [(percent, seed, 0.0) for percent in OPTIONS.budget_percents]
    trials += [
        (OPTIONS.budget_percents[i % 9], seed + 1 + i, OPTIONS.noise)
        for i in range(OPTIONS.noisy_trials)
    ]
    ops_run = 0
    for percent, trial_seed, noise in trials:
        if incumbent.deadline.is_over or ops_run > min(
            max_ops_run, OPTIONS.ops_run_per_op * len(problem.graph.needed)
        ):
            break
        order = planned_order(
            problem,
            score,
            budget + room * percent // 100,
            trial_seed,
            incumbent.deadline,
            noise=noise,
        )
        if order is None:
            ops_run += OPTIONS.runs_per_op * len(problem.graph.needed)
            continue
        ops_run += len(order)
        if incumbent.offer(order):
            incumbent.offer(trimmed(problem, order))
