"""Guesses how the values of a step are laid out on several devices.

Under a ``keras.distribution`` the step is written for whole arrays, and XLA divides the work by the
layouts of its inputs. XLA decides which part of a value in between a device holds. Here the part is
guessed from the inputs on, by the rules of XLA's propagation that matter: the samples' dimension
goes through everything that treats samples alike, and ends where samples are summed up. The guess
serves two ends. Bytes of a value are those of one device, as ``memory_analysis`` counts them; the
compiled peak corrects a wrong guess. And a guard (:mod:`~keras_remat.backends.jax.barrier`) reads
on every device the part that is there, so that no collective operation is added; a wrong guess
costs an exchange, and never a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding

from keras_remat.backends.jax.flatten import FlatProgram
from keras_remat.backends.jax.kinds import CONVOLUTION, KERNEL_GRADIENT, KINDS, PRODUCT
from keras_remat.backends.xla.fusion import Equation

Layout = tuple[Any, ...]
"""Per dimension, names of the mesh axes that divide it, or ``None``."""

RESHARDS = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}
"""Primitive that sets the layout of its result → the parameter that holds the layout."""


def layout_of(sharding: Any, rank: int) -> Layout:
    """Returns the layout that an array's sharding gives it. A dimension that the sharding leaves
    to XLA counts as not divided."""
    if not isinstance(sharding, NamedSharding):
        return (None,) * rank
    named = [(e,) if isinstance(e, str) else e for e in sharding.spec]
    entries = [e if isinstance(e, tuple) and e else None for e in named]
    return (*entries, *(None,) * (rank - len(entries)))[:rank]


def mesh_of(specs: Any) -> jax.sharding.Mesh | None:
    """Returns the mesh that arrays or specs lie on; ``None`` for one device."""
    for leaf in jax.tree.leaves(specs):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def count(layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """Returns the number of parts that a value is divided into over the devices."""
    return math.prod(mesh.shape[axis] for axes in layout if axes for axis in axes)


def layouts(
    program: FlatProgram, given: Sequence[jax.ShapeDtypeStruct], mesh: jax.sharding.Mesh
) -> tuple[Layout, ...]:
    """Returns the layout of every number of a program.

    Args:
        program: the whole step.
        given: the inputs, which have shardings; constants are on every device.
        mesh: the devices.
    """
    found = {at: layout_of(spec.sharding, len(spec.shape)) for at, spec in enumerate(given)}

    def of(atom: Any) -> Layout:
        nowhere = (None,) * len(shape(atom))
        return found.setdefault(atom, nowhere) if isinstance(atom, int) else nowhere

    def shape(atom: Any) -> tuple[int, ...]:
        return tuple(program.aval(atom).shape)

    for equation in program.equations:
        inputs = [(of(a), shape(a)) for a in equation.inputs]
        for out in equation.outputs:
            found[out] = _legal(_result(equation, inputs, shape(out)), shape(out), mesh)
    # random and filled values take their reader's layout
    for equation in reversed(program.equations):
        if equation.kind in KINDS.elementwise | KINDS.random:
            out = equation.outputs[0]
            for atom in equation.reads:
                if shape(atom) == shape(out) and not any(of(atom)) and atom >= len(given):
                    found[atom] = of(out)
    return tuple(of(number) for number in range(len(program.avals)))


def _legal(layout: Layout, shape: Sequence[int], mesh: jax.sharding.Mesh) -> Layout:
    """Returns the layout without axes that are used twice, or that do not divide their dimension
    evenly."""
    seen: set[str] = set()
    result: list[Any] = []
    for axes, size in zip(layout, shape, strict=True):
        ok = axes and not seen & set(axes) and size % math.prod(mesh.shape[a] for a in axes) == 0
        seen |= set(axes) if ok else set()
        result.append(axes if ok else None)
    return tuple(result)


def _result(
    equation: Equation, inputs: Sequence[tuple[Layout, tuple[int, ...]]], shape: tuple[int, ...]
) -> Layout:
    params, kind = equation.source.params, equation.kind
    if kind in RESHARDS:
        return layout_of(params[RESHARDS[kind]], len(shape))
    if kind in KINDS.reductions:
        axes = set(params["axes"])
        return tuple(e for at, e in enumerate(inputs[0][0]) if at not in axes)
    if kind == "transpose":
        return tuple(inputs[0][0][at] for at in params["permutation"])
    if kind == "broadcast_in_dim":
        result: list[Any] = [None] * len(shape)
        for at, to in enumerate(params["broadcast_dimensions"]):
            result[to] = inputs[0][0][at] if inputs[0][1][at] == shape[to] else None
        return tuple(result)
    if kind == PRODUCT:
        return _product(params["dimension_numbers"], inputs[0][0], inputs[1][0])
    if kind in (CONVOLUTION, KERNEL_GRADIENT):
        numbers, result = params["dimension_numbers"], [None] * len(shape)
        result[numbers.out_spec[0]] = inputs[0][0][numbers.lhs_spec[0]]
        result[numbers.out_spec[1]] = inputs[1][0][numbers.rhs_spec[0]]
        return tuple(result)
    if kind in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(*inputs[0], shape)
    return _alike(inputs, shape)


def _product(numbers: Any, left: Layout, right: Layout) -> Layout:
    (left_summed, right_summed), (left_batch, right_batch) = numbers
    free = [e for at, e in enumerate(left) if at not in (*left_summed, *left_batch)]
    other = [e for at, e in enumerate(right) if at not in (*right_summed, *right_batch)]
    return (*(left[at] for at in left_batch), *free, *other)


def _reshaped(layout: Layout, old: tuple[int, ...], new: tuple[int, ...]) -> Layout:
    """Returns the layout after a reshape. A new dimension takes the axes of the old one that begins
    at the same place, counted in elements."""
    starts = {math.prod(old[:at]): axes for at, axes in enumerate(layout) if axes}
    result, used = [], set()
    for at, size in enumerate(new):
        start = math.prod(new[:at])
        axes = starts.get(start) if size > 1 and start not in used else None
        used |= {start} if axes else set()
        result.append(axes)
    return tuple(result)


def _alike(inputs: Sequence[tuple[Layout, tuple[int, ...]]], shape: tuple[int, ...]) -> Layout:
    """Returns a layout in which dimensions of the same size at the same place keep their axes."""
    result: list[Any] = [None] * len(shape)
    for layout, other in inputs:
        if len(other) == len(shape):
            for at, axes in enumerate(layout):
                if axes and other[at] == shape[at] and result[at] is None:
                    result[at] = axes
    return tuple(result)


def held_bytes(arrays: Iterable[jax.Array], device: Any) -> int:
    """Returns the bytes of arrays that one device holds.

    JAX keeps a device's part of an array, once it was read, as an array of its own in the same
    memory. So the parts at one address count once.
    """
    there = [array for array in arrays if not array.is_deleted()]
    alone = {device}
    sets = [array.sharding.device_set for array in there]
    if all(len(devices) == 1 for devices in sets):  # to ask an array for its bytes takes long
        here = (array for array, devices in zip(there, sets, strict=True) if devices == alone)
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in here)
    parts = (shard.data for array in there for shard in array.addressable_shards)
    held = {
        part.unsafe_buffer_pointer(): part.nbytes
        for part in parts
        if not part.is_deleted() and part.device == device
    }
    return sum(held.values())


def batch_parts() -> int:
    """Returns the number of parts that the active distribution divides a batch into."""
    active = keras.distribution.distribution()
    if active is None:
        return 1
    mesh = active.device_mesh
    return int(mesh.shape[mesh.axis_names.index(active.batch_dim_name)])


def laid_out(batch: Any) -> Any:
    """Returns a batch as JAX's arrays, laid over the devices by the active distribution."""
    active = keras.distribution.distribution()
    if active is None:
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), batch
        )
    return jax.tree.map(
        lambda leaf: keras.distribution.distribute_tensor(leaf, active.get_data_layout(leaf.shape)),
        batch,
    )
