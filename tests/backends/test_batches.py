"""Batches to plan with."""

import gc
import weakref
from collections import OrderedDict

import keras
import numpy as np
import pytest
import scipy.sparse

from keras_remat.backends.batches import batch_bytes, batch_size_of, leaves_of
from keras_remat.backends.example_batches import check_shapes, example_batch, fixed_batch
from keras_remat.errors import UnknownBatchError, UnsupportedModelError


def model_with(loss, units=3):
    inputs = keras.layers.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(units)(inputs))
    model.compile("sgd", loss)
    return model


def test_an_int_gives_what_inputs_and_loss_ask_for():
    x, y = example_batch(model_with("sparse_categorical_crossentropy"), 7)
    assert (x.shape, y.shape, y.dtype) == ((7, 5), (7,), np.int32)
    assert y.max() < 3
    x, y = example_batch(model_with(keras.losses.MeanSquaredError()), np.int64(2))
    assert (x.shape, y.shape) == ((2, 5), (2, 3))


def test_outputs_without_a_loss_get_no_target():
    inputs = keras.layers.Input((5,))
    outputs = {name: keras.layers.Dense(2)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse"})
    x, y = example_batch(model, 4)
    assert set(y) == {"a"}
    model.train_on_batch(x, y)


def test_bytes_are_those_of_the_numbers():
    arrays = np.ones((4, 3), "float32"), {"a": np.ones((4,), "int64"), "b": None}
    assert batch_bytes(arrays) == 4 * 3 * 4 + 4 * 8
    assert batch_bytes(keras.tree.map_structure(keras.ops.convert_to_tensor, arrays[0])) == 48


def test_leaves_are_those_of_keras_and_are_not_held():
    """On PyTorch Keras's function holds what it is given until garbage is collected."""
    batch = {"b": 1, "a": (2, None, OrderedDict(d=3, c={"f": 4, "e": 5})), "c": [6]}
    assert leaves_of(batch) == keras.tree.flatten(batch)
    array = np.ones((2, 3), np.float32)
    watch = weakref.ref(array)
    gc.disable()
    try:
        assert batch_size_of(({"x": array},)) == 2
        assert batch_bytes([array]) == 24
        del array
        assert watch() is None
    finally:
        gc.enable()


def test_specs_become_arrays_and_arrays_stay():
    array = np.ones((2, 3), "float32")
    x, y = example_batch(None, (keras.KerasTensor((2, 5), "float32"), array))
    assert (x.shape, x.dtype) == ((2, 5), np.float32)
    assert y is array


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        (np.ones((2, 3)), "float32", (2, 3)),
        (np.ones((2, 3), "float16"), "float32", (2, 3)),
        (np.ones((2, 3), "int64"), "int64", (2, 3)),
        (np.ones((2,), bool), "bool", (2,)),
        (np.array(["a", "b"]), "<U1", (2,)),
    ],
)
def test_arrays_have_the_types_that_fit_gives_them(given, dtype, shape):
    array = example_batch(None, (given,))[0]
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)


def test_tables_are_arrays_as_in_fit():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    x, y = example_batch(None, (table, table["b"]))
    assert (x.dtype, x.shape) == (np.float32, (2, 2))
    assert (y.dtype, y.shape) == (np.int64, (2, 1))


def test_specs_are_taken_at_their_word():
    (array,) = example_batch(None, (keras.KerasTensor((2, 5), "float64"),))
    assert array.dtype == np.float64


def test_one_weight_for_each_sample_is_one_for_each_target():
    x = np.ones((2, 3), "float32")
    *_, weights = example_batch(None, (x, {"a": x, "b": x}, np.ones(2)))
    assert {name: array.shape for name, array in weights.items()} == {"a": (2,), "b": (2,)}
    assert example_batch(None, (x, [x, x], None))[2] is None
    assert len(example_batch(None, (x, [x, x], [np.ones(2), np.ones(2)]))[2]) == 2


def test_the_same_seed_gives_the_same_batch():
    model = model_with("mse")
    np.testing.assert_array_equal(
        example_batch(model, 4, seed=3)[0], example_batch(model, 4, seed=3)[0]
    )


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (True, TypeError),
        ("8", TypeError),
        (2.5, TypeError),
        (None, TypeError),
        (([[1.0, 2.0]], [1.0]), TypeError),
        ((np.ones((0, 5)), np.ones((0, 3))), ValueError),
    ],
)
def test_wrong_batches_are_refused(batch, error):
    with pytest.raises(error, match="batch"):
        example_batch(model_with("mse"), batch)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras takes none on PyTorch")
def test_sparse_and_ragged_data_are_refused():
    """A dense batch of their shape would be planned for, which nobody trains."""
    inputs = keras.Input((5,), sparse=True, name="a")
    model = keras.Model({"a": inputs}, keras.layers.Dense(3)(inputs))
    model.compile("sgd", "mse")
    matrix, y = scipy.sparse.csr_matrix(np.eye(5, dtype="float32")), np.ones((5, 3), "float32")
    cases = [4, ({"a": matrix}, y), (matrix.tocoo(), y), (scipy.sparse.csr_array(matrix), y)]
    cases += [(keras.KerasTensor((5, 5), sparse=True), y)]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        arrays = [tf.sparse.eye(5), tf.ragged.constant([[1.0], [2.0, 3.0]])]
        cases += [(x, y) for x in (*arrays, *map(tf.type_spec_from_value, arrays))]
    elif keras.backend.backend() == "jax":
        from jax.experimental.sparse import BCOO

        cases += [(BCOO.fromdense(np.eye(5)), y)]
    for case in cases:
        with pytest.raises(UnsupportedModelError, match="needs dense"):
            example_batch(model, case)
    assert example_batch(model, ({"a": np.eye(5)}, y))[0]["a"].shape == (5, 5)


