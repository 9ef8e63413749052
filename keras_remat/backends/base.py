"""What every backend hands to the layers above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_remat.graph import Graph


@dataclass(frozen=True)
class TracedStep:
    """One train step as a graph, with the framework's objects beside it.

    Args:
        graph: what the step computes.
        handles: op id → what the backend needs to run that op; nothing outside the backend looks inside.
        backend: ``"tensorflow"`` or ``"jax"``.
    """

    graph: Graph
    handles: Mapping[int, Any]
    backend: str
