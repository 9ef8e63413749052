"""What a step takes of the device's memory, and of time.

*On a CPU* PyTorch keeps no statistics. What is in use between steps are the bytes of what the
model, its optimizer and its metrics hold, of the gradients that a step leaves on the weights, and
of the batch. What a step adds is seen by the profiler's memory events, to the byte, with what
kernels allocate for themselves; it is watched in the first two calls of every step, and is what
they add in later ones, too. oneDNN's own scratch is not seen.

*On a GPU* the caching allocator keeps statistics: in use is what it has handed out, rounded up to
512 bytes and to whole blocks. What it has reserved is more; the driver's own memory and other
processes' are taken off the total.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

import torch

from keras_remat.backends.batches import batch_bytes, leaves_of
from keras_remat.backends.host import host_memory_bytes
from keras_remat.backends.torch import private
from keras_remat.backends.torch.variables import held_bytes, watch_gradients
from keras_remat.core.graph import Op
from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")
#: So many calls of a step are watched. The first one of Keras's own finds no gradients of the step
#: before.
_WATCHED_CALLS = 2
#: What the texts of out of memory contain, where the error is not of a type of its own.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether PyTorch raised an error because the device had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """Returns what tells batches of one shape from those of another."""
    leaves = [leaf for leaf in leaves_of(batch) if leaf is not None]
    return tuple((tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for leaf in leaves)


class Device:
    """Is the device that one model trains on.

    Attributes:
        probe: is called with every position of a schedule before its op, while op times are
            recorded; ``None`` else.
    """

    has_statistics = True

    def __init__(self) -> None:
        self.probe: Callable[[int], None] | None = None

    @property
    def is_recording(self) -> bool:
        """Returns whether op times are recorded."""
        return self.probe is not None

    def trains(self, model: Any) -> None:
        """Takes down which model trains on it."""

    def expect(self, step: Any, added_bytes: int) -> None:
        """Takes down what a step is predicted to add to what is in use."""

    def run(self, step: Any, batch: Any, call: Callable[[Any], Result]) -> Result:
        """Returns ``call(batch)``, of which it notes what it takes.

        Args:
            step: of which it is a call.
        """
        return call(batch)

    def floor_advice(self, op: Op) -> str:
        """Returns what makes an op need less; nothing is known to."""
        return ""


class CpuDevice(Device):
    """Stands for the host's memory; see the module."""

    name = "CPU:0"

    def __init__(self) -> None:
        super().__init__()
        self._model: weakref.ref[Any] | None = None
        self._batch_bytes = 0
        self._added: dict[Any, tuple[int, int]] = {}  # step → what its newest call added, calls
        self._expected: dict[Any, int] = {}
        self._peak_bytes, self._aside_s = 0, 0.0
        self._is_waited_for, self._was_watched = True, False
        #: Memory events of the steps that ran while op times were recorded.
        self.recorded: list[list[tuple[int, int]]] = []

    def trains(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def expect(self, step: Any, added_bytes: int) -> None:
        self._expected[step] = added_bytes

    def run(self, step: Any, batch: Any, call: Callable[[Any], Result]) -> Result:
        self._batch_bytes = batch_bytes(batch)
        added, calls = self._added.get(step, (self._expected.get(step, 0), 0))
        is_watched = self._is_waited_for and (calls < _WATCHED_CALLS or self.is_recording)
        if not is_watched or private.profiler_runs():
            if self._is_waited_for:
                self._peak_bytes = max(self._peak_bytes, self.in_use_bytes() + added)
            self._was_watched = private.notes_memory()
            return call(batch)
        before, ended = self.in_use_bytes(), time.perf_counter()
        events: list[tuple[int, int]] = []
        # no event tells that something is freed which was there before the first watched step
        freed, watches = ([], []) if self._was_watched else self._watched_gradients()
        self._was_watched = True
        try:
            with private.memory_events() as events:
                try:
                    return call(batch)
                finally:
                    ended = time.perf_counter()
        finally:
            del watches
            events = sorted([*events, *freed])
            added = max(accumulate((nbytes for _, nbytes in events), initial=0))
            self._added[step] = added, calls + 1
            self._peak_bytes = max(self._peak_bytes, before + added)
            self._aside_s += time.perf_counter() - ended
            if self.is_recording:
                self.recorded.append(events)

    def _watched_gradients(self) -> tuple[list[tuple[int, int]], list[Any]]:
        model = None if self._model is None else self._model()
        return ([], []) if model is None else watch_gradients(model, torch.device("cpu"))

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once and returns its result with its time and peak. Where it is not waited for, it
        costs no more than the step, and the peak is what the last one took that was."""
        if not wait:
            self._is_waited_for = False
            try:
                return run(), Usage(0.0, self._peak_bytes)
            finally:
                self._is_waited_for = True
        self._peak_bytes, self._aside_s = 0, 0.0
        started = time.perf_counter()
        result = run()
        elapsed_s = time.perf_counter() - started - self._aside_s
        return result, Usage(max(0.0, elapsed_s), max(self._peak_bytes, self.in_use_bytes()))

    def in_use_bytes(self) -> int:
        """Returns the bytes of what is there between steps."""
        model = None if self._model is None else self._model()
        held = 0 if model is None else held_bytes(model, torch.device("cpu"))
        return held + self._batch_bytes

    def note_batch(self, batch: Any) -> None:
        """Takes a batch for the one that is in use, before a step trains it."""
        self._batch_bytes = batch_bytes(batch)

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement began."""
        return max(self._peak_bytes, self.in_use_bytes())

    def begin_watch(self) -> None:
        """Begins to watch Keras's own steps, of which it is known what they add. Nothing is noted
        while they run, unless somebody has all noted: no event will tell that what they allocate is
        freed."""
        self._was_watched = private.notes_memory()

    def watched_peak_bytes(self) -> int:
        """Returns what Keras's own steps took that were watched."""
        added = [one for step, (one, _) in self._added.items() if isinstance(step, tuple)]
        return self.in_use_bytes() + max(added, default=0)

    def phase_peak_bytes(self) -> int:
        """Returns 0: nothing but steps is counted."""
        return 0

    def total_bytes(self) -> int:
        """Returns all the memory that this process may use."""
        return host_memory_bytes(self.in_use_bytes())


class CudaDevice(Device):
    """Stands for a GPU whose memory PyTorch's caching allocator hands out; see the module.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int):
        super().__init__()
        self._index = index
        self.name = f"cuda:{index}"
        self._has_workspaces = False

    def trains(self, model: Any) -> None:
        """Has cuBLAS take its workspaces, which every step that multiplies matrices makes it
        keep: what is in use then counts them before the first step."""
        if not self._has_workspaces:
            self._has_workspaces = True
            with torch.no_grad():
                ones = torch.ones((64, 64), device=self.name)
                torch.addmm(ones[0], ones @ ones, ones)

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once and returns its result with its time and the allocator's peak; the peak is
        known once the call returns, the time where it is waited for."""
        if wait:
            torch.cuda.synchronize(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        started = time.perf_counter()
        result = run()
        if wait:
            torch.cuda.synchronize(self._index)
        elapsed_s = time.perf_counter() - started if wait else 0.0
        return result, Usage(elapsed_s, self.peak_bytes())

    def note_batch(self, batch: Any) -> None:
        """Does nothing: ``fit`` gives tensors of the host."""

    def in_use_bytes(self) -> int:
        """Returns the bytes that the allocator has handed out."""
        return int(torch.cuda.memory_allocated(self._index))

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement, or a watch, began, whatever ran."""
        return int(torch.cuda.max_memory_allocated(self._index))

    watched_peak_bytes = phase_peak_bytes = peak_bytes

    def begin_watch(self) -> None:
        """Resets the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def total_bytes(self) -> int:
        """Returns what the allocator may hand out: what it has, what is free on the card, and no
        more than the fraction that the process was given."""
        free, total = torch.cuda.mem_get_info(self._index)
        reserved = int(torch.cuda.memory_reserved(self._index))
        fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        return min(int(free) + reserved, int(fraction * total))


def live_device() -> CpuDevice | CudaDevice:
    """Returns the device that Keras trains on.

    Raises:
        UnsupportedModelError: neither a CPU nor a CUDA GPU.
    """
    device = private.device()
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return CudaDevice(index)
    raise UnsupportedModelError(
        f"Keras trains on {device.type!r}; on PyTorch, steps are planned on a CPU and on CUDA GPUs."
    )
