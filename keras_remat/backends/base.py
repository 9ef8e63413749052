"""What every backend hands upwards: a traced step, framework-free where it can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_remat.graph import Graph


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One train step as a graph of ops, with the framework's objects kept apart.

    Args:
        graph: what the step computes; no framework object in it.
        handles: op id → the framework's object for the op. Nothing outside the backend looks inside.
        resident_bytes: bytes of weights, optimizer slots, other variables, constants and the batch.
    """

    graph: Graph
    handles: Mapping[int, Any]
    resident_bytes: int
