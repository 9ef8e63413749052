"""Imports point down only. The table says which layer a module is in; a module it does not know fails the test.

| layer | modules |
|---|---|
| 6 | the package itself: the public names |
| 5 | callback, the command line |
| 4 | plan, planning, planner, guard, tuner, baseline, compilation, grouping, batching, report, show |
| 4 | autotune, scaling, time_fit, max_batch, compaction, correction |
| 3 | solvers/* and backends/*, which never import each other |
| 2 | schedule, simulate, validate |
| 1 | graph, profile, problem, serialize |
| 0 | errors, units |
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
    (r"keras_remat", 6),
    (r"keras_remat\.(callback|cli|__main__)", 5),
    (
        r"keras_remat\.(plan|planning|planner|guard|tuner|compilation|grouping|batching|autotune|scaling|time_fit|max_batch|baseline|compaction|correction|report|show)",
        4,
    ),
    (r"keras_remat\.(solvers|backends)(\..+)?", 3),
    (r"keras_remat\.(schedule|simulate|validate)", 2),
    (r"keras_remat\.(graph|profile|problem|serialize)", 1),
    (r"keras_remat\.(errors|units)", 0),
]
FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "torch", "keras"}
CORE_MAY_IMPORT = {"numpy"}  # beside the standard library and this package


def module_name(path):
    """``keras_remat/solvers/dtr.py`` → ``keras_remat.solvers.dtr``."""
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
    """Every module that ``source`` imports, anywhere in it, by statement or by ``import_module`` of a literal name."""
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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found - {module}


def faults(module, imported):
    """What is wrong with the imports of one module, as sentences."""
    own = layer(module)
    side = module.split(".")[1:2]
    backend = re.match(r"keras_remat\.backends\.(tensorflow|jax)(\.|$)", module)
    for name in sorted(imported):
        root = name.partition(".")[0]
        if root == "keras_remat":
            if name not in MODULES:
                yield f"{module} imports {name}, which does not exist"
            elif layer(name) > own:
                yield f"{module} (layer {own}) imports {name} (layer {layer(name)})"
            elif own == layer(name) == 3 and name.split(".")[1:2] != side:
                yield f"{module} imports {name}: solvers and backends never import each other"
            elif backend and re.match(
                rf"keras_remat\.backends\.(?!(base|examples|host|micro_batches)$|xla(\.|$)|{backend[1]}(\.|$))", name
            ):
                yield f"{module} imports another backend: {name}"
        elif root in FRAMEWORKS:
            above = root == "keras" and (own in (4, 5) or side == ["backends"])
            if not above and (backend is None or root.removesuffix("lib") != backend[1]):
                yield f"{module} imports the framework {root}"
        elif own < 3 and root not in CORE_MAY_IMPORT and root not in sys.stdlib_module_names:
            yield f"{module} (core) imports {root}"


def imports_of_file(module):
    path = MODULES[module]
    return imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    assert list(faults(module, imports_of_file(module))) == []


def test_no_import_cycles():
    """Not even within a layer; the package itself imports on use only, and packages may import their modules on use."""
    edges = {m: imports_of_file(m) & set(MODULES) for m in MODULES if m != "keras_remat"}
    assert list(TopologicalSorter(edges).static_order())


def test_every_module_is_in_the_table():
    assert {layer(module) for module in MODULES} >= {0, 1, 2, 3, 6}
    with pytest.raises(LookupError):
        layer("keras_remat.utils")


def test_no_catch_all_modules():
    assert not {"utils", "common", "helpers"} & {m.rpartition(".")[2] for m in MODULES}


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("keras_remat.graph", "from keras_remat.schedule import Schedule", "layer 2"),
        ("keras_remat.graph", "from keras_remat import schedule", "layer 2"),
        ("keras_remat.graph", "from .schedule import Schedule", "layer 2"),
        ("keras_remat.graph", "def f():\n    import keras_remat.solvers", "layer 3"),
        ("keras_remat.problem", "from keras_remat import Graph", "layer 6"),
        ("keras_remat.solvers.dtr", "from keras_remat.backends import base", "never import each other"),
        ("keras_remat.backends.jax.trace", "from keras_remat.solvers import solve", "never import each other"),
        ("keras_remat.solvers.dtr", "import tensorflow as tf", "framework tensorflow"),
        ("keras_remat.plan", "from jax import numpy", "framework jax"),
        ("keras_remat.plan", "importlib.import_module('tensorflow.python')", "framework tensorflow"),
        ("keras_remat.solvers.dtr", "import keras", "framework keras"),
        ("keras_remat.backends.jax.trace", "import tensorflow", "framework tensorflow"),
        ("keras_remat.backends.base", "import tensorflow", "framework tensorflow"),
        (
            "keras_remat.backends.tensorflow.lower",
            "from keras_remat.backends.base import TracedStep\nimport jax",
            "framework jax",
        ),
        ("keras_remat.simulate", "import scipy.optimize", "core"),
        ("keras_remat.plan", "import keras_remat.nothing", "does not exist"),
    ],
)
def test_the_checker_finds_faults(module, line, fault):
    assert any(fault in text for text in faults(module, imports_of(line, module)))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("keras_remat.plan", "import keras\nfrom keras_remat.solvers import solve"),
        ("keras_remat.backends.tensorflow.trace", "import tensorflow as tf\nimport keras"),
        ("keras_remat.backends.jax.trace", "import jax\nfrom jaxlib import xla_client"),
        ("keras_remat.simulate", "import numpy as np\nimport math"),
        ("keras_remat.solvers.milp", "import scipy.optimize\nfrom ortools.sat.python import cp_model"),
    ],
)
def test_the_checker_accepts_what_is_allowed(module, line):
    assert list(faults(module, imports_of(line, module))) == []
