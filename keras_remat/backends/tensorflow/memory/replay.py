"""Replays an order of ops through TensorFlow's allocator, to predict the measured peak.

The allocator hands out whole chunks, so a step's peak is above the bytes alive. Assigned variables
move in every step. So the replay repeats the step until one starts from a pool that was seen
before.

Two things differ between allocators, and both are parameters here: the smallest request that counts
(oneDNN's on a CPU leaves small ones to the system), and whether the pool is one region (a GPU's,
unless memory growth is on) or adds regions that double in size.

Recorded steps show which chunks earlier steps left free, and where variables lie (:mod:`.pool`).
Until steps are recorded, the pool is taken from a look (:mod:`.look`), or assumed to be empty. The
pool matters: orders of U-Net's at batches of 18 to 22 were replayed at 165 to 203 MiB in an empty
pool and measured 146 to 220. In the pool of the first recorded steps, other orders at 10 to 22
samples were replayed at 107 to 189 MiB, and all measured the same to 0.5 MiB.

Known limit: a recorded pool is right until Keras's own step moves variables or the allocator adds
a region. The error is learnt from measured steps (:mod:`keras_remat.backends.memory`).
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
        region_bytes: bytes of the allocator's only region; 0 where it adds regions.
        pool: the pool before the first step; ``None`` for an empty one.
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
        """Returns the bytes in use now, resident bytes included."""
        return self._base + self._allocator.bytes_in_use

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes in use so far, resident bytes included."""
        return self._base + self._allocator.peak_bytes

    def steps(self, schedule: Schedule) -> Iterator[Iterator[Moment]]:
        """Yields the moments of every step, until a step starts from a pool seen before. Exhaust
        the moments of one step before asking for the next step."""
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
        allocator = self._allocator
        chunks: dict[int, Block | None] = {}  # value id → its chunk
        for run in runs:
            early = allocator.allocate(run.early_bytes)
            for value_id, nbytes, donor in run.writes:
                chunks[value_id] = (
                    allocator.allocate(nbytes) if donor is None else chunks.pop(donor)
                )
            late = allocator.allocate(run.late_bytes)
            yield run, chunks
            allocator.release(late)
            allocator.release(early)
            self._uses.end(run.assigns, run.dying, allocator, chunks, self._variables)
        for chunk in chunks.values():
            allocator.release(chunk)


def _placed(
    allocator: BestFitAllocator, pool: Pool, uses: Uses
) -> tuple[dict[str, Block | None], Counter[int]]:
    """Puts the chunks of a pool into an allocator.

    Arrays of batches stay in use, since the next batch takes the place of a finished one. Any other
    chunk in use is not a variable's, but of a finished batch of another size: it is freed.

    Returns:
        The chunks of variables, by the name of the op that assigns them, and how many arrays of
        batches are in use, by their bytes.
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
    """Holds what one run of an op does with the pool.

    Args:
        position: position of the run in the order.
        early_bytes: bytes of workspace requested before the outputs.
        writes: large values written, their bytes, and the value whose buffer each takes over, if
            any.
        late_bytes: bytes of workspace requested after the outputs.
        assigns: the op's name where it assigns a variable.
        dying: large values whose last read is here.
    """

    position: int
    early_bytes: int
    writes: list[tuple[int, int, int | None]]
    late_bytes: int
    assigns: str | None
    dying: list[int]


#: A run while all its requests are in use, and value id → chunk of every large value.
Moment = tuple[Run, dict[int, Block | None]]


class Uses:
    """Holds what the ops of a graph do with the pool, computed once for all schedules.

    Attributes:
        peaks_bytes: schedule → its peak in the known pool.
        unordered_bytes: how many ops run at once → the highest simulated peak in no order.
        reads: for every op, the large values it reads.
        writes: for every op, the large values it writes, with their bytes.
        donors: for every op, values whose buffers it may take over, with their bytes.
        workspace: for every op, the bytes requested before its outputs, and after them.
        assigns: for every op, its name where it assigns a variable.
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
        #: bytes → how many large values that no op computes have that size
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
        #: names of the ops that assign a variable, with the variable's bytes
        self.assigned = [
            (op.name, values[reads[0]].nbytes)
            for op, reads in zip(graph.ops, self.reads, strict=True)
            if op.kind in kinds.TAKES_OVER and reads
        ]

    def of(self, schedule: Schedule) -> list[Run]:
        """Returns the runs that allocate or free memory of the pool."""
        runs = self.stretch(schedule.order)
        return [run for run in runs if run.writes or run.early_bytes or run.late_bytes or run.dying]

    def stretch(
        self, order: Sequence[int], first: int = 0, deaths: Counter[int] | None = None
    ) -> list[Run]:
        """Returns all runs of a stretch of an order, also those that do not touch the pool.

        Args:
            order: op ids of the stretch.
            first: position of its first op.
            deaths: value id → how many of its instances die in it; ``None`` for a whole order.
        """
        dying = self._dying(order, deaths)
        return [self._run(first + k, op_id, dying[k]) for k, op_id in enumerate(order)]

    def _dying(self, order: Sequence[int], deaths: Counter[int] | None = None) -> list[list[int]]:
        """Returns for every run the values that die there. A value dies at the last read of its
        instance, or where it is computed if nobody reads it."""
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
        return Run(k, early, self.taking_over(op_id, dying), late, self.assigns[op_id], dying)

    def taking_over(self, op_id: int, dying: Sequence[int]) -> list[tuple[int, int, int | None]]:
        """Returns the values that an op writes, their bytes, and for each the dying value of the
        same size whose buffer it takes over, if any."""
        result: list[tuple[int, int, int | None]] = []
        donors = [(v, size) for v, size in self.donors[op_id] if v in dying]
        for value_id, nbytes in self.writes[op_id]:
            donor = next((v for v, size in donors if size == nbytes), None)
            donors = [(v, size) for v, size in donors if v != donor]
            result.append((value_id, nbytes, donor))
        return result

    def end(
        self,
        assigns: str | None,
        dying: Sequence[int],
        allocator: BestFitAllocator,
        chunks: dict[int, Block | None],
        variables: dict[str, Block | None],
    ) -> None:
        """Frees the values that die with a run. If the run assigns a variable, the variable takes
        over the first value's buffer, and its old one is freed.

        Args:
            assigns: name of the op where it assigns a variable.
            dying: the values.
            allocator: the pool.
            chunks: value id → its chunk.
            variables: name of the op that assigns a variable → the variable's chunk.
        """
        if assigns is not None and dying:
            taken, *dying = dying
            nbytes = self.problem.graph.values[taken].nbytes
            allocator.release(variables.get(assigns) or allocator.unplaced(nbytes))
            variables[assigns] = chunks.pop(taken)
        for value_id in dying:
            allocator.release(chunks.pop(value_id, None))
