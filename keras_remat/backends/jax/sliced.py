"""Writes a traced JAX step with some of its ops in slices: the program of a
:class:`~keras_remat.core.slices.SlicedGraph`.

Each op of that graph has equations. A part's are its op's with the shapes of a part; equations of
which each part needs all are computed by each. What is added to a program by slicing:

* a cut is ``slice``;
* a join is ``dynamic_update_slice`` into a buffer, and its first part begins the buffer by ``pad``:
  an array of zeros would exist from the step's very beginning;
* a sum is ``add``, in the order of the parts;
* a part of random bits counts on from where the part before ends.

What becomes whole again has its own number of the whole program, so that everything else is the
same equation as before. XLA would run the parts side by side: that they wait for one another is
the work of :mod:`keras_remat.backends.xla.protect`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import jax

from keras_remat.backends.base import Whole
from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import FlatProgram
from keras_remat.backends.jax.kinds import SCAN
from keras_remat.backends.jax.slice_analysis import Analysis, Loop, SlicedEquation, SlicedOp
from keras_remat.backends.jax.slice_rules import RANDOM, Operands, part_params
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.slice_modes import Mode, Shape
from keras_remat.backends.xla.fusion import Equation
from keras_remat.core.graph import UPDATE, Op
from keras_remat.core.slices import SlicedGraph, SliceRule, Slicing, sliced_graph


@dataclass(frozen=True)
class StepSlicer:
    """Rewrites one traced step (:class:`keras_remat.backends.base.Slicer`).

    Args:
        step: the whole one.
        note: is told every step that is made.
    """

    step: JaxTracedStep
    note: Callable[[JaxTracedStep], None]
    granule_bytes: int = 1

    @property
    def rules(self) -> dict[int, SliceRule]:
        """Op id → how it may run in slices."""
        return self._found[0]

    @property
    def sliced_ops(self) -> dict[int, SlicedOp]:
        """Op id → how its equations run on a part."""
        return self._found[1]

    @cached_property
    def _n_state(self) -> int:
        """How many of the step's inputs are the trainer's state."""
        return len(jax.tree.leaves(self.step.state_specs))

    @cached_property
    def analysis(self) -> Analysis:
        """The axes of the step's values."""
        program = self.step.program
        batch = range(self._n_state, program.n_inputs)
        given = {number: 0 for number in batch if program.avals[number].shape}
        return Analysis(program, given, range(self._n_state))

    @cached_property
    def _found(self) -> tuple[dict[int, SliceRule], dict[int, SlicedOp]]:
        rules, sliced_ops = {}, {}
        for op in self.step.graph.ops:
            found = None
            if op.recomputable and op.phase != UPDATE and op.outputs:
                numbers = [self.step.numbers[v] for v in op.outputs]
                found = self.analysis.sliced_op(self.step.handles[op.id], numbers)
            rule = None if found is None else self._rule(op, found)
            if found is not None and rule is not None:
                rules[op.id], sliced_ops[op.id] = rule, found
        return rules, sliced_ops

    def _rule(self, op: Op, found: SlicedOp) -> SliceRule | None:
        """Returns the rule of an op; ``None`` where it reads what a part cannot."""
        graph, numbers = self.step.graph, self.step.numbers
        made = dict(
            zip(
                self.step.program.equations[found.equations[-1].at].outputs,
                found.equations[-1].outputs,
                strict=True,
            )
        )
        sums = set()
        for v in op.outputs:
            mode = made[numbers[v]]
            if mode is None and (graph.readers[v] or v in graph.outputs):
                return None  # each part computes all of it: their sum is read by nobody else
            if not isinstance(mode, int):
                sums.add(v)
        modes = {v: found.reads.get(numbers[v], frozenset()) for v in op.inputs}
        sliced = {v for v, some in modes.items() if any(isinstance(m, int) for m in some)}
        if any(numbers[v] < self._n_state for v in sliced):
            return None
        divides = self.analysis.divisor(found)
        whole = frozenset(op.inputs) - sliced | {v for v in sliced if None in modes[v]}
        return SliceRule(frozenset(sliced), whole, frozenset(sums), divides=divides)

    def sliced(self, slicing: Slicing) -> JaxTracedStep:
        """Returns the step with some ops in slices.

        Raises:
            InvalidProblemError: they cannot run so.
        """
        axes = {v: self.analysis.axis(n) for v, n in enumerate(self.step.numbers)}
        graph = sliced_graph(self.step.graph, self.rules, slicing, self.granule_bytes, axes)
        whole = replace(self.step, slicer=self)
        made = _Writer(whole, graph, self.analysis, self.sliced_ops).step()
        self.note(made)
        return made


