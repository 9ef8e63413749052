"""Pictures of plans, reports and searches, by matplotlib, which is imported when one is drawn.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to no window: notebooks
show it, and ``figure.savefig("picture.svg")`` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from keras_remat.checks import check_among
from keras_remat.errors import MissingPackageError
from keras_remat.reporting import colors
from keras_remat.reporting.curves import Curve, compared, intervals, top_holders
from keras_remat.reporting.records import Planned, Reported
from keras_remat.reporting.tables import readable
from keras_remat.units import byte_unit, format_bytes

#: Graphs with up to so many ops are shown as the Checkmate paper's stage × op picture.
SMALL_GRAPH = 200
_LAYERS, _INTERVALS, _NAME, _POINTS = 8, 60, 34, 500
_LIMIT_LINE = {"color": colors.LIMIT, "ls": "--", "lw": 1.4}


def plan(planned: Planned, kind: str = "memory", limit_bytes: int | None = None) -> Any:
    """Returns a picture of a plan.

    Args:
        kind: one of ``Plan.plot`` but ``"overhead"``.
        limit_bytes: the memory limit, which is drawn instead of the budget where it is known.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ValueError: another kind, or a plan without its problem.
    """
    check_among("kind", kind, ("memory", "holders", "schedule", "overhead"))
    if planned.problem is None:
        raise ValueError("the plan was saved without its problem, so there is no graph to draw")
    curves = compared(planned.problem, planned.solution.schedule)
    if kind == "schedule":
        is_small = len(planned.problem.graph.ops) <= SMALL_GRAPH
        return (_stages if is_small else _stays)(planned, curves["plan"])
    limit = ("budget", planned.budget_bytes) if limit_bytes is None else ("limit", limit_bytes)
    picture = {"memory": _memory, "holders": _holders}[kind]
    return picture(planned, curves, limit)


def report(told: Reported, kind: str = "memory") -> Any:
    """Returns a picture of what a ``fit`` did; see ``AutotuneReport.plot``.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ValueError: another kind, or nothing to draw yet.
    """
    check_among("kind", kind, ("memory", "holders", "schedule", "speed"))
    if kind == "speed":
        return _speed(told)
    if told.plan is None:
        raise ValueError("no plan is in force: the plain step ran, so there is nothing to compare")
    return plan(told.plan, kind, told.limit_bytes)


def _memory(planned: Planned, curves: dict[str, Curve], limit: tuple[str, int]) -> Any:
    """Bytes over the time of a step: plain, plan, limit, and the measured peak."""
    figure, axes = _figure(8, 4)
    plain, curve = curves["plain"], curves["plan"]
    name, unit = byte_unit(max(plain.peak_bytes, limit[1]))
    scale, seconds = _time_unit(curve.starts_s[-1])
    _draw_bands(axes, curve, scale)
    for (drawn_name, drawn), color in zip(curves.items(), (colors.PLAIN, colors.PLAN), strict=True):
        label = f"{drawn_name}, peak {format_bytes(drawn.peak_bytes)}"
        starts_s, highest_bytes = drawn.thinned(_POINTS)
        edges = [start_s * scale for start_s in starts_s]
        heights = [nbytes / unit for nbytes in highest_bytes]
        axes.stairs(heights, edges, color=color, lw=1.4, label=label)
        axes.stairs(heights, edges, color=color, alpha=0.12, fill=True)
    axes.axhline(limit[1] / unit, label=f"{limit[0]} {format_bytes(limit[1])}", **_LIMIT_LINE)
    if planned.measured is not None:
        at = curve.starts_s[curve.peak_position] * scale
        peak = planned.measured.peak_bytes
        axes.plot(
            at, peak / unit, "D", color=colors.MEASURED, label=f"measured peak {format_bytes(peak)}"
        )
    resident = curve.problem.profile.resident_bytes
    axes.axhline(resident / unit, color=colors.OTHERS["resident"], lw=1, ls=":",
                 label=f"resident {format_bytes(resident)}")  # fmt: skip
    axes.set(xlabel=f"time in the step ({seconds})", ylabel=f"bytes alive ({name})")
    axes.set_xlim(0, max(plain.starts_s[-1], curve.starts_s[-1]) * scale)
    axes.set_ylim(0, None)
    return _with_legend(figure, axes, f"Memory of one step{_of(planned)}")


def _holders(planned: Planned, curves: dict[str, Curve], limit: tuple[str, int]) -> Any:
    """Draws who holds the peak, by layer: plain beside the plan."""
    figure, axes = _figure(8, 4.4)
    rows = top_holders(list(curves.values()), _LAYERS)
    color = colors.layer_colors(list(rows[0]))
    name, unit = byte_unit(max(curve.peak_bytes for curve in curves.values()))
    below = [0.0, 0.0]
    for layer in reversed(rows[0]):
        heights = [row[layer] / unit for row in rows]
        if any(heights):
            axes.bar((0, 1), heights, 0.62, below, color=color[layer], label=_short(layer))
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_xticks((0, 1), [f"{n}\n{format_bytes(c.peak_bytes)}" for n, c in curves.items()])
    axes.set_ylabel(f"bytes at the peak ({name})")
    axes.axhline(limit[1] / unit, label=limit[0], **_LIMIT_LINE)
    return _with_legend(figure, axes, f"Who holds the peak{_of(planned)}", reverse=True)


def _stages(planned: Planned, curve: Curve) -> Any:
    """Draws the R and S matrices of the Checkmate paper (its figure 3), read off the order."""
    figure, axes = _figure(6.4, 5.4)
    ops = curve.problem.graph.ops
    order = [curve.problem.source_of(op) for op in curve.schedule.order]
    stage_of: list[int] = []
    seen: set[int] = set()
    for op in order:
        stage_of.append(len(seen))
        seen.add(op)
    stages = len(seen)
    cells = [[0] * len(ops) for _ in range(stages)]
    for stay in intervals(curve):
        producer = curve.problem.graph.values[stay.value_id].producer
        for stage in range(stage_of[stay.begin], stage_of[stay.end] + 1):
            if producer is not None:
                cells[stage][producer] = 1
    runs: dict[int, int] = {}
    for at, op in enumerate(order):
        runs[op] = runs.get(op, 0) + 1
        cells[stage_of[at]][op] = 2 if runs[op] == 1 else 3
    palette = _matplotlib("colors").ListedColormap(
        ["#ffffff00", colors.KEPT, colors.PLAN, colors.RECOMPUTED]
    )
    axes.imshow(cells, cmap=palette, vmin=0, vmax=3, aspect="auto", interpolation="nearest")
    axes.set(xlabel="op", ylabel="stage: until the next op runs for the first time")
    for color, label in (
        (colors.PLAN, "runs for the first time"),
        (colors.RECOMPUTED, "runs again"),
        (colors.KEPT, "kept"),
    ):
        axes.bar(0, 0, color=color, label=label)
    axes.set_xlim(-0.5, len(ops) - 0.5)
    axes.set_ylim(stages - 0.5, -0.5)
    return _with_legend(figure, axes, f"Schedule{_of(planned)}")


def _stays(planned: Planned, curve: Curve) -> Any:
    """Stays in memory of the largest values, one row each."""
    stays = intervals(curve, _INTERVALS)
    rows = {value: at for at, value in enumerate(dict.fromkeys(s.value_id for s in stays))}
    figure, axes = _figure(8, 5)
    scale, seconds = _time_unit(curve.starts_s[-1])
    _draw_bands(axes, curve, scale)
    for again, color, label in (
        (False, colors.PLAN, "kept since its first run"),
        (True, colors.RECOMPUTED, "computed again"),
    ):
        chosen = [s for s in stays if s.again is again]
        axes.barh(
            [rows[s.value_id] for s in chosen],
            [(curve.starts_s[s.end + 1] - curve.starts_s[s.begin]) * scale for s in chosen],
            left=[curve.starts_s[s.begin] * scale for s in chosen],
            height=0.8, color=color, label=label,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlim(0, curve.starts_s[-1] * scale)
    axes.set(xlabel=f"time in the step ({seconds})", ylabel=f"the {len(rows)} largest values")
    return _with_legend(figure, axes, f"What is in memory when{_of(planned)}")


def overhead(planned: Planned, points: Sequence[tuple[int, float]]) -> Any:
    """Draws the overhead (a ratio) against the budget in bytes, with the plan's own point."""
    figure, axes = _figure(7, 4)
    name, unit = byte_unit(max([planned.budget_bytes, *(budget for budget, _ in points)]))
    axes.plot(
        [budget / unit for budget, _ in points], [100 * ratio for _, ratio in points],
        "o-", color=colors.PLAIN, ms=4, label="quick solver",
    )  # fmt: skip
    ratio = planned.overhead
    axes.plot(
        planned.budget_bytes / unit, 100 * ratio, "D", color=colors.PLAN, ms=8, label="this plan"
    )
    axes.set(xlabel=f"budget ({name})", ylabel="added time (%)")
    axes.set_ylim(min(0.0, 100 * ratio), None)
    return _with_legend(figure, axes, f"What a smaller budget costs{_of(planned)}")


