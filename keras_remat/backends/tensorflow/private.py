"""The only module that touches TensorFlow's private API. Tested on TensorFlow 2.21 with Keras 3.15.

Ten things have no public way in: running Grappler on a graph by hand, a variable's shape from its
handle, a function's definition, what XLA says when it refuses to compile, asking which devices have
a kernel for an op, capturing an eager tensor under a chosen name, calling a function with a session
configuration of its own, reading the profiler's raw trace, building a model from a batch, and what
Keras's own ``train_step`` does with the loss tracker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.grappler import tf_optimizer
from tensorflow.tsl.profiler.protobuf import xplane_pb2

TESTED_VERSIONS = ("2.21",)
_CPU, _GPU = (f"/job:localhost/replica:0/task:0/device:{kind}:0" for kind in ("CPU", "GPU"))


def optimize_graph(graph_def: Any, fetches: Sequence[str], variables: Mapping[str, Any]) -> Any:
    """Returns the GraphDef after TensorFlow's default graph optimizations.

    Grappler fuses and changes layouts only where it knows the device, and adds up and folds only
    where it knows the shapes; a traced graph says neither the device of a node nor, for certain,
    the shape of a placeholder. For the time of the call nodes get the device that the placer would
    give them, and placeholders become function arguments.

    Args:
        graph_def: inlined or not; function calls are inlined here.
        fetches: names of nodes or tensors that must survive.
        variables: placeholder name → the ``tf.Variable`` it stands for.
    """
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    keep_control_flow_functional(meta_graph.graph_def)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    placeholders = {}
    for node in list(meta_graph.graph_def.node):
        node.device = node.device or (_GPU if on_gpu and _has_gpu_kernel(node.op) else _CPU)
        if node.op == "Placeholder":
            placeholders[node.name] = tf.compat.v1.NodeDef.FromString(node.SerializeToString())
            if node.name in variables:
                _become_handle(node, variables[node.name])
            else:
                meta_graph.graph_def.node.append(_unshaped(node))
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    optimized = tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False)
    for at in reversed(range(len(optimized.node))):
        node = optimized.node[at]
        if node.name in placeholders:
            node.CopyFrom(placeholders[node.name])
        elif node.op == "Placeholder":
            del optimized.node[at]
        node.device = "" if node.device in (_CPU, _GPU) else node.device
    rename_functions(optimized)
    return optimized


def _become_handle(node: Any, variable: Any) -> None:
    """Turns a variable's placeholder into the op that makes its handle."""
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = variable.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _unshaped(node: Any) -> Any:
    """Turns a placeholder into an ``EnsureShape`` of another placeholder, which is returned:
    Grappler believes no placeholder's shape."""
    argument = tf.compat.v1.NodeDef()
    argument.CopyFrom(node)
    argument.name = f"{node.name}/argument"
    node.Clear()
    node.name, node.op, node.device = (
        argument.name.removesuffix("/argument"),
        "EnsureShape",
        argument.device,
    )
    node.input.append(argument.name)
    node.attr["T"].CopyFrom(argument.attr["dtype"])
    node.attr["shape"].CopyFrom(argument.attr["shape"])
    return argument


def constant_folded(graph_def: Any, fetches: Sequence[str]) -> Any:
    """Returns a pure GraphDef with constants folded and equal nodes merged, and no operation that
    XLA has no kernel for.

    Args:
        graph_def: without effects.
        fetches: names of tensors that must survive.
    """
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    for name in (
        "arithmetic_optimization",
        "auto_mixed_precision",
        "layout_optimizer",
        "remapping",
        "scoped_allocator_optimization",
    ):
        setattr(rewrite, name, rewriter_config_pb2.RewriterConfig.OFF)
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    keep_control_flow_functional(meta_graph.graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    folded = tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False)
    rename_functions(folded)
    return folded


def variable_spec(handle: Any) -> Any:
    """Shape and dtype of the variable behind a resource tensor; ``None`` where that is no
    variable."""
    data = getattr(handle, "_handle_data", None)
    entries = list(data.shape_and_type) if data is not None else []
    if len(entries) != 1:
        return None
    return tf.TensorSpec(tf.TensorShape(entries[0].shape), tf.as_dtype(entries[0].dtype))


def function_definition(function: Any) -> Any:
    """The ``FunctionDef`` of a concrete function."""
    return function.function_def


@cache
def _has_gpu_kernel(kind: str) -> bool:
    return any(
        kernel.device_type == "GPU" for kernel in kernels.get_registered_kernels_for_op(kind).kernel
    )


