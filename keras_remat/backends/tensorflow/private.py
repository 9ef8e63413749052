"""Wraps TensorFlow's private API; no other module touches it. Tested with the versions of
:mod:`keras_remat.backends.versions`.

The public API does not offer:

* graphs: running Grappler by hand; the graph or operations of a function's definition; a
  variable's shape and object from its handle; capturing an eager tensor under a chosen name;
* running: calling a function with its own session configuration; a traced function that is freed
  together with its graph; the profiler's raw trace;
* devices: which of them have a kernel for an op, and where it keeps its outputs; an allocator's
  limit; whether devices exist already and whether oneDNN is on;
* XLA: the HLO of a function and the buffers XLA gives it; why it refuses to compile; two of its
  operations;
* Keras's own ``train_step``: how it updates the trackers of losses, and for which batches it was
  traced;
* strategies: which variables and which numbers of collective ops belong together, and in what packs
  replicas exchange gradients.

When a new version of TensorFlow moves one of these, this is the file to mend: one file, though
long.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.core.framework import full_type_pb2
from tensorflow.core.protobuf import (
    config_pb2,
    device_properties_pb2,
    meta_graph_pb2,
    rewriter_config_pb2,
)
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import compiler_ir
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunctionGarbageCollector,
)
from tensorflow.python.framework import function_def_to_graph, kernels, op_def_registry
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import handle_data_util, resource_variable_ops
from tensorflow.python.util import _pywrap_util_port
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from keras_remat.backends.keras_private import wrapped
from keras_remat.errors import UnsupportedModelError

_TASK = "/job:localhost/replica:0/task:0/device:"
_CPU, _GPU = f"{_TASK}CPU:0", f"{_TASK}GPU:0"
#: Device types of kernels that run on a GPU; ``DEFAULT`` kernels run on every kind of device.
_GPU_KERNELS = ("GPU", "DEFAULT")
#: Assumed frequency of devices, which do not report it; only ratios matter, and only a little.
_FREQUENCY_MHZ = 1500


def optimize_graph(
    graph_def: Any,
    fetches: Sequence[str],
    variables: Mapping[str, Any],
    captures: Container[str],
) -> Any:
    """Returns the GraphDef after TensorFlow's default graph optimizations.

    Grappler fuses ops and changes layouts only where it knows the device, and simplifies and folds
    only where it knows the shapes. A traced graph says neither the device of a node nor, for
    certain, the shape of a placeholder. So for the call, nodes without a device get the one that
    the placer would choose, and placeholders become function arguments. Devices that the user wrote
    stay.

    Small tensors that the function captured become arguments, too. TensorFlow shows them as
    constants while it traces, but passes them in when the function runs. If Grappler folded them,
    results would differ from plain ``fit`` (``x / constant`` becomes a product). After Grappler
    they are constants again.

    Grappler may fuse into an op that does not allow the type (a convolution in bfloat16, which
    oneDNN would replace at run time). Such a graph could not be imported, so then nothing is fused.

    Args:
        graph_def: the graph, inlined or not; function calls are inlined here.
        fetches: names of nodes or tensors that must survive.
        variables: placeholder name → the ``tf.Variable`` it stands for.
        captures: names of the nodes that stand for captured tensors.
    """
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    placeholders = {}
    written = {node.name: node.device for node in meta_graph.graph_def.node if node.device}
    for node in list(meta_graph.graph_def.node):
        node.device = node.device or (_GPU if on_gpu and _has_gpu_kernel(node.op) else _CPU)
        if node.op == "Placeholder" or (node.op == "Const" and node.name in captures):
            placeholders[node.name] = tf.compat.v1.NodeDef.FromString(node.SerializeToString())
            if node.op == "Const":
                _become_placeholder(node)
            if node.name in variables:
                _become_handle(node, variables[node.name])
            else:
                meta_graph.graph_def.node.append(_unshaped(node))
    optimized = _run_grappler(meta_graph, fetches)
    if not all(map(has_legal_types, all_nodes(optimized))):
        optimized = _run_grappler(meta_graph, fetches, off=("remapping",))
    for at in reversed(range(len(optimized.node))):
        node = optimized.node[at]
        if node.name in placeholders:
            node.CopyFrom(placeholders[node.name])
        elif node.op == "Placeholder":
            del optimized.node[at]
        if node.name in written:
            node.device = written[node.name]
        elif node.device in (_CPU, _GPU):
            node.device = ""
    return optimized


def all_nodes(graph_def: Any) -> list[Any]:
    """Returns the nodes of a graph and of its functions."""
    functions = graph_def.library.function
    return [*graph_def.node, *(node for function in functions for node in function.node_def)]


def has_legal_types(node: Any) -> bool:
    """Returns whether a node has only types that its op allows; true for unregistered ops."""
    op_def = op_def_registry.get(node.op)
    return op_def is None or all(
        node.attr[attribute.name].type in attribute.allowed_values.list.type
        for attribute in op_def.attr
        if attribute.type == "type"
        and attribute.HasField("allowed_values")
        and attribute.name in node.attr
        and node.attr[attribute.name].type
    )


def _run_grappler(meta_graph: Any, fetches: Sequence[str], *, off: Sequence[str] = ()) -> Any:
    """Runs Grappler for the devices of this process, with some of its passes off.

    Without a cluster Grappler would start a session with default options, which makes new devices
    on every card of the machine, not only on the visible ones.

    Raises:
        UnsupportedModelError: Grappler refuses the graph (one with numbers in ``float8_e5m2``).
    """
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.min_graph_nodes = -1
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    for name in off:
        setattr(rewrite, name, rewriter_config_pb2.RewriterConfig.OFF)
    keep_control_flow_functional(meta_graph.graph_def)
    meta_graph.collection_def["train_op"].node_list.value[:] = fetches
    devices = [
        device_properties_pb2.NamedDevice(
            name=_TASK + logical.name.rpartition("device:")[2],
            properties=_device_properties(logical),
        )
        for logical in tf.config.list_logical_devices()
        if logical.device_type in ("CPU", "GPU")
    ]
    cluster = grappler_cluster.Cluster(devices=devices)
    try:
        optimized = tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False, cluster=cluster)
    except tf.errors.OpError as error:
        reason = str(error.message).splitlines()[0]
        raise UnsupportedModelError(
            f"TensorFlow's graph optimizer refuses the train step: {reason}"
        ) from error
    _rename_functions(optimized)
    return optimized


def _device_properties(logical: Any) -> Any:
    """Returns a device's properties for Grappler; a GPU's compute capability decides the layout."""
    properties = device_properties_pb2.DeviceProperties(
        type=logical.device_type, frequency=_FREQUENCY_MHZ, num_cores=os.cpu_count() or 1
    )
    if logical.device_type == "GPU":
        properties.vendor = "NVIDIA"
        properties.memory_size = device_memory_limit_bytes(logical.name)
        properties.environment["architecture"] = ".".join(map(str, compute_capability()))
    return properties


def compute_capability() -> tuple[int, int]:
    """Returns the first visible GPU's compute capability, such as ``(8, 0)``."""
    (gpu, *_) = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details(gpu)
    capability: tuple[int, int] = details.get("compute_capability", (7, 0))
    return capability


