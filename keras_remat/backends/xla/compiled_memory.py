"""Predicts the memory XLA needs for a schedule, from a model of its fusion.

The simulated peak of a schedule models what XLA puts into memory, for a GPU with the gaps between
values (:mod:`keras_remat.backends.xla.packing`). Copies and kernels that need scratch memory come
on top; a compilation or a run shows how much they take.

Keras's own step and lowered schedules are calibrated apart. Lowering keeps random bits and copies
of small values out of the forward phase, so even store-all takes less lowered than plain.

A backend may write one schedule in several ways, and the quicker ways take more memory
(:mod:`keras_remat.backends.xla.protect`). Without a budget, the known bytes of a schedule are those
of the way in which it would run now. If they exceed what the budget leaves, the compiler is asked
again, until no way is left.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

from keras_remat.backends.memory import Calibration, MemoryModel
from keras_remat.backends.xla.packing import alive_bytes, packed_bytes, with_fewer_gaps
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.slices import is_sliced
from keras_remat.core.writing import Writing

FIRST_RATIO, GPU_FIRST_RATIO = 1.15, 1.02
"""Needed bytes over simulated ones, assumed before any schedule was compiled: about what XLA:CPU
needed on the models of ``benchmarks/compiled_step.py``, and XLA:GPU on those of
``benchmarks/cards.py``."""

RULED_OUT = 1.25
"""Largest predicted need of Keras's own step, over the room that the budget leaves, at which the
step is compiled. It is not compiled above that, if it was compiled at another batch size. Batch
sizes predict each other more closely than this (``tests/backends/jax/test_backend.py``)."""

#: Returns the activation bytes of a schedule, written for the room that a problem's budget leaves
#: (:attr:`~keras_remat.core.problem.Problem.room_bytes`). For ``None`` it returns those of Keras's
#: own step. Returns ``None`` if only a run can tell.
Compile = Callable[[Problem, Schedule | None], int | None]
#: Returns the seconds of the same step, by the roofline of the device it will run on; ``None`` if
#: they are not known.
CompiledTime = Callable[[Problem, Schedule | None], float | None]
_Key = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Known:
    """Holds what is known of one schedule, in bytes above the resident ones.

    Args:
        compiled_bytes: bytes by a compilation, or by the first run.
        surplus_bytes: bytes that a run took more.
        is_least: whether no way of writing it takes less.
    """

    compiled_bytes: int
    surplus_bytes: int = 0
    is_least: bool = True

    @property
    def added_bytes(self) -> int:
        """Returns the bytes the schedule takes."""
        return self.compiled_bytes + self.surplus_bytes

    def serves(self, problem: Problem) -> bool:
        """Returns whether the compiler need not be asked again under a problem's budget."""
        room = problem.room_bytes
        return self.is_least or room is None or self.added_bytes <= room


