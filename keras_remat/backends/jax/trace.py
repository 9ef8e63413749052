"""Traces Keras's whole JAX train step as a graph, from forward phase to metrics.

``jax.make_jaxpr(model.train_step)(state, data)`` runs on shapes alone, so nothing is allocated and
the model's variables are not touched. The step holds forward, loss, backward, optimizer and
metrics. The jaxpr is flattened (:mod:`~keras_remat.backends.jax.flatten`), cut into the clusters
XLA will materialize, and ordered (:mod:`keras_remat.backends.xla.fused_graph`); one cluster is one
op of the graph. ``Op.kind`` is the name of the cluster's last primitive.

An equation is backward if JAX marks it ``transpose(…)`` in its name stack. Every equation of a
jaxpr is pure, random ones included (the seed is an input).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np

from keras_remat.backends import keras_private
from keras_remat.backends.batches import check_dense
from keras_remat.backends.jax import cudnn, private
from keras_remat.backends.jax.accumulate import accumulated_train_step
from keras_remat.backends.jax.flatten import FlatProgram, flatten
from keras_remat.backends.jax.kinds import in_softmaxes, kinds_of, read_padded
from keras_remat.backends.jax.measure import check_placed, live_target
from keras_remat.backends.jax.sharding import Layout, count, layouts, mesh_of
from keras_remat.backends.micro_batches import watched_micro_batches
from keras_remat.backends.xla.fused_graph import FusedStep, fused_graph
from keras_remat.core.target import Target
from keras_remat.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class JaxTracedStep(FusedStep):
    """Holds a traced Keras JAX train step.

    Args:
        state_specs: shapes and dtypes of the trainer's state.
        batch_specs: shapes and dtypes of the batch.
        in_tree: structure of ``(state, batch)``.
        out_tree: structure of ``(logs, state)``.
        model: the model whose ``train_step`` it is.
        micro_batches: number of micro-batches it trains the batch in.
        other_step: ``(state, batch) → (logs, state)``, the traced step if it is not the model's
            own: it runs several micro-batches, or another attention.
        mesh: the devices it trains on, if there are several; else ``None``.
        layouts: layout of every value of the program on them.
        target: the device it will run on.
    """

    program: FlatProgram
    state_specs: Any
    batch_specs: Any
    in_tree: Any
    out_tree: Any
    model: Any
    micro_batches: int
    other_step: Callable[[Any, Any], Any] | None
    mesh: Any
    layouts: tuple[Layout, ...]
    target: Target

    @property
    def train_step(self) -> Callable[[Any, Any], Any]:
        """Returns the traced step, ``(state, batch) → (logs, state)``.

        The model's own is not kept: see :meth:`~keras_remat.backends.jax.device.Device.own_step`.
        """
        step: Callable[[Any, Any], Any] = self.other_step or self.model.train_step
        return step


def as_specs(batch: Any) -> Any:
    """Returns a batch of arrays or specs as specs with the dtypes JAX will use."""

    distributed = keras.distribution.distribution() is not None

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        sharding = getattr(leaf, "sharding", None) if distributed else None
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, sharding=sharding)

    return jax.tree.map(spec, batch)


def check_supported(model: Any) -> None:
    """Raises :class:`UnsupportedModelError` with the reason when the model's JAX step cannot be
    rematerialized."""
    if keras.config.is_nnx_enabled():
        raise UnsupportedModelError(
            "Keras's NNX mode is on: its variables are no plain state of the train step."
        )
    if not getattr(model, "compiled", False):
        raise UnsupportedModelError("The model is not compiled: call model.compile(...) first.")
    if model.optimizer is None:
        raise UnsupportedModelError(
            "The model has no optimizer: there is no train step to plan for."
        )
    if model.run_eagerly or not model.jit_compile:
        raise UnsupportedModelError(
            f"The model runs without compilation ({_why_not_compiled(model)}); there is no "
            "compiled step to plan for."
        )


def _why_not_compiled(model: Any) -> str:
    """Returns why Keras does not compile a model's step: it asks every layer before it does."""
    against = [layer for layer in keras_private.layers(model) if not layer.supports_jit]
    if model.run_eagerly or not against:
        return "run_eagerly=True or jit_compile=False"
    names = ", ".join(sorted({type(layer).__name__ for layer in against}))
    return f"Keras compiles none with {names} in it: apply that to the data before fit"


