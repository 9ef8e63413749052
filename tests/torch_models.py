"""Small Keras models with what a recorded PyTorch step gets wrong elsewhere: draws without a seed,
writes to temporaries, numbers that are read, branches, a loss scale, steps and modules of a user's
own."""

import keras
import numpy as np
import torch
from keras import layers, ops

RNG = np.random.default_rng(0)
X = RNG.random((8, 12), dtype="float32")
LABELS = RNG.integers(0, 3, 8).astype("int32")
IMAGES = RNG.random((4, 12, 12, 3), dtype="float32")
TOKENS = RNG.integers(1, 20, (4, 9)).astype("int32")


def dense(optimizer="adam", *, loss="sparse_categorical_crossentropy", metrics=(), **options):
    """A classifier with dropout and normalization."""

    def make():
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((12,))
        x = layers.Dense(16, "relu", kernel_regularizer="l2")(x)
        x = layers.Dropout(0.2, seed=1)(layers.BatchNormalization()(x))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
        rule = optimizer() if callable(optimizer) else optimizer
        model.compile(rule, loss, metrics=[m() if callable(m) else m for m in metrics], **options)
        return model, (X, LABELS)

    return make


def images(*inner):
    """A classifier of images, of the layers that are given as functions."""

    def make():
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((12, 12, 3))
        for layer in inner:
            x = layer()(x)
        model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Flatten()(x)))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model, (IMAGES, LABELS[:4])

    return make


def recurrent():
    """Two recurrent layers over masked tokens, with momentum and clipped norms."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(x)
    x = layers.GRU(6)(layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    rule = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0)
    model.compile(rule, "sparse_categorical_crossentropy")
    return model, (TOKENS, LABELS[:4])


def attention(policy="float32"):
    """Attention with a causal mask, in some precision."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        inputs = keras.Input((9,), dtype="int32")
        x = layers.Embedding(20, 16)(inputs)
        for _ in range(2):
            h = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h, use_causal_mask=True)
            x = x + layers.Dense(16)(layers.Dense(32, "gelu")(x))
        model = keras.Model(inputs, layers.Dense(20, dtype="float32")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(1e-3, clipnorm=1.0), loss, metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    return model, (TOKENS, np.roll(TOKENS, 1, 1))


class Sampling(layers.Layer):
    """Draws around a mean."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        drawn = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * drawn


class Vae(keras.Model):
    """A variational autoencoder with a train step of its own."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.total = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        return self.decoder(self.encoder(x)[2])

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        mean, log_variance, z = self.encoder(x)
        error = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=-1))
        spread = ops.mean(ops.sum(ops.square(mean) + ops.exp(log_variance) - log_variance, -1))
        loss = error + spread
        self.zero_grad()
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.total.update_state(loss)
        return {"loss": self.total.result(), "spread": spread.item()}


def vae():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    x = layers.Dense(8, "relu")(inputs)
    mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
    encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
    code = keras.Input((2,))
    decoder = keras.Model(code, layers.Dense(12)(layers.Dense(8, "relu")(code)))
    model = Vae(encoder, decoder)
    model.compile(keras.optimizers.Adam())
    return model, (X,)


def wrapped():
    """A torch module with a moving average of its own, inside a Keras model."""
    keras.utils.set_random_seed(0)
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
    inputs = keras.Input((12,))
    x = keras.layers.TorchModuleWrapper(inner, output_shape=(None, 6))(inputs)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model, (X, LABELS)


def schedule():
    return keras.optimizers.RMSprop(
        keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=2, warmup_target=0.2)
    )


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "schedule": schedule,
    "nadam": "nadam",
    "accumulated": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
}
METRICS = (
    lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=2),
    keras.metrics.SparseCategoricalCrossentropy,
)
CASES = {
    **{name: dense(rule) for name, rule in OPTIMIZERS.items()},
    "metrics": dense("adagrad", metrics=METRICS),
    "pictures": images(
        lambda: layers.RandomFlip(seed=1),
        lambda: layers.Conv2D(6, 3, padding="same", use_bias=False),
        layers.BatchNormalization,
        layers.LeakyReLU,
        lambda: layers.DepthwiseConv2D(3),
        lambda: layers.SpatialDropout2D(0.2),
        lambda: layers.MaxPooling2D(2, padding="same"),
        lambda: layers.GaussianNoise(0.1),
        lambda: layers.Conv2DTranspose(4, 2, strides=2),
        lambda: layers.Dropout(0.3),
    ),
    "recurrent": recurrent,
    "attention": attention,
    "bfloat16": lambda: attention("mixed_bfloat16"),
    "float16": lambda: attention("mixed_float16"),
    "own step": vae,
    "torch module": wrapped,
}