def batch_sizes(points: Sequence[tuple[int, int, float, float]], limit_bytes: int) -> Any:
    """Samples per second and peak of the batch sizes that a search tried.

    Args:
        points: (batch size, peak in bytes, samples per second, overhead), one per size; an
            overhead above 0 is recomputation.
    """
    figure, (above, below) = _figure(8, 4.6, rows=2)
    name, unit = byte_unit(max([limit_bytes, *(peak for _, peak, _, _ in points)]))
    for recomputes, color, label in (
        (False, colors.PLAIN, "without recomputation"),
        (True, colors.PLAN, "with recomputation"),
    ):
        chosen = sorted(p for p in points if (p[3] > 0) is recomputes)
        sizes = [p[0] for p in chosen]
        above.plot(sizes, [p[2] for p in chosen], "o-", color=color, label=label)
        below.plot(sizes, [p[1] / unit for p in chosen], "o-", color=color)
    _draw_limit(above, below, limit_bytes, unit)
    above.set(ylabel="samples/s (predicted)")
    above.set_ylim(0, None)
    below.set(xlabel="batch size", ylabel=f"peak ({name})")
    below.set_ylim(0, None)
    return _with_legend(figure, above, "Batch sizes that were tried")


def _speed(told: Reported) -> Any:
    """Draws speed and peak of every epoch, against the plain step and the limit."""
    if not told.epochs:
        raise ValueError("no epoch has ended yet, so there is nothing to draw")
    figure, (above, below) = _figure(8, 4.6, rows=2)
    epochs = [epoch.epoch for epoch in told.epochs]
    above.bar(epochs, [e.samples_per_s for e in told.epochs], 0.6, color=colors.PLAN, label="epoch")
    if told.baseline_samples_per_s is not None:
        above.axhline(
            told.baseline_samples_per_s, color=colors.PLAIN, lw=1.6,
            label=f"plain step ({told.baseline_source})",
        )  # fmt: skip
    name, unit = byte_unit(max(e.peak_bytes for e in told.epochs))
    below.bar(epochs, [e.peak_bytes / unit for e in told.epochs], 0.6, color=colors.PLAN)
    if told.limit_bytes is not None:
        _draw_limit(above, below, told.limit_bytes, unit)
    above.set(ylabel="samples/s")
    below.set(xlabel="epoch", ylabel=f"{told.peaks_source} peak ({name})")
    below.set_xticks(epochs if len(epochs) <= 20 else epochs[:: len(epochs) // 10])
    return _with_legend(figure, above, "Speed and memory, epoch by epoch")


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


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    figure = _picture()(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True)


def _draw_bands(axes: Any, curve: Curve, scale: float) -> None:
    """Draws the phases as coloured ground."""
    for phase, begin, end in curve.bands:
        left, right = curve.starts_s[begin] * scale, curve.starts_s[end] * scale
        axes.axvspan(left, right, color=colors.PHASES[phase], alpha=0.12, lw=0, label=phase)


def _draw_limit(above: Any, below: Any, limit_bytes: int, unit: int) -> None:
    """Draws the limit in the picture of peaks, and names it in the one that has the legend."""
    below.axhline(limit_bytes / unit, **_LIMIT_LINE)
    above.plot([], [], label=f"limit {format_bytes(limit_bytes)}", **_LIMIT_LINE)


def _with_legend(figure: Any, axes: Any, title: str, *, reverse: bool = False) -> Any:
    """Finishes a picture: title, grid, and a legend beside it that hides nothing."""
    axes.set_title(title, loc="left", fontsize=11)
    for each in figure.axes:
        each.grid(axis="y", alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5, reverse=reverse)
    return figure


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _of(planned: Planned) -> str:
    return f": {_short(planned.name)}" if planned.name else ""


def _short(name: str) -> str:
    text = readable(name).replace("$", r"\$")
    return text if len(text) <= _NAME else f"{text[:14]}…{text[-19:]}"