def _become_placeholder(node: Any) -> None:
    """Turns a constant into a placeholder of its shape."""
    shape, dtype = node.attr["value"].tensor.tensor_shape, node.attr["dtype"].type
    node.op = "Placeholder"
    node.attr["shape"].shape.SetInParent()  # a scalar's has no dimensions to copy
    node.attr["shape"].shape.CopyFrom(shape)
    for name in [name for name in node.attr if name not in ("dtype", "shape")]:
        del node.attr[name]
    node.attr["dtype"].type = dtype


def _become_handle(node: Any, variable: Any) -> None:
    """Turns a variable's placeholder into an op that makes the variable's handle."""
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = variable.dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _unshaped(node: Any) -> Any:
    """Turns a placeholder into an ``EnsureShape`` of a new placeholder, and returns the new one.
    Grappler does not trust a placeholder's shape."""
    argument = tf.compat.v1.NodeDef()
    argument.CopyFrom(node)
    argument.name = f"{node.name}/argument"
    node.op = "EnsureShape"
    node.input.append(argument.name)
    node.attr["T"].CopyFrom(node.attr["dtype"])
    del node.attr["dtype"]
    return argument


def constant_folded(graph_def: Any, fetches: Sequence[str]) -> Any:
    """Returns a pure GraphDef with constants folded and equal nodes merged. It adds no operation
    without an XLA kernel.

    Args:
        graph_def: the graph, without effects.
        fetches: names of tensors that must survive.
    """
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.CopyFrom(graph_def)
    off = (
        "arithmetic_optimization",
        "auto_mixed_precision",
        "layout_optimizer",
        "remapping",
        "scoped_allocator_optimization",
    )
    return _run_grappler(meta_graph, fetches, off=off)


