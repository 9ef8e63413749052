"""Finds what Python holds that a step may read and set.

These are attributes of the model, its layers and objects of the user's own, and the global
variables that their code names. Keras's own step reads them anew every time. A plan has the values
of the time when its step was recorded. So changes have to be seen (:class:`Settings`, and
:mod:`.rehearsal` for what the step itself changes), and what recording leaves there has to go
(:func:`attributes_kept`).

Known limit: variables that a function closes over (``nonlocal``) are not looked at. In containers
that lie in other containers, only tensors are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import keras
import numpy as np
import torch

from keras_remat.backends.torch import private

_NOT_OF_THE_USER = {"keras", "keras_remat", "numpy", "torch"}
#: Attributes that no step reads: loops set them between steps, or Keras in a layer's first call.
_READ_BY_NO_STEP = {"training", "stop_training", "stop_evaluating", "stop_predicting", "_called"}


@dataclass(frozen=True, eq=False)
class _Table:
    """Holds the attributes of one object, or the variables of one module.

    Args:
        label: the class of the object, or the module's name.
        values: its ``__dict__``.
        names: names of the entries that count; ``None`` for all.
    """

    label: str
    values: dict[str, Any]
    names: frozenset[str] | None = None

    def items(self) -> list[tuple[str, Any]]:
        """Returns the entries that count."""
        if self.names is None:
            return list(self.values.items())
        return [(name, self.values[name]) for name in self.names if name in self.values]


def held_in(nested: Any) -> Iterator[Any]:
    """Yields what containers hold, also those inside of other containers."""
    if not isinstance(nested, (list, tuple, set, Mapping)):
        yield nested
        return
    for held in nested.values() if isinstance(nested, Mapping) else nested:
        yield from held_in(held)


def optimizers_of(model: Any) -> list[Any]:
    """Returns a model's optimizers: the compiled one, and those it has as attributes, in lists,
    tuples and dictionaries, too."""
    found = [getattr(model, "optimizer", None), *held_in(tuple(vars(model).values()))]
    optimizers = [one for one in found if isinstance(one, keras.optimizers.Optimizer)]
    return list({id(one): one for one in optimizers}.values())


def _tables_of(model: Any) -> list[_Table]:
    """Returns the tables of a model: the attributes of the model, its layers, optimizers and
    losses, and of objects of the user's own that they hold; and the variables of the modules of
    their code, as far as the code names them."""
    losses = [one for one in held_in(model.loss) if isinstance(one, keras.losses.Loss)]
    known = (model, *private.modules(model), *optimizers_of(model), *losses)
    owners = {id(owner): owner for owner in known}
    codes: set[CodeType] = set()
    modules: dict[int, tuple[dict[str, Any], set[str]]] = {}
    waiting = list(owners.values())
    while waiting:
        owner = waiting.pop()
        held = [*held_in(tuple(vars(owner).values()))]
        for function in (*_methods_of(owner), *held):
            held += _named_by(function, codes, modules)
        for one in held:
            if id(one) not in owners and _is_of_the_user(one):
                owners[id(one)] = one
                waiting.append(one)
    return [
        *(_Table(type(owner).__name__, vars(owner)) for owner in owners.values()),
        *(
            _Table(str(values.get("__name__")), values, frozenset(names))
            for values, names in modules.values()
        ),
    ]


def _methods_of(owner: Any) -> Iterator[Any]:
    """Yields the functions of an object's classes that are the user's own."""
    for kind in type(owner).__mro__:
        if not _is_known(kind.__module__):
            for member in vars(kind).values():
                yield getattr(member, "fget", None) or getattr(member, "__func__", member)


def _named_by(
    function: Any, codes: set[CodeType], modules: dict[int, tuple[dict[str, Any], set[str]]]
) -> Iterator[Any]:
    """Notes the global variables that a function of the user's names, and those that the functions
    among them name; yields the objects in them whose class is of the same package.

    Args:
        codes: the code that was looked at; this function's is added.
        modules: the named variables of each module; new ones are added.
    """
    waiting = [function]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or _is_known(function.__module__ or ""):
            continue
        values, bodies = function.__globals__, [function.__code__]
        names = modules.setdefault(id(values), (values, set()))[1]
        while bodies:
            body = bodies.pop()
            if body in codes:
                continue
            codes.add(body)
            bodies += [one for one in body.co_consts if isinstance(one, CodeType)]
            names.update(name for name in body.co_names if not name.startswith("__"))
            for name in body.co_names:
                waiting.append(values.get(name))
                for held in held_in(values.get(name)):
                    if _package(type(held).__module__) == _package(function.__module__):
                        yield held


def _is_known(module: str) -> bool:
    """Returns whether a module is one of Keras's, PyTorch's, NumPy's, or Python's own."""
    package = _package(module)
    is_script = package == "__main__"  # which Python counts among its own
    return package in _NOT_OF_THE_USER or (package in sys.stdlib_module_names and not is_script)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_of_the_user(thing: Any) -> bool:
    """Returns whether an object has attributes, and a class of the user's own."""
    is_value = isinstance(thing, (torch.Tensor, type, FunctionType))
    return not is_value and hasattr(thing, "__dict__") and not _is_known(type(thing).__module__)


