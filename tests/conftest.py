"""What several test files share."""

from collections import Counter

import pytest

#: It waits minutes for a process of its own.
LONGEST = "test_jax.py"


def pytest_collection_modifyitems(items):
    """The file that takes longest first, then those with the most tests, so that workers that get
    whole files end at about the same time."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name != LONGEST, -tests[item.path], str(item.path)))


@pytest.fixture(scope="module")
def models():
    """Small Keras models; skips where Keras does not run on TensorFlow."""
    pytest.importorskip("tensorflow")
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("needs Keras on TensorFlow")
    import keras_models

    return keras_models