def rename_functions(graph_def: Any) -> None:
    """Gives the library's functions names of their own, in place: TensorFlow refuses two
    definitions under one name, and Grappler has changed definitions that the process already knows.
    The suffix is a hash of the library, so equal libraries stay equal."""
    functions = graph_def.library.function
    if not functions:
        return
    suffix = hashlib.sha256(graph_def.library.SerializeToString(deterministic=True)).hexdigest()[
        :16
    ]
    renamed = {
        function.signature.name: f"{function.signature.name}_{suffix}" for function in functions
    }
    nodes = [*graph_def.node, *(node for function in functions for node in function.node_def)]
    for node in nodes:
        node.op = renamed.get(node.op, node.op)
        for attribute in node.attr.values():
            if attribute.WhichOneof("value") == "func":
                attribute.func.name = renamed.get(attribute.func.name, attribute.func.name)
            for reference in attribute.list.func:
                reference.name = renamed.get(reference.name, reference.name)
    for function in functions:
        function.signature.name = renamed[function.signature.name]
    for gradient in graph_def.library.gradient:
        gradient.function_name = renamed.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = renamed.get(gradient.gradient_func, gradient.gradient_func)


def keep_control_flow_functional(graph_def: Any) -> None:
    """Makes ``While`` and ``If`` stay single ops, in place: without the mark nobody lowers them to
    ``Switch`` and ``Merge``."""
    for node in (
        *graph_def.node,
        *(n for function in graph_def.library.function for n in function.node_def),
    ):
        if "_lower_using_switch_merge" in node.attr:
            del node.attr["_lower_using_switch_merge"]


def is_stateful(kind: str) -> bool:
    """Whether the OpDef of an operation type says it has state or an effect; unknown types count as
    stateful."""
    op_def = op_def_registry.get(kind)
    return True if op_def is None else bool(op_def.is_stateful)


def capture(external: Any) -> Any:
    """The symbolic tensor that stands for an eager tensor in the function graph being built."""
    return tf.compat.v1.get_default_graph().capture(external)


def build_model(model: Any, batch: Any) -> None:
    """Builds layers, optimizer, metrics and losses from one batch, as ``fit`` does before its first
    step."""
    if not getattr(model, "compiled", False):
        raise ValueError("The model is not compiled: call model.compile(...) first.")
    model._symbolic_build(data_batch=batch)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def call_for_training(model: Any, x: Any) -> Any:
    """The model's output in training mode, as Keras's ``train_step`` asks for it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def track_loss(model: Any, loss: Any, samples: int) -> None:
    """Adds a batch's loss to what the ``loss`` metric is the mean of."""
    model._loss_tracker.update_state(loss, sample_weight=samples)


def is_xla_refusal(error: Any) -> bool:
    """Whether an error says that XLA cannot compile a function, and not that a step's values are
    wrong."""
    text = str(error.message)
    return "XLA" in text and any(
        said in text for said in ("compile", "conversion failed", "compilation")
    )


def read_trace(serialized: bytes) -> Any:
    """The profiler's trace (``XSpace``) from the bytes of an ``*.xplane.pb`` file."""
    return xplane_pb2.XSpace.FromString(serialized)


def gpu_memory_limit_bytes() -> int:
    """What the allocator of the first GPU may take."""
    return max(
        int(device.memory_limit)
        for device in device_lib.list_local_devices()
        if device.device_type == "GPU"
    )


def build_function(build: Callable[..., Sequence[Any]], signature: Sequence[Any]) -> Any:
    """Makes a concrete function from ``build(*placeholders) -> outputs`` without automatic control
    dependencies.

    Args:
        build: called once, with one placeholder per entry of ``signature``.
        signature: ``TensorSpec`` per input.
    """
    return tf.compat.v1.wrap_function(build, list(signature))


def _verbatim_options() -> Any:
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = config_pb2.OptimizerOptions.L0
    return context.FunctionCallOptions(config_proto=config)


def call_verbatim(function: Any, args: Sequence[Any]) -> list[Any]:
    """Runs a function made by :func:`build_function` exactly as it was built: no Grappler, no
    common-subexpression pass.

    The options are those of this thread and this call; they are put back before it returns. (A
    ``StatefulPartitionedCall`` op, which takes a configuration as an attribute, runs its body on
    the calling thread without the executor's trace events.)
    """
    eager = context.context()
    options = eager.function_call_options
    eager.function_call_options = _verbatim_options()
    try:
        outputs = function(*args)
    finally:
        eager.function_call_options = options
    return list(tf.nest.flatten(outputs))