def _check_alone(target: Target, micro_batches: int) -> None:
    """Raises :class:`UnsupportedModelError` for requests that several devices cannot serve."""
    if keras.distribution.distribution() is None:
        return
    if not target.is_live:
        raise UnsupportedModelError(
            f"A step of several devices is planned on them, and not for one {target.card}."
        )
    if micro_batches > 1:
        raise UnsupportedModelError(
            "Under a keras.distribution a batch is not split: micro-batches would have to be "
            "laid over the devices anew."
        )


def trace(
    model: Any,
    batch: Any,
    micro_batches: int = 1,
    like: JaxTracedStep | None = None,
    state: Any = None,
    own_step: Callable[[Any, Any], Any] | None = None,
    target: Target | None = None,
) -> JaxTracedStep:
    """Traces ``model.train_step`` for one batch shape, without running or allocating anything.

    One function, though long: it puts together what one traced step is made of.

    Args:
        model: a compiled Keras model on the JAX backend. Unbuilt parts (model, optimizer, metrics)
            are built as ``fit`` would.
        batch: ``(x, y[, sample_weight])`` of arrays or ``jax.ShapeDtypeStruct``.
        micro_batches: more than 1 trains the batch in micro-batches, see :mod:`.accumulate`.
        like: the same step for another batch size, if its ops are wanted.
        state: the trainer's state, if ``fit`` holds it; it shows the layout on several devices.
        own_step: ``model.train_step``, as the object by which JAX finds its traces while it lives.
        target: where the step will run; ``None`` for the live device.

    Raises:
        UnsupportedModelError: not compiled, eager, a sparse batch, micro-batches or a card under a
            ``keras.distribution``, variables on another device, a step that cannot be split, or
            attention that only a device with cuDNN has.
    """
    check_supported(model)
    for leaf in keras.tree.flatten(batch):
        check_dense(leaf)
    target = target or live_target()
    _check_alone(target, micro_batches)
    batch_specs = as_specs(batch)
    other_step = None if micro_batches == 1 else accumulated_train_step(model, micro_batches)
    layers_of_cudnn = keras_private.attention_layers(model) or keras_private.cudnn_lstms(model)
    if not target.is_live and layers_of_cudnn:
        other_step = cudnn.without_cudnn(model, other_step or model.train_step)
    with nullcontext() if target.is_live else cudnn.refused(model):
        if state is None:  # else fit has built it, and holds the variables' values
            keras_private.build(model, batch_specs)
        state_specs = private.state_specs(model, state)
        if keras.distribution.distribution() is None:
            check_placed(private.state_values(model) if state is None else state)
        train_step = other_step or own_step or model.train_step
        with watched_micro_batches(
            model, micro_batches, jax.ensure_compile_time_eval
        ) as differences:
            closed, out_shape = jax.make_jaxpr(train_step, return_shape=True)(
                state_specs, batch_specs
            )
    program = flatten(closed, as_slices=target.on_gpu)
    mesh = mesh_of((state_specs, batch_specs))
    lying: tuple[Layout, ...] = ()
    if mesh is not None:
        given = jax.tree.leaves((state_specs, batch_specs))
        lying = layouts(program, given, mesh)
        program = replace(program, shards=tuple(count(lies, mesh) for lies in lying))
    n_logs = len(jax.tree.leaves(out_shape[0]))
    graph, numbers, handles = fused_graph(
        program,
        kinds_of(target),
        list(enumerate(program.outputs[n_logs:])),  # the new state, in the old one's order
        lambda e: private.is_backward(e.scope),
        like,
        read_padded(program, target),
        in_softmaxes(program, target),
    )
    return JaxTracedStep(
        graph,
        handles,
        program=program,
        numbers=numbers,
        state_specs=state_specs,
        batch_specs=batch_specs,
        in_tree=jax.tree.structure((state_specs, batch_specs)),
        out_tree=jax.tree.structure(out_shape),
        model=model,
        micro_batches=micro_batches,
        other_step=other_step,
        mesh=mesh,
        layouts=lying,
        target=target,
        differences=tuple(differences),
    )
