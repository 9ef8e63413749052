"""Checkmate's program: which ops run, and which values are kept, in each stage.

Jain et al. 2020, *Checkmate: Breaking the memory wall with optimal tensor rematerialization*, arXiv
1910.02653, eq. 1 to 9 with the frontier-advancing stages of sec. 4.6. Stage t (from 0) runs op t of
the default order for the first time, after whatever it recomputes, in ascending order; one more
stage at the end may recompute outputs. R[t, i] says that op i runs in stage t, S[t, v] that value
v is kept from stage t − 1 into t, U[t, k] what is alive while op k of stage t runs, F[t, v, k] that
v is freed after it. Written for values and not for ops, so that ops may have several outputs.

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
    """Holds Checkmate's program of a problem.

    The cost leaves out the first run of every op, which is no variable, and is scaled;
    :meth:`seconds` turns it back.

    Attributes:
        ops: the default order.
        run: R[t, i] → variable.
        keep: S[t, v] → variable.
    """

    def __init__(self, problem: Problem, ops: tuple[int, ...], deadline: Deadline):
        super().__init__(deadline)
        self.problem, self.ops = problem, ops
        self.run: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}

    def seconds(self, cost: float) -> float:
        """Returns seconds of a whole schedule whose recomputations cost ``cost``."""
        store_all_s = self.problem.store_all_time_s
        return store_all_s + max(0.0, cost) * (store_all_s or 1.0) / COST_OF_STORE_ALL

    def order(self, x: np.ndarray) -> list[int]:
        """Returns the order that a solution stands for: the ops of each stage, ascending."""
        stages = [*([(t, op_id)] for t, op_id in enumerate(self.ops)), list[tuple[int, int]]()]
        for (t, i), column in self.run.items():
            if x[column] > 0.5:
                stages[t].append((i, self.ops[i]))
        return [op_id for stage in stages for _, op_id in sorted(stage)]

    def stages_over(self, order: list[int], live: np.ndarray, budget_bytes: int) -> set[int]:
        """Returns the stages of an order of this program that exceed the budget."""
        position = {op_id: t for t, op_id in enumerate(self.ops)}
        stage, over = 0, set[int]()
        for at, op_id in enumerate(order):
            if live[at] > budget_bytes:
                over.add(stage)
            if position.get(op_id) == stage:
                stage += 1
        return over


def last_useful_stages(problem: Problem, ops: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the last stages in which running each op, and keeping each value, can help.

    Returns:
        Per position of the default order the last stage in which a run is allowed and useful (its
        own stage when only the first is); per value the last stage in which it can be read,
        ``len(ops) + 1`` for outputs (the end), -1 for values nobody reads.
    """
    graph = problem.graph
    n, allowed_until = len(ops), last_runs(problem.graph, ops)
    read_until = [-1] * len(graph.values)
    for v in graph.outputs:
        read_until[v] = n + 1
    run_until = list(range(n))
    for t in reversed(range(n)):
        op = graph.ops[ops[t]]
        useful = max((read_until[v] for v in op.outputs), default=t)
        run_until[t] = max(t, min(allowed_until[ops[t]], useful))
        for v in op.inputs:
            read_until[v] = max(read_until[v], run_until[t])
    return run_until, read_until


def build(
    problem: Problem,
    detailed: Collection[int] | None = None,
    *,
    deadline: Deadline = NO_DEADLINE,
) -> Program:
    """Returns the program of a problem.

    Args:
        problem: a problem with a budget.
        detailed: stages to write within-stage memory for; ``None`` for all of them, which is
            Checkmate's program.
        deadline: deadline for writing the program.

    Raises:
        TimeoutError: the deadline was over before the program was written.
    """
    if problem.budget_bytes is None:
        raise ValueError("a budget is needed")
    writer = _Writer(problem, problem.budget_bytes, deadline)
    writer.add_variables()
    writer.add_existence()
    writer.add_stage_ends()
    for t in range(writer.n + 1) if detailed is None else sorted(detailed):
        writer.add_stage(t)
    return writer.program


Terms = list[tuple[int, float]]
"""A sum of variables, each with its factor."""


