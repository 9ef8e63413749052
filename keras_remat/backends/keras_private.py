"""What Keras does not promise to keep, and every backend needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def layers(model: Any) -> list[Any]:
    """Returns the layers of a model, nested ones too."""
    return list(model._flatten_layers())


def masks(arrays: Any) -> list[Any]:
    """Returns the mask of every array in a structure, ``None`` where there is none."""
    import keras
    from keras.src.backend import get_keras_mask

    return [get_keras_mask(leaf) for leaf in keras.tree.flatten(arrays)]


def records_steps(callback: Any) -> bool:
    """Returns whether a callback is a ``TensorBoard`` that records steps, or is going to."""
    if not getattr(callback, "_should_trace", False):
        return False
    is_later = getattr(callback, "_global_train_batch", 0) <= getattr(callback, "_stop_batch", 0)
    return is_later or getattr(callback, "_is_tracing", False)


@contextmanager
def wrapped(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Puts ``replacement`` in the place of a method, which becomes its first argument."""
    original, own = getattr(owner, name), vars(owner).get(name)

    def method(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    setattr(owner, name, method)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
