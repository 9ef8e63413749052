"""The models the benchmarks train: eleven small versions of real work, with synthetic data.

Every case is big enough that its activations matter (megabytes each) and small enough for a CPU.
Batches differ from step to step, so that a step that reads something stale cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import layers

CLASSES = 10
#: Small, so that the comparison of losses shows the steps' rounding and not what an untrained
#: network makes of it: at usual rates two runs of the same plain ``fit`` part after a few steps.
_LEARNING_RATE = 1e-6
TOKENS = 1000

#: What ``fit`` is given for a number of samples: ``x``, and where there are any ``y`` and
#: ``sample_weight``.
Data = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A compiled model with its data.

    Args:
        name: on the command line and in tables.
        build: returns the compiled model, not yet built.
        data: ``data(generator, samples)``.
        batch_size: samples per step.
        is_cnn: counts in the geometric means over the CNNs.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator, int], Data]
    batch_size: int
    is_cnn: bool = False

    def steps(self, count: int, seed: int = 0) -> Data:
        """Data for ``count`` steps."""
        return self.data(np.random.default_rng(seed), count * self.batch_size)


def batches(data: Data, batch_size: int) -> list[tuple[Any, ...]]:
    """The data as ``train_step`` gets it: one tensor structure per full batch."""
    samples = len(keras.tree.flatten(data)[0])
    return [
        keras.tree.map_structure(
            lambda a, at=at: keras.ops.convert_to_tensor(a[at : at + batch_size]),
            keras.utils.pack_x_y_sample_weight(data["x"], data.get("y"), data.get("sample_weight")),
        )
        for at in range(0, samples - batch_size + 1, batch_size)
    ]


def _images(pixels: int) -> Callable[[np.random.Generator, int], Data]:
    def data(generator: np.random.Generator, samples: int) -> Data:
        return {
            "x": generator.random((samples, pixels, pixels, 3), dtype=np.float32),
            "y": generator.integers(0, CLASSES, (samples,)).astype(np.int32),
        }

    return data


def _application(
    name: str, optimizer: Callable[[], keras.optimizers.Optimizer], pixels: int = 128
) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model: keras.Model = getattr(keras.applications, name)(
            weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES
        )
        model.compile(
            optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
        )
        return model

    return build


def _momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(_LEARNING_RATE, momentum=0.9)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(_LEARNING_RATE)


def _convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU()(x)
    return x


def build_unet(pixels: int = 128, filters: int = 16, depth: int = 4) -> keras.Model:
    """A U-Net (Ronneberger et al. 2015) with batch normalization: its skip connections live from
    the top of the forward phase to the end."""
    inputs = x = keras.Input((pixels, pixels, 3))
    skips = []
    for level in range(depth):
        x = _convolutions(x, filters * 2**level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _convolutions(x, filters * 2**depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2)(x)
        x = _convolutions(layers.Concatenate()([x, skips[level]]), filters * 2**level)
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile(_adam(), "binary_crossentropy", jit_compile=False)
    return model


def _masks(generator: np.random.Generator, samples: int, pixels: int = 128) -> Data:
    return {
        "x": generator.random((samples, pixels, pixels, 3), dtype=np.float32),
        "y": generator.integers(0, 2, (samples, pixels, pixels, 1)).astype(np.float32),
    }


def build_transformer(
    length: int = 256, width: int = 128, heads: int = 4, blocks: int = 4
) -> keras.Model:
    """A pre-norm transformer encoder with dropout in attention and in both residual branches."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(TOKENS, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y)
        x = x + layers.Dropout(0.1)(y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
        x = x + layers.Dropout(0.1)(y)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_adam(), loss, metrics=["accuracy"], jit_compile=False)
    return model


def _sentences(length: int) -> Callable[[np.random.Generator, int], Data]:
    def data(generator: np.random.Generator, samples: int) -> Data:
        return {
            "x": generator.integers(0, TOKENS, (samples, length)).astype(np.int32),
            "y": generator.integers(0, CLASSES, (samples,)).astype(np.int32),
        }

    return data


