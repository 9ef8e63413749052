"""What a ``fit`` takes beside its steps: validation, what is held between steps, and whole data.

A validation batch goes forward only. What that takes is told from the traced train step: its
forward ops in their order, with no value kept for a backward phase. Keras's test function is
another one, without dropout and in no order, so that this is a prediction; the peak is measured,
too.

Known limit: with a last batch of another size, TensorFlow took more than for the larger of the two
(35 MiB where 24 were predicted).
"""

from __future__ import annotations

from typing import Any

import keras

from keras_remat.core.graph import FORWARD
from keras_remat.core.limit import Limit
from keras_remat.core.problem import Problem
from keras_remat.training import tell

#: Data is named where it takes this share of the limit.
_LARGE_DATA_SHARE = 0.1


def forward_bytes(problem: Problem) -> int:
    """Returns the most bytes alive, beside the resident ones, while the forward ops run in order.

    Every value is freed after its last forward reader, and no op takes over a buffer: this is on
    the high side.
    """
    graph, workspace = problem.graph, problem.profile.op_workspace_bytes
    ops = [op for op in graph.ops if op.phase == FORWARD]
    last = {value_id: op.id for op in ops for value_id in (*op.outputs, *op.inputs)}
    alive = most = 0
    for op in ops:
        dying = [v for v in set(op.inputs) if last[v] == op.id and _is_computed(problem, v)]
        written = sum(graph.values[v].nbytes for v in op.outputs)
        most = max(most, alive + written + workspace[op.id])
        unread = [v for v in op.outputs if last[v] == op.id]
        alive += written - sum(graph.values[v].nbytes for v in (*dying, *unread))
    return most


def _is_computed(problem: Problem, value_id: int) -> bool:
    return problem.graph.values[value_id].producer is not None


def validation_news(
    problem: Problem, batch_size: int, validation_size: int, limit: Limit
) -> tell.News | None:
    """Returns what is to be told of validation that is predicted to need more than the limit.

    Args:
        problem: the train step.
        batch_size: its samples.
        validation_size: samples of a validation batch.
        limit: of the ``fit``.
    """
    resident, forward = problem.profile.resident_bytes, forward_bytes(problem)
    needed = resident + forward * validation_size // batch_size
    if limit.holds(needed):
        return None
    size = max(0, limit.usable_bytes - resident) * batch_size // max(1, forward)
    return tell.large_validation(validation_size, needed, limit, size)


def whole_data_news(data: Any, on_host: bool, limit: Limit) -> tell.News | None:
    """Returns what is to be told where ``fit`` holds large data as a whole.

    Args:
        data: the arrays that ``fit`` was given.
        on_host: whether the memory that counts is the host's.
        limit: of the ``fit``.
    """
    nbytes = sum(getattr(array, "nbytes", 0) for array in keras.tree.flatten(data))
    large = on_host and nbytes >= _LARGE_DATA_SHARE * limit.total_bytes
    return tell.whole_data(nbytes, limit) if large else None
