"""What an installation brings: the exact solvers by default, CUDA by its extras."""

import ast
import importlib.util
import re
from configparser import ConfigParser
from pathlib import Path

import pytest

import keras_remat
from keras_remat.backends.versions import NEWEST, OLDEST, OLDEST_FOR_REPLICAS

ROOT = Path(keras_remat.__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.cfg").exists(), reason="an installed package has no setup.cfg beside it"
)


@pytest.fixture(scope="module")
def setup():
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_default_installation_has_the_exact_solvers_and_no_framework(setup):
    required = lines(setup["options"]["install_requires"])
    names = {line.split(">=")[0] for line in required}
    assert {"ortools", "cylp"} <= names
    assert not names & {"tensorflow", "tensorflow-cpu", "jax"}
    assert all("implementation_name" in line for line in required if "cylp" in line)


@pytest.mark.parametrize(
    ("extra", "requirement"),
    [
        ("tensorflow", "tensorflow[and-cuda]"),
        ("tensorflow-cpu", "tensorflow-cpu"),
        ("jax-cuda12", "jax[cuda12]"),
        ("jax-cuda13", "jax[cuda13]"),
        ("jax", "jax"),
        ("torch", "torch"),
    ],
)
def test_extras_bring_their_framework(setup, extra, requirement):
    line, *others = lines(setup["options.extras_require"][extra])
    assert line.split(">=")[0] == requirement
    assert all(other.startswith("keras>=") for other in others)


def test_what_is_required_is_the_oldest_that_works(setup):
    """What the backends refuse, ``.ci/versions.py`` tries, and README says."""
    (keras,) = (
        line for line in lines(setup["options"]["install_requires"]) if line.startswith("keras")
    )
    for extra in ("tensorflow", "tensorflow-cpu", "jax", "jax-cuda12", "jax-cuda13", "torch"):
        framework = extra.partition("-")[0]
        required = {"keras": keras.partition(">=")[2]}
        for line in lines(setup["options.extras_require"][extra]):
            name, _, oldest = line.partition(">=")
            required[re.split(r"[-\[]", name)[0]] = oldest
        assert required == OLDEST[framework], extra
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    tensorflow, jax = OLDEST["tensorflow"], OLDEST["jax"]
    assert f"TensorFlow {tensorflow['tensorflow']} with Keras {tensorflow['keras']}" in readme
    assert f"({OLDEST_FOR_REPLICAS['keras']} for several devices)" in readme
    assert f"JAX {jax['jax']} with Keras {jax['keras']}" in readme
    assert f"PyTorch {OLDEST['torch']['torch']} with Keras {OLDEST['torch']['keras']}" in readme
    newest = {name: version for versions in NEWEST.values() for name, version in versions.items()}
    assert (
        "TensorFlow {tensorflow}, JAX {jax}, PyTorch {torch} and Keras {keras};".format(**newest)
        in readme
    )


def test_every_extra_that_an_error_names_exists(setup):
    named = set()
    for path in (ROOT / "keras_remat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingPackageError":
                named |= {arg.value for arg in node.args[2:] if isinstance(arg, ast.Constant)}
    assert named
    assert named <= set(setup["options.extras_require"])


def test_the_command_that_tries_versions_names_what_there_is():
    spec = importlib.util.spec_from_file_location("versions_command", ROOT / ".ci" / "versions.py")
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    for framework in OLDEST:
        for short in (True, False):
            (example,), tests = command.commands(framework, short=short)
            paths = [example, *(word for word in tests if word.startswith("tests/"))]
            assert len(paths) > 3
            assert [path for path in paths if not (ROOT / path).exists()] == []
