"""Predicts the peak that a device will show: memory models, and their one calibration rule.

A solver keeps the bytes alive under a budget. A device shows more: its allocator rounds and
fragments, a compiler packs and copies. A :class:`MemoryModel` predicts the device's peak. It alone
remembers measured peaks. It belongs to the backend, which is made anew for every ``fit``.

There are three kinds. Where the framework runs op by op, the allocator is replayed
(:class:`keras_remat.backends.tensorflow.memory.replayed.ReplayedMemory`). Where a compiler packs
all temporaries into one buffer, a model of its fusion is simulated
(:class:`keras_remat.backends.xla.compiled_memory.CompiledMemory`). Where neither is possible, only
the bytes alive are known (:class:`SimulatedMemory`). All three learn by :class:`Calibration`.
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
    """Reports the statistics of the device's allocator."""

    @property
    def name(self) -> str:
        """Returns the device's name, such as ``"GPU:0"``."""

    @property
    def has_statistics(self) -> bool:
        """Returns whether the allocator keeps statistics; without them no peak can be measured."""

    def in_use_bytes(self) -> int:
        """Returns the bytes handed out now; 0 without statistics."""

    def peak_bytes(self) -> int:
        """Returns the most bytes in use since a measurement began; 0 without statistics."""

    def begin_watch(self) -> None:
        """Begins to watch steps that are not measured one by one."""

    def watched_peak_bytes(self) -> int:
        """Returns the most bytes in use since the watch began; 0 without statistics."""

    def phase_peak_bytes(self) -> int:
        """Returns the most bytes in use since the watch began, also outside of steps; 0 where the
        device counts only steps."""

    def total_bytes(self) -> int:
        """Returns all the memory that this process may use on the device."""

    def floor_advice(self, op: Op) -> str:
        """Returns advice on how an op needs less memory on this device; empty for none."""


def is_on_host(device: DeviceMemory) -> bool:
    """Returns whether a device's memory is the host's, which also holds the data."""
    return device.name.upper().startswith("CPU")


class MemoryModel(Protocol):
    """Predicts the peak that the device will show for a schedule. Subclasses override the defaults
    given here."""

    order_matters: bool = False
    """Says whether the peak changes when ops move without being recomputed more or less."""
    restores_after_plain: bool = False
    """Says whether, after Keras's own step, the model's state must be put back before a planned
    step shows its true peak."""

    rewrites: bool = False
    """Says whether a schedule over its problem's budget may be compiled in another way, which takes
    less memory and is slower."""
    smallest_bytes: int = 0
    """Bytes of the smallest array that the device counts; 0 where it counts all."""

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
        """Returns the highest peak of a step whose ops run in no order, resident bytes included; 0
        where that is not known.

        Args:
            problem: the problem. If all its values together fit the budget, their bytes may be
                returned instead.
            at_once: how many ops run at the same time.
            spare_bytes: bytes of the budget that the step needs beside its values.
            ahead_bytes: op id → bytes requested beside its workspace; the same for all problems of
                a graph.
        """
        return 0

    def with_fewer_gaps(
        self, problem: Problem, schedule: Schedule, deadline_s: float
    ) -> Schedule | None:
        """Returns a schedule that leaves fewer gaps between the values in memory; ``None`` where
        none is known.

        Args:
            problem: a problem whose budget is the most bytes in use on the device.
            schedule: the schedule to improve.
            deadline_s: end of the search by ``time.thread_time``. A search limited by a count of
                tries only has to begin by then.
        """
        return None

    def compiled_peak_bytes(self, problem: Problem, schedule: Schedule) -> int | None:
        """Returns the peak if compiling gives it before a run; ``None`` if only a run does."""
        return None

    def compiled_step_s(self, problem: Problem, schedule: Schedule) -> float | None:
        """Returns the seconds of a compiled step; ``None`` where not known.

        They follow from the compiled code of this step and of Keras's own. The latter is assumed to
        last as long as predicted for store-all.
        """
        return None

    def writing(self, problem: Problem, schedule: Schedule) -> Writing | None:
        """Returns how a schedule was compiled for a card, if a live device will not find out by
        itself."""
        return None

    def look(self, problem: Problem, held_bytes: Sequence[int], most_bytes: int) -> None:
        """Looks for free memory before a first plan, where that is possible without a step.

        Args:
            problem: the problem to plan for, whose batch is in memory already.
            held_bytes: bytes of each tensor that the step will keep in use.
            most_bytes: the most bytes that may be in use meanwhile.
        """
        return

    def observe(self, problem: Problem, schedule: Schedule, measured_peak_bytes: int) -> None:
        """Learns from the measured peak of a schedule."""

    def afresh(self) -> MemoryModel:
        """Returns a model that has learnt nothing about schedules, as at the start of a later
        ``fit``; itself where nothing is compiled."""
        return self


class Calibration:
    """Learns the surplus: activation bytes of a device above the simulated ones of a schedule.

    The surplus depends on the model that trains and on how tight the schedule is. So every
    measurement is one point: the simulated activation bytes (peak − resident) and the surplus
    above them, both as shares of the activation bytes of store-all. Shares hold at every batch
    size, so measurements at one size serve the others. Between points the surplus is interpolated;
    outside of them it is the nearest point's.

    A surplus below 0 at the tightest point fades out, to 0 at half of its bytes: MobileNet's loose
    schedules measured a tenth less than simulated, and schedules of half their bytes as much as
    simulated (``benchmarks/max_batch.py --pool 512``). A surplus above 0 does not fade: fading it
    made plans too bold, and the smallest limit that ``fit`` keeps for MobileNetV2 on BFC rose from
    106 to 199 MiB (``benchmarks/step_memory.py``).

    Args:
        first_ratio: predicted over simulated activation bytes, before anything was measured.
    """

    def __init__(self, first_ratio: float = 1.0):
        self._first_ratio = first_ratio
        self._surplus: dict[float, float] = {}  # by tightness

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing was measured yet."""
        return not self._surplus

    def learn(self, simulated_bytes: int, store_all_bytes: int, measured_bytes: int) -> None:
        """Adds one measurement; all three are activation bytes. Of several at one tightness, the
        largest counts."""
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
    """Simulates the peak and corrects it by measurements. Here the bytes alive are simulated; a
    subclass simulates the allocator."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._store_all: tuple[Problem, int] | None = None  # of the last problem

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
        """Learns from the measured peak of a schedule."""
        resident = problem.profile.resident_bytes
        simulated = self.uncalibrated_bytes(problem, schedule) - resident
        self._calibration.learn(simulated, self._most(problem), measured_peak_bytes - resident)

    def forget(self) -> None:
        """Forgets what was learnt."""
        self._calibration = Calibration()

    def _most(self, problem: Problem) -> int:
        """Returns the activation bytes of the schedule without recomputation."""
        if self._store_all is None or self._store_all[0] is not problem:
            peak = simulate(problem, Schedule.store_all(problem.graph)).peak_bytes
            self._store_all = problem, peak - problem.profile.resident_bytes
        return self._store_all[1]
