"""Holds the memory limit of a ``fit``, and compares peaks with it.

Two kinds of peaks are compared with a limit. A predicted peak has to leave the margin free, because
predictions are off by a little; a measured peak is a fact and may take the margin, too. Only this
module decides, in :meth:`Limit.fits` and :meth:`Limit.holds`, what a peak is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keras_remat.errors import less_margin
from keras_remat.units import format_bytes


@dataclass(frozen=True)
class Limit:
    """Holds the bytes that a step may have in use.

    Args:
        total_bytes: bytes of the limit; every byte of the device's allocator counts.
        margin: share of the limit that predictions keep free.
        reserved_bytes: bytes in the same memory while a step runs that no prediction counts.

    Example:
        >>> limit = Limit(1000, 0.05)
        >>> limit.usable_bytes, limit.fits(960), limit.holds(960)
        (950, False, True)
        >>> print(limit.lowered(800))
        800 B less 5 % margin = 760 B
    """

    total_bytes: int
    margin: float = 0.0
    reserved_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """Returns the most that a step may be predicted to need."""
        return max(1, int(self.total_bytes * (1 - self.margin)) - self.reserved_bytes)

    def fits(self, predicted_bytes: int) -> bool:
        """Returns whether a predicted peak leaves the margin free."""
        return predicted_bytes <= self.usable_bytes

    def holds(self, measured_bytes: int) -> bool:
        """Returns whether a measured peak is within the limit."""
        return measured_bytes <= self.total_bytes

    def lowered(self, to_bytes: int) -> Limit:
        """Returns the limit for a device that turned out to have less; a limit never rises."""
        return replace(self, total_bytes=max(1, min(self.total_bytes, to_bytes)))

    def with_least_margin(self, margin: float) -> Limit:
        """Returns the limit whose predictions keep at least this share free."""
        return replace(self, margin=max(self.margin, margin))

    def reserving(self, nbytes: int) -> Limit:
        """Returns the limit with ``nbytes`` less for the step."""
        return replace(self, reserved_bytes=self.reserved_bytes + nbytes)

    def __str__(self) -> str:
        usable = replace(self, reserved_bytes=0).usable_bytes
        return less_margin(self.total_bytes, usable, format_bytes(usable))
