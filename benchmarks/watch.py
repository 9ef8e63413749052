"""What a step of ``fit`` takes, seen from outside of what is being measured."""

from __future__ import annotations

import time
from typing import Any

import keras

_LONG_EPOCHS = 10_000


def statistics() -> dict[str, int]:
    """The device allocator's ``current`` and ``peak`` bytes, where it keeps them; JAX's ``limit``,
    too."""
    if keras.backend.backend() == "jax":
        import jax

        told = jax.local_devices()[0].memory_stats() or {}
        names = {"current": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
        return {name: int(told[key]) for name, key in names.items() if key in told}
    import tensorflow as tf

    return dict(tf.config.experimental.get_memory_info(_device()))


def reset_peak() -> None:
    """Starts a new peak, where that can be done."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(_device())


def _device() -> str:
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def long_fit(
    model: keras.Model, *data: Any, epochs: int, callbacks: list[Any], **options: Any
) -> None:
    """Trains the first ``epochs`` of a silent ``fit`` that is announced as long: no more is solved
    for than the steps that are left can repay, and what is measured here stands for long fits.
    Batches come in the same order in every epoch."""

    def end_epoch(epoch: int, logs: Any) -> None:
        model.stop_training |= epoch + 1 >= epochs

    end = keras.callbacks.LambdaCallback(on_epoch_end=end_epoch)
    options |= {"epochs": _LONG_EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(*data, **options, callbacks=[*callbacks, end])


class StepWatch(keras.callbacks.Callback):
    """Notes every step's peak, seconds and loss.

    Attributes:
        peaks: bytes, of every step; 0 where the allocator keeps no statistics.
        times_s: seconds, likewise.
        losses: as Keras logs them.
        epochs_s: the seconds by epoch.
        resident_bytes: the most in use between two steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[int] = []
        self.times_s: list[float] = []
        self.losses: list[float] = []
        self.epochs_s: list[list[float]] = []
        self.resident_bytes = 0
        self._began_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs_s.append([])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        reset_peak()
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float((logs or {})["loss"]))  # waits for the step
        self.times_s.append(time.perf_counter() - self._began_s)
        self.epochs_s[-1].append(self.times_s[-1])
        told = statistics()
        self.peaks.append(told.get("peak", 0))
        self.resident_bytes = max(self.resident_bytes, told.get("current", 0))
