"""What XLA needs for a schedule, in terms of what the model of its fusion predicts: one ratio,
learnt from the compilations so far.

The simulated peak of a schedule is a model of what XLA will put into memory; buffer packing, copies
and kernels that need scratch come on top. How much depends on the model being trained and on how
tight the schedule is, so each compilation gives a point: activation bytes (peak − resident) of the
schedule relative to those of store-all, and compiled over simulated activation bytes. In between
the ratio is taken on the line through the neighbours, outside it is that of the nearest point.

Keras's own step and lowered schedules are calibrated apart: lowering keeps random bits and copies
of small values out of the forward phase, so that even store-all takes less lowered than plain.

Relative bytes hold at every batch size, so what was learnt at one serves the search over others.
"""

from __future__ import annotations

from bisect import bisect

FIRST_RATIO = 1.15
"""Before anything was compiled: about what XLA:CPU needed on the models of
``benchmarks/compiled_step.py``."""


class Calibration:
    """Compiled over simulated activation bytes."""

    def __init__(self) -> None:
        self._points: dict[float, float] = {}

    def learn(self, simulated_bytes: int, store_all_bytes: int, compiled_bytes: int) -> None:
        """Takes a compilation in; all three are activation bytes."""
        if simulated_bytes > 0 and store_all_bytes > 0:
            self._points[simulated_bytes / store_all_bytes] = compiled_bytes / simulated_bytes

    def predict(self, simulated_bytes: int, store_all_bytes: int) -> int:
        """Activation bytes that the compiled schedule will need."""
        return int(
            simulated_bytes
            * self._ratio(simulated_bytes / store_all_bytes if store_all_bytes else 1.0)
        )

    def _ratio(self, tightness: float) -> float:
        if not self._points:
            return FIRST_RATIO
        known = sorted(self._points)
        at = bisect(known, tightness)
        if at in (0, len(known)):
            return self._points[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        share = (tightness - low) / (high - low)
        return (1 - share) * self._points[low] + share * self._points[high]
