"""Trains a batch in micro-batches whose gradients are added up, as one optimizer step.

:mod:`keras_remat.backends.micro_batches` splits the batch, and ``backward()`` itself adds the
gradients up. The step is written out micro-batch after micro-batch and recorded like any other. It
runs in the order in which it was written, so micro-batches need not be kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_remat.backends.keras_private import call_for_training, track_loss
from keras_remat.backends.micro_batches import (
    check_can_be_split,
    check_no_masks,
    micro_batches_of,
)


def accumulated_train_step(model: Any, count: int) -> Callable[[Any], Any]:
    """Returns a train step for ``model`` that trains a batch in ``count`` micro-batches.

    Raises:
        UnsupportedModelError: the model has a ``train_step`` or ``compute_loss`` of its own, or a
            loss that is no mean over the batch; when recorded, also for masked outputs and for
            arrays that do not have the batch's samples.
    """
    check_can_be_split(model)

    def train_step(data: Any) -> Any:
        logs, micro_batches = None, micro_batches_of(data, count)
        model.zero_grad()
        for micro_batch, samples, share in micro_batches:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(micro_batch)
            predicted = call_for_training(model, x)
            check_no_masks(predicted)
            loss = model.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
            )
            track_loss(model, loss, samples)
            scaled = loss * share
            if model.trainable_weights:
                model.optimizer.scale_loss(scaled).backward()
            logs = model.compute_metrics(x, y, predicted, sample_weight=sample_weight)
            del predicted, loss, scaled
        weights = model.trainable_weights[:]
        if weights:
            with torch.no_grad():
                model.optimizer.apply([weight.value.grad for weight in weights], weights)
        return logs

    return train_step
