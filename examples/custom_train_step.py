"""A variational autoencoder with a ``train_step`` of its own, trained within a memory limit: same
losses as without.

    python examples/custom_train_step.py

Nothing in the model knows of rematerialization: the callback traces whatever ``train_step`` does,
random draws included.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_remat

PIXELS, LATENT, MIB = 64, 16, 2**20


class Autoencoder(keras.Model):
    """Encoder, a random draw, decoder; the loss is reconstruction plus divergence from the
    prior."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)
        self.mean_loss = keras.metrics.Mean("loss")
        self.encoder = keras.Sequential([keras.Input((PIXELS, PIXELS, 3))])
        self.decoder = keras.Sequential(
            [keras.Input((LATENT,)), layers.Dense(8 * 8 * 128), layers.Reshape((8, 8, 128))]
        )
        for filters in (32, 64, 128):
            self._block(self.encoder, layers.Conv2D(filters, 3, strides=2, padding="same"))
        for filters in (64, 32, 32):
            self._block(self.decoder, layers.Conv2DTranspose(filters, 3, strides=2, padding="same"))
        self.encoder.add(layers.Flatten())
        self.encoder.add(layers.Dense(2 * LATENT))
        self.decoder.add(layers.Conv2D(3, 3, padding="same", activation="sigmoid"))

    @staticmethod
    def _block(model, convolution):
        model.add(convolution)
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("silu"))

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, images):
        return self.decoder(self.encoder(images)[:, :LATENT])

    def train_step(self, data):
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(images, training=True), 2, axis=1)
            drawn = mean + ops.exp(0.5 * log_variance) * keras.random.normal(
                ops.shape(mean), seed=self.seed
            )
            errors = ops.sum(
                ops.square(images - self.decoder(drawn, training=True)), axis=(1, 2, 3)
            )
            divergence = 0.5 * ops.sum(
                ops.square(mean) + ops.exp(log_variance) - 1 - log_variance, axis=1
            )
            loss = ops.mean(errors + divergence)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}


def train(images: np.ndarray, callback: keras_remat.RematAutotune) -> list[float]:
    """Three epochs from the same start; returns the losses."""
    keras.utils.set_random_seed(0)
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(1e-4), jit_compile=False)
    return model.fit(
        images, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=[callback]
    ).history["loss"]


def main() -> int:
    """Returns 0 when the losses agree to 1e-4 and the limit was kept."""
    keras_remat.enable_cpu_memory_stats()
    images = np.random.default_rng(0).random((4 * 32, PIXELS, PIXELS, 3), dtype=np.float32)
    watching = keras_remat.RematAutotune(batch_size="keep")
    plain_losses = train(images, watching)
    limit = int(0.7 * watching.report.baseline.peak_bytes)
    remat = keras_remat.RematAutotune(memory_limit=limit, batch_size="keep", solver_time_limit_s=10)
    losses = train(images, remat)
    print(remat.plan)
    print("plain losses          ", plain_losses)
    print("rematerialized losses ", losses)
    same = np.allclose(plain_losses, losses, rtol=1e-4)
    kept = remat.plan.measured.peak_bytes <= limit
    before, after = watching.report.baseline.peak_bytes, remat.plan.measured.peak_bytes
    peaks = f"{before / MIB:.1f} → {after / MIB:.1f} MiB"
    print(
        f"{'same losses' if same else 'LOSSES DIFFER'}; {peaks}, "
        f"limit {limit / MIB:.1f} MiB {'kept' if kept else 'NOT KEPT'}"
    )
    return 0 if same and kept else 1


if __name__ == "__main__":
    sys.exit(main())
