"""What XLA needs for a schedule, in terms of what the model of its fusion predicts.

The simulated peak of a schedule is a model of what XLA puts into memory; buffer packing, copies and
kernels that need scratch come on top. A compilation or a run tells how much.

Keras's own step and lowered schedules are calibrated apart: lowering keeps random bits and copies
of small values out of the forward phase, so that even store-all takes less lowered than plain.
"""

from __future__ import annotations

from collections.abc import Callable

from keras_remat.backends.memory import Calibration, store_all_bytes
from keras_remat.core.graph import Graph
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.core.simulate import simulate
from keras_remat.core.slices import is_sliced

FIRST_RATIO, GPU_FIRST_RATIO = 1.15, 1.02
"""Before any schedule was compiled: about what XLA:CPU needed on the models of
``benchmarks/compiled_step.py``, and XLA:GPU on those of ``benchmarks/cards.py``."""

RULED_OUT = 1.25
"""Keras's own step is not compiled where that of another batch size was, and tells that this one
takes so many times the room that a budget leaves. For an H100, 16 samples tell 0.94 to 1.06 of what
4 and 64 take, on a U-Net and a transformer of ``benchmarks/models.py``."""

#: Activation bytes of a compiled schedule, or of Keras's own step (``None``); ``None`` where only a
#: run tells.
Compile = Callable[[Problem, Schedule | None], int | None]


class CompiledMemory:
    """Predicts the peak of compiled steps; see :class:`~keras_remat.backends.memory.MemoryModel`.

    Args:
        compile_bytes: compiles a schedule and tells what it adds to the resident bytes.
        on_gpu: whether XLA:GPU does, or XLA:CPU.
    """

    order_matters = restores_after_plain = False

    def __init__(self, compile_bytes: Compile, *, on_gpu: bool = False):
        self._compile_bytes = compile_bytes
        first_ratio = GPU_FIRST_RATIO if on_gpu else FIRST_RATIO
        self._plain, self._lowered = Calibration(first_ratio), Calibration(first_ratio)
        self._known: dict[tuple[str, tuple[int, ...] | None], int] = {}
        self._compiled_plain: list[Graph] = []  # a step of each kind

    def peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns what is known of the schedule, else what those that are known suggest.

        Keras's own step is compiled, unless other sizes of it tell that it is far over the budget.
        """
        plain = schedule == Schedule.store_all(problem.graph) and not is_sliced(problem.graph)
        is_asked = plain and not self._is_ruled_out(problem)
        added = self._added_bytes(problem, None) if is_asked else None
        if added is None:
            added = self._known.get(_key(problem, schedule))
        if added is None:
            simulated, most = _simulated(problem, schedule), store_all_bytes(problem)
            added = (self._plain if plain else self._lowered).predict(simulated, most)
        return problem.profile.resident_bytes + added

    def plain_step_peak_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """Returns the same: the order does not matter."""
        return self.peak_bytes(problem, schedule)

    def compiled_peak_bytes(self, problem: Problem, schedule: Schedule) -> int | None:
        """Returns the peak by compiling the schedule, where that tells."""
        added = self._added_bytes(problem, schedule)
        return None if added is None else problem.profile.resident_bytes + added

    def observe(self, problem: Problem, schedule: Schedule, measured_peak_bytes: int) -> None:
        """Takes the most that a schedule measured for what it needs."""
        added = max(0, measured_peak_bytes - problem.profile.resident_bytes)
        key = _key(problem, schedule)
        self._learn(problem, schedule, max(added, self._known.get(key, 0)))

    def _added_bytes(self, problem: Problem, schedule: Schedule | None) -> int | None:
        key = _key(problem, schedule)
        if key not in self._known:
            added = self._compile_bytes(problem, schedule)
            if added is None:
                return None
            self._learn(problem, schedule, added)
        return self._known[key]

    def _is_ruled_out(self, problem: Problem) -> bool:
        room, most = problem.room_bytes, store_all_bytes(problem)
        if room is None or self._plain.predict(most, most) <= RULED_OUT * room:
            return False
        is_told = any(graph.has_ops_of(problem.graph) for graph in self._compiled_plain)
        return is_told and _key(problem, None) not in self._known

    def _learn(self, problem: Problem, schedule: Schedule | None, added_bytes: int) -> None:
        self._known[_key(problem, schedule)] = added_bytes
        most = store_all_bytes(problem)
        simulated = most if schedule is None else _simulated(problem, schedule)
        calibration = self._plain if schedule is None else self._lowered
        calibration.learn(simulated, most, added_bytes)
        graphs = self._compiled_plain
        if schedule is None and not any(graph.has_ops_of(problem.graph) for graph in graphs):
            graphs.append(problem.graph)


def _key(problem: Problem, schedule: Schedule | None) -> tuple[str, tuple[int, ...] | None]:
    return problem.graph.fingerprint, None if schedule is None else schedule.order


def _simulated(problem: Problem, schedule: Schedule) -> int:
    return simulate(problem, schedule).peak_bytes - problem.profile.resident_bytes
