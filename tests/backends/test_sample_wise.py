"""Whether a validation tells the same in batches of any size."""

import keras
import pytest
from keras import layers

from keras_remat.backends.sample_wise import validates_sample_wise


class OwnLayer(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class JaxLayer(OwnLayer):
    """Stands for Keras's, around code that may do anything."""

    __module__ = "keras.src.utils.jax_layer"


class OwnStep(keras.Model):
    def compute_loss(self, *given, **named):
        return super().compute_loss(*given, **named)


class OwnMetric(keras.metrics.MeanSquaredError):
    pass


def own(y, y_pred):
    return keras.ops.max(keras.ops.abs(y - y_pred))


def own_activation(x):
    return x / keras.ops.sum(x)


def model(between=lambda x: x, loss="mse", metrics=(), kind=keras.Model):
    """Returns a compiled model whose metrics are built, as they are after a step."""
    inputs = x = layers.Input((4,))
    x = layers.BatchNormalization()(layers.Dense(4, "relu")(x))
    made = kind(inputs, layers.Dense(1)(between(x + layers.Dropout(0.5)(x))))
    made.compile("sgd", loss, metrics=list(metrics), run_eagerly=True)
    made.evaluate(keras.ops.zeros((2, 4)), keras.ops.zeros((2, 1)), verbose=0)
    return made


def masked(x):
    return layers.Flatten()(layers.Masking()(layers.Reshape((2, 2))(x)))


@pytest.mark.parametrize(
    ("options", "is_so"),
    [
        (lambda: {"metrics": ["mae", keras.metrics.RootMeanSquaredError()]}, True),
        (lambda: {"loss": keras.losses.Huber()}, True),
        (lambda: {"loss": keras.losses.mean_absolute_error}, True),
        (
            lambda: {"between": lambda x: keras.Sequential([layers.Dense(4), layers.ReLU()])(x)},
            True,
        ),
        (lambda: {"loss": keras.losses.Huber(reduction="sum")}, False),
        (lambda: {"loss": "dice"}, False),
        (lambda: {"loss": keras.losses.Tversky()}, False),
        (lambda: {"loss": keras.losses.Circle()}, False),
        (lambda: {"loss": keras.losses.SparseCategoricalCrossentropy()}, True),
        (lambda: {"loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)}, False),
        (lambda: {"loss": keras.losses.CosineSimilarity(axis=0)}, False),
        (lambda: {"metrics": [keras.losses.MeanSquaredError()]}, False),
        (lambda: {"metrics": [keras.losses.dice]}, False),
        (lambda: {"metrics": [keras.metrics.CosineSimilarity(axis=0)]}, False),
        (lambda: {"loss": own}, False),
        (lambda: {"metrics": [own]}, False),
        (lambda: {"metrics": [OwnMetric()]}, False),
        (lambda: {"kind": OwnStep}, False),
        (lambda: {"between": OwnLayer()}, False),
        (lambda: {"between": JaxLayer()}, False),
        (lambda: {"between": lambda x: keras.Sequential([layers.Dense(4), OwnLayer()])(x)}, False),
        (lambda: {"between": layers.Lambda(lambda x: keras.ops.flip(x, 0))}, False),
        (lambda: {"between": lambda x: x - keras.ops.mean(x, axis=0)}, False),
        (lambda: {"between": lambda x: layers.BatchNormalization()(x, training=True)}, False),
        (lambda: {"between": layers.Dense(4, own_activation)}, False),
        (lambda: {"between": layers.Dense(4, activity_regularizer="l2")}, False),
        (lambda: {"between": layers.UnitNormalization(axis=0)}, False),
        (lambda: {"between": masked}, False),
    ],
)
def test_what_is_known_to_look_at_one_sample_after_the_other(options, is_so):
    made = model(**options())
    assert validates_sample_wise(made) == is_so


def test_a_step_that_was_set_by_hand_may_do_anything():
    made = model()
    made.test_step = made.test_step
    assert not validates_sample_wise(made)
