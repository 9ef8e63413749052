"""Holds a picture as a record: axes and shapes, in no drawing library's terms.

:mod:`keras_remat.reporting.pictures` chooses what a picture shows, in bytes and seconds. The same
record is drawn by matplotlib (:mod:`keras_remat.reporting.mpl`) for figures and as SVG text
(:mod:`keras_remat.reporting.svg`) for pages, so that both show the same.

The same thing has the same colour everywhere. A *look* is a colour, or a key of :data:`COLORS`,
which a page may draw otherwise in a dark theme. The palette is Okabe and Ito's, which colour-blind
readers tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from keras_remat.core.graph import BACKWARD, FORWARD, UPDATE
from keras_remat.reporting.curves import RESIDENT, REST, WORKSPACE
from keras_remat.units import byte_unit, format_seconds

#: Look → colour.
COLORS = {
    "plain": "#7b8794",
    "plan": "#0072b2",
    "limit": "#c8102e",
    "measured": "#cc79a7",
    "resident": "#8d99a4",
    "kept": "#9ec9e2",
    "again": "#d55e00",
    FORWARD: "#56b4e9",
    BACKWARD: "#e69f00",
    UPDATE: "#009e73",
}
#: Most numbers along an axis, without 0.
_MOST_STEPS = 5
_LAYERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fc0", "#b0b000")
_OTHERS = {REST: "#b8bfc7", WORKSPACE: "#5f6b76", RESIDENT: COLORS["resident"]}


def layer_colors(names: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each layer; those beyond the palette have that of the rest."""
    free = iter(_LAYERS)
    return {name: _OTHERS.get(name) or next(free, _OTHERS[REST]) for name in names}


@dataclass(frozen=True)
class Shape:
    """Is the base of all shapes that a chart draws.

    Args:
        look: a key of :data:`COLORS`, or a colour; empty for a shape that is seen on hover only.
        label: name in the legend, which several shapes may share; empty for none.
        title: text that a page shows on hover; the label where it is empty.
    """

    look: str
    label: str = ""
    title: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Band(Shape):
    """Colours the ground from the bottom to the top."""

    begin: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Bar(Shape):
    """Fills a rectangle."""

    left: float = 0.0
    bottom: float = 0.0
    width: float = 1.0
    height: float = 1.0


@dataclass(frozen=True)
class Steps(Shape):
    """Draws a stepped curve: heights, and the edges between which they hold."""

    edges: Sequence[float] = ()
    heights: Sequence[float] = ()


@dataclass(frozen=True)
class Line(Shape):
    """Joins points (x, y) by a line; one alone is a mark."""

    points: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Rule(Shape):
    """Crosses the whole picture at an amount, from bottom to top where it is upright."""

    at: float = 0.0
    upright: bool = False


@dataclass(frozen=True)
class Axis:
    """Describes one side of a chart.

    Args:
        name: name of the amounts along the axis.
        high, low: amounts at the ends.
        unit: unit of the amounts; empty for plain numbers.
        ticks: amount → its name, where the axis shows no numbers; empty for no names.
        downward: whether the lowest amount is at the top.
    """

    name: str
    high: float
    low: float = 0.0
    unit: Literal["", "bytes", "seconds"] = field(default="", kw_only=True)
    ticks: Mapping[float, str] | None = field(default=None, kw_only=True)
    downward: bool = field(default=False, kw_only=True)

    @property
    def span(self) -> float:
        """Returns the difference between the ends; never 0."""
        return self.high - self.low or 1.0

    @property
    def marked(self) -> dict[float, str]:
        """Returns amount → its name, at round numbers where the axis has no ticks of its own."""
        if self.ticks is not None:
            return dict(self.ticks)
        if self.unit == "bytes":
            name, size = byte_unit(int(self.high))
            marked = {k * size: f"{k:g} {name}" for k in round_numbers(self.high / size)}
        elif self.unit == "seconds":
            marked = {k: format_seconds(k) for k in round_numbers(0.93 * self.high)}
        else:
            marked = {k: f"{k:g}" for k in round_numbers(self.high)}
        return {amount: name for amount, name in marked.items() if amount >= self.low}


@dataclass(frozen=True)
class Chart:
    """Holds a picture.

    Args:
        title: words for what the picture shows.
        x, y: its axes.
        shapes: the shapes that are drawn, from the ground up.
        aspect: its height as a share of its width.
    """

    title: str
    x: Axis
    y: Axis
    shapes: Sequence[Shape]
    aspect: float = 0.5

    @property
    def legend(self) -> dict[str, str]:
        """Returns label → look of the shapes that have a label."""
        return {shape.label: shape.look for shape in self.shapes if shape.label}


def round_numbers(highest: float) -> list[float]:
    """Returns round numbers from 0 to ``highest``, in at most five steps.

    >>> round_numbers(7)
    [0.0, 2.0, 4.0, 6.0]
    """
    if highest <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(highest / _MOST_STEPS))
    step = next(
        m * power for m in (1, 2, 5, 10) if highest / (m * power) <= _MOST_STEPS * (1 + 1e-9)
    )
    return [k * step for k in range(int(highest / step * (1 + 1e-9)) + 1)]
