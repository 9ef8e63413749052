"""Finds the tensors that a train step reads and writes and that outlive it.

These are a model's variables, its optimizer's, its metrics', Keras's global seed, and the
parameters and buffers of wrapped torch modules. A torch module may hold the very tensor of a Keras
variable under a name of its own. While a step is recorded, both have to hold the same stand-in.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keras_remat.backends.torch import private
from keras_remat.backends.torch.held import optimizers_of
from keras_remat.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Place:
    """Says where a tensor that outlives a step is kept.

    Args:
        owner: a Keras variable, or a table of a torch module.
        name: the tensor's name in the table; ``None`` for a variable.
    """

    owner: Any
    name: str | None = None

    @property
    def tensor(self) -> Any:
        """Returns the tensor that is there now. While a step is recorded, it may put something else
        there, or nothing."""
        if self.name is None:
            return private.value_of(self.owner)
        return self.owner.get(self.name)

    def put(self, tensor: torch.Tensor) -> None:
        """Puts another tensor there."""
        if self.name is None:
            private.set_value(self.owner, tensor)
        else:
            self.owner[self.name] = tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Holds the places of all tensors that a step may touch.

    Args:
        own: one place for every tensor.
        twins: further places of the same tensors, in torch modules.
    """

    own: tuple[Place, ...]
    twins: tuple[Place, ...]

    def write_back(self, stand_ins: Sequence[torch.Tensor], memory: Sequence[int]) -> None:
        """Copies tensors that a step has put into its places into the stand-ins.

        A module may give a buffer a new tensor in every step; the step of a plan keeps the old one.

        Args:
            stand_ins: stand-ins of ``own``.
            memory: the keys of their storages before the step.

        Raises:
            UnsupportedModelError: the tensor does not fit there, or a stand-in has other memory.
        """
        for place, stand_in, key in zip(self.own, stand_ins, memory, strict=True):
            if private.storage_key(stand_in) != key:
                name = place.owner.path if place.name is None else place.name
                raise UnsupportedModelError(
                    f"The step assigns to the .data of {name!r}, which gives it other memory. "
                    "Write into it instead, by copy_."
                )
        known = set(map(id, stand_ins))
        for place in self.twins:
            if id(place.tensor) not in known:
                raise UnsupportedModelError(
                    f"The step puts another tensor in the place of the parameter {place.name!r}, "
                    "which is a variable of Keras's, too. Write into it instead, by copy_."
                )
        for place, stand_in in zip(self.own, stand_ins, strict=True):
            new = place.tensor
            if new is stand_in:
                continue
            if getattr(new, "shape", None) != stand_in.shape or new.dtype != stand_in.dtype:
                raise UnsupportedModelError(
                    f"The step puts {_described(new)} in the place of the buffer {place.name!r}, "
                    f"which was {_described(stand_in)}. Keep its shape and dtype."
                )
            stand_in.copy_(new)
            place.put(stand_in)

    @contextmanager
    def replaced(self, stand_ins: Sequence[torch.Tensor]) -> Iterator[None]:
        """Puts one tensor into each place of ``own``, and the old ones back afterwards."""
        before = [place.tensor for place in self.own]
        of = {id(old): new for old, new in zip(before, stand_ins, strict=True)}
        twins = [place.tensor for place in self.twins]
        try:
            for place, new in zip(self.own, stand_ins, strict=True):
                place.put(new)
            for place, old in zip(self.twins, twins, strict=True):
                place.put(of[id(old)])
            yield
        finally:
            for place, old in zip((*self.own, *self.twins), (*before, *twins), strict=True):
                place.put(old)


def _described(thing: Any) -> str:
    if not isinstance(thing, torch.Tensor):
        return repr(thing)
    return f"a tensor of shape {tuple(thing.shape)} and {thing.dtype}"


def variables_of(model: Any) -> list[Any]:
    """Returns the Keras variables that a train step of a model may read or write, each once."""
    known = [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *(variable for optimizer in optimizers_of(model) for variable in optimizer.variables),
        *model.metrics_variables,
        *private.global_seed_state(),
    ]
    return list({id(variable): variable for variable in known}.values())


