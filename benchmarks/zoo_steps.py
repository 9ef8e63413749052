"""Twelve training steps that are not a plain forward and backward pass, as people write them: with
``train_step`` overridden, several optimizers, random numbers, gradients of gradients.

They follow the ideas of the papers named with each, in small: synthetic data, images of 32 pixels.
Those of one loss run on TensorFlow and on PyTorch, the others on TensorFlow only, because their
steps open gradient tapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

PIXELS, CHANNELS = 32, 3
#: Small, so that losses are compared and not what an untrained network makes of rounding.
_RATE = 1e-5
#: Returns a compiled model and what ``fit`` is given for so many samples.
Build = Callable[[], tuple[keras.Model, Callable[[np.random.Generator, int], dict[str, Any]]]]


def images(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    """Random images, and nothing else."""
    shape = (samples, PIXELS, PIXELS, CHANNELS)
    return {"x": generator.random(shape, dtype=np.float32)}


def labelled_images(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    """Random images with a class of ten."""
    labels = generator.integers(0, 10, samples).astype(np.int32)
    return images(generator, samples) | {"y": labels}


def encoder(filters: int = 32, outputs: int = 32) -> keras.Model:
    """Convolutions with batch normalization, halving the image twice, then one vector."""
    x = inputs = layers.Input((PIXELS, PIXELS, CHANNELS))
    for factor in (1, 2, 4):
        x = layers.Conv2D(factor * filters, 3, padding="same", strides=min(factor, 2))(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(outputs)(layers.GlobalAveragePooling2D()(x)))


def decoder(inputs_width: int = 32, filters: int = 64) -> keras.Model:
    """One vector to an image."""
    x = inputs = layers.Input((inputs_width,))
    side = PIXELS // 4
    x = layers.Reshape((side, side, filters))(layers.Dense(side * side * filters)(x))
    for width in (filters, filters // 2):
        x = layers.Conv2DTranspose(width, 4, strides=2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(CHANNELS, 3, padding="same")(x))


def image_to_image(filters: int = 24) -> keras.Model:
    """Residual convolutions that keep the image's size, with group normalization."""
    x = inputs = layers.Input((PIXELS, PIXELS, CHANNELS))
    x = layers.Conv2D(filters, 3, padding="same")(x)
    for _ in range(4):
        h = layers.Conv2D(filters, 3, padding="same")(
            layers.ReLU()(layers.GroupNormalization(4)(x))
        )
        x = layers.Add()([x, h])
    return keras.Model(inputs, layers.Conv2D(CHANNELS, 3, padding="same")(x))


class Tracked(keras.Model):
    """A model with a metric of its own: the mean of what :meth:`told` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def told(self, loss: Any) -> dict[str, Any]:
        """Returns what a step returns."""
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class OneLoss(Tracked):
    """A model whose step minimizes what :meth:`loss_of` returns for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(0)

    def loss_of(self, data: Any) -> Any:
        """Returns the batch's loss, a scalar."""
        raise NotImplementedError

    def train_step(self, data: Any) -> dict[str, Any]:
        variables = self.trainable_variables
        if keras.backend.backend() == "torch":
            self.zero_grad()
            loss = self.loss_of(data)
            loss.backward()
            gradients = [variable.value.grad for variable in variables]
        else:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        return self.told(loss)


def _compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(_RATE))
    model.built = True  # its parts are
    return model


