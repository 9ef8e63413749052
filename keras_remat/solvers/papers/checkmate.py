"""Checkmate's program: which ops run, and which values are kept, in each stage.

Jain et al. 2020, *Checkmate: Breaking the memory wall with optimal tensor rematerialization*, arXiv
1910.02653, eq. 1 to 9 with the frontier-advancing stages of sec. 4.6. Stage t (from 0) runs op t of
the default order for the first time, after whatever it recomputes, in ascending order; one more
stage at the end may recompute outputs. R[t, i] says that op i runs in stage t, G[t, i] that its
values are fetched (:mod:`keras_remat.core.offload`; not in the paper), S[t, v] that value v
is kept from stage t − 1 into t, U[t, k] what is alive while op k of stage t runs, F[t, v, k] that v
is freed after it. Written for values and not for ops, so that ops may have several outputs.

What differs from the letter of the paper, none of it changing the optimum:

* Variables that cannot help are left out: runs of an op that must not run (again), and everything
  of a value after the last stage in which it, or something recomputed from it, can still be read.
* F enters through ``F ≤ R[t, k]``, ``F + S[t + 1, v] ≤ 1`` and ``F + R[t, j] ≤ 1`` for later
  readers j. With binary R and S that is eq. 7 (``hazards ≤ κ (1 − F)``) without its κ, and a much
  tighter relaxation. ``1 − F ≤ hazards`` is not needed, because freeing only helps; for the same
  reason F need not be declared binary.
* Q[t, v, k] ≤ F[t, v, k] lets op k take over the buffer of v.
* ``S[t, v] + R[t, producer of v] ≤ 1``: within a stage nothing reads v before its producer would
  have run.

The rows of U are only there for the stages asked for (``detailed``). Every stage has one row for
the moment its last op runs: its inputs, its outputs and what is kept into the next stage are alive
together. **Scope**: without detailed stages the program is a relaxation of *every* legal schedule
whose first runs are in default order, whatever the order inside a stage and however often something
is recomputed in it, so its optimum and that of its linear relaxation bound all of them. With all
stages detailed it is Checkmate's program, and schedules that run an op twice in a stage, or not in
ascending order, are outside of it and may be faster near the floor. Neither says anything about
schedules whose first runs are in another order.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.graph import reused_bytes
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.topology import last_runs
from keras_remat.solvers.engines.linear_program import LinearProgram

COST_OF_STORE_ALL = 1000.0  # solvers have absolute tolerances, so costs are scaled to this


class Program(LinearProgram):
    """Checkmate's program of a problem.

    The cost leaves out the first run of every op, which is no variable, and is scaled;
    :meth:`seconds` turns it back.

    Attributes:
        ops: the default order.
        run: R[t, i] → variable.
        fetch: G[t, i] → variable.
        keep: S[t, v] → variable.
    """

    def __init__(self, problem: Problem, ops: tuple[int, ...], deadline: Deadline):
        super().__init__(deadline)
        self.problem, self.ops = problem, ops
        self.run: dict[tuple[int, int], int] = {}
        self.fetch: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}

    def seconds(self, cost: float) -> float:
        """Seconds of a whole schedule whose recomputations cost ``cost``."""
        store_all_s = self.problem.store_all_time_s
        return store_all_s + max(0.0, cost) * (store_all_s or 1.0) / COST_OF_STORE_ALL

    def order(self, x: np.ndarray) -> list[int]:
        """Returns the order that a solution stands for: per stage what it runs, ascending."""
        stages = [*([(t, op_id)] for t, op_id in enumerate(self.ops)), list[tuple[int, int]]()]
        for first, variables in ((0, self.run), (len(self.problem.graph.ops), self.fetch)):
            for (t, i), column in variables.items():
                if x[column] > 0.5:
                    stages[t].append((i, first + self.ops[i]))
        return [op_id for stage in stages for _, op_id in sorted(stage)]

    def stages_over(self, order: list[int], live: np.ndarray, budget_bytes: int) -> set[int]:
        """Stages of an order of this program that hold more than the budget while they run."""
        position = {op_id: t for t, op_id in enumerate(self.ops)}
        stage, seen, over = 0, -1, set()
        for at, op_id in enumerate(order):
            stage = seen + 1
            if live[at] > budget_bytes:
                over.add(stage)
            if position.get(op_id) == stage:
                seen = stage
        return over


def last_useful_stages(
    problem: Problem, ops: tuple[int, ...]
) -> tuple[list[int], list[int], list[int]]:
    """Returns until which stage running or fetching each op, and keeping each value, can help.

    Returns:
        Per position of the default order the last stage in which a run is allowed and useful (its
        own stage when only the first is), and the same for a fetch; per value the last stage in
        which it can be read, ``len(ops) + 1`` for outputs (the end), -1 for values nobody reads.
    """
    graph = problem.graph
    n, allowed_until = len(ops), last_runs(problem, ops)
    read_until = [-1] * len(graph.values)
    for v in graph.outputs:
        read_until[v] = n + 1
    run_until, fetch_until = list(range(n)), list(range(n))
    for t in reversed(range(n)):
        op = graph.ops[ops[t]]
        useful = max((read_until[v] for v in op.outputs), default=t)
        run_until[t] = max(t, min(allowed_until[ops[t]], useful))
        if problem.fetches:
            fetch_until[t] = max(t, useful)
        for v in op.inputs:
            read_until[v] = max(read_until[v], run_until[t])
    return run_until, fetch_until, read_until


def build(
    problem: Problem,
    detailed: Collection[int] | None = None,
    *,
    budget_bytes: int | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Program:
    """Returns the program of a problem.

    Args:
        problem: must have a budget unless ``budget_bytes`` is given.
        detailed: stages to write within-stage memory for; ``None`` for all of them, which is
            Checkmate's program.
        budget_bytes: a budget to use instead of the problem's.
        deadline: to be done at.

    Raises:
        TimeoutError: the deadline was over before.
    """
    graph, profile = problem.graph, problem.profile
    limit = problem.budget_bytes if budget_bytes is None else budget_bytes
    if limit is None:
        raise ValueError("a budget is needed")
    ops = Schedule.store_all(graph).order
    n = len(ops)
    inputs = [
        [v for v in dict.fromkeys(graph.ops[i].inputs) if graph.values[v].producer is not None]
        for i in ops
    ]
    outputs = [graph.ops[i].outputs for i in ops]
    made_by = {v: t for t, made in enumerate(outputs) for v in made}
    readers: dict[int, list[int]] = {v: [] for v in made_by}
    for t, read in enumerate(inputs):
        for v in read:
            readers[v].append(t)
    run_until, fetch_until, read_until = last_useful_stages(problem, ops)
    scale = 1.0 / limit
    cost_scale = COST_OF_STORE_ALL / (problem.store_all_time_s or 1.0)
    size = {v: graph.values[v].nbytes * scale for v in made_by}
    workspace = [profile.op_workspace_bytes[i] * scale for i in ops]
    resident = profile.resident_bytes * scale

    program = Program(problem, ops, deadline)
    for t in range(n + 1):
        for i in range(t):
            if t <= run_until[i]:
                program.run[t, i] = program.variable(
                    profile.op_time_s[ops[i]] * cost_scale, integral=True
                )
            if t <= fetch_until[i]:
                seconds = problem.op_time_s[len(graph.ops) + ops[i]]
                program.fetch[t, i] = program.variable(seconds * cost_scale, integral=True)
    for v, i in made_by.items():
        for t in range(i + 1, read_until[v] + 1):
            program.keep[t, v] = program.variable(integral=True)
    run, fetch, keep = program.run, program.fetch, program.keep

    def running(t: int, i: int) -> tuple[list[tuple[int, float]], float]:
        """Returns R[t, i] as (terms, constant)."""
        if i == t:
            return [], 1.0
        return ([(run[t, i], 1.0)], 0.0) if (t, i) in run else ([], 0.0)

    def made(t: int, i: int) -> tuple[list[tuple[int, float]], float]:
        """Returns R[t, i] + G[t, i] as (terms, constant)."""
        terms, constant = running(t, i)
        return terms + ([(fetch[t, i], 1.0)] if (t, i) in fetch else []), constant

    def kept(t: int, v: int) -> list[tuple[int, float]]:
        """Returns S[t, v] as terms."""
        return [(keep[t, v], 1.0)] if (t, v) in keep else []

    def stage_ops(t: int) -> list[int]:
        """Returns the ops that may run in stage t, ascending; the last has none of its own."""
        return [i for i in range(min(t + 1, n)) if i == t or (t, i) in run or (t, i) in fetch]

    for t in range(n + 1):  # eq. 1b: an op runs only if its inputs are there
        for j in stage_ops(t):
            terms, constant = running(t, j)
            for v in inputs[j]:
                made_now, _ = made(t, made_by[v])
                negative = [(c, -1.0) for c, _ in made_now + kept(t, v)]
                program.at_most(terms + negative, -constant)
    for (t, v), c in keep.items():  # eq. 1c: what is kept was computed or kept before
        made_before, constant = made(t - 1, made_by[v])
        program.at_most([(c, 1.0)] + [(d, -1.0) for d, _ in made_before + kept(t - 1, v)], constant)
        if t == n + 1:
            program.between([(c, 1.0)], 1.0, 1.0)
    for t in range(n):  # while the last op of a stage runs
        touched = set(inputs[t]) | set(outputs[t])
        op = graph.ops[ops[t]]
        reuse = reused_bytes(op, graph.values, frozenset(op.may_reuse)) * scale
        fixed = resident + sum(size[v] for v in touched) + workspace[t] - reuse
        held = [
            (keep[t + 1, v], size[v])
            for v in made_by
            if v not in touched and (t + 1, v) in keep and size[v]
        ]
        program.at_most(held, 1.0 - fixed)

    for t in range(n + 1) if detailed is None else sorted(detailed):  # eq. 2 to 8
        for v, i in made_by.items():
            if (t, v) in keep and i < t and made(t, i)[0]:
                program.at_most([(keep[t, v], 1.0), *made(t, i)[0]], 1.0)
        # U[t, 0] without resident
        before = [(keep[t, v], size[v]) for v in made_by if (t, v) in keep]
        previous: list[tuple[int, float]] = before
        freed: list[tuple[int, float]] = []
        for k in stage_ops(t):
            runs, runs_constant = running(t, k)
            makes, _ = made(t, k)  # the same constant
            alive = program.variable(ceiling=np.inf)
            made_bytes = sum(size[v] for v in outputs[k])
            # eq. 3: U[t, k] = U[t, k − 1] − freed after k − 1 + what k computes
            terms = (
                [(alive, 1.0)]
                + [(c, -a) for c, a in previous]
                + freed
                + [(c, -made_bytes) for c, _ in makes]
            )
            program.between(terms, made_bytes * runs_constant, made_bytes * runs_constant)
            taken: list[tuple[int, float]] = []
            by_size: dict[int, list[int]] = {}
            freed = []
            for v in [*inputs[k], *outputs[k]]:
                free = program.variable()
                freed.append((free, size[v]))
                program.at_most(
                    [(free, 1.0)] + [(c, -1.0) for c, _ in (makes if v in outputs[k] else runs)],
                    runs_constant,
                )
                if (t + 1, v) in keep:
                    program.at_most([(free, 1.0), (keep[t + 1, v], 1.0)], 1.0)
                for j in readers[v]:
                    if j > k and j == t:
                        program.at_most([(free, 1.0)], 0.0)
                    elif j > k and (t, j) in run:
                        program.at_most([(free, 1.0), (run[t, j], 1.0)], 1.0)
                if v in graph.ops[ops[k]].may_reuse and v in inputs[k]:
                    take = program.variable()
                    program.at_most([(take, 1.0), (free, -1.0)], 0.0)
                    taken.append((take, -size[v]))
                    by_size.setdefault(graph.values[v].nbytes, []).append(take)
            for nbytes, takes in by_size.items():
                count = sum(graph.values[v].nbytes == nbytes for v in outputs[k])
                program.at_most([(c, 1.0) for c in takes], float(count))
            # eq. 8: within the budget
            program.at_most(
                [(alive, 1.0), *taken] + [(c, workspace[k]) for c, _ in runs],
                1.0 - resident - workspace[k] * runs_constant,
            )
            previous = [(alive, 1.0)]
    return program
