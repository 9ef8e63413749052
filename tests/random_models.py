"""Random models, and programs that follow the advice of a refusal: for the tests of every backend,
and for ``benchmarks/advice.py``."""

import random
import re

import keras
import numpy as np

import keras_remat
from keras_remat.backends.base import load_backend
from keras_remat.errors import InfeasibleBudgetError, ScheduleNotFoundError
from keras_remat.units import MIB, parse_bytes


def random_model(seed):
    """Returns a small model of dense layers or of convolutions, samples, targets, and a batch
    size."""
    rng = random.Random(seed)
    keras.utils.set_random_seed(seed)
    depth, is_image, act = rng.randint(3, 7), rng.random() < 0.4, rng.choice(("relu", "gelu"))
    batch, width = (32, rng.choice((16, 24))) if is_image else (64, rng.choice((512, 768)))
    shape = (32, 32, 16) if is_image else (width,)
    layers = [keras.layers.Input(shape)]
    for _ in range(depth):
        same = {"padding": "same", "activation": act}
        layers.append(
            keras.layers.Conv2D(width, 3, **same)
            if is_image
            else keras.layers.Dense(width, activation=act)
        )
    model = keras.Sequential(layers)
    model.compile(rng.choice(("sgd", "adam")), "mse")
    x = np.random.default_rng(seed).normal(size=(3 * batch, *shape)).astype("float32")
    return model, x, np.zeros((3 * batch, *model.output_shape[1:]), "float32"), batch


def advised(message):
    """Returns the bytes of the limit that a refusal advises; 0 where it advises none."""
    found = re.search(r"limit of ([\d.]+ \w+) does", message)
    return parse_bytes(found[1]) if found else 0


def follow_advice(seed, *, compilation="auto", **options):
    """Gives a random model too little, and then what its refusal advises.

    Args:
        seed: of the model.
        compilation, options: of ``RematAutotune``.

    Returns:
        A row: ``refused`` and ``advised`` bytes, how many ``refusals`` there were, the limit that
        it ``trained`` under and the ``peak`` of its steps, both 0 where it was refused again.
    """
    held = load_backend().device.in_use_bytes()  # plain models of Keras leave bytes behind, too
    model, x, y, batch = random_model(seed)

    def fit(limit):
        tuner = keras_remat.RematAutotune(
            limit, batch_size="keep", compilation=compilation, verbose=0, **options
        )
        try:
            model.fit(x, y, batch_size=batch, verbose=0, callbacks=[tuner])
        except (InfeasibleBudgetError, ScheduleNotFoundError) as error:
            return str(error)
        report = tuner.report
        assert report.batch_size == batch
        return max(epoch.peak_bytes for epoch in report.epochs)

    slots = 3 if isinstance(model.optimizer, keras.optimizers.Adam) else 1
    refused = limit = held + 4 * slots * model.count_params() + 2 * MIB
    row = {"seed": seed, "refused": refused, "advised": 0, "refusals": 0, "trained": 0, "peak": 0}
    while limit and row["refusals"] < 3:
        told = fit(limit)
        if not isinstance(told, str):
            return row | {"trained": limit, "peak": told}
        row["refusals"] += 1
        row["message"] = told
        limit = advised(told)
        row["advised"] = row["advised"] or limit
    return row
