"""Rewrites a graph so that some ops run in slices, part by part.

An op whose result for a sample needs that sample alone is replaced by one op for each part, which
reads its part of the inputs. So only one part at a time exists of a value between two such ops, and
no schedule of the whole graph gets as low. :class:`SliceRule` says how an op may run in slices;
:mod:`keras_remat.planning.slicing` chooses the ops.

A part is a share of a value along one axis, the first where the backend names no other; along the
first it is a contiguous share of the buffer. Ops that are added:

* ``CutSlice`` copies one part of a whole value. It is no view: a view of a part would keep the
  whole buffer alive without the graph's knowledge.
* ``StartJoin`` makes an empty buffer, and each ``JoinSlice`` writes one part into it, in place.
  Joining needs one part more than the whole, and not twice the whole.
* ``SumSlices`` adds the contributions of two parts to a sum over the samples (a kernel's gradient);
  ``DivideSum`` turns such a sum into a mean (the statistics of a batch normalization).

The default order goes part by part: all ops that can run on the first part, then on the second. The
ops that run before the next sum or join that other sliced ops wait for are a *wave*.
One file, though long: one rewrite, whose steps share the ops and values written so far.

The running example, where ``c`` makes 6 bytes of 1, and ``d`` 1 of 6, in two parts each:

>>> from keras_remat.core.graph import chain_example
>>> rules = {2: SliceRule(sliced=frozenset({1})), 3: SliceRule(sliced=frozenset({2}))}
>>> graph = sliced_graph(chain_example(), rules, Slicing((2, 3), 2)).graph
>>> [op.name for op in graph.ops][2:]  # doctest: +NORMALIZE_WHITESPACE
['b/cut_0', 'c/slice_0', 'd/slice_0', 'd/joined', 'd/join_0',
 'b/cut_1', 'c/slice_1', 'd/slice_1', 'd/join_1', 'e']
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from keras_remat.core.graph import Graph, Op, Value, is_int
from keras_remat.core.topology import topological_order
from keras_remat.errors import InvalidProblemError

#: The kinds of the ops that slicing adds.
CUT, START, JOIN, SUM = "CutSlice", "StartJoin", "JoinSlice", "SumSlices"
DIVIDE = "DivideSum"
_ADDED = frozenset({CUT, START, JOIN, SUM, DIVIDE})

Role = Literal["whole", "part", "cut", "start", "join", "sum", "divide"]


@dataclass(frozen=True)
class SliceRule:
    """Says how an op runs part by part.

    Args:
        sliced: ids of the inputs of which every part of the op reads its own part.
        whole: ids of the inputs that every part reads whole; an id may be in both.
        sums: ids of the outputs that are the sum, or the mean, of the parts' results. The other
            outputs are made part by part.
        means: ids among ``sums`` of the outputs that are the mean.
        divides: a number that the number of parts has to divide; 0 where any number of parts does.
        partners: ids of ops that have to run in slices, too, where this one does.
    """

    sliced: frozenset[int]
    whole: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    means: frozenset[int] = frozenset()
    divides: int = 0
    partners: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Slicing:
    """Says which ops of a graph run in slices, and in how many parts.

    Args:
        ops: ids of ops of the graph that is to be sliced.
        parts: number of parts, at least 2.

    Raises:
        InvalidProblemError: fewer than two parts, or something in ``ops`` that is no id.
    """

    ops: tuple[int, ...]
    parts: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        if not is_int(self.parts) or self.parts < 2:
            raise InvalidProblemError(
                f"must be an int of at least 2, got {self.parts!r}", field="slices.parts"
            )
        for at, op_id in enumerate(self.ops):
            if not is_int(op_id) or op_id < 0:
                raise InvalidProblemError(
                    f"must be an op's id, got {op_id!r}", field=f"slices.ops[{at}]"
                )


@dataclass(frozen=True)
class Origin:
    """Says where an op of a sliced graph comes from.

    Args:
        role: its role in the sliced graph.
        source: for a whole op or a part, the id of the op in the graph before; for other roles, the
            id of the value that is cut, joined or summed up.
        part: number of the part, from 0; for a sum, of the last part that it adds.
    """

    role: Role
    source: int
    part: int = 0


@dataclass(frozen=True)
class SlicedGraph:
    """Holds a graph in which some ops run part by part, and the origin of each op.

    Args:
        graph: the ops and values after the rewrite.
        origins: one for each op of ``graph``.
        slicing: the ops that were sliced, and the number of parts.
        whole: id of a value before → its id now, for values that exist whole.
        parts: id of a value before and number of a part → id of the part that an op computes.
        cuts: the same → id of a part that was cut out of a whole value.
    """

    graph: Graph
    origins: tuple[Origin, ...]
    slicing: Slicing
    whole: Mapping[int, int] = field(repr=False)
    parts: Mapping[tuple[int, int], int] = field(repr=False)
    cuts: Mapping[tuple[int, int], int] = field(repr=False)


def is_sliced(graph: Graph) -> bool:
    """Returns whether some ops of a graph run part by part."""
    return any(op.kind in _ADDED for op in graph.ops)


def sliced_graph(
    graph: Graph,
    rules: Mapping[int, SliceRule],
    slicing: Slicing,
    granule_bytes: int = 1,
    axes: Mapping[int, int] | None = None,
) -> SlicedGraph:
    """Returns the same computation with some ops in slices.

    Args:
        rules: op id → how the op may run in slices.
        slicing: the ops that run in slices, and the number of parts.
        granule_bytes: bytes; sizes of parts are rounded up to a multiple of it.
        axes: value id → the axis along which it is divided; the first, if not given.

    Raises:
        InvalidProblemError: an op has no rule, its rule forbids the number of parts, or its
            partners are missing.
    """
    check_slicing(graph, rules, slicing)
    return _Rewrite(graph, rules, slicing, granule_bytes, axes or {}).result()


def check_slicing(graph: Graph, rules: Mapping[int, SliceRule], slicing: Slicing) -> None:
    """Raises :class:`InvalidProblemError` where a graph cannot be sliced in this way."""
    chosen = set(slicing.ops)
    for at, op_id in enumerate(slicing.ops):
        rule = rules.get(op_id)
        where = f"slices.ops[{at}]"
        if rule is None:
            name = f" ({graph.ops[op_id].name!r})" if op_id < len(graph.ops) else ""
            raise InvalidProblemError(f"op {op_id}{name} cannot run in slices", field=where)
        if rule.divides % slicing.parts:
            raise InvalidProblemError(
                f"op {op_id} ({graph.ops[op_id].name!r}) cannot run in {slicing.parts} slices, "
                f"which do not divide {rule.divides}",
                field=where,
            )
        if not rule.partners <= chosen:
            raise InvalidProblemError(
                f"op {op_id} ({graph.ops[op_id].name!r}) runs in slices only together with ops "
                f"{sorted(rule.partners - chosen)}",
                field=where,
            )


class _Rewrite:
    """Builds one sliced graph: first the order of waves and whole ops, then op by op."""

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[int, SliceRule],
        slicing: Slicing,
        granule_bytes: int,
        axes: Mapping[int, int],
    ):
        self._old, self._rules, self._slicing = graph, rules, slicing
        self._granule, self._axes = granule_bytes, axes
        self._chosen = frozenset(slicing.ops)
        self._joined = {
            v
            for op_id in self._chosen
            for v in set(graph.ops[op_id].outputs) - rules[op_id].sums
            if v in graph.outputs or any(self._reads_whole(r, v) for r in graph.readers[v])
        }
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._origins: list[Origin] = []
        self._whole: dict[int, int] = {}
        self._parts: dict[tuple[int, int], int] = {}
        self._cuts: dict[tuple[int, int], int] = {}
        self._terms: dict[tuple[int, int], int] = {}  # a part's contribution to a sum
        self._filled: dict[int, int] = {}  # value → its sum or buffer, as far as it is filled
        self._made_from: dict[int, list[int]] = defaultdict(list)  # op before → ops now

    def _reads_whole(self, op_id: int, value_id: int) -> bool:
        return op_id not in self._chosen or value_id in self._rules[op_id].whole

    def result(self) -> SlicedGraph:
        for value in self._old.values:
            if value.producer is None:
                self._whole[value.id] = self._value(value.name, value.nbytes, value, None)
        for unit in self._units():
            if isinstance(unit, int):
                self._write_whole(self._old.ops[unit])
            else:
                for part in range(self._slicing.parts):
                    for op_id in unit:
                        self._write_part(self._old.ops[op_id], part)
        graph = Graph(
            tuple(self._ops),
            tuple(self._values),
            tuple(self._whole[v] for v in self._old.outputs),
        )
        return SlicedGraph(
            graph, tuple(self._origins), self._slicing, self._whole, self._parts, self._cuts
        )

    # ---------------------------------------------------------------- order

    def _units(self) -> list[int | tuple[int, ...]]:
        """Returns whole ops and waves in the order in which they are written."""
        unit_of = list(range(len(self._old.ops)))  # a wave's unit is its first op
        waves: dict[int, list[int]] = defaultdict(list)
        for op_id, level in enumerate(self._levels()):
            if op_id in self._chosen:
                waves[level].append(op_id)
                unit_of[op_id] = waves[level][0]
        before: dict[int, set[int]] = {unit: set() for unit in unit_of}
        for op in self._old.ops:
            earlier = {unit_of[p] for p in (*self._old.producers(op.id), *op.after)}
            before[unit_of[op.id]] |= earlier - {unit_of[op.id]}
        members_of = {members[0]: tuple(members) for members in waves.values()}
        return [
            members_of.get(unit, unit)
            for unit in topological_order(before, rank=lambda first: first)
        ]

    def _levels(self) -> list[int]:
        """Returns every op's level.

        That is how many times, one after the other, all parts of a sliced op must be done before.
        """
        levels: list[int] = []
        for op in self._old.ops:
            level = 0
            for v in op.inputs:
                producer = self._old.values[v].producer
                if producer is not None:
                    waits = producer in self._chosen and (
                        v in self._rules[producer].sums or self._reads_whole(op.id, v)
                    )
                    level = max(level, levels[producer] + waits)
            for earlier in op.after:
                level = max(level, levels[earlier] + (earlier in self._chosen))
            levels.append(level)
        return levels

    # ---------------------------------------------------------------- ops

    def _value(self, name: str, nbytes: int, like: Value, producer: int | None) -> int:
        value_id = len(self._values)
        self._values.append(replace(like, id=value_id, name=name, nbytes=nbytes, producer=producer))
        return value_id

    def _part_of(self, value: Value) -> Value:
        """Returns a value with the size and shape of one part."""
        exact = -(-value.nbytes // self._slicing.parts)
        shape = value.shape
        if shape:
            at = self._axes.get(value.id, 0)
            shape = (*shape[:at], shape[at] // self._slicing.parts, *shape[at + 1 :])
        return replace(value, nbytes=-(-exact // self._granule) * self._granule, shape=shape)

    def _add(self, op: Op, origin: Origin) -> None:
        self._ops.append(op)
        self._origins.append(origin)

    def _after(self, op: Op) -> tuple[int, ...]:
        return tuple(sorted({new for earlier in op.after for new in self._made_from[earlier]}))

    def _write_whole(self, op: Op) -> None:
        op_id = len(self._ops)
        for v in op.outputs:
            value = self._old.values[v]
            self._whole[v] = self._value(value.name, value.nbytes, value, op_id)
        self._made_from[op.id].append(op_id)
        new = replace(
            op,
            id=op_id,
            inputs=tuple(self._whole[v] for v in op.inputs),
            outputs=tuple(self._whole[v] for v in op.outputs),
            after=self._after(op),
            may_reuse=tuple(self._whole[v] for v in op.may_reuse),
        )
        self._add(new, Origin("whole", op.id))

    def _write_part(self, op: Op, part: int) -> None:
        rule = self._rules[op.id]
        for v in op.inputs:
            if v in rule.sliced and (v, part) not in self._parts:
                self._write_cut(op, self._old.values[v], part)
        op_id = len(self._ops)
        inputs = tuple(dict.fromkeys(new for v in op.inputs for new in self._read(rule, v, part)))
        reusable = (new for v in op.may_reuse for new in self._read(rule, v, part))
        outputs = []
        for v in op.outputs:
            value = self._old.values[v]
            made = value if v in rule.sums else self._part_of(value)
            name = f"{value.name}/slice_{part}"
            outputs.append(self._value(name, made.nbytes, made, op_id))
            (self._terms if v in rule.sums else self._parts)[v, part] = outputs[-1]
        self._made_from[op.id].append(op_id)
        new = Op(
            op_id, f"{op.name}/slice_{part}", op.kind, inputs, tuple(outputs), op.phase,
            op.recomputable, self._after(op), tuple(dict.fromkeys(reusable)),
        )  # fmt: skip
        self._add(new, Origin("part", op.id, part))
        for v in op.outputs:
            if v in rule.sums:
                self._write_sum(op, v, part)
            elif v in self._joined:
                self._write_join(op, v, part)

    def _read(self, rule: SliceRule, value_id: int, part: int) -> Iterator[int]:
        """Yields the ids of the values that a part reads for an input of its op."""
        if value_id in rule.sliced:
            made = self._parts.get((value_id, part))
            yield self._cuts[value_id, part] if made is None else made
        if value_id in rule.whole:
            yield self._whole[value_id]

    def _write_cut(self, reader: Op, value: Value, part: int) -> None:
        """Writes an op that copies a part, unless there is such a copy."""
        op_id, cut = len(self._ops), self._part_of(value)
        known = self._cuts.get((value.id, part))
        if value.producer is None:  # ops that overwrite a step input come after its readers
            maker = None if known is None else self._values[known].producer
            self._made_from[reader.id].append(op_id if maker is None else maker)
        if known is not None:
            return
        made = self._value(f"{value.name}/cut_{part}", cut.nbytes, cut, op_id)
        self._cuts[value.id, part] = made
        name = f"{self._name(value.id)}/cut_{part}"
        self._add(
            Op(op_id, name, CUT, (self._whole[value.id],), (made,), reader.phase),
            Origin("cut", value.id, part),
        )

    def _name(self, value_id: int) -> str:
        """Returns a value's name for new ops: its op's, numbered from the second output on."""
        value = self._old.values[value_id]
        if value.producer is None:
            return value.name.partition(":")[0]
        op = self._old.ops[value.producer]
        at = op.outputs.index(value_id)
        return op.name if at == 0 else f"{op.name}/output_{at}"

    def _write_sum(self, op: Op, value_id: int, part: int) -> None:
        made, value = self._terms[value_id, part], self._old.values[value_id]
        if part == 0:
            self._filled[value_id] = made
            return
        op_id, read = len(self._ops), (self._filled[value_id], made)
        total = self._value(self._step_name(value, part), value.nbytes, value, op_id)
        self._filled[value_id] = total
        name = f"{self._name(value_id)}/sum_{part}"
        new = Op(op_id, name, SUM, read, (total,), op.phase, may_reuse=read)
        self._add(new, Origin("sum", value_id, part))
        if part < self._slicing.parts - 1:
            return
        if value_id in self._rules[op.id].means:
            mean = self._value(value.name, value.nbytes, value, op_id + 1)
            name = f"{self._name(value_id)}/mean"
            new = Op(op_id + 1, name, DIVIDE, (total,), (mean,), op.phase, may_reuse=(total,))
            self._add(new, Origin("divide", value_id))
            total = mean
        self._whole[value_id] = total

    def _write_join(self, op: Op, value_id: int, part: int) -> None:
        value, name = self._old.values[value_id], self._name(value_id)
        if part == 0:
            start = len(self._ops)
            self._filled[value_id] = self._value(f"{value.name}/empty", value.nbytes, value, start)
            new = Op(start, f"{name}/joined", START, (), (self._filled[value_id],), op.phase)
            self._add(new, Origin("start", value_id))
        op_id, buffer = len(self._ops), self._filled[value_id]
        joined = self._value(self._step_name(value, part), value.nbytes, value, op_id)
        self._filled[value_id] = joined
        if part == self._slicing.parts - 1:
            self._whole[value_id] = joined
        read = (buffer, self._parts[value_id, part])
        new = Op(op_id, f"{name}/join_{part}", JOIN, read, (joined,), op.phase, may_reuse=(buffer,))
        self._add(new, Origin("join", value_id, part))

    def _step_name(self, value: Value, part: int) -> str:
        """Returns the name of a value filled up to a part; its own name, once it is complete."""
        is_last = part == self._slicing.parts - 1
        return value.name if is_last else f"{value.name}/until_{part}"
