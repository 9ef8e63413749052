"""Names how strictly XLA is made to keep to a schedule.

:mod:`keras_remat.backends.xla.protect` writes the schedule. A file of its own, though short: plans,
backends and XLA's writer share it.
"""

from __future__ import annotations

from enum import Enum


class Writing(Enum):
    """Says how much of a schedule is protected where no op runs again.

    The quickest way comes first. The values are used in plan files.
    """

    LOOSE = "loose"
    """Nothing."""
    PHASED = "phased"
    """The phases are kept apart, roughly."""
    UPDATED = "updated"
    """Large weights are updated as soon as their gradients are there, and the backward phase turns
    kernels for itself. What is read in a transposed copy is held, and copied when it is read. (The
    phases are not kept apart.)"""
    HELD = "held"
    """Both, and values that no product reads are held."""
    STRICT = "strict"
    """All of it, as on a CPU."""


WRITINGS = tuple(writing.value for writing in Writing)
