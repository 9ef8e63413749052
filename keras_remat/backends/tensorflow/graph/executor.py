"""How TensorFlow's executor runs a step that asks for no order.

It runs an op as soon as all that it waits for has run: what of the backward phase needs no gradient
runs while the forward phase does, and is held until the gradient comes. On a CPU, several ops run
at once. Peaks of such a step differ from run to run; what is simulated here is on their high side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import tensorflow as tf

from keras_remat.backends.host import cores
from keras_remat.core.graph import Graph
from keras_remat.core.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs a step's nodes in simulation.

    Args:
        graph: the step's ops.
        waits: node name → the nodes that it waits for, by data or by control.
        op_id: node name → the op that it is part of; others take neither time nor memory.
    """

    graph: Graph
    waits: Mapping[str, Sequence[str]]
    op_id: Mapping[str, int]

    def order(self) -> tuple[int, ...]:
        """Returns the ops in the order in which one worker begins them."""
        begun = self._begun([0.0] * len(self.graph.ops), 1)
        return tuple(op for op, begins in begun if begins)

    def activation_bytes(self, profile: Profile, workers: int) -> int:
        """Returns how much several workers have alive at most, above the resident bytes.

        No op is counted on to take over an input's buffer: another reader may be running.
        """
        values = self.graph.values
        readers = [0] * len(values)
        for op in self.graph.ops:
            for value in set(op.inputs):
                readers[value] += 1
        kept = {*self.graph.outputs, *(v.id for v in values if v.producer is None)}
        alive = highest = 0
        for op_id, begins in self._begun(profile.op_time_s, workers):
            op, workspace = self.graph.ops[op_id], profile.op_workspace_bytes[op_id]
            if begins:
                alive += workspace + sum(values[value].nbytes for value in op.outputs)
                highest = max(highest, alive)
                continue
            alive -= workspace
            for value in set(op.inputs):
                readers[value] -= 1
            ending = {*op.inputs, *op.outputs} - kept
            alive -= sum(values[value].nbytes for value in ending if not readers[value])
        return highest

    def _begun(self, op_time_s: Sequence[float], workers: int) -> Iterator[tuple[int, bool]]:
        """Yields every op when it begins (``True``) and when it ends (``False``)."""
        followers: dict[str, list[str]] = {name: [] for name in self.waits}
        waiting = {name: len(set(before)) for name, before in self.waits.items()}
        for name, before in self.waits.items():
            for other in set(before):
                followers[other].append(name)
        ready = deque(name for name, count in waiting.items() if not count)
        begun: set[int] = set()
        running: list[tuple[float, int, str, int | None]] = []
        now_s, started = 0.0, 0
        while ready or running:
            while ready and len(running) < workers:
                name = ready.popleft()
                op = self.op_id.get(name)
                if op in begun:
                    op = None  # a node more of an op that runs or has run
                if op is not None:
                    begun.add(op)
                    yield op, True
                ends_s = now_s if op is None else now_s + op_time_s[op]
                heappush(running, (ends_s, started, name, op))
                started += 1
            now_s, _, name, op = heappop(running)
            if op is not None:
                yield op, False
            for other in followers[name]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)


def workers(replicas: int) -> int:
    """Returns how many ops of one replica's step run at once on this machine's CPU."""
    threads = tf.config.threading.get_inter_op_parallelism_threads() or cores()
    return max(1, threads // max(1, replicas))
