"""Runs TensorFlow op by op on several replicas: one is traced and planned, all run its order."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import tensorflow as tf

from keras_remat.backends.installed import Installed, StepRunner
from keras_remat.backends.tensorflow.graph import replicas
from keras_remat.backends.tensorflow.graph.sharded import ShardedArray
from keras_remat.backends.tensorflow.memory import measure
from keras_remat.backends.tensorflow.mirrored.swap import MirroredTrainFunction
from keras_remat.backends.tensorflow.ordered.backend import (
    TensorFlowBackend,
    smallest_counted_bytes,
)
from keras_remat.backends.tensorflow.profiler.device import on_gpu
from keras_remat.backends.versions import OLDEST_FOR_REPLICAS, sentence_for
from keras_remat.errors import UnsupportedModelError

#: Why a strategy is refused, by its class.
_REASONS = {
    "CollectiveAllReduceStrategy": "Keras's own fit fails under it before the first step "
    "(keras-team/keras#20585)",
    "TPUStrategy": "a TPU runs only what XLA compiles, which keeps no order",
    "TPUStrategyV2": "a TPU runs only what XLA compiles, which keeps no order",
    "ParameterServerStrategyV2": "its workers do not run the same step at the same time",
    "CentralStorageStrategy": "its variables are on one device and not on every replica's",
    "OneDeviceStrategy": "on one device no strategy is needed",
}


def trains_on_several_devices(model: Any) -> bool:
    """Returns whether a model trains under a strategy."""
    return tf.distribute.has_strategy() or type(model.distribute_strategy) is not type(
        tf.distribute.get_strategy()
    )


class MirroredBackend(TensorFlowBackend):
    """Implements :class:`keras_remat.backends.base.Backend` for all replicas of one model.

    Args:
        model: the model, inside ``fit``.
    """

    runs_slices = False

    def __init__(self, model: Any):
        super().__init__()
        self._strategy = model.distribute_strategy
        self._is_first = True

    @cached_property
    def device(self) -> measure.TensorFlowDevice:
        """Returns the devices of all replicas; every number is one replica's."""
        devices = self._strategy.extended.worker_devices
        return measure.TensorFlowDevice([name.rpartition("device:")[2] for name in devices])

    def check(self, model: Any) -> str | None:
        """Refuses every strategy but ``MirroredStrategy``, with the reason.

        Raises:
            UnsupportedModelError: the strategy or the model's options are not supported.
        """
        strategy, kind = self._strategy, type(self._strategy).__name__
        if not isinstance(strategy, tf.distribute.MirroredStrategy):
            why = _REASONS.get(kind, "only tf.distribute.MirroredStrategy is supported")
            raise UnsupportedModelError(f"The model trains under {kind}: {why}.")
        reason = sentence_for("MirroredStrategy", OLDEST_FOR_REPLICAS)
        if reason:
            raise UnsupportedModelError(reason)
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
            raise UnsupportedModelError(
                "fit is called in the scope of another strategy than the model was made in."
            )
        super().check(model)
        if model.jit_compile:
            raise UnsupportedModelError(
                "jit_compile=True under MirroredStrategy: what XLA compiles keeps no order. "
                "Keras's own default there, jit_compile='auto', runs without XLA and can be "
                "scheduled."
            )
        devices = strategy.extended.worker_devices
        if on_gpu() != all("GPU" in device for device in devices):
            raise UnsupportedModelError(
                f"The replicas run on {', '.join(devices)}, and the device whose memory counts is "
                f"{self.device.name}."
            )
        self._check_mirrored(model)
        return None

    def _check_mirrored(self, model: Any) -> None:
        """Refuses a model or an optimizer that was made outside of the strategy's scope."""
        for variable in (*model.weights, *getattr(model.optimizer, "variables", ())):
            parts = self._strategy.experimental_local_results(variable.value)
            if len(parts) != self._strategy.num_replicas_in_sync:
                raise UnsupportedModelError(
                    f"{variable.path} is on {len(parts)} of {self._strategy.num_replicas_in_sync} "
                    "replicas: make and compile the model inside of strategy.scope()."
                )

    @property
    def batch_multiple(self) -> int:
        """Returns the number of replicas."""
        return int(self._strategy.num_replicas_in_sync)

    def resized_spec(self, batch: Any, size: int) -> Any:
        count = self.batch_multiple
        part = super().resized_spec(batch, size // count)
        return tf.nest.map_structure(
            lambda spec: None if spec is None else ShardedArray(None, (spec,) * count), part
        )

    def trace(self, model: Any, batch: Any, micro_batches: int = 1) -> Any:
        if micro_batches > 1:
            raise UnsupportedModelError(
                "Under MirroredStrategy a batch is divided among the replicas, and not into "
                "micro-batches."
            )
        if self._is_first and not on_gpu():
            # logical CPUs share a variable's bytes until it is written: write it, so that each
            # one's copy is resident
            self.snapshot(model)()
        self._is_first = False
        return super().trace(model, batch)

    def _traced(self, model: Any, batch: Any, micro_batches: int) -> Any:
        return replicas.trace(model, batch, smallest_counted_bytes(self.device))

    def install(self, model: Any, runner: StepRunner) -> Installed:
        self._installed = MirroredTrainFunction(model, runner)
        return self._installed
