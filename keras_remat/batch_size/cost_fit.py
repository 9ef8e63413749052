"""Computes an op's costs at another batch size, from measured profiles or from its bytes.

Where two sizes were measured, an op's seconds are taken to be affine in the batch size b,

    t(b) = a + c b    with a ≥ 0 (what a call costs however small, or work on the weights) and c ≥ 0
    (what a sample costs),

by least squares of the *relative* errors, so that a large batch does not drown a small one:
minimize Σ ((a + c b − t_b) / t̄_b)² over the measured sizes b, where t̄_b is what all ops together
took at b. With two unknowns, non-negative least squares (Lawson & Hanson 1974, chapter 23) needs no
iteration: where the free minimum has a negative coefficient, the minimum lies where that one is 0.

An op's workspace has no noise, but kernels change with the batch: PyTorch's 1x1 convolutions on one
thread hand over to oneDNN at 16 samples, and take ten times as much from there on. So a measured
size has its measured workspace, a size between two measured ones lies on the line between them, and
any other size on the line through the nearest two. Its coefficients are not negative either: where
the line is below 0 at no samples, the workspace is in proportion to the nearest size's; where it
falls, the workspace is the nearest size's.

Where only one size is known, costs are in proportion to the bytes that an op reads and writes. In
the same way they are carried over to a trace with a few other ops.

Known limits: the seconds of kernels that change their algorithm with the batch are no straight
line; the residuals show how far off the fit is. Beyond the measured sizes, a further change of
kernels cannot be foreseen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from keras_remat.core.graph import Graph, Op
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile

_Floats = np.ndarray


@dataclass(frozen=True)
class CostFit:
    """Fits affine costs of one train step's ops at any batch size.

    Args:
        profiles: batch size → the profile measured at it; the same ops in all, two sizes at least.

    Raises:
        ValueError: fewer than two sizes, a size below 1, or profiles of different length.
    """

    profiles: Mapping[int, Profile]

    def __post_init__(self) -> None:
        lengths = {len(profile.op_time_s) for profile in self.profiles.values()}
        if len(self.profiles) < 2 or min(self.profiles) < 1 or len(lengths) != 1:
            raise ValueError(
                "a fit needs profiles of the same ops at two sizes of at least 1, got sizes "
                f"{sorted(self.profiles)} with {sorted(lengths)} ops"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the measured batch sizes, ascending."""
        return tuple(sorted(self.profiles))

    @cached_property
    def _measured_s(self) -> _Floats:
        """Returns the measured seconds, sizes × ops."""
        return np.array([self.profiles[size].op_time_s for size in self.sizes])

    @cached_property
    def _times(self) -> tuple[_Floats, _Floats]:
        return _affine(self.sizes, self._measured_s)

    @cached_property
    def _workspaces(self) -> _Floats:
        """Returns the measured workspaces, sizes × ops."""
        measured = np.array(
            [self.profiles[size].op_workspace_bytes for size in self.sizes], dtype=float
        )
        # a workspace seen at the largest size alone was too small to be seen at the others
        in_proportion = np.outer(np.array(self.sizes) / self.sizes[-1], measured[-1])
        return np.where(measured == 0, in_proportion, measured)

    def op_time_s(self, size: int) -> tuple[float, ...]:
        """Returns seconds per op at a batch size."""
        fixed, per_sample = self._times
        return tuple(map(float, fixed + per_sample * size))

    def op_workspace_bytes(self, size: int) -> tuple[int, ...]:
        """Returns the workspace of each op at a batch size."""
        sizes, measured = self.sizes, self._workspaces
        at = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)  # of the upper of the two
        (low, high), (less, more) = sizes[at - 1 : at + 1], measured[at - 1 : at + 1]
        slope = (more - less) / (high - low)
        nbytes = less + slope * (size - low)
        if not low <= size <= high:
            nearest, there = (low, less) if size < low else (high, more)
            in_proportion = there * size / nearest
            nbytes = np.where(less * high < more * low, in_proportion, nbytes)
            nbytes = np.where(slope < 0, there, nbytes)
        return tuple(int(one) for one in np.ceil(nbytes - 1e-6))

    @cached_property
    def residual(self) -> float:
        """Returns the share of the measured seconds that the fit misses, a ratio.

        It is Σ |fitted − measured| over all ops and sizes / Σ measured.
        """
        total = self._measured_s.sum()
        fitted_s = np.array([self.op_time_s(size) for size in self.sizes])
        return float(np.abs(fitted_s - self._measured_s).sum() / total) if total > 0 else 0.0


