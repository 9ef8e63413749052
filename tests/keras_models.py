"""Small Keras models with what rematerialization gets wrong elsewhere: dropout, batch
normalization, control flow, own train steps.

Every builder seeds Keras first, so two calls give models with equal weights and equal dropout
masks. ``make()[1]`` is one batch.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def _compiled(model, loss="mse", **options):
    model.compile(options.pop("optimizer", "adam"), loss=loss, **options)
    return model


def _seeded(seed=0):
    keras.utils.set_random_seed(seed)
    return np.random.default_rng(seed)


def mlp(batch=32, width=64, blocks=2, dropout=0.1, **options):
    """Dense blocks with GELU and dropout."""
    rng = _seeded()
    inputs = x = layers.Input((16,))
    for _ in range(blocks):
        x = layers.Dense(width, activation="gelu")(x)
        x = layers.Dropout(dropout)(x) if dropout else x
    options.setdefault("metrics", ["mae"])
    model = _compiled(keras.Model(inputs, layers.Dense(1)(x)), **options)
    return model, (rng.random((batch, 16), "float32"), rng.random((batch, 1), "float32"))


def wide_mlp(batch=2048, width=512, blocks=6, **options):
    """Activations of 4 MiB: large enough for the CPU's allocator to count."""
    return mlp(batch, width, blocks, **options)


def convnet(batch=8, size=16, filters=8, blocks=1, **options):
    """Convolutions with batch normalization, ReLU, skip connections and dropout."""
    rng = _seeded()
    inputs = layers.Input((size, size, 3))
    x = layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        h = layers.Conv2D(2 * filters, 1)(x)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.DepthwiseConv2D(3, padding="same")(h)
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(filters, 1)(h))])
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    options.setdefault("metrics", ["accuracy"])
    model = _compiled(keras.Model(inputs, layers.Dense(4)(x)), _sparse(), **options)
    return model, (rng.random((batch, size, size, 3), "float32"), rng.integers(0, 4, batch))


