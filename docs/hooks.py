"""Turns the Sphinx roles of docstrings into plain code for MkDocs."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Returns the page with ``:class:`~a.b.C``` as ``C``."""

    def code(match: re.Match[str]) -> str:
        name = match[2].rpartition(".")[2] if match[1] else match[2]
        return f"<code>{name}</code>"

    return _ROLE.sub(code, html)
