"""Tries ways to write a schedule, one after the other, until one keeps to a limit.

The compiler says how many bytes each way takes (:class:`~keras_remat.core.writing.Writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_remat.backends.xla.fused_graph import SMALL_STATE_BYTES, FusedStep
from keras_remat.backends.xla.holding import waits_for_updates
from keras_remat.core.graph import UPDATE
from keras_remat.core.schedule import Schedule
from keras_remat.core.writing import Writing


@dataclass(frozen=True)
class Written:
    """Holds a compiled step.

    Args:
        step: the backend's object for it.
        added_bytes: bytes it takes beside its arguments.
        writing: how it is written; ``None`` for Keras's own step.
        ways: the ways tried so far, the quickest first; ``writing`` takes least of them.
    """

    step: Any
    added_bytes: int
    writing: Writing | None = None
    ways: tuple[Writing, ...] = ()


class Ways:
    """Knows the ways in which schedules of one step may be written.

    Args:
        traced: the step.
        on_gpu: whether it will run on a GPU; elsewhere there is one way.
        state: numbers of the state that the step is given and returns anew.
        convolutions: kinds of the equations whose last input is a kernel.
        copied: numbers of the values that a kernel reads a transposed copy of.
    """

    def __init__(
        self,
        traced: FusedStep,
        on_gpu: bool,
        state: Sequence[int],
        convolutions: Collection[str],
        copied: Collection[int] = (),
    ):
        self._traced, self._on_gpu, self._copied = traced, on_gpu, copied
        program = traced.program
        made = (e.reads[-1:] for e in program.equations if e.kind in convolutions)
        kernels = {self._shape(number) for numbers in made for number in numbers}
        large = (at for at in state if program.sizes[at] >= SMALL_STATE_BYTES)
        self._dense_state = [at for at in large if self._shape(at) not in kernels]

    def within(
        self,
        schedule: Schedule,
        write: Callable[[Writing], Written],
        room_bytes: int | None,
        known: Written | None = None,
    ) -> Written:
        """Compiles a schedule in the quickest way that keeps to a limit.

        If no way does, the one that takes least is returned. A loosely written schedule may be over
        the limit by no more than late updates and early copies can hold. Then the next way brings
        updates forward; otherwise it keeps the phases apart.

        Args:
            schedule: a legal order for the step's graph.
            write: compiles it in one way.
            room_bytes: bytes it may add to the resident ones; ``None`` for no limit.
            known: the schedule as compiled for another limit.
        """
        ways = self._of(schedule)
        found = known or replace(write(ways[0]), ways=ways[:1])
        for writing in ways[ways.index(found.ways[-1]) + 1 :]:
            over_bytes = 0 if room_bytes is None else found.added_bytes - room_bytes
            if over_bytes <= 0:
                break
            may_wait = over_bytes <= self._put_off_bytes and Writing.PHASED not in found.ways
            if writing is (Writing.PHASED if may_wait else Writing.UPDATED):
                continue
            least = min(found, write(writing), key=lambda written: written.added_bytes)
            found = replace(least, ways=(*found.ways, writing))
        return found

    def _of(self, schedule: Schedule) -> tuple[Writing, ...]:
        """Returns the ways in which a schedule may be written, the quickest first. Loose and phased
        writing are left out if gradients that wait for their updates would take too much."""
        if not self._on_gpu:
            return (Writing.STRICT,)
        traced = self._traced
        shapes = {self._shape(at) for at in self._dense_state}
        updates = {
            op.id
            for op in traced.graph.ops
            if op.phase == UPDATE
            if any(self._shape(traced.numbers[v]) in shapes for v in op.outputs)
        }
        waits = waits_for_updates(traced.graph, schedule.order, updates)
        timely = (Writing.UPDATED, Writing.HELD, Writing.STRICT)
        return timely if waits else tuple(Writing)

    @property
    def _put_off_bytes(self) -> int:
        """Returns the most bytes that late updates and early copies can hold: those of large
        weights and optimizer slots, without kernels of convolutions, and of transposed copies.
        (ResNet50's plan for 0.7 takes no less with early updates.)"""
        sizes = self._traced.program.sizes
        return sum(sizes[at] for at in (*self._dense_state, *self._copied))

    def _shape(self, number: int) -> Any:
        return self._traced.program.describe(number)[0]
