"""Take the place of Keras's train function while ``fit`` runs, and give it back.

Keras looks ``model.train_function`` up at every step, so replacing the attribute takes effect with
the next one. On PyTorch it is called with a list of one batch and returns the logs.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_remat.backends.installed import Caller, Installed, StepRunner
from keras_remat.backends.torch.device import Device, shapes_of
from keras_remat.backends.torch.variables import weights_of
from keras_remat.errors import UnsupportedModelError

#: How often a step is planned anew because other weights learn: a network that is released layer by
#: layer, which is done in some ten stages, asks for that often.
_MOST_CHANGES = 16


class InstalledTrainFunction(Installed):
    """Is the train function of one ``fit``, and asks ``runner`` for every batch.

    Args:
        model, runner: as in :class:`~keras_remat.backends.installed.Installed`.
        device: notes what Keras's own step takes.
    """

    def __init__(self, model: Any, runner: StepRunner, device: Device):
        super().__init__(model, runner)
        self._device = device
        self._weights: list[torch.Tensor] = []
        self._learn: tuple[bool, ...] = ()  # which of them do
        self._changes = 0

    def _trained(self, iterator: Any, caller: Caller) -> Any:
        if self._are_others_to_learn():
            self._changes += 1
            self._runner.begin_anew()
        return super()._trained(iterator, caller)

    def _are_others_to_learn(self) -> bool:
        """Returns whether a callback has frozen or released weights since the call before: Keras's
        own step obeys at once."""
        self._weights = self._weights or weights_of(self._model)
        before = self._learn
        self._learn = tuple(weight.requires_grad for weight in self._weights)
        return bool(before) and self._learn != before

    def check_runs_as_graph(self) -> None:
        """Raises also where callbacks freeze and release weights in ever so many steps, of which
        each is recorded and planned for."""
        super().check_runs_as_graph()
        if self._changes > _MOST_CHANGES:
            raise UnsupportedModelError(
                f"Weights were frozen or released {self._changes} times in this fit, and a step is "
                f"planned anew for that {_MOST_CHANGES} times at most. Freeze them before fit, or "
                "seldom."
            )

    def synchronize(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def run_plain(self, batch: Any) -> Any:
        key = ("plain", *shapes_of(batch))
        return self._device.run(key, batch, lambda given: self.original([given]))
