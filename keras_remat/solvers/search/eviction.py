"""Makes one pass of :mod:`keras_remat.solvers.search.greedy`, and evicts values to make room.

A pass runs a base order op by op. Where an allocation does not fit, it evicts values, as an online
rematerializer such as DTR (Kirisame et al. 2021, arXiv 2006.09616) would: an evicted value is
computed again when an op asks for it, parents first. DTR has to guess three facts that are known
here: when each value is read next (Belady's rule), whether an op may still run again (``after``,
``recomputable``), and which evicted ops are waiting for a value. The value with the least

    (seconds to compute it and its missing ancestors again) ** a / (bytes · (distance to its next
    need) ** b)

is evicted first. The cost of a value is added up only until another value is known to be evicted
before it: near the floor a full look would be at hundreds of ops, for a few ops that run. An input
of the running op that is read again later can go, too, where its buffer is taken over. Evicting
late costs nothing: the derived lifetime of an evicted value ends at its last read, not at the
moment of the decision.

The decisions are in :mod:`keras_remat.solvers.engines.evictions`; this module holds the tables they
work on. The decisions run as machine code once it is compiled, and as Python before; both decide
the same.

DTR's own walk (:mod:`keras_remat.solvers.papers.dtr`) is another one on purpose: it locks inputs
before they are there, takes the first that is missing, and may go over its budget.
:mod:`keras_remat.solvers.orders.demand` explains why there are three walks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from keras_remat.core.deadline import NO_DEADLINE, Deadline
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.slices import is_sliced
from keras_remat.core.topology import last_runs
from keras_remat.solvers.engines import evictions, native

LOOKED_AT_AGAIN = 6
"""Factor by which a look grows. The cost of a value is first that of the op that computes it. Each
further look is at this many times as many missing ops as the one before, until another value is
known to cost less (``benchmarks/ablation.py`` measures what that is worth)."""
KEPT_SHARE = 1 / 256
"""Share of the budget for small values that are never dropped. Values that are computed from them
(a mean, spread out to the size of an activation) can then be computed again when the large values
behind them are gone and variables have been updated. Most small values of a step in slices are sums
over parts of the batch, and are left out: those of a U-Net had taken the share, statistics of some
layers were dropped, and less than 81 MiB had no schedule, where 60 now have one."""
NATIVE_OPS = 500
"""Number of ops. Passes over smaller graphs end in Python before machine code is loaded, which
takes a second."""
_DTYPES = {int: np.int64, float: np.float64, bool: np.bool_}
_WHY = {
    evictions.FULL: "nothing can be evicted",
    evictions.EXPLODED: "the recomputations exploded",
    evictions.LOST: "a value cannot be computed again",
    evictions.SLOWER: "a faster schedule is known",
}


Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Policy:
    """Holds the exponents of the eviction score.

    ``cost`` is that of the recomputation seconds, ``distance`` that of the distance to the next
    need.
    """

    cost: float
    distance: float


class StuckError(Exception):
    """Reports that the policy cannot go on within its limits."""


@dataclass(frozen=True)
class _BaseTables:
    """Holds the tables that all passes over one base order share.

    Args:
        links: links of the graph, followed by the positions at which values are read.
        reads: columns that say where the positions of each value begin and end in ``links``.
        last_runs: for each op, the position before which it may last run.
    """

    links: list[int]
    reads: dict[str, list[int]]
    last_runs: list[int]


class Tables:
    """Holds the tables that all passes over a graph share.

    They are its links, and the columns of its records by the names of
    :mod:`keras_remat.solvers.engines.evictions`.
    """

    def __init__(self, graph: Graph):
        values, ops = graph.values, graph.ops
        producer = [-1 if value.producer is None else value.producer for value in values]
        # step inputs are always there
        self.inputs = [[v for v in dict.fromkeys(op.inputs) if producer[v] >= 0] for op in ops]
        reuse = [[v for v in dict.fromkeys(op.may_reuse) if producer[v] >= 0] for op in ops]
        self.links: list[int] = []
        self.ops = (
            _linked(self.links, "inputs", self.inputs)
            | _linked(self.links, "by_id", map(sorted, self.inputs))
            | _linked(self.links, "outputs", (op.outputs for op in ops))
            | _linked(self.links, "reuse", reuse)
        )
        self.values = {"nbytes": [value.nbytes for value in values], "producer": producer}
        self.values |= _linked(self.links, "readers", graph.readers)
        self.values |= _linked(self.links, "children", graph.children)
        self._small = _small_values(graph)
        self._small_bytes = list(accumulate(values[v].nbytes for v in self._small))
        self._graph = graph
        self._of_base: dict[tuple[int, ...], _BaseTables] = {}

    def kept(self, budget: int) -> list[bool]:
        """Returns for each value whether it is kept for good.

        The smallest values are, as many as hold at most the share :data:`KEPT_SHARE` of a budget
        together.
        """
        kept = [False] * len(self.values["nbytes"])
        for value_id in self._small[: bisect_right(self._small_bytes, int(KEPT_SHARE * budget))]:
            kept[value_id] = True
        return kept

    def of_base(self, base: tuple[int, ...]) -> _BaseTables:
        """Returns the tables that all passes over a base order share."""
        if base not in self._of_base:
            links, graph = list(self.links), self._graph
            reads = _linked(links, "reads", _reads(graph, self.inputs, base))
            self._of_base[base] = _BaseTables(links, reads, last_runs(graph, base))
        return self._of_base[base]


def _small_values(graph: Graph) -> list[int]:
    """Returns the values that may be kept for good, the smallest first.

    In a step in slices, values from which only values no larger are computed are left out, such as
    sums over parts of the batch.
    """
    in_slices, found = is_sliced(graph), []
    for value in sorted(graph.values, key=lambda value: value.nbytes):
        made = [graph.values[child].nbytes for child in graph.children[value.id]]
        is_a_part = in_slices and bool(made) and max(made) <= value.nbytes
        if value.producer is not None and not is_a_part:
            found.append(value.id)
    return found


def _reads(graph: Graph, inputs: Sequence[Sequence[int]], base: Sequence[int]) -> list[list[int]]:
    """Returns the positions in a base order at which each value is read.

    The end of the order is added for values that are alive at the end.
    """
    reads: list[list[int]] = [[] for _ in graph.values]
    for position, op_id in enumerate(base):
        for value_id in inputs[op_id]:
            reads[value_id].append(position)
    for value_id in graph.outputs:
        reads[value_id].append(len(base))
    return reads


def _linked(links: list[int], name: str, members: Iterable[Iterable[int]]) -> dict[str, list[int]]:
    """Adds lists to ``links``; returns where each begins and ends, as two columns."""
    begins, ends = list[int](), list[int]()
    for one in members:
        begins.append(len(links))
        links += one
        ends.append(len(links))
    return {name: begins, f"{name}_end": ends}


class Eviction:
    """Makes one pass over a base order.

    The base order is legal, holds at least the needed ops, and recomputes nothing. :meth:`run`
    raises :class:`StuckError` when nothing can be evicted and the next op does not fit, when the
    recomputations explode, when a schedule faster than ``worse_than_s`` is out of reach, or at
    ``deadline``.

    Args:
        tables: tables of the problem's graph, where they are known.

    Attributes:
        steps: number of steps made so far.
        kept: for each value, whether it is never dropped.
    """

    def __init__(
        self,
        problem: Problem,
        base: Sequence[int],
        policy: Policy,
        deadline: Deadline,
        worse_than_s: float,
        tables: Tables | None = None,
    ):
        if problem.budget_bytes is None:
            raise ValueError("greedy eviction needs a budget")
        self.problem, self.policy, self.deadline = problem, policy, deadline
        self.base, self.worse_than_s = tuple(base), worse_than_s
        self.tables = tables or Tables(problem.graph)
        self.kept = self.tables.kept(problem.budget_bytes)
        self.steps = 0

    def run(self, limit: int, *, compiled: bool | None = None) -> tuple[int, ...]:
        """Makes the pass, and returns its order.

        Args:
            limit: number of steps after which nothing is computed again.
            compiled: whether the decisions run as machine code; ``None``: if the graph is large and
                the machine code is there.
        """
        if compiled is None:
            compiled = len(self.problem.graph.ops) >= NATIVE_OPS and native.is_compiled()
        kernel = native.kernel(evictions, compiled=compiled)
        state, order = self._state(limit, compiled=compiled), list[int]()
        own, status = state.own, evictions.PAUSED
        while status == evictions.PAUSED:
            own.n_order, own.pause = 0, own.steps + evictions.ORDER_PLACES
            status = kernel.go_on(state)
            self.steps = int(own.steps)
            order += map(int, state.order[: own.n_order])
            if status == evictions.PAUSED and self.deadline.is_over:
                raise StuckError("there is no time left")
        if status != evictions.DONE:
            raise StuckError(_WHY[status])
        return tuple(order)

    def _state(self, limit: int, *, compiled: bool) -> evictions.State:
        """Returns the pass at its beginning."""
        problem, profile, tables = self.problem, self.problem.profile, self.tables
        ops, values, end = len(problem.graph.ops), len(problem.graph.values), len(self.base)
        base_s, of_base = sum(profile.op_time_s[i] for i in self.base), tables.of_base(self.base)
        is_step_input = [producer < 0 for producer in tables.values["producer"]]
        own: Columns = {
            "held_bytes": [profile.resident_bytes],
            "budget_bytes": [problem.budget_bytes],
            "most_steps": [limit],
            "looked_at_again": [LOOKED_AT_AGAIN],
            "spare_s": [self.worse_than_s - base_s],
            "tick_s": [max(base_s / max(1, end), 1e-12)],
            "cost_exponent": [self.policy.cost],
            "distance_exponent": [self.policy.distance],
        }
        of_ops: Columns = tables.ops | {
            "time_s": profile.op_time_s,
            "workspace_bytes": profile.op_workspace_bytes,
            "last_run": of_base.last_runs,
            "earliest": [end] * ops,
            "latest": [-1] * ops,
        }
        flags: Columns = {"kept": self.kept, "alive": is_step_input, "born": is_step_input}
        of_values: Columns = {**tables.values, **of_base.reads, **flags}
        records, table = (_rows, _array) if compiled else (_objects, list)
        return evictions.State(
            own=records(evictions.OWN, own, 1)[0],
            ops=records(evictions.OP, of_ops, ops),
            values=records(evictions.VALUE, of_values, values),
            links=table(of_base.links),
            base=table(self.base),
            ends=table(problem.graph.outputs),
            order=table([0] * evictions.ORDER_PLACES),
            waits=table([0] * (ops + 1)),
            computed_from=table([0] * (ops + 1)),
            found=table([0] * ops),
            makers=table([0] * ops),
            computed=table([0] * values),
            stale=table([0] * values),
            changed=table([0] * values),
            given_up=table([0] * values),
            stack=table([0] * max(ops, values)),
            open=np.zeros(values, dtype=bool),
            positive_bytes=np.maximum(np.array(tables.values["nbytes"], dtype=np.float64), 1e-9),
            cost_s=np.zeros(values),
            need=np.zeros(values),
            ids=np.zeros(values, dtype=np.int64),
            gains=np.zeros(values),
            scores=np.zeros(values),
        )


def _rows(kinds: Mapping[str, type], columns: Columns, count: int) -> Any:
    """Returns records as the rows of an array; fields without a column are zero."""
    dtype = [(name, _DTYPES[kind]) for name, kind in kinds.items()]
    array = np.zeros(count, dtype=dtype).view(np.recarray)
    for name, column in columns.items():
        array[name] = column
    return np.asarray(array)


def _objects(kinds: Mapping[str, type], columns: Columns, count: int) -> Any:
    """Returns records as objects."""
    filled = {name: columns.get(name, [kind()] * count) for name, kind in kinds.items()}
    return list(map(_record(tuple(kinds)), *filled.values()))


@cache
def _record(names: tuple[str, ...]) -> type:
    return make_dataclass("record", names, slots=True)


def _array(numbers: Sequence[int]) -> Any:
    return np.array(numbers, dtype=np.int64)


def warm_up(problem: Problem) -> None:
    """Compiles the decisions by one short pass over a small problem with a budget."""
    base = range(len(problem.graph.ops))
    Eviction(problem, base, Policy(1.0, 0.5), NO_DEADLINE, float("inf")).run(100, compiled=True)
