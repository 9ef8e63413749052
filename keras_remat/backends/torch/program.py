"""Turns recorded calls into the nodes of a graph in which every value is written once.

* A call that returns a view is no node: it is a recipe, which readers follow (G4). A value is a
  whole storage.
* A write to a temporary makes a new value of the same layout, with ``may_reuse`` of the old one. If
  the old one dies, the write happens in place, else in a copy.
* A write to a tensor that outlives the step is an effect. It stays in place, runs once, and comes
  after all readers of the old content. So optimizer slots are never copied, and recomputations
  precede the update. A check that returns nothing is an effect, too.
* Memory that is made and then filled (``empty``, then ``copy_``) is one node. A copy of a whole
  dense tensor into such memory is the tensor itself: autograd makes such a copy for every weight
  under a recorder, and none without. The same holds for a copy of a copy that lies as the tensor
  does: Keras's convolutions copy every image to channels first, and back.
* A call over lists of all weights is several nodes (:mod:`.updates`).
* The state of PyTorch's own generator is a value that goes from draw to draw, so drawing is pure in
  any order. The last state is set once all draws were made. If a step restores a state that it has
  saved, draws go on from that value.

One file, though long: every rule reads and writes the same tables of storages and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from keras_remat.backends.tables import names
from keras_remat.backends.torch import private
from keras_remat.backends.torch.recorder import (
    Call,
    Generator,
    Layout,
    Recording,
    Ref,
    numbers_in,
)
from keras_remat.backends.torch.updates import chunks
from keras_remat.core.graph import FORWARD, UPDATE, Graph, Op, Value
from keras_remat.errors import UnsupportedModelError

aten = torch.ops.aten
#: Operators that make memory and put nothing into it.
_UNFILLED = {
    aten.new_empty_strided.default, aten.empty_like.default, aten.empty.memory_format,
    aten.new_empty.default, aten.empty_strided.default,
}  # fmt: skip
#: Operators that write the moving statistics that they are given.
_OF_STATISTICS = names("cudnn_batch_norm miopen_batch_norm")
#: Bytes of the state of PyTorch's generator.
_STATE_BYTES = {"cpu": 5056, "cuda": 16}
#: The CUDA allocator rounds every request up to a multiple of these bytes.
CUDA_GRANULE = 512

#: Namespaces of the operators whose tags say whether they draw.
_OF_PYTORCH = {"aten", "prims", "torchvision", "torchaudio"}

PURE, WRITE, EFFECT = "pure", "write", "effect"
GET_STATE, SET_STATE = "get_rng_state", "set_rng_state"


@dataclass(eq=False, kw_only=True)
class Node:
    """Holds one op of the graph.

    Attributes:
        kind: ``PURE``, ``WRITE`` to temporaries, ``EFFECT``, ``GET_STATE`` or ``SET_STATE``.
        call: the call it makes; ``None`` for the last two kinds.
        reads: number of a tensor → the value it belongs to at that time.
        outputs: number and value of every returned tensor; ``None`` for a result that is no tensor.
        inputs: values it reads.
        after: ids of nodes that must run before it.
        old: number of a tensor that is written → its value before; ``None`` for memory that was
            just made.
        new: the same number → its value afterwards.
        state: values of the generator's state before and after, if the node draws.
        device: kind of the device of that state.
    """

    id: int
    kind: str
    call: Call | None = None
    phase: str = FORWARD
    reads: dict[int, int] = field(default_factory=dict)
    outputs: list[tuple[int, int] | None] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    after: set[int] = field(default_factory=set)
    old: dict[int, int | None] = field(default_factory=dict)
    new: dict[int, int] = field(default_factory=dict)
    state: tuple[int, int] | None = None
    device: str = "cpu"

    @property
    def predicate(self) -> tuple[tuple[int, bool], ...]:
        """Returns the condition under which it runs; see
        :class:`~keras_remat.backends.torch.recorder.Call`."""
        return () if self.call is None else self.call.predicate

    @property
    def values(self) -> tuple[int, ...]:
        """Returns the values it computes."""
        returned = [pair[1] for pair in self.outputs if pair is not None]
        state = [] if self.state is None else [self.state[1]]
        return tuple(dict.fromkeys([*returned, *self.new.values(), *state]))


@dataclass(frozen=True, slots=True)
class Stored:
    """Describes a value.

    Args:
        number: of a tensor whose layout is the whole value's.
        nbytes: bytes that the allocator gives for it.
        producer: id of the node that computes it; ``None`` for a value that is there before.
    """

    number: int
    nbytes: int
    producer: int | None


class Program:
    """Holds the nodes of a recording.

    Args:
        recording: recording of a step.
        results: numbers of the tensors that the step returns.
        device: the step's device; values elsewhere take 0 bytes of it.

    Attributes:
        nodes: in the order in which PyTorch would run them.
        stored: every value.
        recipes: number of a view → the call that makes it, the index of its result, and the tensor
            it looks at.
        sources: value → number of the input or constant that it is.
        results: number of a returned tensor → its value.
    """

    def __init__(self, recording: Recording, results: Iterable[int], device: torch.device):
        self.recording, self.layouts, self._device = recording, recording.layouts, device
        self.nodes: list[Node] = []
        self.stored: list[Stored] = []
        self.recipes: dict[int, tuple[Call, int, int]] = {}
        self.sources: dict[int, int] = {}
        self._alias: dict[int, int] = {}  # tensor → one with the same layout in the same value
        self._current: dict[int, int] = {}  # storage → value
        self._unfilled: dict[int, Call] = {}  # storage → the call that made it
        self._copied: dict[int, tuple[int, int]] = {}  # value → tensor it is a copy of, its value
        self._outside: set[int] = set()  # storages of inputs and constants
        self._readers: dict[int, set[int]] = {}  # memory outside → nodes, since the last write
        self._writer: dict[int, int] = {}  # memory outside → node that wrote it last
        self._state: dict[str, int] = {}  # kind of device → value of its generator's state
        self._first_state: dict[str, int] = {}
        self._taken_down: dict[tuple[str, int], int | None] = {}  # kind, mark → value then
        self._moves = list(reversed(recording.moves))
        written = {self.layouts[n].storage for call in recording.calls for n in call.writes}
        for number in (*recording.inputs, *tuple(recording.constants)):
            storage = self.layouts[number].storage
            if number in recording.made and storage in written:
                self._make_anew(number)
                continue
            self._outside.add(storage)
            if storage in self._current:
                self._look_beside(number)
                continue
            self._current[storage] = self._new_value(number, None)
            self.sources[self._current[storage]] = number
        for call in recording.calls:
            self._move_states(call.at)
            for part in chunks(call, self.layouts, recording.storage_bytes):
                self._take(part)
        self._move_states(len(recording.calls))
        for kind, state in self._state.items():
            draws = {n.id for n in self.nodes if n.state is not None and n.device == kind}
            self._add(kind=SET_STATE, phase=UPDATE, inputs=(state,), after=draws, device=kind)
        self.results = {n: self._current[self.layouts[n].storage] for n in results}

    # ---------------------------------------------------------------- what it says

    def canonical(self, number: int) -> int:
        """Returns the first tensor that lies exactly where this one does."""
        while number in self._alias:
            number = self._alias[number]
        return number

    def base(self, value: int) -> int:
        """Returns the number of a tensor that spans a whole value."""
        return self.stored[value].number

    def is_whole(self, number: int, value: int) -> bool:
        """Returns whether a tensor spans a whole value."""
        return self.layouts[number].is_same(self.layouts[self.base(value)])

    def rewritten(
        self,
        *,
        nodes: list[Node],
        stored: list[Stored],
        layouts: list[Layout],
        recipes: dict[int, tuple[Call, int, int]],
        sources: dict[int, int],
        results: dict[int, int],
    ) -> Program:
        """Returns another program of the same recording; the arguments replace the attributes of
        the same names."""
        other = copy(self)
        other.nodes, other.stored, other.layouts = nodes, stored, layouts
        other.recipes, other.sources, other.results = recipes, sources, results
        return other

    @property
    def written_constants(self) -> list[torch.Tensor]:
        """Returns the tensors outside of the model that the step closes over and writes."""
        constants = self.recording.constants.items()
        return [tensor for n, tensor in constants if self.is_overwritten(n)]

    def is_overwritten(self, number: int) -> bool:
        """Returns whether the step writes a tensor that outlives it."""
        return self._memory(number) in self._writer

    def graph(self, reusable: Any) -> Graph:
        """Returns the graph of the nodes.

        Args:
            reusable: returns the values whose memory a node may take over.
        """
        values = tuple(
            Value(
                at,
                f"v{at}",
                stored.nbytes,
                self.layouts[stored.number].shape,
                str(self.layouts[stored.number].dtype).removeprefix("torch."),
                stored.producer,
            )
            for at, stored in enumerate(self.stored)
        )
        ops = tuple(self._op(node, reusable(node)) for node in self.nodes)
        kept = (v for v in self.results.values() if self.stored[v].producer is not None)
        return Graph(ops, values, tuple(dict.fromkeys(kept)))

    def _op(self, node: Node, reusable: tuple[int, ...]) -> Op:
        kind = name = node.kind
        if node.call is not None:
            operator = node.call.operator
            kind = name = f"{private.schema_name(operator)}.{operator._overloadname}"
            if node.call.scope:
                name = f"{node.call.scope}/{kind}"
        once = node.predicate or (node.call is not None and writes_unsaid(node.call))
        recomputable = node.kind in (PURE, WRITE) and not once
        return Op(
            node.id, name, kind, node.inputs, node.values, node.phase, recomputable,
            tuple(sorted(node.after)), reusable,
        )  # fmt: skip

    # ---------------------------------------------------------------- values

    def _new_value(self, number: int, producer: int | None) -> int:
        layout = self.layouts[number]
        nbytes = self.recording.storage_bytes[layout.storage]
        if layout.device.type != self._device.type:
            nbytes = 0
        elif layout.device.type == "cuda":
            nbytes = -(-nbytes // CUDA_GRANULE) * CUDA_GRANULE
        self.stored.append(Stored(number, nbytes, producer))
        return len(self.stored) - 1

    def _make_anew(self, number: int) -> None:
        """Adds a node that copies a constant, because the step writes to it."""
        layout, recording = self.layouts[number], self.recording
        recording.storage_bytes.append(recording.storage_bytes[layout.storage])
        self.layouts.append(replace(layout, storage=len(recording.storage_bytes) - 1))
        kept = len(self.layouts) - 1
        recording.constants[kept] = recording.constants.pop(number)
        value = self._new_value(kept, None)
        self.sources[value] = kept
        clone = aten.clone.default
        call = Call(clone, (Ref(kept),), {}, (number,), (), FORWARD, (), 0)
        node = self._add(kind=PURE, call=call, reads={kept: value}, inputs=(value,))
        self._current[layout.storage] = self._new_value(number, node.id)
        node.outputs.append((number, self._current[layout.storage]))

    def _new_state(self, kind: str, producer: int) -> int:
        """Returns a new value for a generator's state, which is on the host."""
        nbytes, recording = _STATE_BYTES.get(kind, _STATE_BYTES["cpu"]), self.recording
        recording.storage_bytes.append(nbytes)
        storage = len(recording.storage_bytes) - 1
        cpu = torch.device("cpu")
        self.layouts.append(Layout((nbytes,), (1,), 0, torch.uint8, cpu, storage))
        return self._new_value(len(self.layouts) - 1, producer)

    def _predicate_of(self, value: int) -> tuple[tuple[int, bool], ...]:
        producer = self.stored[value].producer
        return () if producer is None else self.nodes[producer].predicate

    def _storage(self, number: int) -> int:
        return self.layouts[number].storage

    def _memory(self, number: int) -> int:
        """Returns a key of the memory outside of the step that a tensor lies in."""
        return self.recording.memory.get(self._storage(number), self._storage(number))

    def _add(self, **fields: Any) -> Node:
        node = Node(id=len(self.nodes), **fields)
        self.nodes.append(node)
        return node

    # ---------------------------------------------------------------- calls

    def _take(self, call: Call) -> None:
        if self._is_view(call):
            self._take_view(call)
        elif call.operator in _UNFILLED and call.outputs[0] is not None:
            self._unfilled[self._storage(call.outputs[0])] = call
        elif not (self._is_the_tensor_itself(call) or self._is_copied_back(call)):
            self._take_node(call)

    def _is_view(self, call: Call) -> bool:
        storages = {self._storage(n) for n in numbers_in((call.args, call.kwargs))}
        made = [self._storage(n) for n in call.outputs if n is not None]
        return not call.writes and bool(made) and all(storage in storages for storage in made)

    def _take_view(self, call: Call) -> None:
        made = [n for n in call.outputs if n is not None]
        parent, *others = dict.fromkeys(numbers_in((call.args, call.kwargs)))
        if others:
            raise _refusal(call, "returns a view of one tensor and reads others")
        for at, number in enumerate(call.outputs):
            if number is None or number == parent:
                continue
            if number in self.recipes or number in self._alias:
                continue
            if len(made) == 1 and self.layouts[number].is_same(self.layouts[parent]):
                self._alias[number] = parent
            else:
                self.recipes[number] = call, at, parent

    def _look_beside(self, number: int) -> None:
        """Makes a constant that shares the memory of another one a view of it."""
        layout = self.layouts[number]
        other = self.base(self._current[layout.storage])
        if (layout.dtype, layout.turned) != (self.layouts[other].dtype, self.layouts[other].turned):
            raise UnsupportedModelError(
                f"The step closes over two tensors of one memory, of {layout.dtype} and "
                f"{self.layouts[other].dtype}. Make one of the other in the step."
            )
        args = Ref(other), layout.shape, layout.stride, layout.offset
        call = Call(aten.as_strided.default, args, {}, (number,), (), FORWARD, (), 0)
        self.recipes[number] = call, 0, other

    def _is_the_tensor_itself(self, call: Call) -> bool:
        """Returns whether a call copies a whole tensor into memory made for the copy. Such a call
        is no node: the copy is the tensor."""
        if call.operator is not aten.copy_.default or not call.args[1:]:
            return False
        (target,), source = call.writes, call.args[1]
        storage = self._storage(target)
        if storage not in self._unfilled or not isinstance(source, Ref) or call.predicate:
            return False
        itself = self._lies_as(source.number, target)
        if itself:
            del self._unfilled[storage]
        return itself

    def _is_copied_back(self, call: Call) -> bool:
        """Returns whether a call copies a copy of a whole tensor back into the tensor's layout, and
        neither was written meanwhile. Such a call is no node."""
        if call.operator is not aten.clone.default or call.predicate:
            return False
        source, (made,) = call.args[0].number, call.outputs
        assert made is not None
        value = self._current.get(self._storage(source))
        if value not in self._copied or not self.is_whole(self.canonical(source), value):
            return False
        number, before = self._copied[value]
        is_current = self._current.get(self._storage(number)) == before
        return is_current and self._lies_as(number, made)

    def _lies_as(self, number: int, copy: int) -> bool:
        """Returns whether a tensor spans its storage, and lies as its copy would. If so, the copy
        stands for the tensor from now on."""
        copied, made = self.layouts[number], self.layouts[copy]
        itself = (
            copied.is_same(made)
            and copied.offset == 0
            and copied.device == made.device
            and copied.storage not in self._outside
            and copied.storage in self._current
            and self.recording.storage_bytes[copied.storage]
            == self.recording.storage_bytes[made.storage]
        )
        if itself:
            self._current[made.storage] = self._current[copied.storage]
            self._alias[self.canonical(copy)] = self.canonical(number)
        return itself

    def _take_node(self, call: Call) -> None:
        self._fill_what_is_read(call)
        effect = bool(call.writes) and self._storage(call.writes[0]) in self._outside
        if any((self._storage(n) in self._outside) is not effect for n in call.writes):
            raise _refusal(call, "writes variables and temporary tensors at once")
        known = {self._storage(n) for n in call.reads}
        made = {self._storage(n) for n in call.outputs if n is not None}
        if call.writes and made - known:
            raise _refusal(call, "writes a tensor that it is given and returns another one")
        effect |= not call.writes and not made and bool(known)  # a check
        state = self._state_for(call)  # may add a node
        kind = EFFECT if effect else WRITE if call.writes else PURE
        node = self._add(kind=kind, call=call, phase=call.phase)
        self._read(node, call)
        if effect:
            self._write_outside(node, call)
        elif call.writes:
            self._write(node, call)
        else:
            self._return(node, call)
        inputs = list(dict.fromkeys(node.reads.values()))
        if state is not None:
            device, before = state
            self._state[device] = self._new_state(device, node.id)
            node.state, node.device = (before, self._state[device]), device
            inputs.append(before)
        node.inputs = tuple(inputs)

    def _fill_what_is_read(self, call: Call) -> None:
        """Adds a node for memory that is read before anything was written to it."""
        for number in call.reads:
            storage = self._storage(number)
            if storage in self._unfilled and number not in call.writes:
                made = self._unfilled.pop(storage)
                node = self._add(kind=PURE, call=made, phase=made.phase)
                self._read(node, made)
                self._return(node, made)
                node.inputs = tuple(dict.fromkeys(node.reads.values()))

    def _read(self, node: Node, call: Call) -> None:
        for number in call.reads:
            storage = self._storage(number)
            if storage in self._unfilled:
                continue
            value = node.reads[number] = self._current[storage]
            made_under = self._predicate_of(value)
            if call.predicate[: len(made_under)] != made_under:
                raise UnsupportedModelError(
                    "A tensor that a branch of keras.ops.cond made is used outside of it. Let both "
                    "branches return it."
                )
            if storage in self._outside:
                memory = self._memory(number)
                if memory in self._writer:
                    node.after.add(self._writer[memory])
                self._readers.setdefault(memory, set()).add(node.id)

    def _write_outside(self, node: Node, call: Call) -> None:
        for memory in map(self._memory, call.writes):
            node.after |= self._readers.get(memory, set())
            if memory in self._writer:
                node.after.add(self._writer[memory])
            self._writer[memory], self._readers[memory] = node.id, set()
        node.after.discard(node.id)

    def _write(self, node: Node, call: Call) -> None:
        for number in dict.fromkeys(call.writes):
            storage = self._storage(number)
            if any(self._storage(other) == storage for other in node.new):
                raise _refusal(call, "writes two parts of one tensor")
            made = self._unfilled.pop(storage, None)
            if made is not None:
                node.old[number] = None
                base = made.outputs[0]
                assert base is not None
            else:
                node.old[number] = self._current[storage]
                base = self.base(self._current[storage])
                if self._predicate_of(self._current[storage]) != call.predicate:
                    raise UnsupportedModelError(
                        "A branch of keras.ops.cond writes a tensor that was made outside of it. "
                        "Let both branches return what it becomes."
                    )
            node.new[number] = self._current[storage] = self._new_value(base, node.id)

    def _return(self, node: Node, call: Call) -> None:
        for number in call.outputs:
            if number is None:
                node.outputs.append(None)
                continue
            storage = self._storage(number)
            if storage in self._current:
                raise _refusal(call, "returns a new tensor and a view")
            self._current[storage] = self._new_value(number, node.id)
            node.outputs.append((number, self._current[storage]))
        if call.operator is aten.clone.default and not call.predicate:
            copied = call.args[0].number
            self._copied[self._current[storage]] = copied, node.reads[copied]

    def _move_states(self, at: int) -> None:
        """Saves and restores states of generators as the step did before a call."""
        while self._moves and self._moves[-1].at <= at:
            move = self._moves.pop()
            kind, key = move.device, (move.device, move.mark)
            if not move.is_back:
                self._taken_down[key] = self._state.get(kind)
            elif kind in self._state:
                before = self._taken_down[key]
                self._state[kind] = self._first_state[kind] if before is None else before

    def _state_for(self, call: Call) -> tuple[str, int] | None:
        """Returns the kind of device whose hidden generator a call draws from, and the value of its
        state before; ``None`` if it draws from none."""
        if not _draws(call):
            return None
        numbers = [*(n for n in call.outputs if n is not None), *call.writes]
        kind = self.layouts[numbers[0]].device.type
        if kind not in self._state:
            node = self._add(kind=GET_STATE, phase=call.phase, device=kind)
            self._state[kind] = self._first_state[kind] = self._new_state(kind, node.id)
            node.outputs.append((self.base(self._state[kind]), self._state[kind]))
        return kind, self._state[kind]


def _draws(call: Call) -> bool:
    """Returns whether a call draws from a hidden generator. Attention without dropout does not. An
    operator of a user's own may, so it counts as drawing."""
    if call.operator.namespace not in _OF_PYTORCH:
        return any(number is not None for number in (*call.outputs, *call.writes))
    if torch.Tag.nondeterministic_seeded not in call.operator.tags:
        return False
    leaves = tree_leaves((call.args, call.kwargs))
    is_seeded = any(isinstance(leaf, Generator) for leaf in leaves)
    dropped = private.arguments_of(call.operator, call.args, call.kwargs).get("dropout_p")
    return not is_seeded and dropped != 0.0


def writes_unsaid(call: Call) -> bool:
    """Returns whether a call writes moving statistics without its schema saying so. Such a call
    must not run twice."""
    given = private.arguments_of(call.operator, call.args, call.kwargs)
    is_one = private.schema_name(call.operator) in _OF_STATISTICS
    return is_one and bool(given["training"]) and given["running_mean"] is not None


def _refusal(call: Call, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The step calls {call.operator}, which {what}: no plan can move such a call."
    )
