"""Estimates the workspace of an op from shapes: before anything ran, and where the recorder does
not see it."""

from __future__ import annotations

import os

from keras_remat.backends.tensorflow.graph import kinds
from keras_remat.backends.tensorflow.graph.kernel_scratch import own_scratch_bytes, runs_own_kernels
from keras_remat.backends.tensorflow.graph.nodes import data_inputs, tensor_key
from keras_remat.backends.tensorflow.graph.step import TensorFlowStep
from keras_remat.backends.tensorflow.memory.measure import WORKSPACE_LIMIT_MIB
from keras_remat.backends.tensorflow.profiler import device
from keras_remat.core.graph import Op
from keras_remat.units import MIB

#: TensorFlow's default for the most scratch of a GPU's convolution.
_DEFAULT_WORKSPACE_LIMIT_MIB = 4096


def estimated_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns the bytes of workspace that an op is expected to request.

    On a GPU convolutions without workspace are slow, so they get a guess. On a CPU oneDNN's kernels
    are assumed to need none: how much they need depends on the processor, and a guess that is too
    high would refuse steps that fit. The workspace of oneDNN's convolutions of one sample, and of
    compiled functions, is measured by running them alone. That of TensorFlow's own kernels follows
    from shapes, that of loops and branches from their bodies.
    """
    known = known_workspace(traced, op) or traced.compiled_scratch_bytes.get(op.name, 0)
    known = known or traced.body_workspace_bytes.get(op.name, 0)
    known = known or traced.one_sample_scratch_bytes.get(op.name, 0)
    if device.on_gpu():
        return max(known, _guessed_workspace(traced, op))
    return known + (_own_workspace(traced, op) if runs_own_kernels() else 0)


def known_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns the bytes of workspace known for an op on any device. The recorder misses small
    requests of a kernel, and those of a branch that does not run."""
    if op.kind in kinds.BRANCHES:
        return traced.body_workspace_bytes.get(op.name, 0)
    return traced.graph.values[op.outputs[0]].nbytes if op.kind in kinds.SCRATCH else 0


def _guessed_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns a guess for the workspace of cuDNN's convolutions: the bytes read and written."""
    if op.kind not in kinds.CONVOLUTIONS:
        return 0
    limit = int(os.environ.get(WORKSPACE_LIMIT_MIB, _DEFAULT_WORKSPACE_LIMIT_MIB)) * MIB
    return min(limit, sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs)))


def _own_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns the bytes of workspace of TensorFlow's own kernels on a CPU."""
    node, shapes = traced.handles[op.id], traced.tensor_shapes
    operands = [shapes.get(tensor_key(read)) for read in data_inputs(node)]
    return own_scratch_bytes(node, operands, shapes.get(f"{node.name}:0"))
