"""Estimates the costs of each op of a traced JAX step.

Bytes of values are exact (from shapes). Times: nothing inside one XLA program can be timed from
outside, so the *split* over ops is always estimated, by arithmetic and memory traffic. Each cluster
counts as the one kernel XLA makes of it. The kernel pays for what it reads and writes, and nothing
for the values inside it. Only the *sum* can be measured, and the estimates scaled to it
(:func:`keras_remat.backends.xla.kernel_costs.scaled`). ``Profile.source`` is ``"estimated"`` in
both cases, because op times decide about a plan by their ratios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keras_remat.backends.jax import private
from keras_remat.backends.jax.flatten import FlatProgram, nbytes
from keras_remat.backends.jax.kinds import (
    CONVOLUTION,
    KERNEL_GRADIENT,
    KINDS,
    POOLING_GRADIENT,
    PRODUCT,
    copied_operands,
    is_emulated,
    kinds_of,
    padded_operand,
    pooling_pieces,
)
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.kernel_costs import INDEX_BYTES, op_time_s
from keras_remat.core.graph import Op
from keras_remat.core.profile import Profile
from keras_remat.core.target import Rates
from keras_remat.units import MIB

CPU_BUFFERS = {"random_bits": 4, "threefry2x32": 2, "erfc": 3}
"""Primitive → number of buffers of the result's size that it needs on XLA:CPU, which expands it
into loops or pieces (read in buffer assignments)."""

POOLING_BUFFERS, DENSE_GRADIENTS = 7, 2
"""Numbers of such buffers for :data:`~keras_remat.backends.jax.kinds.POOLING_GRADIENT`, in sizes of
its result, and for the kernel's gradient of a grouped convolution, in sizes of an ungrouped
kernel."""


EMULATED = 2
"""Size of a 16-bit value's copy in 32 bits, in sizes of the value."""


CUBLAS_BYTES = 4 * MIB
"""Bytes of scratch memory that XLA:GPU gives every product of cuBLAS's."""


def estimated_profile(traced: JaxTracedStep, resident_bytes: int | None = None) -> Profile:
    """Returns the costs of a traced step from its shapes.

    Args:
        traced: from :func:`~keras_remat.backends.jax.trace.trace`.
        resident_bytes: bytes in use on the device between steps, if known; never less than what the
            step's inputs need.
    """
    target = traced.target
    return Profile(
        tuple(_seconds(traced, op, target.rates) for op in traced.graph.ops),
        tuple(_workspace_bytes(traced, op.id) for op in traced.graph.ops),
        max(resident_bytes or 0, sum(v.nbytes for v in traced.graph.values if v.producer is None)),
        source="estimated",
        device=target.device,
        backend="jax",
    )


def _seconds(traced: JaxTracedStep, op: Op, rates: Rates) -> float:
    program, shards = traced.program, traced.program.shards
    flops = math.fsum(_flops(program.equations[at], program, rates) for at in traced.handles[op.id])
    flops /= shards[traced.numbers[op.outputs[0]]] if shards and op.outputs else 1
    return op_time_s(traced, op, KINDS, flops, rates)


def _flops(equation: Equation, program: FlatProgram, rates: Rates) -> float:
    """Counts the arithmetic of one equation in FLOPs of a 32-bit product. Multiplications and
    additions count apart."""
    params = equation.source.params
    shape = [program.aval(atom).shape for atom in equation.inputs]
    out = program.avals[equation.outputs[0]].shape if equation.outputs else ()
    of_two_bytes = any(program.avals[a].dtype.itemsize == 2 for a in equation.reads)
    each = rates.half_flop if of_two_bytes else 1.0
    if equation.kind == PRODUCT:
        (contracted, _), _ = params["dimension_numbers"]
        return float(2 * each * math.prod(out) * math.prod(shape[0][d] for d in contracted))
    if equation.kind in (CONVOLUTION, KERNEL_GRADIENT):
        taps = math.prod(shape[1][d] for d in params["dimension_numbers"].rhs_spec[1:])
        # a dilated input (the gradient of a strided convolution) is mostly zeros that are not
        # multiplied
        grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
        each *= rates.grouped_factor if grouped else 1
        return float(2 * each * math.prod(out) * taps / math.prod(params["lhs_dilation"]))
    bodies = private.inner_jaxprs(params)
    if bodies:
        together = max if equation.kind == "cond" else math.fsum
        return float(params.get("length", 1)) * together(map(_body_flops, bodies))
    elements = max([math.prod(out), *map(math.prod, shape)])
    each = 1.0
    if equation.kind in KINDS.random:
        each = rates.random_flops
    elif equation.kind in KINDS.expensive:
        each = rates.expensive_flops
    return elements * each