class _Writer:
    """Writes the rows of a program; bytes are shares of the limit."""

    def __init__(self, problem: Problem, limit_bytes: int, deadline: Deadline):
        graph, profile = problem.graph, problem.profile
        self.problem, self.graph = problem, graph
        self.ops = Schedule.store_all(graph).order
        self.n = len(self.ops)
        self.inputs = [
            [v for v in dict.fromkeys(graph.ops[i].inputs) if graph.values[v].producer is not None]
            for i in self.ops
        ]
        self.outputs = [graph.ops[i].outputs for i in self.ops]
        self.made_by = {v: t for t, made in enumerate(self.outputs) for v in made}
        self.readers: dict[int, list[int]] = {v: [] for v in self.made_by}
        for t, read in enumerate(self.inputs):
            for v in read:
                self.readers[v].append(t)
        self.scale = 1.0 / limit_bytes
        self.size = {v: graph.values[v].nbytes * self.scale for v in self.made_by}
        self.workspace = [profile.op_workspace_bytes[i] * self.scale for i in self.ops]
        self.resident = profile.resident_bytes * self.scale
        self.program = Program(problem, self.ops, deadline)

    def add_variables(self) -> None:
        """Adds R and S where they can help."""
        program, ops = self.program, self.ops
        run_until, read_until = last_useful_stages(self.problem, ops)
        cost_scale = COST_OF_STORE_ALL / (self.problem.store_all_time_s or 1.0)
        op_time_s = self.problem.profile.op_time_s
        for t in range(self.n + 1):
            for i in range(t):
                if t <= run_until[i]:
                    cost = op_time_s[ops[i]] * cost_scale
                    program.run[t, i] = program.variable(cost, integral=True)
        for v, i in self.made_by.items():
            for t in range(i + 1, read_until[v] + 1):
                program.keep[t, v] = program.variable(integral=True)

    def running(self, t: int, i: int) -> tuple[Terms, float]:
        """Returns R[t, i] as (terms, constant)."""
        if i == t:
            return [], 1.0
        run = self.program.run
        return ([(run[t, i], 1.0)], 0.0) if (t, i) in run else ([], 0.0)

    def kept(self, t: int, v: int) -> Terms:
        """Returns S[t, v] as terms."""
        keep = self.program.keep
        return [(keep[t, v], 1.0)] if (t, v) in keep else []

    def stage_ops(self, t: int) -> list[int]:
        """Returns the ops that may run in stage t, ascending; the last stage adds no new op."""
        run = self.program.run
        return [i for i in range(min(t + 1, self.n)) if i == t or (t, i) in run]

    def add_existence(self) -> None:
        """Adds eq. 1b and 1c: values that are read or kept exist."""
        program = self.program
        for t in range(self.n + 1):  # eq. 1b: an op runs only if its inputs are there
            for j in self.stage_ops(t):
                terms, constant = self.running(t, j)
                for v in self.inputs[j]:
                    made_now, _ = self.running(t, self.made_by[v])
                    negative = [(c, -1.0) for c, _ in made_now + self.kept(t, v)]
                    program.at_most(terms + negative, -constant)
        for (t, v), c in program.keep.items():  # eq. 1c: what is kept was computed or kept before
            made_before, constant = self.running(t - 1, self.made_by[v])
            before = [(d, -1.0) for d, _ in made_before + self.kept(t - 1, v)]
            program.at_most([(c, 1.0), *before], constant)
            if t == self.n + 1:
                program.between([(c, 1.0)], 1.0, 1.0)

    def add_stage_ends(self) -> None:
        """Adds a row for every stage: the bytes alive while its last op runs."""
        keep, size = self.program.keep, self.size
        for t in range(self.n):
            touched = set(self.inputs[t]) | set(self.outputs[t])
            op = self.graph.ops[self.ops[t]]
            reuse = reused_bytes(op, self.graph.values, frozenset(op.may_reuse)) * self.scale
            fixed = self.resident + sum(size[v] for v in touched) + self.workspace[t] - reuse
            held = [
                (keep[t + 1, v], size[v])
                for v in self.made_by
                if v not in touched and (t + 1, v) in keep and size[v]
            ]
            self.program.at_most(held, 1.0 - fixed)

    def add_stage(self, t: int) -> None:
        """Adds eq. 2 to 8: the memory within a stage."""
        program, keep, size = self.program, self.program.keep, self.size
        for v, i in self.made_by.items():
            if (t, v) in keep and i < t and self.running(t, i)[0]:
                program.at_most([(keep[t, v], 1.0), *self.running(t, i)[0]], 1.0)
        # U[t, 0] without resident
        previous: Terms = [(keep[t, v], size[v]) for v in self.made_by if (t, v) in keep]
        freed: Terms = []
        for k in self.stage_ops(t):
            runs, constant = self.running(t, k)
            alive = program.variable(ceiling=np.inf)
            made_bytes = sum(size[v] for v in self.outputs[k])
            # eq. 3: U[t, k] = U[t, k − 1] − freed after k − 1 + what k computes
            terms = [(alive, 1.0), *((c, -a) for c, a in previous), *freed]
            terms += [(c, -made_bytes) for c, _ in runs]
            program.between(terms, made_bytes * constant, made_bytes * constant)
            freed, taken = self._add_frees(t, k)
            # eq. 8: within the budget
            program.at_most(
                [(alive, 1.0), *taken] + [(c, self.workspace[k]) for c, _ in runs],
                1.0 - self.resident - self.workspace[k] * constant,
            )
            previous = [(alive, 1.0)]

    def _add_frees(self, t: int, k: int) -> tuple[Terms, Terms]:
        """Adds the variables of what op k of stage t may free and take over.

        Returns the terms of the bytes freed after it, and, negative, of the bytes it takes over.
        """
        program, outputs = self.program, self.outputs
        keep, run = program.keep, program.run
        runs, constant = self.running(t, k)
        freed: Terms = []
        taken: Terms = []
        by_size: dict[int, list[int]] = {}
        for v in [*self.inputs[k], *outputs[k]]:
            free = program.variable()
            freed.append((free, self.size[v]))
            there = [(c, -1.0) for c, _ in runs]
            program.at_most([(free, 1.0), *there], constant)
            if (t + 1, v) in keep:
                program.at_most([(free, 1.0), (keep[t + 1, v], 1.0)], 1.0)
            for j in self.readers[v]:
                if j > k and j == t:
                    program.at_most([(free, 1.0)], 0.0)
                elif j > k and (t, j) in run:
                    program.at_most([(free, 1.0), (run[t, j], 1.0)], 1.0)
            if v in self.graph.ops[self.ops[k]].may_reuse and v in self.inputs[k]:
                take = program.variable()
                program.at_most([(take, 1.0), (free, -1.0)], 0.0)
                taken.append((take, -self.size[v]))
                by_size.setdefault(self.graph.values[v].nbytes, []).append(take)
        for nbytes, takes in by_size.items():
            count = sum(self.graph.values[v].nbytes == nbytes for v in outputs[k])
            program.at_most([(c, 1.0) for c in takes], float(count))
        return freed, taken
