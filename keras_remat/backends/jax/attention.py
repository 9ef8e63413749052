"""Attention of a step that is planned for a card that is not there.

cuDNN's attention (flash attention) is a call of a kernel that cuDNN itself must find for the
shapes, so it is compiled only where a GPU and cuDNN are. For a card, Keras's layers are traced with
XLA's own attention, which computes the same and keeps more. Where the card would have been given
cuDNN's, that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras_remat.backends import keras_private
from keras_remat.backends.jax import private
from keras_remat.backends.jax.kinds import TRITON_CAPABILITY
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

HALF_DTYPES = ("float16", "bfloat16")
"""What cuDNN's attention computes in, on cards of :data:`TRITON_CAPABILITY` and later ones."""


def remark(model: Any, target: Target) -> str | None:
    """Returns that a model's attention on a card is another one than is planned for; ``None`` where
    it is not."""
    if target.is_live:
        return None
    modern = (target.capability or TRITON_CAPABILITY) >= TRITON_CAPABILITY
    names = [
        layer.name
        for layer, chosen in keras_private.attention_layers(model).items()
        if chosen or (modern and layer.compute_dtype in HALF_DTYPES)
    ]
    if not names:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"Attention of {names[0]!r}{others} is planned as XLA's own, which takes more memory: "
        "cuDNN's is compiled only on a device with cuDNN. To train with what is planned, call "
        "keras.config.disable_flash_attention() before the model is built."
    )


def without_cudnn(model: Any, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a step whose layers leave attention to no kernel of cuDNN's, whenever it is
    traced."""

    def train_step(state: Any, batch: Any) -> Any:
        with keras_private.without_flash_attention(model):
            return step(state, batch)

    return train_step


@contextmanager
def refused(model: Any) -> Iterator[None]:
    """Builds and traces a model without cuDNN's attention.

    Raises:
        UnsupportedModelError: its own code asks for that.
    """
    try:
        with keras_private.without_flash_attention(model):
            yield
    except RuntimeError as error:
        if not private.lacks_cudnn(error):
            raise
        told = str(error).strip().splitlines()[0][:100]
        raise UnsupportedModelError(
            "The model's own code asks for cuDNN's attention, which is compiled only on a device "
            f'with cuDNN ({told}). Leave out flash_attention=True, or implementation="cudnn", '
            "where a card is asked about: XLA's own attention computes the same, and takes more "
            "memory."
        ) from error
