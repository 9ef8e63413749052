"""Writes a compiled step with some of its ops in slices of the batch.

How TensorFlow's ops run on a part is in the table of
:mod:`~keras_remat.backends.tensorflow.graph.slice_rules`, as for steps in order: along the first
axis of their results, or of the values they sum up. :mod:`keras_remat.backends.xla.sliced` has the
code common to all frameworks. Slicing adds to a program:

* a cut is ``Slice``;
* a join is XLA's own update of a part of a buffer, and its first part begins the buffer by
  ``PadV2``: an array of zeros would exist from the step's very beginning;
* a sum is ``AddV2``, in the order of the parts; a mean is divided by their number;
* a part of a random op has its counter advanced by the numbers that earlier parts draw, and a
  constant that is a shape gets the part's size as its first number.

Loops and branches stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
import tensorflow as tf

from keras_remat.backends.slice_modes import MEAN, SUM, Mode, Shape
from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram, Literal, nbytes
from keras_remat.backends.tensorflow.compiled.trace import CompiledStep
from keras_remat.backends.tensorflow.graph.nodes import constant, copied, new_node, numbers_of
from keras_remat.backends.tensorflow.graph.slice_rules import (
    DRAWN_AT_ONCE,
    RESHAPING,
    Found,
    InputMode,
    Operands,
    OutputMode,
    modes_of,
    whole_draws,
)
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.sliced import (
    ProgramSlicer,
    ProgramWriter,
    SlicedEquation,
    SlicedOp,
    demanded,
)
from keras_remat.core.slices import Role, SlicedGraph

#: TensorFlow's mode of an output (how the parts' outputs make the whole) → the common mode.
_MODES: Mapping[OutputMode, Mode] = {"part": 0, "sum": SUM, "mean": MEAN}


class StepSlicer(ProgramSlicer[CompiledStep]):
    """Rewrites one traced step (:class:`keras_remat.backends.base.Slicer`)."""

    @cached_property
    def analysis(self) -> Analysis:
        """Returns the analysis of how the step's equations run on a part."""
        program: FlatProgram = self.step.program
        return Analysis(program, range(self.step.stateless.batch, program.n_given))

    def writer(self, sliced: SlicedGraph) -> _Writer:
        return _Writer(self, sliced)


