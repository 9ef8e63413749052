"""The only module that touches what JAX and Keras do not promise to keep.

Tested with the versions of :mod:`keras_remat.backends.versions`. From JAX: the fields of an
equation (``primitive``, ``params``, ``ctx``, ``source_info.name_stack``) and ``Primitive.bind``;
from Keras: ``_purge_model_variables``, ``_update_metrics_variables``, ``_jax_state``, and the four
lists of variables the JAX trainer carries as state, in its order, and whether its JAX backend knows
cuDNN's LSTM. Of ``jax.distributed`` the client of its key-value store; of ``jax.lax`` the gradient
of pooling with a start value of its own; and of JAX's own path from a module to a compiled step its
last half (``mlir``, ``compiler``, ``xla_client``), the error of a compiled step with a NaN, and
the abstract value of a mutable array.
When a new version moves one of these, this is the file to mend: one file, though long.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax._src import api_util, compiler, distributed
from jax._src.interpreters import mlir
from jax._src.lax import windowed_reductions
from jax._src.lib import xla_client
from jax._src.state.types import AbstractRef
from jax.extend import core
from keras.src.backend.jax import rnn as keras_rnn

from keras_remat.backends.tables import names

try:
    from jax._src.random import threefry2x32
except ImportError:  # JAX 0.10.0 has it elsewhere
    from jax._src import prng as threefry2x32

Literal = core.Literal
State = tuple[list[Any], ...]
#: Keras's names of the groups of a state.
_GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)

CALLS = names("""
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat
    remat2 checkpoint eval_jaxpr
""")
"""Primitives that only call a jaxpr."""
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the jaxpr of :data:`CALLS`."""


_BYTECODE = b"ML\xefR"
"""First bytes of a module's bytecode."""

HIGH_CALL = "call_hi_primitive"
"""Primitive that calls an operation with its own rules for differentiation, such as
``jax.checkpoint`` with ``jax_remat3``."""


def called_jaxpr(eqn: Any, *, as_slices: bool = False) -> Any:
    """Returns the closed jaxpr an equation merely calls, or ``None`` when the equation is an
    operation.

    Args:
        eqn: of a jaxpr.
        as_slices: whether a ``split`` is taken for a call of slices.
    """
    if as_slices and eqn.primitive.name == "split":
        return _slices(eqn)
    if eqn.primitive.name == HIGH_CALL:
        return _expanded(eqn.params["_prim"])
    held = [eqn.params[parameter] for parameter in _CALLED if parameter in eqn.params]
    if eqn.primitive.name not in CALLS or not held:
        return None
    (inner,) = held
    return closed(inner)


def is_identity(eqn: Any, scope: str) -> bool:
    """Returns whether an equation only passes its inputs on, to tell a ``jax.checkpoint`` what to
    keep or to compute late. The planner decides that.

    Args:
        eqn: of a jaxpr.
        scope: it was traced under. A barrier of the forward phase is the user's own.
    """
    name = eqn.primitive.name
    return name == "name" or (name == "optimization_barrier" and is_backward(scope))


def has_effect(eqn: Any) -> bool:
    """Returns whether an equation does more than compute its outputs from its inputs, as one does
    whose random numbers come from a state of the device."""
    return bool(eqn.effects) or eqn.primitive.name == "rng_uniform"


def is_backward(scope: str) -> bool:
    """Returns whether an equation of a scope was traced by differentiation."""
    return "transpose(" in scope


def _expanded(called: Any) -> Any:
    """Returns the computation of a :data:`HIGH_CALL` as a closed jaxpr."""

    def run(*leaves: Any) -> Any:
        return called.expand(*jax.tree.unflatten(called.in_tree, leaves))

    return traced_body(run, called.in_avals_flat)


