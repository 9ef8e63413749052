"""Finds how the ops of a traced JAX step run on a slice of the batch.

Each op consists of equations. The axis along which a value is sliced is found from the batch's
first axis on, by the table of primitives (:mod:`~keras_remat.backends.jax.slice_rules`): each
equation hands the axis of its inputs to its outputs. A value that nothing of the batch leads to
(zeros, random numbers) takes the axis of its reader, or its first. An op may run in slices if all
its equations can, asked backwards from its results.

A ``scan`` is sliced as a whole, as its body treats a slice. A part runs the loop on its part of the
carried values and of the values read and written row by row. A value that a loop adds up over the
batch (a kernel's gradient) begins at zero and is a sum over the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import FlatProgram, flatten
from keras_remat.backends.jax.kinds import SCAN
from keras_remat.backends.jax.slice_rules import PARTS, SUMS, Operands
from keras_remat.backends.slice_modes import SUM, Mode, Shape
from keras_remat.backends.xla import sliced as slicing
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.sliced import SlicedEquation, SlicedOp

#: Most rounds in which axes are looked for in the values that a loop carries.
_MOST_ROUNDS = 4


@dataclass(frozen=True)
class Loop:
    """Holds how a ``scan`` runs on a part.

    Args:
        body: equations of the loop's body.
        equations: how they run on a part.
        inputs, outputs: modes of the loop's inputs and outputs.
    """

    body: FlatProgram
    equations: tuple[SlicedEquation, ...]
    inputs: tuple[Mode, ...]
    outputs: tuple[Mode, ...]


def _plain(modes: Sequence[Mode]) -> list[Mode]:
    """Returns modes whose axes are Python's numbers; in JAX's parameters they may be NumPy's."""
    return [int(mode) if isinstance(mode, np.integer) else mode for mode in modes]


