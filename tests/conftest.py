"""What several test files share."""

import pytest


@pytest.fixture(scope="module")
def models():
    """Small Keras models; skips where Keras does not run on TensorFlow."""
    pytest.importorskip("tensorflow")
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("needs Keras on TensorFlow")
    import keras_models

    return keras_models
