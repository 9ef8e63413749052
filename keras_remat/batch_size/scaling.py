"""One train step at any batch size, from two traces.

A train step's graph is the same at every batch size; only the shapes change. Tracing it at two
sizes gives every dimension as an affine function of the batch, exact for any size in between or
beyond, without running anything. What an op costs is fitted to profiles measured at two sizes, or
taken in proportion to its bytes where there is one (:mod:`keras_remat.batch_size.cost_fit`).

Known limits: a framework that optimizes the graph may fold an op at some sizes and not at others;
two sizes with the same ops are looked for, and a size that is really run is compared with its own
trace (:mod:`keras_remat.batch_size.find`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keras_remat.backends.base import Backend, TracedStep
from keras_remat.backends.batches import batch_size_of
from keras_remat.batch_size.cost_fit import CostFit, transfer_costs
from keras_remat.core.graph import Graph, Value
from keras_remat.core.problem import Problem
from keras_remat.core.profile import Profile
from keras_remat.errors import UnsupportedModelError


class BatchScaling:
    """One train step's problem at any batch size.

    Args:
        small, small_size: the graph traced at one batch size.
        large, large_size: the same step traced at another size.
        problem: graph and profile at ``small_size``.
        measured: profiles of the same ops measured at other sizes; with them, and a measured one in
            ``problem``, an op's costs are fitted to the sizes
            (:mod:`keras_remat.batch_size.cost_fit`), else they are in proportion to the bytes it
            reads and writes.

    Attributes:
        fit: the fitted costs with their residuals; ``None`` where one size alone is known.

    Raises:
        UnsupportedModelError: the two graphs do not have the same ops, so nothing can be said about
            other sizes.
    """

    def __init__(
        self,
        small: Graph,
        small_size: int,
        large: Graph,
        large_size: int,
        problem: Problem,
        measured: Mapping[int, Profile] | None = None,
    ):
        if not small.has_ops_of(large) or len(small.values) != len(large.values):
            raise UnsupportedModelError(
                f"The train step has {len(small.ops)} ops at batch {small_size} and {len(large.ops)} at batch {large_size}, or other ones: "
                "its memory at another batch cannot be told from these two."
            )
        self._small, self._size, self._large, self._large_size, self._problem = (
            small,
            small_size,
            large,
            large_size,
            problem,
        )
        self._granule_bytes = _granule_bytes((*small.values, *large.values))
        profiles = {small_size: problem.profile, **(measured or {})}
        measured_only = all(profile.source == "measured" for profile in profiles.values())
        self.fit = CostFit(profiles) if len(profiles) > 1 and measured_only else None

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule_bytes) * self._granule_bytes

    def _value(self, value: Value, other: Value, size: int) -> Value:
        if value.nbytes == other.nbytes and value.shape == other.shape:
            return value
        span = self._large_size - self._size
        if value.shape is None or other.shape is None or len(value.shape) != len(other.shape):
            return replace(
                value,
                nbytes=max(
                    0,
                    round(
                        value.nbytes + (other.nbytes - value.nbytes) * (size - self._size) / span
                    ),
                ),
            )
        shape = tuple(
            a + (b - a) * (size - self._size) // span
            for a, b in zip(value.shape, other.shape, strict=True)
        )
        elements, traced, one = math.prod(shape), math.prod(value.shape), _element_bytes(value)
        if one is not None and value.nbytes == self._rounded(traced * one):
            nbytes = self._rounded(elements * one)
        else:
            nbytes = (
                self._rounded(-(-value.nbytes * elements // traced)) if traced else value.nbytes
            )
        return replace(value, shape=shape, nbytes=nbytes)

    def at(self, size: int) -> Problem:
        """The problem at batch size ``size``: exact bytes, times and workspace fitted or in
        proportion."""
        values = tuple(
            self._value(a, b, size)
            for a, b in zip(self._small.values, self._large.values, strict=True)
        )
        problem = transfer_costs(self._problem, Graph(self._small.ops, values, self._small.outputs))
        if self.fit is None:
            return problem
        times, workspaces = self.fit.op_time_s(size), self.fit.op_workspace_bytes(size)
        return replace(
            problem,
            profile=replace(problem.profile, op_time_s=times, op_workspace_bytes=workspaces),
        )


def _element_bytes(value: Value) -> int | None:
    """Bytes of one element, from the number of bits in the dtype's name; ``None`` for a dtype
    without one."""
    if value.dtype == "bool":
        return 1
    bits = re.search(r"[0-9]+", value.dtype or "")
    return None if bits is None or int(bits[0]) % 8 else int(bits[0]) // 8


def _granule_bytes(values: tuple[Value, ...]) -> int:
    """What a backend rounds bytes up to; 1 when they are the elements' own. Where it rounds, every
    size is a multiple of it, and a scalar's size is it."""
    for value in values:
        one = _element_bytes(value)
        if (
            value.shape is not None
            and one is not None
            and value.nbytes > math.prod(value.shape) * one
        ):
            return max(1, math.gcd(*(v.nbytes for v in values)))
    return 1


def batch_scaling(
    backend: Backend,
    model: Any,
    traced: TracedStep,
    problem: Problem,
    batch: Any,
    measured: Mapping[int, Profile] | None = None,
) -> BatchScaling:
    """Traces the step at another size and returns the problem at any size.

    Args:
        backend: of the framework Keras runs on.
        model: compiled and built.
        traced: the step for ``batch``.
        problem: its graph and profile.
        batch: what was traced.
        measured: see :class:`BatchScaling`; left out where other ops than the traced ones have to
            stand for the step.

    Raises:
        UnsupportedModelError: no two of the sizes tried have the same ops.
    """
    size = batch_size_of(batch)
    double = graph_at(backend, model, batch, 2 * size)
    if traced.graph.has_ops_of(double):
        return BatchScaling(traced.graph, size, double, 2 * size, problem, measured)
    # larger batches are what a search asks for, and they look like the larger trace
    quadruple = graph_at(backend, model, batch, 4 * size)
    if double.has_ops_of(quadruple):
        return BatchScaling(double, 2 * size, quadruple, 4 * size, transfer_costs(problem, double))
    return BatchScaling(
        traced.graph, size, double, 2 * size, problem
    )  # raises, and says what differs


def graph_at(backend: Backend, model: Any, batch: Any, size: int) -> Graph:
    """Returns the graph of the train step at another batch size.

    Raises:
        UnsupportedModelError: the model cannot take a batch of that size.
    """
    try:
        return backend.trace(model, backend.resized_spec(batch, size)).graph
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever the layers of a user's model raise
        raise UnsupportedModelError(
            f"The model takes no batch of {size} samples: {type(error).__name__}: {error}"
        ) from error
