"""The examples in the docstrings and on the pages run, and the README keeps its promises."""

import ast
import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from own_process import environment, output_of

import keras_remat

ROOT = Path(keras_remat.__file__).parent
README, DOCS = ROOT.parent / "README.md", ROOT.parent / "docs"
PAGES = [page for page in [README, ROOT.parent / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
         if page.exists()]  # fmt: skip
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_modules_have_examples():
    assert {"core.simulate", "training.decide", "reporting.text", "units"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(f"keras_remat.{name}"))
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, re.M)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_is_short_and_its_first_screen_shows_what_it_is():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 240
    first = lines[: lines.index("## How it works")]
    assert len(first) <= 60
    assert {"```bash", "```python"} <= set(first)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_has_100_columns(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [n for n in lines if len(n) > 100 and not n.startswith(("|", "!"))] == []


def snippets(page):
    """The Python of a page, but what stands alone because it needs a package that few have."""
    return [code for code in all_snippets(page) if not code.startswith("# needs ")]


def all_snippets(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


ALONE = [code for page in PAGES for code in all_snippets(page) if code.startswith("# needs ")]


@pytest.fixture(scope="module")
def help_text():
    return output_of("-m", "keras_remat", "--help")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_is_python_and_every_command_exists(page, help_text):
    text = page.read_text(encoding="utf-8")
    for code in all_snippets(page):
        ast.parse(code)
    used = set(re.findall(r"^keras-remat ([\w-]+)", text, re.M))
    assert [name for name in used if not re.search(rf"^ +{name}\b", help_text, re.M)] == []


def run_snippets(codes, folder):
    """Runs snippets one after the other in one fresh interpreter."""
    variables = environment(KERAS_BACKEND="tensorflow")
    output_of("-c", "\n".join(codes), cwd=folder, env=variables, timeout=900)


CHEAP = [page for page in PAGES if (c := "".join(snippets(page))) and "import keras\n" not in c
         and "import keras," not in c]  # fmt: skip
DEAR = [page for page in PAGES if snippets(page) and page not in CHEAP]


@pytest.mark.parametrize("page", CHEAP, ids=lambda page: page.name)
def test_snippets_without_a_framework_run(page, tmp_path):
    run_snippets(snippets(page), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", DEAR, ids=lambda page: page.name)
def test_snippets_that_train_run(page, tmp_path):
    pytest.importorskip("tensorflow")
    run_snippets(snippets(page), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", ALONE, ids=lambda code: code.split()[2])
def test_snippets_that_need_another_package_run(code, tmp_path):
    pytest.importorskip("tensorflow")
    pytest.importorskip(code.split()[2])
    run_snippets([code], tmp_path)


def test_the_site_has_every_page():
    if not DOCS.exists():
        pytest.skip("an installed package has no docs beside it")
    nav = re.findall(r"^  - (\w+\.md)$", (ROOT.parent / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_site_documents_every_public_name():
    if not DOCS.exists():
        pytest.skip("an installed package has no docs beside it")
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = {n for n in keras_remat.__all__ if not n.startswith("_") and not n.endswith("Error")}
    assert [name for name in sorted(names) if f"::: keras_remat.{name}\n" not in text] == []


def test_the_notebook_has_its_pages_words_and_snippets():
    if not DOCS.exists():
        pytest.skip("an installed package has no docs beside it")
    page, notebook = DOCS / "quickstart.md", DOCS / "quickstart.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    told = ["".join(cell["source"]).removeprefix("# Quickstart\n\n") for cell in cells]
    text, picture = page.read_text(encoding="utf-8"), re.compile(r'remat\.\w+\.plot\("\w+"\)')
    assert [cell for cell in told if cell not in text and not picture.fullmatch(cell)] == []
    assert [code for code in all_snippets(page) if code.rstrip() not in told] == []


@pytest.mark.slow
def test_the_site_is_built_by_one_command(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RematAutotune" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")


#: Headings of the troubleshooting page that are others' words.
OTHERS = {
    "Allocator stats not available",
    "Another profiler is running",
    "Your input ran out of data",
}


def test_troubleshooting_quotes_messages_that_exist():
    if not DOCS.exists():
        pytest.skip("an installed package has no docs beside it")
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py"))
    words = re.sub(r"\s+", " ", re.sub(r"""['"]\s+f?['"]""", "", source))
    for heading in re.findall(r"^## (.*)$", text, re.M):
        for part in re.split(r"…|'matplotlib'|memory_limit=8 is 8 B|\"8GiB\"", heading):
            known = part.strip(" ,:?") in words or heading in OTHERS
            assert known or heading == "Training is slower than before", part


def test_continuous_integration_calls_the_readmes_test_command():
    ci = ROOT.parent / ".ci" / "run"
    if not ci.exists():
        pytest.skip("an installed package has no .ci beside it")
    (command,) = re.findall(
        r"^pip install .*pytest.*$", (ROOT.parent / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert command in ci.read_text(encoding="utf-8")
