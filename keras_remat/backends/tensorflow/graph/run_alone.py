"""Measures sizes that shapes do not give, by running an op once, alone, on made-up inputs.

Shape inference does not know the size of the value that cuDNN's recurrent layers keep for their
gradient. A size of 0 would leave their largest value out of every plan. Nor does anything give the
scratch of a call that XLA compiles: one gradient of ConvNeXtTiny takes 220 MiB. A recording shows
both, but only after the first plan, and then the graph has other sizes already. Running the op
costs one pass of one layer, while tracing.

Where the processor has no AVX-512, oneDNN's 2-D convolution of one sample gathers its patches: 80
MiB for an input of 8. With two samples it gathers none. Slices of one sample gather, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf

from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.graph.kernel_scratch import runs_own_kernels
from keras_remat.backends.tensorflow.graph.nodes import (
    copied,
    data_inputs,
    is_compiled,
    node_of,
    tensor_key,
)
from keras_remat.backends.tensorflow.memory.measure import TensorFlowDevice, measure
from keras_remat.backends.tensorflow.profiler.device import device_name, on_gpu

logger = logging.getLogger(__name__)

#: Kinds whose kernels may gather the patches of one sample.
_OF_ONE_SAMPLE = frozenset({"Conv2D", "_FusedConv2D"})
#: Errors of an op that cannot run alone.
_CANNOT_RUN = (tf.errors.OpError, ValueError)


def output_shapes(
    node: Any, operands: Sequence[tuple[tuple[int, ...] | None, Any]]
) -> list[tuple[int, ...]]:
    """Returns the shape of every output of a node; empty where it cannot run alone.

    Args:
        node: the ``NodeDef``, without resources among its inputs.
        operands: shape and dtype of every input.
    """
    if any(shape is None or dtype == tf.resource for shape, dtype in operands):
        return []
    # ones, since they are valid lengths of sequences
    inputs = [tf.ones(shape, dtype) for shape, dtype in operands]
    try:
        return [tuple(output.shape) for output in _alone(node, inputs)()]
    except _CANNOT_RUN as error:
        logger.warning("keras_remat: the size of %s's outputs is not known (%s)", node.op, error)
        return []


def compiled_scratch_bytes(
    nodes: Mapping[str, Any],
    library: Any,
    captures: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...] | None],
) -> dict[str, int]:
    """Returns name → bytes of scratch of the calls that XLA compiles inside a step that is not
    compiled.

    Equal calls run once. Calls that cannot run alone are left out. Without statistics of the
    allocator all are.

    Args:
        nodes: name → ``NodeDef`` of the step.
        library: functions of the step.
        captures: placeholder name → the eager tensor that it stands for. Variables are not touched:
            the call gets new ones of the same shapes.
        shapes: tensor name → static shape, or ``None`` when unknown.
    """
    calls = [node for node in nodes.values() if is_compiled(node)]
    if not calls or not TensorFlowDevice().has_statistics:
        return {}
    functions = {function.signature.name: function for function in library.function}
    seen: dict[Any, int | None] = {}
    found = {}
    for node in calls:
        specs = _operands(node, captures, shapes)
        if specs is None:
            continue
        call = (node.op, specs, _body(functions[node.attr["f"].func.name]))
        if call not in seen:
            seen[call] = _scratch_bytes(node, specs, library)
        nbytes = seen[call]
        if nbytes is not None:
            found[node.name] = nbytes
    return found


def one_sample_scratch_bytes(
    nodes: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, int]:
    """Returns name → bytes of scratch of oneDNN's 2-D convolutions of one sample.

    Equal convolutions run once in a process. Those that cannot run alone are left out. Without
    statistics of the allocator all are.

    Args:
        nodes, shapes: as of :func:`compiled_scratch_bytes`.
    """
    if on_gpu() or runs_own_kernels() or not TensorFlowDevice().has_statistics:
        return {}
    found = {}
    for node in nodes.values():
        if node.op not in _OF_ONE_SAMPLE:
            continue
        read = tuple(
            shape
            for name in data_inputs(node)
            if (shape := shapes.get(tensor_key(name))) is not None
        )
        if len(read) < len(data_inputs(node)) or read[0][0] != 1:
            continue
        # without name and inputs, which differ between equal convolutions
        like = copied(node, (), node.op).SerializeToString(deterministic=True)
        nbytes = _convolution_scratch_bytes(like, read)
        if nbytes is not None:
            found[node.name] = nbytes
    return found


@lru_cache(maxsize=256)
def _convolution_scratch_bytes(like: bytes, read: tuple[tuple[int, ...], ...]) -> int | None:
    """Returns the bytes of scratch of a convolution, as :func:`_scratch_bytes` does.

    Args:
        like: its node, serialized.
        read: shapes of its inputs.
    """
    node = tf.compat.v1.NodeDef.FromString(like)
    dtype = tf.as_dtype(node.attr["T"].type)
    return _scratch_bytes(node, [(False, tf.TensorSpec(shape, dtype)) for shape in read], None)


def _operands(
    node: Any, captures: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> tuple[tuple[bool, tf.TensorSpec], ...] | None:
    """Returns for every input whether it is a variable, and its spec; ``None`` where a spec is not
    known."""
    specs = []
    for name, type_ in zip(data_inputs(node), node.attr["Tin"].list.type, strict=True):
        dtype, external = tf.as_dtype(type_), captures.get(node_of(name))
        is_variable = dtype == tf.resource
        if is_variable:
            spec = None if external is None else private.variable_spec(external)
        else:
            shape = shapes.get(tensor_key(name))
            spec = None if shape is None or not dtype.size else tf.TensorSpec(shape, dtype)
        if spec is None:
            return None
        specs.append((is_variable, spec))
    return tuple(specs)


def _body(function: Any) -> tuple[Any, ...]:
    """Returns a function's nodes without names, which differ between equal layers."""
    places = {name: at for at, name in enumerate(arg.name for arg in function.signature.input_arg)}
    places |= {node.name: len(places) + at for at, node in enumerate(function.node_def)}
    return tuple(
        (
            node.op,
            tuple(places[name.removeprefix("^").partition(":")[0]] for name in node.input),
            tuple(
                sorted((k, v.SerializeToString(deterministic=True)) for k, v in node.attr.items())
            ),
        )
        for node in function.node_def
    )