def _affine(sizes: tuple[int, ...], measured: _Floats) -> tuple[_Floats, _Floats]:
    """Returns the non-negative a and c of every column of ``measured`` (sizes × ops)."""
    totals = measured.sum(axis=1)
    weight = np.divide(1.0, totals**2, out=np.ones_like(totals), where=totals > 0)[:, None]
    weight = weight / weight.sum()
    b = np.array(sizes, dtype=float)[:, None]
    mean_b, mean_t = (weight * b).sum(axis=0), (weight * measured).sum(axis=0)
    slope = (weight * (b - mean_b) * (measured - mean_t)).sum(axis=0) / (
        weight * (b - mean_b) ** 2
    ).sum(axis=0)
    fixed = mean_t - slope * mean_b
    through_zero = (weight * b * measured).sum(axis=0) / (weight * b**2).sum(axis=0)
    slope, fixed = (
        np.where(slope < 0, 0.0, np.where(fixed < 0, through_zero, slope)),
        np.where(slope < 0, mean_t, np.where(fixed < 0, 0.0, fixed)),
    )
    return fixed, slope


def transfer_costs(problem: Problem, graph: Graph, expected: Sequence[int] = ()) -> Problem:
    """Carries the costs of one trace over to another trace of the same step, at any batch size.

    Costs are in proportion to the bytes that an op reads and writes.

    Args:
        problem: the graph and profile to begin with.
        graph: the trace whose ops get costs. Where it has the same ops, each costs the same per
            byte. Else ops of the same name and kind do, in their order: PyTorch's gradients share a
            name. Any other op costs per byte what its kind, or all ops together, cost.
        expected: bytes of workspace of each op of ``graph``, used where nothing else is known; 0 by
            default.
    """
    profile, old = problem.profile, problem.graph
    by_name = dict(zip(_names(old), old.ops, strict=True))
    same = old.has_ops_of(graph)
    times, workspaces = [], []
    for op, name in zip(graph.ops, _names(graph), strict=True):
        moved = _moved_bytes(graph, op)
        before = old.ops[op.id] if same else by_name.get(name)
        if before is None:
            alike = [other for other in old.ops if other.kind == op.kind] or old.ops
            total = sum(_moved_bytes(old, other) for other in alike)
            time_s = sum(profile.op_time_s[other.id] for other in alike)
            times.append(moved * time_s / total if total else 0.0)
            workspaces.append(expected[op.id] if expected else 0)
        else:
            ratio = moved / held if (held := _moved_bytes(old, before)) else 1.0
            times.append(profile.op_time_s[before.id] * ratio)
            workspaces.append(round(profile.op_workspace_bytes[before.id] * ratio))
    resident = max(0, profile.resident_bytes + graph.input_bytes - old.input_bytes)
    profile = replace(
        profile,
        op_time_s=tuple(times),
        op_workspace_bytes=tuple(workspaces),
        resident_bytes=resident,
    )
    return Problem(graph, profile, name=problem.name)


def _names(graph: Graph) -> list[tuple[str, str, int]]:
    """Returns name and kind of every op, and the number of earlier ops with the same two."""
    seen, names = Counter[tuple[str, str]](), list[tuple[str, str, int]]()
    for op in graph.ops:
        names.append((op.name, op.kind, seen[op.name, op.kind]))
        seen[op.name, op.kind] += 1
    return names


def _moved_bytes(graph: Graph, op: Op) -> int:
    return sum(graph.values[v].nbytes for v in (*op.inputs, *op.outputs))
