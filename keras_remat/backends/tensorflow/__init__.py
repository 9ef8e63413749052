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
    """The backend that plans are made for outside of ``fit``."""
    from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend

    return TensorFlowBackend()


def backends(model: Any, compilation: str, target: Target | None = None) -> list[TensorFlowBackend]:
    """The backends that can train a model on TensorFlow, the one to begin with first.

    Raises:
        UnsupportedModelError: a target was given, and TensorFlow compiles for live devices only.
    """
    if target is not None:
        raise UnsupportedModelError(
            f"Keras runs on TensorFlow, which compiles for a device that is there, and not for "
            f"{target.card or target.device}. Set KERAS_BACKEND=jax for a model written in Keras's "
            "own ops. A plan belongs to the backend that it was made on; "
            "keras_remat.will_it_fit answers on either."
        )
    from keras_remat.backends.tensorflow.compiled import CompiledBackend
    from keras_remat.backends.tensorflow.mirrored import backend as mirrored

    if mirrored.trains_on_several_devices(model):
        return [mirrored.MirroredBackend(model)]
    if compilation == "compiled":
        return [CompiledBackend()]
    if compilation == "auto" and model.jit_compile and not model.run_eagerly:
        return [CompiledBackend(), backend()]
    return [backend()]
