"""Runs the ops of a compiled step in slices: the part all frameworks share.

Each op consists of equations. It may run on a part if all its equations can, asked backwards from
its results. A part's equations are its op's, on parts of what they read. If each part needs all of
an equation's result, each part computes it. A value that becomes whole again has its number of the
whole program, so that all other equations are the same as before. XLA would run the parts side by
side; :mod:`keras_remat.backends.xla.protect` makes them wait for one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from keras_remat.backends.base import Whole
from keras_remat.backends.slice_modes import MEAN, Mode
from keras_remat.backends.xla.fused_graph import FusedStep
from keras_remat.backends.xla.fusion import Equation
from keras_remat.core.graph import UPDATE, Op
from keras_remat.core.slices import Role, SlicedGraph, SliceRule, Slicing, sliced_graph

Step = TypeVar("Step", bound=FusedStep)


@dataclass(frozen=True, eq=False)
class SlicedEquation:
    """Says how one equation runs in a part.

    Args:
        at: its index in the program.
        inputs, outputs: mode of each: how the part reads or makes it.
        loop: for a loop, how its body runs on a part; else ``None``.
    """

    at: int
    inputs: tuple[Mode, ...]
    outputs: tuple[Mode, ...]
    loop: Any = None

    @property
    def is_whole(self) -> bool:
        """Returns whether each part computes the whole equation, all alike."""
        return all(mode is None for mode in self.outputs)


@dataclass(frozen=True)
class SlicedOp:
    """Says how some equations run on a part.

    Args:
        equations: the op's equations, in program order.
        reads: number of a value from outside → its modes; the part may read it in several.
    """

    equations: tuple[SlicedEquation, ...]
    reads: Mapping[int, frozenset[Mode]]


#: Returns how an equation, given with its index, makes the modes asked of each of its outputs;
#: ``None`` if it cannot.
Slice = Callable[[int, Equation, Sequence[set[Mode]]], SlicedEquation | None]


def demanded(
    program: Any,
    equations: Sequence[int],
    wanted: Mapping[int, Iterable[Mode]],
    sliced: Slice,
    is_literal: Callable[[Any, Mode], bool],
) -> SlicedOp | None:
    """Returns how equations make wanted values on a part; ``None`` if they cannot.

    Args:
        program: the program of the equations.
        equations: indices, ascending.
        wanted: number of a value → the modes it is wanted in.
        sliced: is called for each equation with an output that is wanted in part.
        is_literal: whether a literal can be read in a mode.
    """
    modes: dict[int, set[Mode]] = defaultdict(set)
    for number, some in wanted.items():
        modes[number] |= set(some)
    made: list[SlicedEquation] = []
    for at in reversed(equations):
        equation = program.equations[at]
        asked = [modes.pop(number, set()) for number in equation.outputs]
        if not any(asked):
            continue
        if equation.has_effect or any(len(some) > 1 for some in asked):
            return None
        one: SlicedEquation | None
        if all(some <= {None} for some in asked):
            nothing = (None,) * len(equation.inputs), (None,) * len(equation.outputs)
            one = SlicedEquation(at, *nothing)
        else:
            one = sliced(at, equation, asked)
        if one is None:
            return None
        made.append(one)
        for atom, mode in zip(equation.inputs, one.inputs, strict=True):
            if isinstance(atom, int):
                modes[atom].add(mode)
            elif not is_literal(atom, mode):
                return None
    reads = {number: frozenset(some) for number, some in modes.items()}
    return SlicedOp(tuple(reversed(made)), reads)


class Analysis(Protocol):
    """Says how the equations of a program run on a part."""

    @property
    def state(self) -> Container[int]:
        """Returns the numbers of the values that are overwritten, and so read whole."""

    def axis(self, number: int) -> int:
        """Returns the axis along which a value is sliced."""

    def sliced_op(self, equations: Sequence[int], outputs: Sequence[int]) -> SlicedOp | None:
        """Returns how equations run on a part; ``None`` if they stay whole. The last equation
        computes ``outputs``."""

    def divisor(self, op: SlicedOp) -> int:
        """Returns a number that the number of parts has to divide."""


def _slice_rules(
    step: FusedStep, analysis: Analysis
) -> tuple[dict[int, SliceRule], dict[int, SlicedOp]]:
    """Returns op id → how the op may run in slices, and op id → how its equations do."""
    rules, sliced_ops = {}, {}
    for op in step.graph.ops:
        if not op.recomputable or op.phase == UPDATE or not op.outputs:
            continue
        found = analysis.sliced_op(step.handles[op.id], [step.numbers[v] for v in op.outputs])
        rule = None if found is None else _rule(step, op, found, analysis)
        if found is not None and rule is not None:
            rules[op.id], sliced_ops[op.id] = rule, found
    return rules, sliced_ops


def _rule(step: FusedStep, op: Op, found: SlicedOp, analysis: Analysis) -> SliceRule | None:
    """Returns the rule of an op; ``None`` if it cannot run in parts."""
    graph, numbers, last = step.graph, step.numbers, found.equations[-1]
    made = dict(zip(step.program.equations[last.at].outputs, last.outputs, strict=True))
    sums, means = set(), set()
    for v in op.outputs:
        mode = made[numbers[v]]
        if mode is None and (graph.readers[v] or v in graph.outputs):
            return None  # each part computes all of it: no reader may get the sum of the parts
        if not isinstance(mode, int):
            sums.add(v)
        if mode == MEAN:
            means.add(v)
    modes = {v: found.reads.get(numbers[v], frozenset()) for v in op.inputs}
    sliced = {v for v, some in modes.items() if any(isinstance(m, int) for m in some)}
    if any(numbers[v] in analysis.state for v in sliced):
        return None
    whole = frozenset(op.inputs) - sliced | {v for v in sliced if None in modes[v]}
    divisor = analysis.divisor(found)
    return SliceRule(frozenset(sliced), whole, frozenset(sums), frozenset(means), divisor)


@dataclass(frozen=True)
class ProgramSlicer(ABC, Generic[Step]):
    """Puts ops of one traced step into slices (:class:`keras_remat.backends.base.Slicer`).

    Args:
        step: the whole step.
        note: is called with every step that is made.
    """

    step: Step
    note: Callable[[Step], None]
    granule_bytes: int = 1

    @property
    @abstractmethod
    def analysis(self) -> Analysis:
        """Returns how the step's equations run on a part."""

    @abstractmethod
    def writer(self, sliced: SlicedGraph) -> ProgramWriter[Step]:
        """Returns what writes the step's graph in slices."""

    @cached_property
    def _found(self) -> tuple[dict[int, SliceRule], dict[int, SlicedOp]]:
        return _slice_rules(self.step, self.analysis)

    @property
    def rules(self) -> dict[int, SliceRule]:
        """Returns op id → how it may run in slices."""
        return self._found[0]

    @property
    def sliced_ops(self) -> dict[int, SlicedOp]:
        """Returns op id → how its equations run on a part."""
        return self._found[1]

    def sliced(self, slicing: Slicing) -> Step:
        """Returns the step with some ops in slices.

        Raises:
            InvalidProblemError: they cannot run so.
        """
        axes = {v: self.analysis.axis(n) for v, n in enumerate(self.step.numbers)}
        graph = sliced_graph(self.step.graph, self.rules, slicing, self.granule_bytes, axes)
        made = self.writer(graph).step()
        self.note(made)
        return made


