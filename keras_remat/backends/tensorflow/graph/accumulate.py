"""Makes one optimizer step from a batch that is split into micro-batches
(:mod:`keras_remat.backends.micro_batches`): their gradients are added up.

The step is written micro-batch after micro-batch and traced like any other, so schedules, measuring
and swapping need no special case. A compiler could still run micro-batches side by side. So for a
compiler, each one's samples are made to depend on the gradients of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_remat.backends import keras_private
from keras_remat.backends.keras_private import call_for_training, track_loss
from keras_remat.backends.micro_batches import (
    SEPARATION,
    check_can_be_split,
    check_no_masks,
    micro_batches_of,
)
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.barrier import never


def accumulated_train_step(
    model: Any, count: int, batch: Any, separated: bool = False
) -> Callable[[Any], Any]:
    """Returns a train step for ``model`` that trains a batch in ``count`` micro-batches.

    Args:
        model: a compiled model.
        count: number of micro-batches; 1 returns the model's own step.
        batch: specs of the batch. Metrics and losses are built for them before tracing. If a trace
            built them, it would have to be traced again, and a refused trace would leave them
            without values.
        separated: whether a data dependency keeps a micro-batch from starting before the last one
            has ended, for an executor that keeps no order.

    Raises:
        UnsupportedModelError: the model has a ``train_step`` of its own, or a loss that is no mean
            over the batch; when traced, also for masked outputs and for arrays that do not have the
            batch's samples.
    """

    def own_step(data: Any) -> Any:
        with private.losses_counted_as(model):
            return model.train_step(data)

    if count == 1:
        keras_private.build_losses_and_metrics(model, batch)
        return own_step
    check_can_be_split(model)
    keras_private.build(model, batch)

    def train_step(data: Any) -> Any:
        gradients: list[Any] = []
        logs: Any = None
        for micro_batch, samples, share in micro_batches_of(data, count):
            if separated and logs is not None:
                with tf.name_scope(SEPARATION):
                    micro_batch = _waiting(micro_batch, gradients)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(micro_batch)
            with tf.GradientTape() as tape:
                predicted = call_for_training(model, x)
                check_no_masks(predicted)
                with private.losses_counted_as(model, share):
                    loss = model.compute_loss(
                        x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
                    )
                track_loss(model, loss, samples)
                scaled = model.optimizer.scale_loss(loss * share)
            new = tape.gradient(scaled, model.trainable_weights)
            gradients = (
                [_sum(a, b) for a, b in zip(gradients, new, strict=True)] if gradients else new
            )
            logs = model.compute_metrics(x, y, predicted, sample_weight=sample_weight)
        if gradients:  # none where all weights are frozen, as in Keras's own step
            model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return logs

    return train_step


def _waiting(micro_batch: Any, gradients: list[Any]) -> Any:
    """Returns a micro-batch with the same bits that depends on every gradient."""
    known = [
        g.values if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g)
        for g in gradients
        if g is not None
    ]
    condition = never(known)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.where(condition, tf.zeros_like(leaf), leaf),
        micro_batch,
    )


def _sum(left: Any, right: Any) -> Any:
    """Returns the sum of two gradients. ``None`` counts as zero, and an embedding's rows
    (``IndexedSlices``) stay rows."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, tf.IndexedSlices) and isinstance(right, tf.IndexedSlices):
        values, rows = (
            tf.concat([left.values, right.values], 0),
            tf.concat([left.indices, right.indices], 0),
        )
        return tf.IndexedSlices(values, rows, left.dense_shape)
    return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)
