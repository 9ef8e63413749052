"""A fit whose step runs in slices, and which validates: for the tests of every backend."""

import warnings

import keras
import numpy as np

import keras_remat


def in_slices(samples, every, limit=None):
    """Trains 512 samples at once, twice, and validates so many at once, in every so manieth
    epoch."""
    keras.utils.set_random_seed(0)
    inner = [keras.layers.Reshape((64, 1)), keras.layers.Dense(128), keras.layers.ReLU()]
    ends = [keras.layers.Dense(1), keras.layers.Flatten()]
    model = keras.Sequential([keras.layers.Input((64,)), *inner, *ends])  # 16 MiB an activation
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.random.default_rng(0).normal(size=(2, 512, 64)).astype("float32")
    tuner = keras_remat.RematAutotune(
        limit, batch_size="keep", micro_batches=8, margin=0.0, solver="greedy", verbose=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(
            x, y, batch_size=512, epochs=2, verbose=0, shuffle=False,
            callbacks=[tuner] if limit else [], validation_freq=every,
            validation_data=(x[:samples] + 1, y[:samples]),
        ).history  # fmt: skip
    return history, tuner.report
