"""Writes equations down in JAX, as :class:`keras_remat.backends.xla.protect.Writer`: on a CPU, on a
GPU, and on several devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout
from jax.sharding import PartitionSpec

from keras_remat.backends.jax import private
from keras_remat.backends.jax.barrier import guard, never
from keras_remat.backends.jax.flatten import FlatProgram, nbytes
from keras_remat.backends.jax.kinds import (
    CONVOLUTION,
    IMAGE_RANK,
    KERNEL_GRADIENT,
    KINDS,
    POOLING_GRADIENT,
    SCAN,
    copied_operands,
    holds_images_first,
    is_channels_first,
    is_emulated,
    is_of_transposed,
    kernel_shapes,
    pooling_pieces,
    reads_a_copy,
    turned,
)
from keras_remat.backends.jax.sharding import Layout
from keras_remat.backends.jax.trace import JaxTracedStep
from keras_remat.backends.xla.fusion import Equation
from keras_remat.backends.xla.protect import Writer
from keras_remat.core.graph import UPDATE
from keras_remat.core.target import Target

CHANNELS_FIRST = (0, 3, 1, 2)
"""The layout of images that cuDNN reads channels first, as Keras numbers their dimensions."""


class JaxWriter(Writer):
    """Writes a program as it is: values are tracers or arrays.

    Args:
        program: the program to write.

    Attributes:
        starts_stacks_late: whether the arrays that a loop writes into wait for its inputs.
    """

    uses_branches, uses_barriers = True, False
    starts_stacks_late = True

    def __init__(self, program: FlatProgram):
        self._program = program

    def given(self, values: Sequence[Any]) -> None:
        """Takes the step's inputs and constants, by number."""

    def may_trigger(self, number: int) -> bool:
        """Returns whether a value is no mutable array: those are read by their own equations."""
        return not private.is_of_ref(self._program.avals[number])

    def may_guard(self, equation: Equation, value: Any) -> bool:
        return not private.is_ref(value)

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        equation = self._program.equations[at]
        with jax.named_scope(equation.scope):
            pieces = pooling_pieces(equation.source) if self.uses_branches else 1
            if pieces > 1:
                return _bind_in_pieces(equation.source, inputs, pieces)
            stacks = _late_stacks(equation, inputs) if self.starts_stacks_late else []
            if stacks:
                return private.scan_into(equation.source, inputs, stacks)
            return private.bind(equation.source, inputs)

    def literal(self, atom: Any) -> Any:
        return atom.val

    def array(self, atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype)

    def literal_bytes(self, atom: Any) -> int:
        return nbytes(atom.aval)

    def is_inexact(self, value: Any) -> bool:
        return bool(jnp.issubdtype(value.dtype, jnp.inexact))

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        return never(triggers, in_branch)

    def guard(self, value: Any, condition: Any) -> Any:
        return guard(value, condition)

    def hold(self, value: Any) -> Any:
        return lax.optimization_barrier(value)

    def draw(
        self, equations: Sequence[int], given: dict[int, Any], wanted: Sequence[int], condition: Any
    ) -> list[Any]:
        def draw(*operands: Any) -> list[Any]:
            inner: dict[int, Any] = dict(zip(given, operands, strict=True))
            for at in equations:
                equation = self._program.equations[at]
                inputs = [inner[a] if isinstance(a, int) else a.val for a in equation.inputs]
                inner.update(
                    zip(equation.outputs, private.bind(equation.source, inputs), strict=True)
                )
            return [inner[number] for number in wanted]

        def nothing(*operands: Any) -> list[Any]:
            return [lax.full_like(x, 0) for x in jax.eval_shape(draw, *operands)]

        return list(lax.cond(condition, nothing, draw, *given.values()))


