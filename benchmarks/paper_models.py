"""The six models of the Checkmate paper's maximum batch size experiment, at resolutions that two
CPU cores can train.

Jain et al. 2020, arXiv 1910.02653, section 6.4: VGG19, MobileNet, U-Net, ResNet50, FCN8 and SegNet.
The first, second and fourth are those of ``keras.applications``; the others are built here from
their papers. All are float32 and trained by plain SGD, so that what is resident is the weights and
the batch. Departures from the models' papers: ten classes in place of 1,000; 'same' padding in the
U-Net and half its width; a quarter of the width of the two convolutions in FCN8 that were dense
layers; nearest-neighbour unpooling in SegNet, which does not remember where the maxima were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

_LEARNING_RATE = 1e-6
CLASSES, FCN_CLASSES, SEGNET_CLASSES = 10, 21, 11
#: Channels and convolutions of each stage of VGG16 (Simonyan & Zisserman 2015, table 1, column D).
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


@dataclass(frozen=True)
class PaperModel:
    """One model of the experiment.

    Args:
        name: on the command line and in tables.
        build: returns the compiled model for square images of ``pixels``.
        pixels: resolution.
        is_dense: the target has a class id for every pixel, not one for the image.
        classes: of the target.
        plain_batch: plain Keras's batch whose measured peak becomes the memory limit.
    """

    name: str
    build: Callable[[int], keras.Model]
    pixels: int
    is_dense: bool
    classes: int
    plain_batch: int

    def batch(self, size: int, seed: int = 0) -> tuple[Any, Any]:
        """``size`` random images with class ids, per image or per pixel, as tensors."""
        generator = np.random.default_rng(seed)
        images = generator.random((size, self.pixels, self.pixels, 3), dtype=np.float32)
        shape = (size, self.pixels, self.pixels) if self.is_dense else (size,)
        targets = generator.integers(0, self.classes, shape).astype(np.int32)
        return keras.ops.convert_to_tensor(images), keras.ops.convert_to_tensor(targets)


def _compiled(model: keras.Model) -> keras.Model:
    loss: Any = "sparse_categorical_crossentropy"
    if keras.backend.backend() == "torch":
        loss = _of_pixels
    model.compile(keras.optimizers.SGD(_LEARNING_RATE), loss, jit_compile=False)
    return model


def _of_pixels(targets: Any, predicted: Any) -> Any:
    """The loss by sample, with an image's pixels in one dimension: PyTorch 2.13 differentiates that
    of an image only where channels come first in memory ("grad_input must be contiguous")."""
    samples, classes = ops.shape(targets)[0], predicted.shape[-1]
    return keras.losses.sparse_categorical_crossentropy(
        ops.reshape(targets, (samples, -1)), ops.reshape(predicted, (samples, -1, classes))
    )


def _application(name: str) -> Callable[[int], keras.Model]:
    def build(pixels: int) -> keras.Model:
        return _compiled(
            getattr(keras.applications, name)(
                weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES
            )
        )

    return build


def _two_convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def unet(pixels: int, filters: int = 32, depth: int = 4) -> keras.Model:
    """U-Net (Ronneberger, Fischer, Brox 2015, arXiv 1505.04597, figure 1) with ``filters`` channels
    at the top, where the paper has 64."""
    inputs = x = keras.Input((pixels, pixels, 3))
    skips = []
    for level in range(depth):
        x = _two_convolutions(x, filters * 2**level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = _two_convolutions(x, filters * 2**depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2)(x)
        x = _two_convolutions(layers.Concatenate()([skips[level], x]), filters * 2**level)
    return _compiled(keras.Model(inputs, layers.Conv2D(2, 1, activation="softmax")(x)))


def _vgg16_stages(x: Any) -> list[Any]:
    """The pooled outputs of the five stages of VGG16."""
    pooled = []
    for filters, convolutions in _VGG16:
        for _ in range(convolutions):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
        pooled.append(x)
    return pooled


def fcn8(pixels: int, width: int = 1024) -> keras.Model:
    """FCN-8s (Long, Shelhamer, Darrell 2015, arXiv 1411.4038, figure 3): VGG16 made convolutional,
    scores of three stages added.

    Args:
        pixels: a multiple of 32.
        width: channels of the two convolutions that were VGG16's dense layers; the paper has 4,096.
    """
    inputs = keras.Input((pixels, pixels, 3))
    _, _, pool3, pool4, x = _vgg16_stages(inputs)
    for size in (7, 1):
        x = layers.Dropout(0.5, seed=1)(
            layers.Conv2D(width, size, padding="same", activation="relu")(x)
        )
    x = layers.Conv2D(FCN_CLASSES, 1)(x)
    for skip in (pool4, pool3):
        x = layers.Conv2DTranspose(FCN_CLASSES, 4, strides=2, padding="same", use_bias=False)(x)
        x = layers.Add()([x, layers.Conv2D(FCN_CLASSES, 1)(skip)])
    x = layers.Conv2DTranspose(FCN_CLASSES, 16, strides=8, padding="same", use_bias=False)(x)
    return _compiled(keras.Model(inputs, layers.Softmax()(x)))


def segnet(pixels: int) -> keras.Model:
    """SegNet (Badrinarayanan, Kendall, Cipolla 2015, arXiv 1511.00561, figure 2): VGG16's
    convolutions with batch normalization, and their mirror image."""

    def convolution(x: Any, filters: int) -> Any:
        return layers.ReLU()(
            layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
        )

    inputs = x = keras.Input((pixels, pixels, 3))
    for filters, convolutions in _VGG16:
        for _ in range(convolutions):
            x = convolution(x, filters)
        x = layers.MaxPooling2D()(x)
    narrower = [filters for filters, _ in _VGG16[:-1]][::-1]
    for (filters, convolutions), after in zip(reversed(_VGG16), [*narrower, 64], strict=True):
        x = layers.UpSampling2D()(x)
        for _ in range(convolutions - 1):
            x = convolution(x, filters)
        x = convolution(x, after)
    return _compiled(keras.Model(inputs, layers.Conv2D(SEGNET_CLASSES, 1, activation="softmax")(x)))


PAPER_MODELS = {
    model.name: model
    for model in (
        PaperModel("VGG19", _application("VGG19"), 64, False, CLASSES, 16),
        PaperModel("MobileNet", _application("MobileNet"), 128, False, CLASSES, 12),
        PaperModel("UNet", unet, 96, True, 2, 8),
        PaperModel("ResNet50", _application("ResNet50"), 96, False, CLASSES, 16),
        PaperModel("FCN8", fcn8, 64, True, FCN_CLASSES, 12),
        PaperModel("SegNet", segnet, 64, True, SEGNET_CLASSES, 8),
    )
}
