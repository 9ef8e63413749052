"""What an installation brings: the exact solvers by default, CUDA by its extras."""

import ast
from configparser import ConfigParser
from pathlib import Path

import pytest

import keras_remat

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
    ],
)
def test_extras_bring_their_framework(setup, extra, requirement):
    (line,) = lines(setup["options.extras_require"][extra])
    assert line.split(">=")[0] == requirement


def test_every_extra_that_an_error_names_exists(setup):
    named = set()
    for path in (ROOT / "keras_remat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingPackageError":
                named |= {arg.value for arg in node.args[2:] if isinstance(arg, ast.Constant)}
    assert named
    assert named <= set(setup["options.extras_require"])
