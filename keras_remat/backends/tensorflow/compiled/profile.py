"""What each op of a compiled TensorFlow step costs, from shapes: nothing inside one XLA program can
be timed from outside."""

from __future__ import annotations

from math import fsum, prod

from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram
from keras_remat.backends.tensorflow.compiled.kinds import KINDS
from keras_remat.backends.tensorflow.compiled.trace import CompiledStep
from keras_remat.backends.tensorflow.graph import kinds as op_kinds
from keras_remat.backends.tensorflow.ordered.profile import multiply_adds
from keras_remat.backends.tensorflow.profiler.device import live_target
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.kernel_costs import op_time_s
from keras_remat.core.profile import Profile
from keras_remat.core.target import Rates, Target

CPU_BUFFERS = {"StatelessRandomUniformV2": 4, "StatelessRandomUniform": 4}
"""Operations XLA:CPU expands into loops that need buffers of the result's size, and how many."""


def estimated_profile(traced: CompiledStep, resident_bytes: int | None = None) -> Profile:
    """Returns the costs of a traced step from its shapes.

    Args:
        traced: from :func:`~keras_remat.backends.tensorflow.compiled.trace.trace`.
        resident_bytes: bytes in use on the device between steps, if known; never less than what the
            step's inputs need.
    """
    program, graph = traced.program, traced.graph
    target = live_target()
    times = []
    for op in graph.ops:
        flops = fsum(
            _flops(program, program.equations[at], target.rates) for at in traced.handles[op.id]
        )
        times.append(op_time_s(traced, op, KINDS, flops, target.rates))
    resident = graph.input_bytes if resident_bytes is None else resident_bytes
    workspace = tuple(_workspace_bytes(program, traced.handles[op.id], target) for op in graph.ops)
    return Profile(tuple(times), workspace, resident, "estimated", target.device, "tensorflow")


def _flops(program: FlatProgram, equation: Equation, rates: Rates) -> float:
    """Arithmetic of one operation, in flops of a 32-bit product."""
    operands = [program.shapes[a] if isinstance(a, int) else (a.nbytes,) for a in equation.inputs]
    result = program.shapes[equation.outputs[0]]
    if equation.kind in op_kinds.MATMULS | op_kinds.CONVOLUTIONS:
        grouped = equation.kind.startswith("Depthwise")
        half = program.dtypes[equation.outputs[0]].size == 2
        each = (rates.half_flop if half else 1) * (rates.grouped_factor if grouped else 1)
        return multiply_adds(equation.source, operands, result) * each
    elements = float(max([prod(shape or ()) for shape in (*operands, result)], default=1))
    if equation.kind in KINDS.random:
        return elements * rates.random_flops
    return elements * (rates.expensive_flops if equation.kind in KINDS.expensive else 1)


def _workspace_bytes(program: FlatProgram, equations: tuple[int, ...], target: Target) -> int:
    """Memory alive only inside one op: on a CPU the buffers of an expanded operation."""
    if target.on_gpu:
        return 0
    return max(
        CPU_BUFFERS.get(program.equations[at].kind, 0)
        * program.sizes[program.equations[at].outputs[0]]
        for at in equations
    )
