"""An order of ops, replayed through TensorFlow's allocator: the peak that will be measured.

The allocator hands out whole chunks, so a step's peak is above the bytes alive. The replay repeats
a step until it finds the pool as an earlier one did: variables that are assigned lie elsewhere in
every step.

Two things differ between allocators, and both are asked for, not assumed: the smallest request
that counts (oneDNN's on a CPU leaves small ones to the system), and whether the pool is one region
(a GPU's, unless memory growth is on) or grows by regions that double.

What earlier steps left free, and where variables lie, is known once steps were recorded
(:mod:`.pool`). Until then the pool is what a look shows (:mod:`.look`), or it is taken to be empty.
It matters: orders of U-Net's at batches of 18 to 22 were replayed at 165 to 203 MiB in an empty
pool and measured 146 to 220. In the pool that the first recorded steps showed, others of 10 to 22
samples were replayed at 107 to 189 MiB, and all measured the same to 0.5 MiB.

Known limit: Keras's own step may move variables, and a new region may be added. A recorded pool is
right until then. What is off is learnt from the steps that are measured
(:mod:`keras_remat.backends.memory`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator, Block
from keras_remat.backends.tensorflow.memory.pool import Pool
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule

#: Steps that are replayed at most; most orders repeat themselves after three.
_STEPS = 20


def replayed_peak_bytes(
    uses: Uses, schedule: Schedule, region_bytes: int = 0, pool: Pool | None = None
) -> int:
    """Returns the peak over all steps of a schedule, resident bytes included.

    Args:
        region_bytes: of the one region that there is; 0 where regions are added.
        pool: that the first step finds; ``None`` for an empty one.
    """
    replay = Replay(uses, region_bytes, pool)
    for step in replay.steps(schedule):
        deque(step, maxlen=0)
    return replay.peak_bytes


class Replay:
    """Replays the steps of a schedule; arguments as of :func:`replayed_peak_bytes`."""

    def __init__(self, uses: Uses, region_bytes: int = 0, pool: Pool | None = None):
        resident_bytes = uses.problem.profile.resident_bytes
        self._uses = uses
        self._variables: dict[str, Block | None] = {}  # name of the op that assigns it → its chunk
        waiting: Counter[int] = Counter()
        if pool is None:
            allocator = BestFitAllocator(
                smallest_bytes=uses.smallest_bytes, region_bytes=region_bytes
            )
            if region_bytes:
                allocator.allocate(resident_bytes - sum(uses.batch.elements()))
        else:
            allocator = BestFitAllocator(smallest_bytes=uses.smallest_bytes)
            placed, waiting = _placed(allocator, pool, uses)
            self._variables |= placed
            waiting.update(pool.batch_bytes)
        for nbytes in (uses.batch - waiting).elements():
            allocator.allocate(nbytes)
        self._base = resident_bytes - allocator.bytes_in_use
        allocator.peak_bytes = allocator.bytes_in_use
        self._allocator = allocator

    @property
    def in_use_bytes(self) -> int:
        """Returns what is in use now, resident bytes included."""
        return self._base + self._allocator.bytes_in_use

    @property
    def peak_bytes(self) -> int:
        """Returns the most that was in use, resident bytes included."""
        return self._base + self._allocator.peak_bytes

    def steps(self, schedule: Schedule) -> Iterator[Iterator[Moment]]:
        """Yields the moments of every step, until one finds the pool as an earlier one did; those
        of a step have to be taken before the next one's."""
        runs = self._uses.of(schedule)
        seen: set[tuple[object, ...]] = set()
        for _ in range(_STEPS):
            found = (
                *self._allocator.free_chunks,
                *(chunk and chunk.address for chunk in self._variables.values()),
            )
            if found in seen:
                break
            seen.add(found)
            yield self.step(runs)

    def step(self, runs: Sequence[Run]) -> Iterator[Moment]:
        """Yields the moments of one step."""
        allocator, variables, values = (
            self._allocator,
            self._variables,
            self._uses.problem.graph.values,
        )
        chunks: dict[int, Block | None] = {}  # value id → what it is in
        for run in runs:
            dying = run.dying
            early = allocator.allocate(run.early_bytes)
            for value_id, nbytes, donor in run.writes:
                chunks[value_id] = (
                    allocator.allocate(nbytes) if donor is None else chunks.pop(donor)
                )
            late = allocator.allocate(run.late_bytes)
            yield run, chunks
            allocator.release(late)
            allocator.release(early)
            if run.assigns is not None and dying:
                # the variable's buffer is the value's from now on, and the one it had is free
                taken, *dying = dying
                nbytes = values[taken].nbytes
                allocator.release(variables.get(run.assigns) or allocator.unplaced(nbytes))
                variables[run.assigns] = chunks.pop(taken)
            for value_id in dying:
                allocator.release(chunks.pop(value_id, None))
        for chunk in chunks.values():
            allocator.release(chunk)


def _placed(
    allocator: BestFitAllocator, pool: Pool, uses: Uses
) -> tuple[dict[str, Block | None], Counter[int]]:
    """Puts the chunks of a pool in an allocator's.

    Batches wait for their step, and the next one takes the place of one that is done: as many stay
    in use. What else is in use is of a batch of another size, which is done.

    Returns:
        The chunks of variables, by the name of the op that assigns them, and how many arrays of
        batches wait, by their bytes.
    """
    requested = [extent.requested_bytes for extent in pool.extents if extent.requested_bytes]
    chunks = allocator.add_regions(pool.extents, pool.region_bytes)
    left = list(zip(requested, chunks, strict=True))
    placed: dict[str, Block | None] = {}
    for name, nbytes in uses.assigned:
        at = next((at for at, (size, _) in enumerate(left) if size == nbytes), None)
        if at is not None:
            placed[name] = left.pop(at)[1]
    waiting = Counter(size for size, _ in left if size in uses.batch)
    for size, chunk in left:
        if size not in waiting:
            allocator.release(chunk)
    return placed, waiting


