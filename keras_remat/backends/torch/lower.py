"""Runs a schedule as a train step: the function that :mod:`.writer` writes, with its inputs."""

from __future__ import annotations

from typing import Any

import keras
import torch

from keras_remat.backends.batches import leaves_of
from keras_remat.backends.torch.device import Device
from keras_remat.backends.torch.recorder import Ref, Scalar
from keras_remat.backends.torch.trace import TorchTracedStep
from keras_remat.backends.torch.variables import drop_gradients
from keras_remat.backends.torch.writer import compiled
from keras_remat.core.schedule import Schedule


class LoweredStep:
    """Runs one schedule as a train step; call it with a batch of the traced shape.

    Args:
        traced: the step the schedule's graph came from.
        schedule: a legal order.
        device: notes what the step takes, and times ops while it records.
    """

    def __init__(self, traced: TorchTracedStep, schedule: Schedule, device: Device):
        self.schedule, self._device = schedule, device
        self.replace(traced)

    def replace(self, traced: TorchTracedStep) -> None:
        """Runs the schedule on another recording with the same graph from now on."""
        self.traced, schedule = traced, self.schedule
        self._step, self._writer = compiled(traced.program, traced.graph, schedule.order)
        self._probed: Any = None
        self._constants = [traced.program.recording.constants[n] for n in self._writer.constants]

    def __call__(self, batch: Any) -> Any:
        """Runs one step; returns what ``train_step`` returns."""
        drop_gradients(self.traced.places.own)  # before the bytes in use are noted
        return self._device.run(self, batch, self._run)

    def _run(self, batch: Any) -> Any:
        traced = self.traced
        leaves = [  # a step is recorded for batches without gaps
            torch.as_tensor(leaf).contiguous() for leaf in leaves_of(batch) if leaf is not None
        ]
        own = traced.places.own
        given = [
            own[at].tensor if at < len(own) else leaves[at - len(own)] for at in self._writer.inputs
        ]
        with torch.no_grad():
            results = self._function()([*given, *self._constants])
        return _packed(traced.logs, dict(zip(traced.program.results, results, strict=True)))

    def _function(self) -> Any:
        if not self._device.is_recording:
            return self._step
        if self._probed is None:
            program, graph = self.traced.program, self.traced.graph
            self._probed, _ = compiled(program, graph, self.schedule.order, self._device.probe)
        return self._probed


def _packed(logs: Any, results: dict[int, torch.Tensor]) -> Any:
    """Returns the result of ``train_step`` as it was recorded, filled with a step's results."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return results[leaf.number]
        if isinstance(leaf, Scalar):
            read = {name: results[number].item() for name, number in leaf.symbols}
            return eval(leaf.text, {}, read)  # a text of ours
        return leaf

    return keras.tree.map_structure(value, logs)