class VariationalAutoencoder(OneLoss):
    """Kingma & Welling 2014."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(outputs=64), decoder()

    def loss_of(self, data: Any) -> Any:
        mean, log_variance = ops.split(self.encoder(data, training=True), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        image = self.decoder(mean + ops.exp(log_variance / 2) * noise, training=True)
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        return ops.mean(ops.square(data - image)) + ops.mean(divergence) / 2


class Gan(Tracked):
    """Goodfellow et al. 2014; with ``critic_steps`` Gulrajani et al. 2017 (WGAN-GP)."""

    def __init__(self, critic_steps: int = 0):
        super().__init__()
        self.critic, self.generator = encoder(outputs=1), decoder()
        self.critic_steps = critic_steps
        self.seeds = keras.random.SeedGenerator(0)

    def compile(self) -> None:  # two optimizers, as in every GAN
        super().compile()
        self.critic_optimizer = keras.optimizers.Adam(_RATE)
        self.generator_optimizer = keras.optimizers.Adam(_RATE)

    def _fake(self, real: Any) -> Any:
        noise = keras.random.normal((ops.shape(real)[0], 32), seed=self.seeds)
        return self.generator(noise, training=True)

    def _critic_loss(self, real: Any, fake: Any) -> Any:
        told_real, told_fake = self.critic(real, training=True), self.critic(fake, training=True)
        if not self.critic_steps:
            return ops.mean(ops.softplus(-told_real)) + ops.mean(ops.softplus(told_fake))
        share = keras.random.uniform((ops.shape(real)[0], 1, 1, 1), seed=self.seeds)
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            told = self.critic(between, training=True)
        slope = ops.sqrt(ops.sum(ops.square(tape.gradient(told, between)), axis=(1, 2, 3)) + 1e-6)
        penalty = 10.0 * ops.mean(ops.square(slope - 1))
        return ops.mean(told_fake) - ops.mean(told_real) + penalty

    def train_step(self, real: Any) -> dict[str, Any]:
        for _ in range(self.critic_steps or 1):
            fake = self._fake(real)
            with tf.GradientTape() as tape:
                loss = self._critic_loss(real, fake)
            variables = self.critic.trainable_variables
            self.critic_optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            told = self.critic(self._fake(real), training=True)
            fooled = -ops.mean(told) if self.critic_steps else ops.mean(ops.softplus(-told))
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(fooled, variables), variables)
        return self.told(loss + fooled)


class CycleGan(Tracked):
    """Zhu et al. 2017: two generators, two critics, and what goes around comes around."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = image_to_image(), image_to_image()
        self.critics = [encoder(outputs=1), encoder(outputs=1)]

    def compile(self) -> None:
        super().compile()
        self.optimizers = [keras.optimizers.Adam(_RATE) for _ in range(2)]

    def train_step(self, data: Any) -> dict[str, Any]:
        here, far = data
        with tf.GradientTape(persistent=True) as tape:
            made_far = self.there(here, training=True)
            made_here = self.back(far, training=True)
            again = self.back(made_far, training=True), self.there(made_here, training=True)
            cycle = ops.mean(ops.abs(again[0] - here)) + ops.mean(ops.abs(again[1] - far))
            told = [
                (critic(real, training=True), critic(fake, training=True))
                for critic, real, fake in zip(
                    self.critics, (here, far), (made_here, made_far), strict=True
                )
            ]
            fooled = sum(ops.mean(ops.square(fake - 1)) for _, fake in told) + 10.0 * cycle
            caught = sum(
                ops.mean(ops.square(real - 1)) + ops.mean(ops.square(fake)) for real, fake in told
            )
        makers = [*self.there.trainable_variables, *self.back.trainable_variables]
        judges = [v for critic in self.critics for v in critic.trainable_variables]
        self.optimizers[0].apply(tape.gradient(fooled, makers), makers)
        self.optimizers[1].apply(tape.gradient(caught, judges), judges)
        return self.told(fooled + caught)


class SimClr(OneLoss):
    """Chen et al. 2020: two views of an image are nearer to each other than to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.views = keras.Sequential(
            [layers.RandomFlip(seed=1), layers.RandomTranslation(0.1, 0.1, seed=2)]
        )
        self.views.build((None, PIXELS, PIXELS, CHANNELS))

    def call(self, data: Any) -> Any:
        """Returns what an image becomes; on PyTorch Keras builds what draws by it."""
        return self.encoder(self.views(data))

    def loss_of(self, data: Any) -> Any:
        one, other = (
            ops.normalize(self.encoder(self.views(data, training=True), training=True), axis=-1)
            for _ in range(2)
        )
        alike = one @ ops.transpose(other) / 0.1
        labels = ops.arange(ops.shape(data)[0])
        crossed = (
            keras.losses.sparse_categorical_crossentropy(labels, rows, from_logits=True)
            for rows in (alike, ops.transpose(alike))
        )
        return sum(ops.mean(each) for each in crossed) / 2


class Distillation(OneLoss):
    """Hinton et al. 2015: a small network learns what a large one says."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = encoder(64, 10), encoder(32, 10)
        self.teacher.trainable = False

    def loss_of(self, data: Any) -> Any:
        x, y = data
        told, said = self.teacher(x, training=False), self.student(x, training=True)
        right = keras.losses.sparse_categorical_crossentropy(y, said, from_logits=True)
        alike = keras.losses.kl_divergence(ops.softmax(told / 3.0), ops.softmax(said / 3.0))
        return ops.mean(right) + 9.0 * ops.mean(alike)


