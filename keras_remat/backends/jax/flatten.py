"""Flattens a jaxpr into one list of equations over numbered values.

Keras's train step comes as a few hundred calls (``jit``, ``custom_jvp_call``, ``remat`` …) of small
jaxprs. A planner must see through them, so calls are inlined; control flow (``while``, ``scan``,
``cond``) is one equation each and carried whole. A ``remat`` the user wrote is inlined, too, and
values that it names or holds back are read directly: the planner decides now what is recomputed.

Dead equations are dropped and equal ones merged. XLA would do both, and a graph with equations that
will not exist plans for memory that will not be used.

Limits: an equation with an effect (a callback, a debug print) is kept once, in its place. Sharding
constraints of inlined calls are lost; those that are equations of their own are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from keras_remat.backends.jax import private
from keras_remat.backends.jax.kinds import CONVOLUTION, KERNEL_GRADIENT
from keras_remat.backends.xla.fusion import Equation


@dataclass(frozen=True)
class FlatProgram:
    """Holds a jaxpr without calls.

    Args:
        equations: in program order.
        avals: abstract value of every number: first the inputs, then the constants, then what
            equations compute.
        n_inputs: how many numbers are inputs.
        constants: arrays the program closes over; number ``n_inputs + i`` is ``constants[i]``.
        outputs: value numbers or literals.
        shards: number of devices that every value is divided over; empty for one device.
    """

    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    n_inputs: int
    constants: tuple[Any, ...]
    outputs: tuple[Any, ...]
    shards: tuple[int, ...] = ()

    @property
    def n_given(self) -> int:
        """Returns how many numbers are inputs or constants."""
        return self.n_inputs + len(self.constants)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Returns the bytes that one device holds of every value."""
        shards = self.shards or (1,) * len(self.avals)
        return tuple(nbytes(a) // n for a, n in zip(self.avals, shards, strict=True))

    def aval(self, atom: Any) -> Any:
        """Returns the abstract value of a number or literal."""
        return self.avals[atom] if isinstance(atom, int) else atom.aval

    def describe(self, number: int) -> tuple[tuple[int, ...], str]:
        """Returns shape and dtype of a number."""
        aval = self.avals[number]
        return tuple(map(int, aval.shape)), str(aval.dtype)


def nbytes(aval: Any) -> int:
    """Returns the bytes of one value (key arrays included)."""
    return prod(map(int, aval.shape)) * int(aval.dtype.itemsize)


def flatten(closed: Any, *, as_slices: bool = False) -> FlatProgram:
    """Returns a closed jaxpr without calls, dead and duplicate equations.

    Args:
        closed: a ``ClosedJaxpr``.
        as_slices: whether a ``split``, such as the gradient of a concatenation, is written as the
            slices that XLA makes of it. Each slice is then planned on its own.
    """
    avals: list[Any] = [v.aval for v in closed.jaxpr.invars]
    n_inputs = len(avals)
    constant_numbers: dict[int, int] = {}
    constants: dict[int, Any] = {}
    equations: list[Equation] = []
    computed: dict[Any, tuple[int, ...]] = {}  # identity of an equation → numbers of its outputs

    def number(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    def constant(value: Any, aval: Any) -> int:
        if id(value) not in constant_numbers:
            constant_numbers[id(value)] = number(aval)
            constants[constant_numbers[id(value)]] = value
        return constant_numbers[id(value)]

    def walk(closed: Any, arguments: Sequence[Any], scope: str) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        consts = zip(jaxpr.constvars, closed.consts, strict=True)
        env.update((v, constant(c, v.aval)) for v, c in consts)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, private.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            stack = private.name_stack(eqn)
            inner_scope = f"{scope}/{stack}" if scope and stack else scope or stack
            inputs = [read(a) for a in eqn.invars]
            if private.is_identity(eqn, inner_scope):
                env.update(zip(eqn.outvars, inputs, strict=True))
                continue
            called = private.called_jaxpr(eqn, as_slices=as_slices)
            if called is not None:
                env.update(zip(eqn.outvars, walk(called, inputs, inner_scope), strict=True))
                continue
            key = _identity(eqn, inputs)
            if key not in computed:
                computed[key] = tuple(number(v.aval) for v in eqn.outvars)
                effect = private.has_effect(eqn)
                equations.append(
                    Equation(eqn, _kind(eqn), inner_scope, tuple(inputs), computed[key], effect)
                )
            env.update(zip(eqn.outvars, computed[key], strict=True))
        return [read(a) for a in jaxpr.outvars]

    outputs = walk(closed, range(n_inputs), "")
    equations = _drop_dead(equations, outputs)
    return _renumbered(equations, avals, n_inputs, constants, outputs)


def _kind(eqn: Any) -> str:
    """Returns the name of an equation's primitive. The gradient of a convolution's kernel, which
    takes channels for samples, has a name of its own."""
    name = str(eqn.primitive.name)
    return (
        KERNEL_GRADIENT
        if name == CONVOLUTION and eqn.params["dimension_numbers"].lhs_spec[0] != 0
        else name
    )


def _identity(eqn: Any, inputs: Sequence[Any]) -> Any:
    """Returns a key that is equal for equations that compute the same. An equation with an effect,
    or with a parameter that cannot be hashed, gets a key of its own."""
    try:
        parameters = frozenset(eqn.params.items())
    except TypeError:
        return object()
    known = tuple(a if isinstance(a, int) else _literal_identity(a) for a in inputs)
    return object() if private.has_effect(eqn) else (eqn.primitive, parameters, known)


def _literal_identity(literal: Any) -> Any:
    """Returns a key that is equal for literals with the same bits. Printed, they would be rounded,
    and 0.0 is equal to -0.0."""
    aval = literal.aval
    return "literal", str(aval), np.asarray(literal.val, aval.dtype).tobytes()


def _drop_dead(equations: list[Equation], outputs: list[Any]) -> list[Equation]:
    """Drops equations without effect that no output needs."""
    wanted = {a for a in outputs if isinstance(a, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.has_effect or not wanted.isdisjoint(equation.outputs):
            wanted.update(equation.reads)
            kept.append(equation)
    return kept[::-1]


def _renumbered(
    equations: list[Equation],
    avals: list[Any],
    n_inputs: int,
    constants: dict[int, Any],
    outputs: list[Any],
) -> FlatProgram:
    """Numbers inputs, then used constants, then results, without gaps."""
    used = {a for e in equations for a in e.reads} | {a for a in outputs if isinstance(a, int)}
    given = [*range(n_inputs), *(number for number in constants if number in used)]
    old = [*given, *(number for equation in equations for number in equation.outputs)]
    new = {number: at for at, number in enumerate(old)}

    def renumbered(atoms: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(new[a] if isinstance(a, int) else a for a in atoms)

    return FlatProgram(
        tuple(
            replace(e, inputs=renumbered(e.inputs), outputs=renumbered(e.outputs))
            for e in equations
        ),
        tuple(avals[number] for number in old),
        n_inputs,
        tuple(constants[number] for number in given[n_inputs:]),
        renumbered(outputs),
    )