class ProgramWriter(ABC, Generic[Step]):
    """Writes the equations of one sliced graph.

    A framework implements how they look (:meth:`new_number`, :meth:`part_equations`, :meth:`glue`)
    and which program they make (:meth:`program`).

    Args:
        slicer: the slicer of the whole step.
        sliced: its graph in slices.

    Attributes:
        equations: the equations written so far.
        numbers: value of the sliced graph → its number.
    """

    def __init__(self, slicer: ProgramSlicer[Step], sliced: SlicedGraph):
        self._slicer, self._step, self._sliced = slicer, slicer.step, sliced
        self._axis = slicer.analysis.axis
        self._count = sliced.slicing.parts
        self._written: dict[Any, tuple[int, ...]] = {}  # what equations compute → their indices
        self.equations: list[Equation] = []
        self.numbers = {now: self._step.numbers[v] for v, now in sliced.whole.items()}

    def step(self) -> Step:
        """Writes all equations and returns the step in slices."""
        handles, graph = self._write(), self._sliced.graph
        return replace(
            self._step,
            graph=graph,
            handles=handles,
            program=self.program(),
            numbers=tuple(self.numbers[v.id] for v in graph.values),
            slicer=None,
            whole=Whole(replace(self._step, slicer=self._slicer), self._sliced),
        )

    @abstractmethod
    def program(self) -> Any:
        """Returns the program of the written equations."""

    @abstractmethod
    def new_number(self, like: int, mode: Mode) -> int:
        """Returns a number for one part of a value, or for a value as large as it."""

    @abstractmethod
    def part_equations(
        self, one: SlicedEquation, part: int, inputs: Sequence[Any], outputs: Sequence[int]
    ) -> list[Equation]:
        """Returns the equations that one part of an equation becomes; the last one makes
        ``outputs``.

        Args:
            one: how the equation runs on a part.
            part: index of the part.
            inputs: numbers of the values the part reads, and the equation's literals.
            outputs: numbers of the values it makes.
        """

    @abstractmethod
    def glue(
        self, role: Role, number: int, part: int, inputs: tuple[int, ...]
    ) -> tuple[Any, str, tuple[Any, ...]]:
        """Returns source, kind and inputs of the equation that cuts, joins or adds parts.

        Args:
            role: the equation's role.
            number: number of the whole value.
            part: index of the part.
            inputs: numbers of the values that the op of the sliced graph reads.
        """

    def _write(self) -> dict[int, tuple[int, ...]]:
        """Writes all equations; returns op id → the indices of its own."""
        handles = {}
        for op, origin in zip(self._sliced.graph.ops, self._sliced.origins, strict=True):
            if origin.role == "whole":
                whole = self._step.handles[origin.source]
                handles[op.id] = tuple(one for at in whole for one in self._whole(at))
            elif origin.role == "part":
                handles[op.id] = self._part(op, origin.source, origin.part)
            else:
                handles[op.id] = self._glue(op, origin.role, origin.source, origin.part)
        return handles

    def _add(self, key: Any, equations: Sequence[Equation]) -> tuple[int, ...]:
        first = len(self.equations)
        self.equations += equations
        self._written[key] = tuple(range(first, len(self.equations)))
        return self._written[key]

    def _whole(self, at: int) -> tuple[int, ...]:
        return self._written.get(at) or self._add(at, [self._step.program.equations[at]])

    def _made(self, value_id: int, like: int, mode: Mode) -> int:
        """Returns the number of a value of the sliced graph, a new one where it has none."""
        if value_id not in self.numbers:
            self.numbers[value_id] = self.new_number(like, mode)
        return self.numbers[value_id]

    def _part(self, op: Op, source: int, part: int) -> tuple[int, ...]:
        """Writes the equations of one part."""
        old, numbers = self._step.graph.ops[source], self._step.numbers
        inner: dict[tuple[int, Mode], int] = {}
        for v in old.inputs:
            made = self._sliced.parts.get((v, part), self._sliced.cuts.get((v, part)))
            if made in self.numbers:  # else it is cut later, for others
                inner[numbers[v], self._axis(numbers[v])] = self.numbers[made]
            if v in self._sliced.whole:
                inner[numbers[v], None] = self.numbers[self._sliced.whole[v]]
        ids = {numbers[v]: now for v, now in zip(old.outputs, op.outputs, strict=True)}
        found: list[int] = []
        for one in self._slicer.sliced_ops[source].equations:
            equation = self._step.program.equations[one.at]
            inputs = tuple(
                inner[a, mode] if isinstance(a, int) else a
                for a, mode in zip(equation.inputs, one.inputs, strict=True)
            )
            read = tuple(a if isinstance(a, int) else id(a) for a in inputs)
            key = one.at, None if one.is_whole else part, read, one.outputs
            if key not in self._written:
                outputs = tuple(
                    self._made(ids[n], n, mode) if n in ids else self.new_number(n, mode)
                    for n, mode in zip(equation.outputs, one.outputs, strict=True)
                )
                self._add(key, self.part_equations(one, part, inputs, outputs))
            found += self._written[key]
            outputs = self.equations[found[-1]].outputs
            inner.update(zip(zip(equation.outputs, one.outputs, strict=True), outputs, strict=True))
        return tuple(found)

    def _glue(self, op: Op, role: Role, value_id: int, part: int) -> tuple[int, ...]:
        number = self._step.numbers[value_id]
        read = tuple(self.numbers[v] for v in op.inputs)
        source, kind, inputs = self.glue(role, number, part, read)
        mode = self._axis(number) if role == "cut" else None
        outputs = (self._made(op.outputs[0], number, mode),)
        scope = op.name.rpartition("/")[0]
        return self._add((op.id,), [Equation(source, kind, scope, inputs, outputs)])
