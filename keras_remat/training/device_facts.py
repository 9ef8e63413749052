"""Records what the steps of one ``fit`` have shown of its device, in whichever mode they ran.

A ``fit`` may train in several modes, one after the other or in turn
(:mod:`keras_remat.training.modes`). They share the device, so what one mode has shown holds for
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Holds what steps have shown so far.

    Args:
        copy_s: seconds that copying the model's state to the host took; ``None`` before the first
            copy.
        step_s: seconds of the newest step that was waited for.
        after_plain: whether the last step was Keras's own, not one under a plan.
        plain_seen: compilation → the predicted activation bytes of the largest measured plain step,
            and the ratio of its measured bytes to these. Predictions differ between compilations.
    """

    copy_s: float | None = None
    step_s: float = 0.0
    after_plain: bool = True
    plain_seen: Mapping[str, tuple[int, float]] = field(default_factory=dict)
