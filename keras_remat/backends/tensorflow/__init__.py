"""TensorFlow, the first backend: in order (:mod:`.ordered`) and, where XLA compiles, as one program
(:mod:`.compiled`)."""

from __future__ import annotations

from typing import Any

from keras_remat.backends.tensorflow.compiled import CompiledBackend
from keras_remat.backends.tensorflow.mirrored.backend import (
    MirroredBackend,
    trains_on_several_devices,
)
from keras_remat.backends.tensorflow.ordered.backend import TensorFlowBackend


def backend() -> TensorFlowBackend:
    """The backend that plans are made for outside of ``fit``."""
    return TensorFlowBackend()


def backends(model: Any, compilation: str) -> list[TensorFlowBackend]:
    """The backends that can train a model on TensorFlow, the one to begin with first."""
    if trains_on_several_devices(model):
        return [MirroredBackend(model)]
    if compilation == "compiled":
        return [CompiledBackend()]
    if compilation == "auto" and model.jit_compile and not model.run_eagerly:
        return [CompiledBackend(), TensorFlowBackend()]
    return [TensorFlowBackend()]
