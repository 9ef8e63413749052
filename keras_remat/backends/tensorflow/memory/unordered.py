"""Simulates a step whose ops run in no order, several at once, in TensorFlow's allocator.

TensorFlow's executor begins an op as soon as all its predecessors have run, the op that has waited
longest first. It runs as many ops at once as it has threads. Which of them ends first differs from
step to step. Without oneDNN both gradients of a convolution gather patches at the same time, often
27 MiB each: a prediction that ran them one at a time gave 40 MiB, and the step took 72. Gradients
of several weights wait together while their updates run. Loops begin rounds ahead, and their
partial sums wait.

So steps are simulated in which chance decides which op ends next. Their highest peak is about the
most that Keras's own step takes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from keras_remat.backends.tensorflow.memory.best_fit import BestFitAllocator, Block, rounded
from keras_remat.backends.tensorflow.memory.replay import Uses

#: Steps simulated in one pool: assigned variables move in each.
_STEPS = 3
#: How many ops are simulated in all, and the fewest and most pools. For 753 ops, the highest peak
#: of eight pools was that of 32.
_OPS, _FEWEST, _MOST = 30_000, 2, 16


def unordered_peak_bytes(
    uses: Uses, at_once: int, ahead_bytes: Mapping[int, int], fitting_bytes: int = 0
) -> int:
    """Returns the highest peak of the simulated steps, resident bytes included.

    Args:
        uses: what the ops of the step do with the pool.
        at_once: how many ops run at the same time.
        ahead_bytes: op id → bytes that a loop requests beside its workspace.
        fitting_bytes: if all values of the step together need no more, resident bytes included,
            nothing is simulated, and their bytes are returned.
    """
    everything = uses.problem.profile.resident_bytes + _all_bytes(uses, at_once)
    everything += 2 * sum(ahead_bytes.values())
    if everything <= fitting_bytes:
        return everything
    if at_once not in uses.unordered_bytes:
        chance, ops = random.Random(0), len(uses.problem.graph.ops)
        pools = min(_MOST, max(_FEWEST, _OPS // (_STEPS * max(1, ops))))
        step = _Unordered(uses, at_once, ahead_bytes)
        uses.unordered_bytes[at_once] = max(step.peak_bytes(chance) for _ in range(pools))
    return uses.unordered_bytes[at_once]


def _all_bytes(uses: Uses, at_once: int) -> int:
    """Returns twice the bytes of all values and of the largest workspaces, since a chunk may be
    twice as large as the request."""
    made = sum(rounded(nbytes) for writes in uses.writes for _, nbytes in writes)
    workspaces = sorted((rounded(sum(both)) for both in uses.workspace), reverse=True)
    return 2 * (made + sum(workspaces[:at_once]))


@dataclass(frozen=True)
class _Running:
    """Holds a running op and its workspace."""

    op_id: int
    workspace: tuple[Block | None, Block | None]


class _Unordered:
    """Simulates a step whose ops run in no order; arguments as of
    :func:`unordered_peak_bytes`."""

    def __init__(self, uses: Uses, at_once: int, ahead_bytes: Mapping[int, int]):
        self._uses, self._at_once, self._ahead = uses, at_once, ahead_bytes
        graph = uses.problem.graph
        before = [
            {at for v in op.inputs if (at := graph.values[v].producer) is not None} | set(op.after)
            for op in graph.ops
        ]
        self._waits = [len(ops) for ops in before]
        self._followers: list[list[int]] = [[] for _ in graph.ops]
        self._reads = [tuple(set(reads)) for reads in uses.reads]
        self._readers = [0] * len(graph.values)
        for op in graph.ops:
            for other in before[op.id]:
                self._followers[other].append(op.id)
            for value_id in self._reads[op.id]:
                self._readers[value_id] += 1

    def peak_bytes(self, chance: random.Random) -> int:
        """Returns the peak over a few steps in one pool, resident bytes included."""
        allocator = BestFitAllocator(smallest_bytes=self._uses.smallest_bytes)
        for nbytes in self._uses.batch.elements():
            allocator.allocate(nbytes)
        base = self._uses.problem.profile.resident_bytes - allocator.bytes_in_use
        variables: dict[str, Block | None] = {}
        for _ in range(_STEPS):
            self._step(chance, allocator, variables)
        return base + allocator.peak_bytes

    def _step(
        self,
        chance: random.Random,
        allocator: BestFitAllocator,
        variables: dict[str, Block | None],
    ) -> None:
        waits, unread = list(self._waits), list(self._readers)
        chunks: dict[int, Block | None] = {}  # value id → its chunk
        ready = deque(op_id for op_id, count in enumerate(waits) if not count)
        running: list[_Running] = []
        while ready or running:
            while ready and len(running) < self._at_once:
                running.append(self._begun(ready.popleft(), allocator, chunks, unread))
            ended = running.pop(chance.randrange(len(running)))
            for chunk in ended.workspace:
                allocator.release(chunk)
            self._end(ended.op_id, allocator, chunks, unread, variables)
            for follower in self._followers[ended.op_id]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        for chunk in chunks.values():
            allocator.release(chunk)

    def _begun(
        self,
        op_id: int,
        allocator: BestFitAllocator,
        chunks: dict[int, Block | None],
        unread: list[int],
    ) -> _Running:
        """Begins an op: allocates its outputs and workspace. An output takes over the buffer of a
        value that no other op has yet to read."""
        early_bytes, late_bytes = self._uses.workspace[op_id]
        early = allocator.allocate(early_bytes)
        last_read = [v for v, _ in self._uses.donors[op_id] if unread[v] == 1 and v in chunks]
        for value_id, nbytes, donor in self._uses.taking_over(op_id, last_read):
            chunks[value_id] = allocator.allocate(nbytes) if donor is None else chunks.pop(donor)
        late = allocator.allocate(late_bytes + self._ahead.get(op_id, 0))
        return _Running(op_id, (early, late))

    def _end(
        self,
        op_id: int,
        allocator: BestFitAllocator,
        chunks: dict[int, Block | None],
        unread: list[int],
        variables: dict[str, Block | None],
    ) -> None:
        """Ends an op: frees values without readers left. A variable takes over its new value."""
        uses = self._uses
        for value_id in self._reads[op_id]:
            unread[value_id] -= 1
        touched = (*self._reads[op_id], *(value_id for value_id, _ in uses.writes[op_id]))
        dying = [v for v in touched if not unread[v] and v not in uses.kept and v in chunks]
        uses.end(uses.assigns[op_id], dying, allocator, chunks, variables)