def _slices(eqn: Any) -> Any:
    """Returns the slices that a ``split`` computes, as a closed jaxpr."""
    axis, ends = eqn.params["axis"], [*accumulate(eqn.params["sizes"])]

    def run(x: Any) -> list[Any]:
        return [
            lax.slice_in_dim(x, begin, end, axis=axis)
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    return traced_body(run, [eqn.invars[0].aval])


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Returns the bodies an equation carries in its parameters (``scan``, ``while``, ``cond``)."""
    return list(core.jaxprs_in_params(params))


def name_stack(eqn: Any) -> str:
    """Returns the scopes an equation was traced under, e.g. ``transpose(jvp(dense))/add``."""
    return str(eqn.source_info.name_stack)


def bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation on concrete arrays or tracers and returns its outputs."""
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def select_and_scatter_add(params: dict[str, Any], image: Any, source: Any, start: Any) -> Any:
    """Returns the gradient of max or min pooling, as ``select_and_scatter_add`` with these
    parameters computes it, added to ``start``, a scalar that is zero."""
    select = {"ge": lax.ge, "le": lax.le}[params["select_prim"].name]
    return windowed_reductions._select_and_scatter(
        image,
        select,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        source,
        start,
        lax.add,
    )


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many inputs of a ``scan`` are the same in every round, and how many it carries
    from round to round. In JAX 0.11.2 the structure of its inputs shows them."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def stacked_shapes(eqn: Any) -> list[Any]:
    """Returns shapes and dtypes of the arrays that a ``scan`` writes one element a round into;
    empty if it is not written down as one loop, or has no rounds."""
    _, carried = scan_counts(eqn.params)
    is_loop = eqn.params["unroll"] == 1 and eqn.params["length"] > 0
    return [v.aval for v in eqn.outvars[carried:]] if is_loop else []


def scan_into(eqn: Any, inputs: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
    """Runs a ``scan`` as a loop that overwrites every element of ``stacks``, and returns its
    outputs."""
    params, length = eqn.params, eqn.params["length"]
    first, carried = scan_counts(params)
    constants, rest = list(inputs[:first]), list(inputs[first:])
    carry, rows = rest[:carried], rest[carried:]
    body = closed(params["jaxpr"])

    def round_of(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
        done, carry, stacks = state
        at = length - 1 - done if params["reverse"] else done
        read = [
            lax.dynamic_index_in_dim(x, at, 0, keepdims=False, allow_negative_indices=False)
            for x in rows
        ]
        made = core.jaxpr_as_fun(body)(*constants, *carry, *read)
        carry, new = made[: len(carry)], made[len(carry) :]
        stacks = [
            lax.dynamic_update_index_in_dim(x, row, at, 0, allow_negative_indices=False)
            for x, row in zip(stacks, new, strict=True)
        ]
        return done + 1, carry, stacks

    with eqn.ctx.manager:
        start = jnp.int32(0), carry, list(stacks)
        _, carry, stacks = lax.while_loop(lambda state: state[0] < length, round_of, start)
    return [*carry, *stacks]


def bytecode(lowered: Any) -> bytes:
    """Returns the module of a ``jax.stages.Lowered``."""
    module: bytes = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    return module


def compile_module(module: bytes, device: Any, options: dict[str, Any]) -> Any:
    """Compiles a module for a device, and returns its memory analysis.

    TensorFlow copies variables that a step changes by an operation (``mhlo.copy``) that the front
    end does not know. It is the identity, and left out.

    Args:
        module: bytecode of StableHLO, or a serialized ``HloModuleProto``.
        device: of a topology.
        options: of the compiler.
    """
    if not module.startswith(_BYTECODE):
        computation = xla_client.XlaComputation(module)
        module = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    with mlir.make_ir_context():
        parsed = mlir.ir.Module.parse(module)
        copies = [op for op in _operations(parsed.body) if op.operation.name == "mhlo.copy"]
        for op in copies:
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
        for op in copies:
            op.operation.erase()
        chosen = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, env_options_overrides=options
        )
        compiled = compiler.backend_compile_and_load(
            device.client, parsed, xla_client.DeviceList((device,)), chosen, []
        )
    return compiled.get_compiled_memory_stats()


def _operations(block: Any) -> Iterator[Any]:
    """Yields the operations of a block, those of inner blocks first."""
    for op in block:
        for region in op.operation.regions:
            for inner in region:
                yield from _operations(inner)
        yield op


def state_variables(model: Any) -> State:
    """Returns trainable, non-trainable, optimizer and metrics variables: the state of the Keras JAX
    trainer, in its order."""
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(model.optimizer.variables),
        list(model.metrics_variables),
    )


def state_specs(model: Any, state: State | None = None) -> State:
    """Returns shapes and dtypes of the trainer's state, and under a distribution its shardings.
    While ``fit`` has taken the values off the variables, this works if it is given ``state``."""
    if keras.distribution.distribution() is not None:
        state = state_values(model) if state is None else state
        return tuple(
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in group]
            for group in state
        )
    return tuple(
        [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in group]
        for group in state_variables(model)
    )


