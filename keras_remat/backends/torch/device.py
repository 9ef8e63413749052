"""Measures what a step takes of the device's memory, and of time.

*On a CPU* PyTorch keeps no statistics. In use between steps are the bytes that the model, its
optimizer and its metrics hold, those of the gradients that a step leaves on the weights, and those
of the batch. The profiler's memory events show what a step adds, to the byte, including what
kernels allocate for themselves. The first two calls of every step are watched; later ones are taken
to add the same. oneDNN's own scratch is not seen.

*On a GPU* the caching allocator keeps statistics. In use is what it has handed out, rounded up to
512 bytes and to whole blocks. It has reserved more than that. The memory of the driver and of other
processes is taken off the total.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from keras_remat.backends.batches import batch_bytes, leaves_of
from keras_remat.backends.host import host_memory_bytes
from keras_remat.backends.torch import private
from keras_remat.backends.torch.variables import held_bytes, watch_gradients
from keras_remat.core.graph import Op
from keras_remat.core.schedule import Usage
from keras_remat.errors import UnsupportedModelError

Result = TypeVar("Result")
#: How many calls of a step are watched. In the first one of Keras's own, there are no gradients of
#: a step before.
_WATCHED_CALLS = 2
#: Texts in out-of-memory errors that have no type of their own.
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
    """Returns a key that is equal for batches of the same shapes and types."""
    leaves = [leaf for leaf in leaves_of(batch) if leaf is not None]
    return tuple((tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for leaf in leaves)


class Device:
    """Is the device that one model trains on.

    Attributes:
        probe: called before every op with its position in the schedule, while op times are
            recorded; else ``None``.
    """

    has_statistics = True

    probe: Callable[[int], None] | None = None

    @property
    def is_recording(self) -> bool:
        """Returns whether op times are recorded."""
        return self.probe is not None

    def trains(self, model: Any) -> None:
        """Notes the model that trains on it."""

    def note_batch(self, batch: Any) -> None:
        """Notes a batch that is in memory before a step trains it."""

    def expect(self, step: Any, added_bytes: int) -> None:
        """Notes how many bytes a step is predicted to add to those in use."""

    def run(self, step: Any, batch: Any, call: Callable[[Any], Result]) -> Result:
        """Runs ``call(batch)``, notes what the call takes, and returns its result.

        Args:
            step: the planned step that is called, or a key of Keras's own step for these shapes.
        """
        return call(batch)

    def floor_advice(self, op: Op) -> str:
        """Returns no advice: nothing is known to make an op need less."""
        return ""


class CpuDevice(Device):
    """Stands for the host's memory; see the module."""

    name = "CPU:0"

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None
        self._batch_bytes = 0
        # what the newest call of a step added, and how many calls were watched: of Keras's own step
        # by the shapes of its batch, and of a plan's by the step, as long as somebody holds it
        self._added_plainly: dict[Any, tuple[int, int]] = {}
        self._added: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._peak_bytes, self._aside_s = 0, 0.0
        self._is_waited_for, self._was_watched = True, False
        #: Memory events of each step that ran while op times were recorded.
        self.recorded: list[list[tuple[int, int]]] = []

    def trains(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def expect(self, step: Any, added_bytes: int) -> None:
        self._added[step] = added_bytes, 0

    def run(self, step: Any, batch: Any, call: Callable[[Any], Result]) -> Result:
        self._batch_bytes = batch_bytes(batch)
        known = self._added_plainly if isinstance(step, tuple) else self._added
        added, calls = known.get(step, (0, 0))
        is_watched = self._is_waited_for and (calls < _WATCHED_CALLS or self.is_recording)
        if not is_watched or private.profiler_runs():
            if self._is_waited_for:
                self._peak_bytes = max(self._peak_bytes, self.in_use_bytes() + added)
            self._was_watched = private.notes_memory()
            return call(batch)
        before, ended = self.in_use_bytes(), time.perf_counter()
        events: list[tuple[int, int]] = []
        # no event shows the freeing of memory that was there before the first watched step
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
            known[step] = added, calls + 1
            self._peak_bytes = max(self._peak_bytes, before + added)
            self._aside_s += time.perf_counter() - ended
            if self.is_recording:
                self.recorded.append(events)

    def _watched_gradients(self) -> tuple[list[tuple[int, int]], list[Any]]:
        model = None if self._model is None else self._model()
        return ([], []) if model is None else watch_gradients(model, torch.device("cpu"))

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once and returns its result with its time and peak. If ``wait`` is false, it costs
        no more than the step, and the peak is that of the last run that was waited for."""
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
        """Returns the bytes that are in use between steps."""
        model = None if self._model is None else self._model()
        held = 0 if model is None else held_bytes(model, torch.device("cpu"))
        return held + self._batch_bytes

    def note_batch(self, batch: Any) -> None:
        self._batch_bytes = batch_bytes(batch)

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement began."""
        return max(self._peak_bytes, self.in_use_bytes())

    def begin_watch(self) -> None:
        """Begins to watch Keras's own steps, whose added bytes are known. No memory is noted while
        they run, unless somebody has all of it noted. So no event will show that memory they
        allocate is freed."""
        self._was_watched = private.notes_memory()

    def watched_peak_bytes(self) -> int:
        """Returns the peak of Keras's own steps, by the most that one of them adds."""
        added = (nbytes for nbytes, _ in self._added_plainly.values())
        return self.in_use_bytes() + max(added, default=0)

    def phase_peak_bytes(self) -> int:
        """Returns 0: only steps are counted."""
        return 0

    def total_bytes(self) -> int:
        """Returns all the memory that this process may use."""
        return host_memory_bytes(self.in_use_bytes())


class CudaDevice(Device):
    """Stands for a GPU whose memory PyTorch's caching allocator hands out; see the module.

    Args:
        index: the GPU's number.
    """

    def __init__(self, index: int):
        self._index = index
        self.name = f"cuda:{index}"
        self._has_workspaces = False

    def trains(self, model: Any) -> None:
        """Makes cuBLAS take its workspaces, which it keeps from the first matrix product on. So the
        bytes in use count them before the first step."""
        if not self._has_workspaces:
            self._has_workspaces = True
            with torch.no_grad():
                ones = torch.ones((64, 64), device=self.name)
                torch.addmm(ones[0], ones @ ones, ones)

    def measure(self, run: Callable[[], Result], *, wait: bool = True) -> tuple[Result, Usage]:
        """Runs once and returns its result with its time and the allocator's peak. The peak is
        known once the call returns, the time only if ``wait`` is true."""
        if wait:
            torch.cuda.synchronize(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        started = time.perf_counter()
        result = run()
        if wait:
            torch.cuda.synchronize(self._index)
        elapsed_s = time.perf_counter() - started if wait else 0.0
        return result, Usage(elapsed_s, self.peak_bytes())

    def in_use_bytes(self) -> int:
        """Returns the bytes that the allocator has handed out."""
        return int(torch.cuda.memory_allocated(self._index))

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement or a watch began, whatever ran."""
        return int(torch.cuda.max_memory_allocated(self._index))

    watched_peak_bytes = phase_peak_bytes = peak_bytes

    def begin_watch(self) -> None:
        """Resets the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def total_bytes(self) -> int:
        """Returns the bytes the allocator may hand out: those it has and those free on the card,
        but no more than the fraction that the process was given."""
        free, total = torch.cuda.mem_get_info(self._index)
        reserved = int(torch.cuda.memory_reserved(self._index))
        fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        return min(int(free) + reserved, int(fraction * total))


def live_device() -> CpuDevice | CudaDevice:
    """Returns the device that Keras trains on.

    Raises:
        UnsupportedModelError: it is neither a CPU nor a CUDA GPU.
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