def variable_spec(handle: Any) -> Any:
    """Returns shape and dtype of the variable behind a resource tensor; ``None`` where that is no
    variable."""
    data = getattr(handle, "_handle_data", None)
    entries = list(data.shape_and_type) if data is not None else []
    if len(entries) != 1:
        return None
    return tf.TensorSpec(tf.TensorShape(entries[0].shape), tf.as_dtype(entries[0].dtype))


@cache
def _registered_kernels(kind: str, device_types: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the kernels of an operation type for these types of devices."""
    registered = kernels.get_registered_kernels_for_op(kind).kernel
    return tuple(kernel for kernel in registered if kernel.device_type in device_types)


def _has_gpu_kernel(kind: str) -> bool:
    return bool(_registered_kernels(kind, _GPU_KERNELS))


def stays_on_host(node: Any) -> bool:
    """Returns whether a node takes no GPU memory on a machine with a GPU.

    It takes none if it is placed on the CPU, has no GPU kernel for its types, or has a GPU kernel
    that keeps all outputs in the host's memory.
    """
    if ":CPU:" in node.device.upper():
        return True
    op_def = op_def_registry.get(node.op)
    if op_def is None:
        return False
    fitting = [
        kernel
        for kernel in _registered_kernels(node.op, _GPU_KERNELS)
        if all(_allows(constraint, node) for constraint in kernel.constraint)
    ]
    if not fitting:
        return True
    outputs = {output.name for output in op_def.output_arg}
    return bool(outputs) and any(outputs <= set(kernel.host_memory_arg) for kernel in fitting)


def _allows(constraint: Any, node: Any) -> bool:
    """Returns whether a node's types are among those a kernel was registered for."""
    if constraint.name not in node.attr:  # reading a missing attribute would create it
        return True
    allowed = set(constraint.allowed_values.list.type)
    attribute = node.attr[constraint.name]
    given = {attribute.type} if attribute.type else set(attribute.list.type)
    return not allowed or given <= allowed


def change_functions(graph_def: Any, names: Iterable[str], change: Callable[[Any], bool]) -> None:
    """Changes functions of a graph's library, in place, and renames all if one has changed.

    Args:
        graph_def: the graph with its library.
        names: names of the functions to change; those not in the library are skipped.
        change: changes a function in place, and returns whether it did.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    changed = [change(functions[name]) for name in dict.fromkeys(names) if name in functions]
    if any(changed):
        _rename_functions(graph_def)


def _rename_functions(graph_def: Any) -> None:
    """Gives the library's functions new names, in place.

    TensorFlow refuses two definitions under one name, and Grappler has changed definitions that the
    process already knows. The suffix is a hash of the library, so equal libraries stay equal.
    """
    functions = graph_def.library.function
    if not functions:
        return
    suffix = hashlib.sha256(graph_def.library.SerializeToString(deterministic=True)).hexdigest()[
        :16
    ]
    renamed = {
        function.signature.name: f"{function.signature.name}_{suffix}" for function in functions
    }
    for node in all_nodes(graph_def):
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
    """Keeps ``While`` and ``If`` as single ops, in place: removes the mark by which they are
    lowered to ``Switch`` and ``Merge``."""
    for node in all_nodes(graph_def):
        if "_lower_using_switch_merge" in node.attr:
            del node.attr["_lower_using_switch_merge"]


def function_graph(definition: Any, outer: Any) -> Any:
    """Returns the ``FuncGraph`` of a ``FunctionDef`` that ``outer`` has in its library."""
    with outer.as_default():
        return function_def_to_graph.function_def_to_graph(definition)


def import_body(definition: Any, operands: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
    """Writes a function's operations into the graph that is being built.

    Args:
        definition: the function's ``FunctionDef``, which is in the graph's library.
        operands: tensors of the graph for its arguments. The written operations know their shapes
            and the variables behind them.
        name: prefix of the names of the written operations.

    Returns:
        The operations, in the function's order, and the tensors that it returns.
    """
    document, names = function_def_to_graph.function_def_to_graph_def(definition)
    arguments = [argument.name for argument in definition.signature.input_arg]
    returned = [names[definition.ret[result.name]] for result in definition.signature.output_arg]
    given = dict(zip((f"{argument}:0" for argument in arguments), operands, strict=True))
    own = [node.name for node in document.node if node.name not in arguments]
    for node in document.node:  # it may name a node that Grappler has taken out
        node.attr.pop("_class", None)
    found = tf.graph_util.import_graph_def(
        document, input_map=given, return_elements=[*own, *returned], name=name
    )
    return found[: len(own)], found[len(own) :]


def list_placeholder(shape: Any, dtype: Any) -> Any:
    """Writes a placeholder for a tensor list into the graph that is being built.

    Args:
        shape, dtype: shape, as far as known, and dtype of the list's elements.
    """
    tensor = tf.compat.v1.placeholder(tf.variant, ())
    data = handle_data_util.create_handle_data(shape, dtype)
    data.shape_and_type[0].type.type_id = full_type_pb2.TFT_ARRAY
    handle_data_util.set_handle_data(tensor, data)
    return tensor


def define_functions(library: Any) -> None:
    """Defines the functions of a library in the process.

    Ops that call a function by its name look it up there. A name made by :func:`_rename_functions`
    identifies its definition, so a known name is skipped.
    """
    eager = context.context()
    eager.ensure_initialized()
    for function in library.function:
        if not eager.has_function(function.signature.name.encode()):
            eager.add_function_def(function)


def is_stateful(kind: str) -> bool:
    """Returns whether an operation type has state or an effect by its OpDef; unknown types count as
    stateful."""
    op_def = op_def_registry.get(kind)
    return op_def is None or bool(op_def.is_stateful)


def capture(external: Any) -> Any:
    """Returns the symbolic tensor that stands for an eager tensor in the function graph being
    built."""
    return tf.compat.v1.get_default_graph().capture(external)


def variable_of(handle: Any) -> Any:
    """Returns a ``tf.Variable`` for the variable behind an eager handle; ``None`` where that is no
    variable (a table, an iterator)."""
    spec = variable_spec(handle)
    if spec is None:
        return None
    return resource_variable_ops.BaseResourceVariable(
        handle=handle, shape=spec.shape, dtype=spec.dtype, trainable=False
    )


def train_function(model: Any) -> Any:
    """Returns a new train function of Keras's, which has no traces yet."""
    installed = model.train_function
    try:
        model.make_train_function(force=True)
        return model.train_function
    finally:
        model.train_function = installed


def promised_specs(data: Any) -> list[Any]:
    """Returns the specs that an iterator promises for the tensors of its batches; for those of
    every replica's part, where batches are divided.

    Args:
        data: the iterator, or its type.
    """
    specs = tf.nest.flatten(getattr(data, "element_spec", None) or data._element_spec)
    parts = [part for spec in specs for part in getattr(spec, "_value_specs", (spec,))]
    return [part for part in parts if isinstance(part, tf.TensorSpec)]


def has_fixed_size(data: Any) -> bool:
    """Returns whether all batches have one size, by the specs of their iterator or its type."""
    shapes = [spec.shape for spec in promised_specs(data)]
    return not any(shape.rank and shape[0] is None for shape in shapes)


def _traced_data(function: Any) -> list[Any] | None:
    """Returns the types of the iterators that Keras's train function was traced for; ``None`` for a
    function that Keras did not make."""
    traced: Any = inspect.getclosurevars(function).nonlocals.get("multi_step_on_iterator")
    if traced is None or not hasattr(traced, "_list_all_concrete_functions"):
        return None
    signatures = [one.structured_input_signature for one in traced._list_all_concrete_functions()]
    return [spec for (spec, *_), _ in signatures]


def is_traced(function: Any) -> bool:
    """Returns whether Keras's train function was traced before."""
    return bool(_traced_data(function))


def knows_sizes(function: Any) -> bool:
    """Returns whether Keras's train function was traced for batches that all have one size."""
    return any(has_fixed_size(data) for data in _traced_data(function) or ())


def keeps_batch_size(function: Any, wanted: Any) -> bool:
    """Returns whether Keras's train function trains batches of a promised size with a step traced
    for that size.

    It does not if TensorFlow has an older trace for any size, which it runs instead, or has traces
    for other sizes only, where it makes a trace for any size.

    Args:
        function: the train function, as Keras made it.
        wanted: the type of an iterator that promises the size.
    """
    traced = _traced_data(function)
    if traced is None:
        return True
    others = [data for data in traced if isinstance(data, type(wanted))]
    return wanted in others or all(
        wanted.most_specific_common_supertype([other]) is None for other in others
    )


@contextmanager
def losses_counted_as(model: Any, share: float | None = None) -> Iterator[None]:
    """Makes the trackers of the outputs' losses count as in Keras's own step, since an epoch's mean
    mixes steps of both kinds.

    Where Keras's own step knows its batch size, a step counts by its samples. Otherwise, and
    outside of ``fit``, every step counts once. The weight is a value that Grappler does not fold,
    so that the step has the same ops both ways, and a plan that was made outside of ``fit`` is for
    this step, too.

    Args:
        model: the model; during ``fit`` its train function says whether the batch size is known.
        share: share of a step that is traced; ``None`` for a whole step.
    """
    import keras

    losses = getattr(model, "_compile_loss", None)
    if losses is None:
        yield
        return
    by_samples = getattr(model.train_function, "knows_batch_size", False)
    of_any_size: list[Any] = []  # a target of unknown size, as in a trace for joined batches

    def call(original: Any, y_true: Any, *args: Any, **options: Any) -> Any:
        targets = [target for target in tf.nest.flatten(y_true) if tf.is_tensor(target)]
        of_any_size[:] = [t for t in targets if t.shape.rank and t.shape[0] is None][:1]
        return original(y_true, *args, **options)

    def weight(given: Any) -> Any:
        if by_samples and given is None and of_any_size:  # not known to Keras's own step, either
            return tf.shape(of_any_size[0])[0]
        counted = given if by_samples and given is not None else share
        told = tf.constant([[1.0 if counted is None else float(counted)]])  # equal to no other one
        return tf.reshape(tf.raw_ops.PlaceholderWithDefault(input=told, shape=told.shape), [])

    def update_tracker(original: Any, values: Any, sample_weight: Any = None) -> Any:
        return original(values, sample_weight=weight(sample_weight))

    def update_mean(
        original: Any, metric: Any, values: Any, sample_weight: Any = None, **options: Any
    ) -> Any:
        is_tracker = any(metric is tracker for tracker in losses.metrics)
        counted = weight(sample_weight) if is_tracker else sample_weight
        return original(metric, values, sample_weight=counted, **options)

    with ExitStack() as counted:
        counted.enter_context(wrapped(losses, "call", call))
        if losses.built:
            for tracker in losses.metrics:
                counted.enter_context(wrapped(tracker, "update_state", update_tracker))
        else:  # the trackers are made while the first step is traced
            counted.enter_context(wrapped(keras.metrics.Mean, "update_state", update_mean))
        yield


def is_xla_refusal(error: Any) -> bool:
    """Returns whether an error says that XLA cannot compile a function, rather than that a step's
    values are wrong."""
    text, says = str(error.message), ("compile", "conversion failed", "compilation")
    return "XLA" in text and any(said in text for said in says)


def read_trace(serialized: bytes) -> Any:
    """Returns the profiler's trace (``XSpace``) from the bytes of an ``*.xplane.pb`` file."""
    return xplane_pb2.XSpace.FromString(serialized)


def has_made_devices() -> bool:
    """Returns whether TensorFlow has made its devices, and with them their allocators."""
    return bool(context.context()._initialized)


def onednn_is_on() -> bool:
    """Returns whether TensorFlow uses oneDNN's kernels and allocator on this CPU; makes no
    device."""
    return bool(_pywrap_util_port.IsMklEnabled())


def device_memory_limit_bytes(name: str) -> int:
    """Returns the bytes that the allocator of a device may take; makes no further device.

    Args:
        name: such as ``"GPU:0"`` or ``"/device:GPU:0"``.

    Raises:
        LookupError: there is no such device.
    """
    eager = context.context()
    eager.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(eager._handle)
    try:
        for at in range(pywrap_tfe.TF_DeviceListCount(devices)):
            if pywrap_tfe.TF_DeviceListName(devices, at) == _TASK + name.rpartition("device:")[2]:
                return int(pywrap_tf_session.TF_DeviceListMemoryBytes(devices, at))
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)
    raise LookupError(f"TensorFlow has no device {name!r}.")


