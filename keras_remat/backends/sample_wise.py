"""Decides whether a model's validation gives the same numbers in batches of any size.

Keras weights the loss of a batch by its samples, and its metrics add up. So if every sample goes
through the model alone and the losses are means over samples, the batch size changes only rounding.
Most of Keras's own layers, losses and metrics treat samples alone. Anything else may mix the
samples of a batch, as a contrastive loss does, and is assumed to.

Some of Keras's own mix samples, too: losses of overlaps (Dice, Tversky) and of pairs (Circle); a
loss with an ignored class, which is a mean over the other classes; and a loss used as a metric,
which is one number for a batch. Layers that wrap another framework's code may do anything.

Two more cases count as mixing. A masked loss is a mean over unmasked values. And several devices
cannot share a batch of every size.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_remat.backends.keras_private import (
    is_on_one_device,
    layers,
    metric_functions,
    trains_always,
)

#: Methods of validation that a user's class may override.
_OF_VALIDATION = (
    "call", "compute_loss", "compute_metrics", "evaluate", "get_metrics_result",
    "make_test_function", "test_step",
)  # fmt: skip
#: Ops between layers that treat every sample alone.
_ELEMENTWISE = ("Add", "Multiply", "Negative", "Subtract", "TrueDivide")
_MEANS = ("mean", "sum_over_batch_size")
#: Losses that mix the samples of a batch.
_OF_WHOLE_BATCHES = ("circle", "dice", "tversky")
#: Layers around code that is not Keras's.
_OF_OTHERS = ("FlaxLayer", "JaxLayer", "Lambda", "TFSMLayer", "TorchModuleWrapper")


def validates_sample_wise(model: Any) -> bool:
    """Returns whether a validation gives the same numbers in batches of any size."""
    inner = layers(model)
    operations = [part for one in inner for part in getattr(one, "operations", ())]
    return (
        is_on_one_device(model)
        and not any(name in vars(model) for name in _OF_VALIDATION)
        and all(map(_is_sample_wise, {id(part): part for part in (*inner, *operations)}.values()))
        and all(map(_is_mean, keras.tree.flatten(model.loss)))
        and all(map(_adds_up, metric_functions(model)))
    )


def _is_of_keras(thing: Any) -> bool:
    named = thing if isinstance(getattr(thing, "__module__", None), str) else type(thing)
    return bool(named.__module__.startswith("keras.src."))


def _is_sample_wise(part: Any) -> bool:
    """Returns whether a layer, or an op between layers, treats every sample alone."""
    if not isinstance(part, keras.layers.Layer):
        return type(part).__name__ in _ELEMENTWISE and _is_of_keras(part)
    activation, axis = getattr(part, "activation", None), getattr(part, "axis", None)
    return (
        _is_of_keras(part)
        and type(part).__name__ not in _OF_OTHERS
        and not isinstance(part, keras.layers.Masking)
        and not getattr(part, "mask_zero", False)
        and not getattr(part, "stateful", False)
        and part.activity_regularizer is None
        and (activation is None or _is_of_keras(activation))
        and (axis is None or 0 not in np.atleast_1d(axis))
        and not trains_always(part)
    )


def _is_mean(given: Any) -> bool:
    """Returns whether a loss, as passed to ``compile``, is a mean over samples."""
    if given is None:
        return True
    loss = keras.losses.get(given)
    is_mean = getattr(loss, "reduction", "mean") in _MEANS
    return is_mean and _is_of_keras(loss) and _is_of_samples(loss)


def _adds_up(thing: Any) -> bool:
    """Returns whether a metric adds up over samples, or whether a metric's function returns a
    number per sample. False for a loss, which is one number for a batch."""
    is_loss = isinstance(thing, keras.losses.Loss)
    return not is_loss and _is_of_keras(thing) and _is_of_samples(thing)


def _is_of_samples(thing: Any) -> bool:
    """Returns whether one of Keras's functions, or a loss or metric made of one, treats every
    sample alone and in full."""
    function, options = getattr(thing, "fn", thing), getattr(thing, "_fn_kwargs", {})
    return (
        _is_of_keras(function)
        and getattr(function, "__name__", None) not in _OF_WHOLE_BATCHES
        and options.get("ignore_class") is None
        and options.get("axis") != 0
    )