def places_of(model: Any) -> Places:
    """Returns the places of all tensors that a train step of a model may touch."""
    variables = [Place(v) for v in variables_of(model) if private.value_of(v) is not None]
    held = {id(place.tensor) for place in variables}
    own, twins = list(variables), list[Place]()
    for module in private.modules(model):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                place = Place(table, name)
                (twins if id(tensor) in held else own).append(place)
                held.add(id(tensor))
    return Places(tuple(own), tuple(twins))


def weights_of(model: Any) -> list[torch.Tensor]:
    """Returns the tensors of a model that may be frozen or released while it trains."""
    tensors = (place.tensor for place in places_of(model).own)
    return [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]


@contextmanager
def training_mode(model: Any) -> Iterator[None]:
    """Switches a model's torch modules to training, as ``fit`` does, and afterwards back."""
    before = [(module, module.training) for module in private.modules(model)]
    model.train()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def drop_gradients(places: Iterable[Place]) -> None:
    """Frees the gradients that an earlier step has left on weights, as Keras's step does."""
    for place in places:
        place.tensor.grad = None


def gradient_bytes(places: Iterable[Place], device: torch.device) -> int:
    """Returns the bytes on a device of the gradients that an earlier step has left on weights."""
    return _storage_bytes(_gradients(places), device)


def _gradients(places: Iterable[Place]) -> list[torch.Tensor]:
    """Returns the gradients that an earlier step has left on weights."""
    left = (place.tensor.grad for place in places if place.tensor.is_leaf)
    return [gradient for gradient in left if gradient is not None]


def watch_gradients(model: Any, device: torch.device) -> tuple[list[tuple[int, int]], list[Any]]:
    """Watches the gradients that are left on weights. Returns a list that gets the time in
    nanoseconds at which each is freed, with its bytes as a negative number; and the watches, which
    have to be kept meanwhile."""
    freed: list[tuple[int, int]] = []
    watches = []
    for gradient in _gradients(places_of(model).own):
        for part in private.parts_of(gradient):
            if part.device.type != device.type:
                continue
            storage = part.untyped_storage()
            nbytes = int(storage.nbytes())

            def note(_: Any, nbytes: int = nbytes) -> None:
                freed.append((time.time_ns(), -nbytes))

            watches.append(weakref.ref(storage, note))
    return freed, watches


def held_bytes(model: Any, device: torch.device) -> int:
    """Returns the bytes on a device of all tensors that outlive a step of a model, and of the
    gradients left on its weights. Shared memory counts once."""
    own = places_of(model).own
    return _storage_bytes([*(place.tensor for place in own), *_gradients(own)], device)


def _storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Returns the bytes of tensors on a device; shared memory counts once."""
    storages = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            for part in private.parts_of(tensor):
                storages[private.storage_key(part)] = int(part.untyped_storage().nbytes())
    return sum(storages.values())


def snapshot(model: Any, written: Iterable[torch.Tensor] = ()) -> Callable[[], None]:
    """Copies all tensors that a step may touch to the host, and returns a function that restores
    them.

    The states of torch's own generators are copied, too. On a CPU, too, the copies are memory that
    PyTorch's allocator does not know: they are alive while a step runs.

    Args:
        model: the model of the step.
        written: tensors that the step writes besides the model's.
    """
    kept = [(place, _copied(place.tensor)) for place in places_of(model).own]
    beside = [(tensor, _copied(tensor)) for tensor in written]
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if private.device().type == "cuda" else None

    def put_back() -> None:
        with torch.no_grad():
            for place, copy in kept:
                place.tensor.grad = None
                _once(place.tensor).copy_(copy)
            for tensor, copy in beside:
                _once(tensor).copy_(copy)
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)

    return put_back


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without the axes along which it repeats the same memory, as in a buffer that
    was expanded."""
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(axis, 0, min(1, tensor.shape[axis]))
    return tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in memory of NumPy's."""
    tensor = _once(tensor)
    count = tensor.numel()
    # PyTorch looks at no memory of 0 bytes as another type
    memory = np.empty(max(1, count) * tensor.element_size(), np.uint8)
    copy = torch.from_numpy(memory).view(tensor.dtype)[:count].view(tensor.shape)
    return copy.copy_(tensor.detach())