class Settings:
    """Sees which plain values, numbers and texts, are set: by callbacks for instance, or by a step.

    Args:
        model: the model whose step reads them. Attributes that it gets later are not looked at.
    """

    def __init__(self, model: Any):
        self._places = [
            (f"{table.label}.{name}", table.values, name)
            for table in _tables_of(model)
            for name, value in table.items()
            if isinstance(value, (bool, int, float, str, np.generic))
            and name not in _READ_BY_NO_STEP
        ]
        self.note()

    def note(self) -> None:
        """Notes the values that the next step is to have."""
        self._known = self._now()

    def changed(self) -> list[str]:
        """Returns the names of the values that were set since they were noted."""
        return [
            place[0]
            for place, before, now in zip(self._places, self._known, self._now(), strict=True)
            if now is not before and not _are_equal(now, before)
        ]

    def forget(self, names: Sequence[str]) -> None:
        """Stops looking at some of the values."""
        self._places = [place for place in self._places if place[0] not in names]
        self.note()

    def _now(self) -> list[Any]:
        return [values.get(attribute) for _, values, attribute in self._places]


def _are_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(np.all(one == other))


@contextmanager
def attributes_kept(model: Any) -> Iterator[None]:
    """Puts back what a step sets in Python while it is recorded.

    Such a step leaves tensors without memory there and objects that hold them, such as an optimizer
    of PyTorch's that is made in the first step, and counts of a step that was not run. Lists and
    dictionaries are put back, too. Of the containers that Keras tracks, only those that have got
    such a tensor are: ``add_loss`` fills them.
    """
    tables = _tables_of(model)
    held = [one for table in tables for _, one in table.items() if isinstance(one, (dict, list))]
    before = [(table, dict(table.items())) for table in tables]
    filled: list[tuple[Any, Any]] = [
        (one, dict(one) if isinstance(one, dict) else list(one)) for one in held
    ]
    try:
        yield
    finally:
        for table, kept in before:
            _put_back(table.values, kept, table.names)
        for now, kept in filled:
            if type(now) not in (dict, list) and not any(map(_is_fake, held_in(now))):
                continue
            if isinstance(now, list):
                now[:] = kept
            else:
                _put_back(now, kept, None)


def _is_fake(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and private.is_fake(thing)


def _put_back(now: dict[Any, Any], kept: dict[Any, Any], names: frozenset[str] | None) -> None:
    """Puts the entries of a dictionary back. Entries that are new go: those with the given names,
    or all."""
    for name in (now.keys() if names is None else now.keys() & names) - kept.keys():
        del now[name]
    now.update(kept)


def tensors_left_in(model: Any, stand_ins: Sequence[torch.Tensor]) -> list[tuple[str, Any]]:
    """Returns the tensors without memory that a step has left in Python, except for the stand-ins,
    each with the name of its place."""
    own = set(map(id, stand_ins))
    return [
        (f"{table.label}.{name}", held)
        for table in _tables_of(model)
        for name, value in table.items()
        for held in held_in(value)
        if _is_fake(held) and id(held) not in own
    ]
