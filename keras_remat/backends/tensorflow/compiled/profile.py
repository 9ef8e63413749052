"""Estimates the cost of each op of a compiled TensorFlow step from shapes: nothing inside one XLA
program can be timed from outside."""

from __future__ import annotations

from math import fsum, prod

from keras_remat.backends.tensorflow.compiled.flatten import FlatProgram
from keras_remat.backends.tensorflow.compiled.kinds import (
    FORWARD_CONVOLUTIONS,
    INPUT_GRADIENTS,
    KERNEL_GRADIENTS,
    KINDS,
    POOLING_GRADIENTS,
    kinds_of,
)
from keras_remat.backends.tensorflow.compiled.trace import CompiledStep
from keras_remat.backends.tensorflow.graph import kinds as op_kinds
from keras_remat.backends.tensorflow.ordered.profile import multiply_adds
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.kernel_costs import INDEX_BYTES, op_time_s
from keras_remat.core.profile import Profile
from keras_remat.core.target import Rates, Target

CPU_BUFFERS = {"StatelessRandomUniformV2": 4, "StatelessRandomUniform": 4}
"""Operation that XLA:CPU expands into a loop → how many buffers of the result's size it needs."""


def estimated_profile(traced: CompiledStep, resident_bytes: int | None = None) -> Profile:
    """Returns the costs of a traced step from its shapes.

    Args:
        traced: from :func:`~keras_remat.backends.tensorflow.compiled.trace.trace`.
        resident_bytes: bytes in use on the device between steps; ``None`` where unknown: then the
            bytes of the step's inputs.
    """
    program, graph = traced.program, traced.graph
    target = traced.target
    kinds = kinds_of(target)
    times = []
    for op in graph.ops:
        flops = fsum(
            _flops(program, program.equations[at], target.rates) for at in traced.handles[op.id]
        )
        times.append(op_time_s(traced, op, kinds, flops, target.rates))
    resident = graph.input_bytes if resident_bytes is None else resident_bytes
    workspace = tuple(_workspace_bytes(program, traced.handles[op.id], target) for op in graph.ops)
    return Profile(tuple(times), workspace, resident, "estimated", target.device, "tensorflow")


def _flops(program: FlatProgram, equation: Equation, rates: Rates) -> float:
    """Counts the arithmetic of one operation, in flops of a 32-bit matrix product."""
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
    """Returns the bytes alive only inside one op: the buffers of an expanded operation."""
    buffers = _gpu_buffer_bytes if target.on_gpu else _cpu_buffer_bytes
    return max(buffers(program, program.equations[at]) for at in equations)


def _cpu_buffer_bytes(program: FlatProgram, equation: Equation) -> int:
    return CPU_BUFFERS.get(equation.kind, 0) * program.sizes[equation.outputs[0]]


def _gpu_buffer_bytes(program: FlatProgram, equation: Equation) -> int:
    """Returns the bytes XLA:GPU needs for one operation beside its operands and result: copies of
    kernels in cuDNN's layout, and indices of pooled elements."""
    if equation.kind in KERNEL_GRADIENTS:
        return int(program.sizes[equation.outputs[0]])
    if equation.kind in FORWARD_CONVOLUTIONS | INPUT_GRADIENTS:
        kernel = equation.inputs[1]
        return int(program.sizes[kernel]) if isinstance(kernel, int) else 0
    if equation.kind in POOLING_GRADIENTS:
        pooled = program.shapes[equation.reads[-1]] or ()
        return INDEX_BYTES * len(pooled) * prod(pooled)
    return 0
