"""What is used of Keras in private: that it is there, and does what we say of it."""

import keras
import numpy as np
from keras.src.backend.common import global_state

from keras_remat.backends.keras_private import (
    GLOBAL_SEED_GENERATOR,
    layers,
    masks,
    seed_generator_in_place,
)


def test_layers_are_those_of_nested_models_too():
    inner = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4, name="inside")])
    model = keras.Sequential([keras.layers.Input((4,)), inner, keras.layers.Dense(2, name="top")])
    assert {"inside", "top"} <= {layer.name for layer in layers(model)}


def test_masks_are_those_of_the_outputs():
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
    model = keras.Model(inputs, [embedded, keras.layers.Dense(2)(keras.ops.sum(embedded, 1))])
    mask, none = masks(model(np.asarray([[1, 2, 0]])))
    assert np.asarray(mask).tolist() == [[True, True, False]]
    assert none is None


def test_the_generator_of_seeds_is_where_it_is_looked_for():
    """Keras 3.12 has no constant that names the place."""
    keras.utils.clear_session()
    with seed_generator_in_place():
        made = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        assert isinstance(made, keras.random.SeedGenerator)


def test_a_generator_of_seeds_that_nothing_draws_from_leaves_no_name_behind():
    """The names of later ones would be others than without it."""
    names = []
    for is_made in (False, True):
        keras.utils.clear_session()
        if is_made:
            with seed_generator_in_place():
                pass
        names.append([keras.random.SeedGenerator(1).name for _ in range(2)])
    assert names[1] == names[0]
