"""Tells where the memory of a plain step goes at its peak, by kind and by layer.

The parts follow from the order without recomputation by the one memory semantics
(:mod:`keras_remat.core.simulate`), so they add up to the simulated peak, to the byte.
"""

from __future__ import annotations

from collections import Counter

from keras_remat.core.graph import FORWARD
from keras_remat.core.problem import Problem
from keras_remat.core.schedule import Schedule
from keras_remat.reporting.curves import Curve
from keras_remat.reporting.layers import layer_names

#: The parts, in the order in which they are shown.
WEIGHTS, SLOTS, GRADIENTS, BATCH, ACTIVATIONS, WORKSPACE = PARTS = (
    "weights", "slots", "gradients", "batch", "activations", "workspace",
)  # fmt: skip


def parts_at_peak(problem: Problem, weights_bytes: int, slots_bytes: int) -> dict[str, int]:
    """Returns part → bytes at the peak of the step without recomputation.

    Resident bytes beside weights and slots count as batch: copies of it, and other data.

    Args:
        problem: a traced step with its costs.
        weights_bytes: bytes of variables of layers, trainable or not, and of metrics.
        slots_bytes: bytes of variables of optimizers.
    """
    held, workspace = _held_by_phase(Curve(problem, Schedule.store_all(problem.graph)))
    return {
        WEIGHTS: weights_bytes,
        SLOTS: slots_bytes,
        GRADIENTS: sum(nbytes for phase, nbytes in held.items() if phase != FORWARD),
        BATCH: max(0, problem.profile.resident_bytes - weights_bytes - slots_bytes),
        ACTIVATIONS: held[FORWARD],
        WORKSPACE: workspace,
    }


def _held_by_phase(curve: Curve) -> tuple[Counter[str], int]:
    """Returns phase → bytes of the values alive at the peak, and the running op's workspace."""
    if not curve.live:
        return Counter(), 0
    problem, at = curve.problem, curve.peak_position
    running = curve.schedule.order[at]
    phases = [op.phase for op in problem.graph.ops]
    held, workspace = curve.held(at, phases), problem.profile.op_workspace_bytes[running]
    taken_over = sum(held.values()) + workspace + problem.profile.resident_bytes - curve.live[at]
    held[phases[running]] -= taken_over
    return held, workspace


def activations_by_layer(problem: Problem) -> dict[str, int]:
    """Returns layer → bytes of its activations at the plain peak, the largest first.

    The plain peak is that of the step without recomputation. Layers that hold none are left out.
    """
    curve = Curve(problem, Schedule.store_all(problem.graph))
    if not curve.live:
        return {}
    layers = layer_names(problem)
    ops = problem.graph.ops
    names = [name if op.phase == FORWARD else "" for op, name in zip(ops, layers, strict=True)]
    held = curve.held(curve.peak_position, names)
    return {name: nbytes for name, nbytes in held.most_common() if name and nbytes > 0}
