"""Makes the charts of plans, reports and searches.

Figures and pages draw the same charts (:mod:`keras_remat.reporting.chart`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from keras_remat.checks import check_among
from keras_remat.core.plan_record import PlanRecord
from keras_remat.core.schedule import Usage
from keras_remat.reporting.chart import (
    Axis,
    Band,
    Bar,
    Chart,
    Line,
    Rule,
    Shape,
    Steps,
    layer_colors,
)
from keras_remat.reporting.curves import Curve, compared, intervals, top_holders
from keras_remat.reporting.records import ReportRecord
from keras_remat.reporting.tables import readable
from keras_remat.units import format_bytes, format_rate

#: Most ops of a graph that is shown as the Checkmate paper's stage × op picture.
SMALL_GRAPH = 200
#: Most layers with a name, most values with a row, most points of a curve, and number of columns
#: that tell on hover which op runs and which layers hold most.
LAYERS, _ROWS, MAX_POINTS, _COLUMNS = 8, 48, 1000, 120
_NAME = 34
#: Top of an axis, over the highest amount.
_AIR = 1.08


def plan(planned: PlanRecord, kind: str, limit_bytes: int | None = None) -> Chart:
    """Returns a picture of a plan.

    Args:
        kind: a kind of ``Plan.plot``, except ``"overhead"``.
        limit_bytes: the memory limit, which is drawn instead of the budget where it is known.

    Raises:
        ValueError: another kind, or a plan without its problem.
    """
    check_among("kind", kind, ("memory", "holders", "schedule", "overhead"))
    if planned.problem is None:
        raise ValueError("the plan was saved without its problem, so there is no graph to draw")
    curves = compared(planned.problem, planned.solution.schedule)
    limit = limit_of(planned, limit_bytes)
    if kind == "memory":
        chart = memory(curves, limit, planned.measured)
    elif kind == "holders":
        chart = holders(curves, limit)
    else:
        is_small = len(planned.problem.graph.ops) <= SMALL_GRAPH
        chart = (stages if is_small else stays)(curves["plan"])
    return _named(chart, planned)


def report(told: ReportRecord, kind: str) -> tuple[Chart, ...]:
    """Returns the pictures of what a ``fit`` did, one above the other; see ``AutotuneReport.plot``.

    Raises:
        ValueError: another kind, or nothing to draw yet.
    """
    check_among("kind", kind, ("memory", "holders", "schedule", "speed"))
    if kind == "speed":
        return epochs(told)
    if told.plan is None:
        raise ValueError("no plan is in force: the plain step ran, so there is nothing to compare")
    return (plan(told.plan, kind, told.limit_bytes),)


def limit_of(planned: PlanRecord, limit_bytes: int | None) -> tuple[str, int]:
    """Returns name and bytes of the limit or budget that a plan is to stay under."""
    return ("budget", planned.budget_bytes) if limit_bytes is None else ("limit", limit_bytes)


def memory(
    curves: Mapping[str, Curve],
    limit: tuple[str, int] | None,
    measured: Usage | None = None,
    *,
    hover: bool = False,
) -> Chart:
    """Returns a chart of the bytes alive over the time of a step.

    Args:
        curves: name → curve. The name, ``"plain"`` or ``"plan"``, sets its look. The last curve
            also gives the phases and the texts on hover.
        limit: name and bytes of a dashed line.
        measured: the measured peak of the last curve's step.
        hover: whether columns tell on hover which op runs and which layers hold most.
    """
    last = list(curves.values())[-1]
    resident = last.problem.profile.resident_bytes
    shapes = [*_phases(last), Rule("resident", f"resident {format_bytes(resident)}", resident)]
    for name, curve in curves.items():
        if curve.live:
            label = f"{name}, peak {format_bytes(curve.peak_bytes)}"
            shapes.append(Steps(name, label, *curve.thinned(MAX_POINTS)))
    shapes += _limit(limit)
    if measured is not None and measured.peak_bytes:
        label = f"measured peak {format_bytes(measured.peak_bytes)}"
        point = last.starts_s[last.peak_position], float(measured.peak_bytes)
        shapes.append(Line("measured", label, (point,)))
    peaks = [curve.peak_bytes for curve in curves.values()]
    highest = [*peaks, limit[1] if limit else 0, measured.peak_bytes if measured else 0]
    return Chart(
        "Memory of one step",
        _seconds(curves.values()),
        _bytes("bytes alive", highest),
        [*shapes, *(_columns(last) if hover else ())],
    )


def holders(curves: Mapping[str, Curve], limit: tuple[str, int] | None) -> Chart:
    """Returns a chart with one bar per curve, stacked by the layers that hold its peak."""
    rows = top_holders(list(curves.values()), LAYERS)
    ends = [0] * len(rows)
    shapes: list[Shape] = []
    for layer, color in held_colors(rows).items():
        for at, nbytes in ((at, row[layer]) for at, row in enumerate(rows) if row[layer]):
            title = f"{readable(layer)}: {format_bytes(nbytes)}"
            bar = Bar(color, _short(layer), ends[at], at + 0.15, nbytes, 0.7, title=title)
            shapes.append(bar)
            ends[at] += nbytes
    peaks = {name: curve.peak_bytes for name, curve in curves.items()}
    ticks = {at + 0.5: f"{n}\n{format_bytes(peaks[n])}" for at, n in enumerate(curves)}
    return Chart(
        "Who holds the peak",
        _bytes("bytes at the peak", [*peaks.values(), limit[1] if limit else 0]),
        Axis("", len(rows), ticks=ticks, downward=True),
        [*shapes, *_limit(limit, upright=True)],
        aspect=0.12 + 0.11 * len(rows),
    )


def held_colors(rows: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Returns the colours of the layers that hold something of any peak."""
    return layer_colors(name for name in rows[0] if any(row[name] for row in rows))


