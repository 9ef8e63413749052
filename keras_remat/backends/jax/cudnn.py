"""Plans layers of cuDNN's for a card that is not there.

Two of Keras's layers leave their work to cuDNN on a GPU: attention (flash attention), and the LSTM.
Its kernels are compiled only where a GPU and cuDNN are. For a card, attention is traced as XLA's
own, which computes the same and keeps more. An LSTM is traced as a loop, which keeps less and is
slower. If the card would have been given cuDNN's kernels, a remark says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keras_remat.backends import keras_private
from keras_remat.backends.jax import private
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

HALF_DTYPES = ("float16", "bfloat16")
"""Types in which cuDNN's attention computes, on NVIDIA's cards from Ampere on."""


def remark(model: Any, target: Target) -> str | None:
    """Returns a remark on layers that a card runs otherwise than planned; ``None`` if it runs none
    so."""
    if target.is_live:
        return None
    attending = [
        layer.name
        for layer, chosen in keras_private.attention_layers(model).items()
        if chosen or (layer.compute_dtype in HALF_DTYPES and not target.before_ampere)
    ]
    told = []
    if attending:
        told.append(
            f"Attention of {_named(attending)} is planned as XLA's own, which takes more memory: "
            "cuDNN's is compiled only on a device with cuDNN. To train with what is planned, call "
            "keras.config.disable_flash_attention() before the model is built."
        )
    recurrent = [layer.name for layer in keras_private.cudnn_lstms(model)]
    if recurrent and private.has_cudnn_lstm():
        told.append(
            f"{_named(recurrent)} is planned as a loop: cuDNN's LSTM, which keeps more and is "
            "faster, is compiled only on a device with cuDNN. To train with what is planned, "
            "build it with use_cudnn=False."
        )
    return " ".join(told) or None


def _named(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def without_cudnn(model: Any, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a step whose layers leave nothing to cuDNN, whenever it is traced."""

    def train_step(state: Any, batch: Any) -> Any:
        with keras_private.without_cudnn(model):
            return step(state, batch)

    return train_step


@contextmanager
def refused(model: Any) -> Iterator[None]:
    """Builds and traces a model without cuDNN's attention.

    Raises:
        UnsupportedModelError: the model's own code asks for it.
    """
    try:
        with keras_private.without_cudnn(model):
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
