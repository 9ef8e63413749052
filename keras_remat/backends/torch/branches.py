"""Records ``keras.ops.cond``, which on PyTorch is a Python ``if`` on a tensor's value.

If a branch returns nothing and changes variables (an update that is skipped if gradients are not
finite, an average that is taken every tenth step), its calls are recorded under a predicate, which
a step reads once. If branches return values and do nothing else, both are computed, and the value
is chosen. If a predicate is known when the step is recorded, only its branch is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from keras_remat.backends.torch import private
from keras_remat.backends.torch.recorder import Call, Recorder
from keras_remat.errors import UnsupportedModelError


class Branches:
    """Stands in for Keras's ``cond`` while a recorder is active."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        """Records the calls of both branches, or of the one that is known to be taken."""
        if private.is_symbolic_call():
            return true_fn()
        if not isinstance(pred, torch.Tensor):
            return true_fn() if pred else false_fn()
        number, known = self._recorder.number(pred), self._recorder.constants.value(pred)
        if known is not None:
            return true_fn() if bool(known) else false_fn()
        taken, calls = self._recorded(number, True, true_fn)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(taken)):
            self._unconditional(calls)
            other, calls = self._recorded(number, False, false_fn)
            self._unconditional(calls)
            return _chosen(pred, taken, other)
        self._recorded(number, False, false_fn)
        if any(leaf is not None for leaf in tree_leaves(taken)):
            raise UnsupportedModelError(
                "A branch of keras.ops.cond returns Python numbers, and which ones follows from a "
                "tensor's value. Return tensors."
            )
        return taken

    def _recorded(
        self, number: int, wanted: bool, branch: Callable[[], Any]
    ) -> tuple[Any, list[int]]:
        """Returns a branch's result, and the indices of its calls."""
        recorder = self._recorder
        before, first = recorder.predicate, len(recorder.recording.calls)
        recorder.predicate = (*before, (number, wanted))
        try:
            result = branch()
        finally:
            recorder.predicate = before
        return result, list(range(first, len(recorder.recording.calls)))

    def _unconditional(self, at: list[int]) -> None:
        """Takes a branch's predicate off its calls: they are made whichever branch is taken.

        Raises:
            UnsupportedModelError: the calls change variables, or draw random numbers.
        """
        calls, depth = self._recorder.recording.calls, len(self._recorder.predicate)
        for index in at:
            if _has_effect(calls[index]):
                raise UnsupportedModelError(
                    "A branch of keras.ops.cond returns tensors and changes variables, or draws "
                    "random numbers. Let it do one of the two."
                )
            inner = calls[index].predicate[depth + 1 :]
            calls[index] = replace(calls[index], predicate=(*self._recorder.predicate, *inner))


def _has_effect(call: Call) -> bool:
    return bool(call.writes) or torch.Tag.nondeterministic_seeded in call.operator.tags


def _chosen(pred: torch.Tensor, taken: Any, other: Any) -> Any:
    """Returns the value of one of two branches that were both computed."""
    (yes, structure), (no, other_structure) = tree_flatten(taken), tree_flatten(other)
    if structure != other_structure:
        raise UnsupportedModelError(
            f"Two branches of keras.ops.cond differ in what they return: {structure} and "
            f"{other_structure}. Return the same structure from both."
        )
    yes, no = ([keras.ops.convert_to_tensor(leaf) for leaf in leaves] for leaves in (yes, no))
    for one, two in zip(yes, no, strict=True):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            raise UnsupportedModelError(
                f"Two branches of keras.ops.cond return tensors of shape {tuple(one.shape)} and "
                f"{tuple(two.shape)}, of type {one.dtype} and {two.dtype}."
            )
        if torch.is_grad_enabled() and (one.requires_grad or two.requires_grad):
            raise UnsupportedModelError(
                "The loss is differentiated through a keras.ops.cond. A recorded step computes "
                "both branches, and would differentiate both. Use keras.ops.where."
            )
    pairs = zip(yes, no, strict=True)
    return tree_unflatten([torch.where(pred, one, two) for one, two in pairs], structure)
