"""Runs tests/backends/jax, and the tests for every framework, with Keras on JAX, in a process of
its own, and without TensorFlow in it."""

import importlib.util
import os
from pathlib import Path

import pytest
from blocked import BLOCKED
from own_process import environment, output_of

FOLDER = Path(__file__).parent / "jax"
ROOT = FOLDER.parents[2]
#: Half of the time would go into LLVM's passes. Buffers are assigned before them.
QUICK_CODE = "--xla_backend_optimization_level=0"
#: Half of the rest would go into programs that were compiled before: many tests train one model.
COMPILED_ONCE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
#: What is asked of every framework.
OF_ALL = (
    "test_accumulate.py", "test_batches.py", "test_conformance.py", "test_data.py",
    "test_fit.py", "test_own_code.py", "test_random_fits.py", "test_versions.py",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)


def run(keras_backend, *words, **variables):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_CODE}".strip()
    variables |= {"KERAS_BACKEND": keras_backend, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    output_of(*words, env=environment(**variables), cwd=ROOT, timeout=None)


def test_folder(tmp_path):
    files = [FOLDER, *(FOLDER.parent / name for name in OF_ALL)]
    marked = "not slow and not card"  # .ci/run has a line of its own for the cards
    words = ("-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", *files)
    run("jax", *words, **COMPILED_ONCE, JAX_COMPILATION_CACHE_DIR=str(tmp_path))


def test_jax_users_need_no_tensorflow_and_no_solver_is_imported_early():
    code = (
        "import sys, keras_remat.backends.jax\n"
        "for module in sys.modules:\n"
        "    assert not f'{module}.'.startswith(('tensorflow.', 'keras_remat.solvers.')), module"
    )
    run("jax", "-c", code + BLOCKED.format(blocked=["tensorflow", "torch"]))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
def test_tensorflow_users_need_no_jax():
    run("tensorflow", "-c", BLOCKED.format(blocked=["jax", "jaxlib", "torch"]))
