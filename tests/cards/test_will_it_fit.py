"""Will it fit? What is asked, how a model goes to the process that compiles, and what comes back.

The process is real in one test, which asks about CPUs, so that it needs no compiler for cards.
"""

import pickle
import tempfile
import urllib.error
from dataclasses import replace

import keras
import keras_models
import numpy as np
import pytest

import keras_remat
from keras_remat.cards import process
from keras_remat.cards import will_it_fit as asking
from keras_remat.cards.process import ArraySpec, Request
from keras_remat.cards.report import FITS, CardRow
from keras_remat.cards.table import CARDS, EXAMPLE
from keras_remat.core.target import live
from keras_remat.errors import MissingPackageError, UnsupportedModelError
from keras_remat.units import GIB, KIB, MIB

#: A capability of which the table has no card.
ORIN = "Orin:memory=28GiB,capability=8.7,bandwidth=205,tflops=5.3"


def model_of(width=64, layers=2, name="dense", **options):
    inputs = x = keras.Input((width,))
    for _ in range(layers):
        x = keras.layers.Dense(width, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x), name=name)
    model.compile("sgd", "mse", **options)
    return model


def computer(name, usable_bytes):
    """A CPU as a card, which XLA:CPU compiles for."""
    target = live("cpu", "cpu:0")
    return replace(target, card=name, total_bytes=GIB, usable_bytes=usable_bytes)


def test_the_whole_way_from_any_backend(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "nonsense")
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    told = []
    report = keras_remat.will_it_fit(
        model_of(jit_compile=False),
        (np.zeros((8, 64), "float64"), np.zeros((8, 10), "float32")),
        [computer("large", 64 * MIB), computer("small", 64 * KIB)],
        batch_size=1024,
        time_limit_s=1.0,
        progress=told.append,
    )
    large, small = report.rows
    assert (report.name, report.batch_size) == ("dense", 1024)
    assert (large.card, large.verdict) == ("large", FITS)
    assert small.verdict == "does not fit"
    assert large.max_batch_planned >= large.max_batch_plain > 1024
    assert large.parts["batch"] >= 1024 * (64 + 10) * 4
    assert sum(report.layers.values()) == large.parts["activations"]
    assert [row.card for row in told] == ["large", "large", "small", "small"]
    assert report.exit_status == 3
    assert not [*tmp_path.iterdir()], "nothing is left behind"


@pytest.mark.card
def test_cards_of_the_table_and_of_one_s_own(tmp_path, monkeypatch):
    model_of(width=128).save(tmp_path / "model.keras")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    report = keras_remat.will_it_fit(
        tmp_path / "model.keras", cards=["t4", EXAMPLE, ORIN], batch_size=4096, time_limit_s=2.0
    )
    assert not [*temporary.iterdir()], "nothing is left behind"
    assert [row.card for row in report.rows] == ["T4", "RTX4070", "Orin"]
    assert report.exit_status == 0
    for row in report.rows:
        assert 8 * MIB < row.plain_bytes < 64 * MIB


# ------------------------------------------------------------------ what is asked


@pytest.fixture
def asked(monkeypatch):
    """Holds the requests, whose process answers with a row for every card."""
    requests = []

    def messages(request, framework):
        requests.append(request)
        yield process.BEGUN, ("a model", 7)
        for target in reversed(request.targets):
            row = CardRow(card=target.card, usable_bytes=1, plain_bytes=1, verdict=FITS)
            yield process.ROW, row
        yield process.LAYERS, {"dense": 3}
        yield process.DONE, None

    monkeypatch.setattr(asking, "_messages", messages)
    return requests


def test_rows_come_in_the_order_of_the_cards(asked):
    report = keras_remat.will_it_fit(model_of(), 4, ("T4", "A100-40", "H100"))
    assert [row.card for row in report.rows] == ["T4", "A100-40", "H100"]
    assert (report.name, report.batch_size, report.layers) == ("a model", 7, {"dense": 3})