def _body_flops(jaxpr: Any) -> float:
    """Counts the FLOPs of a loop's or branch's body: those of products, else one per element
    written."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = private.inner_jaxprs(eqn.params)
        if inner:
            total += math.fsum(_body_flops(body) for body in inner) * eqn.params.get("length", 1)
        elif eqn.primitive.name == PRODUCT:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            width = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * width
        else:
            total += math.fsum(math.prod(v.aval.shape) for v in eqn.outvars)
    return total


def _workspace_bytes(traced: JaxTracedStep, op_id: int) -> int:
    """Returns the most bytes alive only inside one op: in the body of a loop or of the larger
    branch, or in the buffers of an expanded primitive."""
    equations = [traced.program.equations[at] for at in traced.handles[op_id]]
    expanded = _gpu_buffer_bytes if traced.target.on_gpu else _cpu_buffer_bytes
    return max(max(_bodies_bytes(e.source, e.kind), expanded(e, traced)) for e in equations)


def _cpu_buffer_bytes(equation: Equation, traced: JaxTracedStep) -> int:
    """Returns the bytes of the buffers that XLA:CPU expands a primitive into, beside its operands
    and result."""
    result = sum(traced.program.sizes[number] for number in equation.outputs[:1])
    if equation.kind == POOLING_GRADIENT:
        return POOLING_BUFFERS * result // pooling_pieces(equation.source)
    if equation.kind in (CONVOLUTION, KERNEL_GRADIENT):
        # the gradient of a depthwise kernel is that of a dense one, most of it thrown away
        groups = int(equation.source.params["batch_group_count"])
        return DENSE_GRADIENTS * groups * result if groups > 1 else 0
    return CPU_BUFFERS.get(equation.kind, 0) * result


def _gpu_buffer_bytes(equation: Equation, traced: JaxTracedStep) -> int:
    """Returns the bytes that XLA:GPU needs for a primitive, beside its operands and result. They
    hold copies of kernels in cuDNN's layout, indices of pooled elements, or images that are padded
    or converted in memory."""
    program, reads = traced.program, equation.reads
    if equation.kind in (CONVOLUTION, KERNEL_GRADIENT):
        params, image = equation.source.params, program.avals[reads[0]]
        kernel = equation.outputs[0] if equation.kind == KERNEL_GRADIENT else reads[-1]
        copied = int(program.sizes[kernel])
        if is_emulated(image.dtype, traced.target):
            # a result is converted when the rest is no longer needed
            return copied + sum(EMULATED * program.sizes[number] for number in reads)
        if (padded := padded_operand(equation, program.avals)) is not None:
            at, params = padded
            return copied + _padded_bytes(params, program.avals[reads[at]])
        # the input gradient of a strided convolution is a padded image where it is grouped
        strided = max(params["lhs_dilation"], default=1) > 1
        grouped = params["feature_group_count"] > 1
        return copied + (_padded_bytes(params, image) if strided and grouped else 0)
    if equation.kind == PRODUCT:
        of_library = PRODUCT in kinds_of(traced.target).in_tuples
        copies = copied_operands(equation, traced.target)
        copied = sum(program.sizes[equation.inputs[at]] for at in copies)
        return copied + CUBLAS_BYTES * of_library
    if equation.kind == POOLING_GRADIENT:
        pooled = program.avals[reads[0]]
        shards = program.shards[reads[0]] if program.shards else 1
        return INDEX_BYTES * len(pooled.shape) * int(math.prod(pooled.shape)) // shards
    return 0


def _padded_bytes(params: Mapping[str, Any], image: Any) -> int:
    """Returns the bytes of a convolution's image, dilated and padded."""
    spatial = params["dimension_numbers"].lhs_spec[2:]
    shape = list(image.shape)
    for d, dilation, padding in zip(
        spatial, params["lhs_dilation"], params["padding"], strict=True
    ):
        shape[d] = max(0, (shape[d] - 1) * dilation + 1 + sum(padding))
    return int(math.prod(shape)) * int(image.dtype.itemsize)


def _bodies_bytes(equation: Any, kind: str) -> int:
    """Returns the most bytes that one body of a loop, a branch or a call needs beside the
    equation's inputs and outputs; only one branch runs.

    Args:
        equation: has the bodies in its parameters.
        kind: its primitive's name. A loop's body writes into buffers of its own, which the next
            round reads; any other body writes what the equation does.
    """
    loop = kind in ("scan", "while")
    bodies = private.inner_jaxprs(equation.params)
    return max((_body_bytes(body, with_outputs=loop) for body in bodies), default=0)


def _body_bytes(jaxpr: Any, *, with_outputs: bool) -> int:
    """Returns the most bytes alive while a body runs in its order, without its inputs."""
    last = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in _variables(eqn.invars)}
    returned = set(_variables(jaxpr.outvars))
    alive: dict[Any, int] = {}
    most = held = 0
    for at, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            alive[v] = nbytes(v.aval) if with_outputs or v not in returned else 0
            held += alive[v]
        most = max(most, held + _bodies_bytes(eqn, eqn.primitive.name))
        for v in dict.fromkeys((*_variables(eqn.invars), *eqn.outvars)):
            if v in alive and v not in returned and last.get(v, at) <= at:
                held -= alive.pop(v)
    return most


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, private.Literal)]