class MaskedAutoencoder(OneLoss):
    """He et al. 2022: a quarter of the patches is seen, and the others are drawn."""

    def __init__(self, width: int = 64, side: int = 4):
        super().__init__()
        self.side, self.count, self.width = side, (PIXELS // side) ** 2, width
        self.seen = self.count // 4
        self.project, self.draw = layers.Dense(width), layers.Dense(side * side * CHANNELS)
        self.blank = self.add_weight(shape=(width,), initializer="normal", name="blank")
        self.place = layers.Embedding(self.count, width)
        self.encoder = _attention(width, 3)
        self.decoder = _attention(width, 2)
        self.project.build((None, None, side * side * CHANNELS))
        self.draw.build((None, None, width))
        self.place.build()

    def loss_of(self, data: Any) -> Any:
        batch = ops.shape(data)[0]
        patches = ops.image.extract_patches(data, self.side)
        patches = ops.reshape(patches, (batch, self.count, self.side**2 * CHANNELS))
        keys = keras.random.uniform((batch, self.count), seed=self.seeds)
        order = ops.argsort(keys, axis=-1)
        tokens = self.project(patches) + self.place(ops.arange(self.count))
        seen = ops.take_along_axis(tokens, order[:, : self.seen, None], axis=1)
        known = self.encoder(seen, training=True)
        blank = ops.broadcast_to(self.blank, (batch, self.count - self.seen, self.width))
        back = ops.argsort(order, axis=-1)[:, :, None]
        mixed = ops.take_along_axis(ops.concatenate([known, blank], axis=1), back, axis=1)
        mixed = mixed + self.place(ops.arange(self.count))
        drawn = self.draw(self.decoder(mixed, training=True))
        return ops.mean(ops.square(drawn - patches))


def _attention(width: int, blocks: int, heads: int = 4) -> keras.Model:
    """Transformer blocks over a sequence of any length."""
    x = inputs = layers.Input((None, width))
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(h, h)])
        h = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(layers.Dropout(0.1, seed=0)(h))])
    return keras.Model(inputs, x)


