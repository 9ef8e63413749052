"""What a device will really show: the memory model of a backend, and its one calibration rule.

A solver keeps the bytes alive under a budget. A device shows more: its allocator rounds and
fragments, a compiler packs and copies. A :class:`MemoryModel` predicts what the device shows, and
alone remembers what was seen of it. It belongs to the backend, which is made anew for every
``fit``.

There are three kinds. Where the framework runs op by op, the allocator is replayed
(:class:`keras_remat.backends.tensorflow.memory.replayed.ReplayedMemory`). Where a compiler packs
all temporaries into one buffer, the model of its fusion is simulated
(:class:`keras_remat.backends.xla.compiled_memory.CompiledMemory`). Where nothing can be asked, the
bytes alive are all that is known (:class:`SimulatedMemory`). All three learn by
:class:`Calibration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from keras_remat.core.graph import Op
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.writing import Writing


class DeviceMemory(Protocol):
    """Tells what the device's allocator counts."""

    @property
    def name(self) -> str:
        """Returns the device, e.g. ``"GPU:0"``."""

    @property
    def has_statistics(self) -> bool:
        """Returns whether the allocator counts; where it does not, no peak can be measured."""

    def in_use_bytes(self) -> int:
        """Returns the bytes handed out now; 0 without statistics."""

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement began; 0 without statistics."""

    def begin_watch(self) -> None:
        """Begins to watch steps that are not measured one by one."""

    def watched_peak_bytes(self) -> int:
        """Returns the most bytes in use since the watch began; 0 without statistics."""

    def phase_peak_bytes(self) -> int:
        """Returns the most bytes in use since the watch began, whatever ran; 0 where the device
        counts steps only."""

    def total_bytes(self) -> int:
        """Returns all the memory that this process may use on the device."""

    def floor_advice(self, op: Op) -> str:
        """Returns what makes an op need less on this device; empty where nothing is known to."""


def is_on_host(device: DeviceMemory) -> bool:
    """Returns whether a device's memory is the host's, which holds the data, too."""
    return device.name.upper().startswith("CPU")


class MemoryModel(Protocol):
    """Predicts the peak that the device will show for a schedule; what is said here holds where a
    model knows no better."""

    order_matters: bool = False
    """Says whether moving ops about, with none recomputed more or less, changes the peak."""
    restores_after_plain: bool = False
    """Says whether a planned step that follows Keras's own shows its peak only after the model's
    state was put back between them."""

    rewrites: bool = False
    """Says whether a schedule that takes more than its problem's budget may be compiled in another
    way, which takes less and is slower."""
    smallest_bytes: int = 0
    """Says how large an array is at least that the device counts; 0 where it counts all."""

    def peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the predicted peak of a step, resident bytes included."""

    def plain_step_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the predicted peak of Keras's own step in an order, resident bytes included."""
        return self.peak_bytes(problem, schedule)

    def unordered_peak_bytes(
        self,
        problem: Problem,
        at_once: int,
        spare_bytes: int,
        ahead_bytes: Mapping[int, int],
    ) -> int:
        """Returns the most that a step takes, resident bytes included, whose ops run in no order;
        0 where that is not known.

        Args:
            problem: where all that its ops make fits its budget, that may be returned.
            at_once: how many ops run at the same time.
            spare_bytes: of the budget, which the step takes beside.
            ahead_bytes: op id → what it asks for beside its workspace; the same for all problems of
                a graph.
        """
        return 0

    def with_fewer_gaps(
        self, problem: Problem, schedule: Schedule, deadline_s: float
    ) -> Schedule | None:
        """Returns a schedule that leaves fewer gaps between the values in memory, found by
        ``deadline_s`` of ``time.thread_time``, or begun by then where the work is counted; ``None``
        where none is known.

        Args:
            problem: its budget is what the device may have in use.
        """
        return None

    def compiled_peak_bytes(self, problem: Problem, schedule: Schedule) -> int | None:
        """Returns the peak where compiling tells it before a run; ``None`` where only a run
        does."""
        return None

    def compiled_step_s(self, problem: Problem, schedule: Schedule) -> float | None:
        """Returns the seconds of a compiled step, by what the compiler made of it and of Keras's
        own, which takes what store-all is predicted to; ``None`` where that is not known."""
        return None

    def writing(self, problem: Problem, schedule: Schedule) -> Writing | None:
        """Returns how a schedule was compiled for a card, where a live device will not find out for
        itself."""
        return None

    def look(self, problem: Problem, held_bytes: Sequence[int], most_bytes: int) -> None:
        """Looks at what is free before a first plan, where that is seen without a step.

        Args:
            problem: that is planned for; its batch has come.
            held_bytes: of what the step will keep in use, each.
            most_bytes: what may be in use meanwhile.
        """
        return

    def observe(self, problem: Problem, schedule: Schedule, measured_peak_bytes: int) -> None:
        """Learns from what a schedule measured."""

    def afresh(self) -> MemoryModel:
        """Returns a model that has learnt nothing of schedules, as a later ``fit`` begins with;
        itself, where nothing is compiled."""
        return self