class Analysis:
    """Finds how the equations of a program run on a part along the first axis.

    Args:
        program: the equations.
        state: numbers of given values outside the batch, such as variables; they are read whole.
    """

    def __init__(self, program: FlatProgram, state: range):
        self.program, self.state = program, state
        self._modes: dict[int, Found] = {}

    def axis(self, number: int) -> int:
        """Returns the first axis, along which every value is sliced."""
        return 0

    def shape(self, atom: Any) -> Shape | None:
        """Returns the shape of a number or literal, where it is known."""
        if isinstance(atom, int):
            return self.program.shapes[atom]
        shape = self.program.constants[atom.name].attr["value"].tensor.tensor_shape
        return tuple(dim.size for dim in shape.dim)

    def modes(self, at: int) -> Found:
        """Returns the modes of an equation's inputs and outputs when it runs on a part; ``None``
        where it stays whole."""
        if at not in self._modes:
            self._modes[at] = self._found(self.program.equations[at])
        return self._modes[at]

    def _found(self, equation: Equation) -> Found:
        shapes = [self.shape(atom) for atom in equation.inputs]
        made = [self.program.shapes[number] for number in equation.outputs]
        if not made or None in (*shapes, *made):
            return None
        if equation.kind in RESHAPING:
            others: list[InputMode] = ["whole"] * (len(shapes) - 1)
            is_part = made[0] and shapes[0] and equation.inputs[0] not in self.state
            return (("part", *others), "part") if is_part else None
        literals = {at: a for at, a in enumerate(equation.inputs) if isinstance(a, Literal)}
        numbers = {at: numbers_of(self.program.constants[a.name]) for at, a in literals.items()}
        constants = {at: some for at, some in numbers.items() if some}
        known = [shape or () for shape in shapes]
        found = modes_of(Operands(equation.source, known, made[0] or (), constants))
        for atom, mode in zip(equation.inputs, found[0] if found else (), strict=bool(found)):
            if mode == "part" and (atom in self.state or not self.shape(atom)):
                return None
        if found and found[1] == "part" and not all(made):
            return None
        return found

    def sliced_op(self, equations: Sequence[int], outputs: Sequence[int]) -> SlicedOp | None:
        """Returns how equations run on a part; ``None`` where they stay whole. The last equation
        computes ``outputs``."""
        found = self.modes(equations[-1])
        if found is None:
            return None
        wanted = {number: {_MODES[found[1]]} for number in outputs}
        return demanded(self.program, equations, wanted, self._sliced, lambda atom, mode: True)

    def _sliced(
        self, at: int, equation: Equation, asked: Sequence[set[Mode]]
    ) -> SlicedEquation | None:
        """Returns how an equation makes its outputs in the modes asked for."""
        found = self.modes(at)
        (mode, *others) = {one for some in asked for one in some}
        if found is None or others or mode != _MODES[found[1]]:
            return None
        inputs = tuple(0 if one == "part" else None for one in found[0])
        return SlicedEquation(at, inputs, (mode,) * len(equation.outputs))

    def divisor(self, op: SlicedOp) -> int:
        """Returns a number that the number of parts has to divide."""
        divides = 0
        for one in op.equations:
            equation = self.program.equations[one.at]
            read = zip(equation.inputs, one.inputs, strict=True)
            made = zip(equation.outputs, one.outputs, strict=True)
            for atom, mode in (*read, *made):
                shape = self.shape(atom)
                if mode == 0 and shape:
                    divides = gcd(divides, shape[0])
            found = self.modes(one.at)
            if found is not None and "counter" in found[0] and not one.is_whole:
                # 0 means that only 1 divides it
                divides = gcd(divides, whole_draws(self.shape(equation.outputs[0]) or ()) or 1)
        return divides