def concrete_function(function: Any, *signature: Any) -> Any:
    """Returns ``function.get_concrete_function``, whose graph is freed with the function.

    The public method leaves the graph to Python's garbage collector, which cannot free it while
    part of it is referenced: TensorFlow keeps custom gradients for ever, with their closures. With
    the public method each ``fit`` of a small model left 5,292 objects in the process, with this one
    765.

    Args:
        function: a ``tf.function`` that only the caller traces.
        signature: ``TensorSpec`` per argument, in the argument's structure.
    """
    found = function.get_concrete_function(*signature)
    found._garbage_collector = ConcreteFunctionGarbageCollector(found.graph)
    return found


def build_function(build: Callable[..., Sequence[Any]], signature: Sequence[Any]) -> Any:
    """Makes a concrete function from ``build(*placeholders) -> outputs`` without automatic control
    dependencies.

    Args:
        build: called once, with one placeholder per entry of ``signature``.
        signature: ``TensorSpec`` per input.
    """
    return tf.compat.v1.wrap_function(build, list(signature))


@cache
def _verbatim_options(given: bytes) -> Any:
    """Returns the process's options, such as soft placement, with all graph rewriting off.

    Args:
        given: the process's options, serialized.
    """
    config = config_pb2.ConfigProto.FromString(given)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    options = config.graph_options.optimizer_options
    options.opt_level = config_pb2.OptimizerOptions.L0
    options.global_jit_level = config_pb2.OptimizerOptions.OFF
    return context.FunctionCallOptions(config_proto=config)


