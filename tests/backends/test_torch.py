"""Runs tests/backends/torch, and the tests for every framework, with Keras on PyTorch, in a process
of its own, and without another framework in it.

PyTorch is in an environment of its own in ``.ci/run``: with the CUDA build, which plain ``pip
install torch`` brings on Linux, this one would be three times as large.
"""

import importlib.util
from pathlib import Path

import pytest
from blocked import BLOCKED
from own_process import environment, output_of

FOLDER = Path(__file__).parent / "torch"
ROOT = FOLDER.parents[2]
#: What is asked of every framework.
OF_ALL = (
    "test_accumulate.py", "test_batches.py", "test_conformance.py", "test_data.py",
    "test_fit.py", "test_own_code.py", "test_random_fits.py", "test_sample_wise.py",
    "test_versions.py",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def run(*words):
    output_of(*words, env=environment(KERAS_BACKEND="torch"), cwd=ROOT, timeout=None)


def test_folder():
    files = [FOLDER, *(FOLDER.parent / name for name in OF_ALL)]
    run("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files)


def test_no_other_framework_and_no_solver_is_imported():
    code = (
        "import sys, keras_remat.backends.torch\n"
        "others = 'tensorflow.', 'jax.', 'keras_remat.solvers.'\n"
        "for module in sys.modules:\n"
        "    assert not f'{module}.'.startswith(others), module"
    )
    run("-c", code)


def test_torch_users_need_no_other_framework():
    run("-c", BLOCKED.format(blocked=["tensorflow", "jax", "jaxlib"]))