class _Writer(ProgramWriter[CompiledStep]):
    """Writes the program of one sliced graph."""

    def __init__(self, slicer: StepSlicer, sliced: SlicedGraph):
        super().__init__(slicer, sliced)
        self._analysis, program = slicer.analysis, self._step.program
        self._shapes, self._dtypes = list(program.shapes), list(program.dtypes)
        self._constants = dict(program.constants)
        self._literals: dict[str, Literal] = {}

    def program(self) -> FlatProgram:
        program: FlatProgram = self._step.program
        return replace(
            program,
            equations=tuple(self.equations),
            shapes=tuple(self._shapes),
            dtypes=tuple(self._dtypes),
            constants=self._constants,
        )

    # ---------------------------------------------------------------- numbers and literals

    def new_number(self, like: int, mode: Mode) -> int:
        shape = self._shape(like)
        if isinstance(mode, int):
            shape = self._part_shape(shape)
        return self._number(shape, self._dtypes[like])

    def _number(self, shape: Shape, dtype: Any) -> int:
        self._shapes.append(shape)
        self._dtypes.append(dtype)
        return len(self._shapes) - 1

    def _shape(self, number: int) -> Shape:
        shape: Shape | None = self._shapes[number]
        if shape is None:
            raise LookupError(f"the shape of number {number} is not known")
        return shape

    def _part_shape(self, shape: Shape) -> Shape:
        return (shape[0] // self._count, *shape[1:])

    def _literal(self, name: str, array: Any, dtype: Any) -> Literal:
        """Returns a new constant, one for each name."""
        if name not in self._literals:
            array = np.asarray(array, dtype.as_numpy_dtype)
            self._constants[name] = constant(name, array, dtype)
            self._literals[name] = Literal(name, dtype, nbytes(array.shape, dtype))
        return self._literals[name]

    def _array(self, literal: Literal) -> Any:
        return tf.make_ndarray(self._constants[literal.name].attr["value"].tensor)

    def _numbers(self, name: str, numbers: Sequence[int]) -> Literal:
        return self._literal(name, numbers, tf.int32)

    # ---------------------------------------------------------------- parts

    def part_equations(
        self, one: SlicedEquation, part: int, inputs: Sequence[Any], outputs: Sequence[int]
    ) -> list[Equation]:
        equation, found = self._step.program.equations[one.at], self._analysis.modes(one.at)
        if one.is_whole or found is None:
            return [replace(equation, inputs=tuple(inputs), outputs=tuple(outputs))]
        if equation.kind in RESHAPING:
            return [self._reshaped(equation, inputs[0], outputs[0])]
        name, read = f"{equation.source.name}/slice_{part}", list[Any]()
        before: list[Equation] = []
        for mode, atom in zip(found[0], inputs, strict=True):
            if mode == "counter" and part:
                drawn = prod(self._part_shape(self._shape(equation.outputs[0]))) * part
                before.append(self._later(f"{name}/counter", atom, drawn, equation.scope))
                read += before[-1].outputs
            elif isinstance(atom, Literal) and mode == "part":
                rows = np.split(self._array(atom), self._count)[part]
                read.append(self._literal(f"{atom.name}/slice_{part}", rows, atom.dtype))
            elif isinstance(atom, Literal) and mode == "shape":
                numbers = np.array(self._array(atom))
                numbers[0] //= self._count if numbers[0] >= 0 else 1
                read.append(self._literal(f"{atom.name}/slices", numbers, atom.dtype))
            else:
                read.append(atom)
        source = copied(equation.source, (), name)
        made = Equation(source, equation.kind, equation.scope, tuple(read), tuple(outputs))
        return [*before, made]

    def _reshaped(self, equation: Equation, read: Any, made: int) -> Equation:
        """Returns the ``Reshape`` that a part of a view becomes, whatever its kind."""
        name = f"{equation.source.name}/slices"
        to = self._numbers(f"{name}/shape", self._shape(made))
        dtypes = {"T": self._dtypes[made], "Tshape": tf.int32}
        source = new_node(name, "Reshape", **dtypes)
        return Equation(source, "Reshape", equation.scope, (read, to), (made,))

    def _later(self, name: str, counter: Any, drawn: int, scope: str) -> Equation:
        """Returns the equation that advances a random op's counter by ``drawn`` numbers.

        The counter has 128 bits. TensorFlow draws the upper 64, and the lower ones begin at 0.
        """
        steps = self._literal(f"{name}/steps", [drawn // DRAWN_AT_ONCE, 0], tf.uint64)
        source = new_node(name, "AddV2", T=tf.uint64)
        return Equation(source, "AddV2", scope, (counter, steps), (self._number((2,), tf.uint64),))

    # ---------------------------------------------------------------- cuts, joins and sums

    def glue(
        self, role: Role, number: int, part: int, inputs: tuple[int, ...]
    ) -> tuple[Any, str, tuple[Any, ...]]:
        shape, dtype = self._shape(number), self._dtypes[number]
        base = f"slices/v{number}/{role}_{part}"
        if role == "sum":
            return new_node(base, "AddV2", T=dtype), "AddV2", inputs
        if role == "divide":
            parts = self._literal(f"{base}/parts", self._count, dtype)
            return new_node(base, "RealDiv", T=dtype), "RealDiv", (*inputs, parts)
        nothing = self._literal(f"slices/v{number}/nothing", 0, dtype)
        if role == "start":  # the first part makes the buffer
            return new_node(base, "Identity", T=dtype), "Identity", (nothing,)
        rows, *inner = self._part_shape(shape)
        if role == "join" and part == 0:
            around = [(0, shape[0] - rows), *[(0, 0)] * len(inner)]
            padding = self._literal(f"{base}/padding", around, tf.int32)
            source = new_node(base, "PadV2", T=dtype, Tpaddings=tf.int32)
            return source, "PadV2", (inputs[1], padding, nothing)
        first = self._numbers(f"{base}/begin", [part * rows, *[0] * len(inner)])
        if role == "cut":
            size = self._numbers(f"{base}/size", [rows, *inner])
            return (
                new_node(base, "Slice", T=dtype, Index=tf.int32),
                "Slice",
                (*inputs, first, size),
            )
        kind = "XlaDynamicUpdateSlice"
        return new_node(base, kind, T=dtype, Tindices=tf.int32), kind, (*inputs, first)
