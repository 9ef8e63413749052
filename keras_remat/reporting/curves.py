"""Computes a schedule's numbers for tables and pictures: bytes over time, phases, holders.

Everything is derived from the order by the one memory semantics (:mod:`keras_remat.core.simulate`).
The x axis is the sum of op times and not the position: over positions, a thousand tiny ops of an
optimizer would get more room than the forward phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import last_reads, live_bytes
from keras_remat.reporting.layers import By, group_names

RESIDENT, WORKSPACE, REST = "resident", "workspace", "other layers"


@dataclass(frozen=True)
class Curve:
    """Holds the bytes alive over the time of one step."""

    problem: Problem
    schedule: Schedule

    @cached_property
    def starts_s(self) -> list[float]:
        """Returns seconds at which each position begins, and at which the last one ends."""
        times = self.problem.profile.op_time_s
        starts = list(accumulate((times[op] for op in self.schedule.order), initial=0.0))
        if starts[-1] > 0:
            return starts
        return [float(k) for k in range(len(starts))]  # a profile without times: positions

    @cached_property
    def live(self) -> list[int]:
        """Returns bytes alive at each position."""
        live: list[int] = live_bytes(self.problem, self.schedule).tolist()
        return live

    def thinned(self, most: int) -> tuple[list[float], list[int]]:
        """Returns edges in seconds and bytes between, for a picture ``most`` steps wide.

        Positions shorter than one such step are joined, at their highest: peaks stay true, but
        short valleys between them do not show.
        """
        least_s = self.starts_s[-1] / most
        edges, heights = [0.0], [0]
        for position, nbytes in enumerate(self.live):
            heights[-1] = max(heights[-1], nbytes)
            end_s = self.starts_s[position + 1]
            if end_s - edges[-1] >= least_s or position == len(self.live) - 1:
                edges.append(end_s)
                heights.append(0)
        return edges, heights[:-1]

    @property
    def peak_position(self) -> int:
        """Returns the first position at which most bytes are alive; 0 in an empty order."""
        return self.live.index(max(self.live)) if self.live else 0

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes alive."""
        return max(self.live, default=self.problem.profile.resident_bytes)

    @cached_property
    def _first_runs(self) -> list[int]:
        """Returns the positions at which an op runs for the first time."""
        seen: set[int] = set()
        firsts = []
        for k, op in enumerate(self.schedule.order):
            if op not in seen:
                seen.add(op)
                firsts.append(k)
        return firsts

    @cached_property
    def bands(self) -> list[tuple[str, int, int]]:
        """Returns the bands that the step falls into, each as phase, first position and end.

        An order mixes phases: updates follow their gradients, scalars of the optimizer come first.
        A border lies where the ops on its wrong side take the least time.
        """
        n = len(self.schedule.order)
        phases = {self.problem.graph.ops[op].phase for op in self.schedule.order}
        if BACKWARD not in phases:
            return [(FORWARD, 0, n)] if n else []
        middle = self._border({FORWARD}, {BACKWARD, UPDATE})
        late = max(middle, self._border({FORWARD, BACKWARD}, {UPDATE}) if UPDATE in phases else n)
        borders = (0, middle, late, n)
        names = (FORWARD, BACKWARD, UPDATE)
        return [
            (name, a, b) for name, (a, b) in zip(names, pairwise(borders), strict=True) if b > a
        ]

    def _border(self, before: set[str], after: set[str]) -> int:
        """Returns the border between two sets of phases with the least time on its wrong side."""
        wrong = best = 0.0
        border = 0
        for k in self._first_runs:
            op = self.schedule.order[k]
            phase = self.problem.graph.ops[op].phase
            seconds = self.problem.profile.op_time_s[op] or 1e-9
            wrong += seconds if phase in after else -seconds if phase in before else 0.0
            if wrong < best:
                best, border = wrong, k + 1
        return border

    @property
    def backward_begins(self) -> int:
        """Returns the position at which the backward phase begins; that of the peak without one."""
        return next((a for phase, a, _ in self.bands if phase == BACKWARD), self.peak_position)

    def held(self, position: int, names: list[str]) -> Counter[str]:
        """Returns group → bytes of its values at a position; ``names`` has every op's group."""
        held: Counter[str] = Counter()
        alive = {
            value_id: None
            for born, instances in enumerate(self._last_reads[: position + 1])
            for value_id, end in instances.items()
            if born <= position <= end
        }
        for value_id in alive:
            value = self.problem.graph.values[value_id]
            if value.producer is not None:
                held[names[value.producer]] += value.nbytes
        return held

    @cached_property
    def _layers(self) -> list[str]:
        """Returns the layer of every op."""
        return group_names(self.problem, "layer")

    @cached_property
    def _last_reads(self) -> list[dict[int, int]]:
        return last_reads(self.problem.graph, self.schedule.order)

    def holders(self, position: int) -> dict[str, int]:
        """Returns layer → bytes that it holds at a position, most first.

        With :data:`RESIDENT` and :data:`WORKSPACE`, they add up to the bytes alive.
        """
        if not self.live:
            return {RESIDENT: self.problem.profile.resident_bytes}
        names, running = self._layers, self.schedule.order[position]
        owner = names[running]
        held = self.held(position, names)
        workspace = self.problem.profile.op_workspace_bytes[running]
        resident = self.problem.profile.resident_bytes
        reused = sum(held.values()) + workspace + resident - self.live[position]
        held[owner] -= reused  # outputs that took over the buffer of an input
        rows = {name: nbytes for name, nbytes in held.most_common() if nbytes > 0}
        return rows | ({WORKSPACE: workspace} if workspace else {}) | {RESIDENT: resident}


