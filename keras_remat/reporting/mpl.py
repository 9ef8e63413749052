"""Draws charts by matplotlib, which is imported when one is drawn.

A picture is a :class:`matplotlib.figure.Figure` that belongs to no window: notebooks show it, and
``figure.savefig("picture.svg")`` writes it.
"""

from __future__ import annotations

import io
from functools import lru_cache
from importlib import import_module
from typing import Any

from keras_remat.errors import MissingPackageError
from keras_remat.reporting.chart import COLORS, Axis, Band, Bar, Chart, Line, Rule, Shape, Steps
from keras_remat.units import byte_unit

#: Inches; what matplotlib leaves out of a legend; how lines are drawn that are not whole.
_WIDTH, _UNNAMED = 8.0, "_nolegend_"
_RULES = {"limit": "--", "resident": ":"}


def figure(*charts: Chart) -> Any:
    """Returns charts as one figure, one above the other, along the same x axis.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    height = _WIDTH * sum(chart.aspect for chart in charts)
    drawn = _picture()(figsize=(_WIDTH, height), layout="constrained")
    named: set[str] = set()
    for axes, chart in zip(
        drawn.subplots(len(charts), 1, squeeze=False)[:, 0], charts, strict=True
    ):
        _draw(axes, chart, named)
        named.update(chart.legend)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in drawn.axes[:-1]:
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)
    drawn.axes[0].set_title(_plain_text(charts[0].title), loc="left", fontsize=11)
    drawn.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return drawn


def _draw(axes: Any, chart: Chart, named: set[str]) -> None:
    """Draws a chart; labels that are ``named`` already are left out."""
    x_name, x_unit = _unit(chart.x)
    y_name, y_unit = _unit(chart.y)
    together: dict[tuple[type[Shape], str, str], list[Any]] = {}
    for shape in chart.shapes:
        key = (type(shape), shape.look, "" if shape.label in named else shape.label)
        together.setdefault(key, []).append(shape)
    for (kind, look, label), shapes in together.items():
        style = {"color": COLORS.get(look, look), "label": _plain_text(label) or _UNNAMED}
        _DRAW[kind](axes, shapes, x_unit, y_unit, look, style)
    for axis, unit, name, side in ((chart.x, x_unit, x_name, "x"), (chart.y, y_unit, y_name, "y")):
        ends = axis.low / unit, axis.high / unit
        getattr(axes, f"set_{side}lim")(*(ends[::-1] if axis.downward else ends))
        getattr(axes, f"set_{side}label")(name)
        if axis.ticks is not None:
            places = [amount / unit for amount in axis.ticks]
            getattr(axes, f"set_{side}ticks")(places, list(axis.ticks.values()))


def _bands(axes: Any, bands: list[Band], x: float, y: float, look: str, style: Any) -> None:
    for band in bands:
        axes.axvspan(band.begin / x, band.end / x, alpha=0.12, lw=0, **style)
        style["label"] = _UNNAMED


def _bars(axes: Any, bars: list[Bar], x: float, y: float, look: str, style: Any) -> None:
    axes.bar(
        [bar.left / x for bar in bars], [bar.height / y for bar in bars],
        [bar.width / x for bar in bars], [bar.bottom / y for bar in bars], align="edge", **style,
    )  # fmt: skip


def _steps(axes: Any, curves: list[Steps], x: float, y: float, look: str, style: Any) -> None:
    for curve in curves:
        edges = [amount / x for amount in curve.edges]
        heights = [amount / y for amount in curve.heights]
        axes.stairs(heights, edges, lw=1.4, **style)
        axes.stairs(heights, edges, color=style["color"], alpha=0.12, fill=True)


def _lines(axes: Any, lines: list[Line], x: float, y: float, look: str, style: Any) -> None:
    for line in lines:
        places = [a / x for a, _ in line.points], [b / y for _, b in line.points]
        is_mark = len(line.points) == 1
        axes.plot(*places, "D" if is_mark else "o-", ms=7 if is_mark else 4, **style)


def _rules(axes: Any, rules: list[Rule], x: float, y: float, look: str, style: Any) -> None:
    for rule in rules:
        draw, amount = (axes.axvline, rule.at / x) if rule.upright else (axes.axhline, rule.at / y)
        draw(amount, ls=_RULES.get(look, "-"), lw=1.4, **style)


_DRAW: dict[type[Shape], Any] = {
    Band: _bands,
    Bar: _bars,
    Steps: _steps,
    Line: _lines,
    Rule: _rules,
}


def _unit(axis: Axis) -> tuple[str, float]:
    """Returns an axis's name with the unit that suits its amounts, and how much that is."""
    if axis.unit == "bytes":
        unit, size = byte_unit(int(axis.high))
        return f"{axis.name} ({unit})", size
    if axis.unit == "seconds":
        units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
        unit, seconds = next((u for u in units if axis.high >= u[1]), units[-1])
        return f"{axis.name} ({unit})", seconds
    return axis.name, 1.0


def _plain_text(text: str) -> str:
    """Returns a text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")


def _matplotlib(module: str) -> Any:
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise MissingPackageError("matplotlib", "A picture", "plot") from error


@lru_cache
def _picture() -> type[Any]:
    """Returns a figure that a notebook shows without pyplot and its backends."""

    def png(figure: Any) -> bytes:
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=110)
        return written.getvalue()

    return type("Picture", (_matplotlib("figure").Figure,), {"_repr_png_": png})
