"""Runs tests/backends/jax with Keras on JAX, in a process of its own, and without TensorFlow in it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "jax"
ROOT = FOLDER.parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


def on_jax(*arguments):
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_folder():
    done = on_jax("-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_no_tensorflow_and_no_solver_is_imported():
    code = (
        "import sys, keras_remat.backends.jax\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] == 'tensorflow' or m.startswith('keras_remat.solvers')]\n"
        "assert not loaded, loaded"
    )
    done = on_jax("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
