"""Writes a traced JAX step with some of its ops in slices.

The result is the program of a :class:`~keras_remat.core.slices.SlicedGraph`.
:mod:`keras_remat.backends.xla.sliced` does what is the same in every framework. Slicing adds these
equations to a program:

* a cut is ``slice``;
* a join is ``dynamic_update_slice`` into a buffer, and its first part begins the buffer by ``pad``:
  an array of zeros would exist from the step's very beginning;
* a sum is ``add``, in the order of the parts;
* a part of random bits counts on from where the part before ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import jax

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import FlatProgram
from keras_remat.backends.jax.kinds import SCAN
from keras_remat.backends.jax.slice_analysis import Analysis, Loop
from keras_remat.backends.jax.slice_rules import RANDOM, part_params
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.slice_modes import Mode
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.sliced import ProgramSlicer, ProgramWriter, SlicedEquation
from keras_remat.core.slices import Role, SlicedGraph


class StepSlicer(ProgramSlicer[JaxTracedStep]):
    """Rewrites one traced step (:class:`keras_remat.backends.base.Slicer`)."""

    @cached_property
    def analysis(self) -> Analysis:
        """Returns the axes of the step's values."""
        program, n_state = self.step.program, len(jax.tree.leaves(self.step.state_specs))
        batch = range(n_state, program.n_inputs)
        given = {number: 0 for number in batch if program.avals[number].shape}
        return Analysis(program, given, range(n_state))

    def writer(self, sliced: SlicedGraph) -> _Writer:
        return _Writer(self, sliced)


class _Writer(ProgramWriter[JaxTracedStep]):
    """Writes the program of one sliced graph."""

    def __init__(self, slicer: StepSlicer, sliced: SlicedGraph):
        super().__init__(slicer, sliced)
        self._avals = list(self._step.program.avals)
        self._sources: dict[Any, Any] = {}

    def program(self) -> FlatProgram:
        return replace(
            self._step.program, equations=tuple(self.equations), avals=tuple(self._avals)
        )

    def new_number(self, like: int, mode: Mode) -> int:
        self._avals.append(part_aval(self._avals[like], mode, self._count))
        return len(self._avals) - 1

    def part_equations(
        self, one: SlicedEquation, part: int, inputs: Sequence[Any], outputs: Sequence[int]
    ) -> list[Equation]:
        equation, source = self._step.program.equations[one.at], self._source(one, part)
        return [replace(equation, source=source, inputs=tuple(inputs), outputs=tuple(outputs))]

    def _source(self, one: SlicedEquation, part: int) -> Any:
        """Returns the jaxpr equation of a part; all parts share one, except of random bits."""
        key = one, part if _draws(self._step.program, one) else 0
        if key not in self._sources:
            self._sources[key] = part_source(self._step.program, one, self._count, key[1])
        return self._sources[key]

    def glue(
        self, role: Role, number: int, part: int, inputs: tuple[int, ...]
    ) -> tuple[Any, str, tuple[Any, ...]]:
        aval, axis = self._avals[number], self._axis(number)
        if role == "sum":
            return private.sum_equation(aval), "add", inputs
        if role == "start":
            return private.nothing_equation(aval), "broadcast_in_dim", inputs
        piece, rows = part_aval(aval, axis, self._count), aval.shape[axis] // self._count
        start, stop = [0] * len(aval.shape), list(aval.shape)
        start[axis], stop[axis] = part * rows, (part + 1) * rows
        if role == "cut":
            return private.cut_equation(aval, start, stop), "slice", inputs
        if part == 0:
            return private.pad_equation(piece, aval), "pad", inputs[1:]
        return private.join_equation(aval, piece, start), "dynamic_update_slice", inputs


def part_aval(aval: Any, mode: Mode, count: int) -> Any:
    """Returns the aval of one of ``count`` parts."""
    if not isinstance(mode, int):
        return aval
    shape = list(aval.shape)
    shape[mode] //= count
    return aval.update(shape=tuple(shape))


def _draws(program: FlatProgram, one: SlicedEquation) -> bool:
    """Returns whether a part of an equation draws its own part of random bits, also in the body of
    a loop."""
    if one.loop is not None:
        return any(_draws(one.loop.body, inner) for inner in one.loop.equations)
    return program.equations[one.at].kind == RANDOM and not one.is_whole


def part_source(program: FlatProgram, one: SlicedEquation, count: int, part: int) -> Any:
    """Returns the jaxpr equation of one part of an equation.

    Args:
        program: the program of the equation.
        one: how the equation runs on a part.
        count: how many parts there are.
        part: index of the part.
    """
    equation = program.equations[one.at]
    if one.is_whole:
        return equation.source

    def avals_of(atoms: Sequence[Any], modes: Sequence[Mode]) -> list[Any]:
        both = zip(atoms, modes, strict=True)
        return [part_aval(program.aval(atom), mode, count) for atom, mode in both]

    given, made = avals_of(equation.inputs, one.inputs), avals_of(equation.outputs, one.outputs)
    if equation.kind == RANDOM:
        return private.bits_equation(given[0], made[0], part * prod(made[0].shape))
    if equation.kind == SCAN and one.loop is not None:
        params = equation.source.params | {"jaxpr": _part_of_body(one.loop, equation, count, part)}
    else:
        params = part_params(equation, one.inputs, given, made[0].shape)
    return private.with_shapes(equation.source, params, given, made)


def _part_of_body(loop: Loop, equation: Equation, count: int, part: int) -> Any:
    """Returns the body of a loop for one part."""
    body, params = loop.body, equation.source.params
    sources = {one.at: part_source(body, one, count, part) for one in loop.equations}
    first_row = sum(private.scan_counts(params))

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