class GpuWriter(JaxWriter):
    """Writes for one GPU, where cuDNN's layouts decide what is copied, and when.

    cuDNN wants kernels output channels first; Keras keeps them last. XLA makes one transposed copy
    of the parameter, shared by all its readers and its update. So the copy lives from the first
    convolution to the update, and the new weights and moments wait for a copy of their own. If a
    guarded kernel and a kernel's gradient are pinned to row-major order, each convolution has a
    copy that lives only while it runs. These copies need parameters only and would all be made
    before the first convolution, so a kernel waits for its image.

    A convolution reads a copy of its image if the image is padded at one side more, or has a type
    in which the card does not compute. The gradient of its kernel would share that copy, which
    would be kept from the forward phase on. So there the image waits for the gradient.

    A sum is laid out like its summands. If it is a bias's gradient, of heads for instance, XLA
    would transpose weight and moments for the update, and the new ones back: four kernels for one,
    as slow as larger ones. So the sum is laid out like the bias.

    Where images lie channels first, so do the element of an image that a trigger reads, and an
    image's guard. Otherwise XLA would lay a part of an image in the order of its dimensions,
    channels last, and with it the image and all values up to the next convolution. Written loosely,
    a plan of a U-Net for a T4 then takes 1.20 of plain's time, and 1.01 as it is.

    Args:
        program: the program to write.
        target: the GPU.
        gradients: numbers of the values that updates read.
    """

    uses_branches, uses_barriers = False, True

    def __init__(self, program: FlatProgram, target: Target, gradients: Collection[int] = ()):
        super().__init__(program)
        self._target, self._gradients = target, gradients
        self._holds_images_first = holds_images_first(program, target)
        self._kernels = kernel_shapes(program)

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        equation = self._program.equations[at]
        if equation.kind == POOLING_GRADIENT:
            with jax.named_scope(equation.scope):
                return [_with_late_zero(equation.source.params, *inputs)]
        if equation.kind == KERNEL_GRADIENT and is_of_transposed(equation.source.params):
            with jax.named_scope(equation.scope):
                return [_row_major(_transposed_kernel_gradient(equation.source.params, *inputs))]
        if equation.kind == CONVOLUTION and self._is_given(equation.inputs[1]):
            image, kernel = inputs
            inputs = [image, self.guard(kernel, self.never([image]))]
        if equation.kind == KERNEL_GRADIENT and reads_a_copy(
            equation.source.params, inputs[0].dtype, self._target
        ):
            image, gradient = inputs
            inputs = [JaxWriter.guard(self, image, self.never([gradient])), gradient]
        results = super().write(at, inputs)
        if equation.kind == CONVOLUTION and is_emulated(results[0].dtype, self._target):
            results = [self.hold(results[0])]  # else the result in 32 bits is kept
        is_gradient = equation.kind in KINDS.reductions and equation.outputs[0] in self._gradients
        is_laid = equation.kind == KERNEL_GRADIENT or is_gradient
        return [*map(_row_major, results)] if is_laid else results

    def copied(self, at: int) -> Sequence[int]:
        equation = self._program.equations[at]
        return copied_operands(equation, self._target)

    def keeps_layout(self, number: int) -> bool:
        value = self._program.avals[number]
        return value.ndim != IMAGE_RANK or not is_channels_first(value.dtype, self._target)

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        laid = [self._laid(x) if self._waits_first(x) else x for x in triggers]
        return super().never(laid, in_branch)

    def hold(self, value: Any) -> Any:
        return super().hold(self._laid(value))

    def _laid(self, value: Any) -> Any:
        """Returns a value laid as convolutions read it, if that is channels first."""
        if not self._lies_first(value):
            return value
        return layout.with_layout_constraint(value, layout.Layout(CHANNELS_FIRST))

    def _lies_first(self, value: Any) -> bool:
        is_first = self._holds_images_first and is_channels_first(value.dtype, self._target)
        return is_first and value.ndim == IMAGE_RANK and value.shape not in self._kernels

    def _waits_first(self, value: Any) -> bool:
        """Returns whether a value that waits, or is waited for, is laid channels first, too. It is
        not if it is computed in another type, because its copy in that type would be kept."""
        return self._lies_first(value) and not is_emulated(value.dtype, self._target)

    def _is_given(self, atom: Any) -> bool:
        return isinstance(atom, int) and atom < self._program.n_inputs

    def guard(self, value: Any, condition: Any) -> Any:
        guarded = super().guard(value, condition)
        if self._waits_first(value):
            return self._laid(guarded)
        return _row_major(guarded) if value.ndim == IMAGE_RANK else guarded

    def guard_made(self, value: Any, condition: Any) -> Any:
        if self._lies_first(value):
            return self.guard(value, condition)  # holding it would lay it otherwise first
        return super().guard_made(value, condition)


