"""Describes what one train step computes: ops and the values between them, in no framework's terms.

Ops stand in a topological order, which is the default order. A value without a producer is a step
input (a weight, an optimizer slot, the batch); its bytes are part of the profile's resident bytes.
Invariants, checked in the constructor:

* G1 an op reads only step inputs and values of ops with lower ids; ``after`` holds lower ids only.
* G2 every value has at most one producer, and ``Value.producer`` agrees with ``Op.outputs``.
* G3 no op writes its inputs.

Two more are promises of the backend that made the graph: G4 there are no views (a view is folded
into its readers, which then read the owner of the storage); G5 an op with an effect or with hidden
random state is not recomputable.

The running example of this package (bytes 4 1 6 1 2; ``a → b → c → d``, and ``e`` reads ``a`` and
``d``):

>>> g = chain_example()
>>> [op.name for op in g.ops], [v.nbytes for v in g.values], g.outputs
(['a', 'b', 'c', 'd', 'e'], [4, 1, 6, 1, 2], (4,))
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from keras_remat.errors import InvalidProblemError

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)


def is_int(number: object) -> TypeGuard[int]:
    """Returns whether something is an int and no bool."""
    return isinstance(number, int) and not isinstance(number, bool)


def check_bytes(nbytes: object, field: str) -> None:
    """Raises :class:`InvalidProblemError`, which names the field, for a wrong size."""
    if not is_int(nbytes) or nbytes < 0:
        raise InvalidProblemError(
            f"bytes must be an int of at least 0, got {nbytes!r}", field=field, value=nbytes
        )


@dataclass(frozen=True, slots=True)
class Value:
    """Describes one tensor.

    Args:
        id: its index in ``Graph.values``.
        name: for people; not unique by contract.
        nbytes: bytes of its buffer.
        shape: dimensions, or ``None`` when unknown.
        dtype: framework-neutral dtype name such as ``"float32"``, or ``None`` when unknown.
        producer: id of the op that computes it, or ``None`` for a step input.
    """

    id: int
    name: str
    nbytes: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    producer: int | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True, slots=True)
class Op:
    """Describes one executed operation.

    Args:
        id: its index in ``Graph.ops``.
        name: for people.
        kind: the framework's operation type, e.g. ``"Conv2D"``.
        inputs: ids of the values it reads.
        outputs: ids of the values it computes.
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        recomputable: whether it may run more than once in a step.
        after: ids of ops that must precede this one without a value between them.
        may_reuse: the inputs whose buffer the op takes over for an output of the same size, where
            the op is their last reader; the first possible input is taken.
    """

    id: int
    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: str = FORWARD
    recomputable: bool = True
    after: tuple[int, ...] = ()
    may_reuse: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("inputs", "outputs", "after", "may_reuse"):
            object.__setattr__(self, field, tuple(getattr(self, field)))


@dataclass(frozen=True)
class Graph:
    """Holds the ops in default (topological) order, their values, and the values alive at the end.

    Args:
        ops: every op; ``ops[i].id == i``.
        values: every value; ``values[i].id == i``.
        outputs: ids of the values that are alive when the step ends.

    Raises:
        InvalidProblemError: an invariant G1 to G3 is broken; the message names the field.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in ("ops", "values", "outputs"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        self._check_values()
        self._check_ops()
        for at, value_id in enumerate(self.outputs):
            self._check_value_id(value_id, f"outputs[{at}]")

    def _check_value_id(self, value_id: int, field: str) -> None:
        if not is_int(value_id) or not 0 <= value_id < len(self.values):
            raise InvalidProblemError(
                f"unknown value id {value_id!r}; an id is an int from 0, and there are "
                f"{len(self.values)} values",
                field=field,
                value=value_id,
            )

    def _check_values(self) -> None:
        for at, value in enumerate(self.values):
            if not is_int(value.id) or value.id != at:
                raise InvalidProblemError(
                    f"id {value.id!r} at position {at}", field=f"values[{at}].id", value=value.id
                )
            check_bytes(value.nbytes, f"values[{at}].bytes")
            if value.shape is not None and not all(
                is_int(size) and size >= 0 for size in value.shape
            ):
                raise InvalidProblemError(
                    f"dimensions must be ints of at least 0, got {value.shape!r}; an unknown "
                    "shape is None",
                    field=f"values[{at}].shape",
                    value=value.shape,
                )

    def _check_ops(self) -> None:
        produced: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            if not is_int(op.id) or op.id != at:
                raise InvalidProblemError(
                    f"id {op.id!r} at position {at}", field=f"ops[{at}].id", value=op.id
                )
            self._check_op(op, produced)
        for value in self.values:
            if value.producer != produced.get(value.id):
                raise InvalidProblemError(
                    f"G2: value {value.id} names producer {value.producer}, but the ops say "
                    f"{produced.get(value.id)}",
                    field=f"values[{value.id}].producer",
                    value=value.producer,
                )

    def _check_op(self, op: Op, produced: dict[int, int]) -> None:
        """Raises if something is wrong with an op.

        Args:
            produced: value → op that computes it; the op's outputs are added.
        """

        def wrong(field: str, value: object, message: str) -> InvalidProblemError:
            return InvalidProblemError(message, field=f"ops[{op.id}].{field}", value=value)

        if op.phase not in PHASES:
            message = f"phase must be one of {', '.join(PHASES)}, got {op.phase!r}"
            raise wrong("phase", op.phase, message)
        if not isinstance(op.recomputable, bool):
            message = f"must be True or False, got {op.recomputable!r}"
            raise wrong("recomputable", op.recomputable, message)
        for value_id in op.inputs:
            self._check_value_id(value_id, f"ops[{op.id}].inputs")
            producer = self.values[value_id].producer
            if producer is not None and producer >= op.id:
                message = (
                    f"G1: op {op.name!r} reads value {value_id}, which op {producer} computes only "
                    "later (a cycle, or a list that is not in topological order)"
                )
                raise wrong("inputs", value_id, message)
        for value_id in op.outputs:
            self._check_value_id(value_id, f"ops[{op.id}].outputs")
            if value_id in op.inputs:
                raise wrong("outputs", value_id, f"G3: op {op.name!r} writes its input")
            if value_id in produced:
                makers = f"ops {produced[value_id]} and {op.id}"
                raise wrong(
                    "outputs", value_id, f"G2: value {value_id} has two producers, {makers}"
                )
            produced[value_id] = op.id
        for earlier in op.after:
            if not is_int(earlier) or not 0 <= earlier < op.id:
                raise wrong("after", earlier, f"G1: op {op.id} cannot come after op {earlier!r}")
        if not set(op.may_reuse) <= set(op.inputs):
            message = f"may_reuse {op.may_reuse} is no subset of inputs {op.inputs}"
            raise wrong("may_reuse", op.may_reuse, message)

    def has_ops_of(self, other: Graph) -> bool:
        """Returns whether both graphs have the same ops on the same values, of whatever sizes.

        An order of one is then an order of the other.
        """
        return len(self.ops) == len(other.ops) and all(
            (a.kind, a.inputs, a.outputs, a.after, a.recomputable)
            == (b.kind, b.inputs, b.outputs, b.after, b.recomputable)
            for a, b in zip(self.ops, other.ops, strict=True)
        )

    def maker(self, value_id: int) -> int:
        """Returns the op that computes a value.

        Raises:
            LookupError: the value is a step input, which no op computes.
        """
        producer = self.values[value_id].producer
        if producer is None:
            raise LookupError(f"value {value_id} is a step input; no op computes it")
        return producer

    def producers(self, op_id: int) -> set[int]:
        """Returns the ops that compute what an op reads."""
        makers = (self.values[v].producer for v in self.ops[op_id].inputs)
        return {maker for maker in makers if maker is not None}

    @cached_property
    def input_bytes(self) -> int:
        """Returns the bytes of all values without a producer.

        These are the batch, and the variables where a backend's step takes them as inputs.
        """
        return sum(value.nbytes for value in self.values if value.producer is None)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Returns for every value the ids of the ops that read it, ascending, each once."""
        readers: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value_id in dict.fromkeys(op.inputs):
                readers[value_id].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Returns for every value the ids of the values that its readers compute, each once."""
        return tuple(
            tuple(dict.fromkeys(child for i in readers for child in self.ops[i].outputs))
            for readers in self.readers
        )

    @cached_property
    def needed(self) -> frozenset[int]:
        """Returns ids of the ops that every schedule contains.

        These are the ops with an effect (not recomputable), the producers of outputs, and all ops
        they read from, transitively.
        """
        stack = [op.id for op in self.ops if not op.recomputable]
        stack += [p for v in self.outputs if (p := self.values[v].producer) is not None]
        seen: set[int] = set()
        while stack:
            op_id = stack.pop()
            if op_id not in seen:
                seen.add(op_id)
                stack += self.producers(op_id)
        return frozenset(seen)

    @cached_property
    def fingerprint(self) -> str:
        """Returns the sha256 over kinds, shapes, dtypes, bytes and edges; names do not count."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(repr((value.nbytes, value.shape, value.dtype, value.producer)).encode())
        for op in self.ops:
            edges = op.inputs, op.outputs, op.recomputable, op.after, tuple(sorted(op.may_reuse))
            digest.update(repr((op.kind, *edges)).encode())
        digest.update(repr(self.outputs).encode())
        return digest.hexdigest()


def reused_bytes(op: Op, values: tuple[Value, ...], available: set[int] | frozenset[int]) -> int:
    """Returns bytes of ``op``'s outputs that take over the buffer of an input in ``available``.

    Every output takes at most one buffer of exactly its size and every buffer is taken at most
    once, so only the sizes matter.
    """
    if not op.may_reuse:
        return 0
    free: dict[int, int] = {}
    for value_id in set(op.may_reuse) & available:
        free[values[value_id].nbytes] = free.get(values[value_id].nbytes, 0) + 1
    total = 0
    for value_id in op.outputs:
        nbytes = values[value_id].nbytes
        if free.get(nbytes, 0) > 0:
            free[nbytes] -= 1
            total += nbytes
    return total


def chain_example() -> Graph:
    """Returns the running example: ``a → b → c → d``, and ``e`` reads ``a`` and ``d``.

    The values have 4, 1, 6, 1 and 2 bytes.
    """
    names, nbytes = "abcde", (4, 1, 6, 1, 2)
    inputs: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2,), (0, 3))
    return Graph(
        ops=tuple(Op(i, names[i], names[i], inputs[i], (i,)) for i in range(5)),
        values=tuple(Value(i, names[i], nbytes[i], producer=i) for i in range(5)),
        outputs=(4,),
    )
