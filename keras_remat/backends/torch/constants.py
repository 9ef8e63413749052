"""Makes calls that depend on constants alone when a step is recorded.

Keras computes small numbers from shapes, and some of them decide what it does next (the AUC metric
repeats a threshold as often as a product of dimensions says). So small tensors that follow from
numbers alone are computed at once, until something writes them. A tensor that the step closes over
is no such number: it is read in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from keras_remat.backends.tables import names
from keras_remat.backends.torch import private

#: Elements of the largest tensor that is computed at once.
_MOST_ELEMENTS = 1 << 12
_MADE_OF_SHAPES = names("ones zeros full empty")
_FACTORIES = names("full arange ones zeros scalar_tensor eye linspace")
_FILLED_LIKE = names("ones_like zeros_like full_like")
_VALUE = "_keras_remat_value"


@dataclass(frozen=True)
class Known:
    """Holds what is known of a call's result.

    Args:
        value: the result; ``None`` if it depends on the step's inputs.
        is_new: whether the value replaces the call. A view does not: its call is recorded.
    """

    value: Any = None
    is_new: bool = False


class Constants:
    """Holds the values of the tensors that are known while a step is recorded."""

    def __init__(self) -> None:
        self._written: set[int] = set()  # storages of constants

    def know(self, stand_in: torch.Tensor, value: torch.Tensor) -> None:
        """Notes the value of a tensor."""
        setattr(stand_in, _VALUE, value)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor's value; ``None`` if it is not known."""
        known: torch.Tensor | None = getattr(tensor, _VALUE, None)
        if known is None or private.storage_key(tensor) in self._written:
            return None
        return known

    def forget(self, written: Sequence[torch.Tensor]) -> None:
        """Forgets the values of tensors that are written, and of all tensors that look at the same
        memory."""
        known = [tensor for tensor in written if self.value(tensor) is not None]
        self._written.update(map(private.storage_key, known))

    def folded(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Known:
        """Computes a call on known values, and returns what is known of its result.

        Args:
            tensors: the tensors among the arguments.
        """
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return Known()
        values = self._values(private.schema_name(func), args, tensors)
        if values is None:
            return Known()
        with private.without_modes(), torch.no_grad():
            given = tree_map_only(torch.Tensor, lambda t: values[id(t)], (args, kwargs))
            result = func(*given[0], **given[1])
            if private.schema_name(func) == "lift_fresh":
                return Known(result.clone(), is_new=True)
        if not isinstance(result, torch.Tensor):
            is_number = isinstance(result, (int, float, bool))
            return Known(result, is_new=True) if is_number else Known()
        key = private.storage_key(result)
        if any(key == private.storage_key(value) for value in values.values()):
            return Known(result)  # a view, of whatever size: it has no memory of its own
        return Known(result, is_new=True) if result.numel() <= _MOST_ELEMENTS else Known()

    def _values(
        self, name: str, args: Any, tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor] | None:
        """Returns tensor id → value, for the tensors among the arguments; ``None`` if one value is
        not known, or the call is not worth it."""
        if not tensors:
            is_small = name not in _MADE_OF_SHAPES or _elements(args[0]) <= _MOST_ELEMENTS
            return {} if name in _FACTORIES and is_small else None
        if name in _FILLED_LIKE:
            like = tensors[0]
            if like.numel() > _MOST_ELEMENTS:
                return None
            with private.without_modes():
                shape, stride = tuple(map(int, like.shape)), tuple(map(int, like.stride()))
                made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
            return {id(like): made} if len(tensors) == 1 else None
        values = {}
        for tensor in tensors:
            # a tensor that the step closes over may be written between two steps; a lifted one is
            # the step's own
            lifted = name == "lift_fresh" and not private.is_fake(tensor)
            value = tensor if lifted else self.value(tensor)
            if value is None or value.numel() > _MOST_ELEMENTS:
                return None
            values[id(tensor)] = value
        return values


def _elements(shape: Any) -> int:
    return math.prod(shape) if isinstance(shape, (list, tuple)) else _MOST_ELEMENTS + 1