class ShardedWriter(JaxWriter):
    """Writes for several devices, none of which waits for another.

    Each device reads its own part of a trigger and guards its own part of a value. A guard's
    condition is an array with one element per device. Nothing is written in branches, because a
    branch would have to be taken on all devices at once.
    """

    uses_branches = starts_stacks_late = False

    def __init__(self, traced: JaxTracedStep):
        super().__init__(traced.program)
        self._mesh, self._layouts = traced.mesh, traced.layouts
        self._everywhere = PartitionSpec(tuple(traced.mesh.axis_names))
        self._known: dict[int, tuple[Any, Layout]] = {}  # id → living value, its layout

    def may_trigger(self, number: int) -> bool:
        """Returns whether every device has its own part of a value. Waiting for a value that they
        add up together would keep XLA from adding all of them up at once."""
        return super().may_trigger(number) and any(self._layouts[number])

    def given(self, values: Sequence[Any]) -> None:
        self._known.update((id(v), (v, self._layouts[at])) for at, v in enumerate(values))

    def write(self, at: int, inputs: Sequence[Any]) -> list[Any]:
        results = super().write(at, inputs)
        for number, value in zip(self._program.equations[at].outputs, results, strict=True):
            self._known[id(value)] = value, self._layouts[number]
        return results

    def _partition(self, value: Any) -> PartitionSpec:
        known = self._known.get(id(value))
        return PartitionSpec() if known is None else PartitionSpec(*known[1])

    def never(self, triggers: Sequence[Any], in_branch: bool = False) -> Any:
        parts = tuple(map(self._partition, triggers))
        return self._on_each(lambda *local: never(local)[None], parts, self._everywhere)(*triggers)

    def guard(self, value: Any, condition: Any) -> Any:
        part = self._partition(value)
        guarded = self._on_each(
            lambda local, own: guard(local, own[0]), (part, self._everywhere), part
        )(value, condition)
        self._known[id(guarded)] = guarded, self._known.get(id(value), (None, tuple(part)))[1]
        return guarded

    def _on_each(self, run: Callable[..., Any], parts: Any, result: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self._mesh, in_specs=parts, out_specs=result, check_vma=False
        )
        return mapped


def _bind_in_pieces(eqn: Any, inputs: Sequence[Any], pieces: int) -> list[Any]:
    """Runs an equation that treats samples alike on one piece of the batch after the other."""
    parts = [x.reshape(pieces, -1, *x.shape[1:]) for x in inputs]
    results = lax.map(lambda part: private.bind(eqn, part), parts)
    return [x.reshape(-1, *x.shape[2:]) for x in results]


def _late_stacks(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Returns arrays for a ``scan`` to write its stacked results into; empty if it has none.

    The arrays exist only when the inputs of the ``scan`` do. JAX begins all stacked results with
    zeros. XLA merges the zeros of one shape, for all loops of a step, makes a copy for every loop
    at the step's very beginning, and holds each until its loop has run. No two of the arrays made
    here are equal, so none is copied.
    """
    shapes = private.stacked_shapes(equation.source) if equation.kind == SCAN else []
    triggers = [x for x in inputs if isinstance(x, jax.Array) and x.size] if shapes else []
    if not triggers or any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in shapes):
        return []
    late = lax.convert_element_type(never(triggers), jnp.int32)
    starts = [lax.convert_element_type(late + at, x.dtype) for at, x in enumerate(shapes)]
    return [lax.broadcast(start, x.shape) for start, x in zip(starts, shapes, strict=True)]


def _row_major(x: Any) -> Any:
    """Returns a value laid in memory with its last dimension innermost."""
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _with_late_zero(params: Any, gradient: Any, image: Any) -> Any:
    """Returns the gradient of max pooling, added to a zero that exists only when ``gradient`` does.

    XLA:GPU scatters into an array of zeros. It would share that array with every ReLU of its shape
    and keep it from the first of them on.
    """
    zero = lax.convert_element_type(never([gradient]), gradient.dtype)
    return private.select_and_scatter_add(params, image, gradient, zero)


def _transposed_kernel_gradient(params: Any, image: Any, gradient: Any) -> Any:
    """Returns the gradient of a transposed convolution's kernel.

    It is written as the gradient of the convolution that it transposes: image and gradient change
    places, and the result is reversed. As JAX writes it, the dilated image slides over the
    gradient. cuDNN has no such call, so XLA:GPU copies both, zeros and padding included, with
    channels for samples.
    """
    result = lax.conv_general_dilated(
        gradient, image, **turned(params, image.shape, gradient.shape)
    )
    return lax.rev(result, params["dimension_numbers"].out_spec[2:])


def writer_of(traced: JaxTracedStep) -> JaxWriter:
    """Returns the writer of a traced step for the device it will run on."""
    if traced.mesh is not None:
        return ShardedWriter(traced)
    if traced.target.on_gpu:
        updates = (op for op in traced.graph.ops if op.phase == UPDATE)
        gradients = {traced.numbers[v] for op in updates for v in op.inputs}
        return GpuWriter(traced.program, traced.target, gradients)
    return JaxWriter(traced.program)
