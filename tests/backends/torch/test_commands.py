"""The command line with Keras on PyTorch."""

import json

import keras
from keras import layers

from keras_remat import cli, doctor


def test_doctor_says_how_peaks_are_known(capsys):
    facts = doctor.diagnosis()
    assert facts["supported"]
    assert facts["framework"] == "torch"
    assert facts["kernels_timed"] is True
    assert facts["limit_bytes"] > 0
    assert any("GPU" in line for line in facts["advice"]), "why none trains"
    assert cli.main(["doctor"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_saved_model_is_planned(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((32,))
    for _ in range(3):
        x = layers.Dense(32, "relu")(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile("sgd", "mse")
    path, plan = tmp_path / "model.keras", tmp_path / "plan.json"
    model.save(path)
    words = ["--batch-size", "64", "--memory-limit", "1GiB", "--output", str(plan)]
    assert cli.main(["plan", str(path), *words]) == 0
    assert json.loads(plan.read_text())
    assert "measured on CPU:0" in capsys.readouterr().out
