"""A model and its batch by name: what is made up, what is given, and sentences for the rest."""

import zipfile
from pathlib import Path

import keras
import pytest

from keras_remat.backends.batches import batch_size_of
from keras_remat.backends.example_batches import example_batch
from keras_remat.planning.model_argument import model_and_batch

MODELS = """
import keras, numpy as np

def compiled(model, loss="mse"):
    model.compile("sgd", loss)
    return model

def dense():
    return compiled(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]))

def with_batch():
    return dense(), (np.ones((6, 5)), np.ones((6, 3)))

def with_size():
    return dense(), 6

def sequences():
    inputs = keras.Input((None, 4), name="rows")
    return compiled(keras.Model(inputs, keras.layers.GRU(2)(inputs)))

def unbuilt():
    return compiled(keras.Sequential([keras.layers.Dense(3)]))

def fixed():
    inputs = keras.Input(batch_shape=(8, 5))
    return compiled(keras.Model(inputs, keras.layers.Dense(3)(inputs)))

def text():
    inputs = keras.Input((1,), dtype="string", name="words")
    return compiled(keras.Model(inputs, keras.layers.Identity()(inputs)))

def own_loss():
    inputs = keras.Input((5,))
    return compiled(keras.Model(inputs, keras.layers.Dense(3)(inputs)), lambda y, p: p)

def uncompiled():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])

def nothing():
    return None

NUMBER = 3

def fails():
    return keras.no_such_name
"""


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "models_by_name.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def batch_of(function, *options, **more):
    return model_and_batch(f"models_by_name:{function}", *options, **more)[1]


def test_a_batch_is_made_up_or_given():
    assert batch_of("dense")[0].shape == (32, 5)
    assert batch_of("dense", 4)[0].shape == (4, 5)
    assert batch_of("fixed")[0].shape == (8, 5)
    assert batch_of("with_batch")[0].shape == (6, 5)
    assert batch_of("with_size") == 6


def test_open_shapes_are_given_with_or_without_a_name():
    for text in ("7,4", "rows=7,4"):
        x, y = batch_of("sequences", 2, [text])
        assert (x.shape, y.shape) == ((2, 7, 4), (2, 2))
    x, y = batch_of("unbuilt", 2, ["5"], ["int32"])
    assert (x.shape, x.dtype, y.shape) == ((2, 5), "int32", (2, 3))
    assert batch_of("unbuilt", 2, ["5"], ["int"])[0].dtype.startswith("int")


def test_a_batch_that_is_made_up_takes_no_memory():
    size = 10**12
    model, batch = model_and_batch("models_by_name:dense", size)
    assert batch_size_of(example_batch(model, batch, seed=None)) == size


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("sequences", {}, "shape (32, None, 4) of input 'rows' is not fully known: give --shape"),
        ("unbuilt", {}, "inputs do not follow from it (it is neither functional nor a built "
         "Sequential): give --shape INPUT=DIM,DIM (and --dtype), or MODULE:FUNCTION"),
        ("text", {}, "strings do not follow from the model: give MODULE:FUNCTION that returns"),
        ("own_loss", {}, "does not follow from the model: give MODULE:FUNCTION that returns"),
        ("uncompiled", {}, "a model that is not compiled: call model.compile(optimizer, loss)"),
        ("nothing", {}, "gave NoneType; a model is a file"),
        ("missing", {}, "no model from 'models_by_name:missing'"),
        ("NUMBER", {}, "'models_by_name:NUMBER' is no function: int"),
        ("fixed", {"batch_size": 4}, "has the fixed shape (8, 5): give 8"),
        ("with_batch", {"batch_size": 4, "dtypes": ["int32"]},
         "gave a batch of its own: leave out --batch-size and --dtype"),
        ("sequences", {"shapes": ["rows=7,four"]}, "such as tokens=128 or 224,224,3; got '7,four'"),
        ("sequences", {"shapes": ["0,4"]}, "got '0,4'"),
        ("sequences", {"shapes": ["7,4", "8,4"]}, "--shape is given twice for the only input"),
        ("unbuilt", {"shapes": ["5"], "dtypes": ["floaty"]}, "such as int32; got 'floaty'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_the_options_can_do(function, options, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        batch_of(function, **options)
    assert said in str(caught.value)


def test_an_error_of_the_function_is_not_taken_for_a_wrong_name():
    with pytest.raises(AttributeError, match="no_such_name"):
        batch_of("fails")


def test_files():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.save("uncompiled.keras")
    with pytest.raises(ValueError, match=r"'uncompiled\.keras' gave a model that is not compiled"):
        model_and_batch("uncompiled.keras")
    model.compile("sgd", "mse")
    model.save("compiled.keras")
    assert model_and_batch("compiled.keras")[1][0].shape == (32, 5)
    with pytest.raises(FileNotFoundError, match="no file"):
        model_and_batch(str(Path("nowhere.keras")))
    with zipfile.ZipFile("other.keras", "w") as archive:
        archive.writestr("notes.txt", "")
    with pytest.raises(ValueError, match=r"other\.keras' holds no model of Keras \(.*config\.json"):
        model_and_batch("other.keras")