def _scratch_bytes(
    node: Any, specs: Sequence[tuple[bool, tf.TensorSpec]], library: Any
) -> int | None:
    """Returns the bytes that a call requests beside its inputs and outputs; ``None`` where it
    cannot run.

    The second run is measured: the first compiles, and may request more.
    """
    device = TensorFlowDevice()
    try:
        with tf.device(device_name()):
            held = [
                tf.Variable(ones, trainable=False) if is_variable else ones
                for is_variable, ones in ((v, tf.ones(spec.shape, spec.dtype)) for v, spec in specs)
            ]
            inputs = [x.handle if isinstance(x, tf.Variable) else x for x in held]
            run = _alone(node, inputs, library)
            run()
            outputs, usage = measure(run, device=device)
        kept = device.in_use_bytes()
        del outputs
        return max(0, usage.peak_bytes - kept)
    except _CANNOT_RUN as error:
        logger.warning("keras_remat: the scratch of %s is not known (%s)", node.name, error)
        return None


def _alone(node: Any, inputs: Sequence[Any], library: Any = None) -> Callable[[], list[Any]]:
    """Returns a function that runs a node on inputs."""
    document = tf.compat.v1.GraphDef(library=library)
    document.node.append(copied(node, (f"operand_{at}" for at in range(len(inputs))), "alone"))

    def build(*placeholders: Any) -> list[Any]:
        named = {f"operand_{at}:0": tensor for at, tensor in enumerate(placeholders)}
        (op,) = tf.graph_util.import_graph_def(
            document, input_map=named, return_elements=["alone"], name=""
        )
        return list(op.outputs)

    function = private.build_function(build, [tf.TensorSpec(x.shape, x.dtype) for x in inputs])
    return lambda: private.call_verbatim(function, inputs)