def call_verbatim(function: Any, args: Sequence[Any]) -> list[Any]:
    """Runs a function made by :func:`build_function` exactly as it was built: no Grappler, no
    common-subexpression pass.

    The options hold for this thread and this call; they are restored before it returns. (The
    alternative, a ``StatefulPartitionedCall`` op with a configuration as an attribute, runs its
    body on the calling thread without the executor's trace events.)
    """
    eager = context.context()
    options = eager.function_call_options
    eager.function_call_options = _verbatim_options(options.config_proto_serialized)
    try:
        outputs = function(*args)
    finally:
        eager.function_call_options = options
    return list(tf.nest.flatten(outputs))


def optimization_barrier(value: Any) -> Any:
    """Returns a value that no pass of XLA moves across this point."""
    (held,) = gen_xla_ops.xla_optimization_barrier([value])
    return held


def select_and_scatter(
    image: Any,
    windows: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    source: Any,
    start: Any,
) -> Any:
    """Returns the gradient of max pooling, computed by XLA's own operation. The largest element of
    every window of ``image`` gets the window's element of ``source``; sums begin at ``start``."""
    scalar = tf.TensorSpec([], image.dtype)

    def function(operation: Callable[[Any, Any], Any]) -> Any:
        return concrete_function(tf.function(operation, autograph=False), scalar, scalar)

    return gen_xla_ops.xla_select_and_scatter(
        image, windows, strides, padding, source, start,
        select=function(tf.greater_equal), scatter=function(tf.add),
    )  # fmt: skip


