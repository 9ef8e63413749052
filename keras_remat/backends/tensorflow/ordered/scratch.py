"""The workspace of an op, as far as shapes tell it: before anything ran, and where the recorder
does not see it."""

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
    """Returns the bytes of workspace that an op is expected to ask for.

    On a GPU convolutions without any are slow, so they get a guess. On a CPU oneDNN's kernels are
    taken to need none: how much depends on the processor, and a guess that is too high would refuse
    what fits. Its convolutions of one sample tell theirs by running alone, as does what XLA
    compiles; TensorFlow's own kernels by their shapes, and loops and branches by their bodies.
    """
    known = known_workspace(traced, op) or traced.compiled_scratch_bytes.get(op.name, 0)
    known = known or traced.body_workspace_bytes.get(op.name, 0)
    known = known or traced.one_sample_scratch_bytes.get(op.name, 0)
    if device.on_gpu():
        return max(known, _guessed_workspace(traced, op))
    return known + (_own_workspace(traced, op) if runs_own_kernels() else 0)


def known_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns the bytes that an op asks for on any device. The recorder does not see what a kernel
    asks for while that is little, nor what a branch asks for that does not run."""
    if op.kind in kinds.BRANCHES:
        return traced.body_workspace_bytes.get(op.name, 0)
    return traced.graph.values[op.outputs[0]].nbytes if op.kind in kinds.SCRATCH else 0


def _guessed_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns what cuDNN's algorithms for a convolution may ask for: as much as it reads and
    writes."""
    if op.kind not in kinds.CONVOLUTIONS:
        return 0
    limit = int(os.environ.get(WORKSPACE_LIMIT_MIB, _DEFAULT_WORKSPACE_LIMIT_MIB)) * MIB
    return min(limit, sum(traced.graph.values[v].nbytes for v in (*op.inputs, *op.outputs)))


def _own_workspace(traced: TensorFlowStep, op: Op) -> int:
    """Returns what TensorFlow's own kernels ask for on a CPU."""
    node, shapes = traced.handles[op.id], traced.tensor_shapes
    operands = [shapes.get(tensor_key(read)) for read in data_inputs(node)]
    return own_scratch_bytes(node, operands, shapes.get(f"{node.name}:0"))
