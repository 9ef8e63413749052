"""Versions that are too old are named before anything is traced, and training goes on."""

import jax_models as models
import keras
import pytest

import keras_remat
from keras_remat import doctor
from keras_remat.backends.versions import OLDEST, check_versions, sentence_for, too_old
from keras_remat.errors import UnsupportedModelError

FRAMEWORK = keras.backend.backend()


@pytest.fixture
def old_keras(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.8.0")


def test_installed_versions_are_new_enough():
    check_versions(FRAMEWORK)
    assert doctor.diagnosis()["supported"]


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("3.8.9", True),
        ("3.8.0.dev2026010103", True),
        (OLDEST[FRAMEWORK]["keras"], False),
        (OLDEST[FRAMEWORK]["keras"] + ".0", False),
        ("3.100.1", False),
        ("4.0.0rc1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, is_old, monkeypatch):
    monkeypatch.setattr(keras, "__version__", version)
    assert bool(too_old(FRAMEWORK)) is is_old


def test_the_sentence_says_both_versions_and_what_to_run(old_keras):
    assert sentence_for("This", {"keras": "3.12"}) == (
        "This needs Keras 3.12 or newer; installed: 3.8.0. Run: pip install -U 'keras>=3.12'"
    )


def test_fit_goes_on_unmodified_with_the_reason(old_keras):
    model = models.small()
    x, y = models.batch(model, 8)
    remat = keras_remat.RematAutotune("8GiB", verbose=0)
    with pytest.warns(UserWarning, match=r"unmodified.*needs Keras .* installed: 3\.8\.0"):
        model.fit(x, y, verbose=0, callbacks=[remat])
    assert [event.kind for event in remat.report.events] == ["unmodified"]
    with pytest.raises(UnsupportedModelError, match="installed"):
        keras_remat.make_plan(model, (x, y), "8GiB")


def test_doctor_says_so_too(old_keras):
    facts = doctor.diagnosis()
    text = " ".join(doctor.as_text(facts).split())
    assert f"framework {FRAMEWORK}, not supported" in text
    assert "installed: 3.8.0. Run: pip install -U 'keras>=" in text


@pytest.mark.skipif(FRAMEWORK != "tensorflow", reason="the strategies are TensorFlow's")
def test_several_devices_need_a_newer_keras(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(keras, "__version__", "3.9.2")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = models.small()
    x, y = models.batch(model, 8)
    several = "MirroredStrategy needs Keras 3.10"
    with pytest.warns(UserWarning, match=f"unmodified.*{several}"):
        model.fit(x, y, verbose=0, callbacks=[keras_remat.RematAutotune("8GiB", verbose=0)])
    assert any(several in line for line in doctor.diagnosis()["advice"])
