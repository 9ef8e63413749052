"""Imports point down only, by folder.

A folder or module that the table does not know fails the test.

| layer | folders and modules |
|---|---|
| 9 | the package itself: the public names |
| 8 | callback, cli, doctor, __main__ |
| 7 | training, cards |
| 6 | batch_size |
| 5 | planning |
| 3 | solvers, backends and reporting, which never import each other |
| 2 | core, and the table of cards |
| 1 | errors, checks |
| 0 | units |
"""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import keras_remat

ROOT = Path(keras_remat.__file__).parent
LAYERS = [
    (r"keras_remat", 9),
    (r"keras_remat\.(callback|cli|doctor|__main__)", 8),
    (r"keras_remat\.cards\.table", 2),
    (r"keras_remat\.(training|cards)(\..+)?", 7),
    (r"keras_remat\.batch_size(\..+)?", 6),
    (r"keras_remat\.planning(\..+)?", 5),
    (r"keras_remat\.(solvers|backends|reporting)(\..+)?", 3),
    (r"keras_remat\.core(\..+)?", 2),
    (r"keras_remat\.(errors|checks)", 1),
    (r"keras_remat\.units", 0),
]
FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "torch", "keras"}
CORE_MAY_IMPORT = {"numpy"}  # beside the standard library and this package


def module_name(path):
    """``keras_remat/solvers/dtr.py`` → ``keras_remat.solvers.papers.dtr``."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer(module):
    """The layer of a module.

    Raises:
        LookupError: the table does not know it.
    """
    for pattern, number in LAYERS:
        if re.fullmatch(pattern, module):
            return number
    raise LookupError(f"{module} is in no layer of the table")


def imports_of(source, module, *, is_package=False, known=frozenset(MODULES)):
    """Every module that ``source`` imports, anywhere in it, by statement or by ``import_module`` of
    a literal name."""
    found = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            found |= {
                arg.value
                for arg in node.args[:1]
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
    return found - {module}


def faults(module, imported):
    """What is wrong with the imports of one module, as sentences."""
    own = layer(module)
    side = module.split(".")[1:2]
    backend = re.match(r"keras_remat\.backends\.(tensorflow|jax|torch)(\.|$)", module)
    for name in sorted(imported):
        root = name.partition(".")[0]
        if root == "keras_remat":
            if name not in MODULES:
                yield f"{module} imports {name}, which does not exist"
            elif layer(name) > own:
                yield f"{module} (layer {own}) imports {name} (layer {layer(name)})"
            elif own == layer(name) == 3 and name.split(".")[1:2] != side:
                apart = "solvers, backends and reporting never import each other"
                yield f"{module} imports {name}: {apart}"
            elif backend and re.match(
                r"keras_remat\.backends\.(?!"
                r"(base|batches|example_batches|host|installed|interrupts|keras_private|memory|micro_batches|processes|slice_modes|tables|versions)$"
                rf"|xla(\.|$)|{backend[1]}(\.|$))",
                name,
            ):
                yield f"{module} imports another backend: {name}"
        elif root in FRAMEWORKS:
            above = root == "keras" and (own in (5, 6, 7, 8) or side == ["backends"])
            if not above and (backend is None or root.removesuffix("lib") != backend[1]):
                yield f"{module} imports the framework {root}"
        elif own <= 2 and root not in CORE_MAY_IMPORT and root not in sys.stdlib_module_names:
            yield f"{module} (core) imports {root}"


def imports_of_file(module):
    path = MODULES[module]
    return imports_of(
        path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    assert list(faults(module, imports_of_file(module))) == []


def test_no_import_cycles():
    """Not even within a layer; the package itself imports on use only, and packages may import
    their modules on use."""
    edges = {m: imports_of_file(m) & set(MODULES) for m in MODULES if m != "keras_remat"}
    assert list(TopologicalSorter(edges).static_order())


def test_every_module_is_in_the_table():
    assert {layer(module) for module in MODULES} == {0, 1, 2, 3, 5, 6, 7, 8, 9}
    with pytest.raises(LookupError):
        layer("keras_remat.utils")


def test_no_catch_all_modules():
    assert not {"utils", "common", "helpers"} & {m.rpartition(".")[2] for m in MODULES}


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("keras_remat.core.graph", "from keras_remat.planning.plan import Plan", "layer 5"),
        ("keras_remat.planning.plan", "from keras_remat import training", "layer 7"),
        ("keras_remat.batch_size.find", "from ..training import undo", "layer 7"),
        ("keras_remat.errors", "from keras_remat.core import graph", "layer 2"),
        ("keras_remat.reporting.text", "from keras_remat.solvers import solve", "never import"),
        ("keras_remat.core.graph", "def f():\n    import keras_remat.solvers", "layer 3"),
        ("keras_remat.core.problem", "from keras_remat import Graph", "layer 9"),
        (
            "keras_remat.solvers.papers.dtr",
            "from keras_remat.backends import base",
            "never import each other",
        ),
        (
            "keras_remat.backends.jax.trace",
            "from keras_remat.solvers import solve",
            "never import each other",
        ),
        ("keras_remat.solvers.papers.dtr", "import tensorflow as tf", "framework tensorflow"),
        ("keras_remat.planning.plan", "from jax import numpy", "framework jax"),
        (
            "keras_remat.planning.plan",
            "importlib.import_module('tensorflow.python')",
            "framework tensorflow",
        ),
        ("keras_remat.solvers.papers.dtr", "import keras", "framework keras"),
        ("keras_remat.backends.jax.trace", "import tensorflow", "framework tensorflow"),
        ("keras_remat.backends.base", "import tensorflow", "framework tensorflow"),
        (
            "keras_remat.backends.tensorflow.ordered.lower",
            "from keras_remat.backends.base import TracedStep\nimport jax",
            "framework jax",
        ),
        ("keras_remat.core.simulate", "import scipy.optimize", "core"),
        ("keras_remat.planning.plan", "import keras_remat.nothing", "does not exist"),
    ],
)
def test_the_checker_finds_faults(module, line, fault):
    assert any(fault in text for text in faults(module, imports_of(line, module)))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("keras_remat.planning.plan", "import keras\nfrom keras_remat.solvers import solve"),
        ("keras_remat.backends.tensorflow.graph.trace", "import tensorflow as tf\nimport keras"),
        ("keras_remat.backends.jax.trace", "import jax\nfrom jaxlib import xla_client"),
        ("keras_remat.core.simulate", "import numpy as np\nimport math"),
        (
            "keras_remat.solvers.engines.milp",
            "import scipy.optimize\nfrom ortools.sat.python import cp_model",
        ),
    ],
)
def test_the_checker_accepts_what_is_allowed(module, line):
    assert list(faults(module, imports_of(line, module))) == []