def test_a_request_is_plain_data(asked):
    batch = {"a": np.zeros((4, 3), "float16"), "b": None}
    keras_remat.will_it_fit(model_of(), (batch, np.zeros(4, "int64")), batch_size=6)
    (request,) = asked
    assert request.batch == (
        {"a": ArraySpec((6, 3), "float16"), "b": None}, ArraySpec((6,), "int64"),
    )  # fmt: skip
    assert [target.card for target in request.targets] == ["T4", "A100-40"]
    assert request.settings["set_floatx"] == "float32"
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize("model", [None, "package.module:function"])
def test_a_size_of_numpy_s_is_a_size(asked, model):
    keras_remat.will_it_fit(model or model_of(), np.int64(4))
    assert asked[0].batch == 4


def test_no_random_weights_are_made(monkeypatch):
    for kind in vars(keras.initializers).values():
        if isinstance(kind, type) and issubclass(kind, keras.initializers.Initializer):
            monkeypatch.setattr(kind, "__call__", kind.__call__)
    process.initialize_with_zeros()
    for dtype in ("float32", "bfloat16", "int32"):
        given = keras.initializers.get("orthogonal")((3, 2), dtype=dtype)
        assert keras.backend.standardize_dtype(given.dtype) == dtype
        assert not np.asarray(given, "float32").any()
    assert not any(weights.any() for weights in model_of().get_weights())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((4, ["H10"]), {}, ValueError, "did you mean H100"),
        ((4, []), {}, ValueError, "at least one"),
        ((4, [replace(CARDS["T4"], usable_bytes=GIB), "T4"]), {}, ValueError, "name of its own"),
        ((4,), {"batch_size": 8}, ValueError, "give one of them"),
        ((), {}, TypeError, "give a batch"),
        ((4,), {"margin": 2.0}, ValueError, "margin"),
        ((True,), {}, TypeError, "batch must be an int"),
        ((0,), {}, ValueError, "batch must be at least 1"),
        (((np.zeros((4, 3)), np.zeros(5)),), {"batch_size": 8}, UnsupportedModelError, "4 samples"),
    ],
)
def test_wrong_arguments(asked, arguments, options, error, match):
    with pytest.raises(error, match=match):
        keras_remat.will_it_fit(model_of(), *arguments, **options)
    assert not asked


def test_what_is_no_compiled_model(asked):
    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match="compile"):
        keras_remat.will_it_fit(keras.Model(inputs, keras.layers.Dense(1)(inputs)), 4)
    with pytest.raises(TypeError, match="got list"):
        keras_remat.will_it_fit([], 4)
    with pytest.raises(TypeError, match="give batch_size"):
        keras_remat.will_it_fit("model.keras", (np.zeros(3), np.zeros(3)))


def test_a_model_that_keras_cannot_serialize(asked):
    class Own(keras.Model):
        def __init__(self, anything):
            super().__init__()

        def call(self, x):
            return x

    model = Own(object())
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match=r"package\.module:function"):
        keras_remat.will_it_fit(model, (np.zeros((4, 3)), np.zeros((4, 3))))


# ------------------------------------------------------------------ what comes back


def request_of(model, *targets, **changes):
    known = {"batch": 4, "margin": 0.05, "time_limit_s": 1.0, "seed": 0, "settings": {}}
    return Request(model=model, targets=targets, **known | changes)


def test_a_model_whose_classes_are_not_found(asked):
    keras_remat.will_it_fit(model_of(), 4)
    config = dict(asked[0].model, class_name="Nowhere", module="no.such.module")
    with pytest.raises(process.NotTakenError, match="Nowhere"):
        process._model_and_batch(request_of(config))


def test_own_classes_are_found_where_they_can_be_imported():
    config = keras.saving.serialize_keras_object(keras_models.trimmed()[0])
    assert process._own_classes(config) == {"Trim": keras_models.Trim}


