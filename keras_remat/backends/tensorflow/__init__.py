"""Provides the TensorFlow backend: steps in order (:mod:`.ordered`) and, where XLA compiles, as one
program (:mod:`.compiled`).

TensorFlow is imported only when a backend is asked for: planning in another process
(:mod:`keras_remat.planning.background`) needs only the memory model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

if TYPE_CHECKING:
    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend


def backend() -> TensorFlowBackend:
    """Returns the backend for plans made outside of ``fit``."""
    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend

    return TensorFlowBackend()


def backends(model: Any, compilation: str, target: Target | None = None) -> list[TensorFlowBackend]:
    """Returns the backends that can train a model on TensorFlow, the one to start with first.

    Args:
        target: an absent card: the step is compiled for it, but not run.

    Raises:
        UnsupportedModelError: a card cannot be planned for.
    """
    from keras_remat.backends.tensorflow.compiled import CompiledBackend
    from keras_remat.backends.tensorflow.mirrored import backend as mirrored

    several = mirrored.trains_on_several_devices(model)
    if target is not None and not target.is_live:
        where = target.name
        if several:
            raise UnsupportedModelError(
                f"The model trains under a strategy, and {where} is one device: make it outside."
            )
        if compilation == "ordered":
            raise UnsupportedModelError(
                f'compilation="ordered" needs the device itself, and {where} is compiled for: '
                "leave compilation out."
            )
        return [CompiledBackend(target)]
    if several:
        return [mirrored.MirroredBackend(model)]
    if compilation == "compiled":
        return [CompiledBackend()]
    if compilation == "auto" and model.jit_compile and not model.run_eagerly:
        return [CompiledBackend(), backend()]
    return [backend()]
