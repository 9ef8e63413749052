"""The public names: resolved on first use, never hidden by a submodule, no framework loaded."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest
from own_process import output_of, search_path

import keras_remat

PACKAGE = Path(keras_remat.__file__)
EXPECTED = {
    "RematAutotune",
    "make_plan",
    "Plan",
    "load_plan",
    "enable_cpu_memory_stats",
    "find_max_batch_size",
    "BatchSearch",
    "will_it_fit",
    "CardReport",
    "CardRow",
    "AutotuneReport",
    "solve",
    "SOLVERS",
    "load_problem",
    "save_problem",
    "simulate",
    "validate",
    "Graph",
    "Op",
    "Value",
    "Profile",
    "Problem",
    "Schedule",
    "Solution",
    "Usage",
    "RematError",
    "InvalidScheduleError",
    "InvalidProblemError",
    "InfeasibleBudgetError",
    "ScheduleNotFoundError",
    "PlanMismatchError",
    "PeakExceededError",
    "UnsupportedModelError",
    "MissingPackageError",
    "__version__",
}


def run(code):
    """Runs ``code`` in a fresh interpreter and returns what it prints."""
    path = search_path(PACKAGE.parent.parent)
    return output_of("-c", code, env={"PYTHONPATH": path, "PATH": ""}).strip()


def test_all_is_the_fixed_list():
    assert set(keras_remat.__all__) == EXPECTED
    assert len(keras_remat.__all__) == len(EXPECTED)
    assert set(dir(keras_remat)) >= EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED - {"__version__"}))
def test_every_name_resolves_to_its_module(name):
    module_name = f"keras_remat.{keras_remat._MODULE_OF[name]}"
    resolved = getattr(keras_remat, name)
    assert resolved is getattr(importlib.import_module(module_name), name)
    assert getattr(resolved, "__module__", module_name) == module_name
    assert getattr(keras_remat, name) is resolved


def test_type_checkers_see_the_same_names_from_the_same_modules():
    seen = {}
    for node in ast.walk(ast.parse(PACKAGE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_remat."):
            seen |= {alias.name: node.module.removeprefix("keras_remat.") for alias in node.names}
    assert seen == keras_remat._MODULE_OF


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras_remat.nothing
    with pytest.raises(ImportError):
        exec("from keras_remat import nothing")


def test_import_loads_no_framework_and_no_numpy():
    heavy = [
        "tensorflow",
        "jax",
        "keras",
        "torch",
        "scipy",
        "numpy",
        "ortools",
        "tqdm",
        "matplotlib",
    ]
    assert run(f"import sys, keras_remat; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_import_loads_none_of_its_modules():
    assert (
        run(
            "import sys, keras_remat; print([m for m in sys.modules if "
            "m.startswith('keras_remat.')])"
        )
        == "[]"
    )


def test_the_core_loads_no_framework():
    code = (
        "import sys, keras_remat as k; k.solve, k.SOLVERS, k.simulate, k.validate, "
        "k.load_problem, k.RematError; "
        "print([m for m in ['tensorflow', 'jax', 'keras', 'torch', 'scipy'] if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_the_functions_simulate_and_validate_are_public():
    code = (
        "import keras_remat.core.simulate, keras_remat.core.validate, keras_remat as k; "
        "print(k.simulate.__name__, k.validate.__name__)"
    )
    assert run(code) == "simulate validate"


def test_version_is_a_release_number():
    assert [part.isdigit() for part in keras_remat.__version__.split(".")] == [True] * 3


def test_the_package_is_marked_as_typed():
    assert (PACKAGE.parent / "py.typed").exists()
