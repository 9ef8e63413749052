"""Holds a graph's costs on a device: seconds and workspace per op, and the resident bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from keras_remat.core.graph import check_bytes
from keras_remat.errors import InvalidProblemError

MAX_SECONDS = sys.float_info.max


@dataclass(frozen=True)
class Profile:
    """Holds the costs of one graph, op by op.

    Args:
        op_time_s: seconds per op, in the order of ``Graph.ops``.
        op_workspace_bytes: bytes alive only while the op runs, in the same order.
        resident_bytes: bytes in use through the whole step: weights, optimizer slots, the batch.
        source: ``"measured"`` on the live device or ``"estimated"`` from shapes.
        device: name for people, e.g. ``"CPU:0"``.
        backend: ``"tensorflow"``, ``"jax"``, ``"torch"`` or ``""`` when the costs came from a file.

    Raises:
        InvalidProblemError: a negative, NaN or infinite cost, or lists of different length.
    """

    op_time_s: tuple[float, ...]
    op_workspace_bytes: tuple[int, ...]
    resident_bytes: int
    source: Literal["measured", "estimated"] = "measured"
    device: str = ""
    backend: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "op_time_s", tuple(self.op_time_s))
        object.__setattr__(self, "op_workspace_bytes", tuple(self.op_workspace_bytes))
        if len(self.op_time_s) != len(self.op_workspace_bytes):
            raise InvalidProblemError(
                f"{len(self.op_time_s)} times but {len(self.op_workspace_bytes)} workspaces",
                field="op_time_s",
                value=len(self.op_time_s),
            )
        for at, seconds in enumerate(self.op_time_s):
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, (int, float))
                or not 0 <= seconds <= MAX_SECONDS
            ):
                raise InvalidProblemError(
                    f"time must be finite and at least 0, got {seconds!r}",
                    field=f"ops[{at}].time_s",
                    value=seconds,
                )
        object.__setattr__(self, "op_time_s", tuple(map(float, self.op_time_s)))
        for at, nbytes in enumerate(self.op_workspace_bytes):
            check_bytes(nbytes, f"ops[{at}].workspace_bytes")
        check_bytes(self.resident_bytes, "resident_bytes")
        if self.source not in ("measured", "estimated"):
            raise InvalidProblemError(
                f'must be "measured" or "estimated", got {self.source!r}',
                field="source",
                value=self.source,
            )
