"""Records what a train step does, call by call, below autograd and without running it.

A dispatch mode above fake tensors sees every operator of forward, backward, optimizer and metrics
in the order in which PyTorch would run it. Neither ``torch.compile`` nor ``make_fx`` sees a whole
Keras step: both end at ``backward()``, at numbers that are read, and at seeds.

Tensors are numbered in the order in which they appear, and so are their storages. The recording
notes the call at which each storage was freed. Python and autograd hold the stand-ins as they would
hold tensors with memory, so the bytes that Keras's own step needs are those alive here
(:attr:`Recording.plain_bytes`).

One file, though a little long: the records of a call, and the mode that makes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from keras_remat.backends.torch import private
from keras_remat.backends.torch.constants import Constants
from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.errors import UnsupportedModelError

aten = torch.ops.aten
#: Attribute of a stand-in that holds its number.
_NUMBER = "_keras_remat_number"


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor among the arguments of a call, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Generator:
    """Stands for a generator of random numbers among the arguments of a call, by the number of the
    tensor that holds its seed."""

    number: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """Stands for a number among the arguments of a call that is read when the step runs.

    Args:
        text: Python that computes it from the numbers that are read.
        symbols: name in the text → number of the tensor that is read.
    """

    text: str
    symbols: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Says how a tensor lies in its storage.

    Args:
        storage: index of the storage.
        turned: whether its numbers are the conjugates, and the negatives, of what lies there.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int
    turned: tuple[bool, bool] = (False, False)

    @staticmethod
    def of(tensor: torch.Tensor, storage: int) -> Layout:
        """Returns how a tensor lies in a storage."""
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        offset = int(tensor.storage_offset())
        turned = tensor.is_conj(), tensor.is_neg()
        return Layout(shape, stride, offset, tensor.dtype, tensor.device, storage, turned)

    def tensor(self, device: torch.device | None = None) -> torch.Tensor:
        """Returns a tensor that lies so in a storage of its own, on its device or another one."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=device or self.device
        )

    def is_same(self, other: Layout) -> bool:
        """Returns whether two tensors lie in the same way, each in its own storage or in one."""
        mine = (self.shape, self.stride, self.offset, self.dtype, self.turned)
        return mine == (other.shape, other.stride, other.offset, other.dtype, other.turned)


@dataclass(frozen=True, slots=True)
class Call:
    """Records one call of an operator.

    Args:
        operator: an ``OpOverload``.
        args, kwargs: the arguments, with :class:`Ref`, :class:`Generator` and :class:`Scalar` for
            tensors, generators and numbers that are read.
        outputs: numbers of the tensors it returned; ``None`` for a result that is no tensor.
        writes: numbers of the arguments it writes.
        phase: the op's phase in the graph.
        predicate: pairs of the number of a boolean tensor, and the value it must have for the call
            to be made.
        at: how many calls were recorded before it.
        scope: the layers that made it, as a path; empty in the backward phase.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    writes: tuple[int, ...]
    phase: str
    predicate: tuple[tuple[int, bool], ...]
    at: int
    scope: str = ""

    @property
    def reads(self) -> tuple[int, ...]:
        """Returns numbers of the tensors among the arguments and in the predicate, with
        repetitions."""
        return (
            *numbers_in((self.args, self.kwargs)),
            *(number for number, _ in self.predicate),
        )


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Returns the tensors in a structure of arguments."""
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def numbers_in(structure: Any) -> Iterator[int]:
    """Yields the numbers of all tensors that a structure of arguments refers to."""
    for leaf in tree_leaves(structure):
        if isinstance(leaf, (Ref, Generator)):
            yield leaf.number
        elif isinstance(leaf, Scalar):
            yield from (number for _, number in leaf.symbols)


@dataclass(frozen=True, slots=True)
class Move:
    """Records that a state was saved or restored.

    Args:
        at: how many calls were recorded before.
        device: kind of the device of the generator.
        mark: number of the state.
        is_back: whether it was restored.
    """

    at: int
    device: str
    mark: int
    is_back: bool


