"""The colours of every picture: the same thing has the same colour everywhere.

Okabe and Ito's palette, which colour-blind readers tell apart.
"""

from __future__ import annotations

from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.reporting.curves import RESIDENT, REST, WORKSPACE

PLAIN, PLAN, LIMIT, MEASURED = "#7b8794", "#0072b2", "#c8102e", "#cc79a7"
KEPT, RECOMPUTED = "#9ec9e2", "#d55e00"
PHASES = {FORWARD: "#56b4e9", BACKWARD: "#e69f00", UPDATE: "#009e73"}
LAYERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fc0", "#b0b000")
OTHERS = {REST: "#b8bfc7", WORKSPACE: "#5f6b76", RESIDENT: "#8d99a4"}


def layer_colors(names: list[str]) -> dict[str, str]:
    """Returns a colour for each layer; those beyond the palette have that of the rest."""
    free = iter(LAYERS)
    return {name: OTHERS.get(name) or next(free, OTHERS[REST]) for name in names}
