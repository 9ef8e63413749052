"""KERAS_BACKEND=torch: plain fit, then the same fit under a memory limit; measured peaks of both
steps, and the same losses to the bit.

    python examples/torch_fit.py

Needs no TensorFlow. On a CPU the peak is what the profiler's memory events count beside what is in
use anyway; on a GPU it is the caching allocator's.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import keras_remat
from keras_remat.units import MIB


def build(blocks=3, tokens=64, dim=128):
    """Dense blocks with normalization, dropout and skip connections."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((tokens, dim))
    for _ in range(blocks):
        h = layers.Dense(4 * dim, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(dim)(layers.Dropout(0.1)(h))])
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main():
    """Trains twice from the same weights."""
    rng = np.random.default_rng(0)
    x, y = rng.random((256, 64, 128), np.float32), rng.integers(0, 10, 256)

    def fit(**options):
        remat = keras_remat.RematAutotune(batch_size="keep", solver="greedy", verbose=0, **options)
        losses = (
            build()
            .fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False, callbacks=[remat])
            .history["loss"]
        )
        return remat, losses

    watching, plain_losses = fit()
    plain = watching.report.baseline
    remat, losses = fit(memory_limit=plain.peak_bytes * 6 // 10)
    ours = remat.plan.measured
    print(f"{'':16}{'peak':>14}{'time per step':>16}   losses")
    for name, usage, history in (("plain", plain, plain_losses), ("rematerialized", ours, losses)):
        print(f"{name:16}{usage.peak_bytes / MIB:10.1f} MiB{usage.time_s:14.3f} s   {history}")
    print(f"limit           {remat.report.limit_bytes / MIB:10.1f} MiB   {remat.plan}")
    assert ours.peak_bytes <= remat.report.limit_bytes
    assert losses == plain_losses


if __name__ == "__main__":
    main()