def serialized_hlo(function: Any) -> bytes:
    """Returns a compilable function's ``HloModuleProto``, serialized. Variables that it changes are
    donated arguments. Nothing is run.

    Args:
        function: a concrete function of ``tf.function(jit_compile=True)``.

    Raises:
        ValueError: XLA cannot compile it.
    """
    return _compiler_ir(function, "hlo_serialized")


def compiled_bytes(function: Any) -> int | None:
    """Returns the bytes of the buffers that XLA assigns to a call of a function on the CPU, without
    its arguments and the variables that it changes in place. Nothing is run.

    Args:
        function: a concrete function of ``tf.function(jit_compile=True)``.

    Returns:
        The bytes; ``None`` where this version of TensorFlow does not report them.

    Raises:
        ValueError: XLA cannot compile it.
    """
    module = hlo_pb2.HloProto.FromString(_compiler_ir(function, "optimized_hlo_proto_serialized"))
    if not module.HasField("buffer_assignment"):
        return None
    taken: int = sum(
        one.size
        for one in module.buffer_assignment.buffer_allocations
        if not (one.is_entry_computation_parameter or one.is_constant or one.is_thread_local)
    )
    return taken


def _compiler_ir(function: Any, stage: str) -> bytes:
    given = tf.nest.flatten(function.structured_input_signature)
    specs = [spec for spec in given if isinstance(spec, tf.TensorSpec)]
    generate = compiler_ir.from_concrete_function(function, specs)
    told: bytes = generate(stage=stage, platform_name="CPU")
    return told


