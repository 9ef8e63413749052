"""Which values XLA will put into memory, and the equations behind each: the ops a plan should decide about.

An equation list is the wrong granularity under XLA. Elementwise equations are fused into their readers and copied into
several of them when that is cheap, so most intermediate values never exist, and keeping or recomputing one is no decision at all.
This module cuts the program into *clusters*: one value (or the values of one equation) that will exist, with the chain of equations
that leads to it from other values that exist. A chain that two clusters need stands in both, as XLA's fusion copies it.

The rule follows XLA's instruction fusion (``InstructionFusion::ShouldFuse``, ``EffectivelyAtMostUnary``, ``IsExpensive`` in
``xla/service/instruction_fusion.cc``). A value does *not* exist when

* its equation is elementwise, a broadcast, or a view, and all its readers can take it into their loop (elementwise ones and reductions; a
  matrix product or convolution reads memory, except through a view), and
* it has one reader, or it is cheap and comes from at most one value of about its own size.

Why a rule and not the compiled module: a plan changes what is fused, so the module of the plain step does not tell; and reading it
would cost one more compilation. What the rule gets wrong, the compiled peak corrects (:mod:`keras_remat.backends.jax.calibrate`).

Known limits: XLA:GPU also copies some expensive chains, and emits several outputs from one kernel; neither is modelled.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from keras_remat.backends.jax.flatten import Equation, FlatProgram, nbytes

VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "transpose", "stop_gradient", "random_wrap", "random_unwrap"}
)
"""Equations whose result is the same bytes; a transposition is one to a matrix product, which reads either layout."""

CHEAP = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "div", "eq", "floor", "ge",
        "gt", "imag", "integer_pow", "iota", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad",
        "real", "reduce_precision", "rem", "rev", "round", "select_n", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "slice", "square", "sub", "xor", "bitcast_convert_type", "nextafter", "population_count",
    }
)  # fmt: skip
"""Fusible, and copied into every reader."""

EXPENSIVE = frozenset(
    {
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc",
        "exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
"""Fusible, but computed once per reader only when there is one reader."""

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"})
"""They take their input into their own loop, but their result exists."""

RANDOM = frozenset({"random_bits", "threefry2x32"})
"""Fusible like an expensive one. On CPU each is a loop over several buffers of the result's size."""

FUSIBLE = CHEAP | EXPENSIVE | RANDOM | VIEWS
ELEMENTWISE = (CHEAP | EXPENSIVE) - {"broadcast_in_dim", "iota", "pad", "rev", "slice"}
MAX_COPIED_CHAIN = 48
"""Longest chain that is copied into several readers; XLA limits fusions by their operand count, this by length."""


