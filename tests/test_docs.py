"""The examples in the docstrings run, and the README keeps its promises."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import keras_remat

ROOT = Path(keras_remat.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [ROOT / "units.py", ROOT / "errors.py", ROOT / "reporting" / "text.py"]
    + [path for path in (ROOT / "core").glob("*.py") if path.name != "__init__.py"]
)
WITH_EXAMPLES = {"units", "core.graph", "core.schedule", "core.simulate", "reporting.text"}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(f"keras_remat.{name}"))
    assert results.failed == 0
    assert results.attempted > 0 or name not in WITH_EXAMPLES


def test_readme_links_exist():
    readme = ROOT.parent / "README.md"
    if not readme.exists():
        pytest.skip("an installed package has no README beside it")
    links = re.findall(r"\]\(([^)#]+)\)", readme.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT.parent / link).exists()]
    assert links
    assert missing == []


def test_continuous_integration_calls_the_readmes_test_command():
    ci = ROOT.parent / ".ci" / "run"
    if not ci.exists():
        pytest.skip("an installed package has no .ci beside it")
    (command,) = re.findall(
        r"^pip install .*pytest.*$", (ROOT.parent / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert command in ci.read_text(encoding="utf-8")
