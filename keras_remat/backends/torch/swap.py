"""Take the place of Keras's train function while ``fit`` runs, and give it back.

Keras looks ``model.train_function`` up at every step, so replacing the attribute takes effect with
the next one. On PyTorch it is called with a list of one batch and returns the logs.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.torch.device import Device, shapes_of


class InstalledTrainFunction(Installed):
    """Is the train function of one ``fit``, and asks ``runner`` for every batch.

    Args:
        model, runner: as in :class:`~keras_remat.backends.installed.Installed`.
        device: notes what Keras's own step takes.
    """

    def __init__(self, model: Any, runner: StepRunner, device: Device):
        super().__init__(model, runner)
        self._device = device

    def synchronize(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def run_plain(self, batch: Any) -> Any:
        key = ("plain", *shapes_of(batch))
        return self._device.run(key, batch, lambda given: self.original([given]))
