"""What a fresh interpreter needs to import this package."""

from __future__ import annotations

import os
from pathlib import Path


def environment() -> dict[str, str]:
    """Returns the caller's environment, with this package importable however the caller found
    it."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