class VectorQuantized(OneLoss):
    """Van den Oord et al. 2017 (VQ-VAE): the nearest of a table's vectors, straight through."""

    def __init__(self, width: int = 32, entries: int = 64):
        super().__init__()
        x = inputs = layers.Input((PIXELS, PIXELS, CHANNELS))
        for filters in (32, 64):
            x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
        self.encoder = keras.Model(inputs, layers.Conv2D(width, 1)(x))
        x = inputs = layers.Input((PIXELS // 4, PIXELS // 4, width))
        for filters in (64, 32):
            x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
        self.decoder = keras.Model(inputs, layers.Conv2D(CHANNELS, 3, padding="same")(x))
        self.table = self.add_weight(
            shape=(entries, width), initializer="random_uniform", name="table"
        )

    def loss_of(self, data: Any) -> Any:
        found = self.encoder(data, training=True)
        flat = ops.reshape(found, (-1, found.shape[-1]))
        far = ops.sum(ops.square(self.table), axis=-1) - 2 * flat @ ops.transpose(self.table)
        nearest = ops.reshape(ops.take(self.table, ops.argmin(far, axis=-1), axis=0), found.shape)
        stop = ops.stop_gradient
        drawn = self.decoder(found + stop(nearest - found), training=True)
        table, commitment = (
            ops.mean(ops.square(stop(found) - nearest)),
            ops.mean(ops.square(found - stop(nearest))),
        )
        return ops.mean(ops.square(drawn - data)) + table + commitment / 4


class GraphAttention(OneLoss):
    """Velickovic et al. 2018: attention along the edges of one graph; a sample is a node."""

    def __init__(self, nodes: int = 512, degree: int = 12, width: int = 64, classes: int = 7):
        super().__init__()
        generator = np.random.default_rng(0)
        self.features = ops.convert_to_tensor(
            generator.normal(size=(nodes, 128)).astype(np.float32)
        )
        self.sources = ops.convert_to_tensor(
            generator.integers(0, nodes, nodes * degree).astype(np.int32)
        )
        self.targets = ops.convert_to_tensor(np.repeat(np.arange(nodes), degree).astype(np.int32))
        self.nodes = nodes
        self.rounds = [(layers.Dense(width), layers.Dense(1), layers.Dense(1)) for _ in range(3)]
        self.parts = [layer for each in self.rounds for layer in each]
        self.head = layers.Dense(classes)
        wide = 128
        for project, *scores in self.rounds:
            project.build((None, wide))
            wide = width
            for score in scores:
                score.build((None, width))
        self.head.build((None, width))

    def loss_of(self, data: Any) -> Any:
        nodes, labels = data
        x = self.features
        for project, from_source, to_target in self.rounds:
            x = project(x)
            scores = ops.take(from_source(x), self.sources, axis=0)
            scores = ops.leaky_relu(scores + ops.take(to_target(x), self.targets, axis=0))
            weights = ops.exp(ops.clip(scores, -5.0, 5.0))
            total = ops.segment_sum(weights, self.targets, num_segments=self.nodes)
            moved = weights * ops.take(x, self.sources, axis=0)
            gathered = ops.segment_sum(moved, self.targets, num_segments=self.nodes)
            x = ops.elu(gathered / (total + 1e-6))
        said = ops.take(self.head(x), nodes, axis=0)
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(labels, said, from_logits=True)
        )


def _nodes(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    return {
        "x": generator.integers(0, 512, samples).astype(np.int32),
        "y": generator.integers(0, 7, samples).astype(np.int32),
    }


class Siamese(OneLoss):
    """Schroff et al. 2015: an image is nearer to one of its kind than to one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def loss_of(self, data: Any) -> Any:
        anchor, like, unlike = (self.encoder(part, training=True) for part in data[0])
        near = ops.sum(ops.square(anchor - like), axis=-1)
        far = ops.sum(ops.square(anchor - unlike), axis=-1)
        return ops.mean(ops.relu(near - far + 0.5))


def _triples(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    parts = tuple(images(generator, samples)["x"] for _ in range(3))
    return {"x": parts, "y": np.zeros(samples, np.float32)}


class Diffusion(OneLoss):
    """Song et al. 2021 (DDIM): the noise in an image is told, with a moving average of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = image_to_image(), image_to_image()
        self.average.set_weights(self.network.get_weights())
        self.average.trainable = False

    def loss_of(self, data: Any) -> Any:
        noise = keras.random.normal(ops.shape(data), seed=self.seeds)
        angle = keras.random.uniform((ops.shape(data)[0], 1, 1, 1), 0.02, 1.55, seed=self.seeds)
        noisy = ops.cos(angle) * data + ops.sin(angle) * noise
        return ops.mean(ops.abs(self.network(noisy, training=True) - noise))

    def train_step(self, data: Any) -> dict[str, Any]:
        logs = super().train_step(data)
        for weight, mean in zip(self.network.weights, self.average.weights, strict=True):
            mean.assign(0.999 * mean + 0.001 * weight)
        return logs


def _ctc() -> keras.Model:
    """Graves et al. 2006: a sequence of sounds to a shorter one of letters."""
    x = inputs = layers.Input((96, 32))
    for _ in range(2):
        x = layers.Bidirectional(layers.LSTM(48, return_sequences=True))(x)
    model = keras.Model(inputs, layers.Dense(28)(x))
    model.compile(keras.optimizers.Adam(_RATE), keras.losses.CTC())
    return model


def _spoken(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    return {
        "x": generator.normal(size=(samples, 96, 32)).astype(np.float32),
        "y": generator.integers(1, 28, (samples, 12)).astype(np.int32),
    }


def _pairs(generator: np.random.Generator, samples: int) -> dict[str, Any]:
    return {"x": images(generator, samples)["x"], "y": images(generator, samples)["x"]}


def _several(model: Any) -> keras.Model:
    model.compile()
    model.built = True
    return model


STEPS: dict[str, Build] = {
    "VAE": lambda: (_compiled(VariationalAutoencoder()), images),
    "GAN": lambda: (_several(Gan()), images),
    "WGAN-GP": lambda: (_several(Gan(critic_steps=2)), images),
    "CTC": lambda: (_ctc(), _spoken),
    "SimCLR": lambda: (_compiled(SimClr()), images),
    "distillation": lambda: (_compiled(Distillation()), labelled_images),
    "masked autoencoder": lambda: (_compiled(MaskedAutoencoder()), images),
    "VQ-VAE": lambda: (_compiled(VectorQuantized()), images),
    "graph attention": lambda: (_compiled(GraphAttention()), _nodes),
    "siamese": lambda: (_compiled(Siamese()), _triples),
    "DDIM": lambda: (_compiled(Diffusion()), images),
    "CycleGAN": lambda: (_several(CycleGan()), _pairs),
}