class _Writer:
    """Writes the program of one sliced graph."""

    def __init__(
        self,
        step: JaxTracedStep,
        sliced: SlicedGraph,
        analysis: Analysis,
        sliced_ops: dict[int, SlicedOp],
    ):
        self._step, self._sliced = step, sliced
        self._analysis, self._sliced_ops = analysis, sliced_ops
        self._count = sliced.slicing.parts
        self._equations: list[Equation] = []
        self._avals = list(step.program.avals)
        self._numbers: dict[int, int] = {now: step.numbers[v] for v, now in sliced.whole.items()}
        self._at: dict[Any, int] = {}  # what an equation computes → its index
        self._sources: dict[Any, Any] = {}

    def step(self) -> JaxTracedStep:
        """Returns the step."""
        graph, handles = self._sliced.graph, {}
        write = {
            "cut": self._cut, "start": self._start, "join": self._join, "sum": self._sum,
        }  # fmt: skip
        for op, origin in zip(graph.ops, self._sliced.origins, strict=True):
            if origin.role == "whole":
                handles[op.id] = tuple(map(self._whole, self._step.handles[origin.source]))
            elif origin.role == "part":
                handles[op.id] = self._part(op, origin.source, origin.part)
            else:
                handles[op.id] = (write[origin.role](op, origin.source, origin.part),)
        program = replace(
            self._step.program, equations=tuple(self._equations), avals=tuple(self._avals)
        )
        return replace(
            self._step,
            graph=graph,
            handles=handles,
            program=program,
            numbers=tuple(self._numbers[v.id] for v in graph.values),
            slicer=None,
            whole=Whole(self._step, self._sliced),
        )

    def _add(self, key: Any, equation: Equation) -> int:
        self._at[key] = len(self._equations)
        self._equations.append(equation)
        return self._at[key]

    def _number(self, aval: Any) -> int:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _made(self, value_id: int, aval: Any) -> int:
        """Returns the number of a value of the sliced graph, a new one where it has none."""
        if value_id not in self._numbers:
            self._numbers[value_id] = self._number(aval)
        return self._numbers[value_id]

    def _whole(self, at: int) -> int:
        known = self._at.get(at)
        return self._add(at, self._step.program.equations[at]) if known is None else known

    # ---------------------------------------------------------------- parts

    def _part(self, op: Op, source: int, part: int) -> tuple[int, ...]:
        """Writes the equations of one part."""
        old = self._step.graph.ops[source]
        inner: dict[tuple[int, Mode], int] = {}
        for v in old.inputs:
            number = self._step.numbers[v]
            made = self._sliced.parts.get((v, part), self._sliced.cuts.get((v, part)))
            if made is not None:
                inner[number, self._analysis.axis(number)] = self._numbers[made]
            if v in self._sliced.whole:
                inner[number, None] = self._numbers[self._sliced.whole[v]]
        ids = {self._step.numbers[v]: now for v, now in zip(old.outputs, op.outputs, strict=True)}
        found = []
        for one in self._sliced_ops[source].equations:
            equation = self._step.program.equations[one.at]
            inputs = tuple(
                inner[a, mode] if isinstance(a, int) else a
                for a, mode in zip(equation.inputs, one.inputs, strict=True)
            )
            read = tuple(a if isinstance(a, int) else id(a) for a in inputs)
            key = one.at, None if one.is_whole else part, read, one.outputs
            if key not in self._at:
                avals = [
                    part_aval(self._avals[number], mode, self._count)
                    for number, mode in zip(equation.outputs, one.outputs, strict=True)
                ]
                outputs = tuple(
                    self._made(ids[number], aval) if number in ids else self._number(aval)
                    for number, aval in zip(equation.outputs, avals, strict=True)
                )
                written = self._source(one, part)
                self._add(key, replace(equation, source=written, inputs=inputs, outputs=outputs))
            found.append(self._at[key])
            outputs = self._equations[found[-1]].outputs
            inner.update(zip(zip(equation.outputs, one.outputs, strict=True), outputs, strict=True))
        return tuple(found)

    def _source(self, one: SlicedEquation, part: int) -> Any:
        """Returns what a part of an equation is written down from; one for all parts, but for what
        is drawn."""
        drawn = self._step.program.equations[one.at].kind == RANDOM and not one.is_whole
        key = one, part if drawn else 0
        if key not in self._sources:
            self._sources[key] = part_source(self._step.program, one, self._count, key[1])
        return self._sources[key]

    # ---------------------------------------------------------------- cuts, joins and sums

    def _axis_of(self, value_id: int) -> tuple[int, int, Any]:
        """Returns the number, the axis and the whole shape of a value."""
        number = self._step.numbers[value_id]
        return number, self._analysis.axis(number), self._avals[number]

    def _bounds(self, aval: Any, axis: int, part: int) -> tuple[list[int], list[int]]:
        rows = aval.shape[axis] // self._count
        start, stop = [0] * len(aval.shape), list(aval.shape)
        start[axis], stop[axis] = part * rows, (part + 1) * rows
        return start, stop

    def _glue(self, op: Op, kind: str, source: Any, aval: Any) -> int:
        """Writes one equation between the values of an op."""
        inputs = tuple(self._numbers[v] for v in op.inputs)
        if kind == "pad":
            inputs = inputs[1:]
        outputs = (self._made(op.outputs[0], aval),)
        scope = op.name.rpartition("/")[0]
        return self._add((op.id,), Equation(source, kind, scope, inputs, outputs))

    def _cut(self, op: Op, value_id: int, part: int) -> int:
        _, axis, aval = self._axis_of(value_id)
        source = private.cut_equation(aval, *self._bounds(aval, axis, part))
        return self._glue(op, "slice", source, part_aval(aval, axis, self._count))

    def _start(self, op: Op, value_id: int, part: int) -> int:
        _, _, aval = self._axis_of(value_id)
        return self._glue(op, "broadcast_in_dim", private.nothing_equation(aval), aval)

    def _join(self, op: Op, value_id: int, part: int) -> int:
        _, axis, aval = self._axis_of(value_id)
        piece = part_aval(aval, axis, self._count)
        start, _ = self._bounds(aval, axis, part)
        if part == 0:
            return self._glue(op, "pad", private.pad_equation(piece, aval), aval)
        source = private.join_equation(aval, piece, start)
        return self._glue(op, "dynamic_update_slice", source, aval)

    def _sum(self, op: Op, value_id: int, part: int) -> int:
        _, _, aval = self._axis_of(value_id)
        return self._glue(op, "add", private.sum_equation(aval), aval)