@dataclass(frozen=True)
class Cluster:
    """Equations that run as one.

    Args:
        equations: indices into the program, ascending; the last one computes ``outputs``.
        reads: numbers of the existing values and program inputs it reads, ascending.
        outputs: numbers of the values it computes.
        may_reuse: those of ``reads`` that the compiler may overwrite with an output of the same size.
    """

    equations: tuple[int, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    may_reuse: tuple[int, ...]


@dataclass
class _Chain:
    """What stands behind a value that does not exist."""

    equations: frozenset[int]
    leaves: frozenset[int]
    expensive: bool


def clusters(program: FlatProgram, sizes: list[int] | None = None) -> list[Cluster]:
    """Returns the clusters of a program, in the order of their last equations; together they compute every output.

    Args:
        program: the equations.
        sizes: bytes of every number to decide by, if not the program's own: those of the same program for another batch size.
    """
    producer = {out: at for at, equation in enumerate(program.equations) for out in equation.outputs}
    readers: dict[int, list[int]] = defaultdict(list)
    for at, equation in enumerate(program.equations):
        for number in dict.fromkeys(equation.reads):
            readers[number].append(at)
    kept = {a for a in program.outputs if isinstance(a, int)}
    size = [nbytes(aval) for aval in program.avals] if sizes is None else sizes
    in_memory = _read_from_memory(program, readers, kept)

    chains: dict[int, _Chain] = {}
    result: list[Cluster] = []
    for at, equation in enumerate(program.equations):
        chain = _chain_behind(at, equation, chains)
        out = equation.outputs[0]
        if equation.kind in VIEWS:
            absent = out not in kept
        else:
            absent = (
                equation.kind in FUSIBLE
                and len(equation.outputs) == 1
                and not equation.has_effect
                and out not in in_memory
                and (_reader_count(out, readers, program) <= 1 or _copied(chain, size[out], size, producer))
            )
        if absent:
            chains[out] = chain
        else:
            result.append(_cluster(program, equation, chain, producer, size))
    return result


def _read_from_memory(program: FlatProgram, readers: dict[int, list[int]], kept: set[int]) -> set[int]:
    """Numbers of the values that some reader, directly or through views, needs in memory; program outputs among them."""
    needed: set[int] = set(kept)
    for equation in reversed(program.equations):
        for number in equation.reads:
            if equation.kind in VIEWS:
                if any(out in needed for out in equation.outputs):
                    needed.add(number)
            elif equation.kind not in FUSIBLE and equation.kind not in REDUCTIONS:
                needed.add(number)
    return needed


def _reader_count(number: int, readers: dict[int, list[int]], program: FlatProgram) -> int:
    """How many equations read a value, directly or through views."""
    total = 0
    for at in readers[number]:
        equation = program.equations[at]
        total += _reader_count(equation.outputs[0], readers, program) if equation.kind in VIEWS else 1
    return total


def _chain_behind(at: int, equation: Equation, chains: dict[int, _Chain]) -> _Chain:
    """The equations that must run with this one because their values do not exist, and the values they start from."""
    equations, leaves, expensive = {at}, set(), equation.kind in EXPENSIVE | RANDOM
    for number in equation.reads:
        behind = chains.get(number)
        if behind is None:
            leaves.add(number)
        else:
            equations |= behind.equations
            leaves |= behind.leaves
            expensive |= behind.expensive
    return _Chain(frozenset(equations), frozenset(leaves), expensive)


def _copied(chain: _Chain, out_bytes: int, size: list[int], producer: dict[int, int]) -> bool:
    """Whether XLA computes a value with several readers in each of them."""
    large = [leaf for leaf in chain.leaves if leaf in producer and size[leaf] * 8 >= out_bytes]
    return not chain.expensive and len(large) <= 1 and len(chain.equations) <= MAX_COPIED_CHAIN


def _cluster(program: FlatProgram, root: Equation, chain: _Chain, producer: dict[int, int], size: list[int]) -> Cluster:
    equations = tuple(sorted(chain.equations))
    reusable: set[int] = set()
    if root.kind in ELEMENTWISE:
        here = {out: at for at in equations for out in program.equations[at].outputs}
        stack, blocked = [equations[-1]], set()
        while stack:
            for number in program.equations[stack.pop()].reads:
                if number not in here:
                    reusable.add(number)
                elif program.equations[here[number]].kind in ELEMENTWISE | {"reshape"}:
                    stack.append(here[number])
                else:
                    blocked |= _leaves_below(program, here, here[number])
        reusable = {n for n in reusable - blocked if n in producer and size[n] == size[root.outputs[0]]}
    return Cluster(equations, tuple(sorted(chain.leaves)), root.outputs, tuple(sorted(reusable)))


def _leaves_below(program: FlatProgram, here: dict[int, int], at: int) -> set[int]:
    """Values from outside that one equation of a cluster is computed from."""
    leaves: set[int] = set()
    stack = [at]
    while stack:
        for number in program.equations[stack.pop()].reads:
            if number in here:
                stack.append(here[number])
            else:
                leaves.add(number)
    return leaves
