"""Holds the result of a search over batch sizes, and the bound on a schedule's overhead."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from keras_remat.batch_size.cost_fit import CostFit
from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.planning.plan import Plan
from keras_remat.reporting import html as page
from keras_remat.reporting import mpl, pictures
from keras_remat.reporting.chart import Chart
from keras_remat.reporting.svg import draw
from keras_remat.reporting.text import slices_text
from keras_remat.units import format_bytes

#: A bound on the overhead, a ratio: ``"forward"`` is one extra forward pass, ``None`` no bound.
MaxOverhead = float | Literal["forward"] | None
#: An overhead may exceed the bound by this much: sums in another order round differently.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SizeTrial:
    """Holds the result of one batch size that was tried.

    Args:
        plan: the plan that would run; ``None`` when no schedule was found.
        reason: why no schedule was found, or ``""``.
    """

    batch_size: int
    plan: Plan | None
    reason: str = ""

    @property
    def samples_per_s(self) -> float:
        """Returns the predicted samples per second; 0 without a plan."""
        if self.plan is None or self.plan.predicted.time_s <= 0:
            return 0.0
        return self.batch_size / self.plan.predicted.time_s


@dataclass(frozen=True)
class BatchSearch:
    """Holds the result of a search over batch sizes.

    All numbers are predicted, unless the plan has measured ones.

    Args:
        limit_bytes: the memory limit.
        max_batch_size: the largest batch with a schedule under the limit and the overhead bound.
        plain_batch_size: the largest batch that fits without recomputation.
        probes: every size that was tried, in order.
        search_time_s: seconds the search took.
        time_limit_s: seconds the search might have taken; ``None`` where that is not known.
        verification_time_s: seconds spent running the sizes found; 0 where nothing was run.
        failed_batch_size: the smallest size that was run and did not fit; ``None`` when every size
            that ran fitted, or none was run.
        failed_peak_bytes: measured peak of that size; ``None`` where no plan was found or the
            device ran out of memory.
        fit: op times and workspaces as functions of the batch size with their residuals; ``None``
            where only one size was measured, or none, and they are taken in proportion to the
            bytes.
        ended_by_clock: whether the time was over before the counted work was: the result then
            depends on how busy the machine is.
    """

    limit_bytes: int
    max_batch_size: int
    plain_batch_size: int
    probes: tuple[SizeTrial, ...]
    search_time_s: float
    verification_time_s: float = 0.0
    failed_batch_size: int | None = None
    failed_peak_bytes: int | None = None
    fit: CostFit | None = None
    time_limit_s: float | None = None
    ended_by_clock: bool = False

    @property
    def none_trained(self) -> bool:
        """Returns whether sizes ran and none kept to the limit; then the answer is predicted."""
        return self.failed_batch_size is not None and self.failed_batch_size <= self.max_batch_size

    def times(self, multiple: int) -> BatchSearch:
        """Returns the search for ``multiple`` devices that train one of these sizes each."""
        return replace(
            self,
            max_batch_size=self.max_batch_size * multiple,
            plain_batch_size=self.plain_batch_size * multiple,
            probes=tuple(replace(p, batch_size=p.batch_size * multiple) for p in self.probes),
        )

    def naming(self, **named: Any) -> BatchSearch:
        """Returns the search with plans that name their card or their slices."""
        probes = (replace(p, plan=p.plan and replace(p.plan, **named)) for p in self.probes)
        return replace(self, probes=tuple(probes))

    @cached_property
    def plan(self) -> Plan:
        """Returns the plan of ``max_batch_size``: the last one that ran, else the fastest."""
        plans = [plan for size, plan in self._plans if size == self.max_batch_size]
        ran = [plan for plan in plans if plan.measured is not None]
        return ran[-1] if ran else min(plans, key=lambda plan: plan.predicted.time_s)

    @property
    def fastest_batch_size(self) -> int:
        """Returns the tried batch that fits with the most predicted samples per second."""
        fitting = [p for p in self.probes if p.plan and p.batch_size <= self.max_batch_size]
        return max(fitting, key=lambda probe: probe.samples_per_s).batch_size

    @property
    def orders(self) -> list[Schedule]:
        """Returns the order of every size with a plan; those that reach furthest come last."""
        return [plan.solution.schedule for _, plan in self._plans]

    @property
    def _plans(self) -> list[tuple[int, Plan]]:
        return [(p.batch_size, p.plan) for p in self.probes if p.plan is not None]

    @property
    def step_time_errors(self) -> dict[int, float]:
        """Returns the error of the predicted step time of every size that ran, a ratio.

        It is (predicted − measured) / measured seconds.
        """
        return {
            size: plan.predicted.time_s / plan.measured.time_s - 1
            for size, plan in self._plans
            if plan.measured is not None and plan.measured.time_s > 0
        }

    def __str__(self) -> str:
        peak_bytes, source = self.plan.known_peak
        run_s = self.verification_time_s
        ran = f" and run in {run_s:.1f} s" if run_s else ""
        limit, sizes = format_bytes(self.limit_bytes), {p.batch_size for p in self.probes}
        bound = f"{self.time_limit_s:.0f} s" if self.time_limit_s else ""
        most = f" of at most {bound}" if bound else ""
        if self.time_limit_s and self.search_time_s > self.time_limit_s:
            most = f", the first however long that takes, the others in at most {bound}"
        late = "; its time was over: in more, it may find more" if self.ended_by_clock else ""
        found = f"Largest batch {self.max_batch_size} under {limit}"
        if self.plan.slicing is not None:
            found += f" where {slices_text(self.plan.slicing)}"
        if self.none_trained:
            found = f"No batch that ran kept to {limit}; {self.max_batch_size} by prediction"
        return (
            f"{found} ({format_bytes(peak_bytes)} {source}, "
            f"overhead {self.plan.overhead:.1%}); without recomputation {self.plain_batch_size}; "
            f"most samples per second predicted at {self.fastest_batch_size}; "
            f"{len(sizes)} sizes tried in {self.search_time_s:.1f} s{most}{ran}; "
            f"{self._op_times()}{late}"
        )

    def plot(self) -> Any:
        """Returns a matplotlib figure: samples per second and peak of every size with a plan.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        return mpl.figure(*self._charts)

    def _repr_html_(self) -> str:
        rows = [
            (str(size), format_bytes(peak), f"{rate:.1f}", f"{overhead:.1%}")
            for size, peak, rate, overhead in self._points
        ]
        head = ("batch", "peak", "samples/s, predicted", "added time")
        shown = "".join(map(draw, self._charts))
        text = f"<p>{page.escape_all(str(self))}.</p>"
        return page.fragment(f"{text}{shown}{page.table(head, rows)}")

    @property
    def _charts(self) -> tuple[Chart, ...]:
        return pictures.batch_sizes(self._points, self.limit_bytes)

    @property
    def _points(self) -> list[tuple[int, int, float, float]]:
        """Returns size, peak bytes, samples per second and overhead of every size with a plan."""
        newest = {
            p.batch_size: (p.plan, p.samples_per_s) for p in self.probes if p.plan is not None
        }
        return [
            (size, plan.known_peak[0], rate, plan.overhead)
            for size, (plan, rate) in sorted(newest.items())
        ]

    def _op_times(self) -> str:
        """Returns a text: where op times at other sizes come from, and how far off they are."""
        if self.fit is None:
            return "op times in proportion to bytes, from one size"
        sizes = " and ".join(map(str, self.fit.sizes))
        off = "".join(
            f", {error:+.1%} off the measured step at {size}"
            for size, error in self.step_time_errors.items()
        )
        return (
            f"op times fitted to steps of {sizes} samples, residual {self.fit.residual:.1%} of "
            f"the measured seconds{off}"
        )


def overhead_bound(problem: Problem, max_overhead: MaxOverhead) -> float:
    """Returns the largest overhead that is allowed, a ratio.

    One extra forward pass over the time of a step is what the Checkmate paper allows (section 6.4).
    """
    if max_overhead is None:
        return math.inf
    if max_overhead != "forward":
        return max_overhead
    times = problem.profile.op_time_s
    forward = sum(times[op.id] for op in problem.graph.ops if op.phase == FORWARD)
    return forward / problem.store_all_time_s if problem.store_all_time_s > 0 else 0.0


def is_allowed(problem: Problem, time_s: float, max_overhead: MaxOverhead) -> bool:
    """Returns whether a step of ``time_s`` seconds keeps to the bound."""
    base_s = problem.store_all_time_s
    return base_s <= 0 or time_s / base_s - 1 <= overhead_bound(problem, max_overhead) + _ROUNDING
