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
from keras_remat.reporting.chart import COLORS, Band, Bar, Chart, Line, Rule, Shape, Steps

#: Width of a figure in inches, a label that matplotlib leaves out of a legend, and look → style of
#: lines that are not solid.
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
    places = drawn.subplots(len(charts), 1, squeeze=False)[:, 0]
    for axes, chart in zip(places, charts, strict=True):
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
    together: dict[tuple[type[Shape], str, str], list[Any]] = {}
    for shape in chart.shapes:
        key = (type(shape), shape.look, "" if shape.label in named else shape.label)
        together.setdefault(key, []).append(shape)
    for (kind, look, label), shapes in together.items():
        style = {"color": COLORS.get(look, look), "label": _plain_text(label) or _UNNAMED}
        if kind is Bar:
            places = zip(*((b.left, b.height, b.width, b.bottom) for b in shapes), strict=True)
            axes.bar(*places, align="edge", **style)
            continue
        for shape in shapes:
            _draw_one(axes, shape, style)
            style["label"] = _UNNAMED
    for axis, side in ((chart.x, "x"), (chart.y, "y")):
        ends = axis.low, axis.high
        getattr(axes, f"set_{side}lim")(*(ends[::-1] if axis.downward else ends))
        getattr(axes, f"set_{side}label")(axis.name)
        getattr(axes, f"set_{side}ticks")(list(axis.marked), list(axis.marked.values()))


def _draw_one(axes: Any, shape: Shape, style: dict[str, Any]) -> None:
    if isinstance(shape, Band):
        axes.axvspan(shape.begin, shape.end, alpha=0.12, lw=0, **style)
    elif isinstance(shape, Steps):
        axes.stairs(shape.heights, shape.edges, lw=1.4, **style)
        axes.stairs(shape.heights, shape.edges, color=style["color"], alpha=0.12, fill=True)
    elif isinstance(shape, Line):
        look = {"marker": "D", "ms": 7} if len(shape.points) == 1 else {"marker": "o", "ms": 4}
        axes.plot([x for x, _ in shape.points], [y for _, y in shape.points], **look, **style)
    elif isinstance(shape, Rule):
        draw = axes.axvline if shape.upright else axes.axhline
        draw(shape.at, ls=_RULES.get(shape.look, "-"), lw=1.4, **style)


def _plain_text(text: str) -> str:
    """Returns a text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


@lru_cache
def _picture() -> type[Any]:
    """Returns a figure that a notebook shows without pyplot and its backends."""

    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError("matplotlib", "A picture", "plot") from error

    def png(figure: Any) -> bytes:
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=110)
        return written.getvalue()

    return type("Picture", (figures.Figure,), {"_repr_png_": png})
