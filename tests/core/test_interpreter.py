"""A fresh interpreter imports the package that its caller has."""

import os
import subprocess
import sys
from pathlib import Path

import keras_remat
from keras_remat.core.interpreter import environment


def test_a_fresh_interpreter_finds_the_package_first(monkeypatch, tmp_path):
    """Wherever it is started, and whatever else is installed; its folders are no packages."""
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path}")
    (tmp_path / "keras_remat").mkdir()
    (tmp_path / "keras_remat" / "__init__.py").touch()
    found = subprocess.run(
        [sys.executable, "-c", "import keras_remat\nprint(keras_remat.__file__)\nimport planning"],
        env=environment(),
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
    )
    assert Path(found.stdout.strip()) == Path(keras_remat.__file__)
    assert "No module named 'planning'" in found.stderr
    assert environment()["PYTHONPATH"].endswith(f"{os.pathsep}{tmp_path}")
