"""Finds the values XLA will put into memory, and the equations behind each.

These are the ops a plan should decide about. An equation list is the wrong granularity under XLA.
Elementwise equations are fused into their readers and copied into several of them when that is
cheap, so most intermediate values never exist, and keeping or recomputing one is no decision at
all. This module cuts the program into *clusters*. A cluster is one value (or the values of one
equation) that will exist, with the chain of equations that leads to it from other values that
exist. A chain that two clusters need stands in both, as XLA's fusion copies it.

The rule follows XLA's instruction fusion (``InstructionFusion::ShouldFuse``,
``EffectivelyAtMostUnary``, ``IsExpensive`` in ``xla/service/instruction_fusion.cc``). A value does
*not* exist when

* its equation is elementwise, a broadcast, or a view, and all its readers can take it into their
  loop (elementwise ones and reductions; a matrix product or convolution reads memory, except
  through a view), and
* it has one reader, or it comes from at most one value of about its own size and is cheap, or its
  readers run as one because they end in the same equation.

XLA also takes a value that comes from two large ones into such readers. In this model it exists,
and a plan may hold it. Otherwise all values it is made of would have to exist when its readers run.
An LSTM's plan for 0.35 of plain's bytes needs that (``benchmarks/cards.py``).

Why a rule and not the compiled module: a plan changes what is fused, so the module of the plain
step does not show it, and reading that module would cost one more compilation. The compiled peak
corrects the rule's errors (:mod:`keras_remat.backends.xla.compiled_memory`).

XLA:GPU takes more readers into one kernel than XLA:CPU (pooling and concatenation), and its
libraries return tuples. The framework's :class:`Kinds` for a GPU hold these differences.

Known limits: XLA:GPU also copies some expensive chains, and emits several outputs from one kernel;
neither is modelled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from keras_remat.backends.micro_batches import SEPARATION

HELD_BYTES = 65536
"""Smallest value that a barrier holds, in bytes. Keeping what a smaller value is made of costs no
more than this."""


@dataclass(frozen=True, slots=True)
class Equation:
    """Describes one operation of a flat program; it is pure unless ``has_effect``.

    Args:
        source: the framework's object from which the equation is written again.
        kind: the framework's name of the operation.
        scope: the scopes it was traced under, outermost first.
        inputs: numbers of values, and literals (anything that is no int).
        outputs: numbers of the values it computes; empty if it only has an effect.
        has_effect: whether it does more than compute its outputs.
    """

    source: Any
    kind: str
    scope: str
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    has_effect: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """Returns the numbered inputs, literals left out."""
        return tuple(a for a in self.inputs if isinstance(a, int))

    @property
    def separates(self) -> bool:
        """Returns whether it only makes a micro-batch wait for the one before. It does not carry a
        phase from the one to the other."""
        return SEPARATION in self.scope


class Program(Protocol):
    """Holds equations over numbered values; the first numbers are the program's inputs."""

    @property
    def equations(self) -> Sequence[Equation]:
        """Returns the equations in an order in which they can run."""

    @property
    def outputs(self) -> Sequence[Any]:
        """Returns the outputs: numbers and literals."""

    @property
    def n_given(self) -> int:
        """Returns how many inputs there are; their numbers are 0 to ``n_given − 1``."""

    @property
    def sizes(self) -> Sequence[int]:
        """Returns the bytes of every value, by number."""

    def describe(self, number: int) -> tuple[tuple[int, ...] | None, str]:
        """Returns shape and dtype of a number."""


@dataclass(frozen=True)
class Kinds:
    """Names the operations of a framework that the rule knows; all others read and write memory.

    Args:
        views: their result is the same bytes. A transposition counts as a view for a matrix
            product, which reads either layout.
        cheap: fusible, and copied into every reader.
        expensive: fusible, but only where there is one reader: XLA does not copy them into several.
        reductions: they take their input into their own loop; their result exists.
        random: fusible like an expensive one. On CPU each is a loop over several buffers of the
            result's size.
        moving: those of ``cheap`` that do not compute an element from the same place of an equally
            large input.
        reshapes: those of ``views`` that move nothing.
        transposing: XLA:CPU makes a transposed copy of their first input.
        in_tuples: their result comes in a tuple with scratch memory, as from a library's kernel on
            a GPU. No reader takes over its buffer.
        cut: those of ``cheap`` that take a part of their input. If a product runs before the part
            is read, the part exists: a barrier holds it, and its source is let go.
        joining: those of ``cheap`` that concatenate their inputs. They read no more than they
            write, however many inputs they have.
        pooling_gradients: gradient of pooling → position of the image among its inputs. What
            XLA:GPU computes from the image alone can be larger than the gradient, and start long
            before it.
    """

    views: frozenset[str]
    cheap: frozenset[str]
    expensive: frozenset[str]
    reductions: frozenset[str]
    random: frozenset[str]
    moving: frozenset[str]
    reshapes: frozenset[str]
    transposing: frozenset[str] = frozenset()
    in_tuples: frozenset[str] = frozenset()
    cut: frozenset[str] = frozenset()
    joining: frozenset[str] = frozenset()
    pooling_gradients: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def fusible(self) -> frozenset[str]:
        """Returns the operations that a reader can take into its own loop."""
        return self.cheap | self.expensive | self.random | self.views

    @cached_property
    def elementwise(self) -> frozenset[str]:
        """Returns the operations that compute each element from one element per operand."""
        return (self.cheap | self.expensive) - self.moving


