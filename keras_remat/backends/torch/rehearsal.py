"""Checks that the step after a recorded one would be the same.

A recorded step may leave something in Python that the next one reads: a tensor in an attribute, or
a number that it changed. Then the next step is gone through, too. A plan does in every step what
was recorded. So a step must not use what the one before has left, and its result must not follow
from a counter, or from whether it is the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from keras_remat.backends.torch.held import Settings, tensors_left_in
from keras_remat.backends.torch.recorder import (
    Call,
    Generator,
    Recorder,
    Recording,
    Ref,
    Scalar,
    storages_that_vary,
)
from keras_remat.errors import UnsupportedModelError

_LEFT_IN_PYTHON = (
    "The step reads a tensor that the step before it left in {name}, which a plan does not do. "
    "Keep it in a buffer of the module (register_buffer), or in a variable (add_weight)."
)
_COUNTED = (
    "What the step computes follows from {name}, which it changes in Python: a plan would have the "
    "value that it was recorded with in every step. Keep it in a variable (add_weight), or in a "
    "buffer of the module (register_buffer)."
)
#: Elements of the largest constant that is compared.
_MOST_ELEMENTS = 64


def check_next_step(
    recorder: Recorder,
    model: Any,
    stand_ins: Sequence[torch.Tensor],
    settings: Settings,
    step: Callable[[], Any],
) -> None:
    """Goes through a step once more if that may be another one.

    Args:
        recorder: the active recorder, which has recorded the step.
        stand_ins: stand-ins of the tensors that the model holds.
        settings: what Python held before the step.
        step: the step.

    Raises:
        UnsupportedModelError: the next step is another one.
    """
    recording = recorder.recording
    vary = storages_that_vary(recording)
    left = [
        (name, tensor)
        for name, tensor in tensors_left_in(model, stand_ins)
        if recording.layouts[recorder.number(tensor)].storage in vary
    ]
    changed = settings.changed()
    if not (left or changed):
        return
    first = len(recording.calls)
    with recorder.rehearsing():
        for name, tensor in left:
            recorder.refuse(tensor, _LEFT_IN_PYTHON.format(name=name))
        step()
        again = recorder.recording
        if changed and not _are_alike(again.calls[:first], again, again.calls[first:], again):
            raise UnsupportedModelError(_COUNTED.format(name=" or ".join(dict.fromkeys(changed))))


def compute_the_same(one: Recording, other: Recording) -> bool:
    """Returns whether two recordings of a step make the same calls. Of constants, only those with
    few elements are compared."""
    is_as_long = len(one.calls) == len(other.calls)
    return is_as_long and _are_alike(one.calls, one, other.calls, other)


def _are_alike(
    calls: Sequence[Call], recording: Recording, others: Sequence[Call], its: Recording
) -> bool:
    """Returns whether calls are those of another step.

    The calls may go on after the others end, with copies that were put off until the end of their
    step.

    Args:
        recording, its: recordings of the calls and of the others.
    """
    return len(others) <= len(calls) and all(
        _described(recording, one) == _described(its, two)
        for one, two in zip(calls, others, strict=False)
    )


def _described(recording: Recording, call: Call) -> tuple[Any, ...]:
    """Returns what a call does, whichever tensors it is given."""

    def described(leaf: Any) -> str:
        if isinstance(leaf, Ref):
            value = recording.constants.get(leaf.number)
            is_small = value is not None and value.numel() <= _MOST_ELEMENTS
            return repr(value.tolist()) if is_small and value is not None else "a tensor"
        if isinstance(leaf, Scalar):
            text = leaf.text
            for name, _ in leaf.symbols:
                text = text.replace(name, "a number")
            return text
        return "a generator" if isinstance(leaf, Generator) else repr(leaf)

    leaves = tree_leaves((call.args, call.kwargs))
    return (call.operator, *map(described, leaves))
