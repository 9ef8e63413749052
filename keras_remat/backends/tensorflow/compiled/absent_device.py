"""Represents an absent card as TensorFlow's device.

TensorFlow itself compiles only for devices that exist. So TensorFlow lowers a step to HLO, and
JAX's compiler compiles it (:mod:`keras_remat.backends.xla.card_compiler`).

Known limit: TensorFlow lowers for its CPU. A few of its operations are lowered differently for a
GPU.
"""

from __future__ import annotations

from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice
from keras_remat.core.target import Target


class AbsentDevice(TensorFlowDevice):
    """Represents an absent card: no step runs on it, and nothing is measured.

    Args:
        target: the card.
    """

    has_statistics = False

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target, self.name = target, target.device

    def remark(self) -> str | None:
        """Returns nothing: no allocator is known."""
        return None

    def in_use_bytes(self) -> int:
        """Returns 0: nothing is in use."""
        return 0

    def peak_bytes(self) -> int:
        """Returns 0: nothing runs."""
        return 0

    def total_bytes(self) -> int:
        """Returns all the memory of the card, which is more than a framework uses by default."""
        return self._target.memory_bytes
