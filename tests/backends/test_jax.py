"""Runs tests/backends/jax with Keras on JAX, in a process of its own, and without TensorFlow in
it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "jax"
ROOT = FOLDER.parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)


def on_jax(*arguments):
    return on_backend("jax", *arguments)


def on_backend(name, *arguments):
    environment = {
        **os.environ,
        "KERAS_BACKEND": name,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


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


_BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import keras
import numpy as np
import keras_remat

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="gelu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
model.compile("adam", "mse")
x, y = np.ones((32, 8), "float32"), np.ones((32, 1), "float32")
remat = keras_remat.RematAutotune("8GiB", 32, verbose=0)
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[remat])
assert remat.report.batch_size == 32, remat.report
assert len(keras_remat.make_plan(model, (x, y), "8GiB", solver="greedy").solution.schedule) > 0
assert not set(sys.modules) & set({blocked})
"""


def test_jax_users_need_no_tensorflow():
    done = on_jax("-c", _BLOCKED.format(blocked=["tensorflow", "torch"]))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_tensorflow_users_need_no_jax():
    done = on_backend("tensorflow", "-c", _BLOCKED.format(blocked=["jax", "jaxlib", "torch"]))
    assert done.returncode == 0, done.stderr[-3000:]