def on_gpu(
    kinds: Kinds,
    *,
    sigmoids: frozenset[str],
    joining: frozenset[str],
    pooling: frozenset[str],
    pooling_gradients: Mapping[str, int],
    in_tuples: frozenset[str],
    cut: frozenset[str],
) -> Kinds:
    """Returns the framework's names, grouped by what XLA:GPU does to them.

    Pooling and concatenation take their inputs into their own loops. XLA:GPU computes a
    concatenation again in each reader that can take it. It does the same with a sigmoid, from which
    swish makes its result and its gradient. On an H100 with JAX (``benchmarks/cards.py``),
    DenseNet121's plan for half took 57 % less than predicted before this rule, and 3 % less since;
    EfficientNetB0's plan for 0.35 took 10 % and 3 % less. cuDNN reads an image in the layout it has
    and returns a tuple. The gradient of pooling becomes a search for the largest elements of the
    forward image; the search needs no gradient and could start at any time.

    Args:
        kinds: the names, grouped by what XLA:CPU does to them.
        sigmoids: logistic functions.
        joining: concatenations.
        pooling: forward pooling, and gradients of an average.
        pooling_gradients: see :class:`Kinds`.
        in_tuples: calls of cuDNN.
        cut: see :class:`Kinds`.
    """
    again = sigmoids | joining
    return replace(
        kinds,
        cheap=kinds.cheap | again,
        expensive=kinds.expensive - again,
        reductions=kinds.reductions | pooling | pooling_gradients.keys(),
        transposing=frozenset(),
        in_tuples=in_tuples,
        moving=kinds.moving | joining,
        cut=cut,
        joining=joining,
        pooling_gradients=pooling_gradients,
    )


MAX_COPIED_CHAIN = 48
"""Longest chain, in equations, that is copied into several readers. XLA limits fusions by their
operand count, this model by length."""