def part_aval(aval: Any, mode: Mode, count: int) -> Any:
    """Returns what one of ``count`` parts is like."""
    if not isinstance(mode, int):
        return aval
    shape = list(aval.shape)
    shape[mode] //= count
    return aval.update(shape=tuple(shape))


def part_source(program: FlatProgram, one: SlicedEquation, count: int, part: int) -> Any:
    """Returns what one part of an equation is written down from.

    Args:
        program: whose equation it is.
        one: how it runs on a part.
        count: how many parts there are.
        part: which one.
    """
    equation = program.equations[one.at]
    if one.is_whole:
        return equation.source

    def aval_of(atom: Any, mode: Mode) -> Any:
        return part_aval(program.avals[atom] if isinstance(atom, int) else atom.aval, mode, count)

    given = [aval_of(a, m) for a, m in zip(equation.inputs, one.inputs, strict=True)]
    made = [aval_of(a, m) for a, m in zip(equation.outputs, one.outputs, strict=True)]
    if equation.kind == RANDOM:
        return private.bits_equation(given[0], made[0], part * prod(made[0].shape))
    if equation.kind == SCAN and one.loop is not None:
        params = equation.source.params | {"jaxpr": _part_of_body(one.loop, equation, count)}
    else:
        shapes = tuple(_shape(a, program) for a in equation.inputs)
        operands = Operands(equation.source, shapes, _shape(equation.outputs[0], program))
        parts = [tuple(aval.shape) for aval in given]
        params = part_params(equation.kind, operands, one.inputs, parts, tuple(made[0].shape))
    return private.with_shapes(equation.source, params, given, made)


def _shape(atom: Any, program: FlatProgram) -> Shape:
    return tuple((program.avals[atom] if isinstance(atom, int) else atom.aval).shape)


def _part_of_body(loop: Loop, equation: Equation, count: int) -> Any:
    """Returns the body of a part of a loop."""
    body, params = loop.body, equation.source.params
    sources = {one.at: part_source(body, one, count, 0) for one in loop.equations}
    first_row = params["num_consts"] + params["num_carry"]

    def run(*inputs: Any) -> list[Any]:
        env: dict[int, Any] = dict(enumerate(inputs))
        for one in loop.equations:
            whole = body.equations[one.at]
            read = [env[a] if isinstance(a, int) else a.val for a in whole.inputs]
            env.update(zip(whole.outputs, private.bind(sources[one.at], read), strict=True))
        return [env[a] if isinstance(a, int) else private.array_of(a) for a in body.outputs]

    given: Sequence[Any] = [
        part_aval(aval, mode - (at >= first_row) if isinstance(mode, int) else None, count)
        for at, (aval, mode) in enumerate(zip(body.avals, loop.inputs, strict=False))
    ]
    return private.traced_body(run, given)
