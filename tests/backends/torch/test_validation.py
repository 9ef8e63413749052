"""Validation inside ``fit`` on PyTorch keeps the limit, with plain ``fit``'s numbers."""

import re
import warnings

import keras
import numpy as np
import pytest

import keras_remat
from keras_remat.core.events import EventKind
from keras_remat.units import MIB


def trained(limit=None):
    """Trains 512 samples at once, twice; validates 499 at once, a prime, after the second epoch."""
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
            callbacks=[tuner] if limit else [],
            validation_data=(x[:499] + 1, y[:499]), validation_freq=2,
        ).history  # fmt: skip
    return history, tuner.report


def test_batches_of_a_validation_are_cut_and_a_smaller_one_is_left():
    plain, _ = trained()
    history, report = trained(20 * MIB)
    (told,) = [event.message for event in report.events if event.kind == EventKind.VALIDATION]
    (size,) = re.findall(r"it runs in batches of (\d+), with the same numbers\.$", told)
    assert int(size) < 499
    assert len(history["val_loss"]) == 1
    for name, values in plain.items():
        assert history[name] == pytest.approx(values, rel=1e-5)
    assert report.predicted_phases == ["validation"]
    assert report.phase_peak_bytes["validation"] <= 20 * MIB