class Run(NamedTuple):
    """Says what a run of an op does with the pool.

    Args:
        position: in the order.
        early_bytes: workspace that it asks for before its outputs.
        writes: large values, their bytes, and the value whose buffer each takes over, if any.
        late_bytes: workspace that it asks for after its outputs.
        assigns: its name where it assigns a variable.
        dying: the large values that are read last here.
    """

    position: int
    early_bytes: int
    writes: list[tuple[int, int, int | None]]
    late_bytes: int
    assigns: str | None
    dying: list[int]


#: A run when all that it asks for is in use: value id → the chunk of each large value.
Moment = tuple[Run, dict[int, Block | None]]


class Uses:
    """Holds what the ops of a graph do with the pool, worked out once for all schedules.

    Attributes:
        peaks_bytes: schedule → its peak in the pool that is known.
        unordered_bytes: how many ops run at once → the highest peak in no order, once simulated.
        reads, writes: of every op, the large values, and the bytes of what it writes.
        donors: of every op, values whose buffers it may take over, and their bytes.
        workspace: of every op, the bytes that it asks for before its outputs, and after them.
        assigns: of every op, its name where it assigns a variable.
        kept: large values that are alive after the step.
    """

    def __init__(self, problem: Problem, smallest_bytes: int):
        graph, values = problem.graph, problem.graph.values
        self.problem, self.smallest_bytes = problem, smallest_bytes
        self.peaks_bytes: dict[Schedule, int] = {}
        self.unordered_bytes: dict[int, int] = {}
        large = [
            max(1, smallest_bytes) <= value.nbytes and value.producer is not None
            for value in values
        ]
        kept = {v for v in graph.outputs if large[v]}
        self.kept = kept
        self.reads = [[v for v in op.inputs if large[v]] for op in graph.ops]
        self.writes = [[(v, values[v].nbytes) for v in op.outputs if large[v]] for op in graph.ops]
        self.donors = [
            [(v, values[v].nbytes) for v in op.may_reuse if v not in kept]
            if self.writes[op.id]
            else []
            for op in graph.ops
        ]
        #: bytes of the large values that no op computes → how many have as many
        self.batch = Counter(
            value.nbytes
            for value in values
            if value.producer is None and value.nbytes >= max(1, smallest_bytes)
        )
        workspace = [
            nbytes if nbytes >= smallest_bytes else 0
            for nbytes in problem.profile.op_workspace_bytes
        ]
        early = [op.kind in kinds.WORKSPACE_FIRST for op in graph.ops]
        self.workspace = [
            (n, 0) if first else (0, n) for n, first in zip(workspace, early, strict=True)
        ]
        self.assigns = [op.name if op.kind in kinds.TAKES_OVER else None for op in graph.ops]
        #: op that assigns a variable, and its bytes
        self.assigned = [
            (op.name, values[reads[0]].nbytes)
            for op, reads in zip(graph.ops, self.reads, strict=True)
            if op.kind in kinds.TAKES_OVER and reads
        ]

    def of(self, schedule: Schedule) -> list[Run]:
        """Returns the runs that the pool sees."""
        dying = self._dying(schedule.order)
        return [
            self._run(k, op_id, dying[k])
            for k, op_id in enumerate(schedule.order)
            if self.writes[op_id] or any(self.workspace[op_id]) or dying[k]
        ]

    def stretch(
        self, order: Sequence[int], first: int = 0, deaths: Counter[int] | None = None
    ) -> list[Run]:
        """Returns all runs of a stretch of an order, also those that the pool does not see.

        Args:
            first: the position that it begins at.
            deaths: value id → how many of its instances die in it; ``None`` for a whole order.
        """
        dying = self._dying(order, deaths)
        return [self._run(first + k, op_id, dying[k]) for k, op_id in enumerate(order)]

    def _dying(self, order: Sequence[int], deaths: Counter[int] | None = None) -> list[list[int]]:
        """Returns which values die at every run: where their newest instance is read last, or is
        computed and never read."""
        last: dict[int, int] = {}
        dying: list[list[int]] = [[] for _ in order]
        for k, op_id in enumerate(order):
            for value_id in self.reads[op_id]:
                last[value_id] = k
            for value_id, _ in self.writes[op_id]:
                if value_id in last:
                    dying[last[value_id]].append(value_id)
                last[value_id] = k
        if deaths is not None:
            deaths = deaths - Counter(value_id for there in dying for value_id in there)
        for value_id, k in last.items():
            if value_id not in self.kept if deaths is None else deaths[value_id]:
                dying[k].append(value_id)
        return dying

    def _run(self, k: int, op_id: int, dying: list[int]) -> Run:
        early, late = self.workspace[op_id]
        return Run(k, early, self._taking_over(op_id, dying), late, self.assigns[op_id], dying)

    def _taking_over(self, op_id: int, dying: list[int]) -> list[tuple[int, int, int | None]]:
        """Returns what an op writes, each with the dying value of its size, if any, whose buffer it
        takes over."""
        result: list[tuple[int, int, int | None]] = []
        donors = [(v, size) for v, size in self.donors[op_id] if v in dying]
        for value_id, nbytes in self.writes[op_id]:
            donor = next((v for v, size in donors if size == nbytes), None)
            donors = [(v, size) for v, size in donors if v != donor]
            result.append((value_id, nbytes, donor))
        return result