@dataclass(eq=False)
class Recording:
    """Holds what a recorder saw.

    Attributes:
        calls: in the order in which PyTorch would make them.
        layouts: layout of every tensor, by its number.
        storage_bytes: bytes of every storage.
        inputs: numbers of the tensors that exist before the step: variables, then the batch.
        constants: number → a tensor that the step closes over, or that depends on no tensor.
        made: numbers of the constants that the step would make anew every time.
        freed: storage → how many calls were made before it was freed.
        born: storage → the call that made it; those of inputs and constants are not in it.
        moves: where states of PyTorch's generator are taken down and put back.
        memory: storage of a tensor that outlives the step → key of its memory. Two stand-ins have
            two storages, also where their tensors share memory.
    """

    calls: list[Call] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    freed: dict[int, int] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    memory: dict[int, int] = field(default_factory=dict)

    def plain_bytes(self, device: torch.device) -> list[int]:
        """Returns the bytes that Keras's own step has alive on a device at every call, beside those
        that were there before."""
        change = [0] * (len(self.calls) + 2)
        devices = {layout.storage: layout.device for layout in self.layouts}
        for storage, at in self.born.items():
            if devices[storage].type == device.type:
                change[at] += self.storage_bytes[storage]
                change[self.freed.get(storage, len(self.calls) + 1)] -= self.storage_bytes[storage]
        return list(accumulate(change))[: len(self.calls)]


def storages_that_vary(recording: Recording) -> set[int]:
    """Returns the storages whose content differs from step to step: those of inputs, of random
    draws, and of all that follows from them."""
    layouts = recording.layouts
    vary = {layouts[number].storage for number in recording.inputs}
    for call in recording.calls:
        draws = torch.Tag.nondeterministic_seeded in call.operator.tags
        if draws or any(layouts[number].storage in vary for number in call.reads):
            made = (number for number in (*call.outputs, *call.writes) if number is not None)
            vary |= {layouts[number].storage for number in made}
    return vary