def segmenter(batch=24, size=64, classes=3):
    """A class per pixel: the sparse loss's gradient begins with a constant of the targets' size."""
    rng = _seeded()
    inputs = layers.Input((size, size, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    model = _compiled(keras.Model(inputs, layers.Conv2D(classes, 1)(x)), _sparse())
    return model, (
        rng.random((batch, size, size, 2), "float32"),
        rng.integers(0, classes, (batch, size, size)).astype("int32"),
    )


def _sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def transformer(batch=4, tokens=16, dim=32, **options):
    """One encoder block with dropout in attention and behind the dense layers, on embedded
    tokens."""
    rng = _seeded()
    inputs = layers.Input((tokens,), dtype="int32")
    x = layers.Embedding(50, dim)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, dim // 2, dropout=0.1)(x, x))
    h = layers.Dropout(0.1)(layers.Dense(dim)(layers.Dense(2 * dim, activation="gelu")(x)))
    x = layers.LayerNormalization()(x + h)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    model = _compiled(model, _sparse(), **options)
    return model, (rng.integers(0, 50, (batch, tokens)), rng.integers(0, 4, batch))


def lstm(batch=4, steps=6, **options):
    """A bidirectional LSTM that stays a loop, with dropout on its inputs."""
    rng = _seeded()
    inputs = layers.Input((steps, 5))
    x = layers.Bidirectional(layers.LSTM(8, dropout=0.1))(inputs)
    options.setdefault("optimizer", keras.optimizers.RMSprop(clipnorm=1.0))
    model = _compiled(keras.Model(inputs, layers.Dense(1)(x)), **options)
    return model, (rng.random((batch, steps, 5), "float32"), rng.random((batch, 1), "float32"))


def two_by_two(batch=8, weighted=True):
    """Inputs and outputs in dictionaries, one input used twice, a loss and a weight per output."""
    rng = _seeded()
    a, b = layers.Input((6,), name="a"), layers.Input((4,), name="b")
    joined = layers.Concatenate()([layers.Dense(8, activation="tanh")(a), b])
    outputs = {
        "p": layers.Dense(1, name="p")(joined),
        "q": layers.Dense(3, name="q")(layers.Add()([a, a])),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        "sgd",
        loss={"p": "mse", "q": _sparse()},
        loss_weights={"p": 0.3, "q": 1.0},
        weighted_metrics={"p": ["mae"]},
    )
    x = {"a": rng.random((batch, 6), "float32"), "b": rng.random((batch, 4), "float32")}
    y = {"p": rng.random((batch, 1), "float32"), "q": rng.integers(0, 3, batch)}
    weights = {"p": rng.random(batch, "float32"), "q": rng.random(batch, "float32")}
    return model, ((x, y, weights) if weighted else (x, y))


def mixed_precision(batch=8, policy="mixed_float16", make=convnet):
    """A model; in ``mixed_float16`` its optimizer scales the loss, which takes an ``If``."""
    keras.config.set_dtype_policy(policy)
    try:
        return make(batch)
    finally:
        keras.config.set_dtype_policy("float32")


@keras.saving.register_keras_serializable("keras_remat_tests")
class VAE(keras.Model):
    """A variational autoencoder with its own ``train_step``, sampling and metric."""

    def __init__(self, **options):
        super().__init__(**options)
        self.encoder, self.decoder = layers.Dense(8, activation="relu"), layers.Dense(12)
        self.mean, self.log_variance = layers.Dense(3), layers.Dense(3)
        self.seeds = keras.random.SeedGenerator(7)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + keras.ops.exp(0.5 * log_variance) * keras.random.normal(
            keras.ops.shape(mean), seed=self.seeds
        )
        return self.decoder(z), mean, log_variance

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            y, mean, log_variance = self(x)
            divergence = -0.5 * keras.ops.mean(
                1 + log_variance - mean**2 - keras.ops.exp(log_variance)
            )
            loss = keras.ops.mean((x - y) ** 2) + 0.1 * divergence
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.total.update_state(loss)
        return {"total": self.total.result()}


def vae(batch=8, optimizer="adam"):
    rng = _seeded()
    model = VAE()
    model.compile(optimizer)
    x = rng.random((batch, 12), "float32")
    model(x[:1])
    return model, (x,)


class GAN(keras.Model):
    """Two networks, two optimizers, one ``train_step``."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [layers.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(6)]
        )
        self.discriminator = keras.Sequential(
            [layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.d_tracker, self.g_tracker = (
            keras.metrics.Mean(name="d_loss"),
            keras.metrics.Mean(name="g_loss"),
        )
        self.built = True

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal((keras.ops.shape(x)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            real, fake = self.discriminator(x), self.discriminator(self.generator(noise))
            d_loss = loss_of(keras.ops.ones_like(real), real) + loss_of(
                keras.ops.zeros_like(fake), fake
            )
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fake = self.discriminator(
                self.generator(noise)
            )  # by the discriminator that was just updated
            g_loss = loss_of(keras.ops.ones_like(fake), fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def gan(batch=8):
    rng = _seeded()
    model = GAN()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.SGD(1e-2))
    return model, (rng.random((batch, 6), "float32"),)


class Trim(layers.Layer):
    """Drops the steps that no sample has: how long its output is, only the step that runs knows."""

    def call(self, x):
        steps = tf.reduce_max(tf.reduce_sum(tf.cast(x[:, :, 0] > 0, tf.int32), 1))
        return x[:, :steps]


def trimmed(batch=8, steps=12):
    """Views whose shapes ops compute when they run."""
    rng = _seeded()
    inputs = layers.Input((steps, 4))
    x = Trim()(inputs)
    for _ in range(2):
        x = layers.Dense(8, activation="gelu")(x)
    model = _compiled(keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x))))
    x, y = rng.random((batch, steps, 4), "float32"), rng.random((batch, 1), "float32")
    x[:, steps // 2 :] = 0
    return model, (x, y)


#: Every kind of model, by name.
MODELS = {
    "mlp": mlp,
    "convnet": convnet,
    "transformer": transformer,
    "lstm": lstm,
    "two_by_two": two_by_two,
    "mixed_precision": mixed_precision,
    "vae": vae,
    "gan": gan,
    "trimmed": trimmed,
}


def variables_of(model):
    """Every variable a train step may write: weights, seeds, metrics, and those of all
    optimizers."""
    optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    optimizers += [model.optimizer] if getattr(model, "optimizer", None) is not None else []
    distinct = {
        id(v): v
        for v in [
            *model.variables,
            *model.metrics_variables,
            *(v for o in optimizers for v in o.variables),
        ]
    }
    return list(distinct.values())


def state_of(model):
    return [np.asarray(v.numpy()) for v in variables_of(model)]


def assert_same_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(
            a.view(np.uint8) if a.ndim else a, b.view(np.uint8) if b.ndim else b
        )
