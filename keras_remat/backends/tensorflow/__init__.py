"""TensorFlow, the first backend: in order (:mod:`.ordered`) and, where XLA compiles, as one program
(:mod:`.compiled`).

TensorFlow is imported when a backend is asked for: planning in a process of its own
(:mod:`keras_remat.planning.background`) needs the memory model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError

if TYPE_CHECKING:
    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend


def backend() -> TensorFlowBackend:
    """Returns the backend that plans are made for outside of ``fit``."""
    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend

    return TensorFlowBackend()


def backends(model: Any, compilation: str, target: Target | None = None) -> list[TensorFlowBackend]:
    """Returns the backends that can train a model on TensorFlow, the one to begin with first.

    Args:
        target: a card that is not there: the step is compiled for it, and none runs.

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
