"""Peers of the benchmark of cards train as Keras does."""

import keras
import numpy as np
import pytest
from packaging.version import Version


def model_of_layers():
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((2,))
    for _ in range(5):
        x = keras.layers.BatchNormalization()(keras.layers.Dense(2)(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    return model


@pytest.mark.skipif(
    Version(keras.__version__) < Version("3.14"),
    reason="keras.Function begins in the middle of a model from Keras 3.14 on",
)
def test_checkpointed_parts_train_as_the_model_does(benchmark_of):
    """Told nothing, parts ran as in inference: averages of batch normalization stayed where they
    were, and peers computed less."""
    x = np.random.default_rng(0).random((8, 2), "float32")
    plain, peer = model_of_layers(), model_of_layers()
    benchmark_of("cards_peers").checkpointed(peer, 4, "nothing_saveable")
    for model in (plain, peer):
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for expected, found in zip(plain.variables, peer.variables, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=expected.path)