def stays(curve: Curve) -> Chart:
    """Returns a chart of when the largest values are in memory, one row each."""
    found = intervals(curve, _ROWS)
    rows = {value: at for at, value in enumerate(dict.fromkeys(s.value_id for s in found))}
    shapes = _phases(curve)
    for stay in found:
        value, begin = curve.problem.graph.values[stay.value_id], curve.starts_s[stay.begin]
        look, label = "plan", "kept since its first run"
        title = f"{readable(value.name)}: {format_bytes(value.nbytes)}"
        if stay.again:
            look, label, title = "again", "computed again", f"{title}, computed again"
        width, bottom = curve.starts_s[stay.end + 1] - begin, rows[stay.value_id] + 0.1
        shapes.append(Bar(look, label, begin, bottom, width, 0.8, title=title))
    name = f"the {len(rows)} largest values"
    axis = Axis(name, max(1, len(rows)), ticks={}, downward=True)
    return Chart("What is in memory when", _seconds([curve]), axis, shapes)


def stages(curve: Curve) -> Chart:
    """Returns a chart of the Checkmate paper's R and S matrices (its figure 3), by the order."""
    order = curve.schedule.order
    stage_of: list[int] = []
    seen: set[int] = set()
    looks: dict[tuple[int, int], str] = {}
    for op in order:
        stage_of.append(len(seen))
        seen.add(op)
    for stay in intervals(curve):
        producer = curve.problem.graph.values[stay.value_id].producer
        for stage in range(stage_of[stay.begin], stage_of[stay.end] + 1):
            if producer is not None:
                looks[stage, producer] = "kept"
    runs: set[int] = set()
    for stage, op in zip(stage_of, order, strict=True):
        looks[stage, op] = "again" if op in runs else "plan"
        runs.add(op)
    labels = {"plan": "runs for the first time", "again": "runs again", "kept": "kept"}
    cells = sorted(looks, key=lambda cell: (list(labels).index(looks[cell]), cell))
    return Chart(
        "Schedule",
        Axis("op", len(curve.problem.graph.ops) - 0.5, -0.5),
        Axis(
            "stage: until the next op runs for the first time", len(seen) - 0.5, -0.5, downward=True
        ),
        [Bar(looks[at], labels[looks[at]], at[1] - 0.5, at[0] - 0.5) for at in cells],
        aspect=0.7,
    )


def overhead(planned: PlanRecord, points: Sequence[tuple[int, float]]) -> Chart:
    """Returns a chart of the overhead (a ratio) by budget in bytes, with the plan's own point."""
    own = planned.budget_bytes, 100 * planned.overhead
    quick = [(budget, 100 * ratio) for budget, ratio in points]
    budgets, ratios = zip(own, *quick, strict=True)
    chart = Chart(
        "What a smaller budget costs",
        Axis("budget", *_beside(budgets), unit="bytes"),
        Axis("added time (%)", _AIR * max(1e-3, *ratios), min(0.0, *ratios)),
        [Line("plain", "quick solver", quick), Line("plan", "this plan", [own])],
    )
    return _named(chart, planned)


def batch_sizes(
    points: Sequence[tuple[int, int, float, float]], limit_bytes: int
) -> tuple[Chart, ...]:
    """Returns charts of samples per second and of the peak, by batch size that a search tried.

    Args:
        points: (batch size, peak in bytes, samples per second, overhead), one per size; an
            overhead above 0 is recomputation.
    """
    rates: list[Shape] = []
    peaks: list[Shape] = []
    for look, label in (("plain", "without recomputation"), ("plan", "with recomputation")):
        chosen = sorted(p for p in points if (p[3] > 0) is (look == "plan"))
        rates.append(Line(look, label, [(p[0], p[2]) for p in chosen]))
        peaks.append(Line(look, label, [(p[0], p[1]) for p in chosen]))
    fastest = max([1e-9, *(p[2] for p in points)])
    return _above_each_other(
        "Batch sizes that were tried",
        Axis("batch size", *_beside([p[0] for p in points])),
        (Axis("samples/s (predicted)", _AIR * fastest), rates),
        (
            _bytes("peak", [limit_bytes, *(p[1] for p in points)]),
            [*peaks, *_limit(("limit", limit_bytes))],
        ),
    )