@dataclass(frozen=True)
class Cluster:
    """Holds equations that run as one.

    Args:
        equations: indices into the program, ascending. The last one computes ``outputs``, or only
            has an effect.
        reads: numbers of the program inputs and existing values it reads, ascending.
        outputs: numbers of the values it computes.
        may_reuse: those of ``reads`` that the compiler may overwrite with an output of the same
            size.
    """

    equations: tuple[int, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    may_reuse: tuple[int, ...]


@dataclass(frozen=True)
class _Chain:
    """Holds the equations behind a value that does not exist.

    Args:
        equations: indices into the program.
        leaves: numbers of the existing values they start from.
        moved: those of ``leaves`` whose elements move to another place.
        expensive: whether one of the equations is expensive.
        joins: whether one of the equations joins values.
    """

    equations: frozenset[int]
    leaves: frozenset[int]
    moved: frozenset[int]
    expensive: bool
    joins: bool


def clusters(
    program: Program,
    kinds: Kinds,
    sizes: Sequence[int] | None = None,
    copied: Collection[int] = (),
    along: Collection[int] = (),
) -> list[Cluster]:
    """Returns the clusters of a program, in the order of their last equations; together they
    compute every output.

    Args:
        program: the equations.
        kinds: the framework's names.
        sizes: bytes of every value to decide by, those of the same program at another batch size;
            ``None`` for the program's own.
        copied: numbers of values that are read only as copies. XLA writes such a copy from what the
            value is made of, which stays in memory until all copies are written.
        along: numbers of values that every reader computes for itself where it can, even results of
            reductions.
    """
    producer = {out: at for at, e in enumerate(program.equations) for out in e.outputs}
    kept = {a for a in program.outputs if isinstance(a, int)}
    size = program.sizes if sizes is None else sizes
    in_memory = _read_from_memory(program, kinds, kept) | _waiting_parts(program, kinds, size)
    beside = _ends(program, kinds, set(range(len(size))))  # as if all values existed
    ends = _ends(program, kinds, in_memory)

    chains, result = dict[int, _Chain](), list[Cluster]()
    for at, equation in enumerate(program.equations):
        chain = _chain_behind(at, equation, kinds, chains)
        out = next(iter(equation.outputs), -1)
        if out in along and out not in in_memory:
            absent, chain = True, replace(chain, expensive=False)
        elif equation.kind in kinds.views:
            absent = out not in kept
        else:
            absent = _can_be_absent(equation, kinds, in_memory) and (
                len(beside[out]) <= 1
                or (
                    (len(ends[out]) <= 1 or _is_cheap(chain))
                    and _is_of_one(chain, size[out], size, producer)
                )
            )
        if absent:
            chains[out] = chain
        else:
            reusable = chain.leaves - chain.moved if equation.kind in kinds.elementwise else ()
            may_reuse = tuple(
                n
                for n in sorted(reusable)
                if n in producer
                and size[n] == size[out]
                and (out in copied or not _in_a_tuple(program.equations[producer[n]], kinds))
            )
            run, leaves = sorted(chain.equations), sorted(chain.leaves)
            result.append(Cluster(tuple(run), tuple(leaves), equation.outputs, may_reuse))
    return result


def _in_a_tuple(equation: Equation, kinds: Kinds) -> bool:
    """Returns whether an output is read out of a tuple. The heap simulator lets a buffer be taken
    over only if the reader reads the defining instruction itself
    (``xla/service/heap_simulator``)."""
    return equation.kind in kinds.in_tuples or (bool(kinds.in_tuples) and len(equation.outputs) > 1)


def _read_from_memory(program: Program, kinds: Kinds, kept: set[int]) -> set[int]:
    """Returns the numbers of the program outputs, and of the values that some reader needs in
    memory, directly or through views."""
    needed: set[int] = set(kept)
    for equation in reversed(program.equations):
        for number in equation.reads:
            if equation.kind in kinds.views:
                if any(out in needed for out in equation.outputs):
                    needed.add(number)
            elif equation.kind not in kinds.fusible and equation.kind not in kinds.reductions:
                needed.add(number)
    return needed


def _waiting_parts(program: Program, kinds: Kinds, size: Sequence[int]) -> set[int]:
    """Returns the numbers of large parts of computed values that are still to be read after a
    product or the like."""
    reads_memory = [
        at
        for at, e in enumerate(program.equations)
        if e.kind not in kinds.fusible and e.kind not in kinds.reductions
    ]
    last = {number: at for at, e in enumerate(program.equations) for number in e.reads}
    found = set()
    for at, equation in enumerate(program.equations):
        if equation.kind in kinds.cut and min(equation.reads, default=0) >= program.n_given:
            (part,) = equation.outputs
            if size[part] < HELD_BYTES:
                continue
            after = bisect_right(reads_memory, at)
            if after < len(reads_memory) and reads_memory[after] < last.get(part, at):
                found.add(part)
    return found


def _can_be_absent(equation: Equation, kinds: Kinds, in_memory: set[int]) -> bool:
    """Returns whether readers that run as one can take an equation into their loop."""
    return (
        equation.kind in kinds.fusible
        and len(equation.outputs) == 1
        and not equation.has_effect
        and equation.outputs[0] not in in_memory
    )


def _ends(program: Program, kinds: Kinds, in_memory: set[int]) -> dict[int, set[int]]:
    """Returns value → equations in which its readers end. A view ends where its result does. So
    does an equation that can be absent and whose readers all end in one equation. All others end in
    themselves."""
    ends: dict[int, set[int]] = defaultdict(set)
    for at, equation in reversed(list(enumerate(program.equations))):
        found = {at}
        if equation.kind in kinds.views:
            found = set().union(*(ends[out] for out in equation.outputs))
        elif _can_be_absent(equation, kinds, in_memory) and len(ends[equation.outputs[0]]) == 1:
            found = ends[equation.outputs[0]]
        for number in equation.reads:
            ends[number] |= found
    return ends


def _chain_behind(at: int, equation: Equation, kinds: Kinds, chains: dict[int, _Chain]) -> _Chain:
    """Returns the equations that must run with this one because their values do not exist, and the
    values they start from."""
    behind = [chains[number] for number in equation.reads if number in chains]
    leaves = {number for number in equation.reads if number not in chains}
    leaves.update(*(chain.leaves for chain in behind))
    stays = equation.kind in kinds.elementwise | kinds.reshapes
    return _Chain(
        frozenset({at}.union(*(chain.equations for chain in behind))),
        frozenset(leaves),
        frozenset().union(*(chain.moved for chain in behind)) if stays else frozenset(leaves),
        equation.kind in kinds.expensive | kinds.random or any(c.expensive for c in behind),
        equation.kind in kinds.joining or any(c.joins for c in behind),
    )


def _is_cheap(chain: _Chain) -> bool:
    """Returns whether XLA computes a chain again in each of several readers."""
    return not chain.expensive and len(chain.equations) <= MAX_COPIED_CHAIN


def _is_of_one(
    chain: _Chain, out_bytes: int, size: Sequence[int], producer: dict[int, int]
) -> bool:
    """Returns whether a value comes from at most one value of about its own size. Values that are
    joined count as one."""
    large = [leaf for leaf in chain.leaves if leaf in producer and size[leaf] * 8 >= out_bytes]
    return len(large) <= 1 or (chain.joins and sum(size[leaf] for leaf in large) <= out_bytes)
