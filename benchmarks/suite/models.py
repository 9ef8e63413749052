"""The networks of RematBench: work that people train, at the sizes they train it.

Twelve networks of ``keras.applications``, four transformers in the shapes of keras-hub's presets
(built from plain layers, so that nothing has to be downloaded), a U-Net, an unrolled LSTM and a GAN
with a train step of its own. Weights are never trained here: only the graph of the step counts.
Convolutional networks train with momentum, the others with Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks.models import build_unet

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Network:
    """A network of the suite.

    Args:
        build: returns the compiled model.
        sample: what ``train_step`` gets for a batch of one.
        batch_sizes: the three that are traced.
    """

    build: Callable[[], keras.Model]
    sample: Batch
    batch_sizes: tuple[int, int, int]


def _compiled(
    model: keras.Model, loss: str = "sparse_categorical_crossentropy", *, adam: bool = True
) -> keras.Model:
    optimizer = keras.optimizers.Adam() if adam else keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def _image(pixels: int) -> np.ndarray:
    return np.zeros((1, pixels, pixels, 3), np.float32)


def _class() -> np.ndarray:
    return np.zeros((1,), np.int32)


def _tokens(length: int) -> np.ndarray:
    return np.zeros((1, length), np.int32)


def _application(name: str, pixels: int = 224, sizes: tuple[int, int, int] = (32, 64, 128)) -> Any:
    def build() -> keras.Model:
        return _compiled(getattr(keras.applications, name)(weights=None), adam=False)

    return Network(build, (_image(pixels), _class()), sizes)


def _block(x: Any, width: int, heads: int, *, causal: bool = False, memory: Any = None) -> Any:
    """A pre-norm transformer block; with ``memory`` it attends to that, too."""
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
    x = x + attention(y, y, use_causal_mask=causal)
    if memory is not None:
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, memory)
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dropout(0.1)(layers.Dense(width)(y))


def _embedded(tokens: Any, vocabulary: int, width: int) -> Any:
    places = layers.Embedding(tokens.shape[1], width)(keras.ops.arange(tokens.shape[1]))
    return layers.Embedding(vocabulary, width)(tokens) + places


def _bert() -> keras.Model:
    """``bert_base``: 12 blocks of 768, classifies a text."""
    tokens = keras.Input((512,), dtype="int32")
    x = layers.Dropout(0.1)(_embedded(tokens, 30_522, 768))
    for _ in range(12):
        x = _block(x, 768, 12)
    return _compiled(keras.Model(tokens, layers.Dense(2, activation="softmax")(x[:, 0])))


def _gpt2() -> keras.Model:
    """``gpt2_base``: 12 causal blocks of 768, predicts the next token."""
    tokens = keras.Input((512,), dtype="int32")
    x = layers.Dropout(0.1)(_embedded(tokens, 50_257, 768))
    for _ in range(12):
        x = _block(x, 768, 12, causal=True)
    x = layers.LayerNormalization()(x)
    return _compiled(keras.Model(tokens, layers.Dense(50_257, activation="softmax")(x)))


def _vit() -> keras.Model:
    """``vit_base_patch16_224``: 12 blocks of 768 over 196 patches."""
    image = keras.Input((224, 224, 3))
    x = layers.Reshape((196, 768))(layers.Conv2D(768, 16, 16)(image))
    x = x + layers.Embedding(196, 768)(keras.ops.arange(196))
    for _ in range(12):
        x = _block(x, 768, 12)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return _compiled(keras.Model(image, layers.Dense(1000, activation="softmax")(x)))


def _t5() -> keras.Model:
    """``t5_small``: six encoder and six decoder blocks of 512."""
    source, target = (keras.Input((length,), dtype="int32") for length in (512, 128))
    x, y = _embedded(source, 32_128, 512), _embedded(target, 32_128, 512)
    for _ in range(6):
        x = _block(x, 512, 8)
    for _ in range(6):
        y = _block(y, 512, 8, causal=True, memory=x)
    words = layers.Dense(32_128, activation="softmax")(layers.LayerNormalization()(y))
    return _compiled(keras.Model([source, target], words))


def _unet() -> keras.Model:
    """A U-Net (Ronneberger et al. 2015) with batch normalization."""
    model = build_unet(pixels=256, filters=64)
    return _compiled(model, "binary_crossentropy", adam=False)


def _lstm(length: int = 32, width: int = 512) -> keras.Model:
    """Two unrolled LSTM layers; every time step is a few ops of the graph."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(10_000, width)(tokens)
    for _ in range(2):
        x = layers.LSTM(width, return_sequences=True, unroll=True)(x)
    return _compiled(keras.Model(tokens, layers.Dense(10_000, activation="softmax")(x)))


