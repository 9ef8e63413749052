"""Derives a train step's graph at any sizes of its batch, from a few traces.

A train step's graph is the same at every size of its batch; only the shapes change. One more trace
for each size that varies gives every dimension at any other size, exactly and without running
anything: a dimension is affine in each size, and a product where it follows several (batch x length
rows of a matrix).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from keras_remat.core.graph import Graph, Value


class GraphScaling:
    """Derives a train step's graph at any sizes of its batch.

    Args:
        graph: the graph traced at ``sizes``.
        sizes: sizes of the batch that may vary: its samples, or all dimensions of all its arrays.

    Attributes:
        is_exact: whether every further trace had the bytes that were derived for it.
    """

    def __init__(self, graph: Graph, sizes: tuple[int, ...]):
        self._graph, self._sizes = graph, sizes
        self._axes: list[_Axis] = []
        self._granule_bytes = _granule_bytes(graph.values)
        self.is_exact = True

    def learn(self, graph: Graph, sizes: tuple[int, ...]) -> None:
        """Takes in a trace at other sizes.

        It shows how the graph follows sizes that vary for the first time, or checks what is known.
        A trace is ignored if it has other ops, or if two independent sizes vary in it for the first
        time.
        """
        if not self._graph.has_ops_of(graph) or len(graph.values) != len(self._graph.values):
            return
        known = {index for axis in self._axes for index in axis.indices}
        pairs = list(zip(self._sizes, sizes, strict=True))
        indices = [i for i, (a, b) in enumerate(pairs) if a != b and i not in known]
        if len({pairs[i] for i in indices}) > 1:
            return
        before = self.at(tuple(a if i in indices else b for i, (a, b) in enumerate(pairs)))
        if before is None:
            return
        if indices:
            size, other_size = pairs[indices[0]]
            self._axes.append(_Axis(frozenset(indices), size, before, other_size, graph))
            self._granule_bytes = _granule_bytes((*self._graph.values, *graph.values))
        elif any(a.nbytes != b.nbytes for a, b in zip(before.values, graph.values, strict=True)):
            self.is_exact = False

    def at(self, sizes: tuple[int, ...]) -> Graph | None:
        """Returns the graph at other sizes; ``None`` where the effect of one is not known."""
        wanted, left = [], set(range(len(sizes)))
        for axis in self._axes:
            (size, *others) = {sizes[index] for index in axis.indices}
            if others:
                return None
            left -= axis.indices
            wanted.append((axis, size))
        if not self.is_exact or any(sizes[index] != self._sizes[index] for index in left):
            return None
        values = tuple(self._value(value, wanted) for value in self._graph.values)
        return Graph(self._graph.ops, values, self._graph.outputs)

    def _value(self, value: Value, wanted: list[tuple[_Axis, int]]) -> Value:
        traces = [
            (axis.graph.values[value.id], axis.other.values[value.id], axis.share(size))
            for axis, size in wanted
        ]
        traces = [(a, b, at) for a, b, at in traces if (a.nbytes, a.shape) != (b.nbytes, b.shape)]
        if not traces:
            return value
        shapes = [
            (a.shape, b.shape, at)
            for a, b, at in traces
            if a.shape and b.shape and len(a.shape) == len(b.shape)
        ]
        if value.shape is None or len(shapes) < len(traces):
            nbytes = _scaled(value.nbytes, [(a.nbytes, b.nbytes, at) for a, b, at in traces])
            return replace(value, nbytes=max(0, round(nbytes)))
        shape = tuple(
            max(0, math.floor(_scaled(one, [(a[d], b[d], at) for a, b, at in shapes])))
            for d, one in enumerate(value.shape)
        )
        elements, traced, one = math.prod(shape), math.prod(value.shape), _element_bytes(value)
        if one is not None and value.nbytes == self._rounded(traced * one):
            return replace(value, shape=shape, nbytes=self._rounded(elements * one))
        if not traced:
            return replace(value, shape=shape)
        return replace(
            value, shape=shape, nbytes=self._rounded(-(-value.nbytes * elements // traced))
        )

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule_bytes) * self._granule_bytes


@dataclass(frozen=True)
class _Axis:
    """Holds two traces between which one size of the batch varies.

    Args:
        indices: which of the sizes vary; the others are the same in both traces.
        size, graph: batch size and graph of the first trace.
        other_size, other: batch size and graph of the second trace.
    """

    indices: frozenset[int]
    size: int
    graph: Graph
    other_size: int
    other: Graph

    def share(self, size: int) -> Fraction:
        """Returns where a size is, from 0 for the one trace to 1 for the other."""
        return Fraction(size - self.size, self.other_size - self.size)


def _scaled(number: int, traces: list[tuple[int, int, Fraction]]) -> Fraction:
    """Returns a number that is affine in every size, at other sizes.

    Args:
        number: its value in the first trace.
        traces: for each axis, its values at both ends, and the wanted position between them, from 0
            to 1 or beyond.
    """
    result = Fraction(number)
    for a, b, share in traces:
        along = a + (b - a) * share
        result = result * along / a if a else result + along
    return result


def _element_bytes(value: Value) -> int | None:
    """Returns the bytes of one element, from the number of bits in the dtype's name.

    Returns ``None`` for a dtype without such a number.
    """
    if value.dtype == "bool":
        return 1
    bits = re.search(r"[0-9]+", value.dtype or "")
    return None if bits is None or int(bits[0]) % 8 else int(bits[0]) // 8


def _granule_bytes(values: tuple[Value, ...]) -> int:
    """Returns the bytes to which a backend rounds the sizes of values up; 1 if it does not round.

    Where it rounds, every size is a multiple of them, and a scalar's size equals them.
    """
    for value in values:
        one = _element_bytes(value)
        if (
            value.shape is not None
            and one is not None
            and value.nbytes > math.prod(value.shape) * one
        ):
            return max(1, math.gcd(*(v.nbytes for v in values)))
    return 1