class Recorder(private.DispatchMode):  # type: ignore[misc]
    """Records the calls made inside its context; see :class:`Recording`.

    Args:
        seeds: knows the generators that are made while it records.

    Attributes:
        predicate: predicate of the calls that follow, see :class:`Call`.
    """

    def __init__(self, seeds: private.Seeds):
        super().__init__()
        self.recording = Recording()
        self.predicate: tuple[tuple[int, bool], ...] = ()
        self.fake_mode = private.fake_mode()
        self.constants = Constants()
        self._refused: dict[int, str] = {}  # number → why no step may use the tensor
        self._seeds = seeds
        self._numbers: dict[int, int] = {}  # id of a tensor with memory (kept alive) → number
        self._storages: dict[int, int] = {}  # key → index, of storages that are not freed
        self._watches: list[Any] = []
        self._symbols: dict[str, int] = {}  # name → number of the tensor it is read from
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # late copies: target, source
        self._has_gone_back = False

    # ---------------------------------------------------------------- numbers

    def add_input(self, stand_in: torch.Tensor, tensor: torch.Tensor | None = None) -> None:
        """Numbers a stand-in for a tensor that exists before the step; ``None`` for one that comes
        with every batch."""
        self.recording.inputs.append(self._new(stand_in, born=False))
        if tensor is not None:
            self._note_memory(self.recording.inputs[-1], tensor)

    def _note_memory(self, number: int, tensor: torch.Tensor) -> None:
        storage = self.recording.layouts[number].storage
        self.recording.memory[storage] = private.storage_key(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """Returns a tensor's number. A new tensor with memory becomes a constant."""
        known = getattr(tensor, _NUMBER, None) if private.is_fake(tensor) else None
        known = self._numbers.get(id(tensor)) if known is None else known
        if known is not None:
            if known in self._refused:
                raise UnsupportedModelError(self._refused[known])
            layout = self.recording.layouts[known]
            if layout != Layout.of(tensor, self._storage(tensor, born=True)):
                raise UnsupportedModelError(
                    f"The step gives a tensor of shape {layout.shape} another shape or other "
                    "memory in place (resize_, set_, out=, or an assignment to .data). Make a new "
                    "tensor."
                )
            return int(known)
        if private.is_fake(tensor):
            raise UnsupportedModelError(
                f"The step uses a tensor of shape {tuple(tensor.shape)} that was made where calls "
                "are not recorded, such as another thread. Make it in the step."
            )
        if tensor.requires_grad:
            raise UnsupportedModelError(
                f"The step differentiates by a tensor of shape {tuple(tensor.shape)} that is no "
                "variable of the model. Keep it in a layer of the model, by add_weight."
            )
        return self.add_constant(tensor, tensor)

    def refuse(self, tensor: torch.Tensor, reason: str) -> None:
        """Numbers a stand-in for a tensor that the step before has made, and that no step may use.
        The error then gives the ``reason``."""
        self._refused[self._new(tensor, born=True)] = reason

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Checks whether calls may be made, and forgets them afterwards."""
        kept = self.recording
        self.recording = Recording(**{name: copy(held) for name, held in vars(kept).items()})
        try:
            yield
        finally:
            self.recording = kept

    def add_constant(self, stand_in: torch.Tensor, value: torch.Tensor) -> int:
        """Numbers a tensor whose value is known when the step is recorded."""
        number = self._new(stand_in, born=False)
        self.recording.constants[number] = value
        self._note_memory(number, value)
        return number

    def _new(self, tensor: torch.Tensor, *, born: bool) -> int:
        if tensor.layout != torch.strided:
            raise UnsupportedModelError(
                f"The step makes a tensor of layout {tensor.layout}, whose parts no plan knows. An "
                "Embedding must not be made with sparse=True."
            )
        number = len(self.recording.layouts)
        if private.is_fake(tensor):
            setattr(tensor, _NUMBER, number)
        else:
            self._numbers[id(tensor)] = number
            self._watches.append(tensor)
        self.recording.layouts.append(Layout.of(tensor, self._storage(tensor, born=born)))
        return number

    def _storage(self, tensor: torch.Tensor, *, born: bool) -> int:
        key = private.storage_key(tensor)
        if key in self._storages:
            return self._storages[key]
        index = self._storages[key] = len(self.recording.storage_bytes)
        storage = tensor.untyped_storage()
        self.recording.storage_bytes.append(int(storage.nbytes()))
        if born:
            self.recording.born[index] = len(self.recording.calls)

        def freed(_: Any, key: int = key, index: int = index) -> None:
            if self._storages.get(key) == index:
                del self._storages[key]
            self.recording.freed[index] = len(self.recording.calls)

        self._watches.append(weakref.ref(storage, freed))
        return index

    # ---------------------------------------------------------------- calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func is aten.native_batch_norm_backward.default and args[7]:
            args = (*args[:3], None, None, *args[5:])  # moving statistics, not read in training
        if self._late:
            self.write_late(tensors_in((args, kwargs)))
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            return self._normalized(types, args)
        if func is aten.rrelu_with_noise.default:  # writes its draws, and returns another tensor
            functional = aten.rrelu_with_noise_functional.default
            result, noise = self.__torch_dispatch__(functional, types, args, kwargs)
            self.__torch_dispatch__(aten.copy_.default, (), (args[1], noise))
            return result
        view = private.view_like(func)
        if view is not None and private.is_fake(args[0]):
            return self._looked_at_otherwise(view, func, types, args, kwargs)
        if func is aten.repeat_interleave.Tensor:
            kwargs = self._with_output_size(args[0], kwargs)
        if func is aten.equal.default:
            raise UnsupportedModelError(
                "The step asks in Python whether two tensors are equal. Use keras.ops.where."
            )
        tensors = tensors_in((args, kwargs))
        known = self.constants.folded(func, args, kwargs, tensors)
        if known.is_new:
            if not isinstance(known.value, torch.Tensor):
                return known.value
            stand_in = self.fake_mode.from_tensor(known.value)
            self.recording.made.add(self.add_constant(stand_in, known.value))
            self.constants.know(stand_in, known.value)
            return stand_in
        result = self._run(func, args, kwargs, tensors)
        if func is aten._local_scalar_dense.default:
            return self._read_number(args[0], result)
        self._record(func, args, kwargs, result)
        if known.value is not None:  # a view of what is known
            self.constants.know(result, known.value)
        return result

    def _looked_at_otherwise(self, view: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Returns a tensor whose axes are changed in place. It stands for a view from then on, and
        that is what is recorded."""
        seen = self.__torch_dispatch__(view, types, args, kwargs)
        func(*args, **kwargs)
        setattr(args[0], _NUMBER, getattr(seen, _NUMBER))
        known = self.constants.value(seen)
        if known is not None:
            self.constants.know(args[0], known)
        return args[0]

    def _with_output_size(self, repeats: torch.Tensor, options: Any) -> Any:
        """Returns a repetition's options with the size of its result, if that follows from
        constants: Keras's segment sums repeat each number as often as a shape says."""
        known = self.constants.value(repeats)
        if known is None or options.get("output_size") is not None:
            return options
        with private.without_modes():
            return {**options, "output_size": int(known.sum())}

    def _normalized(self, types: Any, args: Any) -> Any:
        """Returns the results of normalization in training. Its operator writes the moving
        statistics, and its schema does not say so. So an operator that returns them is recorded,
        which may run again, and copies of them as late as possible."""
        functional = aten._native_batch_norm_legit_functional.default
        *results, mean, variance = self.__torch_dispatch__(functional, types, args)
        self._late += [(args[3], mean), (args[4], variance)]
        if self.predicate:  # a branch's tensors are not known outside of it
            self.write_late()
        return tuple(results)

    def write_late(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Records the copies that were put off. If ``tensors`` are given, only copies into the
        memory of these are recorded."""
        used = None if tensors is None else set(map(private.storage_key, tensors))
        due = [pair for pair in self._late if used is None or private.storage_key(pair[0]) in used]
        self._late = [pair for pair in self._late if not any(pair is one for one in due)]
        for tensor, new in due:
            self.__torch_dispatch__(aten.copy_.default, (), (tensor, new))

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs a call on tensors without memory and returns its result. If all tensors of a call
        had memory, PyTorch's mode would write them."""
        with_memory = [t for t in tensors if not private.is_fake(t)]
        if not (with_memory and func._schema.is_mutable):
            return func(*args, **kwargs)
        stand_ins = {id(t): self.fake_mode.from_tensor(t) for t in with_memory}
        given = tree_map_only(torch.Tensor, lambda t: stand_ins.get(id(t), t), (args, kwargs))
        result = func(*given[0], **given[1])
        back = {id(stand_ins[id(t)]): t for t in with_memory}
        return tree_map_only(torch.Tensor, lambda t: back.get(id(t), t), result)

    def _read_number(self, tensor: torch.Tensor, symbol: Any) -> Any:
        if not isinstance(symbol, (torch.SymFloat, torch.SymInt)):
            raise UnsupportedModelError(
                "The step asks in Python for the value of a tensor. Use keras.ops.where or "
                "keras.ops.cond."
            )
        self._symbols[str(symbol.node.expr)] = self.number(tensor)
        return symbol

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = tree_map_only((torch.SymFloat, torch.SymInt), self.scalar, (args, kwargs))
        given = tree_map_only(torch.Tensor, lambda t: Ref(self.number(t)), given)
        given = tree_map_only(torch.Generator, self._generator, given)
        writes: tuple[int, ...] = ()
        if func._schema.is_mutable:
            tensors = tensors_in(private.written_arguments(func, args, kwargs))
            writes = tuple(map(self.number, tensors))
            self.constants.forget(tensors)
        call_at, outputs = len(self.recording.calls), list[int | None]()
        for leaf in () if result is None else tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                outputs.append(None)
                continue
            known = getattr(leaf, _NUMBER, None)
            outputs.append(self._new(leaf, born=True) if known is None else int(known))
        self.recording.calls.append(
            Call(
                func, given[0], given[1], tuple(outputs), writes, self._phase(), self.predicate,
                call_at, private.scope(),
            )
        )  # fmt: skip

    def _phase(self) -> str:
        if private.in_backward():
            self._has_gone_back = True
            return BACKWARD
        return UPDATE if self._has_gone_back and not torch.is_grad_enabled() else FORWARD

    def _generator(self, generator: torch.Generator) -> Generator:
        seed = self._seeds.tensor(generator)
        if seed is None:
            raise UnsupportedModelError(
                "The step draws from a torch.Generator of its own, whose state is hidden. Use "
                "keras.random with a SeedGenerator."
            )
        return Generator(self.number(seed))

    def scalar(self, number: Any) -> Any:
        """Returns the stand-in for a number that is read from tensors."""
        expression = number.node.expr
        if not expression.free_symbols:
            return (int if isinstance(number, torch.SymInt) else float)(expression)
        names = sorted(map(str, expression.free_symbols))
        return Scalar(
            private.python_of(expression), tuple((name, self._symbols[name]) for name in names)
        )