class Gan(keras.Model):
    """A DCGAN (Radford et al. 2015) on 64 pixels whose step trains both networks, one after the
    other."""

    def __init__(self, latent: int = 100, filters: int = 64):
        super().__init__()
        self.latent = latent
        self.seed = keras.random.SeedGenerator(1)
        convolution = {"strides": 2, "padding": "same"}
        self.generator = keras.Sequential([keras.Input((latent,)), layers.Dense(16 * 8 * filters)])
        self.generator.add(layers.Reshape((4, 4, 8 * filters)))
        for width in (4 * filters, 2 * filters, filters):
            self.generator.add(layers.BatchNormalization())
            self.generator.add(layers.ReLU())
            self.generator.add(layers.Conv2DTranspose(width, 4, **convolution))
        self.generator.add(layers.Conv2DTranspose(3, 4, activation="tanh", **convolution))
        self.judge = keras.Sequential([keras.Input((64, 64, 3))])
        for width in (filters, 2 * filters, 4 * filters, 8 * filters):
            self.judge.add(layers.Conv2D(width, 4, **convolution))
            self.judge.add(layers.LeakyReLU(0.2))
        self.judge.add(layers.Flatten())
        self.judge.add(layers.Dense(1))

    def call(self, images: Any) -> Any:
        return self.judge(images)

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = keras.random.normal((tf.shape(images)[0], self.latent), seed=self.seed)
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(noise, training=True)
            real, fake = self.judge(images, training=True), self.judge(made, training=True)
            loss = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(fake))
            made_loss = tf.reduce_mean(tf.nn.softplus(-fake))
        weights = [*self.judge.trainable_weights, *self.generator.trainable_weights]
        gradients = tape.gradient(loss, self.judge.trainable_weights)
        gradients += tape.gradient(made_loss, self.generator.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "made_loss": made_loss}


def _gan() -> keras.Model:
    model = Gan()
    model.compile(keras.optimizers.Adam(2e-4, 0.5), jit_compile=False)
    return model


NETWORKS: dict[str, Network] = {
    "vgg16": _application("VGG16"),
    "vgg19": _application("VGG19"),
    "resnet50": _application("ResNet50"),
    "resnet50v2": _application("ResNet50V2"),
    "inception_v3": _application("InceptionV3", 299),
    "xception": _application("Xception", 299),
    "mobilenet": _application("MobileNet"),
    "mobilenet_v2": _application("MobileNetV2"),
    "mobilenet_v3_large": _application("MobileNetV3Large"),
    "densenet121": _application("DenseNet121"),
    "efficientnet_b0": _application("EfficientNetB0"),
    "convnext_tiny": _application("ConvNeXtTiny"),
    "bert_base": Network(_bert, (_tokens(512), _class()), (8, 16, 32)),
    "gpt2_base": Network(_gpt2, (_tokens(512), _tokens(512)), (4, 8, 16)),
    "vit_base": Network(_vit, (_image(224), _class()), (32, 64, 128)),
    "t5_small": Network(_t5, ((_tokens(512), _tokens(128)), _tokens(128)), (8, 16, 32)),
    "unet": Network(_unet, (_image(256), np.zeros((1, 256, 256, 1), np.float32)), (8, 16, 32)),
    "lstm": Network(_lstm, (_tokens(32), _tokens(32)), (64, 128, 256)),
    "gan": Network(_gan, (_image(64),), (64, 128, 256)),
}
