"""Small models with what rematerialization gets wrong elsewhere: dropout, batch normalization,
shared weights, control flow."""

import keras
import numpy as np
from keras import layers


def copy_state(state):
    """A copy of every array: a step consumes those that it is given."""
    import jax  # these models are for all frameworks

    return jax.tree.map(jax.numpy.copy, state)


def temp_bytes(compiled):
    """Bytes that are alive only during a call of a compiled step."""
    return compiled.memory_analysis().temp_size_in_bytes


def mixer(blocks=2, tokens=32, dim=64, dropout=0.1, optimizer="sgd"):
    """Blocks of dense layers with normalization, dropout and skip connections."""
    inputs = x = layers.Input((tokens, dim))
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        h = layers.Dense(4 * dim, activation="gelu")(h)
        h = layers.Dropout(dropout)(h) if dropout else h
        x = layers.Add()([x, layers.Dense(dim)(h)])
    return compiled(
        keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), optimizer
    )


def convnet(blocks=1, size=16, filters=8):
    """Convolutions with batch normalization, ReLU and skip connections."""
    inputs = layers.Input((size, size, 3))
    x = layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        h = layers.Conv2D(4 * filters, 1)(x)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        h = layers.DepthwiseConv2D(3, padding="same")(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        x = layers.Add()([x, layers.BatchNormalization()(layers.Conv2D(filters, 1)(h))])
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))))


def residual(blocks=5, size=32, filters=8):
    """Sums of bottlenecks, each followed by ReLU, before smaller images."""
    inputs = layers.Input((size, size, 3))
    x = layers.ReLU()(layers.Conv2D(4 * filters, 3, padding="same")(inputs))
    for at in range(blocks):
        stride = 2 if at == blocks - 1 else 1
        h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 1, stride)(x)))
        h = layers.BatchNormalization()(layers.Conv2D(4 * filters, 1)(h))
        x = layers.ReLU()(
            layers.Add()([layers.Conv2D(4 * filters, 1, stride)(x) if stride > 1 else x, h])
        )
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))))


def pooled(filters=16):
    """Convolutions with max pooling."""
    inputs = x = layers.Input((16, 16, 3))
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x))))


def small(**options):
    """The least with dropout, batch normalization and products."""
    inputs = layers.Input((16,))
    x = layers.BatchNormalization()(layers.Dense(64)(inputs))
    outputs = layers.Dense(10)(layers.Dropout(0.3)(layers.ReLU()(x)))
    return compiled(keras.Model(inputs, outputs), **options)


def head(vocabulary, samples, dropout=0.1, **options):
    """A language model of which all is small but the vocabulary, and a batch of its texts."""
    keras.utils.set_random_seed(0)
    inputs = layers.Input((32,), dtype="int32")
    x = layers.Embedding(512, 32)(inputs)
    x = layers.Dropout(dropout)(x) if dropout else x
    model = keras.Model(inputs, layers.Dense(vocabulary)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **options)
    texts = np.random.default_rng(0).integers(0, 512, (2, samples, 32))
    return model, tuple(texts.astype("int32"))


def regression(width=32):
    """Three dense layers, whose loss is a mean."""
    keras.utils.set_random_seed(0)
    inputs = x = layers.Input((16,))
    for _ in range(3):
        x = layers.Dense(width, activation="tanh")(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return model


def weighted_samples(count):
    """Samples of a regression, with weights of which no two are alike."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 16)), rng.normal(size=(count, 4))
    return x.astype("float32"), y.astype("float32"), np.linspace(0.5, 1.5, count, dtype="float32")


def recurrent(units=16, steps=12):
    """A recurrent layer: its time loop is one op."""
    inputs = layers.Input((steps, 8))
    x = layers.Dropout(0.2)(layers.Dense(32, activation="tanh")(inputs))
    return compiled(keras.Model(inputs, layers.Dense(10)(layers.LSTM(units)(x))))


class Loop(layers.Layer):
    """Multiplies by its kernel several times, by ``jax.lax.scan``."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        import jax

        def once(x, _):
            return keras.ops.tanh(x @ self.kernel.value), None

        return jax.lax.scan(once, x, None, length=6)[0]


def loops(count=3, dim=64):
    """Layers with a loop each, whose stacked results are larger than all else."""
    inputs = x = layers.Input((dim,))
    for _ in range(count):
        x = Loop()(layers.Dense(dim, activation="gelu")(x))
    return compiled(keras.Model(inputs, layers.Dense(10)(x)))


def compiled(model, optimizer="sgd", metrics=("accuracy",)):
    """Compiles a classifier of ten classes."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def batch(model, size=32, seed=0):
    """Returns random samples and labels for a model."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, *model.input_shape[1:])).astype("float32")
    return x, rng.integers(0, 10, size).astype("int32")


def mixed_precision():
    """Half-precision activations with a loss that is scaled: an update is a branch, on whether the
    gradients are finite."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inputs = x = layers.Input((64,))
        for _ in range(3):
            x = layers.Dropout(0.2)(layers.Dense(128, activation="relu")(x))
        return compiled(keras.Model(inputs, layers.Dense(10, dtype="float32")(x)))
    finally:
        keras.config.set_dtype_policy("float32")
