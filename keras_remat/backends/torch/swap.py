"""Takes the place of Keras's train function while ``fit`` runs, and gives it back.

Keras looks ``model.train_function`` up at every step, so replacing the attribute takes effect with
the next one. On PyTorch it is called with a list of one batch and returns the logs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from keras_remat.backends.installed import Caller, Installed, StepRunner
from keras_remat.backends.torch.device import Device, shapes_of
from keras_remat.backends.torch.held import Settings
from keras_remat.backends.torch.variables import weights_of
from keras_remat.errors import UnsupportedModelError

#: How often a step is planned anew because other weights are trained, or recorded anew because a
#: setting was changed, whatever that takes. A network that is released layer by layer, in some ten
#: stages, needs that often.
_MOST_CHANGES = 16
#: A setting that was changed more often than that, and in more than one of so many steps, is not
#: followed. A recording takes up to 1.1 of a step's time (``benchmarks/results/ablation.md``), and
#: so adds a tenth.
_SELDOM = 10


class InstalledTrainFunction(Installed):
    """Is the train function of one ``fit``, and asks ``runner`` for every batch.

    Args:
        model, runner: as in :class:`~keras_remat.backends.installed.Installed`.
        device: measures what Keras's own step takes.
        record_anew: see :meth:`keras_remat.backends.torch.TorchBackend.record_anew`.
    """

    def __init__(
        self,
        model: Any,
        runner: StepRunner,
        device: Device,
        record_anew: Callable[[], bool | None],
    ):
        super().__init__(model, runner)
        self._device, self._record_anew = device, record_anew
        self._settings: Settings | None = None
        self._calls = 0
        self._changed: Counter[str] = Counter()  # setting → how often it was changed
        self._mattered: set[str] = set()  # the settings that change what a step computes
        self._weights: list[torch.Tensor] = []
        self._learn: tuple[bool, ...] = ()  # which of the weights learn
        self._changes = 0

    def _trained(self, iterator: Any, caller: Caller) -> Any:
        if self._are_others_to_learn():
            self._changes += 1
            self._runner.begin_anew()
        self._follow_settings()
        try:
            return super()._trained(iterator, caller)
        finally:
            if self._settings is not None:
                self._settings.note()  # values that the step sets itself are no change

    def _follow_settings(self) -> None:
        """Has steps recorded anew if a callback has set a value in Python that they may read.
        Keras's own step reads it every time."""
        self._calls += 1
        if self._settings is None:
            self._settings = Settings(self._model)
        names = self._settings.changed()
        if not names:
            return
        try:
            matters = self._record_anew()
        except UnsupportedModelError:  # it is planned anew, or the reason is given then
            matters = True
            self._runner.begin_anew()
        if matters is None:
            return
        self._changed.update(names)
        if matters:
            self._mattered.update(names)
        self._settings.forget([name for name in self._often() if name not in self._mattered])

    def _often(self) -> list[str]:
        """Returns the settings that change in too many steps to record each of these anew."""
        return [
            name
            for name, times in self._changed.items()
            if times > _MOST_CHANGES and times * _SELDOM > self._calls
        ]

    def _are_others_to_learn(self) -> bool:
        """Returns whether a callback has frozen or released weights since the call before: Keras's
        own step obeys at once."""
        self._weights = self._weights or weights_of(self._model)
        before = self._learn
        self._learn = tuple(weight.requires_grad for weight in self._weights)
        return bool(before) and self._learn != before

    def check_runs_as_graph(self) -> None:
        """Raises also if callbacks freeze and release weights, or set values that the step reads,
        too often to record or plan each of these steps."""
        super().check_runs_as_graph()
        if self._changes > _MOST_CHANGES:
            raise UnsupportedModelError(
                f"Weights were frozen or released {self._changes} times in this fit, and a step is "
                f"planned anew for that {_MOST_CHANGES} times at most. Freeze them before fit, or "
                "seldom."
            )
        often = [name for name in self._often() if name in self._mattered]
        if often:
            raise UnsupportedModelError(
                f"{often[0]} was set {self._changed[often[0]]} times in {self._calls} "
                "steps, and each time the step is recorded anew. Keep it in a variable "
                "(keras.Variable, add_weight), which a plan reads in every step, or set it seldom."
            )

    def synchronize(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def run_plain(self, batch: Any) -> Any:
        key = ("plain", *shapes_of(batch))
        return self._device.run(key, batch, lambda given: self.original([given]))
