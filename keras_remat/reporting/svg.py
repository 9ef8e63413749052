"""Draws charts as SVG text, which is sharp at any size.

It follows the reader's light or dark theme, and shows names on hover.

The text is made here and not by matplotlib, which is optional, knows no themes and shows nothing on
hover. Text is large in the picture's own units, so that it can be read where the page is as narrow
as a phone. An element's class is its look, by which the page's style gives it its colour.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from keras_remat.reporting.chart import (
    COLORS,
    Axis,
    Band,
    Bar,
    Chart,
    Line,
    Rule,
    Shape,
    Steps,
)
from keras_remat.reporting.tables import readable

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 720, 96, 12, 12, 40, 24


def escape(text: str) -> str:
    """Returns ``text`` on one line, escaped for HTML and SVG."""
    return html.escape(readable(text), quote=True)


def paint(kind: str, look: str) -> str:
    """Returns the attributes that give an element its colour by the page's style.

    An element without a look is seen on hover only.
    """
    if not look:
        return 'class="hover"'
    if look in COLORS:
        return f'class="{kind} {look}"'
    return f'class="{kind}" style="--c:{look}"'


def draw(chart: Chart) -> str:
    """Returns a chart as SVG text."""
    return "".join(_Drawing(chart).parts())


class _Drawing:
    """Draws a chart in the picture's own units."""

    def __init__(self, chart: Chart):
        self._chart, self._height = chart, round(_WIDTH * chart.aspect)
        self._bottom = _BOTTOM if chart.x.unit else 2 * _LINE

    def parts(self) -> list[str]:
        """Returns the elements, from the ground up."""
        chart = self._chart
        label = html.escape(chart.title, quote=True)
        return [
            f'<svg viewBox="0 0 {_WIDTH} {self._height}" role="img" aria-label="{label}">',
            *self._numbers_below(chart.x),
            *self._numbers_beside(chart.y),
            *map(self._shape, chart.shapes),
            "</svg>",
        ]

    # ---------------------------------------------------------------- where things are

    def _x(self, amount: float) -> float:
        axis = self._chart.x
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (amount - axis.low) / axis.span

    def _y(self, amount: float) -> float:
        axis = self._chart.y
        share = (amount - axis.low) / axis.span
        share = share if axis.downward else 1 - share
        return _TOP + (self._height - _TOP - self._bottom) * share

    # ---------------------------------------------------------------- axes

    def _numbers_below(self, axis: Axis) -> list[str]:
        """Draws numbers below the picture, and the axis's name where they have no unit."""
        low = self._height - self._bottom + _LINE
        parts = [_text(self._x(k), low, "middle", name) for k, name in axis.marked.items()]
        if not axis.unit:
            middle = (_LEFT + _WIDTH - _RIGHT) / 2
            parts.append(_text(middle, self._height - 4, "middle", axis.name))
        return parts

    def _numbers_beside(self, axis: Axis) -> list[str]:
        """Draws numbers and lines at them, or the axis's name."""
        if not axis.marked:
            middle = -(_TOP + self._height - self._bottom) / 2
            return [
                f'<text transform="rotate(-90)" x="{middle}" y="24" '
                f'text-anchor="middle">{escape(axis.name)}</text>'
            ]
        parts = []
        for amount, name in axis.marked.items():
            y = self._y(amount)
            lines = name.split("\n")
            top = y + 6 - _LINE * (len(lines) - 1) / 2
            parts += [
                _text(_LEFT - 8, top + _LINE * k, "end", line) for k, line in enumerate(lines)
            ]
            if axis.ticks is None:
                ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
                parts.append(f'<line class="grid" {ends}/>')
        if not axis.unit:
            parts.append(_text(_LEFT, _TOP + 6, "start", axis.name))
        return parts

    # ---------------------------------------------------------------- shapes

    def _shape(self, shape: Shape) -> str:
        drawers: dict[type[Shape], Callable[[Any], str]] = {
            Band: self._band, Bar: self._bar, Steps: self._steps, Line: self._line,
            Rule: self._rule,
        }  # fmt: skip
        return drawers[type(shape)](shape)

    def _band(self, band: Band) -> str:
        left, right = self._x(band.begin), self._x(band.end)
        inside = self._height - _TOP - self._bottom
        return _rect(band, paint("band", band.look), left, _TOP, right - left, inside)

    def _bar(self, bar: Bar) -> str:
        left, right = self._x(bar.left), self._x(bar.left + bar.width)
        top, bottom = sorted((self._y(bar.bottom), self._y(bar.bottom + bar.height)))
        return _rect(bar, paint("bar", bar.look), left, top, max(1.0, right - left), bottom - top)

    def _steps(self, curve: Steps) -> str:
        before = f"{self._y(curve.heights[0]):.1f}"
        path = [f"M{self._x(curve.edges[0]):.1f} {before}"]
        for amount, end in zip(curve.heights, curve.edges[1:], strict=True):
            height = f"{self._y(amount):.1f}"
            path.append("" if height == before else f"V{height}")
            path.append(f"H{self._x(end):.1f}")
            before = height
        line, floor = "".join(path), f"V{self._y(0):.1f}H{self._x(curve.edges[0]):.1f}Z"
        return (
            f'<path {paint("area", curve.look)} d="{line}{floor}"/>'
            f'<path {paint("line", curve.look)} d="{line}"/>'
        )

    def _line(self, line: Line) -> str:
        places = [(f"{self._x(x):.1f}", f"{self._y(y):.1f}") for x, y in line.points]
        radius, title = 6 if len(places) == 1 else 4, escape(line.title or line.label)
        joined = " ".join(map(",".join, places))
        return f'<polyline {paint("line", line.look)} points="{joined}"/>' + "".join(
            f'<circle {paint("mark", line.look)} cx="{x}" cy="{y}" r="{radius}">'
            f"<title>{title}</title></circle>"
            for x, y in places
        )

    def _rule(self, rule: Rule) -> str:
        """Draws a line with its name at the right end, or at the top."""
        left, right, top, bottom = self._x(rule.at), 0.0, float(_TOP), 0.0
        if rule.upright:
            right, bottom, place = left, self._height - self._bottom, (left - 4, top + 4)
        else:
            top = bottom = self._y(rule.at)
            left, right = _LEFT, _WIDTH - _RIGHT
            place = right - 4, top + (-6 if top > _TOP + 8 else 18)
        return (
            f"<line {paint('rule', rule.look)} "
            f'x1="{left:.1f}" x2="{right:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
            f"<text {paint('label', rule.look)} "
            f'x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="end">{escape(rule.label)}</text>'
        )


def _rect(shape: Shape, look: str, x: float, y: float, width: float, height: float) -> str:
    """Draws a rectangle that shows its title on hover; the names in it are shortened already."""
    title = html.escape(shape.title or shape.label)
    return (
        f"<rect {look} "
        f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{title}</title></rect>"
    )


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
