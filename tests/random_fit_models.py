"""Small models for random fits: their parts, their containers and their optimizers."""

from collections import namedtuple
from collections.abc import Mapping

import keras
from keras import layers

#: Room for the numbers of all samples that one case trains.
ROOM = 2000
ON_JAX = keras.backend.backend() == "jax"
ON_TORCH = keras.backend.backend() == "torch"


class Diary(layers.Layer):
    """Writes down the number of every sample that is trained, in order."""

    def build(self, shape):
        self.numbers = self.add_weight(shape=(ROOM,), initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, numbers, training=False):
        if training:
            ones = keras.ops.ones_like(numbers[:, 0], dtype="int32")
            at = self.count + keras.ops.cumsum(ones) - 1
            self.numbers.assign(keras.ops.scatter_update(self.numbers, at[:, None], numbers[:, 0]))
            self.count.assign(self.count + keras.ops.sum(ones))
        return numbers / 1000.0

    @property
    def entries(self):
        count = int(keras.ops.convert_to_numpy(self.count))
        return keras.ops.convert_to_numpy(self.numbers)[:count].astype(int).tolist()


def by_name(things):
    return {str(at): one for at, one in enumerate(things)}


#: How a model holds its layers and variables.
CONTAINERS = {
    "list": list,
    "dict": by_name,
    "tuple": tuple,
    "named tuple": lambda things: namedtuple("Things", list("pqrs"[: len(things)]))(*things),
    "nested": lambda things: {"first": (things[0],), "rest": [by_name(things[1:])]},
}


class AddsLoss(layers.Layer):
    """Adds a loss of its own, of what passes."""

    def call(self, x):
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(x)))
        return x


def _added(x, numbers):
    return x + layers.Dense(6)(x)


def _attention(x, numbers):
    x = layers.Reshape((3, 2))(x)
    return layers.Flatten()(layers.MultiHeadAttention(2, 2)(x, x))


def _convolution(x, numbers):
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(layers.Reshape((6, 1))(x))
    return layers.Dense(6)(layers.Flatten()(layers.MaxPooling1D(2)(x)))


def _embedding(x, numbers):
    return x + layers.Flatten()(layers.Embedding(10, 6)(keras.ops.cast(numbers, "int32") % 10))


def _masked(x, numbers):
    return layers.GRU(6)(layers.Masking()(layers.Reshape((3, 2))(x)))


def _shared(x, numbers):
    layer = layers.Dense(6, "tanh")
    return layer(layer(x))


#: What a functional model may have between its first layer and its ends: of six features, six.
PARTS = {
    "added": _added,
    "attention": _attention,
    "batch normalization": lambda x, numbers: layers.BatchNormalization()(x),
    "constraint": lambda x, numbers: layers.Dense(6, kernel_constraint="unit_norm")(x),
    "convolution": _convolution,
    "embedding": _embedding,
    "frozen": lambda x, numbers: layers.Dense(6, trainable=False)(x),
    "layer normalization": lambda x, numbers: layers.LayerNormalization()(x),
    "lstm": lambda x, numbers: layers.Bidirectional(layers.LSTM(3))(layers.Reshape((3, 2))(x)),
    "masked": _masked,
    "mixed precision": lambda x, numbers: layers.Dense(6, dtype="mixed_bfloat16")(x),
    "nested": lambda x, numbers: keras.Sequential([keras.Input((6,)), layers.Dense(6, "relu")])(x),
    "noise": lambda x, numbers: layers.GaussianNoise(0.1)(x),
    "own loss": lambda x, numbers: AddsLoss()(x),
    "regularizers": lambda x, numbers: layers.Dense(
        6, kernel_regularizer="l2", activity_regularizer="l1"
    )(x),
    "seeded dropout": lambda x, numbers: layers.Dropout(0.3, seed=7)(x),
    "shared": _shared,
    "spectral": lambda x, numbers: layers.SpectralNormalization(layers.Dense(6))(x),
}
#: Whose variables Keras's own step that finds no more data changes once more.
CHANGED_WITHOUT_DATA = {"constraint", "noise", "seeded dropout", "spectral"}
RANDOM = {"noise", "seeded dropout"}
#: Optimizer → what makes it.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "clipped": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
    ),
    "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
}


class Held(keras.Model):
    """Holds its layers and variables in containers; built by its first call."""

    def __init__(self, container, dropout):
        super().__init__()
        self.diary, make = Diary(name="diary"), CONTAINERS[container]
        hidden = layers.Dense(6, activation="tanh")
        self.blocks = make([hidden, layers.Dropout(dropout), layers.Dense(1)])
        self.scales = make([self.add_weight(initializer="ones", name=name) for name in "ab"])

    def call(self, numbers, training=False):
        x = self.diary(numbers, training=training)
        for block in _things_in(self.blocks):
            x = block(x)
        for scale in _things_in(self.scales):
            x = scale * x
        return x


class UpdatesAPart(Held):
    """Has a train step of its own, which leaves some trainable variables alone."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def train_step(self, *given):
        return self._on_jax(*given) if ON_JAX else self._on_others(*given)

    def _on_others(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred, loss, gradients = self._gradients(x, y, weight)
        self.optimizer.apply(gradients, self.trainable_variables[1:])
        self.mean_loss.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        metrics = self.compute_metrics(x, y, y_pred, sample_weight=weight)
        return metrics | {"loss": self.mean_loss.result()}

    def _gradients(self, x, y, weight):
        chosen = self.trainable_variables[1:]
        if ON_TORCH:
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
            loss.backward()
            return y_pred, loss.detach(), [variable.value.grad for variable in chosen]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
        return y_pred, loss, tape.gradient(loss, chosen)

    def _on_jax(self, state, data):
        logs, (trainable, *others) = super().train_step(state, data)
        return logs, ([state[0][0], *trainable[1:]], *others)


class CountsCalls:
    """Makes a train function of its own, which notes how often it was called."""

    calls, _own = 0, None

    def make_train_function(self, force=False):
        super().make_train_function(force)
        kerass = self.train_function
        if kerass is self._own:
            return

        def own(*given):
            self.calls += 1
            return kerass(*given)

        self.train_function = self._own = own


class HeldCountsCalls(CountsCalls, Held):
    pass


class ModelCountsCalls(CountsCalls, keras.Model):
    pass


def _things_in(container):
    if isinstance(container, Mapping):
        container = container.values()
    elif not isinstance(container, (list, tuple)):
        return [container]
    return [thing for inner in container for thing in _things_in(inner)]
