"""Makes ``quickstart.ipynb`` of ``quickstart.md``: its text and snippets, run, with their output.

pip install nbclient nbformat ipykernel && python docs/make_notebook.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import v4

DOCS = Path(__file__).resolve().parent
#: What a reader of a notebook sees beside the page's own snippets.
EXTRA = [
    'remat.report.plot("memory")',
    'remat.report.plot("holders")',
    'remat.plan.plot("schedule")',
]


def cells(page: str) -> list[nbformat.NotebookNode]:
    """Returns a cell for every piece of text and every Python snippet of a page."""
    found = []
    for part in re.split(r"(^```python\n.*?^```\n)", page, flags=re.M | re.S):
        code = re.fullmatch(r"```python\n(.*?)```\n", part, re.S)
        if code:
            found.append(v4.new_code_cell(code[1].rstrip()))
        elif part.strip():
            found.append(v4.new_markdown_cell(part.strip()))
    return found


def main() -> int:
    """Writes the notebook; returns 0."""
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    page = "# Quickstart\n\n" + page[page.index("## Train under a limit") :]
    notebook = v4.new_notebook(cells=[*cells(page), *map(v4.new_code_cell, EXTRA)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        if cell.cell_type == "code":  # what frameworks say on stderr is of this machine
            cell["outputs"] = [o for o in cell.outputs if o.get("name") != "stderr"]
    nbformat.validate(notebook)
    nbformat.write(notebook, DOCS / "quickstart.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())
