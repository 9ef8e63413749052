"""Fits with the callback beside fits without it, on the framework that Keras runs on."""

import jax_models as models
import keras
import numpy as np

import keras_remat
from keras_remat.backends.base import Installed

BATCH, SAMPLES = 32, 96
ON_TORCH = keras.backend.backend() == "torch"


def callback(**options):
    return keras_remat.RematAutotune(
        "8GiB", "keep", solver="greedy", profile_steps=1, solver_time_limit_s=5.0, verbose=0,
        **options,
    )  # fmt: skip


def small():
    """A model without metrics, which are half of what is traced, and its data."""
    keras.utils.set_random_seed(0)
    model = models.small(metrics=())
    return model, models.batch(model, SAMPLES)


def fit(model, data, *callbacks, **options):
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    return model.fit(*data, callbacks=list(callbacks), **options).history


def assert_given_back(model):
    assert model.train_function is not None
    assert not isinstance(model.train_function, Installed)
    assert not [name for name in dir(model.train_function) if "remat" in name]


def assert_same_state(model, other, **tolerance):
    """Weights, seeds, moving averages, optimizer slots."""
    ours, theirs = ((*m.variables, *m.optimizer.variables) for m in (model, other))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), err_msg=a.path, **tolerance)