def deferred_captures(graph: Any) -> dict[str, Callable[[], Any]]:
    """Returns placeholder name → function that gives its value before every run of a traced
    function (the numbers of collective ops)."""

    def called(closure: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: tf.nest.flatten(closure(), expand_composites=True)[0]

    placeholders = tf.nest.flatten(graph.deferred_internal_captures, expand_composites=True)
    closures = graph.deferred_external_captures
    return {
        placeholder.op.name: called(closure)
        for placeholder, closure in zip(placeholders, closures, strict=True)
    }


def per_replica(parts: Sequence[Any]) -> Any:
    """Returns one structure for ``strategy.run``, made of one structure per replica."""
    return distribute_utils.regroup(tuple(parts))


@contextmanager
def exchanged_in_packs(strategy: Any, pack_bytes: int) -> Iterator[None]:
    """Makes replicas of a ``MirroredStrategy`` exchange gradients in packs of about ``pack_bytes``
    bytes inside, not all in one. Options that a train step sets itself come first."""
    extended = strategy.extended
    options = extended._communication_options
    packs = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack_bytes)
    extended._communication_options = options.merge(packs)
    try:
        yield
    finally:
        extended._communication_options = options


def distributed_container(handle: Any) -> Any:
    """Returns the distributed variable that a handle's variable belongs to; ``None`` where there is
    none."""
    container = getattr(handle, "_distributed_container", None)
    return None if container is None else container()


def has_value_per_replica(container: Any) -> bool:
    """Returns whether every replica has its own value of a distributed variable."""
    return isinstance(container, distributed_values.SyncOnReadVariable)
