"""Which ways of writing one schedule down are tried (:class:`~keras_remat.core.writing.Writing`),
in which order, until a compiler says that one keeps to a limit."""

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
        step: what a backend keeps of it.
        added_bytes: what it takes beside its arguments.
        writing: how it is written; ``None`` for Keras's own step.
        ways: in which it was written, the quickest first; this one takes least of them.
    """

    step: Any
    added_bytes: int
    writing: Writing | None = None
    ways: tuple[Writing, ...] = ()


class Ways:
    """Knows in which ways schedules of one step may be written.

    Args:
        traced: the step.
        on_gpu: whether it will run on a GPU; else there is one way.
        state: numbers of what the step is given and returns anew.
        convolutions: kinds of the equations whose last input is a kernel.
        copied: numbers of what a kernel reads a transposed copy of.
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
        """Compiles a schedule in the quickest way that keeps to a limit, else in the one that takes
        least.

        What is over the limit when a schedule is loosely written may be what updates that are put
        off hold, or early copies. Then that is mended next, and else the phases are kept apart.

        Args:
            schedule: a legal order for the step's graph.
            write: compiles it in one way.
            room_bytes: what it may add to the resident bytes; ``None`` for no limit.
            known: the same, compiled for another limit.
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
        """Returns how a schedule may be written, the quickest way first; not loosely, nor with
        phases apart, where gradients that wait for their updates would take more than all that is
        left."""
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
        """Returns bytes of large weights and optimizer slots, kernels of convolutions left out, and
        of transposed copies: no more is held by updates that are put off, and by copies that are
        made early. (ResNet50's plan for 0.7 takes no less with early updates.)"""
        sizes = self._traced.program.sizes
        return sum(sizes[at] for at in (*self._dense_state, *self._copied))

    def _shape(self, number: int) -> Any:
        return self._traced.program.describe(number)[0]