def state_values(model: Any) -> State:
    """Returns the arrays of the trainer's state (not copies)."""
    return tuple([v.value for v in group] for group in state_variables(model))


def arrays_held_elsewhere(model: Any) -> dict[int, jax.Array]:
    """Returns position in the flattened state → array, for the arrays that something else than
    their variable holds or shares the memory of."""
    owner = SimpleNamespace(_value=object())
    alone = sys.getrefcount(owner._value)  # by an attribute, and by what counts
    variables = [variable for group in state_variables(model) for variable in group]
    held = [at for at, v in enumerate(variables) if sys.getrefcount(v._value) > alone]
    arrays = [variable.value for variable in variables]
    live = [array for array in jax.live_arrays() if _has_address(array)]
    # JAX 0.10.0 keeps a view of every array that was asked for its address.
    views = {id(array._arrays[0]) for array in live if array._arrays[0] is not array}
    addresses = Counter(_address(array) for array in live if id(array) not in views)
    shared = [
        at
        for at, array in enumerate(arrays)
        if _has_address(array) and addresses[_address(array)] > 1
    ]
    return {at: arrays[at] for at in {*held, *shared}}


def _has_address(array: jax.Array) -> bool:
    """Returns whether an array's numbers are in one place."""
    return not array.is_deleted() and len(array.sharding.device_set) == 1


def _address(array: jax.Array) -> Any:
    """Returns where the numbers of an array on one device are."""
    return array.sharding, array.unsafe_buffer_pointer()


def lacks_cudnn(error: Exception) -> bool:
    """Returns whether an exception of tracing says that cuDNN's attention is not to be had: no
    cuDNN, or no GPU that it runs on."""
    told = str(error)
    return "cudnn" in told.lower() or "Require at least Ampere" in told


def has_cudnn_lstm() -> bool:
    """Returns whether this version of Keras gives LSTMs to cuDNN where JAX has a GPU."""
    return hasattr(keras_rnn, "_is_gpu_available")


def is_ref(value: Any) -> bool:
    """Returns whether a constant or a value of a step is a mutable array."""
    return isinstance(value, jax.Ref)


def is_of_ref(aval: Any) -> bool:
    """Returns whether an abstract value is that of a mutable array."""
    return isinstance(aval, AbstractRef)


#: Raised by a compiled step if JAX looks for NaNs (``jax_debug_nans``) and finds one.
InvalidValueError = api_util.InternalFloatingPointError


def raise_where_invalid(
    error: Exception, step: Callable[[Any, Any], Any], state: State, batch: Any
) -> NoReturn:
    """Runs a step op by op, to find the op that makes a NaN.

    JAX runs its own functions so when it has found a NaN in them. Mostly its error then names the
    op, and Keras's the layer.

    Args:
        error: an :data:`InvalidValueError` of the same step, compiled.
        step: ``(state, batch) → (logs, state)``.
        state, batch: arguments of the call that failed.

    Raises:
        FloatingPointError: in any case.
    """
    kind, why = getattr(error, "ty", error), "its state was given up"
    if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        step(state, batch)
        why = "run op by op, it returns none"
    raise FloatingPointError(
        f"The train step returned an invalid value ({kind}). Which layer made it is not known: "
        f"{why}. With jax_debug_nans and jax_debug_infs off, training goes on."
    ) from error


def assign_state(model: Any, state: State) -> None:
    """Gives the model's variables the arrays of a state."""
    for variables, values in zip(state_variables(model), state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def purge_state(model: Any) -> None:
    """Takes the arrays off the model's variables, as ``fit`` does before a step that donates
    them."""
    model._purge_model_variables(**dict.fromkeys(_GROUPS, True))


def publish_state(model: Any, state: State) -> None:
    """Tells ``fit`` which state is current when its step raises, so that it writes no older one
    back to the variables."""
    model._jax_state = dict(zip(_GROUPS, state, strict=True))
    model._jax_state_synced = False


def wait_for_state(model: Any) -> None:
    """Waits until the newest state of a running ``fit`` is computed."""
    newest = getattr(model, "_jax_state", None) or {}  # Keras wraps dictionaries and lists
    leaves = (leaf for group in newest.values() for leaf in group)
    jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])


