"""``keras-remat doctor`` says what this machine can measure, on one screen."""

import json

import gpu_stand_in
import keras
import pytest
from own_process import environment, output_of

from keras_remat import cli, doctor
from keras_remat.backends.tensorflow import private
from keras_remat.backends.tensorflow.profiler.device import device_name, on_gpu
from keras_remat.errors import MissingPackageError
from keras_remat.units import GIB


def diagnosis(capsys, *arguments):
    assert cli.main(["doctor", *arguments]) == 0
    return capsys.readouterr().out


def test_one_screen(capsys):
    lines = diagnosis(capsys).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    labels = {line.split("  ")[0] for line in lines}
    assert {"versions", "device", "allocator", "limit", "op times", "XLA", "missing"} <= labels


@pytest.mark.allocator
def test_json_says_what_this_machine_can_do(capsys):
    facts = json.loads(diagnosis(capsys, "--json"))
    assert facts["device"] == device_name()
    assert facts["framework"] == "tensorflow"
    assert facts["statistics"] is True
    assert facts["limit_bytes"] > GIB // 4
    assert facts["kernels_timed"] is not on_gpu(), "a stand-in has no device plane"
    assert facts["xla"] is True
    assert ("oneDNN" in " ".join(facts["advice"])) is not (private.onednn_is_on() or on_gpu())
    assert facts["versions"]["keras"] == keras.__version__


def test_gpu_without_the_privilege_to_see_kernels(capsys):
    """As the stand-in is: it has no device plane."""
    with gpu_stand_in.gpu():
        text = diagnosis(capsys)
    assert "GPU:0" in text
    assert "memory growth off" in " ".join(text.split())
    assert "op times    NO" in text
    assert "NVreg_RestrictProfilingToAdminUsers" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_missing_is_named_with_its_extra(monkeypatch):
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: None if name == "cylp" else find(name)
    )
    facts = doctor.diagnosis()
    assert [entry["package"] for entry in facts["missing"]][:1] == ["cylp"]
    assert "pip install 'keras-remat[solvers]'" in doctor.as_text(facts)


def test_cards_that_can_be_compiled_for_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "check_card_compiler", lambda: None)
    assert "cards       yes: T4, V100," in doctor.as_text(doctor.diagnosis())

    def missing():
        raise MissingPackageError("jax-cuda12-plugin", "Compiling for a card", "cards")

    monkeypatch.setattr(doctor, "check_card_compiler", missing)
    facts = doctor.diagnosis()
    assert facts["cards"] == []
    text = " ".join(doctor.as_text(facts).split())
    assert "cards NO: " in text
    assert "pip install 'keras-remat[cards]'" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [("torch", "No module named 'torch'"), ("tensorflw", "Unable to import backend : tensorflw")],
)
def test_a_framework_that_cannot_be_loaded_is_named(name, why):
    told = output_of("-m", "keras_remat", "doctor", env=environment(KERAS_BACKEND=name))
    assert f"{name}, not supported" in told
    assert f"Keras does not load: {why}" in " ".join(told.split())


def test_other_frameworks_are_told_so(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    facts = doctor.diagnosis()
    assert facts["supported"] is False
    assert "KERAS_BACKEND" in doctor.as_text(facts)
