"""Finds how the ops of a recorded PyTorch step run on a slice of the batch.

It finds the axes along which values are sliced. Each call hands the axis of its inputs to its
results, from the batch's first axis on, by the table of operators
(:mod:`~keras_remat.backends.torch.slice_rules`). A reader often looks at a value through views, and
the axis goes through them: a part of a view is a view of a part. A value that nothing of the batch
leads to (zeros, random numbers) takes the axis of its reader, or its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from torch.utils._pytree import tree_leaves

from keras_remat.backends.slice_modes import MEAN, SAME, SUM, Mode
from keras_remat.backends.torch.program import PURE, WRITE, Node, Program
from keras_remat.backends.torch.recorder import Call, Generator, Ref, Scalar
from keras_remat.backends.torch.slice_rules import Operands, Way, ways_of
from keras_remat.core.graph import UPDATE, Graph
from keras_remat.core.slices import SliceRule


@dataclass(frozen=True)
class View:
    """Describes a view of a part, like one of the whole.

    Args:
        number: number of the whole view.
        call: the call that makes it.
        at: index of the view among the call's results.
        way: how the call runs on a part.
    """

    number: int
    call: Call
    at: int
    way: Way


@dataclass(frozen=True)
class Seen:
    """Holds how a tensor shows a part of a value.

    Args:
        views: the views between the value and the tensor, from the value on.
        axis: axis of the value along which the tensor shows a part; ``None`` if it shows all of it.
        sizes: sizes of all axes that are divided into parts.
    """

    views: tuple[View, ...]
    axis: int | None
    sizes: tuple[int, ...]


class Analysis:
    """Finds the axes of a program's values, and how its ops run on a part.

    Args:
        program: the calls.
        graph: the graph of the calls.
        batch: numbers of the inputs that have the batch's samples along their first axis.
        state: numbers of the inputs that are the model's. They are read whole, and so are other
            inputs that the step overwrites.
    """

    def __init__(self, program: Program, graph: Graph, batch: set[int], state: set[int]):
        self._program, self._graph, self._state = program, graph, state
        self._ways: dict[int, tuple[Way, ...]] = {}
        self._operands: dict[int, Operands] = {}
        self._axes: dict[int, int] = {}  # number that spans a value → axis
        for value, source in program.sources.items():
            if source in batch and program.layouts[source].shape:
                self._axes[program.base(value)] = 0
        for node in program.nodes:
            self._hand_on(node)

    # ---------------------------------------------------------------- values and views

    def axis(self, value: int) -> int | None:
        """Returns the axis along which a value is sliced; ``None`` if it has one element at
        most."""
        number = self._program.base(value)
        is_one = prod(self._program.layouts[number].shape) <= 1
        return None if is_one else self._axes.get(number, 0)

    def operands(self, call: Call) -> Operands:
        """Returns the facts that rules look at."""
        if id(call) not in self._operands:
            self._operands[id(call)] = Operands(call, self._program.layouts)
        return self._operands[id(call)]

    def _ways_of(self, call: Call) -> tuple[Way, ...]:
        if id(call) not in self._ways:
            self._ways[id(call)] = ways_of(self.operands(call))
        return self._ways[id(call)]

    def _views(self, number: int, value: int) -> list[tuple[int, Call, int]]:
        """Returns the views between a tensor and the value that it looks at, its own first."""
        program, views = self._program, []
        number = program.canonical(number)
        while number in program.recipes and not program.is_whole(number, value):
            call, at, parent = program.recipes[number]
            views.append((number, call, at))
            number = program.canonical(parent)
        return views

    def seen(self, number: int, value: int, mode: Mode) -> Seen | None:
        """Returns how a tensor shows a part of a value, or all of it; ``None`` if it cannot.

        Args:
            number: the tensor's number.
            value: the value it looks at.
            mode: how a part of an op reads the tensor.
        """
        between, layouts = self._views(number, value), self._program.layouts
        if not isinstance(mode, int):
            return None if mode == SAME and between else Seen((), None, ())
        views: list[View] = []
        sizes, axis, at = [layouts[number].shape[mode]], mode, self._program.canonical(number)
        for view, call, place in between:
            way = next((way for way in self._ways_of(call) if way.outputs[place] == axis), None)
            if way is None:
                return None
            views.insert(0, View(view, call, place, way))
            at = self._program.canonical(self._program.recipes[view][2])
            below = way.inputs.get("self")
            if not isinstance(below, int):
                return Seen(tuple(views), None, tuple(sizes))
            axis = below
            sizes.append(layouts[at].shape[axis])
        if layouts[at].shape != layouts[self._program.base(value)].shape:
            return None
        return Seen(tuple(views), axis, tuple(sizes))

    def _axis_seen(self, number: int, value: int) -> int | None:
        """Returns the axis along which a tensor shows parts of a value whose axis is known."""
        known = self._axes.get(self._program.base(value))
        if known is None:
            return None
        for axis, size in enumerate(self._program.layouts[number].shape):
            found = self.seen(number, value, axis) if size > 1 else None
            if found is not None and found.axis == known:
                return axis
        return None

    # ---------------------------------------------------------------- axes

    def _hand_on(self, node: Node) -> None:
        """Gives an op's results the axis of its inputs, and its inputs without an axis that of its
        results."""
        if node.call is None or node.kind not in (PURE, WRITE) or len(node.new) > 1:
            return
        read = {n: self._axis_seen(n, v) for n, v in node.reads.items()}
        if all(axis is None for axis in read.values()):
            return
        for way in self._ways_of(node.call):
            told = [
                (read[number], mode)
                for number, mode in self.read_modes(node.call, way)
                if read.get(number) is not None
            ]
            if any(k == m for k, m in told) and all(m in (k, None) for k, m in told):
                self._give(node, way)
                return

    def _give(self, node: Node, way: Way) -> None:
        assert node.call is not None
        read = ((n, node.reads.get(n), mode) for n, mode in self.read_modes(node.call, way))
        for number, value, mode in (*read, *self.made_modes(node, way)):
            if value is None or not isinstance(mode, int) or value in self._program.sources:
                continue
            found = self.seen(number, value, mode)
            if found is not None and found.axis is not None:
                self._axes.setdefault(self._program.base(value), found.axis)

    def read_modes(self, call: Call, way: Way) -> Iterator[tuple[int, Mode]]:
        """Yields the number of each tensor that a call is given, and how a part reads it."""
        for name, given in self.operands(call).arguments.items():
            for one in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(one, Ref):
                    yield one.number, way.inputs.get(name)

    def made_modes(self, node: Node, way: Way) -> Iterator[tuple[int, int, Mode]]:
        """Yields number, value and mode of each result."""
        if node.kind == WRITE:
            ((number, value),) = node.new.items()
            yield number, value, way.outputs[0]
            return
        for pair, mode in zip(node.outputs, way.outputs, strict=True):
            if pair is not None:
                yield *pair, mode

    # ---------------------------------------------------------------- rules

    @cached_property
    def found(self) -> dict[int, tuple[SliceRule, Way]]:
        """Returns op id → how it may run in slices."""
        found = {}
        for op in self._graph.ops:
            node = self._program.nodes[op.id]
            if not op.recomputable or op.phase == UPDATE or not op.outputs or node.call is None:
                continue
            if node.state is not None or _asks_when_it_runs(node.call) or len(node.new) > 1:
                continue
            for way in sorted(self._ways_of(node.call), key=lambda way: way.axis is not None):
                rule = self._rule(node, way)
                if rule is not None:
                    found[op.id] = rule, way
                    break
        return found

    def _rule(self, node: Node, way: Way) -> SliceRule | None:
        assert node.call is not None
        sliced, whole, sums, means, divides = set(), set(), set(), set(), 0
        targets = set(node.new) if node.kind == WRITE else set()
        for number, mode in self.read_modes(node.call, way):
            value = node.reads.get(number)
            if number in targets:
                mode = way.outputs[0]
            if value is None:
                continue
            found = self.seen(number, value, mode)
            if found is None:
                return None
            divides = gcd(divides, *found.sizes)
            if found.axis is None and mode != SAME:
                whole.add(value)
            elif self._has_parts(value, found.axis):
                sliced.add(value)
            else:
                return None
        for number, value, mode in self.made_modes(node, way):
            if mode in (SUM, MEAN):
                if not self._is_dense(value) or node.kind == WRITE:
                    return None
                sums.add(value)
                if mode == MEAN:
                    means.add(value)
                continue
            found = self.seen(number, value, mode)
            if found is None or not self._has_parts(value, found.axis):
                return None
            divides = gcd(divides, *found.sizes)
        if not divides:
            return None
        return SliceRule(
            frozenset(sliced), frozenset(whole), frozenset(sums), frozenset(means), divides
        )

    def _has_parts(self, value: int, axis: int | None) -> bool:
        """Returns whether a value has parts along an axis, and may be read by part."""
        source = self._program.sources.get(value)
        if source is not None and (source in self._state or self._program.is_overwritten(source)):
            return False
        return self._is_dense(value) and self.axis(value) == axis

    def _is_dense(self, value: int) -> bool:
        """Returns whether a value is one tensor without gaps."""
        layout = self._program.layouts[self._program.base(value)]
        nbytes = self._program.recording.storage_bytes[layout.storage]
        return layout.offset == 0 and prod(layout.shape) * layout.dtype.itemsize == nbytes


def _asks_when_it_runs(call: Call) -> bool:
    """Returns whether a call is given a generator, or a number that is read from a tensor."""
    leaves = tree_leaves((call.args, call.kwargs))
    return any(isinstance(leaf, (Generator, Scalar)) for leaf in leaves)