def build_bilstm(length: int = 96, width: int = 128) -> keras.Model:
    """Two bidirectional LSTM layers and a dense block over every position; the recurrences are
    ``While`` ops."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(TOKENS, width)(inputs)
    x = layers.Bidirectional(layers.LSTM(width, return_sequences=True))(x)
    x = layers.LayerNormalization()(layers.Dense(4 * width, activation="gelu")(x))
    x = layers.Bidirectional(layers.LSTM(width // 2))(x)
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))
    model.compile(
        _adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    return model


class VariationalAutoencoder(keras.Model):
    """A convolutional VAE (Kingma & Welling 2013) with a train step of its own, written for
    TensorFlow and PyTorch."""

    def __init__(self, pixels: int = 64, latent: int = 16, filters: int = 32):
        super().__init__()
        quarter = pixels // 4
        self.latent = latent
        self.seed = keras.random.SeedGenerator(1)
        self.loss_mean, self.divergence_mean = (
            keras.metrics.Mean("loss"),
            keras.metrics.Mean("divergence"),
        )
        relu = {"padding": "same", "activation": "relu"}
        self.encoder = keras.Sequential(
            [
                keras.Input((pixels, pixels, 3)),
                layers.Conv2D(filters, 3, **relu),
                layers.Conv2D(filters, 3, 2, **relu),
                layers.Conv2D(2 * filters, 3, **relu),
                layers.Conv2D(2 * filters, 3, 2, **relu),
                layers.Flatten(),
                layers.Dense(2 * latent),
            ]
        )
        self.decoder = keras.Sequential(
            [
                keras.Input((latent,)),
                layers.Dense(quarter * quarter * 2 * filters, activation="relu"),
                layers.Reshape((quarter, quarter, 2 * filters)),
                layers.Conv2D(2 * filters, 3, **relu),
                layers.Conv2DTranspose(2 * filters, 3, 2, **relu),
                layers.Conv2D(2 * filters, 3, **relu),
                layers.Conv2DTranspose(filters, 3, 2, **relu),
                layers.Conv2D(filters, 3, **relu),
                layers.Conv2D(3, 3, padding="same", activation="sigmoid"),
            ]
        )

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_mean, self.divergence_mean]

    def call(self, images: Any) -> Any:
        return self.decoder(self.encoder(images)[:, : self.latent])

    def losses_of(self, images: Any) -> tuple[Any, Any]:
        """Returns the loss, and the divergence in it."""
        encoded = self.encoder(images, training=True)
        mean, log_variance = encoded[:, : self.latent], encoded[:, self.latent :]
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed)
        decoded = self.decoder(mean + keras.ops.exp(0.5 * log_variance) * noise, training=True)
        pixel_loss = keras.losses.binary_crossentropy(images, decoded)
        reconstruction = keras.ops.mean(keras.ops.sum(pixel_loss, axis=(1, 2)))
        terms = 1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance)
        divergence = -0.5 * keras.ops.mean(keras.ops.sum(terms, axis=1))
        return reconstruction + divergence, divergence

    def train_step(self, data: Any) -> dict[str, Any]:
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        on_torch = keras.backend.backend() == "torch"
        step = self._torch_step if on_torch else self._tensorflow_step
        loss, divergence = step(images)
        self.loss_mean.update_state(loss)
        self.divergence_mean.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}

    def _tensorflow_step(self, images: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss, divergence = self.losses_of(images)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return loss, divergence

    def _torch_step(self, images: Any) -> tuple[Any, Any]:
        import torch

        self.zero_grad()
        loss, divergence = self.losses_of(images)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return loss.detach(), divergence.detach()


def build_vae() -> keras.Model:
    """The compiled :class:`VariationalAutoencoder`."""
    model = VariationalAutoencoder()
    model.compile(_adam(), jit_compile=False)
    return model


def _unlabelled_images(generator: np.random.Generator, samples: int) -> Data:
    return {"x": generator.random((samples, 64, 64, 3), dtype=np.float32)}


def build_two_inputs() -> keras.Model:
    """An image and a table row in, a class and a number out, both losses weighted per sample."""
    image, row = keras.Input((64, 64, 3), name="image"), keras.Input((20,), name="row")
    x = _convolutions(image, 32)
    x = _convolutions(layers.MaxPooling2D()(x), 64)
    x = layers.Concatenate()(
        [layers.GlobalAveragePooling2D()(x), layers.Dense(16, activation="relu")(row)]
    )
    kind, amount = (
        layers.Dense(5, activation="softmax", name="kind"),
        layers.Dense(1, name="amount"),
    )
    model = keras.Model({"image": image, "row": row}, {"kind": kind(x), "amount": amount(x)})
    losses = {"kind": "sparse_categorical_crossentropy", "amount": "mse"}
    model.compile(_adam(), losses, metrics={"kind": ["accuracy"]}, jit_compile=False)
    return model


def _rows(generator: np.random.Generator, samples: int) -> Data:
    image, row = (samples, 64, 64, 3), (samples, 20)
    return {
        "x": {
            "image": generator.random(image, dtype=np.float32),
            "row": generator.random(row, dtype=np.float32),
        },
        "y": {
            "kind": generator.integers(0, 5, (samples,)).astype(np.int32),
            "amount": generator.random((samples, 1), dtype=np.float32),
        },
        "sample_weight": {
            key: generator.random((samples,), dtype=np.float32) for key in ("kind", "amount")
        },
    }


def build_mixed_precision() -> keras.Model:
    """A CNN under ``mixed_float16``: half-precision activations, a dynamically scaled loss, an
    update only where gradients are finite."""
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        inputs = x = keras.Input((64, 64, 3))
        for filters in (32, 64):
            x = layers.MaxPooling2D()(_convolutions(x, filters))
        x = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))
        model.compile(
            _adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
        )
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    return model


CASES = {
    case.name: case
    for case in (
        Case("VGG16", _application("VGG16", _momentum), _images(128), 8, is_cnn=True),
        Case("ResNet50", _application("ResNet50", _momentum), _images(128), 8, is_cnn=True),
        Case("MobileNetV2", _application("MobileNetV2", _adam), _images(128), 8, is_cnn=True),
        Case("EfficientNetB0", _application("EfficientNetB0", _adam), _images(128), 8, is_cnn=True),
        Case("DenseNet121", _application("DenseNet121", _momentum), _images(128), 8, is_cnn=True),
        Case("unet", build_unet, _masks, 8, is_cnn=True),
        Case("transformer", build_transformer, _sentences(256), 8),
        Case("bilstm", build_bilstm, _sentences(96), 32),
        Case("vae", build_vae, _unlabelled_images, 32),
        Case("two_inputs", build_two_inputs, _rows, 32),
        Case("mixed_float16", build_mixed_precision, _images(64), 32, is_cnn=True),
    )
}


def make(name: str, batch_size: int | None = None) -> tuple[keras.Model, Case]:
    """Returns the compiled model of a case, its weights drawn from a fixed seed, with the case.

    Args:
        name: of the case.
        batch_size: samples per step; ``None`` for the case's own.

    Raises:
        KeyError: no case has that name.
    """
    case = CASES[name]
    if batch_size is not None:
        case = replace(case, batch_size=batch_size)
    keras.utils.set_random_seed(0)
    return case.build(), case