class Calibration:
    """Learns what a device needs above the simulated activation bytes of a schedule.

    How much that is depends on the model that trains and on how tight the schedule is. So every
    measurement is one point: the simulated activation bytes (peak − resident) and the surplus
    above them, both as shares of the activation bytes of store-all. Between points the surplus lies
    on the line through the neighbours; outside of them it is the nearest point's. A surplus below 0
    at the tightest point fades out, to 0 at half of its bytes: MobileNet's loose schedules measured
    a tenth less than simulated, and those of half their bytes as much as simulated
    (``benchmarks/max_batch.py --pool 512``). A surplus above 0 stays: faded out in the same way, it
    made plans too bold, and the smallest limit that ``fit`` keeps for MobileNetV2 on BFC rose from
    106 to 199 MiB (``benchmarks/step_memory.py``). Shares hold at every batch size, so what was
    learnt at one size serves the others.

    Args:
        first_ratio: what is taken before anything was measured.
    """

    def __init__(self, first_ratio: float = 1.0):
        self._first_ratio = first_ratio
        self._surplus: dict[float, float] = {}  # by tightness

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing was measured yet."""
        return not self._surplus

    def learn(self, simulated_bytes: int, store_all_bytes: int, measured_bytes: int) -> None:
        """Takes one measurement in; all three are activation bytes. The most counts."""
        if simulated_bytes > 0 and store_all_bytes > 0:
            tightness = simulated_bytes / store_all_bytes
            surplus = (measured_bytes - simulated_bytes) / store_all_bytes
            self._surplus[tightness] = max(surplus, self._surplus.get(tightness, surplus))

    def predict(self, simulated_bytes: int, store_all_bytes: int) -> int:
        """Returns the activation bytes that the device will need."""
        if self.is_empty or store_all_bytes <= 0:
            return int(simulated_bytes * self._first_ratio)
        known = sorted(self._surplus.items())
        if known[0][1] < 0:
            known.insert(0, (known[0][0] / 2, 0.0))
        tightness, surpluses = np.transpose(known)
        surplus = np.interp(simulated_bytes / store_all_bytes, tightness, surpluses)
        return max(0, round(simulated_bytes + float(surplus) * store_all_bytes))


class SimulatedMemory(MemoryModel):
    """Corrects by what was measured what is simulated: the bytes alive, which is what is known
    where nothing can be asked, or what an allocator makes of them."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._store_all: tuple[Problem, int] | None = None  # of the problem asked for last

    def uncalibrated_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the peak before any correction, resident bytes included."""
        return simulate(problem, schedule).peak_bytes

    def peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the corrected peak; see :class:`MemoryModel`."""
        peak = self.uncalibrated_bytes(problem, schedule)
        if self._calibration.is_empty:
            return peak
        resident = problem.profile.resident_bytes
        return resident + self._calibration.predict(peak - resident, self._most(problem))

    def observe(self, problem: Problem, schedule: Schedule, measured_peak_bytes: int) -> None:
        """Learns from the most that a schedule measured."""
        resident = problem.profile.resident_bytes
        simulated = self.uncalibrated_bytes(problem, schedule) - resident
        self._calibration.learn(simulated, self._most(problem), measured_peak_bytes - resident)

    def forget(self) -> None:
        """Forgets what was learnt."""
        self._calibration = Calibration()

    def _most(self, problem: Problem) -> int:
        if self._store_all is None or self._store_all[0] is not problem:
            self._store_all = problem, store_all_bytes(problem)
        return self._store_all[1]


def store_all_bytes(problem: Problem) -> int:
    """Returns the activation bytes of the schedule without recomputation."""
    peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
    return peak - problem.profile.resident_bytes