def update_metrics(
    model: Any, metrics: Any, loss: Any, x: Any, y: Any, predicted: Any, sample_weight: Any
) -> tuple[Any, Any]:
    """Returns the logs and the metrics' new variables after a batch, as Keras's own ``train_step``
    does."""
    updated: tuple[Any, Any] = model._update_metrics_variables(
        metrics, loss, x, y, predicted, sample_weight
    )
    return updated


def distributed_client() -> Any:
    """Returns the client of the key-value store that all processes share."""
    return distributed.global_state.client


def closed(body: Any) -> Any:
    """Returns a body as a closed jaxpr."""
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def array_of(literal: Any) -> jax.Array:
    """Returns a literal as an array."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def with_shapes(eqn: Any, params: dict[str, Any], given: Sequence[Any], made: Sequence[Any]) -> Any:
    """Returns an equation with other parameters, which reads and makes other shapes."""
    invars = [
        atom if isinstance(atom, Literal) else core.Var(aval)
        for atom, aval in zip(eqn.invars, given, strict=True)
    ]
    return eqn.replace(invars=invars, outvars=[core.Var(aval) for aval in made], params=params)


def traced_body(function: Any, avals: Sequence[Any]) -> Any:
    """Returns a function of values with these shapes and dtypes as a closed jaxpr."""
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return jax.make_jaxpr(function)(*specs)


def _only_equation(function: Any, *avals: Any) -> Any:
    """Returns the only equation that a function is traced to."""
    (eqn,) = traced_body(function, avals).eqns
    return eqn


def cut_equation(aval: Any, start: Sequence[int], stop: Sequence[int]) -> Any:
    """Returns the equation that reads a part of a value."""
    return _only_equation(lambda x: lax.slice(x, start, stop), aval)


def nothing_equation(aval: Any) -> Any:
    """Returns an equation that makes one element, in the place of a value that is to come."""
    return _only_equation(jax.jit(lambda: lax.full((1,), 0, aval.dtype)))


def pad_equation(piece: Any, aval: Any) -> Any:
    """Returns the equation that pads a value's first part to the whole; the padding is
    overwritten."""
    after = [whole - part for whole, part in zip(aval.shape, piece.shape, strict=True)]

    def padded(x: Any) -> Any:
        return lax.pad(x, lax.full((), 0, aval.dtype), [(0, n, 0) for n in after])

    return _only_equation(jax.jit(padded), piece)


def join_equation(aval: Any, piece: Any, start: Sequence[int]) -> Any:
    """Returns the equation that writes a part into a value."""
    return _only_equation(
        jax.jit(lambda x, part: lax.dynamic_update_slice(x, part, start)), aval, piece
    )


def sum_equation(aval: Any) -> Any:
    """Returns the equation that adds two values."""
    return _only_equation(lax.add, aval, aval)


#: The dtype of keys whose bits are drawn one by one, each from its place.
_COUNTED_KEY = "key<fry>"
_WORD_BITS = 32


def draws_by_place(eqn: Any) -> bool:
    """Returns whether each random bit of an equation is a function of its place alone."""
    (key,) = eqn.invars
    is_counted = str(key.aval.dtype) == _COUNTED_KEY and bool(eqn.ctx.threefry_partitionable)
    return is_counted and eqn.params["bit_width"] <= _WORD_BITS


def bits_equation(key: Any, made: Any, drawn: int) -> Any:
    """Returns the equation that draws random bits from some place on.

    Args:
        key: the aval of the key.
        made: the aval of the drawn bits.
        drawn: place of the first drawn bit among those of the key.
    """

    def draw(key: Any) -> Any:
        words = jax.random.key_data(key)
        places = lax.iota(jnp.uint32, prod(made.shape)) + jnp.uint32(drawn)
        places = lax.reshape(places, made.shape)
        high, low = threefry2x32.threefry2x32_p.bind(
            words[0], words[1], lax.full_like(places, 0), places
        )
        return lax.convert_element_type(high ^ low, made.dtype)

    return _only_equation(jax.jit(draw), key)