class Analysis:
    """Finds the axes along which a program's values are sliced, and how equations run on a part.

    Args:
        program: the equations.
        given: number of an input → its batch axis, if it has one.
        state: numbers of inputs that are overwritten, and so read whole.
    """

    def __init__(self, program: FlatProgram, given: Mapping[int, int], state: Iterable[int] = ()):
        self.program, self._axes, self.state = program, dict(given), frozenset(state)
        self._loops: dict[int, Loop | None] = {}
        self._makers = {
            number: equation for equation in program.equations for number in equation.outputs
        }
        for at, equation in enumerate(program.equations):
            self._hand_on(at, equation)

    def known_axis(self, atom: Any) -> int | None:
        """Returns the axis a value has from the batch or a reader; ``None`` if it has none yet."""
        return self._axes.get(atom) if isinstance(atom, int) else None

    def axis(self, number: int) -> int:
        """Returns the axis along which a value is sliced."""
        return self._axes.get(number, 0)

    def shape(self, atom: Any) -> Shape:
        """Returns the shape of a number or literal."""
        shape: Shape = self.program.aval(atom).shape
        return shape

    def operands(self, equation: Equation) -> Operands:
        """Returns the facts that rules look at."""
        shapes = tuple(map(self.shape, equation.inputs))
        return Operands(equation.source, shapes, self.shape(equation.outputs[0]))

    # ---------------------------------------------------------------- axes

    def _hand_on(self, at: int, equation: Equation) -> None:
        """Gives an equation's outputs the axis of its inputs, and its inputs without an axis that
        of its outputs."""
        known = [self.known_axis(atom) for atom in equation.inputs]
        if equation.has_effect or not equation.outputs or all(axis is None for axis in known):
            return
        modes: Sequence[Mode] = ()
        made: Sequence[Mode] = ()
        if equation.kind != SCAN:
            modes, made = self._handed_on(equation, known)
        elif (loop := self._loop(at)) is not None:
            modes, made = loop.inputs, loop.outputs
        for atom, mode in zip(equation.inputs, modes, strict=bool(modes)):
            if isinstance(atom, int) and isinstance(mode, int):
                self._axes.setdefault(atom, mode)
        for number, mode in zip(equation.outputs, made, strict=bool(made)):
            if isinstance(mode, int):
                self._axes[number] = mode

    def _handed_on(
        self, equation: Equation, known: Sequence[int | None]
    ) -> tuple[Sequence[Mode], Sequence[Mode]]:
        rule, operands = PARTS.get(equation.kind), self.operands(equation)
        if rule is None:
            return (), ()
        for axis in range(len(operands.result)):
            modes = _plain(rule(operands, axis) or ())
            told = [(k, m) for k, m in zip(known, modes, strict=False) if k is not None]
            if any(k == m for k, m in told) and all(m in (k, None) for k, m in told):
                return modes, [axis] * len(equation.outputs)
        return (), ()

    # ---------------------------------------------------------------- equations

    def sliced_op(self, equations: Sequence[int], outputs: Sequence[int]) -> SlicedOp | None:
        """Returns how equations run on a part; ``None`` if they stay whole. The last equation
        computes ``outputs``."""
        last = self.program.equations[equations[-1]]
        if last.kind == SCAN:
            loop = self._loop(equations[-1])
            asked = [dict(zip(outputs, loop.outputs, strict=True))] if loop else []
        else:
            parts: dict[int, Mode] = {number: self.axis(number) for number in outputs}
            asked = [dict.fromkeys(outputs, SUM), parts]
        found = (self.demanded(equations, {n: {mode} for n, mode in one.items()}) for one in asked)
        # a part cannot read a term of a sum that another op made
        return next((op for op in found if op and SUM not in set().union(*op.reads.values())), None)

    def demanded(
        self, equations: Sequence[int], wanted: Mapping[int, Iterable[Mode]]
    ) -> SlicedOp | None:
        """Returns how equations make wanted values on a part; ``None`` if they cannot.

        Args:
            equations: indices, ascending.
            wanted: number of a value → the modes it is wanted in.
        """

        def is_literal(atom: Any, mode: Mode) -> bool:
            return mode is None or (mode == SUM and self._is_zero(atom))

        return slicing.demanded(self.program, equations, wanted, self._sliced, is_literal)

    def _sliced(
        self, at: int, equation: Equation, asked: Sequence[set[Mode]]
    ) -> SlicedEquation | None:
        """Returns how an equation makes the modes asked of its outputs, at most one of each."""
        if equation.kind == SCAN:
            loop = self._loop(at)
            if loop is None or any(some - {m} for some, m in zip(asked, loop.outputs, strict=True)):
                return None
            return SlicedEquation(at, loop.inputs, loop.outputs, loop)
        (mode, *others) = {one for some in asked for one in some}
        found = None if others else self._modes(equation, mode)
        return None if found is None else SlicedEquation(at, found, (mode,) * len(equation.outputs))

    def _modes(self, equation: Equation, mode: Mode) -> tuple[Mode, ...] | None:
        """Returns the modes of an equation's inputs if it makes a part, or a term of a sum."""
        operands, found = self.operands(equation), None
        if isinstance(mode, int):
            rule = PARTS.get(equation.kind)
            if rule and mode < len(operands.result):
                found = rule(operands, mode)
        elif equation.kind == "broadcast_in_dim" and self._is_zero(equation.inputs[0]):
            return (None,)  # the sum of zeros
        elif equation.kind in SUMS:
            known = [self.known_axis(atom) for atom in equation.inputs]
            found = SUMS[equation.kind](operands, [-1 if k is None else k for k in known])
        if found is None:
            return None
        modes = []
        for atom, one in zip(equation.inputs, _plain(found), strict=True):
            if isinstance(one, int) and not self._has_part(atom, one):
                return None
            is_start = one == SUM and "scatter" in equation.kind
            if is_start and not self._is_zero(atom):
                return None
            modes.append(None if is_start else one)
        return tuple(modes)

    def _has_part(self, atom: Any, axis: int) -> bool:
        is_number = isinstance(atom, int) and atom not in self.state
        return is_number and self.axis(atom) == axis and axis < len(self.shape(atom))

    def _is_zero(self, atom: Any) -> bool:
        """Returns whether a value is all zeros."""
        if not isinstance(atom, int):
            return not np.any(np.asarray(atom.val))
        maker = self._makers.get(atom)
        return (
            maker is not None
            and maker.kind in ("broadcast_in_dim", "convert_element_type")
            and self._is_zero(maker.inputs[0])
        )

    def divisor(self, op: SlicedOp) -> int:
        """Returns a number that the number of parts has to divide."""
        found = 0
        for number, some in op.reads.items():
            found = gcd(found, *(self.shape(number)[m] for m in some if isinstance(m, int)))
        for one in op.equations:
            made = self.program.equations[one.at].outputs
            for number, mode in zip(made, one.outputs, strict=True):
                if isinstance(mode, int):
                    found = gcd(found, self.shape(number)[mode])
            if one.loop is not None:
                body = Analysis(one.loop.body, {})
                found = gcd(found, body.divisor(SlicedOp(one.loop.equations, {})))
        return found

    # ---------------------------------------------------------------- loops

    def _loop(self, at: int) -> Loop | None:
        """Returns how a ``scan`` runs on a part; ``None`` where it stays whole."""
        if at not in self._loops:
            self._loops[at] = self._found_loop(self.program.equations[at])
        return self._loops[at]

    def _found_loop(self, equation: Equation) -> Loop | None:
        params = equation.source.params
        first, carried = private.scan_counts(params)
        body = flatten(private.closed(params["jaxpr"]))
        given: dict[int, int] = {}
        for at, atom in enumerate(equation.inputs):
            axis = self.known_axis(atom)
            is_row = at >= first + carried
            if axis is not None and is_row and axis == 0:
                return None  # it is the loop's own axis
            if axis is not None:
                given[at] = axis - is_row
        if not given or body.constants:
            return None
        analysis, carry = Analysis(body, given), range(first, first + carried)
        for _ in range(_MOST_ROUNDS):
            ends = zip(carry, body.outputs, strict=False)
            axes = {at: analysis.known_axis(atom) for at, atom in ends if at not in given}
            found = {at: axis for at, axis in axes.items() if axis is not None}
            if not found:
                break
            given |= found
            analysis = Analysis(body, given)
        return self._loop_of(equation, analysis, given, first, carried)

    def _loop_of(
        self,
        equation: Equation,
        analysis: Analysis,
        given: Mapping[int, int],
        first: int,
        carried: int,
    ) -> Loop | None:
        body, touched = analysis.program, set(given)
        for one in analysis.program.equations:
            if not touched.isdisjoint(one.reads):
                touched.update(one.outputs)
        made: list[Mode] = []
        wanted: dict[int, set[Mode]] = defaultdict(set)
        for at, atom in enumerate(body.outputs):
            mode: Mode = given.get(first + at) if at < carried else analysis.known_axis(atom)
            if mode is None and isinstance(atom, int) and atom in touched:
                mode = SUM
            made.append(mode)
            if isinstance(atom, int):
                wanted[atom].add(mode)
            elif mode is not None:
                return None
        op = analysis.demanded(range(len(body.equations)), wanted)
        if op is None:
            return None
        inputs: list[Mode] = []
        for at, atom in enumerate(equation.inputs):
            mode = made[at - first] if first <= at < first + carried else given.get(at)
            if op.reads.get(at, frozenset()) - {mode}:
                return None
            if mode == SUM and not self._is_zero(atom):
                return None
            is_row = at >= first + carried
            inputs.append(mode + is_row if isinstance(mode, int) else None)
        outputs = [
            mode + 1 if isinstance(mode, int) and at >= carried else mode
            for at, mode in enumerate(made)
        ]
        return Loop(body, op.equations, tuple(inputs), tuple(outputs))