def test_what_does_not_follow_is_asked_for():
    with pytest.raises(ValueError, match="give a batch"):
        example_batch(model_with(lambda y, p: keras.ops.mean(p)), 4)
    with pytest.raises(ValueError, match="give a batch"):
        example_batch(keras.Sequential([keras.layers.Dense(2)]), 4)
    with pytest.raises(ValueError, match="strings do not follow"):
        example_batch(None, (keras.KerasTensor((2,), "string"),))
    with pytest.raises(ValueError, match="not fully known"):
        example_batch(None, (keras.KerasTensor((None, 5)),))


def test_batch_size_is_the_first_dimension():
    assert batch_size_of(({"a": np.ones((6, 2))}, np.ones(6))) == 6
    with pytest.raises(ValueError, match="unknown"):
        batch_size_of((np.float32(1.0),))


# ------------------------------------------------------------------ what does not follow is given


def sequence_model():
    """A free dimension in an input of integers and in the output, and a fixed one beside it."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    others = keras.Input((None, 4), name="others")
    x = keras.layers.Embedding(2, 4)(tokens) + others
    model = keras.Model({"tokens": tokens, "others": others}, keras.layers.Dense(3)(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_shapes_that_are_given_fill_free_dimensions_of_inputs_and_targets():
    model = sequence_model()
    x, y = example_batch(model, 2, shapes={"tokens": (7,), "others": (7, 4)})
    assert {name: (a.shape, a.dtype.name) for name, a in x.items()} == {
        "tokens": ((2, 7), "int32"),
        "others": ((2, 7, 4), "float32"),
    }
    assert (y.shape, y.dtype) == ((2, 7), np.int32)
    model.train_on_batch(x, y)


def test_an_unbuilt_model_needs_shapes_only():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs["a"]) if isinstance(inputs, dict) else self.dense(inputs)

    for shapes, of in (({"": (5,)}, lambda x: x), ({"a": (5,)}, lambda x: x["a"])):
        model = Own()
        model.compile("sgd", "mse")
        name = next(iter(shapes))
        x, y = example_batch(model, 2, shapes=shapes, dtypes={name: "float16"})
        assert (of(x).shape, of(x).dtype, y.shape) == ((2, 5), np.float16, (2, 3))
        model.train_on_batch(x, y)
    with pytest.raises(UnknownBatchError, match="inputs do not follow") as caught:
        example_batch(Own(), 2)
    assert caught.value.lacks_shapes


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"tokens": (7,)}, r"shape \(2, None, 4\) of input 'others' is not fully known"),
        ({"tokens": (7,), "others": (7, 5)}, r"'others' has the shape \(None, 4\).* got \(7, 5\)"),
        ({"token": (7,), "others": (7, 4)}, "unknown input 'token'; did you mean 'tokens'"),
        ({"tokens": (7,), "others": (8, 4)}, "takes no inputs of shape"),
    ],
)
def test_shapes_that_do_not_do_are_named(shapes, said):
    with pytest.raises(ValueError, match=said):
        example_batch(sequence_model(), 2, shapes=shapes)


def test_a_fixed_batch_is_the_only_one():
    inputs = keras.Input(batch_shape=(8, 5), name="rows")
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model.compile("sgd", "mse")
    assert example_batch(model, 8)[0].shape == (8, 5)
    with pytest.raises(ValueError, match=r"batch is 32.* 'rows' has the fixed shape \(8, 5\)"):
        example_batch(model, 32)
    assert fixed_batch(model) == ("rows", (8, 5))
    assert fixed_batch(model_with("mse")) is None


def test_a_sequential_takes_other_batches_than_the_one_that_built_it():
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.build((8, 5))
    x, y = example_batch(model, 32)
    assert (x.shape, y.shape) == ((32, 5), (32, 3))


def test_a_model_without_a_loss_has_no_targets():
    """What its layers add is one; a model that computes its own is asked for them."""
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3, activity_regularizer="l2")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd")
    x, y = example_batch(model, 4)
    assert (x.shape, y) == ((4, 5), None)
    model.train_on_batch(x, y)

    class Own(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return keras.ops.mean(y_pred - y)

    own = Own(inputs, keras.layers.Dense(3)(inputs))
    own.compile("sgd")
    with pytest.raises(UnknownBatchError, match=r"no targets follow.*give a batch"):
        example_batch(own, 4)


@pytest.mark.parametrize(
    ("shape", "fits"), [((5, 8), True), ((5, 8, 1), True), ((5, 9), False), ((5, 4, 8), False)]
)
def test_arrays_have_the_shapes_of_the_model_s_inputs(shape, fits):
    """Or one dimension of 1 more, which Keras takes off."""
    inputs = keras.Input((8,), name="features")
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    batch = np.zeros(shape, "float32"), np.zeros((5, 1), "float32")
    if fits:
        check_shapes(model, batch)
        check_shapes(model, ({"features": batch[0], "unread": np.zeros((5, 99))}, batch[1]))
    else:
        with pytest.raises(ValueError, match=r"input 'features' has the shape \(8,\)"):
            check_shapes(model, batch)
