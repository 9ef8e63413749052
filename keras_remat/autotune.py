"""The largest batch that fits, by searching over schedules.

A train step's graph is the same at every batch size; only the shapes change. Tracing it at two sizes gives every dimension as an affine
function of the batch, exact for any size in between or beyond, without running anything. A schedule found at one size is an order of the
same ops at another, so it is tried there before anything is solved again. The search doubles, then bisects; a schedule that was found is
never given up because a solver failed at a smaller size.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from keras_remat.backends.base import Backend, TracedStep
from keras_remat.backends.examples import batch_size_of
from keras_remat.errors import InfeasibleBudgetError, RematError, ScheduleNotFoundError, UnsupportedModelError
from keras_remat.graph import FORWARD, Graph, Value
from keras_remat.plan import Plan
from keras_remat.planning import plan_problem, reused_plan
from keras_remat.problem import Problem
from keras_remat.schedule import Schedule
from keras_remat.units import format_bytes

#: The search stops when the bracket is this share of the batch.
_RESOLUTION = 0.01
_MAX_DOUBLINGS = 20
#: The thorough solver's first step above the quick one's largest size, a share of it, and how many times it is asked about.
_FIRST_CLIMB = 0.08
_LATE_SOLVES = 5


class BatchScaling:
    """One train step's problem at any batch size.

    Args:
        small, small_size: the graph traced at the smaller batch size.
        large, large_size: the same step traced at another, larger size.
        problem: graph and profile at ``small_size``.

    Raises:
        UnsupportedModelError: the two graphs do not have the same ops, so nothing can be said about other sizes.
    """

    def __init__(self, small: Graph, small_size: int, large: Graph, large_size: int, problem: Problem):
        if not small.has_ops_of(large) or len(small.values) != len(large.values):
            raise UnsupportedModelError(
                f"The train step has {len(small.ops)} ops at batch {small_size} and {len(large.ops)} at batch {large_size}, or other ones: "
                "its memory at another batch cannot be told from these two."
            )
        self._small, self._size, self._large, self._large_size, self._problem = small, small_size, large, large_size, problem
        self._granule_bytes = _granule_bytes((*small.values, *large.values))

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule_bytes) * self._granule_bytes

    def _value(self, value: Value, other: Value, size: int) -> Value:
        if value.nbytes == other.nbytes and value.shape == other.shape:
            return value
        span = self._large_size - self._size
        if value.shape is None or other.shape is None or len(value.shape) != len(other.shape):
            return replace(
                value, nbytes=max(0, round(value.nbytes + (other.nbytes - value.nbytes) * (size - self._size) / span))
            )
        shape = tuple(a + (b - a) * (size - self._size) // span for a, b in zip(value.shape, other.shape, strict=True))
        elements, traced, one = _volume(shape), _volume(value.shape), _element_bytes(value)
        if one is not None and value.nbytes == self._rounded(traced * one):
            nbytes = self._rounded(elements * one)
        else:
            nbytes = self._rounded(-(-value.nbytes * elements // traced)) if traced else value.nbytes
        return replace(value, shape=shape, nbytes=nbytes)

    def at(self, size: int) -> Problem:
        """The problem at batch size ``size``: exact bytes, times in proportion to the bytes an op reads and writes."""
        values = tuple(self._value(a, b, size) for a, b in zip(self._small.values, self._large.values, strict=True))
        graph = Graph(self._small.ops, values, self._small.outputs)
        profile = self._problem.profile
        times, workspaces = [], []
        for op in graph.ops:
            before = sum(self._small.values[v].nbytes for v in (*op.inputs, *op.outputs))
            now = sum(values[v].nbytes for v in (*op.inputs, *op.outputs))
            ratio = now / before if before else 1.0
            times.append(profile.op_time_s[op.id] * ratio)
            workspaces.append(round(profile.op_workspace_bytes[op.id] * ratio))
        inputs = sum(v.nbytes - self._small.values[v.id].nbytes for v in values if v.producer is None)
        resident = max(0, profile.resident_bytes + inputs)
        return Problem(
            graph, replace(profile, op_time_s=tuple(times), op_workspace_bytes=tuple(workspaces), resident_bytes=resident),
            name=self._problem.name,
        )  # fmt: skip


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for dim in shape:
        volume *= dim
    return volume


def _element_bytes(value: Value) -> int | None:
    """Bytes of one element, from the number of bits in the dtype's name; ``None`` for a dtype without one."""
    if value.dtype == "bool":
        return 1
    bits = re.search(r"[0-9]+", value.dtype or "")
    return None if bits is None or int(bits[0]) % 8 else int(bits[0]) // 8