def epochs(told: ReportRecord) -> tuple[Chart, ...]:
    """Returns charts of every epoch's speed and peak, against the plain step and the limit.

    Raises:
        ValueError: no epoch has ended.
    """
    if not told.epochs:
        raise ValueError("no epoch has ended yet, so there is nothing to draw")
    plain, limit = told.baseline_samples_per_s, told.limit_bytes
    rates: list[Shape] = []
    peaks: list[Shape] = []
    for one in told.epochs:
        left, title = one.epoch - 0.35, f"epoch {one.epoch}: "
        for shapes, height, text in (
            (rates, one.samples_per_s, f"{format_rate(one.samples_per_s)} samples/s"),
            (peaks, one.peak_bytes, format_bytes(one.peak_bytes)),
        ):
            shapes.append(Bar("plan", "epoch", left, 0.0, 0.7, height, title=title + text))
    if plain is not None:
        label = f"plain step ({told.baseline_source}), {format_rate(plain)}/s"
        rates.append(Rule("plain", label, plain))
    numbers = [epoch.epoch for epoch in told.epochs]
    every = len(numbers) // 10 if len(numbers) > 20 else 1
    ticks = {float(number): str(number) for number in numbers[::every]}
    fastest = max([1e-9, plain or 0.0, *(one.samples_per_s for one in told.epochs)])
    highest = [limit or 0, *(one.peak_bytes for one in told.epochs)]
    return _above_each_other(
        "Speed and memory, epoch by epoch",
        Axis("epoch", numbers[-1] + 0.5, numbers[0] - 0.5, ticks=ticks),
        (Axis("samples/s", _AIR * fastest), rates),
        (
            _bytes(f"{told.peaks_source} peak", highest),
            [*peaks, *_limit(None if limit is None else ("limit", limit))],
        ),
    )


def _above_each_other(
    title: str, x: Axis, *charts: tuple[Axis, Sequence[Shape]]
) -> tuple[Chart, ...]:
    return tuple(Chart(title, x, y, shapes, aspect=0.28) for y, shapes in charts)


def _limit(limit: tuple[str, int] | None, *, upright: bool = False) -> list[Shape]:
    if limit is None:
        return []
    return [Rule("limit", f"{limit[0]} {format_bytes(limit[1])}", limit[1], upright)]


def _phases(curve: Curve) -> list[Shape]:
    """Returns the phases of a step as coloured bands."""
    at = curve.starts_s
    return [Band(phase, phase, at[begin], at[end]) for phase, begin, end in curve.bands]


def _columns(curve: Curve) -> list[Band]:
    """Returns invisible columns that tell on hover which op runs and which layers hold most."""
    columns, at, n = [], 0, len(curve.live)
    total_s = curve.starts_s[-1]
    while at < n:
        stop_s = curve.starts_s[at] + total_s / _COLUMNS
        end = next((k for k in range(at + 1, n + 1) if curve.starts_s[k] >= stop_s), n)
        top = max(range(at, end), key=curve.live.__getitem__)
        held = list(curve.holders(top).items())[:3]
        most = ", ".join(f"{readable(name)} {format_bytes(nbytes)}" for name, nbytes in held)
        op = readable(curve.problem.graph.ops[curve.schedule.order[top]].name)
        told = f"{format_bytes(curve.live[top])} while {op} runs; most: {most}"
        columns.append(Band("", "", curve.starts_s[at], curve.starts_s[end], title=told))
        at = end
    return columns


def _seconds(curves: Iterable[Curve]) -> Axis:
    longest_s = max(curve.starts_s[-1] for curve in curves)
    return Axis("time in the step", longest_s or 1.0, unit="seconds")


def _bytes(name: str, amounts: Iterable[int]) -> Axis:
    return Axis(name, _AIR * max([1, *amounts]), unit="bytes")


def _beside(amounts: Sequence[float]) -> tuple[float, float]:
    """Returns ends of an axis, the high one first, that leave space beside amounts."""
    low, high = min(amounts, default=0.0), max(amounts, default=1.0)
    space = 0.05 * (high - low) or 0.05 * (high or 1.0)
    return high + space, low - space


def _named(chart: Chart, planned: PlanRecord) -> Chart:
    """Returns a chart whose title has the name of the model."""
    return replace(chart, title=f"{chart.title}: {_short(planned.name)}") if planned.name else chart


def _short(name: str) -> str:
    text = readable(name)
    return text if len(text) <= _NAME else f"{text[:14]}…{text[-19:]}"