def test_a_model_that_does_not_run_on_jax_is_asked_about_on_tensorflow(monkeypatch):
    answers = {
        "jax": [(process.NOT_TAKEN, "TypeError: a tracer")],
        "tensorflow": [
            (process.BEGUN, ("net", 4)),
            (process.ROW, CardRow(card="T4", usable_bytes=1, plain_bytes=1, verdict=FITS)),
            (process.DONE, None),
        ],
    }
    monkeypatch.setattr(asking, "_messages", lambda request, framework: answers[framework])
    report = keras_remat.will_it_fit("a.module:function", cards=["T4"])
    assert report.framework == "tensorflow"
    assert "TensorFlow only" in str(report)
    answers["tensorflow"] = [(process.NOT_TAKEN, "ValueError: a shape")]
    with pytest.raises(UnsupportedModelError, match=r"a tracer\), nor .* a shape.*lie in modules"):
        keras_remat.will_it_fit("a.module:function", cards=["T4"])
    monkeypatch.setattr(asking, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"on JAX \(TypeError: a tracer\)\. Its own"):
        keras_remat.will_it_fit("a.module:function", cards=["T4"])


@pytest.mark.card
def test_a_model_in_tensorflow_s_own_ops():
    model, (x,) = keras_models.vae()
    report = keras_remat.will_it_fit(
        model, (x,), ["T4", "H100"], batch_size=2**15, time_limit_s=2.0
    )
    assert report.framework == "tensorflow"
    for row in report.rows:
        assert row.verdict == FITS
        assert 2 * MIB < row.plain_bytes < 64 * MIB
        assert row.max_batch_planned >= row.max_batch_plain > 2**15


def unreachable():
    """A function that fetches weights."""
    raise urllib.error.URLError("no route to host")


def unreachable_hub():
    try:
        raise ConnectionRefusedError("a hub")
    except ConnectionRefusedError as error:
        raise RuntimeError("could not load the preset") from error


@pytest.mark.parametrize("function", [unreachable, unreachable_hub])
def test_a_model_that_is_fetched_where_no_network_is(function):
    request = request_of(f"{__name__}:{function.__name__}", batch=None)
    with pytest.raises(UnsupportedModelError, match=r"cannot be fetched here .* weights=None"):
        process._model_and_batch(request)


def test_a_batch_of_another_shape_is_told_before_anything_is_traced(monkeypatch):
    monkeypatch.setattr(process, "initialize_with_zeros", lambda: None)  # it is not undone
    config = keras.saving.serialize_keras_object(model_of())
    batch = ArraySpec((8, 32), "float32"), ArraySpec((8, 10), "float32")
    told = []
    with pytest.raises(ValueError, match=r"shape \(64,\) without the batch.* has \(32,\)"):
        process.answer(request_of(config, batch=batch), lambda *what: told.append(what))
    assert not told


def test_the_extra_is_named_where_it_is_missing(monkeypatch):

    def missing():
        raise MissingPackageError("jax-cuda12-plugin", "Compiling", "cards")

    monkeypatch.setattr(process, "check_card_compiler", missing)
    with pytest.raises(MissingPackageError, match=r"pip install 'keras-remat\[cards\]'"):
        process.answer(request_of("model.keras", keras_remat.cards.table.card("T4")), None)


def test_what_the_process_raises_is_raised(monkeypatch):
    error = ValueError("what is wrong")
    monkeypatch.setattr(asking, "_messages", lambda *asked: [(process.FAILED, error)])
    with pytest.raises(ValueError, match="what is wrong"):
        keras_remat.will_it_fit("model.keras")


def test_a_process_that_ends_early_is_told(monkeypatch):
    monkeypatch.setattr(asking.sys, "executable", "false")
    with pytest.raises(UnsupportedModelError, match="ended with 1"):
        keras_remat.will_it_fit("model.keras")