class CompiledMemory(MemoryModel):
    """Predicts the peak of compiled steps; see :class:`~keras_remat.backends.memory.MemoryModel`.

    Args:
        compile_bytes: returns the bytes that a compiled schedule adds to the resident ones.
        on_gpu: whether XLA:GPU compiles; else XLA:CPU does.
        rewrites: whether a schedule that takes more than its budget leaves is written in another
            way.
        compiled_time_s: returns the seconds of a compiled step.
        writing_of: returns how a schedule was written, where a plan has to record it.
        chunk_bytes: returns the bytes that the device's allocator would hand out now for a compiled
            step's bytes, if the step asks for them in one request.
    """

    def __init__(
        self,
        compile_bytes: Compile,
        *,
        on_gpu: bool = False,
        rewrites: bool = False,
        compiled_time_s: CompiledTime = lambda problem, schedule: None,
        writing_of: Callable[[Problem, Schedule], Writing | None] = lambda problem, schedule: None,
        chunk_bytes: Callable[[int], int] = lambda nbytes: nbytes,
    ):
        self._compile_bytes, self.rewrites = compile_bytes, rewrites
        self._compiled_time_s, self._chunk_bytes = compiled_time_s, chunk_bytes
        self._writing_of = writing_of
        self._first_ratio = GPU_FIRST_RATIO if on_gpu else FIRST_RATIO
        self._simulated = packed_bytes if on_gpu else alive_bytes
        self._known: dict[_Key, _Known] = {}
        # key → bytes simulated, bytes simulated for store-all, bytes taken
        self._points: dict[_Key, tuple[int, int, int]] = {}
        self._compiled_plain: list[Graph] = []  # a step of each kind
        self._store_all: tuple[Problem, int] | None = None  # of the problem asked for last

    def peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns a schedule's known peak, or one predicted from the known schedules.

        Keras's own step is compiled, unless other batch sizes show that it is far over the budget.
        """
        plain = schedule == Schedule.store_all(problem.graph) and not is_sliced(problem.graph)
        is_asked = plain and not self._is_ruled_out(problem)
        added = self._added_bytes(problem, None) if is_asked else None
        if added is None and (known := self._known.get(_key(problem, schedule))) is not None:
            added = self._handed_out(known)
        if added is None:
            simulated, most = self._simulated(problem, schedule), self._most(problem)
            added = self._calibration(plain=plain).predict(simulated, most)
        return problem.profile.resident_bytes + added

    def with_fewer_gaps(
        self, problem: Problem, schedule: Schedule, deadline_s: float
    ) -> Schedule | None:
        """Returns a schedule with fewer gaps in the heap of XLA:GPU."""
        packs = self._simulated is packed_bytes
        return with_fewer_gaps(problem, schedule, deadline_s) if packs else None

    def compiled_peak_bytes(self, problem: Problem, schedule: Schedule) -> int | None:
        """Compiles a schedule and returns its peak; ``None`` if only a run can tell."""
        added = self._added_bytes(problem, schedule)
        return None if added is None else problem.profile.resident_bytes + added

    def compiled_step_s(self, problem: Problem, schedule: Schedule) -> float | None:
        """Returns the seconds of a compiled step; see :class:`MemoryModel`."""
        plain_s = self._compiled_time_s(problem, None)
        time_s = self._compiled_time_s(problem, schedule)
        return time_s / plain_s * problem.store_all_time_s if time_s and plain_s else None

    def writing(self, problem: Problem, schedule: Schedule) -> Writing | None:
        """Returns how a schedule was written; see :class:`MemoryModel`."""
        return self._writing_of(problem, schedule)

    def observe(self, problem: Problem, schedule: Schedule, measured_peak_bytes: int) -> None:
        """Records the highest peak that a schedule measured as its need."""
        added = max(0, measured_peak_bytes - problem.profile.resident_bytes)
        known = self._known.get(_key(problem, schedule), _Known(added))
        surplus = max(known.surplus_bytes, added - known.compiled_bytes)
        self._learn(problem, schedule, replace(known, surplus_bytes=surplus))

    def afresh(self) -> CompiledMemory:
        """Returns a model that knows no schedule; this one remembers what it compiles."""

        def compile_bytes(problem: Problem, schedule: Schedule | None) -> int | None:
            if self._added_bytes(problem, schedule) is None:
                return None
            return self._known[_key(problem, schedule)].compiled_bytes

        fresh = copy(self)
        fresh._compile_bytes = compile_bytes
        fresh._known, fresh._points, fresh._compiled_plain = {}, {}, []
        return fresh

    def _added_bytes(self, problem: Problem, schedule: Schedule | None) -> int | None:
        known = self._known.get(_key(problem, schedule))
        if known is not None and known.serves(problem):
            return self._handed_out(known)
        surplus, room = (0 if known is None else known.surplus_bytes), problem.room_bytes
        if problem.budget_bytes is not None and surplus:
            problem = problem.with_budget(max(1, problem.budget_bytes - surplus))
        told = self._compile_bytes(problem, schedule)
        if told is None:
            return None if known is None else known.added_bytes
        fits = room is None or told + surplus <= room
        is_least = not (self.rewrites and schedule is not None and fits)
        known = _Known(told, surplus, is_least)
        self._learn(problem, schedule, known)
        return self._handed_out(known)

    def _handed_out(self, known: _Known) -> int:
        """Returns the bytes a schedule takes with the chunk that it would get now."""
        return max(known.added_bytes, self._chunk_bytes(known.compiled_bytes))

    def _is_ruled_out(self, problem: Problem) -> bool:
        room, most = problem.room_bytes, self._most(problem)
        if room is None or self._calibration(plain=True).predict(most, most) <= RULED_OUT * room:
            return False
        is_told = any(graph.has_ops_of(problem.graph) for graph in self._compiled_plain)
        return is_told and _key(problem, None) not in self._known

    def _learn(self, problem: Problem, schedule: Schedule | None, known: _Known) -> None:
        key, most = _key(problem, schedule), self._most(problem)
        simulated = most if schedule is None else self._simulated(problem, schedule)
        self._known[key] = known
        self._points[key] = simulated, most, known.added_bytes
        graphs = self._compiled_plain
        if schedule is None and not any(graph.has_ops_of(problem.graph) for graph in graphs):
            graphs.append(problem.graph)

    def _most(self, problem: Problem) -> int:
        if self._store_all is None or self._store_all[0] is not problem:
            plain = Schedule.store_all(problem.graph)
            self._store_all = problem, self._simulated(problem, plain)
        return self._store_all[1]

    def _calibration(self, *, plain: bool) -> Calibration:
        """Returns the calibration by Keras's own steps (``plain``), or by schedules."""
        calibration = Calibration(self._first_ratio)
        for (_, order), point in self._points.items():
            if (order is None) == plain:
                calibration.learn(*point)
        return calibration


def _key(problem: Problem, schedule: Schedule | None) -> _Key:
    return problem.graph.fingerprint, None if schedule is None else schedule.order
