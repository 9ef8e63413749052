"""What a step of ``fit`` takes, seen from outside of what is being measured."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import keras

_LONG_EPOCHS = 10_000
#: Bytes of the tensor that tells where a step begins among the profiler's memory events.
_MARK_BYTES = 1_000_003


def statistics() -> dict[str, int]:
    """The device allocator's ``current`` and ``peak`` bytes, where it keeps them; JAX's ``limit``,
    too."""
    if keras.backend.backend() == "jax":
        import jax

        told = jax.local_devices()[0].memory_stats() or {}
        names = {"current": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
        return {name: int(told[key]) for name, key in names.items() if key in told}
    if keras.backend.backend() == "torch":
        import torch

        if not torch.cuda.is_available():
            return {}
        peak, current = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return {"current": current, "peak": peak}
    import tensorflow as tf

    return dict(tf.config.experimental.get_memory_info(_device()))


def reset_peak() -> None:
    """Starts a new peak, where that can be done."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(_device())
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


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


class Repeated(keras.utils.PyDataset):
    """The same batch, again and again: an epoch of any length in the memory of one batch."""

    def __init__(self, batch: Any, count: int):
        super().__init__()
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._batch


def is_on_torch_cpu() -> bool:
    """Whether steps run on PyTorch, on a device that keeps no statistics."""
    return keras.backend.backend() == "torch" and not statistics()


class TorchEpoch:
    """Tells what every step of an epoch takes of a CPU's memory, on PyTorch.

    PyTorch keeps no statistics of a CPU. The profiler says what is allocated and freed, kernels'
    own buffers included; what is in use when the epoch ends is counted, so all that came before is
    known, too.
    """

    def __init__(self, model: keras.Model):
        from keras_remat.backends.torch import private

        self._model, self._session = model, ExitStack()
        self._events = self._session.enter_context(private.memory_events())

    def step_begins(self) -> None:
        """Marks the place among the events."""
        import torch

        torch.empty(_MARK_BYTES, dtype=torch.uint8)  # freed at once

    def ends(self, batch_bytes: int | None) -> tuple[list[int], int]:
        """Ends it, and returns the peak of every step, and what was in use at the end.

        The peak of the first one is 0, for unknown: nothing tells when it frees what was there
        before the epoch, the last gradients among it.

        Args:
            batch_bytes: of the last batch, which is still there; ``None`` where batches are
                PyTorch's own, and between some steps there is none, and no gradient.
        """
        import torch

        from keras_remat.backends.torch.variables import held_bytes

        self._session.close()
        held = held_bytes(self._model, torch.device("cpu"))
        changes = [nbytes for _, nbytes in self._events]
        sums = list(accumulate(changes))
        begins = [at for at, nbytes in enumerate(changes) if nbytes == _MARK_BYTES]
        if batch_bytes is None:
            weights = self._model.trainable_weights
            left = sum(w.value.grad.nbytes for w in weights if w.value.grad is not None)
            before = held - left - min(sums[at] - _MARK_BYTES for at in begins)
        else:
            before = held + batch_bytes - sums[-1]
        bounds = zip(begins[1:], [*begins[2:], len(changes)], strict=True)
        peaks = [0, *(before + max(sums[at + 1 : end]) for at, end in bounds)]
        return peaks, before + sums[-1]


class StepWatch(keras.callbacks.Callback):
    """Notes every step's peak, seconds and loss.

    Args:
        watched_epoch: in which a CPU's memory is watched on PyTorch; ``None`` for every one, which
            makes all steps slower.
        batch_bytes: of one batch, for that; ``None`` where the callback joins them.

    Attributes:
        peaks: bytes, of every step; 0 where the allocator keeps no statistics.
        times_s: seconds, likewise.
        cpu_s: seconds of all threads, which other processes do not lengthen.
        losses: as Keras logs them.
        epochs_s: the seconds by epoch.
        resident_bytes: the most in use between two steps.
    """

    def __init__(self, watched_epoch: int | None = 0, batch_bytes: int | None = 0) -> None:
        super().__init__()
        self._watched_epoch, self._batch_bytes = watched_epoch, batch_bytes
        self._torch: TorchEpoch | None = None
        self.peaks: list[int] = []
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []
        self.losses: list[float] = []
        self.epochs_s: list[list[float]] = []
        self.resident_bytes = 0
        self._began_s = self._cpu_began_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs_s.append([])
        if is_on_torch_cpu() and self._watched_epoch in (None, epoch):
            self._torch = TorchEpoch(self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        reset_peak()
        if self._torch is not None:
            self._torch.step_begins()
        self._began_s, self._cpu_began_s = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float((logs or {})["loss"]))  # waits for the step
        self.times_s.append(time.perf_counter() - self._began_s)
        self.cpu_s.append(time.process_time() - self._cpu_began_s)
        self.epochs_s[-1].append(self.times_s[-1])
        told = statistics()
        self.peaks.append(told.get("peak", 0))
        self.resident_bytes = max(self.resident_bytes, told.get("current", 0))
        if self._torch is not None and batch + 1 == self.params["steps"]:
            peaks, self.resident_bytes = self._torch.ends(self._batch_bytes)
            self.peaks[-len(peaks) :] = peaks
            self._torch = None