def compared(problem: Problem, schedule: Schedule) -> dict[str, Curve]:
    """Returns the curves of the plain step and of a schedule, named as pictures name them."""
    plain = Schedule.store_all(problem.graph)
    return {"plain": Curve(problem, plain), "plan": Curve(problem, schedule)}


@dataclass(frozen=True)
class Group:
    """Says what a plan does to a layer, a block or an op.

    Args:
        name: name of the group.
        ops: number of its ops.
        kept_bytes: bytes that it holds when the backward phase begins.
        plain_bytes: bytes that it would hold then without recomputation.
        recomputed: number of its ops that run more than once.
        runs: number of runs beyond the first run of each op.
        added_s: seconds that those runs take.
    """

    name: str
    ops: int
    kept_bytes: int
    plain_bytes: int
    recomputed: int
    runs: int
    added_s: float

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that the plan does not hold."""
        return self.plain_bytes - self.kept_bytes


def groups(problem: Problem, schedule: Schedule, by: By = "layer") -> list[Group]:
    """Returns what a schedule does to each group, in the order of the graph."""
    names = group_names(problem, by)
    curves = compared(problem, schedule).values()
    before, kept = (curve.held(curve.backward_begins, names) for curve in curves)
    ops = Counter(names)
    recomputed: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    added: dict[str, float] = dict.fromkeys(ops, 0.0)
    for op_id, count in Counter(schedule.order).items():
        name, extra = names[op_id], count - 1
        recomputed[name] += extra > 0
        runs[name] += extra
        added[name] += extra * problem.profile.op_time_s[op_id]
    return [
        Group(name, count, kept[name], before[name], recomputed[name], runs[name], added[name])
        for name, count in ops.items()
    ]


@dataclass(frozen=True)
class Interval:
    """Says from when to when a value stays in memory.

    Args:
        value_id: id of the value.
        begin, end: positions of the order at which the value is computed, and read last.
        again: whether the value was in memory before and is computed anew.
    """

    value_id: int
    begin: int
    end: int
    again: bool


def intervals(curve: Curve, most: int | None = None) -> list[Interval]:
    """Returns the stays of values in memory, in the order of the graph.

    Args:
        most: number of values, the largest ones, whose stays are returned; values that are read at
            once, and so do not stay, are then left out. ``None`` for all values.
    """
    values = curve.problem.graph.values
    stays: dict[int, list[Interval]] = {}
    for begin, instances in enumerate(last_reads(curve.problem.graph, curve.schedule.order)):
        for value_id, end in instances.items():
            before = stays.setdefault(value_id, [])
            before.append(Interval(value_id, begin, end, bool(before)))
    chosen = list(stays)
    if most is not None:
        chosen = [v for v in chosen if any(stay.end > stay.begin + 1 for stay in stays[v])]
        chosen = sorted(chosen, key=lambda v: (-values[v].nbytes, v))[:most]
    return [stay for value_id in sorted(chosen) for stay in stays[value_id]]


def top_holders(curves: list[Curve], most: int) -> list[dict[str, int]]:
    """Returns who holds the peak of each curve, with the same groups in each.

    Args:
        most: number of layers that are named; the others are summed up as :data:`REST`.
    """
    held = [curve.holders(curve.peak_position) for curve in curves]
    sums: Counter[str] = Counter()
    for holders in held:
        sums.update({n: b for n, b in holders.items() if n not in (RESIDENT, WORKSPACE)})
    named = [name for name, _ in sums.most_common(most)]
    rows = []
    for holders in held:
        row = {name: holders.pop(name, 0) for name in named}
        ends = {name: holders.pop(name, 0) for name in (WORKSPACE, RESIDENT)}
        rows.append(row | {REST: sum(holders.values())} | ends)
    return rows