def _granule_bytes(values: tuple[Value, ...]) -> int:
    """What a backend rounds bytes up to; 1 when they are the elements' own. Where it rounds, every size is a multiple of it, and a
    scalar's size is it."""
    for value in values:
        one = _element_bytes(value)
        if value.shape is not None and one is not None and value.nbytes > _volume(value.shape) * one:
            return max(1, math.gcd(*(v.nbytes for v in values)))
    return 1


@dataclass(frozen=True)
class Probe:
    """One batch size that was tried.

    Args:
        batch_size: samples.
        plan: what would run; ``None`` when no schedule was found.
        samples_per_s: predicted; 0 without a plan.
        reason: why not, or ``""``.
    """

    batch_size: int
    plan: Plan | None
    samples_per_s: float
    reason: str = ""


@dataclass(frozen=True)
class BatchSearch:
    """What a search over batch sizes found; all numbers are predicted, unless the plan has measured ones.

    Args:
        limit_bytes: the memory limit.
        max_batch_size: the largest batch with a schedule under the limit and the overhead bound.
        fastest_batch_size: the tried batch with the most predicted samples per second.
        plain_batch_size: the largest batch that fits without recomputation.
        probes: every size that was tried, in order.
        search_time_s: seconds the search took.
        failed_batch_size, failed_peak_bytes: the smallest size that was run and did not fit, and its measured peak (``None`` where no plan
            was found or the device ran out of memory); ``None`` when every size that ran fitted, or none was run.
    """

    limit_bytes: int
    max_batch_size: int
    fastest_batch_size: int
    plain_batch_size: int
    probes: tuple[Probe, ...]
    search_time_s: float
    failed_batch_size: int | None = None
    failed_peak_bytes: int | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of ``max_batch_size``; the one that ran, where one did."""
        return next(p.plan for p in reversed(self.probes) if p.plan is not None and p.batch_size == self.max_batch_size)

    def __str__(self) -> str:
        return (
            f"Largest batch {self.max_batch_size} under {format_bytes(self.limit_bytes)} ({format_bytes(self.plan.predicted.peak_bytes)} "
            f"predicted, overhead {self.plan.overhead:.1%}); without recomputation {self.plain_batch_size}; "
            f"most samples per second predicted at {self.fastest_batch_size}; {len(self.probes)} sizes tried in {self.search_time_s:.1f} s"
        )


def forward_overhead(problem: Problem) -> float:
    """One extra forward pass over the time of a step, a ratio: the overhead the Checkmate paper allows (section 6.4)."""
    times = problem.profile.op_time_s
    forward = sum(times[op.id] for op in problem.graph.ops if op.phase == FORWARD)
    return forward / problem.store_all_time_s if problem.store_all_time_s > 0 else 0.0


def search_batch_size(
    scaling: BatchScaling,
    start: int,
    limit_bytes: int,
    budget_bytes: int,
    backend: Backend,
    *,
    max_overhead: float | Literal["forward"] | None = "forward",
    at_most: int | None = None,
    solver: str = "greedy",
    time_limit_s: float = 60.0,
    late_solver: str | None = None,
    late_time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[Probe], None] | None = None,
) -> BatchSearch:
    """Searches the largest batch for which some schedule fits.

    Args:
        scaling: the problem at any size.
        start: where the search begins.
        limit_bytes, budget_bytes: the limit, and what of it may be used.
        backend: whose allocator decides.
        max_overhead: bound on (time − store-all time) / store-all time; ``"forward"`` is one extra forward pass; ``None`` is no bound.
        at_most: no size above this is tried.
        solver: a quick one, asked at many sizes.
        time_limit_s: after this no new size is tried.
        late_solver: a thorough one, asked at sizes above the largest that ``solver`` reached; ``None`` for none.
        late_time_limit_s: seconds for that, beside the others.
        seed: for the solvers.
        progress: called with every probe.

    Raises:
        InfeasibleBudgetError, ScheduleNotFoundError: not even one sample fits.
    """
    started = time.perf_counter()
    probes: dict[int, Probe] = {}
    orders: list[Schedule] = []
    failure: RematError | None = None

    def bound(problem: Problem) -> float | None:
        return forward_overhead(problem) if max_overhead == "forward" else max_overhead

    def known(problem: Problem) -> Plan | None:
        """The fastest known order that fits here; an order found at one size is legal at all."""
        candidates = (reused_plan(problem, s, budget_bytes, backend) for s in [Schedule.store_all(problem.graph), *orders])
        return min((plan for plan in candidates if plan is not None), key=lambda plan: plan.predicted.time_s, default=None)

    def probe(size: int, solver: str = solver, solve_s: float | None = None) -> bool:
        nonlocal failure
        if solve_s is None and size in probes:
            return probes[size].plan is not None
        problem = scaling.at(size)
        reason, plan = "", known(problem)
        limit = bound(problem)
        if plan is None or (limit is not None and plan.overhead > limit):
            try:
                left = max(2.0, time_limit_s - (time.perf_counter() - started))
                solve_s = solve_s or min(left, time_limit_s / 6)
                plan = plan_problem(problem, budget_bytes, backend, solver=solver, time_limit_s=solve_s, seed=seed)
                orders.append(plan.solution.schedule)
            except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
                reason, failure, plan = str(error), error, None
        if plan is not None and limit is not None and plan.overhead > limit:
            reason, plan = f"overhead {plan.overhead:.1%} is over the bound of {limit:.1%}", None
        rate = size / plan.predicted.time_s if plan is not None and plan.predicted.time_s > 0 else 0.0
        probes[size] = Probe(size, plan, rate, reason)
        if progress is not None:
            progress(probes[size])
        return plan is not None

    good, bad = _bracket(probe, start, at_most)
    if good == 0:
        assert failure is not None or probes
        raise failure or ScheduleNotFoundError(budget_bytes, scaling.at(1).floor_bytes, solver="batch search")
    while bad is not None and bad - good > max(1, int(good * _RESOLUTION)) and time.perf_counter() - started < time_limit_s:
        middle = (good + bad) // 2
        if probe(middle):
            good = middle
        else:
            bad = middle
    if late_solver is not None:
        late_s, deadline_s = late_time_limit_s / _LATE_SOLVES, time.perf_counter() + late_time_limit_s
        good = _climb(lambda size: probe(size, late_solver, late_s), good, at_most, deadline_s)
    found = [p for p in probes.values() if p.plan is not None]
    plain = _largest_plain(scaling, budget_bytes, backend, good)
    return BatchSearch(
        limit_bytes, good, max(found, key=lambda p: p.samples_per_s).batch_size, plain, tuple(probes.values()),
        time.perf_counter() - started,
    )  # fmt: skip


def _bracket(probe: Callable[[int], bool], start: int, at_most: int | None) -> tuple[int, int | None]:
    """The largest size known to fit (0 for none) and the smallest known not to (``None`` when ``at_most`` fits)."""
    size = start if at_most is None else min(start, at_most)
    if probe(size):
        good = size
        for _ in range(_MAX_DOUBLINGS):
            if good == at_most:
                return good, None
            size = good * 2 if at_most is None else min(good * 2, at_most)
            if not probe(size):
                return good, size
            good = size
        return good, None
    bad = size
    while bad > 1:
        size = bad // 2
        if probe(size):
            return size, bad
        bad = size
    return 0, bad


def _climb(probe: Callable[[int], bool], good: int, at_most: int | None, deadline_s: float) -> int:
    """The largest size found to fit by steps upwards from one that does, longer after a success and half as long after a failure."""
    step = max(1, int(good * _FIRST_CLIMB))
    while time.perf_counter() < deadline_s:
        size = good + step if at_most is None else min(good + step, at_most)
        if size == good:
            break
        if probe(size):
            good, step = size, 2 * step
        elif step <= max(1, int(good * _RESOLUTION)):
            break
        else:
            step //= 2
    return good


def _largest_plain(scaling: BatchScaling, budget_bytes: int, backend: Backend, at_most: int) -> int:
    """The largest batch up to ``at_most`` that fits without recomputation (0 for none); its peak grows with the batch, so bisection is exact."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        problem = scaling.at(middle)
        if backend.predicted_peak_bytes(problem, Schedule.store_all(problem.graph)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def batch_scaling(backend: Backend, model: Any, traced: TracedStep, problem: Problem, batch: Any) -> BatchScaling:
    """Traces the step at twice the batch and returns the problem at any size."""
    size = batch_size_of(batch)
    larger = backend.trace(model, backend.resized_spec(batch, 2 * size))
    return BatchScaling(traced.graph, size, larger.graph, 2 * size, problem)
